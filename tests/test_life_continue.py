"""A cache that goes on: further turns, prompts in chunks, sequences that come and go."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import assert_same
from flax import nnx
from small_models import VOCAB, assert_same_tokens, continuations, ids, small

import kivi_jax
from kivi_jax import KiviConfig, decoding, run
from kivi_jax.config import quantized_length

# Few shapes, so few compilations: batches of 2, first turns that pad to 192 tokens and second ones to 32.
EXACT = KiviConfig(key_bits=16, value_bits=16, residual_length=64, sink_length=2)
KIVI = KiviConfig(residual_length=64, sink_length=2)
WINDOW = KIVI.window_length
PROMPTS = [ids(190, 1), ids(165, 2)]
MORE = [ids(5, 3), ids(30, 4)]
ROOM = dict(max_length=512, eos_token_id=())


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
    prompt, more = ids(191, 5), ids(30, 6)
    first = generate([prompt] * 2, 1)
    second = generate([more] * 2, 40, first.cache)
    text = [*first.tokens[0].tolist(), *more]
    chunked = generate([text] * 2, 40, prefill_chunk=192)
    got, want = continuations(second, [more] * 2)[0], continuations(chunked, [text] * 2)[0]
    assert_same_tokens(small(), text, got, want, KIVI)
    assert first.cache.quantized.tolist() == [0, 0]
    assert second.cache.quantized.tolist() == chunked.cache.quantized.tolist() == [128, 128]


def test_the_cache_of_an_earlier_turn_can_be_continued_again(turn):
    before = jax.tree.map(np.asarray, turn.cache)
    first, again = (generate(MORE, 10, cache) for cache in (turn.cache, turn.cache))
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
        (MORE, {"max_length": 513}, "max_length must be at most the cache's 512; got 513"),
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
    """Ragged: one prompt ends in the first chunk, the other crosses a threshold within the second and attends to
    quantized tokens in the third."""
    prompts = [ids(70, 7), ids(420, 8)]
    together = generate(prompts, 12, config, prefill_chunk=192)
    for n, prompt in enumerate(prompts):
        twins = generate([prompt] * 2, 12, config, prefill_chunk=192)
        got, want = continuations(together, prompts)[n], continuations(twins, [prompt] * 2)[0]
        assert_same_tokens(small(), prompt, got, want, config)
    assert together.cache.quantized.tolist() == [quantized_length(len(p) + 12, config) for p in prompts]
    at_once = generate(prompts, 12, config)
    assert_same_tokens(small(), prompts[0], *(continuations(x, prompts)[0] for x in (together, at_once)), config)
    if config is EXACT:
        assert_same_tokens(small(), prompts[1], *(continuations(x, prompts)[1] for x in (together, at_once)), config)


def test_chunked_prefill_attends_to_the_quantized_past_as_scoring_in_chunks_does():
    prompt = ids(420, 8)
    out = generate([prompt] * 2, 1, prefill_chunk=192)
    want = kivi_jax.logits(small(), [prompt], cache=KIVI, chunk=192)[0, -1]
    exact = kivi_jax.logits(small(), [prompt])[0, -1]
    assert continuations(out, [prompt] * 2)[0] == [int(want.argmax())]
    assert float(jnp.abs(want - exact).max()) > 1e-3, "the past was quantized"


def test_a_chunk_as_long_as_the_prompt_is_the_prompt_at_once():
    got, want = generate(PROMPTS, 3, prefill_chunk=190), generate(PROMPTS, 3)
    assert np.array_equal(got.tokens, want.tokens) and np.array_equal(got.logits, want.logits)


def test_memory_of_chunked_prefill_does_not_grow_with_the_prompt():
    """A chunk needs a fraction of what the prompt at once does, and updates the cache in place."""
    graphdef, weights = nnx.split(small())
    tokens = lambda n: jax.ShapeDtypeStruct((1, n), jnp.int32)
    counts = jax.ShapeDtypeStruct((1,), jnp.int32)
    cache = jax.eval_shape(lambda: decoding.init_cache(small(), KIVI, 1, 8192))
    logits = jax.ShapeDtypeStruct((1, VOCAB), jnp.float32)
    at_once = run.begin.lower(graphdef, weights, tokens(8192), counts, config=KIVI, max_length=8192)
    in_chunks = run.next_chunk.lower(graphdef, weights, tokens(128), counts, logits, cache)
    at_once, in_chunks = (x.compile().memory_analysis() for x in (at_once, in_chunks))
    assert in_chunks.temp_size_in_bytes < at_once.temp_size_in_bytes / 4
    assert in_chunks.alias_size_in_bytes >= cache.nbytes


@pytest.mark.parametrize("extras", [(-1, 0), (1, 30)])
def test_prompt_shorter_than_equal_to_and_longer_than_the_window(extras):
    """The schedule's blocks are quantized, the first token is the exact one, and 8 bits then stay close to it."""
    config = dataclasses.replace(KIVI, key_bits=8, value_bits=8)
    prompts = [ids(WINDOW + extra, 9) for extra in extras]
    out, exact = generate(prompts, 4, config), generate(prompts, 4, EXACT)
    start = generate(prompts, 1, config)
    for n, prompt in enumerate(prompts):
        got, want = continuations(out, prompts)[n], continuations(exact, prompts)[n]
        assert got[0] == want[0]
        assert start.cache.quantized[n] == quantized_length(len(prompt) + 1, config)
        assert out.cache.quantized[n] == quantized_length(len(prompt) + 4, config) == 128
        assert got == want
        assert 0 < float(jnp.abs(out.logits[n] - exact.logits[n]).max()) < 0.2 * float(exact.logits.std())


