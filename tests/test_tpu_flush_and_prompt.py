"""The TPU flush, to the bit, and the TPU attention of prompts, in interpret mode."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import ROWS, filled, keys_and_values
from error_rule import assert_within_rule

from kivi_jax import cache as kv
from kivi_jax.config import BLOCK, KiviConfig
from kivi_jax.kernels import tpu

CONFIGS = {
    "tiles of two blocks of scales": (KiviConfig(), 128, 1024),
    "ring that is no multiple of a block, sinks": (KiviConfig(residual_length=100, sink_length=5), 128, 512),
    "tokens on lanes": (KiviConfig(key_group_size=64, value_group_size=64), 64, 1024),
    "tokens on lanes, scales on sublanes": (KiviConfig(key_bits=4, value_bits=8, value_group_size=32), 64, 512),
    "norms": (KiviConfig(key_norm=True, key_group_size=128, value_group_size=128), 128, 1024),
    "not quantized": (KiviConfig(key_bits=16, value_bits=16), 64, 512),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_flush_equals_the_portable_one_to_the_bit(case, rng):
    config, channels, capacity = CONFIGS[case]
    oldest = config.sink_length + config.residual_length
    lengths = (oldest + BLOCK - 1, oldest + BLOCK, oldest + 2 * BLOCK, oldest + 2 * BLOCK - 1)
    key, value = keys_and_values(rng, len(lengths), 2, max(lengths), channels, jnp.bfloat16)
    before = filled(key[:, :, :-1], value[:, :, :-1], [n - 1 for n in lengths], config, capacity)
    layer, length = before.layers[0], jnp.asarray(lengths, jnp.int32)
    last = lambda x: jnp.take_along_axis(x, (length - 1)[:, None, None, None], axis=2)
    layer = kv.write_token(layer, last(key), last(value), length - 1)
    want = jax.jit(kv.flush_layer)(layer, length, before.quantized)
    got = jax.jit(functools.partial(tpu.flush, interpret=True))(layer, length, before.quantized)
    changed = False
    for name in (*ROWS, "key_window", "value_window"):
        if (x := getattr(want, name)) is None:
            continue
        assert np.asarray(getattr(got, name)).tobytes() == np.asarray(x).tobytes(), name
        changed |= np.asarray(x).tobytes() != np.asarray(getattr(layer, name)).tobytes()
    assert changed


def test_where_no_sequence_is_due_the_flush_touches_nothing(rng):
    """Neither the rows of the sequence that its one step visits, dead ones too, nor another's."""
    key, value = keys_and_values(rng, 3, 1, 511, 128, jnp.bfloat16)
    cache = filled(key, value, (400, 300, 511), KiviConfig(), 1024)
    (layer,) = cache.layers
    layer = dataclasses.replace(layer, key_codes=layer.key_codes ^ 255, value_codes=layer.value_codes ^ 255)
    got = jax.jit(functools.partial(tpu.flush, interpret=True))(layer, cache.length, cache.quantized)
    for name in ("key_codes", "key_scale", "value_codes", "value_zero"):
        assert np.array_equal(getattr(got, name), getattr(layer, name)), name


def test_flush_of_a_full_cache_touches_nothing(rng):
    config = KiviConfig(residual_length=0)
    key, value = keys_and_values(rng, 1, 1, 256, 128, jnp.bfloat16)
    cache = filled(key, value, (256,), config)
    assert cache.quantized[0] == cache.capacity
    got = jax.jit(functools.partial(tpu.flush, interpret=True))(cache.layers[0], cache.length, cache.quantized)
    for name in ("key_codes", "key_scale", "value_codes", "value_zero"):
        assert np.array_equal(getattr(got, name), getattr(cache.layers[0], name)), name


@pytest.mark.parametrize(("tokens", "channels", "sliding_window"), [(200, 128, None), (256, 64, 70)])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_prompt_attention_holds_the_error_rule(tokens, channels, sliding_window, spread, rng):
    """A prompt is a piece beside an empty cache."""
    key, value = keys_and_values(rng, 2, 2, tokens, channels, jnp.bfloat16)
    q = jnp.asarray(spread * rng.normal(size=(2, 4, tokens, channels)), jnp.bfloat16)
    counts = jnp.asarray([tokens, tokens // 3], jnp.int32)
    padding = (jnp.arange(tokens) >= counts[:, None])[:, None, :, None]
    key, value = (jnp.where(padding, jnp.bfloat16(jnp.nan), x) for x in (key, value))
    out = tpu.attend_prompt(q, key, value, counts, sliding_window=sliding_window, interpret=True)
    assert out.dtype == jnp.bfloat16 and out.shape == q.shape
    empty = filled(key[:, :, :0], value[:, :, :0], (0, 0), KiviConfig(), BLOCK)
    piece = dict(new_key=key, new_value=value, counts=counts, sliding_window=sliding_window)
    assert_within_rule(out, q, empty.layers[0], empty.length, empty.quantized, factor=4, **piece)


def test_prompts_of_other_dtypes_and_head_dims_are_refused():
    for dtype, channels, message in ((jnp.float32, 128, "in bfloat16; got float32"), (jnp.bfloat16, 80, "got 80")):
        x = jnp.zeros((1, 1, 128, channels), dtype)
        with pytest.raises(NotImplementedError, match=message):
            tpu.attend_prompt(x, x, x)
