"""Scoring a text through a cache."""

import dataclasses
import importlib.util
import json
import platform
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import kivi_jax
from kivi_jax.config import KiviConfig
from kivi_jax.models import Llama, LlamaConfig
from kivi_jax.quality import Evaluation
from kivi_jax.topics import python_topics, read, stretches

EXACT = KiviConfig(key_bits=16, value_bits=16)
CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    initializer_range=0.3,
)


@pytest.fixture(scope="module")
def model():
    return Llama(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 96, (2, 300))


def test_quality_is_what_the_logits_say(model, tokens):
    """By hand from `logits`, exact and through the cache in the same pieces; the last piece is a short one."""
    config = KiviConfig(residual_length=0)
    got = Evaluation(model, tokens, context=200, chunk=32)(config)
    scored = slice(199, 299)
    log_p, log_q = (
        np.asarray(jax.nn.log_softmax(x), np.float64)[:, scored]
        for x in (kivi_jax.logits(model, tokens), kivi_jax.logits(model, tokens, cache=config, chunk=32))
    )
    pick = lambda log: np.exp(-np.take_along_axis(log, tokens[:, 200:, None], -1).mean())
    assert got.tokens == 200
    np.testing.assert_allclose(got.exact_perplexity, pick(log_p), rtol=1e-4)
    np.testing.assert_allclose(got.perplexity, pick(log_q), rtol=1e-4)
    np.testing.assert_allclose(got.kl, (np.exp(log_p) * (log_p - log_q)).sum(-1).mean(), rtol=1e-2)
    np.testing.assert_allclose(got.top1, (log_p.argmax(-1) == log_q.argmax(-1)).mean(), atol=0.011)
    assert got.kl > 0.01 and got.bits_per_element == 3.0


@pytest.mark.parametrize("chunk", [1, 64])
def test_an_unquantized_cache_costs_nothing(model, tokens, chunk):
    steps = []
    evaluation = Evaluation(model, tokens[:1, :140], context=130, chunk=chunk)
    quality = evaluation(EXACT, progress=lambda done, total: steps.append((done, total)))
    assert abs(quality.kl) < 1e-5 and quality.top1 == 1
    np.testing.assert_allclose(quality.perplexity, quality.exact_perplexity, rtol=1e-4)
    assert steps[0] == (0, 140) and steps[-1] == (140, 140)


def test_options_that_help_lower_the_divergence(model, tokens):
    evaluation = Evaluation(model, tokens, context=200, chunk=64)
    kl = lambda **options: evaluation(KiviConfig(residual_length=0, **options)).kl
    two, four = kl(), kl(key_bits=4, value_bits=4)
    assert two > 4 * four > 0


def test_a_model_runs_the_same_with_keys_before_rope(model, tokens):
    """With nothing quantized the two caches hold the same thing, in two forms."""
    config = dataclasses.replace(EXACT, pre_rope=True, sink_length=3, residual_length=0)
    got, want = (
        kivi_jax.logits(model, tokens[:, :200], cache=cache, chunk=chunk)
        for cache, chunk in ((config, 24), (EXACT, 24))
    )
    np.testing.assert_allclose(got, want, atol=2e-4)
    out = [kivi_jax.generate(model, tokens[:, :150], max_new_tokens=5, cache=cache) for cache in (config, EXACT)]
    assert np.array_equal(out[0].tokens, out[1].tokens)


def test_a_model_runs_the_same_with_rotated_keys_and_values(model, tokens):
    config = dataclasses.replace(EXACT, rotate=True, residual_length=0)
    got, want = (kivi_jax.logits(model, tokens[:, :200], cache=cache, chunk=24) for cache in (config, EXACT))
    np.testing.assert_allclose(got, want, atol=2e-4)


def test_keys_before_dynamic_rope_are_refused():
    config = dataclasses.replace(CONFIG, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(ValueError, match="pre_rope must be False for a model with dynamic RoPE scaling"):
        kivi_jax.logits(Llama(config, rngs=nnx.Rngs(0)), [1, 2, 3], cache=KiviConfig(pre_rope=True), chunk=2)


def test_what_leaves_nothing_to_score_is_refused(model, tokens):
    with pytest.raises(ValueError, match="context must be between 1 and 299 of the 300 tokens; got 300"):
        Evaluation(model, tokens, context=300)
    with pytest.raises(ValueError, match="chunk must be 1 token or more; got 0"):
        Evaluation(model, tokens, context=10, chunk=0)


def test_stretches_follow_one_another_and_must_fit():
    assert np.array_equal(stretches(list(range(20)), 2, 4, 3), [[3, 4, 5, 6], [7, 8, 9, 10]])
    with pytest.raises(ValueError, match="must have 23 tokens for 5 stretches of 4; got 20"):
        stretches(list(range(20)), 5, 4, 3)


def test_texts_are_named_by_where_they_are_from_and_a_hash(tmp_path):
    text = python_topics()
    assert len(text.text) > 100_000 and len(text.sha256) == 16 and f"Python {platform.python_version()}" in text.name
    (tmp_path / "own.txt").write_text("Überall", encoding="utf-8")
    assert read(tmp_path / "own.txt").about() == {"name": "own.txt", "sha256": "e1cfb6e42751c75e"}


def test_script_writes_a_row_for_each_cache_with_its_layers(tmp_path, monkeypatch):
    """On a text of one's own; a second run keeps the rows."""
    root = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location("bench_quality", root / "bench" / "quality.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (tmp_path / "own.txt").write_text("Many words, and many more. " * 40)
    model = root / "tests" / "data" / "checkpoints" / "llama2-mha"
    settings = ["--context", "150", "--tokens", "20", "--stretches", "1", "--caches", "paper()"]
    command = ["quality.py", "--model", str(model), "--text", str(tmp_path / "own.txt"), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, *settings])
    script.main()
    saved = json.loads((tmp_path / "quality_own_150_0.json").read_text())
    row = saved["caches"]["paper()"]
    assert saved["settings"]["text"] == read(tmp_path / "own.txt").about()
    assert row["kl"] > 0 and row["tokens"] == 20 and row["bits_per_element"] == 3.0
    assert {kind: len(errors) for kind, errors in row["layers"].items()} == dict.fromkeys(script.ERRORS, 3)
    assert all(x > 0 for errors in row["layers"].values() for x in errors)
    assert (tmp_path / "quality_own_150_0.png").stat().st_size > 10_000

    monkeypatch.setattr(script, "Evaluation", None)  # nothing left to measure
    script.main()
    assert json.loads((tmp_path / "quality_own_150_0.json").read_text()) == saved
