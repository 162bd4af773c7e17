"""Tokens dropped from the end: never having had them, or a refusal."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import assert_same, filled, keys_and_values
from small_models import ids, small

import kivi_jax
from kivi_jax import KiviConfig, crop, with_rewind
from kivi_jax import cache as kv
from kivi_jax.config import quantized_length

append = jax.jit(kv.append)


def grown(key, value, counts, config, pieces):
    """A cache that took in the tokens in `pieces`."""
    cache = filled(key, value, jnp.zeros_like(jnp.asarray(counts)), config)
    start = 0
    for piece in pieces:
        left = jnp.clip(jnp.asarray(counts) - start, 0, piece).astype(jnp.int32)
        cache = append(cache, key[None, :, :, start : start + piece], value[None, :, :, start : start + piece], left)
        start += piece
    return cache


@pytest.fixture(scope="module")
def tokens():
    return keys_and_values(np.random.default_rng(0), 2, 2, 512, 32, jnp.bfloat16)


def test_within_the_window_what_is_kept_is_as_it_was(tokens):
    config = KiviConfig(residual_length=64, sink_length=2)
    cache = filled(*tokens, [300, 290], config)
    assert quantized_length(270, config) == quantized_length(300, config) == 128
    assert_same(crop(cache, lengths=np.asarray([270, 290])), filled(*tokens, [270, 290], config))
    assert_same(crop(cache, np.asarray([30, 0])), filled(*tokens, [270, 290], config))
    # Further down the block stays quantized, which a sequence that never grew so long would not have done.
    low = crop(cache, lengths=np.asarray([130, 290]))
    assert low.quantized.tolist() == [128, 128] and quantized_length(130, config) == 0
    positions = kv.window_positions(config, low.length, low.quantized)[0]
    assert sorted(p for p in positions.tolist() if p >= 0) == [0, 1]


def test_below_a_flushed_block_is_refused_with_what_to_do(tokens):
    config = KiviConfig(residual_length=64, sink_length=2)
    cache = filled(*tokens, [300, 290], config)
    before = jax.tree.map(np.asarray, cache)
    message = (
        "sequence 1 must keep at least 130 of its 290 tokens, as those are in quantized blocks; got 129: "
        r"keep more, or make the cache with KiviConfig\(rewind=161\)"
    )
    with pytest.raises(ValueError, match=message):
        crop(cache, lengths=np.asarray([300, 129]))
    assert_same(cache, before)
    compiled = jax.jit(crop)(cache, lengths=np.asarray([200, 129]))
    assert compiled.length.tolist() == [200, 290], "under jit the length tells"
    assert_same(compiled, filled(*tokens, [200, 290], config))


@pytest.mark.parametrize("pieces", [(512,), (200, 100, 100, 112), (7,) * 73])
def test_a_shadow_takes_a_flushed_block_back(pieces, tokens):
    """Right after the flush, and as far back as was asked for; then the same tokens, or others, come again."""
    config = KiviConfig(residual_length=64, sink_length=2, rewind=40)
    for length in (322, 330, 361):  # 322 is where the second block is flushed
        cache = grown(*tokens, [length, 5], config, pieces)
        assert cache.quantized.tolist() == [256, 0]
        for target in (321, length - 40):
            want = filled(*tokens, [target, 5], config)
            assert want.quantized.tolist() == [128, 0]
            short = crop(cache, lengths=np.asarray([target, 5]))
            assert_same(short, want)
            other = [x[:, :, ::-1] for x in tokens]
            piece = [x[None, :, :, :60] for x in other]
            left = jnp.asarray([60, 60], jnp.int32)
            assert_same(append(short, *piece, left), append(want, *piece, left))


def test_dropping_twice_needs_what_is_still_there(tokens):
    """The promise counts from the most a sequence has held: its last tokens have taken the place of older ones."""
    config = KiviConfig(residual_length=64, sink_length=2, rewind=10)
    cache = crop(filled(*tokens, [332, 5], config), np.asarray([10, 0]))
    assert_same(cache, filled(*tokens, [322, 5], config))
    once = crop(cache, np.asarray([32, 0]))
    assert once.quantized.tolist() == [256, 0], "the block cannot come back, the tokens after it are exact"
    with pytest.raises(ValueError, match=r"must keep at least 258 of its 322 tokens.*KiviConfig\(rewind=11\)"):
        crop(cache, lengths=np.asarray([257, 5]))
    config = dataclasses.replace(config, rewind=11)
    twice = crop(crop(filled(*tokens, [332, 5], config), np.asarray([10, 0])), lengths=np.asarray([257, 5]))
    assert_same(twice, filled(*tokens, [257, 5], config))


def test_a_step_of_the_others_does_not_cost_a_waiting_sequence_its_shadow(tokens):
    """A sequence that takes no token has its next slot overwritten by the step; that must not be taken for a token."""
    config = KiviConfig(residual_length=0, rewind=10)
    length = config.ring_length  # the next slot is that of the first token
    key, value = tokens
    cache = filled(key, value, [length, 5], config)
    token = [jnp.full_like(x[:, :, :1], jnp.nan) for x in tokens]
    layers = tuple(kv.write_token(layer, *token, cache.length) for layer in cache.layers)
    cache = kv.flush(dataclasses.replace(cache, layers=layers, length=cache.length + jnp.asarray([0, 1], jnp.int32)))
    assert_same(
        kivi_jax.gather(crop(cache, np.asarray([10, 0])), np.asarray([0])),
        kivi_jax.gather(filled(key, value, [length - 10, 5], config), np.asarray([0])),
    )
    with pytest.raises(ValueError, match="sequence 0 must keep at least 128"):
        crop(cache, lengths=np.asarray([100, 5]))


def test_an_unquantized_cache_goes_back_to_any_length(tokens):
    config = KiviConfig(key_bits=16, value_bits=16, residual_length=16, sink_length=3)
    cache = grown(*tokens, [500, 300], config, (512,))
    for lengths in ([499, 1], [200, 150], [100, 0], [0, 300]):
        assert_same(crop(cache, lengths=np.asarray(lengths)), filled(*tokens, lengths, config))


def test_down_to_the_sinks_is_always_possible(tokens):
    config = KiviConfig(residual_length=0, sink_length=4)
    cache = filled(*tokens, [512, 512], config)
    assert_same(crop(cache, lengths=np.asarray([4, 0])), filled(*tokens, [4, 0], config))


@pytest.mark.parametrize("config", [KiviConfig(residual_length=0, rewind=32), KiviConfig(key_bits=16, value_bits=16)])
def test_dropped_tokens_have_no_influence_not_even_nan(config, tokens, rng):
    """They were flushed into a block, with NaN and infinity in it; what comes after is as if they had never been."""
    key, value = tokens
    bad = jnp.where(jnp.arange(512)[:, None] % 2 == 0, jnp.bfloat16(jnp.nan), jnp.bfloat16(jnp.inf))
    poisoned = [jnp.where(jnp.arange(512)[:, None] < 240, x, bad) for x in (key, value)]
    cache = append(filled(*poisoned, [235, 240], config), *(x[None, :, :, 240:265] for x in poisoned))
    back = crop(cache, lengths=np.asarray([235, 240]))
    clean = filled(key, value, [235, 240], config)
    assert_same(back, clean)
    piece = [x[None, :, :, 300:400] for x in (key, value)]
    after, want = append(back, *piece), append(clean, *piece)
    assert_same(after, want)
    q = jnp.asarray(rng.normal(size=(2, 4, 1, 32)), jnp.bfloat16)
    attend = jax.jit(kivi_jax.attend)
    got = attend(q, after.layers[0], after.length, after.quantized)
    assert np.array_equal(got, attend(q, want.layers[0], want.length, want.quantized))
    assert bool(jnp.isfinite(got).all())


def test_a_model_s_cache_after_a_rewind_is_that_of_the_turn_before():
    """Every layer, over a flush, to the last bit; and the same turn again gives the same."""
    params = small(layers=2)
    config = KiviConfig(residual_length=32, sink_length=2, rewind=40)
    first = kivi_jax.generate(params, [ids(158)], max_new_tokens=2, max_length=256, cache=config)
    more = ids(12, 1)
    second = kivi_jax.generate(params, [more], max_new_tokens=28, cache=first.cache)
    assert first.cache.quantized.tolist() == [0] and second.cache.quantized.tolist() == [128]
    back = crop(second.cache, 40)
    assert_same(back, first.cache)
    again = kivi_jax.generate(params, [more], max_new_tokens=28, cache=back)
    assert np.array_equal(again.tokens, second.tokens)
    assert_same(again.cache, second.cache)


def test_a_wider_window_has_the_same_tokens_and_can_rewind_what_comes_next(tokens):
    narrow = KiviConfig(residual_length=64, sink_length=2)
    wide = dataclasses.replace(narrow, rewind=40)
    cache = with_rewind(filled(*tokens, [321, 300], narrow), 40)
    assert cache.config == cache.layers[0].config == wide
    assert_same(cache, filled(*tokens, [321, 300], wide))
    key, value = tokens
    longer = append(cache, *(x[None, :, :, 321:361] for x in (key, value)), jnp.asarray([40, 0], jnp.int32))
    assert_same(longer, filled(key, value, [361, 300], wide))
    assert_same(crop(longer, np.asarray([40, 0])), filled(key, value, [321, 300], wide))
    back = with_rewind(longer, 0)
    assert back.retained is None and back.config == narrow
    assert_same(back, filled(key, value, [361, 300], narrow))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(), "crop takes one of n and lengths; got neither"),
        (dict(n=1, lengths=np.asarray([1, 1])), "crop takes one of n and lengths; got both"),
        (dict(n=1.5), r"n must be an integer or int32 \[2\]; got float32 \[\]"),
        (dict(lengths=np.asarray([1, 2, 3])), r"lengths must be an integer or int32 \[2\]; got int32 \[3\]"),
        (dict(n=-1), "sequence 0 has 300 tokens and must keep 0 to 300 of them; got 301"),
        (dict(n=np.asarray([0, 6])), "sequence 1 has 5 tokens and must keep 0 to 5 of them; got -1"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, tokens):
    with pytest.raises(ValueError, match=message):
        crop(filled(*tokens, [300, 5], KiviConfig()), **arguments)
    with pytest.raises(ValueError, match="rewind must be a number of tokens, 0 or more; got -1"):
        KiviConfig(rewind=-1)
