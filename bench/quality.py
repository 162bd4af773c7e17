"""What each cache costs a model: perplexity, KL and top-1 agreement through the real cache, beside its bits.

    python bench/quality.py                                  # the default model, 512 tokens scored after 512
    python bench/quality.py --context 4096 --stretches 1     # after 4,096
    python bench/quality.py --offset 60000                   # another part of the text

Writes quality_<context>_<offset>.json and .png into bench/results, a row as soon as it is measured; rows of the same
text and settings that are there already are kept.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
from pathlib import Path

import jax
from rich.progress import Progress
from rich.table import Table

import kivi_jax
from kivi_jax import KiviConfig
from kivi_jax.quality import Evaluation
from kivi_jax.topics import python_topics, stretches

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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="PATH", help="default: the default model")
    parser.add_argument("--context", type=int, default=512, help="tokens before those that are scored")
    parser.add_argument("--tokens", type=int, default=512, help="tokens scored of each stretch")
    parser.add_argument("--stretches", type=int, default=3)
    parser.add_argument("--offset", type=int, default=0, help="tokens of the text to pass over")
    parser.add_argument("--chunk", type=int, default=32, help="tokens of a piece; 1 is decoding step by step")
    parser.add_argument("--caches", nargs="*", choices=list(CACHES), default=list(CACHES), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()

    text = python_topics()
    settings = {
        "model": arguments.model or "SmolLM2-135M-Instruct",
        "context": arguments.context,
        "tokens": arguments.tokens,
        "stretches": arguments.stretches,
        "offset": arguments.offset,
        "chunk": arguments.chunk,
        "text": text.about(),
    }
    path = arguments.out / f"quality_{arguments.context}_{arguments.offset}.json"
    rows = _kept(path, settings)
    params, tokenizer = kivi_jax.load(arguments.model, dtype="float32")
    tokens = stretches(
        tokenizer.encode(text.text), arguments.stretches, arguments.context + arguments.tokens, arguments.offset
    )
    evaluation = None
    with Progress() as progress:
        for name in arguments.caches:
            if rows.get(name, {}).get("config") == dataclasses.asdict(CACHES[name]):
                continue
            task = progress.add_task(name)
            evaluation = evaluation or Evaluation(params, tokens, context=arguments.context, chunk=arguments.chunk)
            quality = evaluation(
                CACHES[name], progress=lambda done, total, task=task: progress.update(task, completed=done, total=total)
            )
            rows[name] = dataclasses.asdict(quality) | {"config": dataclasses.asdict(CACHES[name])}
            _write(path, settings, rows)
    _plot(rows, settings, path)
    progress.console.print(_table(rows))


def _kept(path: Path, settings: dict) -> dict:
    if not path.exists():
        return {}
    saved = json.loads(path.read_text())
    return saved["caches"] if saved["settings"] == settings else {}


def _write(path: Path, settings: dict, rows: dict):
    path.parent.mkdir(exist_ok=True)
    saved = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": {name: importlib.metadata.version(name) for name in ("kivi-jax", "jax", "flax")},
        "settings": settings,
        "caches": rows,
    }
    path.write_text(json.dumps(saved, indent=2) + "\n")


def _table(rows: dict) -> Table:
    table = Table("cache", "bits", "perplexity", "KL", "top-1")
    exact = next(iter(rows.values()))["exact_perplexity"]
    table.add_row("unquantized", "16", f"{exact:.3f}", "0", "1")
    for name, row in rows.items():
        numbers = f"{row['perplexity']:.3f}", f"{row['kl']:.4f}", f"{row['top1']:.3f}"
        table.add_row(name, f"{row['bits_per_element']:g}", *numbers)
    return table


def _plot(rows: dict, settings: dict, path: Path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for name, row in rows.items():
        axes.plot(row["bits_per_element"], row["kl"], "o", label=name)
    axes.set(
        xlabel="bits an element",
        ylabel="KL to the unquantized model, nats a token",
        yscale="log",
        title=f"{settings['model']}, after {settings['context']} tokens",
    )
    axes.legend(fontsize="small")
    figure.savefig(path.with_suffix(".png"), dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
