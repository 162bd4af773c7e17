"""The portable implementation: plain XLA over the packed cache, a chunk of rows at a time.

Nothing dequantized is ever held: with centred codes `c`, `q . (s c + z) = (q s) . c + q . z` in each key group and
`sum p (s c + z) = sum (p s) c + sum p z` in each value group, z being the number in the middle of the group's range.
(Keys held before their rotary embedding are the exception: those of a chunk are dequantized to be rotated.)
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from kivi_jax import packing
from kivi_jax.cache import LayerCache, token_axis, window_positions
from kivi_jax.cache import flush_layer as flush
from kivi_jax.config import BLOCK
from kivi_jax.kernels import exact, online_softmax
from kivi_jax.kernels.exact import attend_prompt
from kivi_jax.kernels.visibility import piece_positions, query_positions, row_positions, visible
from kivi_jax.quantize import Quantized, dequantize_per_channel, dequantize_per_token

__all__ = ["attend", "attend_prompt", "flush"]

FEATURES = frozenset({"key_norm", "pre_rope", "scale_dtype", "key_axis", "value_axis"})

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
    rotary: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
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
    positions = window_positions(layer.config, length, quantized)
    key_window = layer.key_window if rotary is None else rotary(layer.key_window.astype(jnp.float32), positions)
    state = exact.update(state, grouped, key_window, layer.value_window, sees(positions), precision)
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
        if rotary is None:
            scores = key_scores(grouped, layer, start, chunk, precision)
        else:
            key = rotary(dequantized_keys(layer, start, chunk), positions)
            scores = exact.dot_channels(grouped, key, precision)
        if layer.key_norm is not None:
            norm = lax.dynamic_slice_in_dim(layer.key_norm, start, chunk, axis=2)
            scores = scores * norm.astype(jnp.float32)[:, :, None]
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
    """Scores float32 `[B, H, M, count]` of scaled queries `[B, H, M, D]` against rows `start ..`, dead ones included,
    before any norm of theirs.
    """
    config = layer.config
    rows = _tokens(layer.key_codes, layer.capacity, start, count)
    if config.key_bits == 16:
        return exact.dot_channels(q, rows.astype(jnp.float32), precision)
    codes, middle = _centred(rows, config.key_bits)
    scale, zero = _affine(layer, "key", start, count)
    if config.key_axis == "token":
        groups = scale.shape[2]
        apart = lambda x: jnp.moveaxis(x.reshape(*x.shape[:3], groups, -1), 3, 2)
        scores = jnp.einsum("bhgmc,bhgnc->bhgmn", apart(q), apart(codes), precision=precision) * scale[:, :, :, None]
        sums = apart(q).sum(-1)[..., None]
        return (scores + sums * (zero + middle * scale)[:, :, :, None]).sum(2)
    batch, heads, groups, channels = scale.shape
    codes = codes.reshape(batch, heads, groups, -1, channels)
    scores = exact.dot_channels(q[:, :, None] * scale[:, :, :, None], codes, precision)
    offsets = exact.dot_channels(q, zero + middle * scale, precision)
    return (jnp.moveaxis(scores, 2, 3) + offsets[..., None]).reshape(batch, heads, -1, count)


def dequantized_keys(layer: LayerCache, start: jax.Array, count: int) -> jax.Array:
    """The keys of rows `start ..`, dead ones included, before any norm of theirs, float32 `[B, H, count, D]`."""
    rows = _tokens(layer.key_codes, layer.capacity, start, count)
    if layer.config.key_bits == 16:
        return rows.astype(jnp.float32)
    codes = packing.unpack(rows, layer.config.key_bits)
    dequantize = dequantize_per_channel if layer.config.key_axis == "channel" else dequantize_per_token
    return dequantize(Quantized(codes, *_affine(layer, "key", start, count)))


def weigh_values(weights: jax.Array, layer: LayerCache, start: jax.Array, live: jax.Array, precision) -> jax.Array:
    """Values of rows `start ..` weighted by `weights [B, H, M, N]`, float32 `[B, H, M, D]`; only `live [B, N]`
    count.
    """
    config, count = layer.config, weights.shape[-1]
    rows = _tokens(layer.value_codes, layer.capacity, start, count)
    if config.value_bits == 16:
        value = jnp.where(live[:, None, :, None], rows.astype(jnp.float32), 0.0)
        return jnp.einsum("bhmn,bhnd->bhmd", weights, value, precision=precision)
    codes, middle = _centred(rows, config.value_bits)
    scale, zero = _affine(layer, "value", start, count)
    if config.value_axis == "channel":
        batch, heads, groups, channels = scale.shape
        live = live.reshape(batch, 1, groups, -1)[..., :1]  # whole blocks live or die, and so whole groups
        scale, zero = (jnp.where(live, x, 0.0) for x in (scale, zero))
        apart = weights.reshape(batch, heads, -1, groups, count // groups)
        codes = codes.reshape(batch, heads, groups, -1, channels)
        out = jnp.einsum("bhmgn,bhgnd->bhmgd", apart, codes, precision=precision)
        return jnp.einsum("bhmgd,bhgd->bhmd", out, scale, precision=precision) + jnp.einsum(
            "bhmg,bhgd->bhmd", apart.sum(-1), zero + middle * scale, precision=precision
        )
    scale, zero = (jnp.where(live[:, None, None], x, 0.0) for x in (scale, zero))
    batch, heads, groups, _ = scale.shape
    codes = codes.reshape(batch, heads, count, groups, -1)
    out = jnp.einsum("bhgmn,bhngc->bhmgc", weights[:, :, None] * scale[:, :, :, None], codes, precision=precision)
    offsets = jnp.einsum("bhmn,bhgn->bhmg", weights, zero + middle * scale, precision=precision)
    return (out + offsets[..., None]).reshape(batch, heads, weights.shape[2], -1)


def _affine(layer: LayerCache, side: str, start: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Scales and zeros of rows `start ..` of "key" or "value", float32."""

    def part(field):
        if token_axis(field, layer.config) == 3:
            return lax.dynamic_slice_in_dim(getattr(layer, field), start, count, axis=3)
        return _tokens(getattr(layer, field), layer.capacity, start, count)

    return tuple(part(f"{side}_{name}").astype(jnp.float32) for name in ("scale", "zero"))


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
