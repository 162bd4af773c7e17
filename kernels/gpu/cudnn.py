"""Attention over what is not quantized, by cuDNN: prompts, and caches of 16 bits."""

import jax
import jax.numpy as jnp

from kivi_jax.cache import LayerCache, window_positions
from kivi_jax.kernels import exact, online_softmax
from kivi_jax.kernels.visibility import piece_positions, query_positions, visible


def attend_prompt(
    q: jax.Array,
    key: jax.Array,
    value: jax.Array,
    counts: jax.Array | None = None,
    *,
    sliding_window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """`kivi_jax.attend_prompt` for bfloat16 and float16."""
    _check(q)
    if counts is not None:  # padding may be NaN, and a weight of zero does not hide that
        live = (jnp.arange(key.shape[2]) < counts[:, None])[:, None, :, None]
        key, value = (jnp.where(live, x, 0).astype(x.dtype) for x in (key, value))
    tokens_first = lambda x: x.swapaxes(1, 2)
    out = jax.nn.dot_product_attention(
        tokens_first(q),
        tokens_first(key),
        tokens_first(value),
        scale=scale,
        is_causal=True,
        local_window_size=None if sliding_window is None else (sliding_window - 1, 0),
        implementation="cudnn",
    )
    return tokens_first(out)


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
    """`kivi_jax.attend` for a cache of 16 bits: cuDNN over the rows, XLA over the window, merged by their sums."""
    _check(q)
    if sliding_window is not None:
        raise NotImplementedError("the GPU implementation has no sliding window over a cache of 16 bits; use 'xla'.")
    queries, channels = q.shape[2:]
    heads = layer.key_codes.shape[1]
    scale = channels**-0.5 if scale is None else scale
    rows = _rows(q, layer, quantized, scale)

    grouped = exact.by_kv_head(q.astype(jnp.float32) * scale, heads)
    precision = exact.dot_precision(q.dtype)
    positions = query_positions(length, queries, new_key is not None)
    sees = lambda keys: jnp.tile(visible(positions, keys, None), (1, grouped.shape[2] // queries, 1))
    seen = sees(window_positions(layer.config, length, quantized))
    state = exact.update(rows, grouped, layer.key_window, layer.value_window, seen, precision)
    if new_key is not None:
        seen = sees(piece_positions(length, queries, counts))
        state = exact.update(state, grouped, new_key, new_value, seen, precision)
    return online_softmax.finish(state).reshape(q.shape).astype(q.dtype)


def _rows(q: jax.Array, layer: LayerCache, quantized: jax.Array, scale: float) -> online_softmax.State:
    """Attention to the rows, all of which every query sees, as a state to go on from."""
    batch, heads, capacity, channels = layer.key_codes.shape
    queries = q.shape[2]
    group = q.shape[1] // heads
    # Each KV head as a batch entry of its own: [B, H, T, D] is [B * H, T, 1, D] without moving anything.
    alone = lambda x: x.reshape(batch * heads, capacity, 1, channels)
    out, log_sum = jax.nn.dot_product_attention(
        q.reshape(batch * heads, group, queries, channels).swapaxes(1, 2),
        alone(layer.key_codes),
        alone(layer.value_codes),
        scale=scale,
        query_seq_lengths=jnp.full(batch * heads, queries, jnp.int32),
        key_value_seq_lengths=jnp.repeat(jnp.maximum(quantized, 1), heads),
        implementation="cudnn",
        return_residual=True,
    )
    by_head = lambda x: x.swapaxes(1, 2).reshape(batch, heads, group * queries, *x.shape[3:]).astype(jnp.float32)
    some = (quantized > 0)[:, None, None]
    top = jnp.where(some, by_head(log_sum), online_softmax.FLOOR)
    total = jnp.broadcast_to(jnp.where(some, 1.0, 0.0), top.shape)
    return online_softmax.State(top, total, jnp.where(some[..., None], by_head(out), 0.0))


def _check(q: jax.Array) -> None:
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"the GPU implementation is for bfloat16 and float16; got {q.dtype}.")
    if q.shape[3] > 256 or q.shape[3] % 8:
        raise NotImplementedError(f"the GPU implementation needs a head_dim of at most 256; got {q.shape[3]}.")
