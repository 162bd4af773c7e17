"""The debug check for NaN and infinity in a cache."""

import jax.numpy as jnp
import numpy as np

from kivi_jax.cache import KVCache, LayerCache, token_axis, window_positions


def check_finite(cache: KVCache) -> None:
    """Raises unless every number that the cache holds is finite.

    Such a number comes from the keys and values that went in, and it spreads: to its group when it is quantized, and
    from a layer's output to the layers and tokens after it. So the one named is of the first layer that has any, and in
    it the earliest. Reads the whole cache: for debugging.

    Raises:
        FloatingPointError: naming the layer, the sequence, whether it is a key or a value, and the position; or the
            positions of its group, where it is in one.
    """
    window = np.asarray(window_positions(cache.config, cache.length, cache.quantized))
    quantized = np.asarray(cache.quantized)
    for n, layer in enumerate(cache.layers):
        found = [bad for side in ("key", "value") for bad in _bad(layer, side, window, quantized)]
        if found:
            earliest = min(found)
            # A token's own place is named rather than the group that it also spoiled.
            same = [x for x in found if x[0] <= earliest[1] and x[2] == earliest[2]]
            first, last, row, side = min(same, key=lambda x: (x[1] - x[0], x))
            where = f"position {first}" if first == last else f"positions {first} to {last}"
            raise FloatingPointError(f"expected finite numbers; got a {side} of layer {n}, sequence {row}, {where}.")


def _bad(layer: LayerCache, side: str, window: np.ndarray, quantized: np.ndarray):
    """(first position, last position, sequence, side) of what is not finite, for each place where tokens are held."""
    sinks, capacity = layer.config.sink_length, layer.capacity
    bad = np.asarray(~jnp.isfinite(getattr(layer, f"{side}_window")).all(axis=(1, 3)))
    for row, slot in np.argwhere(bad & (window >= 0)):
        yield int(window[row, slot]), int(window[row, slot]), int(row), side
    # Codes are finite numbers, unless they are the tokens themselves; a group that had others has such a zero.
    names = ("zero", "scale", "norm") if getattr(layer, f"{side}_zero") is not None else ("codes",)
    for name in (f"{side}_{part}" for part in names):
        if (field := getattr(layer, name, None)) is None:
            continue
        axis = token_axis(name, layer.config)
        bad = np.asarray(~jnp.isfinite(field).all(axis=tuple(a for a in range(1, field.ndim) if a != axis)))
        group = capacity // bad.shape[1]
        for row, index in np.argwhere(bad & (np.arange(bad.shape[1]) * group < quantized[:, None])):
            yield sinks + int(index) * group, sinks + int(index) * group + group - 1, int(row), side
