"""Sequences repeated, reordered, left out and joined."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import assert_same, filled, keys_and_values
from small_models import VOCAB, assert_same_tokens, continuations, ids, small

import kivi_jax
from kivi_jax import KiviConfig, concatenate, crop, decoding, fork, gather, resize
from kivi_jax import cache as kv

KIVI = KiviConfig(residual_length=64, sink_length=2)
append = jax.jit(kv.append)


@pytest.fixture(scope="module")
def tokens():
    return keys_and_values(np.random.default_rng(0), 3, 1, 512, 32)


def piece(tokens, rows, start, stop):
    return [x[None, np.asarray(rows), :, start:stop] for x in tokens]


def test_reordered_sequences_go_on_as_themselves(tokens):
    counts = [300, 7, 200]
    cache = filled(*tokens, counts, KIVI)
    for order in ([2, 0, 1], [1, 1, 0]):
        moved = gather(cache, np.asarray(order))
        moved = append(moved, *piece(tokens, order, 300, 360))
        for row, source in enumerate(order):
            alone = gather(append(cache, *piece(tokens, [0, 1, 2], 300, 360)), np.asarray([source]))
            assert_same(gather(moved, np.asarray([row])), alone)


def test_a_second_turn_after_a_reorder_belongs_to_its_sequence():
    prompts, more = [ids(190, 1), ids(165, 2)], [ids(5, 3), ids(30, 4)]
    settings = dict(max_new_tokens=8, eos_token_id=())
    first = kivi_jax.generate(small(), prompts, cache=KIVI, max_length=512, **settings)
    straight = kivi_jax.generate(small(), more, cache=first.cache, **settings)
    swapped = kivi_jax.generate(small(), more[::-1], cache=gather(first.cache, np.asarray([1, 0])), **settings)
    for n in range(2):
        got, want = continuations(swapped, more[::-1])[1 - n], continuations(straight, more)[n]
        before = [*first.tokens[n, : first.lengths[n]].tolist(), *more[n]]
        assert_same_tokens(small(), before, got, want, KIVI)


def test_finished_sequences_leave_and_later_appends_land_in_the_right_place(tokens):
    cache = filled(*tokens, [300, 7, 190], KIVI)
    cache = append(cache, *piece(tokens, [0, 1, 2], 300, 305), jnp.asarray([5, 0, 3], jnp.int32))
    left = gather(cache, np.asarray([0, 2]))
    left = append(left, *piece(tokens, [0, 2], 305, 345))
    keep = lambda row, *spans: [jnp.concatenate([x[row : row + 1, :, a:b] for a, b in spans], axis=2) for x in tokens]
    for row, (source, spans) in enumerate([(0, [(0, 305), (305, 345)]), (2, [(0, 190), (300, 303), (305, 345)])]):
        key, value = keep(source, *spans)
        assert_same(gather(left, np.asarray([row])), filled(key, value, [key.shape[2]], KIVI, 512))


def test_a_fork_keeps_sinks_and_its_copies_are_independent(tokens):
    cache = filled(*tokens, [300, 7, 200], KIVI)
    copies = fork(cache, 2)
    assert copies.length.tolist() == [300, 300, 7, 7, 200, 200]
    for row in range(6):
        assert_same(gather(copies, np.asarray([row])), gather(cache, np.asarray([row // 2])))
    sinks = np.asarray(copies.layers[0].key_window[:, :, :2])
    assert np.array_equal(sinks, np.repeat(np.asarray(tokens[0][:, :, :2]), 2, axis=0))
    counts = jnp.asarray([40, 0] * 3, jnp.int32)
    apart = append(copies, *piece(tokens, [0, 0, 1, 1, 2, 2], 300, 340), counts)
    odd = np.asarray([1, 3, 5])
    assert_same(gather(apart, odd), cache)
    assert_same(gather(crop(copies, np.asarray([20, 0] * 3) % (np.asarray(copies.length) + 1)), odd), cache)


def test_one_prefill_gives_n_continuations():
    prompt, settings = ids(190, 1), dict(cache=KIVI, max_length=512, eos_token_id=(), max_new_tokens=12)
    alike = kivi_jax.generate(small(), [prompt] * 2, **settings)
    out = kivi_jax.generate(small(), prompt, num_return_sequences=2, **settings)
    assert np.array_equal(out.tokens, alike.tokens)
    assert_same(out.cache, alike.cache)
    drawn = kivi_jax.generate(small(), prompt, num_return_sequences=2, temperature=1.0, **settings)
    assert drawn.tokens[0].tolist() != drawn.tokens[1].tolist()
    same = kivi_jax.generate(small(), [prompt] * 2, temperature=1.0, **settings)
    assert np.array_equal(drawn.tokens, same.tokens)


def test_questions_of_their_own_on_a_shared_prompt():
    context, questions = ids(190, 1), [ids(5, 3), ids(30, 4)]
    settings = dict(max_new_tokens=8, eos_token_id=())
    shared = kivi_jax.generate(small(), [context], cache=KIVI, max_length=512, **settings)
    answers = kivi_jax.generate(small(), questions, cache=fork(shared.cache, 2), **settings)
    before = shared.tokens[0].tolist()
    for n, question in enumerate(questions):
        twice = kivi_jax.generate(small(), [question] * 2, cache=fork(shared.cache, 2), **settings)
        want = continuations(twice, [question] * 2)[0]
        assert_same_tokens(small(), [*before, *question], continuations(answers, questions)[n], want, KIVI)


def test_joined_caches_of_different_capacity_hold_both(tokens):
    small_one, large_one = filled(*tokens, [100, 7, 128], KIVI, 512), filled(*tokens, [512, 0, 400], KIVI, 640)
    small_one = resize(small_one, 128)
    assert (small_one.capacity, large_one.capacity) == (128, 640)
    both = concatenate([small_one, large_one])
    assert both.capacity == 640 and both.length.tolist() == [100, 7, 128, 512, 0, 400]
    assert_same(gather(both, np.arange(3)), resize(small_one, 640))
    assert_same(gather(both, np.arange(3, 6)), large_one)
    order = [0, 1, 2, 0, 1, 2]
    after = append(both, *piece(tokens, order, 0, 120))
    assert_same(gather(after, np.arange(3)), append(resize(small_one, 640), *piece(tokens, order[:3], 0, 120)))


def test_caches_that_differ_are_not_joined(tokens):
    cache = filled(*tokens, [1, 1, 1], KIVI)
    for other, message in (
        (dataclasses.replace(KIVI, sink_length=3), "cache 1 must have the sink_length 2 of cache 0; got 3"),
        (dataclasses.replace(KIVI, rewind=3), "cache 1 must have the rewind 0 of cache 0; got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            concatenate([cache, filled(*tokens, [1, 1, 1], other)])
    with pytest.raises(ValueError, match="cache 1 must have the dtype float32 of cache 0; got bfloat16"):
        concatenate([cache, filled(*(x.astype(jnp.bfloat16) for x in tokens), [1, 1, 1], KIVI)])
    with pytest.raises(ValueError, match="1 cache or more; got none"):
        concatenate([])


def test_resizing_drops_no_token(tokens):
    cache = filled(*tokens, [300, 7, 200], KIVI)
    with pytest.raises(ValueError, match="max_length must be at least the 300 tokens of a sequence; got 299"):
        resize(cache, 299)
    assert resize(cache, 300).capacity == 384
    assert_same(resize(resize(cache, 300), 1000), cache)
    with pytest.raises(ValueError, match="max_length must be at least the 512 tokens"):
        jax.jit(lambda cache: resize(cache, 384))(cache)
    for bad in (0, 1.5, True):
        with pytest.raises(ValueError, match="max_length must be an integer of 1 or more"):
            resize(cache, bad)


def test_indices_are_checked(tokens):
    cache = filled(*tokens, [300, 7, 200], KIVI)
    for index, message in (
        ([0, 3], "index must be from 0 to 2; got 3"),
        ([-1], "index must be from 0 to 2; got -1"),
        ([], r"index must be integers \[N\], 1 or more"),
        ([0.0], "index must be integers"),
        ([[0]], "index must be integers"),
    ):
        with pytest.raises(ValueError, match=message):
            gather(cache, np.asarray(index))
    compiled = jax.jit(gather)(cache, jnp.asarray([3, 1]))
    assert compiled.length.tolist() == [0, 7] and compiled.quantized.tolist() == [0, 0]
    for bad in (0, 1.0, True):
        with pytest.raises(ValueError, match="n must be an integer of 1 or more"):
            fork(cache, bad)


@pytest.mark.parametrize("config", [KIVI, KiviConfig(key_bits=16, value_bits=16)], ids=["2 bit", "unquantized"])
def test_beam_of_4_for_300_tokens(config):
    """Each hypothesis has the score that its own tokens have when they are run alone, over caches that were reordered
    at every step; those of an unquantized cache are the scores of one exact prefill."""
    params, prompt, beams = small(), ids(20), 4
    start = kivi_jax.generate(params, prompt, max_new_tokens=1, max_length=384, cache=config, eos_token_id=())
    first = int(start.tokens[0, 20])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, logits, score):
        total = score[:, None] + jax.nn.log_softmax(logits)
        score, best = jax.lax.top_k(total.reshape(-1), beams)
        parent, token = best // VOCAB, (best % VOCAB).astype(jnp.int32)
        cache = gather(cache, parent)
        hidden, cache = decoding.decode_step(params, token, jnp.ones(beams, bool), cache)
        return cache, params.logits(hidden), score, parent, token

    cache, logits = fork(start.cache, beams), jnp.repeat(start.logits, beams, axis=0)
    score = jnp.asarray([0.0] + [-jnp.inf] * (beams - 1))
    texts = [[first]] * beams
    for _ in range(300):
        cache, logits, score, parent, token = step(cache, logits, score)
        texts = [[*texts[p], t] for p, t in zip(parent.tolist(), token.tolist(), strict=True)]
    assert len({tuple(text) for text in texts}) == beams
    assert cache.length.tolist() == [321] * beams
    chunk = 1 if config is KIVI else None
    full = kivi_jax.logits(params, [[*prompt, *text] for text in texts], cache=config, chunk=chunk)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(full[:, 20:320]), jnp.asarray(texts)[:, 1:, None], axis=2)
    np.testing.assert_allclose(chosen[..., 0].sum(1), score, rtol=2e-4)