def test_capacity_ends_a_sequence_and_says_which(turn):
    until = lambda end: kivi_jax.generate(
        small(), PROMPTS, max_new_tokens=None, max_length=290, cache=KIVI, eos_token_id=end
    )
    # A token that the second sequence soon has, and the first never.
    out = next(out for end in turn.tokens[1, 165:173].tolist() if (out := until(end)).full[0])
    assert out.full.tolist() == [True, False]
    assert out.lengths.tolist() == out.cache.length.tolist() and out.lengths[0] == 290 and out.lengths[1] <= 173


def test_no_room_is_refused_before_any_work_naming_the_sequence(turn):
    with pytest.raises(
        ValueError, match="sequence 0, 198 tokens in the cache, 5 in the prompt and 310 new ones; got 51"
    ):
        generate(MORE, 310, turn.cache)
    with pytest.raises(ValueError, match="max_new_tokens=None needs a max_length"):
        kivi_jax.generate(small(), PROMPTS, max_new_tokens=None)


def test_a_compiled_loop_stops_at_capacity_without_overwriting(turn):
    """Steps past the end leave a full sequence as it was while the other goes on."""

    @jax.jit
    def run(cache, steps):
        def step(n, cache):
            tokens = jnp.full(2, 5 + n % 7, jnp.int32)
            return decoding.decode_step(small(), tokens, jnp.ones(2, bool), cache)[1]

        return jax.lax.fori_loop(0, steps, step, cache)

    full, beyond = run(turn.cache, 512 - 198), run(turn.cache, 512 - 198 + 20)
    assert full.length.tolist() == [512, 487] and beyond.length.tolist() == [512, 507]
    assert_same(kivi_jax.gather(beyond, np.asarray([0])), kivi_jax.gather(full, np.asarray([0])))


@pytest.mark.parametrize(
    ("head_dim", "group", "works"),
    [(80, 32, False), (80, 128, False), (96, 32, True), (96, 64, False), (32, 64, False)],
)
def test_head_dims_work_or_are_refused_with_what_would(head_dim, group, works):
    """80 has no group that divides it; 96 has 32; a group larger than head_dim is no group."""
    config = KiviConfig(key_bits=8, value_bits=8, residual_length=0, value_group_size=group)
    generate = lambda config: kivi_jax.generate(small(head_dim), [ids(140)], max_new_tokens=2, cache=config)
    # In pieces of 70 tokens the third attends to a quantized block.
    score = lambda config: kivi_jax.logits(small(head_dim), [ids(210)], cache=config, chunk=70)
    if not works:
        advice = {80: "use value_bits=16", 96: "use value_group_size=32", 32: "use value_group_size=32"}[head_dim]
        with pytest.raises(ValueError, match=f"got head_dim {head_dim} and value_group_size {group}: {advice}"):
            generate(config)
        config = dataclasses.replace(config, value_bits=16)
    if works or (head_dim, group) == (80, 32):
        error = score(config) - kivi_jax.logits(small(head_dim), [ids(210)])
        assert float(jnp.abs(error[:, :140]).max()) < 1e-4 < float(jnp.abs(error[:, 140:]).max()) < 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_models_score_like_the_float32_one(dtype):
    """The same weights, rounded: quantizing their rounded keys and values differs by no more than rounding does."""
    graphdef, weights = nnx.split(small())
    rounded = jax.tree.map(lambda x: x.astype(dtype), weights)
    narrow = nnx.merge(nnx.split(small(dtype=dtype))[0], rounded)
    wide = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.float32), rounded))
    got, want = (kivi_jax.logits(params, [ids(250)], cache=KIVI, chunk=50)[0] for params in (narrow, wide))
    assert bool(jnp.isfinite(got).all())
    assert float(jnp.sqrt(jnp.mean((got - want) ** 2))) < 0.2 * float(want.std())
