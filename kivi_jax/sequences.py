"""Which sequences a cache holds: repeated, reordered, left out."""

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from kivi_jax.cache import KVCache


def gather(cache: "KVCache", index: jax.Array) -> "KVCache":
    """The sequences `index`, in that order: to reorder beams, to leave out finished sequences, to repeat some.

    On a mesh that divides sequences they travel, and each device gets all of them.

    Args:
        index: integers `[N]` from 0 to B - 1, N at least 1; any sequence may come several times or never.

    Returns:
        A cache of N sequences. Under jit, where nothing can be refused, an index out of range gives an empty sequence.

    Raises:
        ValueError: `index` is not of this form.
    """
    index = jnp.asarray(index)
    batch = cache.batch_size
    if index.ndim != 1 or index.size == 0 or not jnp.issubdtype(index.dtype, jnp.integer):
        raise ValueError(f"index must be integers [N], 1 or more; got {index.dtype} {list(index.shape)}.")
    there = (index >= 0) & (index < batch)
    if not isinstance(there, jax.core.Tracer) and not (valid := np.asarray(there)).all():
        raise ValueError(f"index must be from 0 to {batch - 1}; got {int(np.asarray(index)[~valid][0])}.")
    taken = jax.tree.map(lambda x: jnp.take(x, index, axis=0, mode="clip"), cache)
    empty = lambda x: jnp.where(there, x, 0)
    return dataclasses.replace(taken, length=empty(taken.length), quantized=empty(taken.quantized))


def fork(cache: "KVCache", n: int) -> "KVCache":
    """Each sequence n times, next to each other: row `b * n + i` is copy i of sequence b.

    The copies share nothing: each can be continued, cropped and donated by itself.

    Raises:
        ValueError: n is not an integer of 1 or more.
    """
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise ValueError(f"n must be an integer of 1 or more; got {n!r}.")
    return _repeated(cache, n)


@functools.partial(jax.jit, static_argnames="n")
def _repeated(cache, n):
    # In this form the copies of a sequence stay on its device, on a mesh.
    repeat = lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], n, *x.shape[1:])).reshape(-1, *x.shape[1:])
    return jax.tree.map(repeat, cache)
