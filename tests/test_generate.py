import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import EXACT, NAMES, golden, model
from flax import nnx

import kivi_jax
from kivi_jax import KiviConfig, decoding
from kivi_jax.prompts import bucket
from kivi_jax.run import begin, loop

TINY = "llama-tied"


@pytest.mark.parametrize("name", NAMES)
def test_greedy_continuations_equal_those_of_another_library(name):
    want = golden(name)
    start = int(want["greedy_prompt_length"])
    out = kivi_jax.generate(model(name)[0], want["greedy"][:, :start], max_new_tokens=120, cache=EXACT, eos_token_id=())
    assert np.array_equal(out.tokens, want["greedy"])
    assert out.lengths.tolist() == [160, 160] and out.cache.length.tolist() == [160, 160]
    assert out.text is None


@pytest.mark.parametrize("chunk", [None, 1, 100])
@pytest.mark.parametrize("name", ["llama2-mha", "mistral-sliding-window"])
def test_unquantized_logits_equal_those_of_another_library_by_every_path(name, chunk):
    want = golden(name)
    got = kivi_jax.logits(model(name)[0], want["input_ids"], cache=EXACT, chunk=chunk)
    assert got.dtype == jnp.float32
    assert np.abs(np.asarray(got)[:, -64:] - want["logits"]).max() < 2e-3


@pytest.mark.parametrize("name", NAMES)
def test_every_model_runs_on_a_quantized_cache(name):
    """The 8-bit cache stays near the exact logits, the 2-bit one does not equal them: it is really used."""
    params, ids = model(name)[0], golden(name)["input_ids"]
    exact = kivi_jax.logits(params, ids)[:, -64:]
    spread = float(exact.std())
    errors = {}
    for bits in (8, 2):
        config = KiviConfig(key_bits=bits, value_bits=bits, residual_length=0, sink_length=2)
        got = kivi_jax.logits(params, ids, cache=config, chunk=50)[:, -64:]
        errors[bits] = float(jnp.sqrt(jnp.mean((got - exact) ** 2))) / spread
    # With no residual a model that slides over 64 tokens sees quantized ones too, after each flush.
    assert errors[8] < 0.1 and 1.5 * errors[8] < errors[2] < 2


def test_a_sequence_does_not_depend_on_its_batch():
    """Ragged prompts, each as if alone: nothing of a neighbour or of padding enters a group or a softmax."""
    params = model(TINY)[0]
    ids = golden(TINY)["input_ids"]
    prompts = [ids[0, :5], ids[1, :180], ids[0, :129], ids[1, 7:8]]
    config = KiviConfig(sink_length=2, residual_length=64)
    together = kivi_jax.generate(params, prompts, max_new_tokens=140, cache=config, eos_token_id=())
    for row, prompt in enumerate(prompts):
        alone = kivi_jax.generate(params, prompt, max_new_tokens=140, cache=config, eos_token_id=())
        length = len(prompt) + 140
        assert together.lengths[row] == alone.lengths[0] == length
        assert np.array_equal(together.tokens[row, :length], alone.tokens[0, :length])
        assert (np.asarray(together.tokens[row, length:]) == 2).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_taken_off_by_the_attention_mask(side):
    params = model(TINY)[0]
    ids = golden(TINY)["input_ids"]
    rows = [ids[0, :5], ids[1, :40]]
    padded, mask = np.full((2, 40), 99), np.zeros((2, 40), int)
    for n, row in enumerate(rows):
        at = slice(40 - len(row), 40) if side == "left" else slice(0, len(row))
        padded[n, at], mask[n, at] = row, 1
    got = kivi_jax.generate(params, padded, attention_mask=mask, max_new_tokens=9)
    want = kivi_jax.generate(params, rows, max_new_tokens=9)
    assert np.array_equal(got.tokens, want.tokens) and got.lengths.tolist() == want.lengths.tolist()


