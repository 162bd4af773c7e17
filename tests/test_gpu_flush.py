"""The flush kernel against the library's quantizer: the same bits, and nothing touched that is not due."""

import dataclasses

import gpu_emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import keys_and_values

from kivi_jax import cache as kv
from kivi_jax.config import BLOCK, KiviConfig
from kivi_jax.kernels import gpu

CONFIGS = {
    "2bit": (KiviConfig(), 128),
    "4bit": (KiviConfig(key_bits=4, value_bits=4, key_group_size=64), 64),
    "8bit": (KiviConfig(key_bits=8, value_bits=8, key_group_size=128, value_group_size=64), 64),
    "mixed_d256": (KiviConfig(key_bits=4, value_bits=2, value_group_size=128, sink_length=3), 256),
    "norm_and_clip": (KiviConfig(key_norm=True, key_clip=0.9, value_clip=0.8, sink_length=4), 128),
    "ring": (KiviConfig(residual_length=50, value_group_size=64), 64),
}
LENGTHS = {  # of three sequences, and how many of their tokens are quantized: one is due, one is not, one is late
    "2bit": ([256, 255, 700], [0, 0, 384]),
    "ring": ([179, 100, 500], [0, 0, 256]),
}


def case(name: str, rng, dtype):
    """A layer whose sequences are before their flush, with a constant group, a NaN and halves between codes."""
    config, head_dim = CONFIGS[name]
    lengths, quantized = LENGTHS.get(name, ([config.sink_length + n for n in (256, 255, 700)], [0, 0, 384]))
    key, value = keys_and_values(rng, 3, 2, config.window_length, head_dim)
    key = jnp.round(key * 4) / 4 + 0.0  # many numbers half way between two codes, and no negative zero
    key, value = key.at[0, 0, :, 5].set(1.5), value.at[0, 0, config.sink_length + 7].set(-2.0)
    last = config.sink_length + 150  # of the block of the last sequence
    key, value = key.at[2, 1, last, 9].set(jnp.nan), value.at[2, 1, last, 33].set(jnp.inf)
    cache = kv.init(config, num_layers=1, batch_size=3, num_kv_heads=2, head_dim=head_dim, max_length=896, dtype=dtype)
    layer = dataclasses.replace(cache.layers[0], key_window=key.astype(dtype), value_window=value.astype(dtype))
    fields = {}
    for field in ("key_codes", "value_codes", "key_scale", "key_zero", "value_scale", "value_zero"):
        x = getattr(layer, field)
        fields[field] = jnp.asarray(
            rng.integers(0, 255, x.shape) if x.dtype == jnp.uint8 else rng.normal(size=x.shape), x.dtype
        )
    return dataclasses.replace(layer, **fields), jnp.asarray(lengths, jnp.int32), jnp.asarray(quantized, jnp.int32)


def assert_same_bits(got, want):
    for field in dataclasses.fields(want):
        x, y = getattr(got, field.name), getattr(want, field.name)
        if field.name != "config" and y is not None:
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), f"{field.name} differs"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CONFIGS)
def test_same_bits_emulated(name, dtype, monkeypatch, rng):
    from kivi_jax.kernels.gpu import flushing

    layer, length, quantized = case(name, rng, dtype)
    monkeypatch.setattr(flushing, "gpu", gpu_emulator)
    batch, heads, _, head_dim = layer.key_window.shape
    job = flushing.Job(batch, heads, layer.capacity, head_dim, jnp.dtype(dtype), layer.config)
    arrays = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer) if f.name != "config"}
    arrays = {name: np.asarray(x) for name, x in arrays.items() if x is not None}
    arrays |= dict(length=np.asarray(length), quantized=np.asarray(quantized))
    emit = lambda pointers, shared: flushing.flush_head(pointers, shared, job)
    got = gpu_emulator.launch(emit, arrays, 4 * BLOCK, batch * heads * job.blocks, 4)
    got = dataclasses.replace(layer, **{n: x for n, x in got.items() if n not in ("length", "quantized")})
    assert_same_bits(got, jax.jit(kv.flush_layer)(layer, length, quantized))


@pytest.mark.gpu
@pytest.mark.skipif("jax.default_backend() != 'gpu'", reason="needs an NVIDIA GPU and JAX_PLATFORMS=cuda,cpu")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CONFIGS)
def test_same_bits(name, dtype, rng):
    layer, length, quantized = case(name, rng, dtype)
    want = jax.jit(kv.flush_layer)(layer, length, quantized)
    assert_same_bits(jax.jit(gpu.flush)(layer, length, quantized), want)
