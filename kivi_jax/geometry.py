"""Why keys are quantized per channel and values per token: the measurements, on a model of one's own.

`measure` gives numbers, `plots` (which needs matplotlib) draws them, and `report` writes both, one HTML page and JSON.
"""

import base64
import dataclasses
import datetime
import html
import importlib.metadata
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kivi_jax.config import AXES, KiviConfig
from kivi_jax.layer_errors import Captured, attention_weights, capture, layer_errors
from kivi_jax.models import Llama
from kivi_jax.quality import Evaluation

CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6)
ALONE = {"key": dict(value_bits=16, residual_length=0), "value": dict(key_bits=16, residual_length=0)}
"""Configs that quantize one side only."""

ROTATED = dict(rotate=True, key_norm=True, sink_length=4)
"""What clipping is worth its while with."""

SHARES = (0.5, 0.9, 0.99)


def measure(
    params: Llama,
    tokens,
    *,
    context: int = 512,
    chunk: int = 32,
    clips: Sequence[float] = CLIPS,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict:
    """The geometry of a model's cache, in 2 bits and groups of 32.

    Args:
        params: the model.
        tokens: int `[B, L]`, stretches of text.
        context: the first tokens of each, which no quality is scored on.
        chunk: as for `quality.Evaluation`.
        clips: the factors to choose among.
        progress: called as `progress(done, total, what)` before each measurement, and at the end.

    Returns:
        A dict that JSON can hold. Errors are relative, a number a layer; their means are in "summary":

        - "axes": perplexity and KL of each choice of axes, with no window;
        - "errors": of keys per token and per channel, then of values, with the other side unquantized: as stored, and
          in the scores, the weights and the output that are computed from them;
        - "sparsity": which share of the tokens has half, 90 % and 99 % of a query's attention;
        - "window": KL, and the error of each layer's output, with no window and with the default one;
        - "clip": for each factor the KL and the errors of stored keys and values, and which factor each would choose.

    Raises:
        ValueError: the text is too short for anything to be quantized, or the model's heads cannot be rotated or split
            into groups of 32.
    """
    axes = {
        f"key {key}, value {value}": KiviConfig(key_axis=key, value_axis=value, residual_length=0)
        for key in AXES
        for value in AXES[::-1]
    }
    window = {"none": KiviConfig(residual_length=0), "128 tokens": KiviConfig()}
    clipped = {clip: KiviConfig(key_clip=clip, value_clip=clip, **ROTATED) for clip in clips}
    for config in (*axes.values(), *clipped.values()):
        config.check_head_dim(params.config.head_dim)
    total = 2 + len(axes) + 1 + len(clipped)
    done = 0

    def step(what: str):
        nonlocal done
        if progress:
            progress(done, total, what)
        done += 1

    step("keys and values of each layer")
    captured = capture(params, tokens)
    errors = {}
    for side in ("key", "value"):
        for axis in AXES[::-1]:
            config = KiviConfig(**ALONE[side], **{f"{side}_axis": axis})
            errors[f"{side} per {axis}"] = _lists(layer_errors(captured, config))
    outputs = {name: layer_errors(captured, config).output.tolist() for name, config in window.items()}
    storage = {clip: layer_errors(captured, config) for clip, config in clipped.items()}

    step("the unquantized model")
    evaluation = Evaluation(params, tokens, context=context, chunk=chunk)

    def quality(name, config):
        step(name)
        return dataclasses.asdict(evaluation(config))

    measured = {name: quality(name, config) for name, config in axes.items()}
    windows = {
        "none": measured["key channel, value token"],
        "128 tokens": quality("the window", window["128 tokens"]),
    }
    clip = {
        f"{factor:g}": {
            "kl": quality(f"clip {factor:g}", config)["kl"],
            "keys": float(storage[factor].keys.mean()),
            "values": float(storage[factor].values.mean()),
        }
        for factor, config in clipped.items()
    }
    if progress:
        progress(total, total, "done")
    best = lambda measure: float(min(clip, key=lambda factor: clip[factor][measure]))
    return {
        "axes": measured,
        "errors": errors,
        "summary": {name: {k: float(np.mean(v)) for k, v in by.items()} for name, by in errors.items()},
        "sparsity": _sparsity(captured),
        "window": {
            name: {"kl": windows[name]["kl"], "perplexity": windows[name]["perplexity"], "output": outputs[name]}
            for name in window
        },
        "clip": {"factors": clip, "chosen_by": {measure: best(measure) for measure in ("keys", "values", "kl")}},
    }


def _lists(errors) -> dict[str, list[float]]:
    return {field.name: getattr(errors, field.name).tolist() for field in dataclasses.fields(errors)}


def _sparsity(captured: Captured) -> dict[str, list[float]]:
    """For each layer, the mean share of a query's tokens that together have a share of its attention."""
    rows = []
    for layer in range(len(captured.key)):
        weights = np.sort(np.asarray(attention_weights(captured, layer)), axis=-1)[..., ::-1]
        reached = np.cumsum(weights, axis=-1)
        rows.append([float(((reached < share).sum(-1) + 1).mean() / weights.shape[-1]) for share in SHARES])
    return {f"{share:g}": list(column) for share, column in zip(SHARES, zip(*rows, strict=True), strict=True)}


def report(
    params: Llama,
    tokens,
    directory: str | os.PathLike,
    *,
    layers: Sequence[int] | None = None,
    about: dict | None = None,
    **options,
) -> tuple[Path, Path]:
    """Writes geometry.html, a page with its plots in it, and geometry.json into a directory.

    Args:
        params, tokens, options: as for `measure`.
        layers: whose keys and values are drawn; None: the first, the middle and the last.
        about: what the report says it was made of, a dict that JSON can hold.

    Returns:
        The paths of the page and of the numbers.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; before any work.
        ValueError: as for `measure`, or there is no such layer.
    """
    _figure_class()
    count = params.config.num_hidden_layers
    layers = sorted({0, count // 2, count - 1}) if layers is None else list(layers)
    for layer in layers:
        if not 0 <= layer < count:
            raise ValueError(f"layers must be from 0 to {count - 1}; got {layer}.")
    results = measure(params, tokens, **options)
    about = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": {name: importlib.metadata.version(name) for name in ("kivi-jax", "jax")},
    } | (about or {})
    figures = plots(results) | heat_maps(capture(params, jnp.asarray(tokens)[:1]), layers)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    page, numbers = directory / "geometry.html", directory / "geometry.json"
    numbers.write_text(json.dumps({"about": about} | results, indent=2) + "\n")
    page.write_text(_page(results, about, figures))
    return page, numbers


def findings(results: dict) -> list[str]:
    """What the numbers that `measure` gave say, a sentence each."""
    percent = lambda x: f"{100 * x:.1f} %"
    ranked = sorted(results["axes"].items(), key=lambda row: row[1]["kl"])
    ways = "; ".join(f"{name} {row['kl']:.3f}" for name, row in ranked)
    found = [f"KL of the four ways, the best first: {ways}."]

    def compare(side, field, what):
        error = {axis: results["summary"][f"{side} per {axis}"][field] for axis in AXES[::-1]}
        sizes = " and ".join(f"{percent(x)} per {axis}" for axis, x in error.items())
        return f"{what}: {sizes}", min(error, key=error.get)

    for side, stored, consumed, name in (
        ("key", "keys", "scores", "the scores"),
        ("value", "values", "output", "the attention output"),
    ):
        (by_store, best_stored), (by_use, best_used) = (
            compare(side, stored, f"Error of {stored} as stored"),
            compare(side, consumed, f"as consumed, in {name}"),
        )
        verdict = f"per {best_used} is better both ways"
        if best_stored != best_used:
            verdict = f"per {best_stored} stores them better, per {best_used} serves attention better"
        found.append(f"{by_store}; {by_use}: {verdict}.")
    chosen = results["clip"]["chosen_by"]
    same = chosen["keys"] == chosen["values"] == chosen["kl"]
    found.append(
        f"Clip factor with the least error of stored keys: {chosen['keys']:g}, of stored values: {chosen['values']:g}, "
        f"with the least KL: {chosen['kl']:g}{', the same' if same else ''}."
    )
    return found


def _figure_class():
    # matplotlib's Figure rather than its pyplot: no window and no state.
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("plots need matplotlib: run `pip install 'kivi-jax[report]'`.") from None
    return Figure


def plots(results: dict) -> dict:
    """Figures of what `measure` gave: a dict from a caption to a matplotlib `Figure`."""
    Figure = _figure_class()
    figures = {}

    def figure(caption, **size):
        figures[caption] = Figure(layout="constrained", **size)
        return figures[caption]

    axes = results["axes"]
    bars = figure("KL to the unquantized model of the four ways to spend 2 bits", figsize=(7, 2.5)).subplots()
    bars.barh(list(axes), [row["kl"] for row in axes.values()])
    bars.set_xlabel("nats a token")
    bars.invert_yaxis()

    errors = results["errors"]
    panels = figure("Errors by layer, of keys alone and of values alone", figsize=(9, 6)).subplots(2, 2, sharex=True)
    for panel, (side, field, title) in zip(
        panels.flat,
        [
            ("key", "keys", "keys as stored"),
            ("key", "scores", "scores"),
            ("value", "values", "values as stored"),
            ("value", "output", "values as consumed: attention output"),
        ],
        strict=True,
    ):
        for axis in AXES[::-1]:
            panel.plot(errors[f"{side} per {axis}"][field], label=f"per {axis}")
        panel.set(title=title, ylabel="relative error", ylim=(0, None))
        panel.legend()
    for panel in panels[1]:
        panel.set_xlabel("layer")

    panel = figure("How few tokens have how much of a query's attention", figsize=(7, 3)).subplots()
    for share, values in results["sparsity"].items():
        panel.plot(values, label=f"{100 * float(share):g} % of the attention")
    panel.set(xlabel="layer", ylabel="share of the tokens", yscale="log")
    panel.legend()

    panel = figure("Error of the attention output with and without the recent window", figsize=(7, 3)).subplots()
    for name, row in results["window"].items():
        panel.plot(row["output"], label=f"window: {name} (KL {row['kl']:.3f})")
    panel.set(xlabel="layer", ylabel="relative error", ylim=(0, None))
    panel.legend()

    clip = results["clip"]["factors"]
    left, right = figure("The clip factor, by errors as stored and by KL", figsize=(9, 3)).subplots(1, 2)
    factors = [float(factor) for factor in clip]
    for side in ("keys", "values"):
        left.plot(factors, [row[side] for row in clip.values()], "o-", label=f"{side} as stored")
    left.set(xlabel="clip", ylabel="relative error")
    left.legend()
    right.plot(factors, [row["kl"] for row in clip.values()], "o-")
    right.set(xlabel="clip", ylabel="KL, nats a token")
    return figures


def heat_maps(captured: Captured, layers: Sequence[int], *, head: int = 0) -> dict:
    """Magnitudes of the first sequence's keys and values, token by channel: a dict from a caption to a `Figure`."""
    Figure = _figure_class()
    figures = {}
    for layer in layers:
        figure = Figure(figsize=(9, 3), layout="constrained")
        sides = (("keys", captured.embedded_keys(layer)), ("values", captured.value[layer]))
        for panel, (side, x) in zip(figure.subplots(1, 2), sides, strict=True):
            image = panel.imshow(np.abs(np.asarray(x[0, head], np.float32)), aspect="auto", interpolation="nearest")
            panel.set(title=side, xlabel="channel", ylabel="token")
            figure.colorbar(image, ax=panel)
        figures[f"Magnitude of keys and values, layer {layer}, KV head {head}"] = figure
    return figures


def _page(results: dict, about: dict, figures: dict) -> str:
    def image(caption, figure):
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=110)
        encoded = base64.b64encode(data.getvalue()).decode()
        title = html.escape(caption)
        return f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{encoded}">'

    def table(head, rows):
        cells = lambda tag, row: "".join(f"<{tag}>{html.escape(str(x))}</{tag}>" for x in row)
        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
        return f"<table><tr>{cells('th', head)}</tr>{body}</table>"

    exact = next(iter(results["axes"].values()))["exact_perplexity"]
    axes = [(name, f"{row['perplexity']:.2f}", f"{row['kl']:.3f}") for name, row in results["axes"].items()]
    fields = ("keys", "values", "scores", "weights", "output")
    percent = lambda x: f"{100 * x:.2f} %"
    errors = [(name, *(percent(row[f]) for f in fields)) for name, row in results["summary"].items()]
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Geometry of a key/value cache</title>
<style>
body {{ font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
img {{ max-width: 100% }} table {{ border-collapse: collapse }} td, th {{ padding: .2em .8em; text-align: left }}
</style>
<h1>Geometry of a key/value cache in 2 bits</h1>
{table(("", ""), about.items())}
<h2>The four ways to spend 2 bits</h2>
{table(("axes of the groups", "perplexity", "KL"), [("unquantized", f"{exact:.2f}", "0"), *axes])}
<h2>Mean relative errors over the layers</h2>
{table(("quantized alone", *fields), errors)}
<ul>{"".join(f"<li>{html.escape(found)}</li>" for found in findings(results))}</ul>
{"".join(image(caption, figure) for caption, figure in figures.items())}
</html>
"""
