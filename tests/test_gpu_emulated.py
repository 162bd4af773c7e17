"""The GPU kernels' code on the CPU, lane by lane (`gpu_emulator`), by the same error rule as on the device."""

import gpu_emulator
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpu_attend import CASES, FLOOR, RULE, Case, compare, make

from kivi_jax.config import KiviConfig
from kivi_jax.kernels.gpu import decode, launch, merge, stage, work
from kivi_jax.kernels.gpu.launch import Division

SMALL = {  # what the emulator gets through in a few seconds each
    name: CASES[name]
    for name in (
        "sinks",
        "no_residual",
        "empty_sequence",
        "g3",
        "d256",
        "groups_64",
        "groups_128_d256",
        "4bit",
        "4bit_groups_128_d64",
        "8bit_groups_64",
        "4bit_keys_2bit_values",
        "8bit_keys_2bit_values",
        "sliding_long",
        "piece_counts",
        "piece_sliding",
        "written_sliding",
        "float16_4bit_piece",
        "norm",
        "norm_4bit_sliding",
        "rewind",
    )
}


@pytest.fixture
def emulated_attend(monkeypatch):
    for module in (decode, merge, stage, work):
        monkeypatch.setattr(module, "gpu", gpu_emulator)

    def attend(q, layer, length, quantized, *, division, **options):
        inputs, problem = launch.describe(q, layer, length, quantized, division=division, **options)
        arrays = {name: np.asarray(x) for name, x in inputs.items()}
        empty = {name: np.full(x.shape, -1 if x.dtype == jnp.int32 else np.nan, x.dtype) for name, x in
                 launch.partial_shapes(problem).items()}  # fmt: skip
        shared = problem.warps * problem.geometry.step_bytes
        blocks = problem.blocks * problem.column_tiles
        emit = lambda pointers, shared: decode.work(work.Refs(**pointers), shared, problem)
        parts = gpu_emulator.launch(emit, arrays | empty, shared, blocks, problem.warps)
        parts["result"] = np.full((problem.heads * problem.columns, q.shape[-1]), np.nan, problem.dtype)

        def emit(pointers, shared):
            result = pointers.pop("result")
            merge.merge_head(work.Refs(**pointers), result, shared, problem)

        warps, _ = merge.choose_division(problem)
        scratch = warps * merge.scratch_floats(q.shape[-1]) * 4
        return gpu_emulator.launch(emit, parts, scratch, len(parts["result"]), warps)["result"].reshape(q.shape)

    return attend


@pytest.mark.parametrize("name", SMALL)
def test_error_rule(name, emulated_attend, rng):
    case = SMALL[name]
    q, cache, arguments = make(case, rng, 1.0)
    got = emulated_attend(q, cache.layers[0], cache.length, cache.quantized, division=Division(1, 3), **arguments)
    rms, largest = compare(got, case, q, cache, arguments)
    assert rms <= RULE and largest <= RULE


@pytest.mark.parametrize("division", [Division(1, 1), Division(2, 2), Division(1, 9)])
def test_any_division(division, emulated_attend, rng):
    """Whatever the shares, no unit is lost or taken twice, and no copy is read too early or lands on what is read."""
    case = Case(KiviConfig(sink_length=2), lengths=(1500, 0, 1, 300), head_dim=64, group=1)
    q, cache, arguments = make(case, rng, 1.0)
    got = emulated_attend(q, cache.layers[0], cache.length, cache.quantized, division=division, **arguments)
    rms, largest = compare(got, case, q, cache, arguments)
    assert rms <= RULE and largest <= RULE and FLOOR < 1
