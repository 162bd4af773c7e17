"""The quantized key/value cache: a pytree, and pure functions that fill it.

Positions and rows. The token at sequence position `p` of a cache with `S` sinks and a residual of `R` tokens lives

- in window slot `p` if `p < S`, for good;
- in window slot `S + (p - S) % (R + 128)` while it is not quantized (the ring is longer by the config's `rewind`);
- in row `p - S` of the codes, scales and zeros once it is.

`quantized` counts the tokens of a sequence that are in rows, whole blocks of 128 from position S on; it is state,
since it lags behind the schedule between a write and its flush. Everything else in rows and slots is dead:
unspecified, maybe NaN.

Axes: B batch, H KV heads, T tokens of capacity, W window slots, L new tokens, D head_dim, g group size.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kivi_jax import packing
from kivi_jax.config import BLOCK, KiviConfig, quantized_length
from kivi_jax.hadamard import hadamard
from kivi_jax.inplace import write_slices
from kivi_jax.quantize import normalize, quantize_per_channel, quantize_per_token, token_norm
from kivi_jax.rewind import crop as crop
from kivi_jax.sequences import fork as fork
from kivi_jax.sequences import gather as gather
from kivi_jax.slots import first_retained, newest_positions, window_slot
from kivi_jax.slots import window_positions as window_positions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """The keys and values of one layer.

    - A 16-bit side has its codes in the model's dtype, `[B, H, T, D]`, and None for scale and zero.
    - T is a multiple of 128; row 0 is sequence position `sink_length`.
    - With `rotate`, codes and window hold keys and values times the Hadamard matrix; with `pre_rope`, keys before the
      rotary embedding.

    Attributes:
        key_codes: uint8 `[B, H, T * key_bits / 8, D]`, packed as `packing` says.
        key_scale, key_zero: the config's `scale_dtype`, `[B, H, T/g, D]` with g = key_group_size.
        value_codes: uint8 `[B, H, T * value_bits / 8, D]`.
        value_scale, value_zero: likewise `[B, H, D/g, T]` with g = value_group_size. (A side whose axis is not the
            default has the shape of the other: `[.., T/g, D]` per channel, `[.., D/g, T]` per token.)
        key_window, value_window: model dtype `[B, H, W, D]`.
        key_norm: bfloat16 `[B, H, T]`, what the dequantized key of a row is multiplied by; None without the option.
        config: static, of this layer: its bits are ints.
    """

    key_codes: jax.Array
    key_scale: jax.Array | None
    key_zero: jax.Array | None
    value_codes: jax.Array
    value_scale: jax.Array | None
    value_zero: jax.Array | None
    key_window: jax.Array
    value_window: jax.Array
    key_norm: jax.Array | None
    config: KiviConfig = dataclasses.field(metadata={"static": True})

    @property
    def capacity(self) -> int:
        """T: tokens a sequence can have, a multiple of 128."""
        return self.key_codes.shape[2] * BLOCK // _rows_per_block(self.config.key_bits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The cache of a whole model, a batch of sequences of different lengths.

    Attributes:
        layers: one `LayerCache` a layer.
        length: int32 `[B]`, tokens that each sequence holds.
        quantized: int32 `[B]`, how many of them are quantized.
        config: static.
        retained: int32 `[B]`, the first row from which on the ring still holds every token; None where the config
            has no `rewind`.
    """

    layers: tuple[LayerCache, ...]
    length: jax.Array
    quantized: jax.Array
    config: KiviConfig = dataclasses.field(metadata={"static": True})
    retained: jax.Array | None = None

    @property
    def batch_size(self) -> int:
        return self.length.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens a sequence can have, a multiple of 128."""
        return self.layers[0].capacity

    @property
    def nbytes(self) -> int:
        """Bytes of every array of the cache; works on shapes (`jax.eval_shape`) too."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def bits_per_element(self) -> float:
        """Stored bits for each number of a quantized token: codes, scales, zeros and norms."""
        norm = 8 / self.layers[0].key_window.shape[3]  # 16 bits for the 2 D numbers of a token
        bits = [x.config.bits_per_element + norm * (x.key_norm is not None) for x in self.layers]
        return sum(bits) / len(bits)


