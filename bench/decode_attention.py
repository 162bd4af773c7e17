"""Decode attention on a GPU: the kernel over packed codes against bfloat16 attention of the same shapes.

    python bench/decode_attention.py [--quick] [--output bench/results]

Device times are summed over every launch of a call (CUPTI), wall times are of calls back to back; medians, in one
process. bfloat16 attention is `jax.nn.dot_product_attention`, by cuDNN and by XLA; "library xla" is the library's
portable path over the same cache. The caches hold random codes; short shapes stay in the L2 cache, for all of them
alike.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from kivi_jax import cache
from kivi_jax.config import KiviConfig, quantized_length
from kivi_jax.kernels import gpu, xla


@dataclasses.dataclass(frozen=True)
class Shape:
    """B sequences of T tokens, H KV heads with G query heads each; `shortest` makes lengths uniform from it to T."""

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    tokens: int
    bits: tuple[int, ...] = (2, 4)
    shortest: int | None = None

    def lengths(self) -> np.ndarray:
        if self.shortest is None:
            return np.full(self.batch, self.tokens, np.int32)
        return np.random.default_rng(0).integers(self.shortest, self.tokens + 1, self.batch).astype(np.int32)


TARGETS = [
    Shape(16, 8, 4, 128, 32768),
    Shape(16, 8, 4, 128, 32768, (2,), shortest=1024),
    Shape(1, 8, 4, 128, 131072),
    Shape(8, 8, 8, 128, 32768),
    Shape(8, 32, 1, 128, 16384),
    Shape(128, 3, 3, 64, 8192),
    Shape(1, 8, 4, 128, 4096),
]
SWEEP = [
    Shape(1, 8, 4, 128, 32768),
    Shape(16, 8, 4, 128, 4096),
    Shape(64, 8, 4, 128, 4096),
    Shape(64, 8, 4, 128, 16384),
    Shape(4, 8, 4, 128, 131072),
    Shape(1, 32, 1, 128, 4096),
    Shape(1, 32, 1, 128, 32768),
    Shape(64, 32, 1, 128, 4096),
]


def device_us(call, *arguments, iterations: int = 9) -> float:
    """Median over calls of the sum of all kernels' times."""
    _, runs = profiler.Cupti(finalize=False).measure(call, aggregate=False, iterations=iterations)(*arguments)
    runs = runs if isinstance(runs[0], list) else [runs]
    return statistics.median(1e3 * sum(milliseconds for _, milliseconds in run) for run in runs)


def wall_us(call, *arguments, calls: int = 20, rounds: int = 5) -> float:
    jax.block_until_ready(call(*arguments))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            result = call(*arguments)
        jax.block_until_ready(result)
        times.append(1e6 * (time.perf_counter() - start) / calls)
    return statistics.median(times)


