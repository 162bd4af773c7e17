"""Decode attention on TPU: the kernel over the quantized rows, then the exact tokens merged into its softmax state."""

import jax
import jax.numpy as jnp

from kivi_jax.cache import LayerCache, window_positions
from kivi_jax.kernels import exact, online_softmax
from kivi_jax.kernels.tpu.decode import decode
from kivi_jax.kernels.visibility import piece_positions, query_positions, visible

FEATURES = frozenset({"key_norm"})
"""What the kernel knows of a cache; see `KiviConfig.features`."""

MAX_QUERIES = 8
MAX_GROUP = 16
HEAD_DIMS = (64, 128, 256)


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
    interpret: bool = False,
) -> jax.Array:
    """Attention as `kivi_jax.attend` defines it, for up to 8 queries of a sequence in bfloat16, on a TPU.

    Its time grows with the tokens that the sequences hold, not with the capacity or the longest sequence.

    Args:
        q: `[B, Hq, Lq, D]`.
        layer: the cache of the layer.
        length, quantized: int32 `[B]`.
        new_key, new_value: `[B, H, Lq, D]`, a piece beside the cache, or None.
        counts: int32 `[B]`, the valid tokens of each row of the piece, or None.
        sliding_window, scale: as for `kivi_jax.attend`.
        interpret: run the kernel in interpret mode, on any device; `True` or `pltpu.InterpretParams()`.

    Returns:
        `[B, Hq, Lq, D]` in q's dtype.

    Raises:
        NotImplementedError: the kernel does not cover the case.
    """
    _check_supported(q, layer)
    _, _, num_queries, channels = q.shape
    kv_heads = layer.key_window.shape[1]
    queries = query_positions(length, num_queries, new_key is not None)
    scaled = q.astype(jnp.float32) * (channels**-0.5 if scale is None else scale)
    grouped = exact.by_kv_head(scaled, kv_heads)
    first_position = None if sliding_window is None else queries[:, 0] - sliding_window + 1
    with jax.named_scope("quantized_rows"):
        state = decode(grouped, layer, quantized, first_position, queries=num_queries, interpret=interpret)

    group = grouped.shape[2] // num_queries
    sees = lambda keys: jnp.tile(visible(queries, keys, sliding_window), (1, group, 1))
    precision = exact.dot_precision(q.dtype)
    with jax.named_scope("window"):
        seen = sees(window_positions(layer.config, length, quantized))
        state = exact.update(state, grouped, layer.key_window, layer.value_window, seen, precision)
        if new_key is not None:
            seen = sees(piece_positions(length, num_queries, counts))
            state = exact.update(state, grouped, new_key, new_value, seen, precision)
    return online_softmax.finish(state).reshape(q.shape).astype(q.dtype)


def _check_supported(q: jax.Array, layer: LayerCache) -> None:
    _, query_heads, num_queries, channels = q.shape
    config = layer.config
    if features := config.features - FEATURES:
        raise NotImplementedError(f"The TPU kernel reads no cache with {' or '.join(sorted(features))}.")
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"The TPU kernel computes in bfloat16; got queries in {q.dtype}.")
    if 16 in (config.key_bits, config.value_bits):
        raise NotImplementedError("The TPU kernel reads quantized keys and values only; this cache holds 16-bit ones.")
    if channels not in HEAD_DIMS:
        raise NotImplementedError(f"The TPU kernel supports head_dim 64, 128 and 256; got {channels}.")
    if num_queries > MAX_QUERIES:
        raise NotImplementedError(f"The TPU kernel takes up to {MAX_QUERIES} queries of a sequence; got {num_queries}.")
    if query_heads > MAX_GROUP * layer.key_window.shape[1]:
        raise NotImplementedError(
            f"The TPU kernel takes up to {MAX_GROUP} query heads of a KV head; "
            f"got {query_heads} of {layer.key_window.shape[1]} KV heads."
        )
