"""Decoding of whole models: time a step, tokens a second and memory, with the cache in bf16, 4 and 2 bits.

    python bench/throughput.py [--model NAME ...] [--context N ...] [--cache NAME ...] [--prompt N]
                               [--devices N] [--again]

Each figure is a decoding loop of 128 steps (so that each sequence flushes one block), compiled as `generate` compiles
it, timed after a first run of 1 step, with the device finished. Weights and the contents of the cache are random. The
largest batch is what fits beside the weights in 95% of the device's memory, in steps of 1 up to 32 and of 8 above.
Before that a prompt of `--prompt` tokens is taken into a cache of 2 bits (0: none), for its time and memory. Rows that
the file has already, of the same device and versions, are kept and measured again only with `--again`. With `--devices`
heads and weights are divided over several; `peak_gb` is then of one of them, and the file is of that many.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import gc
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from record import Record
from rich.console import Console
from rich.table import Table
from shapes import CACHES, MODELS, cache_bytes, filled_cache, random_model

import kivi_jax
from kivi_jax import sharding
from kivi_jax.run import State, laid_out, loop
from kivi_jax.sampling import sampler

RESULTS = Path(__file__).parent / "results"
STEPS = 128
CONTEXTS = (32768, 131072, 2048, 8192)
SHARE = 0.95


@dataclasses.dataclass(frozen=True)
class Case:
    """What a row is measured of; `cache` names one of `CACHES`."""

    model: str
    context: int
    batch: int
    cache: str

    @property
    def bits(self) -> int:
        return 16 if self.cache == "bf16" else int(self.cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=list(MODELS), default=["Llama-3.1-8B", "Llama-2-7B"])
    parser.add_argument("--context", nargs="*", type=int, default=list(CONTEXTS))
    parser.add_argument("--cache", nargs="*", choices=list(CACHES), default=list(CACHES))
    parser.add_argument("--prompt", type=int, default=131072, help="tokens, of the first model")
    parser.add_argument("--again", action="store_true", help="measure what the file has already")
    parser.add_argument("--devices", type=int, default=1, help="to divide the model over")
    parser.add_argument("--out", type=Path, help="default: throughput.json, or throughput_2_devices.json and so on")
    arguments = parser.parse_args()
    device, mesh, file = jax.devices()[0], None, "throughput.json"
    if not 1 <= arguments.devices <= jax.device_count():
        parser.error(f"--devices must be from 1 to the {jax.device_count()} there are; got {arguments.devices}")
    if arguments.devices > 1:
        devices = jax.devices()[: arguments.devices]
        mesh = sharding.checked_mesh(jax.make_mesh((arguments.devices,), (sharding.MODEL,), devices=devices))
        file = f"throughput_{arguments.devices}_devices.json"
    versions = {"jax": jax.__version__, "jaxlib": jax.lib.__version__}
    identity = dict(rows=("model", "context", "batch", "cache_bits"), prompts=("model", "tokens"))
    record = Record(arguments.out or RESULTS / file, device.device_kind, versions, **identity)
    known = {kind: set() if arguments.again else record.known(kind) for kind in identity}
    for name in arguments.model:
        model = random_model(name, mesh)
        if name == arguments.model[0] and arguments.prompt and (name, arguments.prompt) not in known["prompts"]:
            # First of all, as the device tells the peak of all that went before.
            record.keep({"model": name} | take_in(model, "2", arguments.prompt, device), "prompts")
        for row in measure(name, model, arguments, device, known["rows"]):
            record.keep(row)
        del model
        gc.collect()
    show(record.content)


def measure(name: str, model, arguments, device, known: set[tuple]):
    """Rows for batch 1, for batch 16 at 32k, and for each cache's largest batch, but for those that are known."""
    devices = 1 if model.mesh is None else model.mesh.size
    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    room = devices * device.memory_stats()["bytes_limit"] * SHARE - weights
    cases = []
    for context in arguments.context:
        for cache in arguments.cache:
            batches = {1, largest_batch(model, CACHES[cache], context, room)} | ({16} if context == 32768 else set())
            fits = lambda batch, cache=cache, context=context: held(model, CACHES[cache], batch, context) <= room
            cases += [Case(name, context, batch, cache) for batch in sorted(batches - {0}) if fits(batch)]
    cases = [case for case in cases if (name, case.context, case.batch, case.bits) not in known]
    # A compilation takes seconds, most of them on one core, and the device is needed for none of the waiting.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(functools.partial(compile_loop, model), cases))
    for case, run in zip(cases, compiled, strict=True):
        yield {
            "model": case.model,
            "context": case.context,
            "batch": case.batch,
            "cache_bits": case.bits,
        } | step_figures(model, case, run, device)


