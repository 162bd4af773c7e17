"""Attention of a prompt over itself: jax's splash attention, which holds a tile of scores at a time."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

TILE = 512


def attend_prompt(
    q: jax.Array,
    key: jax.Array,
    value: jax.Array,
    counts: jax.Array | None = None,
    *,
    sliding_window: int | None = None,
    scale: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention as `kivi_jax.attend_prompt` defines it, for bfloat16 on a TPU.

    Args:
        q: `[B, Hq, L, D]`; key, value: `[B, H, L, D]`.
        counts: int32 `[B]`, the valid tokens of each row, the first ones, or None.
        sliding_window, scale: as for `kivi_jax.attend_prompt`.
        interpret: run the kernel in interpret mode, on any device.

    Returns:
        `[B, Hq, L, D]` in q's dtype; unspecified for tokens past `counts`.

    Raises:
        NotImplementedError: the dtype or head_dim is not covered.
    """
    query_heads, tokens, channels = q.shape[1:]
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"The TPU prompt kernel computes in bfloat16; got {q.dtype}.")
    if channels not in (64, 128, 256):
        raise NotImplementedError(f"The TPU prompt kernel supports head_dim 64, 128 and 256; got {channels}.")
    if counts is not None:
        # Causality keeps padding, which comes last, from every valid query; but 0 times NaN is NaN.
        valid = (jnp.arange(tokens) < counts[:, None])[:, None, :, None]
        key, value = (jnp.where(valid, x, jnp.zeros((), x.dtype)) for x in (key, value))
    tile = min(TILE, -(-tokens // 128) * 128)
    padded = -(-tokens // tile) * tile
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, padded - tokens), (0, 0)))
    shape = (padded, padded)
    mask = masks.CausalMask(shape) if sliding_window is None else masks.LocalMask(shape, (sliding_window - 1, 0), 0)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * query_heads),
        block_sizes=splash.BlockSizes(block_q=tile, block_kv=tile),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    scaled = (q.astype(jnp.float32) * (channels**-0.5 if scale is None else scale)).astype(q.dtype)
    return jax.vmap(kernel)(pad(scaled), pad(key), pad(value))[:, :, :tokens]
