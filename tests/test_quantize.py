import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kivi_jax.quantize import (
    Quantized,
    dequantize_per_channel,
    dequantize_per_token,
    quantize_per_channel,
    quantize_per_token,
)


def formula(x, bits):
    """The design's formula in numpy, over the last axis of a float32 array."""
    f32 = np.float32
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    rounded = lambda a: a.astype(ml_dtypes.bfloat16).astype(f32)
    scale, zero = rounded((high - low) * f32(1 / (2**bits - 1))), rounded(low)
    codes = np.clip(np.round((x - zero) / np.where(scale > 0, scale, 1)), 0, 2**bits - 1)
    return np.where(scale > 0, codes, 0), scale[..., 0], zero[..., 0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_per_channel_follows_the_formula_bit_for_bit(bits, group, dtype, rng):
    x = jnp.asarray(rng.normal(size=(2, 256, 6)) * rng.gamma(1, 3, (6,)), dtype)
    got = jax.jit(quantize_per_channel, static_argnums=(1, 2))(x, bits, group)
    grouped = np.asarray(x, np.float32).reshape(2, 256 // group, group, 6).transpose(0, 1, 3, 2)
    codes, scale, zero = formula(grouped, bits)
    assert np.array_equal(got.codes, codes.transpose(0, 1, 3, 2).reshape(2, 256, 6))
    assert np.array_equal(np.asarray(got.scale, np.float32), scale)
    assert np.array_equal(np.asarray(got.zero, np.float32), zero)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_per_token_follows_the_formula_bit_for_bit(bits, group, dtype, rng):
    x = jnp.asarray(rng.normal(size=(3, 40, 128)) * 2, dtype)
    got = jax.jit(quantize_per_token, static_argnums=(1, 2))(x, bits, group)
    codes, scale, zero = formula(np.asarray(x, np.float32).reshape(3, 40, 128 // group, group), bits)
    assert np.array_equal(got.codes, codes.reshape(3, 40, 128))
    assert got.scale.shape == (3, 128 // group, 40)
    assert np.array_equal(np.asarray(got.scale, np.float32), scale.swapaxes(1, 2))
    assert np.array_equal(np.asarray(got.zero, np.float32), zero.swapaxes(1, 2))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("quantize", "dequantize"),
    [(quantize_per_channel, dequantize_per_channel), (quantize_per_token, dequantize_per_token)],
)
def test_error_is_half_a_step_at_most_and_more_bits_are_closer(quantize, dequantize, bits, rng):
    x = jnp.asarray(rng.normal(size=(128, 64)), jnp.float32)
    q = quantize(x, bits, 32)
    error = np.abs(np.asarray(dequantize(q)) - np.asarray(x))
    step = float(q.scale.max())
    # Half a step, and what rounding the scale and the zero to 8 bits of mantissa moves the ends of the range by.
    assert 0 < error.max() <= step / 2 + 2**-8 * 2 * float(jnp.abs(x).max())


@pytest.mark.parametrize("value", [0.0, 1.0, -3.140625, 1e-30, 65504.0])
def test_constant_group_comes_back_as_its_constant(value):
    x = jnp.full((128, 32), value, jnp.float32)
    for quantize, dequantize in (
        (quantize_per_channel, dequantize_per_channel),
        (quantize_per_token, dequantize_per_token),
    ):
        q = quantize(x, 2, 32)
        assert not q.codes.any() and not q.scale.any()
        assert np.array_equal(dequantize(q), x.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_number_stays_in_its_group(bad, rng):
    clean = rng.normal(size=(128, 64)).astype(np.float32)
    dirty = clean.copy()
    dirty[70, 5] = bad
    for quantize, dequantize, rows, columns in (
        (quantize_per_channel, dequantize_per_channel, slice(64, 96), slice(5, 6)),
        (quantize_per_token, dequantize_per_token, slice(70, 71), slice(0, 32)),
    ):
        want, got = (quantize(jnp.asarray(x), 2, 32) for x in (clean, dirty))
        inside = np.zeros(clean.shape, bool)
        inside[rows, columns] = True
        assert np.array_equal(np.asarray(got.codes)[~inside], np.asarray(want.codes)[~inside])
        assert not np.asarray(got.codes)[inside].any()
        assert np.array_equal(np.isnan(dequantize(got)), inside)
        assert np.isnan(np.asarray(got.zero, np.float32)).sum() == 1


def test_range_wider_than_float32_keeps_its_ends():
    x = jnp.asarray(np.tile(np.float32([-3e38, 3e38]), 64)[:, None], jnp.float32)
    q = quantize_per_channel(x, 2, 32)
    assert np.isfinite(np.asarray(q.scale, np.float32)).all()
    assert np.array_equal(np.asarray(q.codes)[:, 0], np.tile([0, 3], 64))


def test_stored_scale_is_the_one_used_under_jit(rng):
    """A compiler that keeps a scale in float32 between its rounding and its use gives other codes."""
    x = jnp.asarray(rng.normal(size=(4096, 64)), jnp.float32)

    def codes_of_narrow(x):
        return quantize_per_channel((x * 1.5).astype(jnp.bfloat16), 4, 32)

    for got, want in zip(jax.jit(codes_of_narrow)(x), codes_of_narrow(x), strict=True):
        assert np.array_equal(got, want)


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="divide the number of tokens; got group_size 48 and 128"):
        quantize_per_channel(jnp.zeros((128, 64)), 2, 48)
    with pytest.raises(ValueError, match="divide the number of channels; got group_size 128 and 64"):
        quantize_per_token(jnp.zeros((128, 64)), 2, 128)
    with pytest.raises(ValueError, match="bits must be 2, 4 or 8; got 3"):
        quantize_per_token(jnp.zeros((128, 64)), 3, 32)


def test_quantized_is_a_pytree(rng):
    q = quantize_per_token(jnp.asarray(rng.normal(size=(128, 64)), jnp.float32), 2, 32)
    assert isinstance(jax.tree.map(lambda x: x, q), Quantized) and len(jax.tree.leaves(q)) == 3
