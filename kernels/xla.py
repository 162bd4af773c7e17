"""The portable implementation: plain XLA over the packed cache, a chunk of rows at a time.

Nothing dequantized is ever held: with centred codes `c`, `q . (s c + z) = (q s) . c + q . z` in each key group and
`sum p (s c + z) = sum (p s) c + sum p z` in each value group, z being the number in the middle of the group's range.
"""

import jax
import jax.numpy as jnp
from jax import lax

from kivi_jax import packing
from kivi_jax.cache import LayerCache, window_positions
from kivi_jax.config import BLOCK
from kivi_jax.kernels import exact, online_softmax
from kivi_jax.kernels.exact import attend_prompt
from kivi_jax.kernels.visibility import piece_positions, query_positions, row_positions, visible

__all__ = ["attend", "attend_prompt"]

CHUNK = 4 * BLOCK  # rows taken in at a time


def attend(
    q: jax.Array,
    layer: LayerCache,
    length: jax.Array,
    quantized: jax.Array,
    *,
    new_key: jax.Array | None = None,
    new_value: jax.Array | None = None,
    counts: jax.Array | None = None,
    sliding_window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Attention as `kivi_jax.attend` defines it. Its work grows with the longest sequence, not with the capacity."""
    _, query_heads, num_queries, channels = q.shape
    kv_heads = layer.key_window.shape[1]
    group = query_heads // kv_heads
    precision = exact.dot_precision(q.dtype)
    queries = query_positions(length, num_queries, new_key is not None)
    scaled = q.astype(jnp.float32) * (channels**-0.5 if scale is None else scale)
    grouped = exact.by_kv_head(scaled, kv_heads)
    sees = lambda keys: jnp.tile(visible(queries, keys, sliding_window), (1, group, 1))

    state = online_softmax.empty(grouped)
    seen = sees(window_positions(layer.config, length, quantized))
    state = exact.update(state, grouped, layer.key_window, layer.value_window, seen, precision)
    if new_key is not None:
        seen = sees(piece_positions(length, num_queries, counts))
        state = exact.update(state, grouped, new_key, new_value, seen, precision)

    chunk = min(CHUNK, layer.capacity)

    def take_in(n, state):
        # The last chunk may be cut short by the capacity; it then starts earlier, and the rows already seen are masked.
        start = jnp.minimum(n * chunk, layer.capacity - chunk)
        rows = start + jnp.arange(chunk, dtype=jnp.int32)
        positions = jnp.where(rows >= n * chunk, row_positions(layer, rows, quantized), -1)
        seen = sees(positions)
        scores = key_scores(grouped, layer, start, chunk, precision)
        live = positions >= 0
        weigh = lambda weights: weigh_values(weights, layer, start, live, precision)
        return online_softmax.update(state, scores, seen[:, None], weigh)

    first = 0
    if sliding_window is not None:
        oldest = jnp.min(queries[:, 0]) - sliding_window + 1 - layer.config.sink_length
        first = jnp.maximum(oldest, 0) // chunk
    state = lax.fori_loop(first, (jnp.max(quantized) + chunk - 1) // chunk, take_in, state)
    return online_softmax.finish(state).reshape(q.shape).astype(q.dtype)


def key_scores(q: jax.Array, layer: LayerCache, start: jax.Array, count: int, precision) -> jax.Array:
    """Scores float32 `[B, H, M, count]` of scaled queries `[B, H, M, D]` against rows `start ..`, dead ones
    included.
    """
    config = layer.config
    if config.key_bits == 16:
        key = _tokens(layer.key_codes, layer.capacity, start, count)
        return exact.dot_channels(q, key.astype(jnp.float32), precision)
    codes, middle = _centred(_tokens(layer.key_codes, layer.capacity, start, count), config.key_bits)
    scale, zero = (
        _tokens(x, layer.capacity, start, count).astype(jnp.float32) for x in (layer.key_scale, layer.key_zero)
    )
    batch, heads, groups, channels = scale.shape
    codes = codes.reshape(batch, heads, groups, -1, channels)
    scores = exact.dot_channels(q[:, :, None] * scale[:, :, :, None], codes, precision)
    offsets = exact.dot_channels(q, zero + middle * scale, precision)
    return (jnp.moveaxis(scores, 2, 3) + offsets[..., None]).reshape(batch, heads, -1, count)


def weigh_values(weights: jax.Array, layer: LayerCache, start: jax.Array, live: jax.Array, precision) -> jax.Array:
    """Values of rows `start ..` weighted by `weights [B, H, M, N]`, float32 `[B, H, M, D]`; only `live [B, N]`
    count.
    """
    config, count = layer.config, weights.shape[-1]
    if config.value_bits == 16:
        value = _tokens(layer.value_codes, layer.capacity, start, count).astype(jnp.float32)
        value = jnp.where(live[:, None, :, None], value, 0.0)
        return jnp.einsum("bhmn,bhnd->bhmd", weights, value, precision=precision)
    codes, middle = _centred(_tokens(layer.value_codes, layer.capacity, start, count), config.value_bits)
    scale, zero = (
        jnp.where(live[:, None, None], lax.dynamic_slice_in_dim(x, start, count, axis=3).astype(jnp.float32), 0.0)
        for x in (layer.value_scale, layer.value_zero)
    )
    batch, heads, groups, _ = scale.shape
    codes = codes.reshape(batch, heads, count, groups, -1)
    out = jnp.einsum("bhgmn,bhngc->bhmgc", weights[:, :, None] * scale[:, :, :, None], codes, precision=precision)
    offsets = jnp.einsum("bhmn,bhgn->bhmg", weights, zero + middle * scale, precision=precision)
    return (out + offsets[..., None]).reshape(batch, heads, weights.shape[2], -1)


def _tokens(field: jax.Array, capacity: int, start: jax.Array, count: int) -> jax.Array:
    """The part of a field with its tokens on axis 2 (several to a row, or several rows to a group) for whole blocks."""
    rows = field.shape[2] * BLOCK // capacity
    return lax.dynamic_slice_in_dim(field, start // BLOCK * rows, count // BLOCK * rows, axis=2)


def _centred(packed: jax.Array, bits: int) -> tuple[jax.Array, float]:
    """Codes float32 `[..., T, D]` about the middle of their range, and that middle.

    Uncentred codes would multiply the rounding of what they meet by their offset.
    """
    middle = (2**bits - 1) / 2
    return packing.unpack(packed, bits).astype(jnp.float32) - middle, middle
