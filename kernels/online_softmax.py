"""Attention, some keys at a time: a running maximum, sum and weighted values (Milakov and Gimelshein, 2018)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

FLOOR = -1e30  # below any score, and finite: exp(FLOOR - FLOOR) must not be NaN


class State(NamedTuple):
    """What has been attended to so far, for M queries of each KV head, in float32.

    Attributes:
        top: `[B, H, M]`, the largest score.
        total: `[B, H, M]`, the sum of `exp(score - top)`.
        out: `[B, H, M, D]`, the sum of `exp(score - top) * value`.
    """

    top: jax.Array
    total: jax.Array
    out: jax.Array


def empty(q: jax.Array) -> State:
    """The state before any key, for queries `[B, H, M, D]`."""
    top = jnp.full(q.shape[:-1], FLOOR, jnp.float32)
    return State(top, jnp.zeros_like(top), jnp.zeros(q.shape, jnp.float32))


def update(state: State, scores: jax.Array, seen: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> State:
    """Takes in N more keys.

    Args:
        scores: float32 `[B, H, M, N]`; what is not `seen` may hold anything.
        seen: bool, broadcastable to `scores`.
        weigh: from weights float32 `[B, H, M, N]` to the weighted sum of the values, float32 `[B, H, M, D]`.
    """
    scores = jnp.where(seen, scores, FLOOR)
    top = jnp.maximum(state.top, scores.max(-1))
    weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
    decay = jnp.exp(state.top - top)
    return State(top, state.total * decay + weights.sum(-1), state.out * decay[..., None] + weigh(weights))


def finish(state: State) -> jax.Array:
    """The attention output, float32 `[B, H, M, D]`; zero for a query that has seen nothing."""
    return state.out / jnp.where(state.total > 0, state.total, 1.0)[..., None]