def held(model, config, batch: int, context: int) -> float:
    """Bytes of a batch: its cache, and what a step holds besides (logits and activations, 2 MB a sequence)."""
    return cache_bytes(model, config, batch, context + STEPS) + batch * (2e6 + 8 * model.config.vocab_size)


def largest_batch(model, config, context: int, room: float) -> int:
    batch = int(room / held(model, config, 1, context))
    return batch if batch < 32 else batch // 8 * 8


def start_state(model, case: Case) -> State:
    """The loop's state before its first step, on a cache with 128 free places."""
    batch, room, held = case.batch, case.context + STEPS, case.context - STEPS
    cache = filled_cache(model, CACHES[case.cache], batch, room, held)
    state = State(
        step=jnp.zeros((), jnp.int32),
        tokens=jnp.zeros((batch, 2 * STEPS), jnp.int32),
        counts=jnp.zeros(batch, jnp.int32),
        done=jnp.zeros(batch, bool),
        logits=jnp.zeros((batch, model.config.vocab_size), jnp.float32),
        cache=cache,
    )
    return laid_out(state, model.mesh)


def rest(case: Case, steps: int) -> tuple:
    """The loop's arguments after the state: greedy, no end of sequence, `steps` tokens."""
    keys = jax.random.split(jax.random.key(0), case.batch)
    return sampler(0.0), keys, np.zeros(0, np.int32), jnp.full(case.batch, steps, jnp.int32)


def compile_loop(model, case: Case):
    state = jax.eval_shape(lambda: start_state(model, case))
    if model.mesh is not None:
        at = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        logits = at(state.logits, sharding.logits_sharding(model.config.vocab_size, model.mesh))
        state = jax.tree.map(lambda x: at(x, sharding.by_rank(x, model.mesh)), state)
        state = dataclasses.replace(state, logits=logits)
    with sharding.on(model.mesh):
        return loop.lower(*nnx.split(model), state, *rest(case, 1)).compile()


def step_figures(model, case: Case, run, device) -> dict:
    """What the table says of one measurement."""
    weights = nnx.state(model)
    state = start_state(model, case)
    size = state.cache.nbytes
    with sharding.on(model.mesh):
        more = rest(case, 1 + STEPS)
        state = jax.block_until_ready((run(weights, state, *rest(case, 1)), more))[0]
    start = time.perf_counter()
    state = jax.block_until_ready(run(weights, state, *more))
    seconds = (time.perf_counter() - start) / STEPS
    assert int(state.step) == 1 + STEPS
    peak = device.memory_stats()["bytes_in_use"] + run.memory_analysis().temp_size_in_bytes
    return {
        "step_ms": round(1e3 * seconds, 3),
        "tokens_per_s": round(case.batch / seconds, 1),
        "peak_gb": round(peak / 1e9, 1),
        "cache_gb": round(size / 1e9, 3),
    }


def take_in(model, cache: str, tokens: int, device) -> dict:
    """Seconds to the first token after a prompt, compiling left out, and what the device held of it."""
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, tokens))
    call = lambda: kivi_jax.generate(model, prompt, max_new_tokens=1, cache=CACHES[cache], eos_token_id=())
    jax.block_until_ready(call().tokens)
    start = time.perf_counter()
    out = jax.block_until_ready(call())
    seconds = time.perf_counter() - start
    return {
        "tokens": tokens,
        "cache_bits": Case("", tokens, 1, cache).bits,
        "seconds": round(seconds, 2),
        "cache_gb": round(out.cache.nbytes / 1e9, 3),
        "peak_gb": round(device.memory_stats()["peak_bytes_in_use"] / 1e9, 1),
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