def copy_bytes_per_us() -> float:
    """Bytes read and written by a large copy."""
    x = jnp.zeros(1 << 30, jnp.float32)
    return 2 * x.nbytes / device_us(jax.jit(lambda x: x + 1), x)


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_layer(shape: Shape, config: KiviConfig) -> cache.LayerCache:
    """A full cache of random codes; scales and zeros such that the numbers are about those of a unit normal."""
    empty = functools.partial(
        cache.init,
        config,
        num_layers=1,
        batch_size=shape.batch,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_length=shape.tokens,
    )
    layer = jax.eval_shape(empty).layers[0]
    fields = {}
    for n, field in enumerate(dataclasses.fields(layer)):
        x, key = getattr(layer, field.name), jax.random.key(n)
        if field.name == "config" or x is None:
            continue
        if field.name.endswith("codes"):
            words = jax.random.bits(key, (*x.shape[:-1], x.shape[-1] // 4), jnp.uint32)
            fields[field.name] = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(x.shape)
        elif field.name.endswith("scale"):
            fields[field.name] = ((1 + jax.random.uniform(key, x.shape)) * 2 / 2**config.key_bits).astype(x.dtype)
        elif field.name.endswith("zero"):
            fields[field.name] = (-1.5 - jax.random.uniform(key, x.shape)).astype(x.dtype)
        else:
            fields[field.name] = jax.random.normal(key, x.shape, x.dtype)
    return dataclasses.replace(layer, **fields)


def baselines(shape: Shape) -> dict[str, float]:
    """Times of bfloat16 attention to T tokens of every sequence."""
    keys = jax.random.split(jax.random.key(0), 3)
    sides = [(shape.batch, shape.tokens, shape.kv_heads, shape.head_dim)] * 2
    shapes = [(shape.batch, 1, shape.kv_heads * shape.group, shape.head_dim), *sides]
    arguments = [jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, shapes, strict=True)]
    times = {}
    for name in ("cudnn", "xla"):
        call = jax.jit(functools.partial(jax.nn.dot_product_attention, implementation=name))
        times[f"{name}_us"] = device_us(call, *arguments)
        times[f"{name}_wall_us"] = wall_us(call, *arguments)
    return times


def measure(shape: Shape, bits: int, reference: dict[str, float], copy: float) -> dict:
    config = KiviConfig(key_bits=bits, value_bits=bits)
    layer, length = random_layer(shape, config), jnp.asarray(shape.lengths())
    quantized = quantized_length(length, config)
    q = jax.random.normal(
        jax.random.key(9), (shape.batch, shape.kv_heads * shape.group, 1, shape.head_dim), jnp.bfloat16
    )
    arguments = (q, layer, length, quantized)
    us, wall = device_us(jax.jit(gpu.attend), *arguments), wall_us(jax.jit(gpu.attend), *arguments)
    exact = float(np.sum(np.asarray(length - quantized))) * 16
    coded = float(np.sum(np.asarray(quantized))) * config.bits_per_element
    moved = 2 * shape.kv_heads * shape.head_dim * (exact + coded) / 8
    return {
        "batch": shape.batch,
        "kv_heads": shape.kv_heads,
        "group": shape.group,
        "head_dim": shape.head_dim,
        "tokens": shape.tokens,
        "mean_tokens": float(shape.lengths().mean()),
        "bits": bits,
        "us": us,
        "wall_us": wall,
        **reference,
        "library_xla_us": device_us(jax.jit(xla.attend), *arguments, iterations=2),
        "speedup": reference["cudnn_us"] / us,
        "tb_per_s": moved / us / 1e6,
        "of_copy": moved / us / copy,
    }


COLUMNS = {
    "batch": "B",
    "kv_heads": "H",
    "group": "G",
    "head_dim": "D",
    "tokens": "T",
    "mean_tokens": "mean T",
    "bits": "bits",
    "us": "kernel",
    "cudnn_us": "cuDNN",
    "xla_us": "XLA",
    "library_xla_us": "library xla",
    "speedup": "x cuDNN",
    "tb_per_s": "TB/s",
    "of_copy": "of copy",
    "wall_us": "kernel wall",
    "cudnn_wall_us": "cuDNN wall",
}


def table(rows: list[dict], heading: str) -> str:
    """A Markdown table; times in microseconds."""
    form = lambda x: f"{x:.0f}" if isinstance(x, int) or x >= 1000 else f"{x:.3g}" if x < 10 else f"{x:.1f}"
    lines = [COLUMNS.values(), ["---"] * len(COLUMNS), *([form(row[name]) for name in COLUMNS] for row in rows)]
    return "\n".join([heading, "", *("| " + " | ".join(line) + " |" for line in lines), ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the shapes that have targets")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results")
    arguments = parser.parse_args()
    copy = copy_bytes_per_us()
    device, date = jax.devices()[0].device_kind, datetime.date.today().isoformat()
    versions = {"jax": jax.__version__, "jaxlib": jax.lib.__version__, "python": platform.python_version()}
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    heading = f"{device}, {date}, {named}; copy {copy / 1e6:.2f} TB/s. Times in us: on the device, and wall last."
    rows, reference = [], {}
    for shape in TARGETS + ([] if arguments.quick else SWEEP):
        base = dataclasses.replace(shape, shortest=None, bits=())
        if base not in reference:
            reference[base] = baselines(base)
        rows += [measure(shape, bits, reference[base], copy) for bits in shape.bits]
        print(table(rows[-len(shape.bits) :], "").splitlines()[-len(shape.bits) :], flush=True)
        arguments.output.mkdir(parents=True, exist_ok=True)
        result = {"device": device, "versions": versions, "date": date, "copy_tb_per_s": copy / 1e6, "rows": rows}
        (arguments.output / "decode_attention.json").write_text(json.dumps(result, indent=1) + "\n")
        (arguments.output / "decode_attention.md").write_text(table(rows, heading))
    print(table(rows, heading))


if __name__ == "__main__":
    main()
