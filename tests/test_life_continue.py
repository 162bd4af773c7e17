"""A cache that goes on: further turns, prompts in chunks, sequences that come and go."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import assert_same
from small_models import VOCAB, assert_same_tokens, continuations, ids, small

import kivi_jax
from kivi_jax import KiviConfig, decoding
from kivi_jax import generate as _  # noqa: F401
from kivi_jax.config import quantized_length

EXACT = KiviConfig(key_bits=16, value_bits=16, residual_length=32, sink_length=2)
KIVI = KiviConfig(residual_length=32, sink_length=2)
WINDOW = KIVI.window_length
PROMPTS = [ids(190, 1), ids(30, 2)]
MORE = [ids(5, 3), ids(60, 4)]
ROOM = dict(max_length=384, eos_token_id=())


def generate(prompts, new, cache=KIVI, **settings):
    return kivi_jax.generate(small(), prompts, max_new_tokens=new, cache=cache, **ROOM | settings)


@pytest.fixture(scope="module")
def turn():
    """A ragged first turn over the 2-bit cache: one row has a quantized block, the other none."""
    out = generate(PROMPTS, 8)
    assert out.cache.quantized.tolist() == [128, 0]
    return out


def test_second_turn_on_an_unquantized_cache_equals_the_concatenated_prompt():
    first = generate(PROMPTS, 8, EXACT)
    second = generate(MORE, 30, first.cache)
    before = [
        [*row[:length], *more]
        for row, length, more in zip(first.tokens.tolist(), first.lengths.tolist(), MORE, strict=True)
    ]
    at_once = generate(before, 30, EXACT)
    for n in range(2):
        got, want = continuations(second, MORE)[n], continuations(at_once, before)[n]
        assert_same_tokens(small(), before[n], got, want, EXACT)
    assert second.cache.length.tolist() == at_once.cache.length.tolist()


def test_second_question_on_a_quantized_cache_equals_both_turns_alone(turn):
    second = generate(MORE, 30, turn.cache)
    for n, (prompt, more) in enumerate(zip(PROMPTS, MORE, strict=True)):
        alone = generate([prompt], 8)
        assert alone.tokens[0].tolist() == turn.tokens[n, : turn.lengths[n]].tolist()
        want = continuations(generate([more], 30, alone.cache), [more])[0]
        assert_same_tokens(small(), [*alone.tokens[0].tolist(), *more], continuations(second, MORE)[n], want, KIVI)
    assert second.tokens[0, :5].tolist() == MORE[0], "tokens are this turn's"


def test_second_turn_equals_chunked_prefill_with_the_same_boundary():
    """The boundary before anything is quantized, the threshold in the middle of the second piece."""
    prompt, more = ids(99, 5), ids(100, 6)
    first = generate([prompt], 1)
    second = generate([more], 40, first.cache)
    text = [*first.tokens[0].tolist(), *more]
    chunked = generate([text], 40, prefill_chunk=100)
    got, want = continuations(second, [more])[0], continuations(chunked, [text])[0]
    assert_same_tokens(small(), text, got, want, KIVI)
    assert second.cache.quantized.tolist() == chunked.cache.quantized.tolist() == [128]


def test_the_cache_of_an_earlier_turn_can_be_continued_again(turn):
    before = jax.tree.map(np.asarray, turn.cache)
    first, again = (generate(MORE, 10, turn.cache) for _ in range(2))
    assert np.array_equal(first.tokens, again.tokens)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=a.dtype != np.uint8), before, turn.cache)
    )


def test_left_padded_second_turn_enters_without_its_padding(turn):
    width = max(map(len, MORE))
    padded = np.asarray([[9] * (width - len(row)) + row for row in MORE])
    mask = np.asarray([[0] * (width - len(row)) + [1] * len(row) for row in MORE])
    got = generate(padded, 10, turn.cache, attention_mask=mask)
    want = generate(MORE, 10, turn.cache)
    assert np.array_equal(got.tokens, want.tokens) and got.lengths.tolist() == want.lengths.tolist()
    assert_same(got.cache, want.cache)


def test_going_on_without_a_prompt_is_as_if_it_had_not_stopped(turn):
    whole = generate(PROMPTS, 48)
    rest = generate(None, 40, turn.cache, logits=turn.logits)
    for n in range(2):
        assert continuations(rest, [[], []])[n] == continuations(whole, PROMPTS)[n][8:]
    assert_same(rest.cache, whole.cache)
    assert np.array_equal(rest.logits, whole.logits)
    generate(MORE, 1, turn.cache)  # what was handed in has not been given away


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        (None, {}, "goes on from a KVCache and its logits; got no prompt without both"),
        (
            None,
            {"logits": np.zeros((1, VOCAB), np.float32)},
            r"logits must be float32 \[2, 97\]; got float32 \[1, 97\]",
        ),
        (MORE, {"logits": np.zeros((2, VOCAB), np.float32)}, "logits go with prompt=None"),
        ([[1], []], {}, "prompt 1 must have 1 token or more; got 0"),
        (MORE, {"prefill_chunk": 0}, "prefill_chunk must be 1 or more; got 0"),
        (MORE, {"num_return_sequences": 0}, "num_return_sequences must be 1 or more; got 0"),
        (MORE, {"max_length": 385}, "max_length must be at most the cache's 384; got 385"),
    ],
)
def test_a_turn_that_cannot_be_is_refused(prompt, settings, message, turn):
    with pytest.raises(ValueError, match=message):
        kivi_jax.generate(small(), prompt, cache=turn.cache, max_new_tokens=3, **settings)


def test_an_empty_sequence_in_a_batch_is_refused_wherever_it_comes_from():
    for prompt, mask in (([[1, 2], []], None), (np.ones((2, 3), int), np.asarray([[0, 1, 1], [0, 0, 0]]))):
        with pytest.raises(ValueError, match="prompt 1 must have 1 token or more; got 0"):
            generate(prompt, 3, attention_mask=mask)


@pytest.mark.parametrize("config", [EXACT, KIVI], ids=["unquantized", "2 bit"])
def test_prompts_in_chunks_do_not_depend_on_the_batch(config):
    """Ragged: one prompt ends in the first chunk, one fills its last one, one crosses the threshold within a chunk."""
    prompts = [ids(n, n) for n in (7, 128, 250)]
    together = generate(prompts, 12, config, prefill_chunk=64)
    for n, prompt in enumerate(prompts):
        alone = generate([prompt], 12, config, prefill_chunk=64)
        got, want = continuations(together, prompts)[n], continuations(alone, [prompt])[0]
        assert_same_tokens(small(), prompt, got, want, config)
    assert together.cache.quantized.tolist() == [quantized_length(len(p) + 12, config) for p in prompts]
    if config is EXACT:
        at_once = generate(prompts, 12, config)
        for got, want, prompt in zip(continuations(together, prompts), continuations(at_once, prompts), prompts):
            assert_same_tokens(small(), prompt, got, want, config)


def test_chunked_prefill_attends_to_the_quantized_past_as_scoring_in_chunks_does():
    prompt = ids(250, 7)
    out = generate([prompt], 1, prefill_chunk=64)
    want = kivi_jax.logits(small(), [prompt], cache=KIVI, chunk=64)[0, -1]
    exact = kivi_jax.logits(small(), [prompt])[0, -1]
    token = continuations(out, [prompt])[0][0]
    assert token == int(want.argmax())
    assert 1e-3 < float(jnp.abs(want - exact).max()), "the past was quantized"


def test_a_chunk_as_long_as_the_prompt_is_the_prompt_at_once():
    got, want = generate(PROMPTS, 3, prefill_chunk=190), generate(PROMPTS, 3)
    assert np.array_equal(got.tokens, want.tokens) and np.array_equal(got.logits, want.logits)


def test_memory_of_chunked_prefill_does_not_grow_with_the_prompt():
    """A chunk needs a fraction of what the prompt at once does, and updates the cache in place."""
    run = kivi_jax.generate.__globals__
    graphdef, weights = kivi_jax.generate.__globals__["nnx"].split(small())
    tokens = lambda n: jax.ShapeDtypeStruct((1, n), jnp.int32)
    counts = jax.ShapeDtypeStruct((1,), jnp.int32)
    cache = jax.eval_shape(lambda: decoding.init_cache(small(), KIVI, 1, 8192))
    logits = jax.ShapeDtypeStruct((1, VOCAB), jnp.float32)
    at_once = run["_begin"].lower(graphdef, weights, tokens(8192), counts, config=KIVI, max_length=8192)
    in_chunks = run["_next_chunk"].lower(graphdef, weights, tokens(128), counts, logits, cache)
    at_once, in_chunks = (x.compile().memory_analysis() for x in (at_once, in_chunks))
    assert in_chunks.temp_size_in_bytes < at_once.temp_size_in_bytes / 4
    assert in_chunks.alias_size_in_bytes >= cache.nbytes


@pytest.mark.parametrize("extra", [-1, 0, 1, 60])
def test_prompt_shorter_than_equal_to_and_longer_than_the_window(extra):
    """The schedule's blocks are quantized, the first token is the exact one, and 8 bits then stay close to it."""
    config = dataclasses.replace(KIVI, key_bits=8, value_bits=8)
    prompt = ids(WINDOW + extra, 8)
    out = generate([prompt], 4, config)
    exact = generate([prompt], 4, EXACT)
    assert out.tokens[0, WINDOW + extra] == exact.tokens[0, WINDOW + extra]
    assert out.cache.quantized[0] == quantized_length(WINDOW + extra + 4, config) > 0
    assert generate([prompt], 1, config).cache.quantized[0] == quantized_length(WINDOW + extra + 1, config)
    if np.array_equal(out.tokens, exact.tokens):
        assert float(jnp.abs(out.logits - exact.logits).max()) < 0.2 * float(exact.logits.std())


