"""Drafted tokens: logits of single steps, caches as if the rejected ones had never been, plain greedy's tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import assert_same, live_contents
from small_models import NEAR_TIE, VOCAB, assert_same_tokens, continuations, ids, small

import kivi_jax
from kivi_jax import KiviConfig, crop, decoding, speculate, verify, with_rewind
from kivi_jax.config import quantized_length
from kivi_jax.prompts import pad

KIVI = KiviConfig(residual_length=64, sink_length=2)
BARE = KiviConfig(residual_length=0)
EXACT = KiviConfig(key_bits=16, value_bits=16)
# Prompts that end 3 and 12 tokens before a block is flushed, in either config that has a residual.
PROMPTS = [ids(191, 1), ids(182, 2)]


@functools.cache
def start(config):
    """The cache of the prompts, 192 and 183 tokens with a last one that is no part of them."""
    prefill = jax.jit(lambda tokens, counts, cache: decoding.prefill(small(), tokens, counts, cache)[1])
    tokens = pad([[*prompt, 5] for prompt in PROMPTS], 192, 0)
    counts = jnp.asarray([len(prompt) + 1 for prompt in PROMPTS], jnp.int32)
    return prefill(tokens, counts, decoding.init_cache(small(), config, 2, 384))


@jax.jit
def one_by_one(cache, drafted):
    def step(cache, tokens):
        hidden, cache = decoding.decode_step(small(), tokens, jnp.ones(2, bool), cache)
        return cache, small().logits(hidden)

    cache, logits = jax.lax.scan(step, cache, drafted.T)
    return logits.swapaxes(0, 1), cache


@pytest.mark.parametrize("config", [KIVI, BARE, EXACT], ids=["residual", "no residual", "unquantized"])
def test_logits_are_those_of_single_steps_across_a_flush(config):
    """For one row the block falls due among the drafted tokens, for the other it does not."""
    cache, drafted = start(config), jnp.asarray([ids(8, 3), ids(8, 4)], jnp.int32)
    got, ahead = verify(small(), cache, drafted)
    want, stepped = one_by_one(cache, drafted)
    assert got.shape == (2, 8, VOCAB) and got.dtype == jnp.float32
    assert float(jnp.abs(got - want).max()) < NEAR_TIE / 10
    assert ahead.length.tolist() == stepped.length.tolist()
    assert ahead.quantized.tolist() == stepped.quantized.tolist()
    if config is KIVI:
        assert cache.quantized.tolist() == [0, 0] and ahead.quantized.tolist() == [128, 0]
        assert ahead.config.rewind == 8, "widened by as much as it needs"


def test_a_split_at_the_flush_is_seen():
    """Without it the tokens after the boundary would attend to the block exactly: far more than rounding."""
    cache, drafted = start(KIVI), jnp.asarray([ids(8, 3), ids(8, 4)], jnp.int32)
    whole = jax.jit(lambda *piece: decoding.extend(small(), *piece)[0])
    hidden = whole(drafted, jnp.full(2, 8, jnp.int32), cache)
    whole, (split, _) = small().logits(hidden), verify(small(), cache, drafted)
    difference = jnp.abs(whole - split).max(-1)
    assert float(difference[0, :2].max()) < NEAR_TIE / 10 and float(difference[1].max()) < NEAR_TIE / 10
    assert float(difference[0, 3:].max()) > 10 * NEAR_TIE


@pytest.mark.parametrize("config", [KIVI, BARE, EXACT], ids=["residual", "no residual", "unquantized"])
@pytest.mark.parametrize("accepted", [(0, 0), (2, 8), (3, 1), (8, 0)])
def test_rejected_tokens_leave_nothing(accepted, config):
    """The kept state is the one before, and the accepted tokens are those that verifying them alone puts in."""
    cache, drafted = start(config), jnp.asarray([ids(8, 3), ids(8, 4)], jnp.int32)
    counts = np.asarray(accepted, np.int32)
    _, ahead = verify(small(), cache, drafted)
    kept = crop(ahead, lengths=cache.length + counts)
    if config.quantizes:
        assert kept.quantized.tolist() == [quantized_length(n, config) for n in kept.length.tolist()]
    if not any(accepted):
        before = with_rewind(cache, 8) if config.quantizes else cache
        assert_same(kept, before)
        return
    # The same pieces of the same shapes, with other tokens where they are rejected.
    rejected = np.arange(8)[None] >= counts[:, None]
    _, other = verify(small(), cache, jnp.where(rejected, 5, drafted))
    other = crop(other, lengths=cache.length + counts)
    for a, b in zip(live_contents(kept), live_contents(other), strict=True):
        assert all(np.asarray(a[k]).tobytes() == np.asarray(b[k]).tobytes() for k in a)


def test_rows_may_have_fewer_drafts_or_none():
    cache, drafted = start(KIVI), jnp.asarray([ids(8, 3), ids(8, 4)], jnp.int32)
    logits, ahead = verify(small(), cache, drafted, jnp.asarray([5, 0], jnp.int32))
    whole, _ = verify(small(), cache, drafted)
    assert ahead.length.tolist() == [197, 183]
    assert np.array_equal(logits[0, :5], whole[0, :5])
    assert not logits[0, 5:].any() and not logits[1].any()
    assert_same(crop(ahead, np.asarray([5, 0])), with_rewind(cache, 8))


def test_verify_in_a_caller_s_jit_updates_in_place_and_leaves_out_what_does_not_fit():
    run = jax.jit(verify, donate_argnames="cache")
    cache = jax.tree.map(jnp.copy, with_rewind(kivi_jax.resize(start(KIVI), 256), 8))
    drafted = jnp.asarray([ids(8, 3), ids(8, 4)], jnp.int32)
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache.layers)]
    while int(cache.length[0]) + 8 <= 256:
        _, cache = run(small(), cache, drafted)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache.layers)] == before
    assert cache.length.tolist() == [256, 247]
    with pytest.raises(ValueError, match="sequence 0 would have 264 tokens; the cache holds 256"):
        verify(small(), cache, drafted)
    assert run(small(), cache, drafted).cache.length.tolist() == [256, 255]


@pytest.mark.parametrize(
    ("drafted", "counts", "message"),
    [
        ([[1, 2]], None, r"drafted_tokens must be integers \[2, K\]; got int32 \[1, 2\]"),
        ([[0.5], [1.0]], None, r"drafted_tokens must be integers \[2, K\]; got float32"),
        ([[], []], None, r"drafted_tokens must be integers \[2, K\]"),
        ([[1], [97]], None, "drafted_tokens must be ids from 0 to 96; got 97"),
        ([[1], [2]], [2, 0], "counts must be between 0 and 1; got 2"),
        (np.ones((2, 193), int), None, "sequence 0 would have 385 tokens; the cache holds 384 of each"),
    ],
)
def test_bad_drafts_are_refused(drafted, counts, message):
    with pytest.raises(ValueError, match=message):
        verify(small(), start(KIVI), np.asarray(drafted), counts)


class Drafts:
    """Ways to draft: the right tokens, none of them, every other one, any number of random ones."""

    def __init__(self, kind, texts):
        self.kind, self.texts, self.calls = kind, texts, 0
        self.random = np.random.default_rng(0)

    def __call__(self, ids):
        self.calls += 1
        right = next((text[len(ids) :] for text in self.texts if text[: len(ids)] == ids.tolist()), [])[:4]
        if self.kind == "right":
            return right
        if self.kind == "wrong":
            return [(token + 1) % VOCAB for token in right]
        if self.kind == "half right":
            return [token if n < 2 else (token + 1) % VOCAB for n, token in enumerate(right)]
        return self.random.integers(0, VOCAB, self.random.integers(0, 7))


@pytest.fixture(scope="module")
def plain():
    return kivi_jax.generate(small(), PROMPTS, max_new_tokens=120, max_length=384, cache=KIVI, eos_token_id=())


@pytest.mark.parametrize("kind", ["right", "wrong", "half right", "random"])
def test_any_draft_gives_plain_greedy_s_tokens(kind, plain):
    texts = [row[:length].tolist() for row, length in zip(np.asarray(plain.tokens), plain.lengths, strict=True)]
    draft = Drafts(kind, texts)
    out = speculate(small(), PROMPTS, draft, max_new_tokens=120, max_length=384, cache=KIVI, eos_token_id=())
    for n, prompt in enumerate(PROMPTS):
        got, want = continuations(out, PROMPTS)[n], continuations(plain, PROMPTS)[n]
        assert_same_tokens(small(), prompt, got, want, KIVI)
    assert out.cache.length.tolist() == plain.cache.length.tolist()
    assert out.cache.quantized.tolist() == plain.cache.quantized.tolist()
    rounds = {"right": 24, "wrong": 120, "half right": 40}
    if kind in rounds and np.array_equal(out.tokens, plain.tokens):
        assert draft.calls == 2 * rounds[kind], "as many rounds as the right guesses leave"
    if np.array_equal(out.tokens, plain.tokens):
        assert float(jnp.abs(out.logits - plain.logits).max()) < NEAR_TIE


def test_speculation_ends_at_eos_and_at_its_limit(plain):
    texts = [row[:length].tolist() for row, length in zip(np.asarray(plain.tokens), plain.lengths, strict=True)]
    end = texts[0][191 + 6]
    cut = [text[: len(p) + 50] for text, p in zip(texts, PROMPTS, strict=True)]
    for n, prompt in enumerate(PROMPTS):
        ends = [i for i, token in enumerate(cut[n]) if i >= len(prompt) and token == end]
        cut[n] = cut[n][: ends[0] + 1] if ends else cut[n]
    settings = dict(max_new_tokens=50, max_length=384, cache=KIVI)
    out = speculate(small(), PROMPTS, Drafts("right", texts), eos_token_id=end, pad_token_id=0, **settings)
    assert out.lengths.tolist() == [len(text) for text in cut] == out.cache.length.tolist()
    assert [row[: len(text)].tolist() for row, text in zip(np.asarray(out.tokens), cut, strict=True)] == cut
    assert len(cut[0]) == 191 + 1 + texts[0][191:].index(end) and not np.asarray(out.tokens)[0, len(cut[0]) :].any()
    assert not out.full.any()


def test_bad_guesses_are_refused():
    with pytest.raises(ValueError, match=r"draft must return ids from 0 to 96; got \[97\]"):
        speculate(small(), PROMPTS, lambda ids: [97], max_length=384, cache=KIVI)
    with pytest.raises(ValueError, match="num_draft must be 1 or more; got 0"):
        speculate(small(), PROMPTS, lambda ids: [], num_draft=0)