def test_generation_stops_at_any_eos_id_and_takes_it_in():
    params = model(TINY)[0]
    ids = golden(TINY)["greedy"]
    new = ids[0, 40:]
    first, second = int(new[3]), int(new[7])
    out = kivi_jax.generate(
        params, ids[:, :40], max_new_tokens=20, cache=EXACT, eos_token_id=(second, first), pad_token_id=311
    )
    stop = int(np.flatnonzero((new == first) | (new == second))[0]) + 1
    assert out.lengths[0] == 40 + stop == out.cache.length[0]
    assert np.array_equal(out.tokens[0, : 40 + stop], ids[0, : 40 + stop])
    assert (np.asarray(out.tokens[0, 40 + stop :]) == 311).all()
    other = ids[1, 40:60]
    hits = np.flatnonzero((other == first) | (other == second))
    assert out.lengths[1] == 40 + (int(hits[0]) + 1 if hits.size else 20)


def test_eos_ids_default_to_the_checkpoint_s():
    params = model(TINY)[0]
    ids = golden(TINY)["greedy"]
    config = dataclasses.replace(params.config, eos_token_id=(int(ids[0, 44]),))
    graphdef, weights = nnx.split(params)
    stopping = nnx.merge(graphdef, weights)
    stopping.config = config
    out = kivi_jax.generate(stopping, ids[:1, :40], max_new_tokens=20, cache=EXACT)
    assert out.lengths[0] <= 45 and int(out.tokens[0, out.lengths[0] - 1]) == int(ids[0, 44])


def test_sampling_is_by_key_and_each_row_draws_for_itself():
    params = model(TINY)[0]
    prompt = golden(TINY)["input_ids"][0, :20]
    sample = lambda seed, rows, **kw: np.asarray(
        kivi_jax.generate(
            params,
            [prompt] * rows,
            max_new_tokens=12,
            temperature=1.0,
            key=jax.random.key(seed),
            eos_token_id=(),
            **kw,
        ).tokens[:, 20:]
    )
    first = sample(1, 3)
    assert np.array_equal(first, sample(1, 3)) and not np.array_equal(first, sample(2, 3))
    assert not np.array_equal(first[0], first[1])
    assert np.array_equal(first[:1], sample(1, 1))  # a row's draws do not depend on the batch
    greedy = kivi_jax.generate(params, [prompt], max_new_tokens=12, eos_token_id=()).tokens[:, 20:]
    assert np.array_equal(sample(1, 1, top_k=1), greedy)
    assert np.array_equal(sample(1, 1, top_p=1e-6), greedy)


def test_the_last_token_is_in_the_cache():
    """`out.cache` has taken in every token, so that its next step is the one that a longer run would take."""
    params = model(TINY)[0]
    prompt = golden(TINY)["input_ids"][:, :30]
    short = kivi_jax.generate(params, prompt, max_new_tokens=5, max_length=128, eos_token_id=())
    longer = kivi_jax.generate(params, prompt, max_new_tokens=7, max_length=128, eos_token_id=())
    assert short.cache.length.tolist() == [35, 35]
    again = kivi_jax.generate(params, longer.tokens[:, 35:36], cache=short.cache, max_new_tokens=1, eos_token_id=())
    assert np.array_equal(again.tokens[:, 1], longer.tokens[:, 36])
    assert short.cache.length.tolist() == [35, 35]  # the cache that was continued is as it was


def test_stream_joins_to_generate_s_text():
    params, tokenizer = model("llama2-mha")
    prompt = "Once upon a time"
    for settings in ({}, {"temperature": 1.5, "key": jax.random.key(3)}):
        want = kivi_jax.generate(params, prompt, tokenizer=tokenizer, max_new_tokens=25, eos_token_id=(), **settings)
        pieces = kivi_jax.stream(params, prompt, tokenizer=tokenizer, max_new_tokens=25, eos_token_id=(), **settings)
        text = list(pieces)
        assert "".join(text) == want.text and len(text) > 3
        assert pieces.tokens == want.tokens[0, -25:].tolist()
        assert pieces.cache.length.tolist() == want.cache.length.tolist()
    batch = kivi_jax.generate(params, [prompt, "x"], tokenizer=tokenizer, max_new_tokens=3)
    assert isinstance(batch.text, list) and len(batch.text) == 2


