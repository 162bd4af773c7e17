"""The geometry report and notebook, on small models; the order of the four geometries, on the default one."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kivi_jax
from kivi_jax import geometry
from kivi_jax.cli import main
from kivi_jax.config import KiviConfig
from kivi_jax.layer_errors import Captured, capture, layer_errors
from kivi_jax.models import Llama, LlamaConfig
from kivi_jax.models.rope import Rotary
from kivi_jax.quality import Quality
from kivi_jax.topics import python_topics, stretches

NOTEBOOK = Path(__file__).parents[1] / "bench" / "geometry.ipynb"
CHECKPOINT = Path(__file__).parent / "data" / "checkpoints" / "llama2-mha"
ROTARY = Rotary(head_dim=32, theta=10000.0, scaling=None, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def small():
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.3,
    )
    return Llama(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).integers(0, 96, (1, 300))


@pytest.fixture(scope="module")
def kivi_like():
    """Keys with large fixed channels, and values of which a few tokens, that no query looks at, are large."""
    rng = np.random.default_rng(0)
    key = rng.normal(size=(1, 2, 300, 32)) + np.where(np.arange(32) % 16 == 3, 20.0, 0.0)
    value = rng.normal(size=(1, 2, 300, 32)) * np.where(np.arange(300) % 16 == 5, 20.0, 1.0)[:, None]
    key[:, :, 5::16, 3::16] -= 5  # scores lower by 5
    query = rng.normal(size=(1, 4, 300, 32)) + np.where(np.arange(32) % 16 == 3, 3.0, 0.0)
    at_zero = Rotary(head_dim=32, theta=1e30, scaling=None, max_position_embeddings=2048)  # all but two channels rest
    query, key, value = ((jnp.asarray(x, jnp.float32),) for x in (query, key, value))
    return Captured(query, key, value, (None,), at_zero)


def test_keys_want_channels_and_values_want_tokens_where_they_are_consumed(kivi_like):
    error = lambda side, axis: layer_errors(kivi_like, KiviConfig(**geometry.ALONE[side], **{f"{side}_axis": axis}))
    key = {axis: error("key", axis) for axis in ("token", "channel")}
    value = {axis: error("value", axis) for axis in ("token", "channel")}
    assert key["token"].keys > 2 * key["channel"].keys > 0
    assert key["token"].scores > 2 * key["channel"].scores > 0
    assert value["channel"].output > 2 * value["token"].output > 0
    for by in key.values():
        assert by.values == 0
    for by in value.values():
        assert by.keys == by.scores == by.weights == 0


def test_errors_are_those_of_the_cache_options_undone(small, text):
    """Rotated or before RoPE, 8 bits come back as what went in, and 16 bits exactly; 2 bits do not."""
    captured = capture(small, text)
    for options in (dict(rotate=True, key_norm=True), dict(pre_rope=True, key_norm=True, sink_length=3)):
        errors = layer_errors(captured, KiviConfig(key_bits=8, value_bits=8, **options))
        assert all(0 < x < 0.02 for x in (errors.keys, errors.values, errors.scores, errors.weights, errors.output))
    errors = layer_errors(captured, KiviConfig())
    assert errors.keys > 0.1 and errors.values > 0.1 and errors.output > 0


def test_too_short_a_text_is_refused(small, text):
    with pytest.raises(ValueError, match="must be longer for this config to quantize a block of it; got 200 tokens"):
        layer_errors(capture(small, text[:, :200]), KiviConfig())


class EvaluationByFormula:
    """In place of scoring a text: a KL that tells which config it is of."""

    def __init__(self, *_, **__):
        pass

    def __call__(self, config):
        axes = 2 * (config.key_axis == "token") + (config.value_axis == "channel")
        kl = 1 + axes + 0.25 * (config.residual_length == 0) - 0.125 * (config.key_clip == 0.7 and config.rotate)
        return Quality(20.0, 10.0, kl, 0.5, 3.0, 20)


@pytest.fixture(scope="module")
def measured(small, text):
    steps = []
    progress = lambda done, total, what: steps.append((done, total))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "Evaluation", EvaluationByFormula)
        return geometry.measure(small, text, context=280, clips=(1.0, 0.7), progress=progress), steps


def test_measurements_have_what_the_report_shows(measured):
    found, steps = measured
    assert set(found["axes"]) == {f"key {k}, value {v}" for k in ("channel", "token") for v in ("channel", "token")}
    assert [row["kl"] for row in found["axes"].values()] == [1.25, 2.25, 3.25, 4.25]
    assert [row["kl"] for row in found["window"].values()] == [1.25, 1.0]
    assert found["window"]["none"]["output"] > found["window"]["128 tokens"]["output"]
    clip = found["clip"]["factors"]
    assert [row["kl"] for row in clip.values()] == [1.0, 0.875] and found["clip"]["chosen_by"]["kl"] == 0.7
    assert found["clip"]["chosen_by"]["keys"] == float(min(clip, key=lambda factor: clip[factor]["keys"]))
    share = found["sparsity"]
    assert 0 < share["0.5"][0] < share["0.9"][0] < share["0.99"][0] <= 1
    assert steps[0] == (0, 9) and steps[-1] == (9, 9) and len(steps) == 10
    assert json.loads(json.dumps(found)) == found


def test_findings_follow_the_numbers(measured):
    found, _ = measured
    summary = {
        "key per token": dict(keys=0.5, scores=0.4),
        "key per channel": dict(keys=0.25, scores=0.1),
        "value per token": dict(values=0.3, output=0.2),
        "value per channel": dict(values=0.2, output=0.4),
    }
    chosen = dict(keys=0.9, values=0.9, kl=0.8)
    said = geometry.findings(found | {"summary": summary, "clip": {"chosen_by": chosen}})
    assert "first: key channel, value token 1.250; key channel, value channel 2.250" in said[0]
    assert said[1].endswith("40.0 % per token and 10.0 % per channel: per channel is better both ways.")
    assert said[2].endswith("per channel stores them better, per token serves attention better.")
    assert said[3].endswith("with the least KL: 0.8.")
    summary["value per token"]["values"] = 0.1
    chosen["kl"] = 0.9
    said = geometry.findings(found | {"summary": summary, "clip": {"chosen_by": chosen}})
    assert said[2].endswith("per token is better both ways.") and said[3].endswith("0.9, the same.")


def test_command_writes_one_page_and_its_numbers(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(geometry, "measure", lambda params, tokens, **_: measured[0])
    command = ["geometry", "--model", str(CHECKPOINT), "--context", "200", "--tokens", "40", "--layers", "0", "2"]
    assert main([*command, "--output", str(tmp_path / "new")]) == 0
    page, numbers = (tmp_path / "new" / f"geometry.{kind}" for kind in ("html", "json"))
    assert capsys.readouterr().out.split() == [str(page), str(numbers)]
    found = json.loads(numbers.read_text())
    assert found.pop("about")["text"] == python_topics().about()
    assert found == measured[0]
    content = page.read_text()
    assert content.count("data:image/png;base64,") == 7
    assert "http" not in content  # one file, nothing loaded from elsewhere


def test_command_refuses_in_one_line(tmp_path, capsys):
    own = tmp_path / "short.txt"
    own.write_text("Too short.")
    assert main(["geometry", "--model", str(CHECKPOINT), "--text", str(own)]) == 2
    assert "must have 1024 tokens for 1 stretches of 1024" in capsys.readouterr().err


def test_what_a_report_is_about_is_escaped(measured, small, text, tmp_path, monkeypatch):
    monkeypatch.setattr(geometry, "measure", lambda params, tokens, **_: measured[0])
    page, _ = geometry.report(small, text, tmp_path, about={"model": "a <small> one"})
    assert "a &lt;small&gt; one" in page.read_text()


def test_layers_that_are_not_there_and_heads_that_do_not_split_are_refused(small, text, tmp_path):
    with pytest.raises(ValueError, match="layers must be from 0 to 0; got 1"):
        geometry.report(small, text, tmp_path, layers=[1])
    config = LlamaConfig(
        vocab_size=96, hidden_size=96, intermediate_size=80, num_hidden_layers=1, num_attention_heads=1, head_dim=96
    )
    with pytest.raises(ValueError, match="rotate needs a head_dim that is a power of two; got head_dim 96"):
        geometry.measure(Llama(config, rngs=nnx.Rngs(0)), text)


def test_without_matplotlib_the_command_that_installs_it_is_said(small, text, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'kivi-jax\[report\]'"):
        geometry.report(small, text, tmp_path)


def test_notebook_runs_from_top_to_bottom(small, tmp_path, capsys):
    import matplotlib

    matplotlib.use("Agg")
    _, tokenizer = kivi_jax.load(CHECKPOINT)
    config = dataclasses.replace(small.config, vocab_size=400)
    kivi_jax.save(Llama(config, rngs=nnx.Rngs(0)), tmp_path / "model", tokenizer=tokenizer)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    names = {}
    for cell in cells:
        source = "".join(cell["source"])
        if "parameters" in cell["metadata"].get("tags", ()):
            exec(source, names)
            assert {"MODEL", "CONTEXT", "SCORED", "QUERIES"} <= names.keys()
            source = f"MODEL, CONTEXT, SCORED, QUERIES = {str(tmp_path / 'model')!r}, 288, 32, 16"
        exec(source, names)
    printed = capsys.readouterr().out
    assert "keys per token, values per channel" in printed and "KL" in printed


@pytest.mark.default_model
def test_default_models_keys_and_values_have_the_published_geometry():
    """In direction, the table for Llama-2-13B (KIVI, arXiv 2402.02750, table 2)."""
    params, tokenizer = kivi_jax.load(dtype="float32")
    captured = capture(params, stretches(tokenizer.encode(python_topics().text[:20_000]), 1, 512))
    mean = {
        (side, axis): {k: np.mean(v) for k, v in vars(layer_errors(captured, config)).items()}
        for side in ("key", "value")
        for axis in ("token", "channel")
        for config in [KiviConfig(**geometry.ALONE[side], **{f"{side}_axis": axis})]
    }
    assert mean["key", "token"]["keys"] > 2 * mean["key", "channel"]["keys"]
    assert mean["key", "token"]["scores"] > 1.5 * mean["key", "channel"]["scores"]
    assert mean["value", "token"]["values"] > mean["value", "channel"]["values"]  # as stored, the other way round
    assert mean["value", "channel"]["output"] > 1.3 * mean["value", "token"]["output"]
