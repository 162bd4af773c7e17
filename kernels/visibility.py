"""Which cached token sits where, and which query may see it. Every implementation masks by these."""

import jax
import jax.numpy as jnp

from kivi_jax.cache import LayerCache


def query_positions(length: jax.Array, num_queries: int, beside: bool) -> jax.Array:
    """Positions int32 `[B, Lq]` of the queries: after the `length [B]` cached tokens if their piece is beside the cache
    (`new_key`), else those of the last `Lq` cached tokens."""
    first = length if beside else length - num_queries
    return first[:, None] + jnp.arange(num_queries, dtype=jnp.int32)


def row_positions(layer: LayerCache, rows: jax.Array, quantized: jax.Array) -> jax.Array:
    """Positions int32 `[B, N]` of the tokens in `rows [N]` of the codes; -1 where the row is dead."""
    return jnp.where(rows[None] < quantized[:, None], rows[None] + layer.config.sink_length, -1)


def piece_positions(length: jax.Array, num_tokens: int, counts: jax.Array | None) -> jax.Array:
    """Positions int32 `[B, L]` of the tokens of a piece beside the cache; -1 for padding, past `counts [B]`."""
    index = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    positions = length[:, None] + index
    return positions if counts is None else jnp.where(index < counts[:, None], positions, -1)


def visible(query: jax.Array, key: jax.Array, sliding_window: int | None) -> jax.Array:
    """bool `[B, Lq, N]`: whether the query at a position of `query [B, Lq]` sees the key at one of `key [B, N]`."""
    query, key = query[:, :, None], key[:, None, :]
    seen = (key >= 0) & (key <= query)
    return seen if sliding_window is None else seen & (key > query - sliding_window)
