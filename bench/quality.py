"""What each cache costs a model: perplexity, KL and top-1 agreement through the real cache, beside its bits.

    python bench/quality.py                                  # the default model, 512 tokens scored after 512
    python bench/quality.py --context 4096 --stretches 1     # after 4,096
    python bench/quality.py --text FILE --offset 60000       # of another text, from a token on
    python bench/quality.py --sweep                          # constants around those of accurate() and compact()

Beside them: each layer's errors in stored keys, scores, stored values and attention output, on the first stretch, if
what comes into the layer is exact. Writes quality_[sweep_][<text>_]<context>_<offset>.json and .png into bench/results,
a row as soon as it is measured; rows of the same text and settings that are there already are kept.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import re
from pathlib import Path

import jax
from rich.progress import Progress
from rich.table import Table

import kivi_jax
from kivi_jax import KiviConfig
from kivi_jax.layer_errors import capture, layer_errors
from kivi_jax.quality import Evaluation
from kivi_jax.topics import python_topics, read, stretches

BETTER = dict(rotate=True, key_norm=True, sink_length=4)
CACHES = {
    "paper()": KiviConfig.paper(),
    "accurate()": KiviConfig.accurate(),
    "compact()": KiviConfig.compact(),
    "4-bit keys, 2-bit values, clip 0.95 / 0.8": KiviConfig(key_bits=4, key_clip=0.95, value_clip=0.8, **BETTER),
    "window of 128": KiviConfig(),
    "window, 4 sinks": KiviConfig(sink_length=4),
    "window, sinks, rotate, key_norm": KiviConfig(**BETTER),
    "keys before RoPE, no window": KiviConfig(pre_rope=True, residual_length=0),
    "4 bit": KiviConfig(key_bits=4, value_bits=4),
}


ACCURATE, COMPACT = KiviConfig.accurate(), KiviConfig.compact()
SWEEP = {
    **{
        f"accurate, clip {key_clip} / {value_clip}": dataclasses.replace(
            ACCURATE, key_clip=key_clip, value_clip=value_clip
        )
        for key_clip in (0.8, 0.9, 1.0)
        for value_clip in (0.8, 0.9, 1.0)
    },
    **{f"accurate, {sinks} sinks": dataclasses.replace(ACCURATE, sink_length=sinks) for sinks in (0, 8)},
    **{
        f"compact, clip {clip}": dataclasses.replace(COMPACT, key_clip=clip, value_clip=clip)
        for clip in (0.6, 0.7, 0.8, 0.9)
    },
}

ERRORS = {"keys": "stored keys", "scores": "scores", "values": "stored values", "output": "attention output"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="PATH", help="default: the default model")
    parser.add_argument("--text", metavar="FILE", help="default: the topics of Python's help")
    parser.add_argument("--context", type=int, default=512, help="tokens before those that are scored")
    parser.add_argument("--tokens", type=int, default=512, help="tokens scored of each stretch")
    parser.add_argument("--stretches", type=int, default=3)
    parser.add_argument("--offset", type=int, default=0, help="tokens of the text to pass over")
    parser.add_argument("--chunk", type=int, default=32, help="tokens of a piece; 1 is decoding step by step")
    parser.add_argument("--sweep", action="store_true", help="other constants, without the errors of layers")
    parser.add_argument("--caches", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()

    text = read(arguments.text) if arguments.text else python_topics()
    settings = {
        "model": arguments.model or "SmolLM2-135M-Instruct",
        "context": arguments.context,
        "tokens": arguments.tokens,
        "stretches": arguments.stretches,
        "offset": arguments.offset,
        "chunk": arguments.chunk,
        "text": text.about(),
    }
    configs = SWEEP if arguments.sweep else CACHES
    if unknown := set(arguments.caches or ()) - set(configs):
        parser.error(f"--caches must be of {', '.join(configs)}; got {', '.join(unknown)}")
    about = ["sweep"] * arguments.sweep + [Path(text.name).stem] * bool(arguments.text)
    path = arguments.out / f"{'_'.join(['quality', *about])}_{arguments.context}_{arguments.offset}.json"
    rows = _kept(path, settings)
    params, tokenizer = kivi_jax.load(arguments.model, dtype="float32")
    tokens = stretches(
        tokenizer.encode(text.text), arguments.stretches, arguments.context + arguments.tokens, arguments.offset
    )
    evaluation = captured = None
    with Progress() as progress:
        for name in configs if arguments.caches is None else arguments.caches:
            config = configs[name]
            if rows.get(name, {}).get("config") == dataclasses.asdict(config):
                continue
            task = progress.add_task(name)
            evaluation = evaluation or Evaluation(params, tokens, context=arguments.context, chunk=arguments.chunk)
            quality = evaluation(
                config, progress=lambda done, total, task=task: progress.update(task, completed=done, total=total)
            )
            rows[name] = dataclasses.asdict(quality) | {"config": dataclasses.asdict(config), "measured": _measured()}
            if not arguments.sweep:
                # One stretch: what a layer's attention is given takes 0.1 MB a token, all layers of a small model.
                captured = captured or capture(params, tokens[:1])
                rows[name]["layers"] = _rounded(layer_errors(captured, config))
            _write(path, settings, rows)
    _plot(rows, settings, path)
    progress.console.print(_table(rows))


def _rounded(errors) -> dict[str, list[float]]:
    return {kind: [float(f"{x:.4g}") for x in getattr(errors, kind)] for kind in ERRORS}


def _kept(path: Path, settings: dict) -> dict:
    if not path.exists():
        return {}
    saved = json.loads(path.read_text())
    return saved["caches"] if saved["settings"] == settings else {}


def _measured() -> dict:
    return {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": {name: importlib.metadata.version(name) for name in ("kivi-jax", "jax", "flax")},
    }


def _write(path: Path, settings: dict, rows: dict):
    path.parent.mkdir(exist_ok=True)
    saved = {"settings": settings, "caches": rows}
    # A list of numbers, one a layer, in one line.
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), json.dumps(saved, indent=2))
    path.write_text(text + "\n")


def _table(rows: dict) -> Table:
    table = Table("cache", "bits", "perplexity", "KL", "top-1")
    exact = next(iter(rows.values()))["exact_perplexity"]
    table.add_row("unquantized", "16", f"{exact:.3f}", "0", "1")
    for name, row in rows.items():
        numbers = f"{row['perplexity']:.3f}", f"{row['kl']:.4f}", f"{row['top1']:.3f}"
        table.add_row(name, f"{row['bits_per_element']:g}", *numbers)
    return table


def _plot(rows: dict, settings: dict, path: Path):
    from matplotlib.figure import Figure

    layered = {name: row["layers"] for name, row in rows.items() if "layers" in row}
    figure = Figure(figsize=(14 if layered else 8, 5.5), layout="constrained")
    panels = figure.subplot_mosaic(
        [["kl", "kl", "keys", "scores"], ["kl", "kl", "values", "output"]] if layered else "k"
    )
    quality, *_ = panels.values()
    colors = {name: f"C{n % 10}" for n, name in enumerate(rows)}
    for name, row in rows.items():
        quality.plot(row["bits_per_element"], row["kl"], "o", label=name, color=colors[name])
    quality.set(
        xlabel="bits an element",
        ylabel="KL to the unquantized model, nats a token",
        yscale="log",
        title=f"{settings['model']}, after {settings['context']} tokens",
    )
    quality.legend(fontsize="small")
    for kind, title in ERRORS.items() if layered else ():
        for name, layers in layered.items():
            panels[kind].plot(layers[kind], color=colors[name])
        panels[kind].set(xlabel="layer", yscale="log", title=f"relative error of {title}")
    figure.savefig(path.with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")  # a GPU would round float32 to 10 bits
    main()
