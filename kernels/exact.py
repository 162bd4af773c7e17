"""Causal attention of unquantized tokens among themselves, without an `[L, L]` matrix."""

import jax
import jax.numpy as jnp
from jax import lax

from kivi_jax.kernels import online_softmax
from kivi_jax.kernels.visibility import piece_positions, visible

CHUNK = 512  # queries and keys of one step: a [512, 512] tile of scores for each head


def dot_precision(dtype) -> lax.Precision:
    """float32 models get float32 products everywhere; narrower ones what the device does fastest."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def dot_channels(q: jax.Array, key: jax.Array, precision: lax.Precision) -> jax.Array:
    """Products `[..., M, N]` of float32 `q [..., M, D]` and `key [..., N, D]`.

    In float32 the sum is taken in parts of 16 channels: XLA:CPU adds the terms of a matrix product one after the
    other, and D of them in a row cost more than twice the rounding that they need to.
    """
    if precision != lax.Precision.HIGHEST or q.shape[-1] % 16:
        return jnp.einsum("...md,...nd->...mn", q, key, precision=precision)
    parts = lambda x: jnp.moveaxis(x.reshape(*x.shape[:-1], -1, 16), -2, 0)
    return jnp.einsum("p...md,p...nd->p...mn", parts(q), parts(key), precision=precision).sum(0)


def update(
    state: online_softmax.State,
    q: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seen: jax.Array,
    precision: lax.Precision,
) -> online_softmax.State:
    """Takes keys and values `[B, H, N, D]` into the attention of scaled queries float32 `[B, H, M, D]`.

    `seen` is bool `[B, M, N]`. A value that no query of its sequence sees may be NaN.
    """
    live = seen.any(axis=1)[:, None, :, None]
    value = jnp.where(live, value.astype(jnp.float32), 0.0)
    scores = dot_channels(q, key.astype(jnp.float32), precision)
    weigh = lambda weights: jnp.einsum("bhmn,bhnd->bhmd", weights, value, precision=precision)
    return online_softmax.update(state, scores, seen[:, None], weigh)


def by_kv_head(q: jax.Array, kv_heads: int) -> jax.Array:
    """Queries `[B, Hq, L, D]` as `[B, H, (Hq / H) * L, D]`: those that share keys, side by side."""
    batch, _, _, channels = q.shape
    return q.reshape(batch, kv_heads, -1, channels)


def attend_prompt(
    q: jax.Array,
    key: jax.Array,
    value: jax.Array,
    counts: jax.Array | None = None,
    *,
    sliding_window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Causal attention over a prompt, a chunk of queries at a time and only the keys up to each chunk.

    Args:
        q: `[B, Hq, L, D]`; key, value: `[B, H, L, D]`.
        counts: int32 `[B]`, the valid tokens of each row, the first ones; the rest may hold anything. None: all.
        sliding_window: a query sees this many tokens, its own included; None: all before it.
        scale: of the scores; None: `D ** -0.5`.

    Returns:
        `[B, Hq, L, D]` in q's dtype; unspecified for tokens past `counts`.
    """
    batch, query_heads, tokens, channels = q.shape
    kv_heads = key.shape[1]
    group = query_heads // kv_heads
    chunk = min(CHUNK, tokens)
    steps = -(-tokens // chunk)
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, steps * chunk - tokens), (0, 0)))
    scaled = q.astype(jnp.float32) * (channels**-0.5 if scale is None else scale)
    q_chunks = jnp.moveaxis(pad(scaled).reshape(batch, query_heads, steps, chunk, channels), 2, 0)
    key, value = pad(key), pad(value)
    counts = jnp.full(batch, tokens, jnp.int32) if counts is None else counts
    positions = piece_positions(jnp.zeros_like(counts), steps * chunk, counts)
    precision = dot_precision(q.dtype)

    def attend_chunk(step_and_q):
        step, q = step_and_q
        q = by_kv_head(q, kv_heads)
        queries = jnp.broadcast_to(step * chunk + jnp.arange(chunk, dtype=jnp.int32), (batch, chunk))

        def take_in(n, state):
            part = lambda x, axis: lax.dynamic_slice_in_dim(x, n * chunk, chunk, axis)
            seen = jnp.tile(visible(queries, part(positions, 1), sliding_window), (1, group, 1))
            return update(state, q, part(key, 2), part(value, 2), seen, precision)

        first = 0 if sliding_window is None else jnp.maximum(step * chunk - sliding_window + 1, 0) // chunk
        return online_softmax.finish(lax.fori_loop(first, step + 1, take_in, online_softmax.empty(q)))

    out = lax.map(attend_chunk, (jnp.arange(steps, dtype=jnp.int32), q_chunks))
    out = jnp.moveaxis(out.reshape(steps, batch, query_heads, chunk, channels), 0, 2)
    return out.reshape(batch, query_heads, steps * chunk, channels)[:, :, :tokens].astype(q.dtype)
