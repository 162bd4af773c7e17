"""Prompts and 16-bit caches on a GPU, which cuDNN attends to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import filled, keys_and_values
from error_rule import assert_within_rule

import kivi_jax
from kivi_jax.config import KiviConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("jax.default_backend() != 'gpu'", reason="needs an NVIDIA GPU and JAX_PLATFORMS=cuda,cpu"),
]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (4, 128)])
@pytest.mark.parametrize("piece", [False, True])
def test_a_16_bit_cache_holds_the_error_rule(piece, group, head_dim, dtype, rng):
    lengths = (1, 127, 128, 300, 900)
    config = KiviConfig(key_bits=16, value_bits=16, residual_length=32, sink_length=3)
    key, value = keys_and_values(rng, len(lengths), 2, 1024, head_dim, dtype)
    cache = filled(key, value, lengths, config)
    queries = 5 if piece else 1
    q = jnp.asarray(rng.normal(size=(len(lengths), 2 * group, queries, head_dim)), dtype)
    beside = {}
    if piece:
        new_key, new_value = keys_and_values(rng, len(lengths), 2, queries, head_dim, dtype)
        beside = dict(new_key=new_key, new_value=new_value, counts=jnp.asarray([5, 1, 3, 0, 5], jnp.int32))
    state = cache.layers[0], cache.length, cache.quantized
    out = jax.jit(lambda *a: kivi_jax.attend(*a, **beside, implementation="gpu"))(q, *state)
    assert_within_rule(out, q, *state, factor=4, **beside)


@pytest.mark.parametrize("sliding_window", [None, 70])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_prompt_equals_the_reference(dtype, sliding_window, rng):
    key, value = keys_and_values(rng, 2, 2, 300, 128, dtype)
    q = jnp.asarray(rng.normal(size=(2, 8, 300, 128)), dtype)
    counts = jnp.asarray([300, 77], jnp.int32)
    dead = (jnp.arange(300) >= counts[:, None])[:, None, :, None]
    key, value = (jnp.where(dead, jnp.nan, x.astype(jnp.float32)).astype(dtype) for x in (key, value))
    got, want = (
        np.asarray(
            kivi_jax.attend_prompt(q, key, value, counts, sliding_window=sliding_window, implementation=name), float
        )
        for name in ("gpu", "reference")
    )
    valid = ~np.broadcast_to(dead, got.shape)
    error = np.sqrt(((got - want)[valid] ** 2).mean()) / want[valid].std()
    assert error < (1e-2 if dtype == jnp.bfloat16 else 2e-3)
