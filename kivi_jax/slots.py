"""Which token is in which slot of the full-precision window, and for how long.

The ring after the sinks holds the last tokens written, each until the token one ring later takes its slot. Those from
`quantized` on are live. Those before, already in rows, are what a rewind takes back (`KiviConfig.rewind`).

A row is a position minus `sink_length`. Axes: B batch, W window slots.
"""

import jax
import jax.numpy as jnp

from kivi_jax.config import KiviConfig


def window_slot(config: KiviConfig, position: jax.Array) -> jax.Array:
    """The window slot of the token at `position`."""
    sinks = config.sink_length
    return jnp.where(position < sinks, position, sinks + (position - sinks) % config.ring_length)


def window_positions(config: KiviConfig, length: jax.Array, quantized: jax.Array) -> jax.Array:
    """The position of the token in each window slot, int32 `[B, W]`; -1 where the slot is dead."""
    length, quantized = length[:, None], quantized[:, None]
    slot = jnp.arange(config.ring_length, dtype=jnp.int32)[None]
    # The unquantized tokens after the sinks are rows `quantized .. length - sinks - 1`, at most one of them in a slot.
    row = quantized + (slot - quantized) % config.ring_length
    return _with_sinks(config, length, row, row < length - config.sink_length)


def newest_positions(config: KiviConfig, length: jax.Array) -> jax.Array:
    """The position of the last token written to each window slot by a sequence that grew to `length [B]`, live or not,
    int32 `[B, W]`; -1 where there was none."""
    length = length[:, None]
    slot = jnp.arange(config.ring_length, dtype=jnp.int32)[None]
    last = length - config.sink_length - 1
    row = last - (last - slot) % config.ring_length
    return _with_sinks(config, length, row, row >= 0)


def first_retained(config: KiviConfig, length: jax.Array) -> jax.Array:
    """The first row that the ring of a sequence of `length [B]` tokens is sure to hold, int32 `[B]`: the slot of the
    token that comes next does not count, as a step writes there whether or not the sequence takes the token."""
    return jnp.maximum(length + 1 - config.sink_length - config.ring_length, 0)


def _with_sinks(config, length, row, there):
    sinks = config.sink_length
    sink = jnp.arange(sinks, dtype=jnp.int32)[None]
    return jnp.concatenate([jnp.where(sink < length, sink, -1), jnp.where(there, row + sinks, -1)], axis=1)
