"""Filled caches and random keys and values for the tests."""

import jax
import jax.numpy as jnp
import numpy as np

from kivi_jax import cache as kv
from kivi_jax.cache import KVCache, token_axis, window_positions
from kivi_jax.config import BLOCK, KiviConfig

ROWS = ("key_codes", "key_scale", "key_zero", "key_norm", "value_codes", "value_scale", "value_zero")


def keys_and_values(rng, batch, heads, tokens, channels, dtype=jnp.float32):
    """Keys with a few large channels, as models have them, and values, `[B, H, T, D]`."""
    channel = np.where(np.arange(channels) % 17 == 3, 6.0, 1.0)
    key = rng.normal(size=(batch, heads, tokens, channels)) * channel + rng.normal(size=(heads, 1, channels)) * channel
    value = rng.normal(size=(batch, heads, tokens, channels))
    return jnp.asarray(key, dtype), jnp.asarray(value, dtype)


def filled(key, value, counts, config: KiviConfig, capacity=None) -> KVCache:
    """A one-layer cache that took in the first `counts` tokens of key and value at once."""
    batch, heads, tokens, channels = key.shape
    cache = kv.init(
        config,
        num_layers=1,
        batch_size=batch,
        num_kv_heads=heads,
        head_dim=channels,
        max_length=capacity or tokens,
        dtype=key.dtype,
    )
    counts = jnp.asarray(counts, jnp.int32)
    layer = jax.jit(kv.prefill_layer)(cache.layers[0], key, value, counts)
    return kv.advance(cache, (layer,), counts)


def live_contents(cache: KVCache) -> list[dict[str, np.ndarray]]:
    """For each sequence: every field of every layer, cut to its live rows and window slots."""
    length, quantized = np.asarray(cache.length), np.asarray(cache.quantized)
    slots = np.asarray(window_positions(cache.config, cache.length, cache.quantized)) >= 0
    contents = []
    for row in range(cache.batch_size):
        live = {"length": length[row], "quantized": quantized[row]}
        for n, layer in enumerate(cache.layers):
            for name in ROWS:
                if (field := getattr(layer, name)) is None:
                    continue
                axis = token_axis(name, layer.config) - 1
                field = np.asarray(field[row])
                rows = field.shape[axis] * (quantized[row] // BLOCK) * BLOCK // cache.capacity
                live[f"{n}.{name}"] = np.take(field, np.arange(rows), axis)
            for name in ("key_window", "value_window"):
                live[f"{n}.{name}"] = np.asarray(getattr(layer, name)[row])[:, slots[row]]
        contents.append(live)
    return contents


def assert_same(got: KVCache, want: KVCache) -> None:
    """Bit-identity of everything live."""
    for row, (a, b) in enumerate(zip(live_contents(got), live_contents(want), strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            x, y = np.asarray(a[name]), np.asarray(b[name])
            assert x.shape == y.shape and x.tobytes() == y.tobytes(), f"sequence {row}: {name} differs"
