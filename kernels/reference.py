"""The oracle: dequantize everything, then plain attention, in float32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kivi_jax import packing
from kivi_jax.cache import LayerCache, window_positions
from kivi_jax.cache import flush_layer as flush
from kivi_jax.kernels.visibility import piece_positions, query_positions, row_positions, visible
from kivi_jax.quantize import Quantized, dequantize_per_channel, dequantize_per_token

__all__ = ["attend", "attend_prompt", "dequantize", "flush", "tokens"]

FEATURES = frozenset({"key_norm", "pre_rope", "scale_dtype", "key_axis", "value_axis"})


def dequantize(layer: LayerCache) -> tuple[jax.Array, jax.Array]:
    """The keys and values of every row as held (with `rotate`, rotated; with `pre_rope`, keys before the embedding),
    float32 `[B, H, T, D]` each; what a dead row gives is unspecified."""
    config = layer.config

    def side(codes, scale, zero, bits, axis):
        if bits == 16:
            return codes.astype(jnp.float32)
        dequantize = dequantize_per_channel if axis == "channel" else dequantize_per_token
        return dequantize(Quantized(packing.unpack(codes, bits), scale, zero))

    key = side(layer.key_codes, layer.key_scale, layer.key_zero, config.key_bits, config.key_axis)
    if layer.key_norm is not None:
        key = key * layer.key_norm.astype(jnp.float32)[..., None]
    return key, side(layer.value_codes, layer.value_scale, layer.value_zero, config.value_bits, config.value_axis)


def tokens(
    layer: LayerCache,
    length: jax.Array,
    quantized: jax.Array,
    new_key: jax.Array | None = None,
    new_value: jax.Array | None = None,
    counts: jax.Array | None = None,
    rotary: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All that can be attended to: keys and values float32 `[B, H, N, D]`, dequantized, and positions int32 `[B, N]`.

    Keys that are held without their rotary embedding get it by `rotary`; rotated keys and values stay rotated. N counts
    the rows, the window slots and the piece beside the cache. Dead tokens have position -1 and are zero.
    """
    key, value = dequantize(layer)
    keys, values = [key, layer.key_window.astype(jnp.float32)], [value, layer.value_window]
    positions = [
        row_positions(layer, jnp.arange(key.shape[2], dtype=jnp.int32), quantized),
        window_positions(layer.config, length, quantized),
    ]
    if rotary is not None:
        keys = [rotary(x, at) for x, at in zip(keys, positions, strict=True)]
    if new_key is not None:
        keys, values = [*keys, new_key], [*values, new_value]
        positions.append(piece_positions(length, new_key.shape[2], counts))
    positions = jnp.concatenate(positions, axis=1)
    live = (positions >= 0)[:, None, :, None]
    join = lambda parts: jnp.where(live, jnp.concatenate([x.astype(jnp.float32) for x in parts], axis=2), 0)
    return join(keys), join(values), positions


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
    """Attention as `kivi_jax.attend` defines it, the plainest way."""
    key, value, positions = tokens(layer, length, quantized, new_key, new_value, counts, rotary)
    queries = query_positions(length, q.shape[2], new_key is not None)
    return _attend(q, key, value, positions, queries, sliding_window, scale)


def attend_prompt(
    q: jax.Array,
    key: jax.Array,
    value: jax.Array,
    counts: jax.Array | None = None,
    *,
    sliding_window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Causal attention of a prompt over itself, as `kivi_jax.attend_prompt` defines it, with its `[L, L]` scores."""
    start = jnp.zeros(q.shape[0], jnp.int32)
    positions = piece_positions(start, key.shape[2], counts)
    live = (positions >= 0)[:, None, :, None]
    key, value = (jnp.where(live, x.astype(jnp.float32), 0) for x in (key, value))
    return _attend(q, key, value, positions, query_positions(start, q.shape[2], True), sliding_window, scale)


def _attend(q, key, value, positions, queries, sliding_window, scale):
    batch, _, num_queries, channels = q.shape
    scale = channels**-0.5 if scale is None else scale
    grouped = q.astype(jnp.float32).reshape(batch, key.shape[1], -1, num_queries, channels)
    scores = scale * jnp.einsum("bhgld,bhnd->bhgln", grouped, key, precision="highest")
    seen = visible(queries, positions, sliding_window)[:, None, None]
    weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1), 0)
    out = jnp.einsum("bhgln,bhnd->bhgld", weights, value, precision="highest")
    return out.reshape(q.shape).astype(q.dtype)
