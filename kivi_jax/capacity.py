"""Room for more: a cache with another capacity, and several caches in one."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kivi_jax.cache import KVCache, LayerCache, token_axis
from kivi_jax.config import BLOCK


def resize(cache: KVCache, max_length: int) -> KVCache:
    """The same sequences with room for `max_length` tokens each, rounded up to a multiple of 128.

    Raises:
        ValueError: a sequence has more tokens than that (under jit, where lengths are not known: `max_length` is below
            the capacity); nothing is dropped.
    """
    if isinstance(max_length, bool) or not isinstance(max_length, int | np.integer) or max_length < 1:
        raise ValueError(f"max_length must be an integer of 1 or more; got {max_length!r}.")
    capacity = -(-int(max_length) // BLOCK) * BLOCK
    if capacity < cache.capacity:
        known = not isinstance(cache.length, jax.core.Tracer)
        longest = int(cache.length.max()) if known else cache.capacity
        if longest > max_length:
            raise ValueError(f"max_length must be at least the {longest} tokens of a sequence; got {max_length}.")
    if capacity == cache.capacity:
        return cache
    return dataclasses.replace(cache, layers=tuple(_resize_layer(layer, capacity) for layer in cache.layers))


def concatenate(caches: Sequence[KVCache]) -> KVCache:
    """The sequences of all caches, one after the other, with the largest of their capacities.

    Raises:
        ValueError: there is no cache, or they differ in their config, layers, heads, head_dim or dtype.
    """
    caches = tuple(caches)
    if not caches:
        raise ValueError("concatenate takes 1 cache or more; got none.")
    first = traits(caches[0])
    for n, cache in enumerate(caches):
        for name, value in traits(cache).items():
            if value != first[name]:
                raise ValueError(f"cache {n} must have the {name} {first[name]} of cache 0; got {value}.")
    capacity = max(cache.capacity for cache in caches)
    return jax.tree.map(lambda *x: jnp.concatenate(x), *(resize(cache, capacity) for cache in caches))


def traits(cache: KVCache) -> dict[str, object]:
    """What caches must have in common to be used together: each field of the config, and the shape of a token."""
    _, heads, _, channels = cache.layers[0].key_window.shape
    shape = {
        "num_layers": len(cache.layers),
        "num_kv_heads": heads,
        "head_dim": channels,
        "dtype": str(cache.layers[0].key_window.dtype),
    }
    return {f.name: getattr(cache.config, f.name) for f in dataclasses.fields(cache.config)} | shape


def _resize_layer(layer: LayerCache, capacity: int) -> LayerCache:
    def fit(name, field):
        axis = token_axis(name, layer.config)
        size = field.shape[axis] * capacity // layer.capacity
        if size <= field.shape[axis]:
            return jax.lax.slice_in_dim(field, 0, size, axis=axis)
        more = [(0, 0)] * field.ndim
        more[axis] = (0, size - field.shape[axis])
        return jnp.pad(field, more)

    names = [f.name for f in dataclasses.fields(layer) if f.name not in ("key_window", "value_window", "config")]
    fields = {name: field for name in names if (field := getattr(layer, name)) is not None}
    return dataclasses.replace(layer, **{name: fit(name, field) for name, field in fields.items()})
