"""How a prompt taken in by chunks differs from one taken in at once: KL and top-1 agreement of every next-token
distribution after the first 512 tokens, by the length of the chunks.

    python bench/chunked_prefill.py

At once, a prompt attends exactly to all of itself. In chunks, each attends exactly to itself and to the chunks before
it through the cache: the shorter they are, the nearer this is to decoding. Writes chunked_prefill.json into
bench/results.
"""

import argparse
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

CACHES = {
    "unquantized": KiviConfig(key_bits=16, value_bits=16),
    "2 bit, window of 128": KiviConfig(),
    "accurate()": KiviConfig.accurate(),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="PATH", help="default: the default model")
    parser.add_argument("--chunks", type=int, nargs="*", default=[16, 128, 256, 512])
    parser.add_argument("--stretches", type=int, default=1, help="of 1,024 tokens each")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    text = python_topics()
    params, tokenizer = kivi_jax.load(arguments.model, dtype="float32")
    tokens = stretches(tokenizer.encode(text.text), arguments.stretches, 1024)
    rows = []
    with Progress() as progress:
        task = progress.add_task("chunks", total=len(arguments.chunks) * len(CACHES))
        for chunk in arguments.chunks:
            evaluation = Evaluation(params, tokens, context=512, chunk=chunk)
            for name, config in CACHES.items():
                quality = evaluation(config)
                rows.append({"chunk": chunk, "cache": name, "kl": quality.kl, "top1": quality.top1})
                progress.advance(task)
    table = Table("chunk", "cache", "KL", "top-1")
    for row in rows:
        table.add_row(str(row["chunk"]), row["cache"], f"{row['kl']:.2e}", f"{row['top1']:.3f}")
    progress.console.print(table)
    arguments.out.mkdir(exist_ok=True)
    saved = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": {name: importlib.metadata.version(name) for name in ("kivi-jax", "jax", "flax")},
        "model": arguments.model or "SmolLM2-135M-Instruct",
        "stretches": arguments.stretches,
        "text": text.about(),
        "rows": rows,
    }
    (arguments.out / "chunked_prefill.json").write_text(json.dumps(saved, indent=2) + "\n")


if __name__ == "__main__":
    main()
