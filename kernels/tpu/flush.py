"""The flush on TPU: a kernel writes the new blocks in place, where XLA's updates would copy whole fields.

XLA quantizes, with the one quantizer that every path uses, so that the bits are the same everywhere. The kernel only
moves what comes of it, for the sequences that are due. A tile may hold several blocks' worth of a field (4 rows of
scales are half a tile), so each such sequence's tile is read, changed and written back.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kivi_jax import cache as kv
from kivi_jax.cache import LayerCache, oldest_block
from kivi_jax.config import BLOCK, quantized_length
from kivi_jax.kernels.tpu.plan import LANES, SUBLANES, in_place, tokens_on_lanes


@dataclasses.dataclass(frozen=True)
class View:
    """How the kernel sees a field: `[B, X, Y, Z]`, with tokens along Y or Z, so that nothing is copied.

    Attributes:
        swap: the axes of the field that are exchanged, or None.
        add_axis: whether the field is `[B, H, T]` and gets an axis 1.
        axis: 2 or 3, along which the view's tokens lie.
        per_block: rows (or lanes) of one block of 128 tokens.
        per_tile: rows (or lanes) that the kernel reads and writes, one block's or several.
    """

    swap: tuple[int, int] | None
    add_axis: bool
    axis: int
    per_block: int
    per_tile: int

    def of(self, field: jax.Array) -> jax.Array:
        if self.add_axis:
            field = field[:, None]
        return field.swapaxes(*self.swap) if self.swap else field

    def undo(self, field: jax.Array) -> jax.Array:
        if self.swap:
            field = field.swapaxes(*self.swap)
        return field[:, 0] if self.add_axis else field


def flush(layer: LayerCache, length: jax.Array, quantized: jax.Array, *, interpret: bool = False) -> LayerCache:
    """`kivi_jax.cache.flush_layer`, to the bit, in place if the layer is donated.

    Args:
        layer: the cache of a layer.
        length, quantized: int32 `[B]`; a sequence is due if the schedule quantizes more than `quantized` of `length`,
            and then one block of it is flushed.
        interpret: run the kernel in interpret mode, on any device.
    """
    due = quantized_length(length, layer.config) > quantized
    blocks = functools.partial(oldest_block, layer, quantized)
    nothing = lambda: {name: jnp.zeros(x.shape, x.dtype) for name, x in jax.eval_shape(blocks).items()}
    new = lax.cond(due.any(), blocks, nothing)
    views = {name: _view(name, getattr(layer, name), layer) for name in new}
    old = [in_place(view.of(getattr(layer, name)), interpret) for name, view in views.items()]
    new = [view.of(new[name]) for name, view in views.items()]
    sequences = jnp.argsort(~due)  # those that are due come first, a step for each
    # There is a first step even if none is due, which rewrites what is there; a block past the end must not be touched.
    index = jnp.minimum(quantized // BLOCK, layer.capacity // BLOCK - 1)

    def tile(view, field):
        shape = [1, *field.shape[1:]]
        shape[view.axis] = view.per_tile
        blocks = view.per_tile // view.per_block

        def at(n, sequences, index, _):
            where = [sequences[n], 0, 0, 0]
            where[view.axis] = index[sequences[n]] // blocks
            return tuple(where)

        return pl.BlockSpec(tuple(shape), at)

    tiles = [tile(view, field) for view, field in zip(views.values(), old, strict=True)]
    whole = [pl.BlockSpec((1, *x.shape[1:]), lambda n, sequences, *_: (sequences[n], 0, 0, 0)) for x in new]
    scalars = 3
    written = pl.pallas_call(
        functools.partial(_write, views=tuple(views.values())),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalars, grid=(jnp.maximum(due.sum(), 1),), in_specs=[*whole, *tiles], out_specs=tiles
        ),
        out_shape=[(jax.ShapeDtypeStruct if interpret else pltpu.HBM)(x.shape, x.dtype) for x in old],
        input_output_aliases={scalars + len(new) + n: n for n in range(len(old))},
        interpret=interpret,
        name="kivi_flush",
    )(sequences.astype(jnp.int32), index, due.astype(jnp.int32), *new, *old)
    fields = {name: view.undo(x) for (name, view), x in zip(views.items(), written, strict=True)}
    return dataclasses.replace(layer, **fields)


def _view(name: str, field: jax.Array, layer: LayerCache) -> View:
    tokens = layer.capacity // BLOCK
    if field.ndim == 3:
        return View(None, True, 3, BLOCK, BLOCK)
    axis = kv.token_axis(name, layer.config)
    if axis == 3:
        # XLA lays [.., H, 1, T] out as [.., H, T].
        return View((1, 2) if field.shape[2] == 1 else None, False, 3, BLOCK, BLOCK)
    per_block = field.shape[2] // tokens
    swap = tokens_on_lanes(field)
    unit = LANES if swap else SUBLANES
    per_tile = per_block if per_block % unit == 0 else min(unit, field.shape[2])
    return View((2, 3) if swap else None, False, 3 if swap else 2, per_block, per_tile)


def _write(
    sequences,  # scalars [B]: the sequence of each step
    index,  # scalars [B]: the block to write in each sequence
    due,  # scalars [B]: 1 where it is to be written
    *refs,  # for each field its new block [1, X, Y, Z], then for each its tile, then for each the tile as written
    views: tuple[View, ...],
):
    sequence = sequences[pl.program_id(0)]
    count = len(views)
    for view, new_ref, old_ref, out_ref in zip(
        views, refs[:count], refs[count : 2 * count], refs[2 * count :], strict=True
    ):
        blocks = view.per_tile // view.per_block
        for x in range(new_ref.shape[1]):
            new = _as_int32(new_ref[0, x])
            if blocks > 1:
                new = jnp.concatenate([new] * blocks, axis=view.axis - 2)
            at = lax.broadcasted_iota(jnp.int32, new.shape, view.axis - 2) // view.per_block
            here = (at == index[sequence] % blocks) & (due[sequence] == 1)
            out_ref[0, x] = _from_int32(jnp.where(here, new, _as_int32(old_ref[0, x])), out_ref.dtype)


def _as_int32(x):
    """The bits of each element: a select of narrow types is not available on every TPU, and floats would lose NaNs."""
    if x.dtype.itemsize == 2:
        x = lax.bitcast_convert_type(x, jnp.int16)
    return lax.bitcast_convert_type(x, jnp.int32) if x.dtype.itemsize == 4 else x.astype(jnp.int32)


def _from_int32(x, dtype):
    if dtype.itemsize == 2:
        return lax.bitcast_convert_type(x.astype(jnp.int16), dtype)
    return lax.bitcast_convert_type(x, dtype) if dtype.itemsize == 4 else x.astype(dtype)
