"""Writing one slice of each sequence without copying what it is written into."""

import jax
import jax.numpy as jnp
from jax import lax


def write_slices(field: jax.Array, new: jax.Array, start: jax.Array, axis: int, active: jax.Array | None = None):
    """Writes `new[b]` into `field[b]` from index `start[b]` of `axis` on, for each sequence b that is `active`.

    Args:
        field: `[B, ...]`; copied only if it is still needed afterwards (donate it).
        new: like `field`, shorter along `axis`.
        start: int32 `[B]`; must leave room for `new` in the sequences that are active.
        axis: counted with B as axis 0.
        active: bool `[B]`; the others keep every bit. None: all.

    Returns:
        The field with the slices written.
    """
    return lax.platform_dependent(field, new, start, active, cpu=_by_loop(axis), default=_at_once(axis))


def _by_loop(axis: int):
    """One sequence after the other.

    XLA:CPU makes a batched update a scatter, and copies a bfloat16 field to float32 and back for it. (This form still
    has one copy of a bfloat16 field on a CPU.)
    """

    def write(field, new, start, active):
        def body(b, field):
            row = lambda x: lax.dynamic_index_in_dim(x, b, 0, keepdims=True)
            at = [0] * field.ndim
            at[0], at[axis] = b, row(start)[0]
            piece = row(new)
            if active is not None:
                piece = jnp.where(row(active)[0], piece, lax.dynamic_slice(field, at, piece.shape))
            return lax.dynamic_update_slice(field, piece, at)

        return lax.fori_loop(0, field.shape[0], body, field)

    return write


def _at_once(axis: int):
    """All sequences in one batched update, in which GPUs and TPUs run in parallel."""

    def write_row(field, new, start, active):
        if active is not None:
            old = lax.dynamic_slice_in_dim(field, start, new.shape[axis - 1], axis - 1)
            new = jnp.where(active, new, old)
        return lax.dynamic_update_slice_in_dim(field, new, start, axis - 1)

    return jax.vmap(write_row)
