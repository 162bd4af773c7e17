"""What a cache does in each layer: to keys and values as stored, and to scores and outputs as consumed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kivi_jax import cache as kv
from kivi_jax.attention import attend, attend_prompt
from kivi_jax.config import KiviConfig, quantized_length
from kivi_jax.hadamard import hadamard
from kivi_jax.kernels import reference
from kivi_jax.models import Llama
from kivi_jax.models.rope import Rotary

EXACT = KiviConfig(key_bits=16, value_bits=16)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Captured:
    """Queries, keys and values of each layer of an unquantized run, before the rotary embedding.

    Attributes:
        query: a tuple of `[B, Hq, L, D]`, one a layer.
        key, value: likewise `[B, H, L, D]`.
        windows: the sliding window of each layer, None where there is none; static.
        rotary: static.
    """

    query: tuple[jax.Array, ...]
    key: tuple[jax.Array, ...]
    value: tuple[jax.Array, ...]
    windows: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})
    rotary: Rotary = dataclasses.field(metadata={"static": True})

    def embedded_keys(self, layer: int) -> jax.Array:
        """The keys of a layer with their rotary embedding, as attention meets them."""
        return self.rotary(self.key[layer], _positions(self.key[layer]))


@dataclasses.dataclass(frozen=True)
class LayerErrors:
    """Relative errors of each layer, the norm of a difference over the norm of what it should be, float64 `[layers]`.

    Attributes:
        keys, values: of the quantized tokens, as stored.
        scores: of the queries with the quantized tokens, before the softmax.
        weights: after it, over all tokens.
        output: of attention, as the cache's own op gives it.
    """

    keys: np.ndarray
    values: np.ndarray
    scores: np.ndarray
    weights: np.ndarray
    output: np.ndarray


def capture(params: Llama, tokens) -> Captured:
    """Runs tokens int `[B, L]` through the unquantized model and keeps what every layer's attention was given.

    Raises:
        ValueError: the model lies on a mesh.
    """
    if params.mesh is not None:
        raise ValueError(f"params must lie on one device to be measured layer by layer; got {params.mesh.size}.")
    graphdef, weights = nnx.split(params)
    query, key, value = _capture(graphdef, weights, jnp.asarray(tokens, jnp.int32))
    windows = tuple(params.config.window(n) for n in range(params.config.num_hidden_layers))
    return Captured(query, key, value, windows, params.rotary)


def layer_errors(captured: Captured, config: KiviConfig, *, queries: int = 64) -> LayerErrors:
    """The errors that a cache makes in each layer, if what comes into the layer is exact.

    Args:
        captured: keys and values, which go into a cache at once.
        config: of that cache.
        queries: how many of the last tokens' queries scores, weights and outputs are taken of.

    Raises:
        ValueError: the config quantizes nothing of so few tokens.
    """
    length = captured.key[0].shape[2]
    if quantized_length(length, config) == 0:
        raise ValueError(f"the text must be longer for this config to quantize a block of it; got {length} tokens.")
    rows = [
        _errors(*layer, captured.rotary, window, config.of_layer(n), min(queries, length))
        for n, (*layer, window) in enumerate(
            zip(captured.query, captured.key, captured.value, captured.windows, strict=True)
        )
    ]
    return LayerErrors(*np.asarray(rows, np.float64).T)


def attention_weights(captured: Captured, layer: int, *, queries: int = 64) -> jax.Array:
    """Exact attention weights of a layer's last queries, float32 `[B, Hq, queries, L]`."""
    query, key = captured.query[layer], captured.key[layer]
    return _weights(query[:, :, -queries:], key, captured.rotary, captured.windows[layer])


def _positions(x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(x.shape[2], dtype=jnp.int32), (x.shape[0], x.shape[2]))


