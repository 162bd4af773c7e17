"""The synthetic workload of the KIVI paper (arXiv 2402.02750, section 4.3): prompts of 161 tokens, 338 new ones.

    python bench/paper_workload.py

Llama-2-7B shapes, the batch raised until memory ends: throughput with the cache in bf16 and in 2 bits with a residual
of 32 and of 128 tokens. Prefill is in the time, compiling is not; weights and prompts are random.
"""

import gc
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from record import Record
from shapes import cache_bytes, random_model

import kivi_jax
from kivi_jax import batches
from kivi_jax.run import Run
from kivi_jax.sampling import sampler

RESULTS = Path(__file__).parent / "results" / "paper_workload.json"
PROMPT, NEW = 161, 338
CACHES = {
    "bf16": kivi_jax.KiviConfig(key_bits=16, value_bits=16, residual_length=0),
    "2 bit, R 128": kivi_jax.KiviConfig(),
    "2 bit, R 32": kivi_jax.KiviConfig(residual_length=32),
}


def main() -> None:
    model = random_model("Llama-2-7B")
    device = jax.devices()[0]
    rng = np.random.default_rng(0)
    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    versions = {"jax": jax.__version__, "jaxlib": jax.lib.__version__}
    record = Record(RESULTS, device.device_kind, versions, rows=("cache",))
    for name, config in CACHES.items():
        record.keep({"cache": name} | measure(model, config, rng, device, weights))
        gc.collect()


def measure(model, config, rng, device, weights: int) -> dict:
    one = cache_bytes(model, config, 1, PROMPT + NEW)
    request = dict(max_new_tokens=NEW, max_length=PROMPT + NEW, cache=config, eos_token_id=())
    fixed = batches.prefill_bytes(Run(model, [[0] * PROMPT], tokenizer=None, **request), one)
    room = device.memory_stats()["bytes_limit"] * 0.93 - weights - fixed
    batch = int(room / (one + 12 * model.config.vocab_size)) // 16 * 16
    prompts = rng.integers(0, model.config.vocab_size, (batch, PROMPT))
    settings = request | dict(batch_size=batch)
    Run(model, prompts, tokenizer=None, sampler=sampler(), **request).advance(1)  # compiles what `generate` will run
    gc.collect()
    start = time.perf_counter()
    jax.block_until_ready(kivi_jax.generate(model, prompts, **settings).tokens)
    seconds = time.perf_counter() - start
    return {
        "batch": batch,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(batch * NEW / seconds, 1),
        "peak_gb": round(device.memory_stats()["peak_bytes_in_use"] / 1e9, 1),
    }


if __name__ == "__main__":
    main()
