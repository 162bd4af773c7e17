"""What the GPU kernels are for an H200, by compiling them: registers, spills, shared memory, launches, copies."""

import gpu_compile
import jax
import jax.numpy as jnp
import pytest
from test_gpu_attend import CASES, Case

from kivi_jax import cache as kv
from kivi_jax.config import KiviConfig
from kivi_jax.kernels import gpu
from kivi_jax.kernels.gpu.launch import SHARED_BYTES, choose_division
from kivi_jax.kernels.gpu.maps import Geometry

pytestmark = [
    pytest.mark.h200_compile,
    pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not())),
]
SPILLS = {
    "d256",
    "groups_128_d256",
    "4bit_d256",
}  # 64 accumulators and 32 query operands: a few spills, outside the loop
SHAPES = {name: case for name, case in CASES.items() if len(case.lengths) < 10}


def arguments_of(case: Case, batch: int, tokens: int):
    """Shapes of `attend`'s arguments, and its options."""
    layer = jax.eval_shape(
        lambda: kv.init(
            case.config,
            num_layers=1,
            batch_size=batch,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            max_length=tokens,
            dtype=case.dtype,
        )
    ).layers[0]
    rows = jax.ShapeDtypeStruct((batch,), jnp.int32)
    q = jax.ShapeDtypeStruct((batch, case.kv_heads * case.group, case.queries, case.head_dim), case.dtype)
    piece = jax.ShapeDtypeStruct((batch, case.kv_heads, case.queries, case.head_dim), case.dtype)
    return (q, layer, rows, rows), dict(new_key=piece, new_value=piece, counts=rows) if case.piece else {}


@pytest.mark.parametrize("name", SHAPES)
def test_attend_compiles(name, tmp_path, monkeypatch):
    """Two launches and no other work; the registers that two warps a scheduler may have, and (nearly) no spills."""
    case = SHAPES[name]
    arguments, beside = arguments_of(case, 4, 2048)
    attend = lambda arguments, beside: gpu.attend(
        *arguments, sliding_window=case.sliding_window, scale=case.scale, **beside
    )
    compiled, kernels = gpu_compile.compile_for_h200(attend, (arguments, beside), tmp_path, monkeypatch)
    text = compiled.as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 2 and " fusion(" not in text and " copy(" not in text
    decode, merge = kernels
    assert decode.registers <= 255 and merge.registers <= 128 and merge.spilled == 0
    assert decode.spilled <= (600 if name in SPILLS else 64)


@pytest.mark.parametrize("bits", [2, 4])
def test_main_shape_has_no_spills(bits, tmp_path, monkeypatch):
    case = Case(KiviConfig(key_bits=bits, value_bits=bits), kv_heads=8)
    arguments, _ = arguments_of(case, 16, 32768)
    _, (decode, _) = gpu_compile.compile_for_h200(gpu.attend, arguments, tmp_path, monkeypatch)
    assert decode.spilled == 0


@pytest.mark.parametrize("config", [KiviConfig(), KiviConfig(key_norm=True, key_clip=0.9)], ids=["plain", "norm"])
def test_flush_copies_nothing(config, tmp_path, monkeypatch):
    """A donated layer is flushed in place: every byte of it is aliased, and there is no other work."""
    (_, layer, rows, _), _ = arguments_of(Case(config, kv_heads=8), 16, 4096)
    compiled, _ = gpu_compile.compile_for_h200(
        gpu.flush, (layer, rows, rows), tmp_path, monkeypatch, donate_argnums=(0,)
    )
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layer))
    assert memory.temp_size_in_bytes < 4096 and " copy(" not in text and " fusion(" not in text


def test_flush_holds_the_blocks_of_one_layer_at_a_time(tmp_path, monkeypatch):
    """A 16-bit cache, which XLA flushes: the temporaries do not grow with the layers."""
    config = KiviConfig(key_bits=16, value_bits=16, residual_length=0)
    held = []
    for layers in (1, 3):
        like = dict(batch_size=4, num_kv_heads=8, head_dim=128, max_length=1024, dtype=jnp.bfloat16)
        cache = jax.eval_shape(lambda layers=layers, like=like: kv.init(config, num_layers=layers, **like))
        compiled, _ = gpu_compile.compile_for_h200(kv.flush, (cache,), tmp_path, monkeypatch, donate_argnums=0)
        held.append(compiled.memory_analysis().temp_size_in_bytes)
    assert held[1] < 1.1 * held[0]


@pytest.mark.parametrize("value_bits", [2, 4, 8])
@pytest.mark.parametrize("key_bits", [2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_steps_fit_or_are_refused(head_dim, key_bits, value_bits):
    geometry = Geometry(head_dim, key_bits, value_bits, 32, 32, has_norm=True)
    if head_dim == 256 and {key_bits, value_bits} == {4, 8}:
        with pytest.raises(NotImplementedError, match="shared memory"):
            choose_division(geometry, 8, 1, 132)
        return
    division = choose_division(geometry, 8, 1, 132)
    assert 4 * division.warpgroups * geometry.step_bytes <= SHARED_BYTES