def test_capacity_ends_a_sequence_and_says_which():
    out = kivi_jax.generate(small(), PROMPTS, max_new_tokens=None, max_length=200, cache=KIVI)
    assert out.lengths.tolist() == [200, 200] == out.cache.length.tolist() and out.full.tolist() == [True, True]
    third = int(out.tokens[1, 40])
    out = kivi_jax.generate(small(), PROMPTS, max_new_tokens=None, max_length=200, cache=KIVI, eos_token_id=third)
    assert out.full.tolist() == [length == 200 for length in out.lengths.tolist()] and not out.full[1]


def test_no_room_is_refused_before_any_work_naming_the_sequence(turn):
    with pytest.raises(
        ValueError, match="sequence 0, 198 tokens in the cache, 5 in the prompt and 182 new ones; got 384"
    ):
        generate(MORE, 182, turn.cache)
    with pytest.raises(ValueError, match="max_new_tokens=None needs a max_length"):
        kivi_jax.generate(small(), PROMPTS, max_new_tokens=None)


def test_a_compiled_loop_stops_at_capacity_without_overwriting(turn):
    """Steps past the end leave a full sequence as it was while the other goes on."""

    @jax.jit
    def run(cache, steps):
        def step(_, cache):
            return decoding.decode_step(small(), jnp.full(2, 5, jnp.int32), jnp.ones(2, bool), cache)[1]

        return jax.lax.fori_loop(0, steps, step, cache)

    full, beyond = run(turn.cache, 384 - 198), run(turn.cache, 384 - 198 + 20)
    assert full.length.tolist() == [384, 224] and beyond.length.tolist() == [384, 244]
    assert_same(kivi_jax.gather(beyond, np.asarray([0])), kivi_jax.gather(full, np.asarray([0])))