def test_prompt_lengths_are_bucketed():
    sizes = [bucket(n) for n in range(1, 5000)]
    assert all(size >= n and size < max(n * 1.25, 32 + n) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 50


def test_a_new_length_does_not_recompile():
    params = model(TINY)[0]
    ids = golden(TINY)["input_ids"]
    run = lambda tokens, new: kivi_jax.generate(params, ids[:, :tokens], max_new_tokens=new, max_length=256)
    compiled = lambda: (begin._cache_size(), loop._cache_size())
    run(40, 5)
    before = compiled()
    run(50, 17)
    run(33, 90)
    assert compiled() == before
    run(100, 5)  # another bucket
    assert compiled() == (before[0] + 1, before[1])


def test_decode_step_updates_the_cache_in_place():
    """With the cache donated, a step's temporaries are together smaller than one layer's cache.

    In large groups, because XLA:CPU before jax 0.11 reads a bfloat16 scale by widening its whole field to float32.
    """
    params = model("qwen3-qk-norm")[0]
    config = KiviConfig(key_group_size=128, value_group_size=64)
    graphdef, weights = nnx.split(params)

    def step(weights, tokens, cache):
        model = nnx.merge(graphdef, weights)
        hidden, cache = decoding.decode_step(model, tokens, jnp.ones(2, bool), cache)
        return jnp.argmax(model.logits(hidden), -1), cache

    cache = jax.eval_shape(lambda: decoding.init_cache(params, config, 2, 131072))
    tokens = jax.ShapeDtypeStruct((2,), jnp.int32)
    memory = jax.jit(step, donate_argnums=2).lower(weights, tokens, cache).compile().memory_analysis()
    assert memory.alias_size_in_bytes == cache.nbytes
    layer = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers[0]))
    assert memory.temp_size_in_bytes < layer


GOOD = np.arange(3, 9)[None]


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "prompt must hold 1 sequence or more; got none"),
        ([[1], []], {}, "prompt 1 must have 1 token or more; got 0"),
        ([1, 320], {}, "prompt 0 must have ids from 0 to 319; got 320"),
        ([[5], [-1]], {}, "prompt 1 must have ids from 0 to 319; got -1"),
        ([0.5], {}, "ids must be integers; got float64"),
        ("text", {}, "a prompt of text needs a tokenizer; got tokenizer=None"),
        (GOOD, {"temperature": -1.0}, "temperature must be 0 or more; got -1.0"),
        (GOOD, {"temperature": 1.0, "top_k": 0}, "top_k must be 1 token or more; got 0"),
        (GOOD, {"temperature": 1.0, "top_p": 1.5}, "top_p must be above 0 and at most 1; got 1.5"),
        (GOOD, {"max_new_tokens": 0}, "max_new_tokens must be 1 or more; got 0"),
        (GOOD, {"max_length": 5}, "room for all tokens of sequence 0, 6 in the prompt and 128 new ones; got 5"),
        (GOOD, {"eos_token_id": 320}, "eos_token_id must be ids from 0 to 319; got 320"),
        (
            GOOD,
            {"attention_mask": np.ones((2, 6))},
            r"attention_mask must have the prompt's shape \[1, 6\]; got \[2, 6\]",
        ),
        (
            GOOD,
            {"attention_mask": np.eye(6)[:1] + np.eye(6)[5:]},
            "mark one run of tokens in each row; row 0 has a gap",
        ),
        (GOOD, {"attention_mask": np.zeros((1, 6))}, "prompt 0 must have 1 token or more; got 0"),
        (GOOD, {"cache": "2 bits"}, "cache must be a KiviConfig or a KVCache; got str"),
        (GOOD, {"cache": KiviConfig(value_group_size=128)}, "got head_dim 32 and value_group_size 128"),
    ],
)
def test_bad_input_is_refused_before_any_work(prompt, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        kivi_jax.generate(model(TINY)[0], prompt, **settings)
    assert "\n" not in str(caught.value)


def test_a_cache_of_another_batch_size_or_too_full_is_refused():
    params = model(TINY)[0]
    cache = kivi_jax.generate(params, GOOD, max_new_tokens=2, max_length=128).cache
    with pytest.raises(ValueError, match="the cache holds 1 sequences; got 2 prompts"):
        kivi_jax.generate(params, np.tile(GOOD, (2, 1)), cache=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match="8 tokens in the cache, 6 in the prompt and 115 new ones; got 128"):
        kivi_jax.generate(params, GOOD, cache=cache, max_new_tokens=115)
