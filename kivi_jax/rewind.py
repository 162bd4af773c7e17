"""Dropping the last tokens of each sequence."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kivi_jax.config import BLOCK, KiviConfig, quantized_length
from kivi_jax.slots import first_retained, newest_positions, window_positions, window_slot

if TYPE_CHECKING:
    from kivi_jax.cache import KVCache, LayerCache


def crop(cache: "KVCache", n: int | jax.Array | None = None, *, lengths: jax.Array | None = None) -> "KVCache":
    """Drops the last tokens of each sequence; nothing of them influences anything afterwards.

    What is kept is held as it was: to the window's tokens, and to the quantized blocks before them, the drop is exact.
    A block that was flushed because of tokens that are now dropped stays quantized, and a sequence cannot be cut
    inside a quantized block, since its tokens are gone in full precision. Three cases have them:

    - with `KiviConfig(rewind=k)`, up to k tokens below the most that a sequence has held: the cache is then
      bit-identical to one that never had the dropped tokens, now and after any further appends;
    - with an unquantized cache (16 bits), to any length, likewise bit-identical;
    - to `sink_length` tokens or fewer.

    Under jit, a sequence that cannot be cropped so is left as it was, which its unchanged `length` tells.

    Outside jit the result shares arrays with `cache`: donate only one of the two.

    Args:
        n: tokens to drop, an integer or int32 `[B]`.
        lengths: instead of `n`, the tokens to keep, int32 `[B]`.

    Raises:
        ValueError: not one of `n` and `lengths`, one that is not an integer of its sequence's, or (outside jit) tokens
            that would be needed in full precision; nothing is changed.
    """
    if (n is None) == (lengths is None):
        raise ValueError(f"crop takes one of n and lengths; got {'neither' if n is None else 'both'}.")
    name, given = ("lengths", lengths) if n is None else ("n", n)
    given = jnp.asarray(given)
    shape = cache.length.shape
    if not jnp.issubdtype(given.dtype, jnp.integer) or given.shape not in ((), shape):
        raise ValueError(f"{name} must be an integer or int32 {list(shape)}; got {given.dtype} {list(given.shape)}.")
    given = jnp.broadcast_to(given.astype(jnp.int32), shape)
    target = given if n is None else cache.length - given
    quantized, possible = _quantized_after(cache, target)
    if not isinstance(possible, jax.core.Tracer):
        _check(cache, target, possible)
    target = jnp.where(possible, target, cache.length)
    quantized = jnp.where(possible, quantized, cache.quantized)
    layers = cache.layers
    if not cache.config.quantizes:
        layers = tuple(_refill(layer, target, quantized, cache.quantized) for layer in layers)
    retained = cache.retained
    if retained is not None:
        retained = jnp.minimum(retained, jnp.maximum(target - cache.config.sink_length, 0))
    return dataclasses.replace(cache, layers=layers, length=target, quantized=quantized, retained=retained)


def with_rewind(cache: "KVCache", rewind: int) -> "KVCache":
    """The same contents in a window that can rewind by `rewind` tokens, as if the config had always said so.

    Blocks that are quantized already stay it: what can be dropped exactly are the tokens that come from now on.
    """
    config = dataclasses.replace(cache.config, rewind=rewind)
    held = cache.quantized if cache.retained is None else cache.retained
    positions = newest_positions(config, cache.length)
    slots = window_slot(cache.config, positions)
    move = lambda window: jnp.take_along_axis(window, jnp.maximum(slots, 0)[:, None, :, None], axis=2)
    layers = tuple(
        dataclasses.replace(
            layer,
            key_window=move(layer.key_window),
            value_window=move(layer.value_window),
            config=dataclasses.replace(layer.config, rewind=rewind),
        )
        for layer in cache.layers
    )
    retained = jnp.maximum(held, first_retained(config, cache.length)) if rewind else None
    return dataclasses.replace(cache, layers=layers, config=config, retained=retained)


def _quantized_after(cache: "KVCache", target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`quantized` after a crop to `target` tokens, and whether it is possible, both `[B]`."""
    config = cache.config
    scheduled = jnp.minimum(quantized_length(target, config), cache.quantized)
    if not config.quantizes:
        quantized = scheduled  # the rows hold the tokens themselves, and can give them back
    else:
        quantized = jnp.maximum(scheduled, jnp.minimum(_oldest_return(cache), cache.quantized))
    quantized = jnp.where(target <= config.sink_length, 0, quantized)
    fits = (target <= config.sink_length) | (config.sink_length + quantized <= target) | (target == cache.length)
    return quantized, fits & (target >= 0) & (target <= cache.length)


def _oldest_return(cache: "KVCache") -> jax.Array:
    """The first block boundary, in rows, from which on the ring holds every token, `[B]`."""
    if cache.retained is None:
        return cache.quantized
    return (cache.retained + BLOCK - 1) // BLOCK * BLOCK


def _check(cache: "KVCache", target: jax.Array, possible: jax.Array) -> None:
    wrong = np.flatnonzero(~np.asarray(possible))
    if not wrong.size:
        return
    row = int(wrong[0])
    length, wanted = int(cache.length[row]), int(target[row])
    if not 0 <= wanted <= length:
        raise ValueError(f"sequence {row} has {length} tokens and must keep 0 to {length} of them; got {wanted}.")
    config = cache.config
    oldest = min(int(_oldest_return(cache)[row]), int(cache.quantized[row])) + config.sink_length
    missing = length - wanted if cache.retained is None else int(cache.retained[row]) - quantized_length(wanted, config)
    raise ValueError(
        f"sequence {row} must keep at least {oldest} of its {length} tokens, as those are in quantized blocks; "
        f"got {wanted}: keep more, or make the cache with KiviConfig(rewind={config.rewind + missing})."
    )


def _refill(layer: "LayerCache", length: jax.Array, quantized: jax.Array, in_rows: jax.Array) -> "LayerCache":
    """Takes the tokens that are unquantized again from the rows of a 16-bit layer, which held `in_rows [B]`."""
    config: KiviConfig = layer.config
    row = window_positions(config, length, quantized) - config.sink_length
    back = ((row >= 0) & (row < in_rows[:, None]))[:, None, :, None]

    def put(window, rows):
        index = jnp.clip(row, 0, rows.shape[2] - 1)[:, None, :, None]
        return jnp.where(back, jnp.take_along_axis(rows, index, axis=2), window)

    return dataclasses.replace(
        layer,
        key_window=put(layer.key_window, layer.key_codes),
        value_window=put(layer.value_window, layer.value_codes),
    )
