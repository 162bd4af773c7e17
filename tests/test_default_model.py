"""The default model, a real one: against another library, and what the cache costs it."""

import json

import jax
import numpy as np
import pytest
from checkpoints import DATA, EXACT, default_golden, default_model

import kivi_jax
from kivi_jax import KiviConfig

pytestmark = pytest.mark.default_model


@pytest.mark.parametrize("text", ["chat", "story"])
def test_greedy_text_equals_that_of_another_library(text):
    want = default_golden()
    ids, greedy = want[f"{text}_ids"], want[f"{text}_greedy"]
    out = kivi_jax.generate(default_model()[0], ids, max_new_tokens=len(greedy) - len(ids), cache=EXACT)
    length = int(out.lengths[0])
    assert np.array_equal(out.tokens[0, :length], greedy[:length])
    assert length == len(greedy) or int(greedy[length - 1]) in default_model()[0].config.eos_token_id


def test_logits_and_likelihood_equal_those_of_another_library(record_property):
    want = default_golden()
    ids = want["doc_ids"]
    got = np.asarray(kivi_jax.logits(default_model()[0], ids))[0]
    assert np.abs(np.take_along_axis(got, want["top_ids"], 1) - want["top_logits"]).max() < 0.05
    log_p = np.asarray(jax.nn.log_softmax(got))
    nll = -log_p[np.arange(511), ids[1:]].mean()
    assert abs(nll - json.loads((DATA / "smollm2_golden.json").read_text())["mean_nll"]) < 0.01


def test_what_the_cache_costs_through_append_and_flush(capsys):
    """KL of the next-token distribution to the unquantized model's, on the last 256 of 512 tokens, 64 at a time."""
    params, ids = default_model()[0], default_golden()["doc_ids"]
    exact = np.asarray(jax.nn.log_softmax(kivi_jax.logits(params, ids)[0]))[256:]
    bounds = {2: (0.05, 0.25), 4: (0.001, 0.008)}
    for bits, (low, high) in bounds.items():
        config = KiviConfig(key_bits=bits, value_bits=bits)
        got = np.asarray(jax.nn.log_softmax(kivi_jax.logits(params, ids, cache=config, chunk=64)[0]))[256:]
        kl = float((np.exp(exact) * (exact - got)).sum(-1).mean())
        perplexity = float(np.exp(-got[np.arange(255), ids[257:]].mean()))
        with capsys.disabled():
            print(f"\n{bits} bits: KL {kl:.4f}, perplexity {perplexity:.2f}")
        assert low < kl < high


def test_two_bit_text_stays_on_topic():
    params, tokenizer = default_model()
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    # residual_length 0 and a long prompt, so that most of what is attended to is quantized
    context = tokenizer.encode(json.loads((DATA / "smollm2_golden.json").read_text())["doc"])[:300]
    out = kivi_jax.generate(
        params, context + prompt, tokenizer=tokenizer, max_new_tokens=24, cache=KiviConfig(residual_length=0)
    )
    assert "Paris" in out.text[0]
    assert int(out.cache.quantized[0]) >= 256
