"""What the decode kernel costs on TPUs, from its static schedules: no TPU is needed, and none was used.

Prints bundles (VLIW instructions, close to cycles where nothing loops or stalls) for each 512 tokens of a KV head, keys
and values, for the kernel over the quantized rows and for the two products of plain attention over bfloat16 keys and
values; and the roofline that follows. Waiting for memory and for results is not in a static schedule: the estimates are
bounds.

    pip install libtpu
    python bench/tpu_schedule.py --write
"""

import argparse
import datetime
import functools
import json
from pathlib import Path

from tpu_ahead_of_time import TOPOLOGIES, compile_for  # isort: skip  (before jax: it sets the compiler's options)

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kivi_jax import cache as kv
from kivi_jax.config import KiviConfig
from kivi_jax.kernels import tpu
from kivi_jax.kernels.tpu import plan

RESULTS = Path(__file__).parent / "results" / "tpu_schedule.json"
HEADS, CHANNELS, CAPACITY, BATCH = 8, 128, 16384, 4
TOKENS = 512

# Assumed: clock in GHz, memory in GB/s, of one core.
CHIPS = {"v5e": (1.5, 819), "v5p": (1.75, 2765 / 2), "v6e": (1.75, 1640), "7x": (1.9, 7380 / 2)}

CASES = {
    "2 bits, 8 query heads": (KiviConfig(), 8),
    "2 bits, 4 query heads": (KiviConfig(), 4),
    "2 bits, groups of 128, 8 query heads": (KiviConfig(key_group_size=128, value_group_size=128), 8),
    "4 bits, 8 query heads": (KiviConfig(key_bits=4, value_bits=4), 8),
}


def quantized(generation: str, config: KiviConfig, group: int) -> dict[str, float]:
    """Bundles and unit slots for each 512 tokens of the kernel."""
    make = functools.partial(
        kv.init, config, num_layers=1, batch_size=BATCH, num_kv_heads=HEADS, head_dim=CHANNELS, max_length=CAPACITY
    )
    cache = jax.eval_shape(make)
    q = jax.ShapeDtypeStruct((BATCH, HEADS * group, 1, CHANNELS), jnp.bfloat16)
    _, schedules = compile_for(generation, tpu.attend, q, cache.layers[0], cache.length, cache.quantized)
    tokens = plan.choose(plan.SUBLANES, 1, cache.layers[0], sliding=False, interpret=False).tokens
    return _per_tokens(schedules["kivi_decode"], tokens * HEADS)


def plain(generation: str) -> dict[str, float]:
    """The same of the two products with bfloat16 keys and values, and nothing else."""
    tokens = 4096

    def products(q, key, value, out):
        dot = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)
        scores = dot(q[...], key[...], (((1,), (1,)), ((), ())))
        out[...] = dot(scores.astype(jnp.bfloat16), value[...], (((1,), (0,)), ((), ())))

    shape = lambda rows, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((rows, CHANNELS), dtype)
    call = pl.pallas_call(products, out_shape=shape(8, jnp.float32), name="plain_products")
    _, schedules = compile_for(generation, call, shape(8), shape(tokens), shape(tokens))
    return _per_tokens(schedules["plain_products"], tokens)


def _per_tokens(schedule, tokens):
    per = lambda count: round(count * TOKENS / tokens, 1)
    return {"bundles": per(schedule.bundles), **{unit: per(n) for unit, n in schedule.units.items()}}


def roofline(generation: str, bundles: float, bits: float) -> dict[str, float]:
    """Nanoseconds for each 512 tokens of a KV head, and how much longer plain attention's memory takes alone."""
    clock, bandwidth = CHIPS[generation]
    nbytes = lambda bits: 2 * TOKENS * CHANNELS * bits / 8
    compute, memory, memory16 = bundles / clock, nbytes(bits) / bandwidth, nbytes(16) / bandwidth
    slower = max(compute, memory)
    return {
        "compute_ns": round(compute, 1),
        "memory_ns": round(memory, 1),
        "memory_bf16_ns": round(memory16, 1),
        "times_bf16": round(memory16 / slower, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--generations", nargs="+", default=list(TOPOLOGIES), choices=TOPOLOGIES)
    parser.add_argument("--write", action="store_true", help=f"also write {RESULTS.name} beside the other results")
    arguments = parser.parse_args()
    rows = []
    print("Static estimates: nothing here was measured on a TPU.")
    for generation in arguments.generations:
        for name, (config, group) in CASES.items():
            schedule = quantized(generation, config, group)
            estimate = roofline(generation, schedule["bundles"], config.bits_per_element)
            rows.append({"generation": generation, "case": name, "schedule": schedule, "estimate": estimate})
        rows.append({"generation": generation, "case": "bfloat16, the products alone", "schedule": plain(generation)})
        for row in rows:
            if row["generation"] == generation:
                units = ", ".join(f"{unit} {n}" for unit, n in row["schedule"].items() if unit != "bundles")
                print(
                    f"{generation:4} {row['case']:38} {row['schedule']['bundles']:6} bundles  {row.get('estimate', '')}"
                )
                print(f"     slots: {units}")
    if arguments.write:
        RESULTS.parent.mkdir(exist_ok=True)
        result = {
            "date": datetime.date.today().isoformat(),
            "jax": jax.__version__,
            "note": "static schedules per 512 tokens of a KV head; not measured on a device",
            "assumed_clock_ghz_and_memory_gb_per_s": CHIPS,
            "rows": rows,
        }
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
