"""The options of the cache: what they store, and that attention over it stays attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import assert_same, filled, keys_and_values
from error_rule import assert_within_rule, unrotated
from test_cache import streamed

import kivi_jax
from kivi_jax import cache as kv
from kivi_jax.config import KiviConfig
from kivi_jax.hadamard import hadamard
from kivi_jax.kernels import reference
from kivi_jax.models.rope import Rotary
from kivi_jax.quantize import dequantize_per_channel, normalize, quantize_per_channel, quantize_per_token, token_norm

ROTARY = Rotary(head_dim=32, theta=10000.0, scaling=None, max_position_embeddings=2048)

OPTIONS = {
    "accurate": KiviConfig.accurate(),
    "compact": dataclasses.replace(KiviConfig.compact(), value_group_size=32),
    "paper": KiviConfig.paper(),
    "rotated, 16-bit values": KiviConfig(key_bits=4, value_bits=16, rotate=True, residual_length=40),
    "before RoPE, with norms": KiviConfig(pre_rope=True, key_norm=True, sink_length=3, value_clip=0.8),
    "unquantized keys before RoPE": KiviConfig(key_bits=16, pre_rope=True, residual_length=0),
    "float32 scales": KiviConfig(scale_dtype="float32", key_clip=0.75, value_bits=8),
    "float16 scales": KiviConfig(scale_dtype="float16", rotate=True, key_norm=True, value_clip=0.9),
    "keys per token": KiviConfig(key_axis="token", key_bits=4, residual_length=0),
    "values per channel": KiviConfig(value_axis="channel", value_group_size=128, key_norm=True),
    "both axes, before RoPE": KiviConfig(key_axis="token", value_axis="channel", pre_rope=True, rotate=False),
}
LENGTHS = (1, 128, 257, 300, 511)


def assert_options_survive(config, dtype, piece, rng):
    key, value = keys_and_values(rng, len(LENGTHS), 2, 511, 32, dtype)
    want = filled(key, value, LENGTHS, config)
    assert_same(streamed(key, value, LENGTHS, config, piece), want)


@pytest.mark.parametrize("name", OPTIONS)
def test_streamed_equals_one_shot(name, rng):
    assert_options_survive(OPTIONS[name], jnp.bfloat16, 37, rng)


@pytest.mark.parametrize("name", ["accurate", "before RoPE, with norms", "values per channel"])
def test_streamed_token_by_token_equals_one_shot(name, rng):
    assert_options_survive(OPTIONS[name], jnp.bfloat16, 1, rng)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("name", ["accurate", "float16 scales", "before RoPE, with norms"])
def test_streamed_equals_one_shot_in_other_dtypes(name, dtype, rng):
    """In float32 no rounding to a narrower type hides a product that a compiler fused on one path only."""
    assert_options_survive(OPTIONS[name], dtype, 37, rng)


def test_streamed_equals_one_shot_where_the_matrix_has_an_irrational_scale(rng):
    """128 ** -0.5 is no power of two: scaling by it rounds."""
    config = KiviConfig.accurate()
    key, value = keys_and_values(rng, 2, 1, 400, 128)
    assert_same(streamed(key, value, (400, 300), config, 37), filled(key, value, (400, 300), config))


ATTEND = {
    name: jax.jit(functools.partial(kivi_jax.attend, implementation=name), static_argnames=("sliding_window", "rotary"))
    for name in ("reference", "xla")
}


@functools.cache
def state(name, dtype):
    rng = np.random.default_rng(3)
    key, value = keys_and_values(rng, len(LENGTHS), 2, 511, 32, dtype)
    cache = filled(key, value, LENGTHS, OPTIONS[name], capacity=1024)
    return cache.layers[0], cache.length, cache.quantized


WIDE = ("accurate", "before RoPE, with norms", "keys per token", "values per channel")


@pytest.mark.parametrize(
    ("name", "implementation", "dtype"),
    [(name, "xla", jnp.bfloat16) for name in OPTIONS]
    + [(name, implementation, jnp.float32) for name in WIDE for implementation in ATTEND],
)
def test_attention_holds_the_error_rule(name, implementation, dtype, rng):
    layer, length, quantized = state(name, dtype)
    case = dict(rotary=ROTARY) if layer.config.pre_rope else {}
    q = jnp.asarray(2 * rng.normal(size=(len(LENGTHS), 4, 1, 32)), dtype)
    out = ATTEND[implementation](q, layer, length, quantized, **case)
    assert_within_rule(out, q, layer, length, quantized, factor=2, **case)
    new_key, new_value = keys_and_values(rng, len(LENGTHS), 2, 5, 32, dtype)
    q = jnp.asarray(rng.normal(size=(len(LENGTHS), 4, 5, 32)), dtype)
    case |= dict(new_key=new_key, new_value=new_value, counts=jnp.asarray([5, 1, 3, 5, 2], jnp.int32))
    out = ATTEND[implementation](q, layer, length, quantized, sliding_window=300, **case)
    assert_within_rule(out, q, layer, length, quantized, factor=2, sliding_window=300, **case)


@pytest.mark.parametrize("name", OPTIONS)
def test_in_8_bits_with_every_option_attention_is_that_of_what_went_in(name, rng):
    """The rule above takes keys and values from the cache; this takes those that were put in."""
    config = dataclasses.replace(OPTIONS[name], key_bits=8, value_bits=8, key_clip=1.0, value_clip=1.0)
    key, value = keys_and_values(rng, 1, 2, 511, 32)
    cache = filled(key, value, [511], config)
    q = jnp.asarray(rng.normal(size=(1, 4, 1, 32)), jnp.float32)
    case = dict(rotary=ROTARY) if config.pre_rope else {}
    out = kivi_jax.attend(q, cache.layers[0], cache.length, cache.quantized, **case)
    if config.pre_rope:
        q = ROTARY(q, jnp.full((1, 1), 510, jnp.int32))
        key = ROTARY(key, jnp.arange(511, dtype=jnp.int32)[None])
    scores = np.asarray(q, float)[0].reshape(2, 2, 32) @ np.asarray(key, float)[0].swapaxes(1, 2) / np.sqrt(32)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights @ np.asarray(value, float)[0] / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(np.asarray(out).reshape(2, 2, 32), want, atol=0.12)
    assert cache.quantized[0] > 0


@pytest.mark.parametrize("channels", [1, 2, 32, 64, 128, 256])
def test_hadamard_is_the_orthonormal_matrix_and_its_own_inverse(channels, rng):
    x = jnp.asarray(rng.normal(size=(3, 5, channels)), jnp.float32)
    np.testing.assert_allclose(hadamard(x), unrotated(x), atol=2e-6)
    np.testing.assert_allclose(hadamard(hadamard(x)), x, atol=2e-6)
    assert hadamard(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_rotation_spreads_an_outlier_over_all_channels(rng):
    x = np.zeros((1, 64), np.float32)
    x[0, 7] = 8
    assert np.array_equal(np.abs(hadamard(jnp.asarray(x))), np.ones((1, 64)))


@pytest.mark.parametrize("channels", [32, 80, 128])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_token_norm_is_the_length_and_depends_on_the_token_alone(channels, dtype, rng):
    x = jnp.asarray(rng.normal(size=(300, channels)) * rng.gamma(1, 3, (300, 1)), dtype)
    norm = jax.jit(token_norm)(x)
    exact = np.linalg.norm(np.asarray(x, np.float64), axis=-1)
    np.testing.assert_allclose(np.asarray(norm, np.float64), exact, rtol=2**-8)
    for part in (x[:1], x[7:20], x.reshape(3, 100, channels)):
        got = token_norm(part).reshape(-1)
        start = 7 if len(part) == 13 else 0
        assert np.array_equal(got, norm[start : start + got.size])


def test_a_token_of_zeros_comes_back_as_zeros(rng):
    key, value = keys_and_values(rng, 1, 1, 128, 32)
    key = key.at[:, :, 40].set(0)
    cache = filled(key, value, [128], dataclasses.replace(KiviConfig.accurate(), residual_length=0, sink_length=0))
    held, _ = reference.dequantize(cache.layers[0])
    assert cache.quantized[0] == 128 and not np.asarray(held[0, 0, 40]).any()
    assert np.isfinite(np.asarray(held)).all()


def test_norms_take_a_large_token_out_of_its_groups(rng):
    """One key a hundred times longer than the others ruins its groups, unless norms are stored."""
    key, value = keys_and_values(rng, 1, 1, 128, 32)
    key = key.at[:, :, 40].multiply(100)
    others = np.arange(128) != 40

    def error(config):
        held, _ = reference.dequantize(filled(key, value, [128], config).layers[0])
        return float(np.linalg.norm((np.asarray(held) - np.asarray(key))[0, 0][others]))

    assert error(KiviConfig(residual_length=0, key_norm=True)) < 0.5 * error(KiviConfig(residual_length=0))


def test_a_bad_token_stays_in_its_groups_with_every_option(rng):
    key, value = keys_and_values(rng, 1, 1, 256, 32)
    config = dataclasses.replace(KiviConfig.accurate(), residual_length=0, sink_length=0)
    clean = reference.dequantize(filled(key, value, [256], config).layers[0])
    dirty = reference.dequantize(filled(key.at[0, 0, 70, 5].set(jnp.nan), value, [256], config).layers[0])
    same = np.all(np.asarray(clean[0]) == np.asarray(dirty[0]), axis=(0, 1, 3))
    assert np.array_equal(same, (np.arange(256) < 64) | (np.arange(256) >= 96))
    assert np.array_equal(clean[1], dirty[1])


@pytest.mark.parametrize("clip", [0.5, 0.9])
@pytest.mark.parametrize("quantize", [quantize_per_channel, quantize_per_token])
def test_clip_shrinks_the_range_about_its_middle(quantize, clip, rng):
    x = jnp.asarray(rng.normal(size=(128, 32)), jnp.float32)
    full, shrunk = quantize(x, 2, 32, scale_dtype=jnp.float32), quantize(x, 2, 32, clip=clip, scale_dtype=jnp.float32)
    np.testing.assert_allclose(shrunk.scale, clip * full.scale, rtol=1e-6)
    middle = lambda q: q.zero + 1.5 * q.scale
    np.testing.assert_allclose(middle(shrunk), middle(full), atol=1e-6)
    assert shrunk.codes.min() == 0 and shrunk.codes.max() == 3


def test_clip_leaves_a_constant_group_and_the_largest_range_alone():
    constant = quantize_per_channel(jnp.full((32, 1), 0.75, jnp.float32), 2, 32, clip=0.5)
    assert np.array_equal(dequantize_per_channel(constant), np.full((32, 1), 0.75))
    wide = jnp.asarray(np.tile(np.float32([-3e38, 3e38]), 16)[:, None])
    assert np.isfinite(dequantize_per_channel(quantize_per_channel(wide, 2, 32, clip=0.5))).all()


def test_normalized_keys_have_length_one(rng):
    x = jnp.asarray(rng.normal(size=(50, 64)) * 3, jnp.float32)
    np.testing.assert_allclose(np.linalg.norm(normalize(x, token_norm(x)), axis=-1), 1, rtol=2**-8)


def test_the_window_holds_rotated_keys_and_values_and_plain_ones_before_rope(rng):
    key, value = keys_and_values(rng, 1, 1, 5, 32)
    held = filled(key, value, [5], KiviConfig(rotate=True)).layers[0]
    np.testing.assert_allclose(held.key_window[:, :, :5], unrotated(key), atol=1e-5)
    np.testing.assert_allclose(held.value_window[:, :, :5], unrotated(value), atol=1e-5)
    held = filled(key, value, [5], KiviConfig(pre_rope=True)).layers[0]
    assert np.array_equal(held.key_window[:, :, :5], key)


SHAPE = dict(batch_size=2, num_kv_heads=3, head_dim=64, max_length=256)


def test_each_layer_has_its_own_bits(rng):
    config = KiviConfig(key_bits=[2, 4, 16], value_bits=(2, 2, 8), key_norm=True)
    cache = kv.init(config, num_layers=3, **SHAPE)
    assert [(x.config.key_bits, x.config.value_bits) for x in cache.layers] == [(2, 2), (4, 2), (16, 8)]
    assert [x.key_codes.shape[2] for x in cache.layers] == [64, 128, 256]
    assert [x.key_norm is None for x in cache.layers] == [False, False, True]
    assert hash(config) == hash(KiviConfig(key_bits=(2, 4, 16), value_bits=(2, 2, 8), key_norm=True))
    keys = jnp.asarray(rng.normal(size=(3, 2, 3, 256, 64)), jnp.bfloat16)
    cache = jax.jit(kv.append)(cache, keys, keys)
    errors = []
    for n, layer in enumerate(cache.layers):
        held, _ = reference.dequantize(layer)
        errors.append(np.abs(np.asarray(held[:, :, :128]) - np.asarray(keys[n, :, :, :128], np.float32)).mean())
    assert errors[0] > 3 * errors[1] > 0 and errors[2] == 0


@pytest.mark.parametrize(
    "config",
    [
        KiviConfig(),
        KiviConfig.accurate(),
        KiviConfig.compact(),
        KiviConfig(key_bits=(2, 4), value_bits=(8, 2), key_norm=True, scale_dtype="float32"),
        KiviConfig(key_axis="token", key_group_size=64, value_axis="channel", value_group_size=128),
    ],
)
def test_bits_per_element_counts_what_is_stored(config):
    cache = kv.init(config, num_layers=2, **SHAPE)
    windows = sum(x.key_window.nbytes + x.value_window.nbytes for x in cache.layers)
    stored = cache.nbytes - windows - cache.length.nbytes - cache.quantized.nbytes
    assert cache.bits_per_element == 8 * stored / (2 * 2 * 2 * 3 * 256 * 64)


def test_presets_have_the_bits_they_promise():
    bits = lambda config: kv.init(config, num_layers=1, **SHAPE).bits_per_element
    assert bits(KiviConfig.paper()) == 3.0
    assert bits(KiviConfig.accurate()) == 3.125
    assert bits(KiviConfig.compact()) <= 2.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rotate=True, pre_rope=True), "rotate must be False with pre_rope=True"),
        (dict(key_norm=True, key_axis="token"), "key_norm must be False with key_axis='token'"),
        (dict(key_norm=True, key_bits=16), "key_norm must be False with key_bits=16"),
        (dict(key_clip=0), "key_clip must be a number above 0 and at most 1; got 0"),
        (dict(value_clip=1.5), "value_clip must be a number above 0 and at most 1; got 1.5"),
        (dict(key_clip=float("nan")), "key_clip must be a number above 0 and at most 1; got nan"),
        (dict(scale_dtype="int8"), "scale_dtype must be one of bfloat16, float16, float32; got 'int8'"),
        (dict(value_axis="head"), "value_axis must be one of channel, token; got 'head'"),
        (dict(rotate=1), "rotate must be one of False, True; got 1"),
        (dict(key_bits=(2, 3)), "key_bits must be one of 2, 4, 8, 16; got 3"),
        (dict(key_bits=()), r"key_bits must be one of 2, 4, 8, 16; got \(\)"),
        (dict(key_bits=(2, 2), value_bits=(2, 2, 4)), "must name the same layers; got 2 and 3 of them"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_sentence(change, message):
    with pytest.raises(ValueError, match=message) as error:
        KiviConfig(**change)
    assert str(error.value).count(". ") == 0


@pytest.mark.parametrize(
    ("config", "head_dim", "message"),
    [
        (KiviConfig(rotate=True), 96, "rotate needs a head_dim that is a power of two; got head_dim 96"),
        (KiviConfig(key_axis="token", value_bits=16), 80, "got head_dim 80 and key_group_size 32: use key_bits=16"),
        (KiviConfig(key_bits=(2, 2, 2)), 64, "must be for 1 layers; got 3 of them"),
        (KiviConfig.compact(), 32, "got head_dim 32 and value_group_size 64: use value_group_size=32"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(config, head_dim, message):
    with pytest.raises(ValueError, match=message):
        kv.init(config, num_layers=1, batch_size=1, num_kv_heads=1, head_dim=head_dim, max_length=8)


def test_rotary_and_pre_rope_go_together(rng):
    q = jnp.zeros((len(LENGTHS), 4, 1, 32), jnp.float32)
    with pytest.raises(ValueError, match="rotary goes with a cache that has pre_rope=True; got pre_rope=False and a"):
        kivi_jax.attend(q, *state("accurate", jnp.float32), rotary=ROTARY)
    with pytest.raises(ValueError, match="got pre_rope=True and no rotary"):
        kivi_jax.attend(q, *state("before RoPE, with norms", jnp.float32))


@pytest.mark.parametrize("implementation", ["gpu", "tpu"])
def test_a_kernel_never_sees_an_option_it_does_not_name(implementation, monkeypatch):
    """And without a name the portable implementation takes its place."""
    import importlib

    module = importlib.import_module(f"kivi_jax.kernels.{implementation}")
    monkeypatch.setattr(module, "FEATURES", frozenset(), raising=False)
    q = jnp.zeros((len(LENGTHS), 4, 1, 32), jnp.bfloat16)
    layer, *rest = state("accurate", jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=f"'{implementation}' supports no cache with key_norm"):
        kivi_jax.attend(q, layer, *rest, implementation=implementation)
    monkeypatch.setattr(kivi_jax.attention, "_platform", lambda: implementation)
    assert kivi_jax.attend(q, layer, *rest).shape == q.shape