@pytest.mark.parametrize(
    ("head_dim", "group", "works"),
    [(80, 32, False), (80, 128, False), (96, 32, True), (96, 64, False), (32, 64, False)],
)
def test_head_dims_work_or_are_refused_with_what_would(head_dim, group, works):
    """80 has no group that divides it; 96 has 32; a group larger than head_dim is no group."""
    config = KiviConfig(residual_length=0, value_group_size=group)
    call = lambda config: kivi_jax.generate(small(head_dim), [ids(140)], max_new_tokens=2, cache=config)
    if works:
        assert call(config).cache.quantized.tolist() == [128]
        return
    advice = {80: "use value_bits=16", 96: "use value_group_size=32", 32: "use value_group_size=32"}[head_dim]
    with pytest.raises(ValueError, match=f"got head_dim {head_dim} and value_group_size {group}: {advice}"):
        call(config)
    if head_dim == 80:
        assert call(KiviConfig(residual_length=0, value_bits=16)).cache.quantized.tolist() == [128]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_models_live_the_same_life(dtype):
    params = small(dtype=dtype)
    first = kivi_jax.generate(params, PROMPTS, max_new_tokens=8, cache=KIVI, max_length=256)
    second = kivi_jax.generate(params, MORE, max_new_tokens=8, cache=kivi_jax.gather(first.cache, np.asarray([1, 0])))
    assert second.cache.layers[0].key_window.dtype == dtype
    assert second.cache.length.tolist() == [38 + 5 + 8, 198 + 60 + 8] and bool(jnp.isfinite(second.logits).all())
    kivi_jax.check_finite(second.cache)
