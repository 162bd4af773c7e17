"""Where the time of a decoding step goes, kernel by kernel.

    python bench/step_profile.py [CASE ...]

A case is MODEL:CONTEXT:BATCH:CACHE, the last one of bf16, 4 and 2. Each runs the compiled loop of `generate` under
JAX's profiler, on random weights and a cache of random contents. The table gives device time of a step, and what share
of it is neither attention nor a product with weights; no block is flushed in these steps. Writes step_profile.txt into
bench/results.
"""

import argparse
import collections
import datetime
import re
import tempfile
from pathlib import Path

import jax
from flax import nnx
from shapes import CACHES, MODELS, random_model
from throughput import Case, compile_loop, rest, start_state

RESULTS = Path(__file__).parent / "results" / "step_profile.txt"
STEPS = 20
DEFAULT = (
    "Llama-3.1-8B:32768:16:2",
    "Llama-3.1-8B:32768:16:bf16",
    "Llama-3.1-8B:2048:1:2",
    "Llama-3.1-8B:2048:1:bf16",
    "Llama-2-7B:384:304:bf16",
)
ATTENTION, PRODUCTS = re.compile("kivi_(decode|merge)|cudnn|sdpa"), re.compile("gemm|cutlass|nvjet|cublas")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=to_case, metavar="CASE", default=[to_case(x) for x in DEFAULT])
    arguments = parser.parse_args()
    device = jax.devices()[0]
    about = [device.device_kind, f"jax {jax.__version__}", datetime.date.today().isoformat()]
    lines = [f"# A decoding step by kernel, mean of {STEPS}: {', '.join(about)}"]
    models = {}
    for case in arguments.cases:
        if case.model not in models:
            models = {case.model: random_model(case.model)}  # one at a time
        lines += profiled(models[case.model], case)
        RESULTS.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def to_case(text: str) -> Case:
    model, context, batch, cache = text.split(":")
    if model not in MODELS or cache not in CACHES:
        raise ValueError(text)
    return Case(model, int(context), int(batch), cache)


def profiled(model, case: Case) -> list[str]:
    run, weights = compile_loop(model, case), nnx.state(model)
    state = run(weights, start_state(model, case), *rest(case, 1))
    more = rest(case, 1 + STEPS)
    jax.block_until_ready((state, more))
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready(run(weights, state, *more))
        (trace,) = Path(directory).rglob("*.xplane.pb")
        kernels = by_kernel(jax.profiler.ProfileData.from_file(str(trace)))
    return table(case, kernels)


def by_kernel(profile) -> dict[str, tuple[float, int]]:
    """Nanoseconds and launches of each kernel, by its name without its number."""
    found = collections.defaultdict(lambda: (0.0, 0))
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    name = re.sub(r"(_\d+)+$", "", event.name)[:60]
                    time, count = found[name]
                    found[name] = time + event.duration_ns, count + 1
    if not found:
        raise RuntimeError("the profile has no kernel of a GPU.")
    return dict(found)


def table(case: Case, kernels: dict[str, tuple[float, int]]) -> list[str]:
    total = sum(time for time, _ in kernels.values())
    share = lambda of: sum(time for name, (time, _) in kernels.items() if of.search(name)) / total
    attention, products = share(ATTENTION), share(PRODUCTS)
    launches = sum(count for _, count in kernels.values()) / STEPS
    lines = [
        "",
        f"== {case.model}, {case.context:,} tokens, batch {case.batch}, cache {case.cache}: "
        f"{total / STEPS / 1e6:.3f} ms a step, {launches:.0f} launches",
        f"   attention {attention:.1%}, products with weights {products:.1%}, the rest {1 - attention - products:.1%}",
    ]
    for name, (time, count) in sorted(kernels.items(), key=lambda item: -item[1][0]):
        if time > 1e-4 * total:
            lines.append(f"   {time / STEPS / 1e6:9.3f} ms {count / STEPS:7.1f}x {name}")
    return lines


if __name__ == "__main__":
    main()
