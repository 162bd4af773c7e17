"""The decoder over its quantized cache: a prompt, a further piece, one token of each sequence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kivi_jax import cache as kv
from kivi_jax.attention import attend, attend_prompt, flush_layer, flush_skips
from kivi_jax.cache import KVCache
from kivi_jax.config import KiviConfig
from kivi_jax.models import Llama
from kivi_jax.sharding import DATA, check_divides, check_same_place, constrained, per_device


def init_cache(model: Llama, config: KiviConfig, batch_size: int, max_length: int, dtype=None) -> KVCache:
    """An empty cache for `model`; see `cache.init`. `dtype` None: that of the model's parameters.

    It lies on the model's mesh.
    """
    shape = model.config
    if config.pre_rope and shape.rope_scaling is not None and shape.rope_scaling.rope_type == "dynamic":
        raise ValueError(
            "pre_rope must be False for a model with dynamic RoPE scaling, whose frequencies change as a text grows; "
            "got True."
        )
    check_divides("the number of sequences", batch_size, model.mesh, DATA)
    make = lambda: kv.init(
        config,
        num_layers=shape.num_hidden_layers,
        batch_size=batch_size,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_length=max_length,
        dtype=model.embed_tokens.embedding.dtype if dtype is None else dtype,
    )
    return make() if model.mesh is None else jax.jit(lambda: constrained(make(), model.mesh))()


def check_cache(model: Llama, cache: KVCache) -> None:
    """Raises a ValueError naming what differs unless `cache` is one that `init_cache` could make for `model`."""
    shape, layer = model.config, cache.layers[0].key_window
    for name, want, got in (
        ("num_layers", shape.num_hidden_layers, len(cache.layers)),
        ("num_kv_heads", shape.num_key_value_heads, layer.shape[1]),
        ("head_dim", shape.head_dim, layer.shape[3]),
        ("dtype", str(model.embed_tokens.embedding.dtype), str(layer.dtype)),
    ):
        if want != got:
            raise ValueError(f"the cache must have the model's {name} {want}; got {got}.")
    check_same_place(model.mesh, cache)


def prefill(
    model: Llama, tokens: jax.Array, counts: jax.Array, cache: KVCache, *, implementation: str | None = None
) -> tuple[jax.Array, KVCache]:
    """Runs prompts that start their sequences: exact attention, then the schedule's blocks are quantized.

    Args:
        tokens: int32 `[B, L]`, L at most the cache's capacity.
        counts: int32 `[B]`, the tokens of each prompt, the first ones of its row.
        cache: empty.
        implementation: as for `attend`.

    Returns:
        The hidden states `[B, L, hidden_size]`, unspecified past `counts`, and the cache with the prompts in it.
    """
    tokens = _divided(model, tokens)
    positions = _positions(jnp.zeros_like(counts), tokens.shape[1], counts)
    rotary = _cache_rotary(model, cache)

    def attention(query, key, value, layer, sliding_window):
        def local(query, key, value, layer, counts, positions):
            embed = (lambda x: x) if rotary is None else (lambda x: rotary(x, positions))
            output = attend_prompt(
                embed(query), embed(key), value, counts, sliding_window=sliding_window, implementation=implementation
            )
            # Before the next layer begins, this one's keys and values are quantized, and no longer needed.
            return jax.lax.optimization_barrier((output, kv.prefill_layer(layer, key, value, counts)))

        return per_device(local, model.mesh, (query, layer))(query, key, value, layer, counts, positions)

    hidden, layers = model(tokens, positions, cache.layers, attention, rotated=rotary is None)
    return hidden, kv.advance(cache, layers, counts)


def extend(
    model: Llama, tokens: jax.Array, counts: jax.Array, cache: KVCache, *, implementation: str | None = None
) -> tuple[jax.Array, KVCache]:
    """Runs a further piece of each sequence, which attends to the cache and, exactly, to itself, and then enters it.

    Arguments and returns are those of `prefill`, for a cache that holds what comes before. A sequence that the piece
    would take past the capacity is left as it was, which its unchanged length tells.
    """
    tokens = _divided(model, tokens)
    counts = kv.fitting_counts(cache, tokens.shape[1], counts)
    positions = _positions(cache.length, tokens.shape[1], counts)
    rotary = _cache_rotary(model, cache)

    def attention(query, key, value, layer, sliding_window):
        def local(query, key, value, layer, length, quantized, counts):
            output = attend(
                query,
                layer,
                length,
                quantized,
                new_key=key,
                new_value=value,
                counts=counts,
                sliding_window=sliding_window,
                rotary=rotary,
                implementation=implementation,
            )
            return jax.lax.optimization_barrier(
                (output, kv.append_layer(layer, key, value, length, quantized, counts))  # as in `prefill`
            )

        args = (query, key, value, layer, cache.length, cache.quantized, counts)
        return per_device(local, model.mesh, (query, layer))(*args)

    hidden, layers = model(tokens, positions, cache.layers, attention, rotated=rotary is None)
    return hidden, kv.advance(cache, layers, counts)


def decode_step(
    model: Llama, tokens: jax.Array, active: jax.Array, cache: KVCache, *, implementation: str | None = None
) -> tuple[jax.Array, KVCache]:
    """Runs one token of each sequence.

    Args:
        tokens: int32 `[B]`.
        active: bool `[B]`; a sequence that is not active, or is full, keeps its cache as it was.
        cache: donated by the caller, it is updated in place.
        implementation: as for `attend`.

    Returns:
        The hidden states `[B, hidden_size]`, unspecified where not active, and the cache with the tokens in it.
    """
    length = cache.length
    tokens, active = _divided(model, tokens), active & (length < cache.capacity)
    rotary = _cache_rotary(model, cache)

    def attention(query, key, value, layer, sliding_window):
        def local(query, key, value, layer, length, quantized):
            layer = kv.write_token(layer, key, value, length)
            output = attend(
                query,
                layer,
                length + 1,
                quantized,
                sliding_window=sliding_window,
                rotary=rotary,
                implementation=implementation,
            )
            return output, layer

        return per_device(local, model.mesh, (query, layer))(query, key, value, layer, length, cache.quantized)

    hidden, layers = model(tokens[:, None], length[:, None], cache.layers, attention, rotated=rotary is None)
    cache = dataclasses.replace(cache, layers=layers, length=length + active.astype(jnp.int32))
    flush_one = functools.partial(flush_layer, implementation=implementation)
    kernel = lambda layer, *args: per_device(flush_one, model.mesh, layer)(layer, *args)
    conditional = not flush_skips(implementation)
    return hidden[:, 0], kv.flush(cache, after=hidden, kernel=kernel, conditional=conditional)


def _divided(model: Llama, tokens: jax.Array) -> jax.Array:
    """The tokens of each sequence where its cache is."""
    check_divides("the number of sequences", tokens.shape[0], model.mesh, DATA)
    return constrained(tokens, model.mesh)


def _cache_rotary(model: Llama, cache: KVCache):
    """The model's rotary embedding if attention is to apply it, as it must where keys are held without it."""
    return model.rotary if cache.config.pre_rope else None


def _positions(length: jax.Array, num_tokens: int, counts: jax.Array) -> jax.Array:
    """int32 `[B, L]` from `length [B]` on. Padding stays at the last valid position: rotary frequencies that depend on
    how long a sequence is must not count it."""
    index = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    return length[:, None] + jnp.minimum(index, jnp.maximum(counts - 1, 0)[:, None])
