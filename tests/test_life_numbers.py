"""Numbers no cache likes: what is wrong stays where it is, and is named; what is only unusual is held."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import assert_same, filled, keys_and_values
from error_rule import assert_within_rule, dequantize64
from flax import nnx
from small_models import ids, small

import kivi_jax
from kivi_jax import KiviConfig, check_finite, gather
from kivi_jax import cache as kv

KIVI = KiviConfig(residual_length=64, sink_length=2)
append = jax.jit(kv.append)
attend = jax.jit(kivi_jax.attend)


@pytest.fixture(scope="module")
def tokens():
    return keys_and_values(np.random.default_rng(0), 2, 2, 384, 32, jnp.bfloat16)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [1, 100, 290], ids=["sink", "quantized", "window"])
def test_a_bad_number_of_one_sequence_changes_no_bit_of_another(position, bad, tokens):
    key, value = (x.at[0, 1, position, 7].set(bad) for x in tokens)
    counts = jnp.asarray([300, 280], jnp.int32)
    dirty, clean = (filled(k, v, counts, KIVI) for k, v in ((key, value), tokens))
    piece = lambda x: x[None, :, :, 300:350]
    dirty, clean = (append(c, piece(k), piece(v)) for c, k, v in ((dirty, key, value), (clean, *tokens)))
    assert_same(gather(dirty, np.asarray([1])), gather(clean, np.asarray([1])))
    q = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 1, 32)), jnp.bfloat16)
    got, want = (attend(q, c.layers[0], c.length, c.quantized) for c in (dirty, clean))
    assert np.array_equal(got[1], want[1]) and bool(jnp.isfinite(got[1]).all())
    assert np.array_equal(got[0, :2], want[0, :2]), "nor of the sequence's other head"
    assert not bool(jnp.isfinite(got[0, 2:]).all()), "and it is not hidden"


@pytest.mark.parametrize(
    ("side", "position", "named"),
    [
        ("key", 1, "position 1"),
        ("key", 100, "positions 98 to 129"),
        ("key", 290, "position 290"),
        ("value", 100, "position 100"),
        ("value", 290, "position 290"),
    ],
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_debug_check_names_layer_sequence_and_position(side, position, named, bad, tokens):
    config = KIVI
    good = kv.init(config, num_layers=3, batch_size=2, num_kv_heads=2, head_dim=32, max_length=384)
    spoiled = [
        x.at[1, 1, position, 7].set(bad) if side == s else x for s, x in zip(("key", "value"), tokens, strict=True)
    ]
    check_finite(append(good, *([x] * 3 for x in tokens)))
    cache = append(good, *([x, y, y] for x, y in zip(tokens, spoiled, strict=True)))
    with pytest.raises(FloatingPointError, match=f"got a {side} of layer 1, sequence 1, {named}\\."):
        check_finite(cache)


def test_the_debug_check_sees_rows_of_every_option_and_only_what_is_live(tokens):
    key, value = tokens
    spoiled = key.at[0, 0, 40].set(jnp.nan)
    for change in (
        dict(key_norm=True),
        dict(key_bits=16, value_bits=16),
        dict(rotate=True),
        dict(value_axis="channel"),
    ):
        config = dataclasses.replace(KIVI, **change)
        check_finite(filled(key, value, [300, 280], config))
        with pytest.raises(FloatingPointError, match=r"got a key of layer 0, sequence 0, positions? "):
            check_finite(filled(spoiled, value, [300, 280], config))
        check_finite(filled(spoiled, value, [39, 280], config))  # it has not come yet, though its slot may hold it


def test_a_bad_token_of_a_model_stays_in_its_sequence():
    """An embedding of NaN: one sequence is spoiled from there on, the other does not notice, the check says where."""
    params = small(layers=2)
    graphdef, weights = nnx.split(params)
    spoiled = nnx.merge(graphdef, jax.tree.map(jnp.copy, weights))
    spoiled.embed_tokens.embedding[...] = spoiled.embed_tokens.embedding[...].at[96].set(jnp.nan)
    prompts = [ids(190, 1), ids(165, 2)]
    prompts = [[min(token, 95) for token in row] for row in prompts]
    prompts[0][150] = 96
    settings = dict(max_new_tokens=4, max_length=512, cache=KIVI, eos_token_id=())
    clean = kivi_jax.generate(params, prompts, **settings)
    out = kivi_jax.generate(spoiled, prompts, **settings)
    assert np.array_equal(out.tokens[1], clean.tokens[1]) or 96 in clean.tokens[1]
    assert np.array_equal(out.logits[1, :96], clean.logits[1, :96])
    assert_same(gather(out.cache, np.asarray([1])), gather(clean.cache, np.asarray([1])))
    with pytest.raises(FloatingPointError, match="of layer 0, sequence 0, position 150"):
        check_finite(out.cache)
    check_finite(clean.cache)


def special(kind, dtype):
    """Keys and values `[1, 2, 300, 64]` of unusual but finite numbers."""
    key, value = (np.array(x, np.float64) for x in keys_and_values(np.random.default_rng(0), 1, 2, 300, 64))
    limit = float(jnp.finfo(dtype).max)
    if kind == "constant groups":
        key[:, :, :, ::2], value[:, :, :, :32] = 3.25, -1.5
    if kind == "zero tokens":
        key[:, :, 10:200], value[:, :, 10:200] = 0, 0
    if kind == "denormals":
        key[:, :, :, 5], value[:, :, 20:60] = float(jnp.finfo(dtype).tiny) / 4, float(jnp.finfo(dtype).tiny) / 2
    if kind == "one channel 1000 times":
        key[..., 9] *= 1000
    if kind == "near the limit":
        value = np.clip(value, -4, 4) / 4 * limit * 0.9
    return jnp.asarray(key, dtype), jnp.asarray(value, dtype)


KINDS = ("constant groups", "zero tokens", "denormals", "one channel 1000 times", "near the limit")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_unusual_numbers_are_held_to_half_a_step(kind, dtype):
    key, value = special(kind, dtype)
    cache = filled(key, value, [300], KIVI)
    check_finite(cache)
    held = [x[:, :, :128] for x in dequantize64(cache.layers[0])]
    for got, true, axis, group in zip(held, (key, value), (2, 3), (32, 32), strict=True):
        true = np.asarray(true, np.float64)[:, :, 2:130]
        shape = list(true.shape)
        shape[axis : axis + 1] = [shape[axis] // group, group]
        grouped = true.reshape(shape)
        low, high = grouped.min(axis + 1, keepdims=True), grouped.max(axis + 1, keepdims=True)
        # Half a step, and the rounding to bfloat16 of the zero and of three steps; a denormal may become zero.
        bound = (high - low) / 6 + 2.0**-8 * (np.abs(low) + high - low) + float(jnp.finfo(dtype).tiny)
        assert (np.abs(got.reshape(shape) - grouped) <= bound).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS[:4])
def test_attention_over_unusual_numbers_holds_the_error_rule(kind, dtype):
    key, value = special(kind, dtype)
    cache = filled(key, value, [300], KIVI)
    q = np.random.default_rng(2).normal(size=(1, 4, 1, 64))
    if kind == "one channel 1000 times":
        q[..., 9] /= 1000  # as a model that has such a channel uses it
    q, state = jnp.asarray(q, dtype), (cache.layers[0], cache.length, cache.quantized)
    assert_within_rule(attend(q, *state), q, *state, factor=2)
