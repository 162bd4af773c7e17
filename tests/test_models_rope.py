"""Rotary frequencies against formulas worked out here by hand, one channel at a time."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from kivi_jax.models.rope import RopeScaling, attention_factor, inverse_frequencies, rotate, rotation

DIM, THETA = 64, 10000.0


def plain(i, theta=THETA):
    return 1 / theta ** (2 * i / DIM)


def frequencies(fields, theta=THETA):
    return inverse_frequencies(DIM, theta, RopeScaling.from_dict(fields))


def cos_sin(positions, fields, max_position_embeddings=64):
    scaling = RopeScaling.from_dict(fields)
    positions = jnp.asarray(positions, jnp.int32)
    return rotation(
        positions, head_dim=DIM, theta=THETA, scaling=scaling, max_position_embeddings=max_position_embeddings
    )


def test_default_type_means_plain_frequencies():
    assert RopeScaling.from_dict({"rope_type": "default"}) is None
    np.testing.assert_allclose(inverse_frequencies(DIM, THETA, None), [plain(i) for i in range(32)], rtol=1e-12)


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_linear_scaling_divides_every_frequency(name):
    np.testing.assert_allclose(frequencies({name: "linear", "factor": 4.0}), [plain(i) / 4 for i in range(32)])


def test_explicit_factors_divide_each_its_own_frequency():
    factors = np.linspace(1, 8, 32)
    got = frequencies({"rope_type": "explicit", "frequency_factors": factors.tolist()})
    np.testing.assert_allclose(got, [plain(i) / factors[i] for i in range(32)])


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between():
    fields = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    expected, kinds = [], set()
    for i in range(32):
        wave = 2 * math.pi / plain(i)
        if wave < 256 / 4:
            kinds.add("kept")
            expected.append(plain(i))
        elif wave > 256 / 1:
            kinds.add("stretched")
            expected.append(plain(i) / 8)
        else:
            kinds.add("blended")
            smooth = (256 / wave - 1) / (4 - 1)
            expected.append((1 - smooth) * plain(i) / 8 + smooth * plain(i))
    assert kinds == {"kept", "stretched", "blended"}
    np.testing.assert_allclose(frequencies(fields), expected, rtol=1e-12)


def yarn_expected(factor, original, fast, slow, truncate, theta=THETA):
    def turns_to_channel(turns):
        return DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turns_to_channel(fast), turns_to_channel(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    mixed = []
    for i in range(DIM // 2):
        ramp = min(max((i - low) / (high - low), 0), 1)
        mixed.append(plain(i, theta) / factor * ramp + plain(i, theta) * (1 - ramp))
    return mixed


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("fast", "slow"), [(32, 1), (16, 2)])
def test_yarn_blends_between_the_two_rotation_counts(truncate, fast, slow):
    fields = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": truncate,
    }
    np.testing.assert_allclose(frequencies(fields), yarn_expected(4.0, 2048, fast, slow, truncate), rtol=1e-12)
    if (fast, slow) == (32, 1):
        defaults = {key: fields[key] for key in ("rope_type", "factor", "original_max_position_embeddings")}
        assert (frequencies(defaults) == frequencies(fields)).all() == truncate


def test_yarn_ramp_ends_at_the_head_dim():
    fields = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100_000}
    assert DIM * math.log(100_000 / (2 * math.pi)) / (2 * math.log(100)) > DIM - 1
    np.testing.assert_allclose(frequencies(fields, 100.0), yarn_expected(4.0, 100_000, 32, 1, True, 100.0), rtol=1e-12)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"factor": 4.0}, 0.1 * math.log(4) + 1),
        ({"factor": 0.5}, 1.0),
        ({"factor": 4.0, "attention_factor": 1.5}, 1.5),
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0}, (0.07 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
        ({"factor": 40.0, "mscale": 0.7}, 0.1 * math.log(40) + 1),
    ],
)
def test_yarn_attention_factor_multiplies_cos_and_sin(fields, expected):
    fields = {"rope_type": "yarn", "original_max_position_embeddings": 64, **fields}
    assert attention_factor(RopeScaling.from_dict(fields)) == pytest.approx(expected)
    cos, sin = cos_sin([[0, 7]], fields)
    np.testing.assert_allclose(cos**2 + sin**2, expected**2, rtol=1e-6)


def test_dynamic_scaling_grows_the_base_by_each_rows_own_length():
    factor, original = 2.0, 64
    positions = np.array([[3, 10, 40], [70, 99, 80], [61, 62, 63]])
    cos, sin = cos_sin(positions, {"rope_type": "dynamic", "factor": factor}, original)
    for row, length in enumerate((41, 100, 64)):
        length = max(length, original)
        base = THETA * (factor * length / original - (factor - 1)) ** (DIM / (DIM - 2))
        angles = positions[row][:, None] * np.array([plain(i, base) for i in range(32)])
        np.testing.assert_allclose(cos[row], np.cos(angles), atol=2e-5)
        np.testing.assert_allclose(sin[row], np.sin(angles), atol=2e-5)


def test_dynamic_scaling_within_the_original_context_is_plain():
    with_scaling = cos_sin([[0, 5, 63]], {"rope_type": "dynamic", "factor": 4.0})
    np.testing.assert_allclose(with_scaling, cos_sin([[0, 5, 63]], {}), atol=1e-5)


def test_cos_and_sin_are_float32_of_the_positions_given():
    cos, sin = cos_sin([[5, 0], [9, 300]], {})
    assert cos.dtype == sin.dtype == jnp.float32
    assert cos.shape == (2, 2, 32)
    angles = np.array([[5, 0], [9, 300]])[..., None] * np.array([plain(i) for i in range(32)])
    np.testing.assert_allclose(cos, np.cos(angles), atol=3e-5)
    np.testing.assert_allclose(sin, np.sin(angles), atol=3e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rotation_turns_channel_i_with_channel_i_of_the_second_half(rng, dtype):
    x = jnp.asarray(rng.normal(size=(2, 3, 5, DIM)), dtype)
    cos, sin = cos_sin(np.arange(10).reshape(2, 5), {})
    got = rotate(x, cos, sin)
    assert got.dtype == dtype
    wide = np.asarray(x, np.float64)
    pairs = wide[..., :32] + 1j * wide[..., 32:]
    turned = pairs * np.exp(1j * np.arange(10).reshape(2, 1, 5, 1) * np.array([plain(i) for i in range(32)]))
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, atol=1e-5 if dtype == jnp.float32 else 0.02 * np.abs(expected).max()
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "longrope.*not supported"),
        ({"type": "su"}, "'su'.*not supported"),
        ({"type": "mrope", "rope_type": "default"}, "once; got rope_type 'default' and type 'mrope'"),
        ({"rope_type": "linear"}, "got no factor"),
        ({"rope_type": "linear", "factor": 0.0}, "factor must be greater than 0; got 0.0"),
        ({"rope_type": "default", "factor": 2.0}, "no other field; got factor"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 3.0}, "got alpha, which is not supported"),
        ({"rope_type": "llama3", "factor": 8.0}, "got no low_freq_factor"),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
            },
            "high_freq_factor must be greater than its low_freq_factor; got 1.0 and 4.0",
        ),
    ],
)
def test_scaling_that_cannot_be_honoured_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling.from_dict(fields)
