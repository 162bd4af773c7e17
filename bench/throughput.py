"""Decoding of whole models: time a step, tokens a second and memory, with the cache in bf16, 4 and 2 bits.

    python bench/throughput.py [--model NAME ...] [--context N ...] [--transformers] [--minutes M]

Each figure is a decoding loop of 128 steps (so that each sequence flushes one block), compiled as `generate` compiles
it, timed after a first run of 1 step, with the device finished. Weights and the contents of the cache are random. The
largest batch is what fits beside the weights in 96% of the device's memory, in steps of 1 up to 32 and of 8 above.
"""

import argparse
import datetime
import gc
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table
from shapes import CACHES, MODELS, cache_bytes, filled_cache, random_model

from kivi_jax.generate import _loop, _State
from kivi_jax.sampling import sampler

RESULTS = Path(__file__).parent / "results" / "throughput.json"
STEPS = 128
CONTEXTS = (32768, 131072, 2048, 8192)
SHARE = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--context", nargs="*", type=int, default=list(CONTEXTS))
    parser.add_argument("--minutes", type=float, default=60.0, help="start no further measurement after this long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    deadline = time.perf_counter() + 60 * arguments.minutes
    device = jax.devices()[0]
    result = {
        "device": device.device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": jax.lib.__version__},
        "date": datetime.date.today().isoformat(),
        "rows": [],
    }
    for name in arguments.model:
        model = random_model(name)
        for context in arguments.context:
            if context > model.config.max_position_embeddings:
                continue
            for row in measure(name, model, context, device, deadline):
                result["rows"].append(row)
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(result, indent=1))
                print(row, flush=True)
        del model
        gc.collect()
    show(result)


def measure(name: str, model, context: int, device, deadline: float):
    """Rows for batch 1, for batch 16 at 32k, and for each cache's largest batch."""
    limit = device.memory_stats()["bytes_limit"] * SHARE
    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    for bits, config in CACHES.items():
        batches = {1} | ({16} if context == 32768 else set())
        batches.add(largest_batch(model, config, context, limit - weights))
        for batch in sorted(batches - {0}):
            if time.perf_counter() > deadline:
                return
            row = dict(model=name, context=context, batch=batch, cache_bits=16 if bits == "bf16" else int(bits))
            try:
                figures = step_figures(model, config, batch, context, device)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                print(row, "does not fit", flush=True)
                continue
            yield row | figures


def largest_batch(model, config, context: int, room: float) -> int:
    """How many sequences fit, with what a step holds besides (logits and activations, 2 MB a sequence)."""
    one = cache_bytes(model, config, 1, context + STEPS) + 2e6 + 8 * model.config.vocab_size
    batch = int(room / one)
    return batch if batch < 32 else batch // 8 * 8


def step_figures(model, config, batch: int, context: int, device) -> dict:
    """What the table says of one measurement."""
    graphdef, weights = nnx.split(model)
    cache = filled_cache(model, config, batch, context + STEPS, context - STEPS)
    size = cache.nbytes
    vocabulary = model.config.vocab_size
    state = _State(
        step=jnp.zeros((), jnp.int32),
        tokens=jnp.zeros((batch, 2 * STEPS), jnp.int32),
        counts=jnp.zeros(batch, jnp.int32),
        done=jnp.zeros(batch, bool),
        logits=jnp.zeros((batch, vocabulary), jnp.float32),
        cache=cache,
    )
    del cache
    keys = jax.random.split(jax.random.key(0), batch)
    greedy, eos = sampler(0.0), np.zeros(0, np.int32)
    room = lambda n: jnp.full(batch, n, jnp.int32)
    loop = _loop.lower(graphdef, weights, state, greedy, keys, eos, room(1)).compile()
    state = jax.block_until_ready(loop(weights, state, greedy, keys, eos, room(1)))
    limit = room(1 + STEPS)
    start = time.perf_counter()
    state = jax.block_until_ready(loop(weights, state, greedy, keys, eos, limit))
    seconds = (time.perf_counter() - start) / STEPS
    assert int(state.step) == 1 + STEPS
    peak = device.memory_stats()["bytes_in_use"] + loop.memory_analysis().temp_size_in_bytes
    return {
        "step_ms": round(1e3 * seconds, 3),
        "tokens_per_s": round(batch / seconds, 1),
        "peak_gb": round(peak / 1e9, 1),
        "cache_gb": round(size / 1e9, 3),
    }


def show(result: dict) -> None:
    table = Table(title=f"{result['device']}, jax {result['versions']['jax']}, {result['date']}")
    for column in ("model", "context", "cache", "batch", "step ms", "tokens/s", "peak GB"):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        table.add_row(
            row["model"],
            f"{row['context']:,}",
            f"{row['cache_bits']} bit",
            str(row["batch"]),
            f"{row['step_ms']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['peak_gb']:.1f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
