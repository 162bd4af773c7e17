"""The TPU kernels compiled for four generations, without a TPU: schedule, memory, copies."""

import importlib.util
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu, with which to compile for TPUs, is not installed", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from sharded_steps import assert_runs_the_kernels_in_place
from tpu_ahead_of_time import TOPOLOGIES, compile_for

from kivi_jax import attention, sharding
from kivi_jax import cache as kv
from kivi_jax.config import KiviConfig
from kivi_jax.decoding import decode_step
from kivi_jax.kernels import tpu
from kivi_jax.kernels.tpu import plan
from kivi_jax.models import Llama, LlamaConfig

pytestmark = pytest.mark.tpu_compile

CAPACITY = 24576  # a multiple of the steps, and no field of rows then has the shape of the window
HEADS = 8

# Bundles for each 512 tokens of a KV head by query heads of it, everything in the kernel counted: head_dim 128, 2 bits,
# groups of 32.
BUDGET = {8: 105, 4: 90}

# config, query heads of each KV head, queries, head_dim, sliding window
SHAPES = {
    "4 bits": (KiviConfig(key_bits=4, value_bits=4, key_group_size=64, value_group_size=64), 1, 1, 128, None),
    "16 query heads": (KiviConfig(value_bits=4, sink_length=4), 16, 1, 128, None),
    "8 queries, one value group": (KiviConfig(key_group_size=128, value_group_size=128), 2, 8, 128, 4096),
    "norms": (KiviConfig(key_norm=True), 4, 1, 128, None),
    "head_dim 256": (KiviConfig(), 8, 1, 256, None),
    "head_dim 256, 8 bits": (KiviConfig(key_bits=8, value_bits=8), 8, 1, 256, None),
    "head_dim 64": (KiviConfig(), 3, 1, 64, None),
    "head_dim 64, one value group": (KiviConfig(key_group_size=128, value_group_size=64), 8, 1, 64, None),
}


def case(config, group, num_queries, channels, capacity=CAPACITY, batch=4, heads=HEADS):
    cache = jax.eval_shape(
        lambda: kv.init(
            config,
            num_layers=1,
            batch_size=batch,
            num_kv_heads=heads,
            head_dim=channels,
            max_length=capacity,
        )
    )
    q = jax.ShapeDtypeStruct((batch, heads * group, num_queries, channels), jnp.bfloat16)
    return q, cache.layers[0], cache.length, cache.quantized


def copies_of_rows(compiled, layer) -> list[str]:
    """The instructions of the HLO that make a whole field of rows anew, in whatever order of its axes."""
    axes = lambda shape: sorted(n for n in map(int, shape) if n > 1)
    fields = [layer.key_codes, layer.key_scale, layer.value_codes, layer.value_scale]
    fields = [axes(x.shape) for x in fields]
    made = re.findall(r"= \(?(?:u8|bf16)\[([\d,]+)\][^=]* (copy|copy-start|transpose|fusion)\(", compiled.as_text())
    return [f"{op} [{shape}]" for shape, op in made if axes(shape.split(",")) in fields]


@pytest.mark.parametrize("group", BUDGET)
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_bundles_are_within_budget(generation, group):
    q, *state = case(KiviConfig(), group, 1, 128)
    compiled, schedules = compile_for(generation, tpu.attend, q, *state)
    tokens = plan.choose(plan.SUBLANES, 1, state[0], sliding=False, interpret=False).tokens
    assert schedules["kivi_decode"].bundles * 512 / (tokens * HEADS) <= BUDGET[group]
    assert not copies_of_rows(compiled, state[0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("generation", ["v5e", "7x"])
def test_shapes_compile_and_copy_nothing(generation, shape):
    *shape, sliding_window = SHAPES[shape]
    q, *state = case(*shape)
    attend = lambda *args: tpu.attend(*args, sliding_window=sliding_window)
    compiled, _ = compile_for(generation, attend, q, *state)
    assert not copies_of_rows(compiled, state[0])
    # The state before the window, and the window in float32: nothing that grows with the capacity.
    assert compiled.memory_analysis().temp_size_in_bytes < 2**23


@pytest.mark.parametrize(("heads", "group", "channels"), [(30, 1, 128), (12, 8, 256)])
def test_scratch_of_many_heads_in_a_step_fits(heads, group, channels):
    """Norms have the heads along sublanes, where a step takes 8 of them or all."""
    q, *state = case(KiviConfig(key_norm=True), group, 1, channels, heads=heads)
    compile_for("v5e", tpu.attend, q, *state)


def test_more_heads_than_a_step_has_room_for_are_refused():
    config = KiviConfig(key_bits=8, value_bits=8, key_group_size=128, key_norm=True)
    q, *state = case(config, 1, 1, 128, heads=30)
    with pytest.raises(NotImplementedError, match="1024 tokens of 30 KV heads"):
        compile_for("v5e", tpu.attend, q, *state)


MODELS = [*((name, 128) for name in TOPOLOGIES), ("v5e", 64), ("7x", 64)]


@pytest.mark.parametrize(("generation", "channels"), MODELS)
def test_flush_is_in_place(generation, channels):
    config = KiviConfig(key_norm=True, value_group_size=64)
    _, *state = case(config, 1, 1, channels)
    compiled, _ = compile_for(generation, tpu.flush, *state, donate_argnums=0)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state[0]))
    assert not copies_of_rows(compiled, state[0])


@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_prompt_attention_holds_no_square_of_scores(generation):
    tokens = 8192
    q = jax.ShapeDtypeStruct((1, 8, tokens, 128), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, 2, tokens, 128), jnp.bfloat16)
    counts = jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled, _ = compile_for(generation, tpu.attend_prompt, q, key, key, counts)
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * tokens


@pytest.mark.parametrize(("generation", "channels"), MODELS)
def test_decode_step_of_a_model_updates_its_cache_in_place(generation, channels):
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=channels,
        eos_token_id=(),
    )
    model = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graph, weights = nnx.split(model)
    cache = jax.eval_shape(
        lambda: kv.init(
            KiviConfig(), num_layers=2, batch_size=4, num_kv_heads=2, head_dim=channels, max_length=CAPACITY
        )
    )

    def step(weights, tokens, active, cache):
        return decode_step(nnx.merge(graph, weights), tokens, active, cache, implementation="tpu")

    vector = lambda dtype: jax.ShapeDtypeStruct((4,), dtype)
    arguments = weights, vector(jnp.int32), vector(jnp.bool_), cache
    compiled, schedules = compile_for(generation, step, *arguments, donate_argnums=3)
    assert {"kivi_decode", "kivi_flush"} <= schedules.keys()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert not copies_of_rows(compiled, cache.layers[0])


def test_four_chips_run_the_kernels_in_place(monkeypatch):
    monkeypatch.setattr(attention, "_platform", lambda: "tpu")
    devices = np.array(topologies.get_topology_desc(TOPOLOGIES["v5e"], platform="tpu").devices)
    mesh = sharding.checked_mesh(Mesh(devices.reshape(2, 2), ("data", "model")))
    assert_runs_the_kernels_in_place(mesh)