def init(
    config: KiviConfig,
    *,
    num_layers: int,
    batch_size: int,
    num_kv_heads: int,
    head_dim: int,
    max_length: int,
    dtype=jnp.bfloat16,
) -> KVCache:
    """An empty cache for sequences of up to `max_length` tokens, rounded up to a multiple of 128.

    Raises:
        ValueError: `head_dim` does not split into the config's groups or cannot be rotated, the config is for another
            number of layers, or a size is not positive.
    """
    config.check_head_dim(head_dim)
    if config.num_layers not in (None, num_layers):
        raise ValueError(f"key_bits and value_bits must be for {num_layers} layers; got {config.num_layers} of them.")
    sizes = dict(
        num_layers=num_layers,
        batch_size=batch_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_length=max_length,
    )
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be 1 or more; got {size}.")
    tokens = -(-max_length // BLOCK) * BLOCK
    lead = (batch_size, num_kv_heads)

    def side(bits, axis, group_size):
        if bits == 16:
            return jnp.zeros((*lead, tokens, head_dim), dtype), None, None
        codes = jnp.zeros((*lead, tokens * bits // 8, head_dim), jnp.uint8)
        groups = (tokens // group_size, head_dim) if axis == "channel" else (head_dim // group_size, tokens)
        scale = lambda: jnp.zeros((*lead, *groups), config.scale_dtype)
        return codes, scale(), scale()

    def layer(config):
        window = (*lead, config.window_length, head_dim)
        return LayerCache(
            *side(config.key_bits, config.key_axis, config.key_group_size),
            *side(config.value_bits, config.value_axis, config.value_group_size),
            key_window=jnp.zeros(window, dtype),
            value_window=jnp.zeros(window, dtype),
            key_norm=jnp.zeros((*lead, tokens), jnp.bfloat16) if config.key_norm else None,
            config=config,
        )

    return KVCache(
        layers=tuple(layer(config.of_layer(n)) for n in range(num_layers)),
        length=jnp.zeros(batch_size, jnp.int32),
        quantized=jnp.zeros(batch_size, jnp.int32),
        config=config,
        retained=jnp.zeros(batch_size, jnp.int32) if config.rewind else None,
    )


def append(
    cache: KVCache,
    keys: Sequence[jax.Array] | jax.Array,
    values: Sequence[jax.Array] | jax.Array,
    counts: jax.Array | None = None,
) -> KVCache:
    """Appends up to L tokens to each sequence and flushes what the schedule says.

    The result is bit-identical however a sequence is cut into pieces. Under jit, a sequence that the piece would take
    past the capacity is left as it was, which its unchanged `length` tells.

    Args:
        keys, values: `[B, H, L, D]` in the window's dtype, one of each a layer.
        counts: int32 `[B]`, the valid tokens of each row, the first ones; None: all L.

    Raises:
        ValueError: shapes or dtypes differ from the cache's, or (outside jit) the capacity is exceeded.
    """
    if len(keys) != len(cache.layers) or len(values) != len(cache.layers):
        raise ValueError(f"expected {len(cache.layers)} layers of keys and values; got {len(keys)} and {len(values)}.")
    for key, value, layer in zip(keys, values, cache.layers, strict=True):
        check_piece(key, value, layer)
    counts = fitting_counts(cache, keys[0].shape[2], counts)
    layers = tuple(
        append_layer(layer, key, value, cache.length, cache.quantized, counts)
        for layer, key, value in zip(cache.layers, keys, values, strict=True)
    )
    return advance(cache, layers, counts)


def advance(cache: KVCache, layers: tuple[LayerCache, ...], counts: jax.Array) -> KVCache:
    """The cache after its layers took in and flushed `counts` int32 `[B]` further tokens."""
    length = cache.length + counts
    quantized = jnp.maximum(cache.quantized, quantized_length(length, cache.config))
    cache = dataclasses.replace(cache, layers=layers, length=length, quantized=quantized)
    return dataclasses.replace(cache, retained=_retained(cache))


def flush(
    cache: KVCache, after: jax.Array | None = None, kernel: Callable | None = None, conditional: bool = True
) -> KVCache:
    """Quantizes the block of every sequence whose oldest unquantized block has left the residual window.

    For the step-by-step path: after `write_token` in each layer, and with `length` already counting that token. Copies
    nothing and computes nothing where no sequence is due.

    Args:
        cache: as the step left it.
        after: an array that comes of reading the rows, such as the hidden states. XLA copies rows that it may have to
            read after they are written; a predicate that depends on `after` lets it see that it does not.
        kernel: does what `flush_layer` does, and is used in its place.
        conditional: False calls the kernel in every step, for one that costs next to nothing where no sequence is due.
            XLA for TPUs may copy the rows that pass through a conditional.
    """
    flush_one = kernel or flush_layer
    quantized = jnp.maximum(cache.quantized, quantized_length(cache.length, cache.config))

    def flush_all(layers):
        done = []
        for layer in layers:
            if done:  # one layer after the other: XLA otherwise holds the blocks of all of them at once
                done[-1], layer = lax.optimization_barrier((done[-1], layer))
            done.append(flush_one(layer, cache.length, cache.quantized))
        return tuple(done)

    if conditional:
        due = jnp.any(quantized > cache.quantized) | (False if after is None else jnp.isnan(after).any())
        layers = lax.cond(due, flush_all, lambda layers: layers, cache.layers)
    else:
        layers = flush_all(cache.layers)
    return dataclasses.replace(cache, layers=layers, quantized=quantized, retained=_retained(cache))


def _retained(cache: KVCache) -> jax.Array | None:
    """The cache's `retained`, now that it has grown to its `length`."""
    if cache.retained is None:
        return None
    return jnp.maximum(cache.retained, first_retained(cache.config, cache.length))


def fitting_counts(cache: KVCache, new_tokens: int, counts: jax.Array | None) -> jax.Array:
    """`counts` (None: all `new_tokens`), zero for each sequence that they would take past the capacity.

    Raises:
        ValueError: outside jit, where the lengths are known, instead of leaving a sequence out.
    """
    shape = cache.length.shape
    counts = jnp.full(shape, new_tokens, jnp.int32) if counts is None else jnp.asarray(counts, jnp.int32)
    if counts.shape != shape:
        raise ValueError(f"counts must have shape {shape}; got {counts.shape}.")
    length = cache.length + counts
    if not isinstance(length, jax.core.Tracer):
        wrong = np.flatnonzero((np.asarray(counts) < 0) | (np.asarray(counts) > new_tokens))
        if wrong.size:
            raise ValueError(f"counts must be between 0 and {new_tokens}; got {int(counts[wrong[0]])}.")
        over = np.flatnonzero(np.asarray(length) > cache.capacity)
        if over.size:
            row, full = int(over[0]), cache.capacity
            raise ValueError(f"sequence {row} would have {int(length[row])} tokens; the cache holds {full} of each.")
    return jnp.where(length <= cache.capacity, counts, 0)


def check_piece(key: jax.Array, value: jax.Array, layer: LayerCache) -> None:
    """Raises a ValueError unless `key` and `value` are `[B, H, L, D]` of this layer's B, H, D and dtype."""
    batch, heads, _, channels = layer.key_window.shape
    for name, x in (("keys", key), ("values", value)):
        if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (batch, heads, channels):
            raise ValueError(f"{name} must be [{batch}, {heads}, L, {channels}]; got {list(x.shape)}.")
        if x.dtype != layer.key_window.dtype:
            raise ValueError(f"{name} must have the cache's dtype {layer.key_window.dtype}; got {x.dtype}.")
    if key.shape != value.shape:
        raise ValueError(f"keys and values must have one shape; got {list(key.shape)} and {list(value.shape)}.")


def write_token(layer: LayerCache, key: jax.Array, value: jax.Array, length: jax.Array) -> LayerCache:
    """Writes one token of each sequence into the window: key and value `[B, H, 1, D]` at position `length` int32 `[B]`.

    The slot is dead before, so that a row whose length is not advanced afterwards is unchanged.
    """
    key, value = _as_held(key, value, layer.config)
    slot = window_slot(layer.config, length)
    return dataclasses.replace(
        layer,
        key_window=write_slices(layer.key_window, key, slot, axis=2),
        value_window=write_slices(layer.value_window, value, slot, axis=2),
    )


def flush_layer(layer: LayerCache, length: jax.Array, quantized: jax.Array) -> LayerCache:
    """Moves the oldest unquantized block of each sequence that is due to the rows; others keep every bit."""
    due = quantized_length(length, layer.config) > quantized
    return _write_block(layer, oldest_block(layer, quantized), quantized // BLOCK, due)


def oldest_block(layer: LayerCache, quantized: jax.Array) -> dict[str, jax.Array]:
    """The 128 oldest unquantized tokens of each sequence, quantized: what a block of each field of the layer holds."""
    positions = layer.config.sink_length + quantized[:, None] + jnp.arange(BLOCK, dtype=jnp.int32)
    slots = window_slot(layer.config, positions)
    return _encode(_take(layer.key_window, slots), _take(layer.value_window, slots), layer.config)


def prefill_layer(layer: LayerCache, key: jax.Array, value: jax.Array, counts: jax.Array) -> LayerCache:
    """Fills an empty layer with the first `counts` int32 `[B]` tokens of key and value `[B, H, L, D]`, L at most T.

    Equal to `append_layer` on the empty layer, but all blocks are quantized at once.
    """
    config = layer.config
    key, value = _as_held(key, value, config)
    tokens = quantized_length(key.shape[2], config)
    if tokens:
        span = slice(config.sink_length, config.sink_length + tokens)
        fields = _encode(key[:, :, span], value[:, :, span], config)
        zeros = lambda field: (0,) * field.ndim
        layer = dataclasses.replace(
            layer,
            **{
                name: lax.dynamic_update_slice(field := getattr(layer, name), new, zeros(field))
                for name, new in fields.items()
            },
        )
    return _fill_window(layer, key, value, newest_positions(config, counts), jnp.zeros_like(counts))


def append_layer(
    layer: LayerCache, key: jax.Array, value: jax.Array, length: jax.Array, quantized: jax.Array, counts: jax.Array
) -> LayerCache:
    """Takes in the first `counts` tokens of key and value `[B, H, L, D]` after position `length - 1`, and flushes.

    `length`, `quantized` and `counts` are int32 `[B]`; `length + counts` is at most T.
    """
    config = layer.config
    key, value = _as_held(key, value, config)
    target = jnp.maximum(quantized, quantized_length(length + counts, config))

    def block(n, layer):
        start = quantized + n * BLOCK
        positions = config.sink_length + start[:, None] + jnp.arange(BLOCK, dtype=jnp.int32)
        fields = _encode(
            _take_unquantized(layer.key_window, key, positions, length, config),
            _take_unquantized(layer.value_window, value, positions, length, config),
            config,
        )
        return _write_block(layer, fields, start // BLOCK, start + BLOCK <= target)

    layer = lax.fori_loop(0, jnp.max(target - quantized) // BLOCK, block, layer)
    return _fill_window(layer, key, value, newest_positions(config, length + counts), length)


def _as_held(key: jax.Array, value: jax.Array, config: KiviConfig) -> tuple[jax.Array, jax.Array]:
    """Keys and values as the window and the rows hold them."""
    return (hadamard(key), hadamard(value)) if config.rotate else (key, value)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Tokens `index` int32 `[B, N]` of `x [B, H, L, D]`, as `[B, H, N, D]`; an index past either end takes the end."""
    return jnp.take_along_axis(x, jnp.clip(index, 0, x.shape[2] - 1)[:, None, :, None], axis=2)


def _take_unquantized(window, new, positions, length, config):
    """Tokens at `positions [B, N]`, from the window where they precede `length [B]`, else from the new piece."""
    length = length[:, None]
    held = _take(window, window_slot(config, positions))
    return jnp.where((positions < length)[:, None, :, None], held, _take(new, positions - length))


def _fill_window(layer, key, value, positions, length):
    """Puts the new tokens (from position `length [B]` on) into the slots that hold `positions [B, W]`."""
    length = length[:, None]
    fresh = (positions >= length)[:, None, :, None]
    put = lambda window, new: jnp.where(fresh, _take(new, positions - length), window)
    return dataclasses.replace(
        layer, key_window=put(layer.key_window, key), value_window=put(layer.value_window, value)
    )


def _rows_per_block(bits: int) -> int:
    return BLOCK if bits == 16 else packing.byte_rows(bits)


def _encode(key: jax.Array, value: jax.Array, config: KiviConfig) -> dict[str, jax.Array]:
    """Whole blocks of keys and values `[B, H, N, D]`, as held, as the fields that a layer stores of them."""
    fields = {"key_codes": key, "value_codes": value}
    if config.key_norm:
        fields["key_norm"] = norm = token_norm(key)
        key = normalize(key, norm)
    for side, x in (("key", key), ("value", value)):
        bits, group_size, clip, axis = (getattr(config, f"{side}_{k}") for k in ("bits", "group_size", "clip", "axis"))
        if bits < 16:
            quantize = quantize_per_channel if axis == "channel" else quantize_per_token
            codes, scale, zero = quantize(x, bits, group_size, clip=clip, scale_dtype=jnp.dtype(config.scale_dtype))
            packed = packing.pack(codes, bits)
            fields |= {f"{side}_codes": packed, f"{side}_scale": scale, f"{side}_zero": zero}
    return fields


def token_axis(name: str, config: KiviConfig) -> int:
    """The axis of a layer's field along which its tokens lie."""
    side, _, part = name.partition("_")
    return 3 if part in ("scale", "zero") and getattr(config, f"{side}_axis") == "token" else 2


def _write_block(layer, fields, index, due):
    """Puts one block of `fields` of each sequence into block `index int32 [B]` of it, where it is `due [B]`."""

    def put(field, new, axis):
        return write_slices(field, new, index * new.shape[axis], axis, due)

    written = {name: put(getattr(layer, name), new, token_axis(name, layer.config)) for name, new in fields.items()}
    return dataclasses.replace(layer, **written)