@functools.partial(jax.jit, static_argnames="graphdef")
def _capture(graphdef, weights, tokens):
    model = nnx.merge(graphdef, weights)
    rotary = model.rotary
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

    def attention(query, key, value, _, sliding_window):
        embedded = rotary(query, positions), rotary(key, positions)
        return attend_prompt(*embedded, value, sliding_window=sliding_window), (query, key, value)

    _, layers = model(tokens, positions, (None,) * model.config.num_hidden_layers, attention, rotated=False)
    return tuple(zip(*layers, strict=True))


@functools.partial(jax.jit, static_argnames=("rotary", "window"))
def _weights(query, key, rotary, window):
    key_positions = _positions(key)
    query_positions = key_positions[:, -query.shape[2] :]
    return _softmax(rotary(query, query_positions), rotary(key, key_positions), query_positions, key_positions, window)


def _scores(query, key):
    batch, heads, _, channels = key.shape
    grouped = query.astype(jnp.float32).reshape(batch, heads, -1, channels)
    scores = jnp.einsum("bhmd,bhnd->bhmn", grouped, key.astype(jnp.float32), precision="highest") * channels**-0.5
    return scores.reshape(batch, query.shape[1], query.shape[2], -1)


def _softmax(query, key, query_positions, key_positions, window):
    distance = query_positions[:, None, :, None] - key_positions[:, None, None, :]
    seen = (key_positions >= 0)[:, None, None] & (distance >= 0)
    if window is not None:
        seen &= distance < window
    return jax.nn.softmax(jnp.where(seen, _scores(query, key), -1e30), axis=-1)


@functools.partial(jax.jit, static_argnames=("rotary", "window", "config", "queries"))
def _errors(query, key, value, rotary, window, config, queries):
    batch, heads, length, channels = key.shape
    query = query[:, :, -queries:]
    counts = jnp.full(batch, length, jnp.int32)
    positions = _positions(key)
    query_positions = positions[:, -queries:]
    embedded = rotary(query, query_positions), rotary(key, positions)

    def filled(config):
        cache = kv.init(
            config,
            num_layers=1,
            batch_size=batch,
            num_kv_heads=heads,
            head_dim=channels,
            max_length=length,
            dtype=key.dtype,
        )
        entering = key if config.pre_rope else embedded[1]
        return kv.prefill_layer(cache.layers[0], entering, value, counts)

    layer, quantized = filled(config), quantized_length(counts, config)
    held_key, held_value, held_positions = reference.tokens(
        layer, counts, quantized, rotary=rotary if config.pre_rope else None
    )
    if config.rotate:
        held_key, held_value = hadamard(held_key), hadamard(held_value)
    # In the order of the text.
    order = jnp.argsort(jnp.where(held_positions < 0, 2**30, held_positions), axis=1)[:, :length]
    held_key, held_value = (jnp.take_along_axis(x, order[:, None, :, None], axis=2) for x in (held_key, held_value))

    span = slice(config.sink_length, config.sink_length + quantized_length(length, config))
    exact_key, exact_value = embedded[1].astype(jnp.float32), value.astype(jnp.float32)
    scores = lambda x: _scores(embedded[0], x[:, :, span])
    weights = lambda x: _softmax(embedded[0], x, query_positions, positions, window)

    def output(layer, quantized, query, **arguments):
        return attend(query, layer, counts, quantized, sliding_window=window, **arguments)

    with_cache = (
        output(layer, quantized, query, rotary=rotary) if config.pre_rope else output(layer, quantized, embedded[0])
    )
    without = output(filled(EXACT), quantized_length(counts, EXACT), embedded[0])
    return jnp.stack(
        [
            _relative(held_key[:, :, span], exact_key[:, :, span]),
            _relative(held_value[:, :, span], exact_value[:, :, span]),
            _relative(scores(held_key), scores(exact_key)),
            _relative(weights(held_key), weights(exact_key)),
            _relative(with_cache, without),
        ]
    )


def _relative(got: jax.Array, want: jax.Array) -> jax.Array:
    wide = want.astype(jnp.float32)
    return jnp.linalg.norm((got.astype(jnp.float32) - wide).ravel()) / jnp.linalg.norm(wide.ravel())
