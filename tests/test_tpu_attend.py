"""The TPU decode kernel in interpret mode: numerics. What only a compiler can tell is in test_tpu_compile.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import filled, keys_and_values
from error_rule import assert_within_rule
from jax.experimental.pallas import tpu as pltpu

import kivi_jax
from kivi_jax.config import BLOCK, KiviConfig
from kivi_jax.kernels import tpu
from kivi_jax.kernels.tpu import plan
from kivi_jax.kernels.tpu.decode import work_list

# config, KV heads, query heads of each, head_dim
CASES = {
    "g32": (KiviConfig(), 1, 8, 128),
    "two groups a register": (KiviConfig(sink_length=4), 2, 4, 128),
    "one query head, groups of 128": (KiviConfig(key_group_size=128, value_group_size=128), 1, 1, 128),
    "4 bits": (KiviConfig(key_bits=4, value_bits=4, key_group_size=64), 1, 3, 128),
    "4 and 2 bits, 16 query heads": (KiviConfig(key_bits=4, value_group_size=64), 3, 16, 128),  # a head at a time
    "2 and 4 bits": (KiviConfig(value_bits=4, sink_length=2), 1, 6, 128),
    "tokens on lanes": (KiviConfig(residual_length=100), 2, 4, 64),
    "one value group of 64": (KiviConfig(key_group_size=64, value_group_size=64, value_bits=4), 2, 3, 64),
    "wide head": (KiviConfig(value_group_size=64), 1, 5, 256),
    "norms": (KiviConfig(key_norm=True, residual_length=0), 2, 2, 128),
    "8 bits": (KiviConfig(key_bits=8, value_bits=8), 1, 4, 128),
}
LENGTHS = (1, 127, 128, 129, 255, 256, 300, 384, 513, 640)


STEP_TOKENS = plan._step_tokens


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch):
    """Two blocks a grid step, so that short sequences take several."""
    monkeypatch.setattr(plan, "_step_tokens", lambda capacity, *_: min(capacity, 2 * BLOCK))


def make(case, rng, num_queries=1, spread=1.0, lengths=LENGTHS, capacity=None):
    """Queries and a cache with NaN in everything dead that can hold one."""
    config, heads, group, channels = CASES[case]
    key, value = keys_and_values(rng, len(lengths), heads, max(lengths), channels, jnp.bfloat16)
    cache = filled(key, value, lengths, config, capacity)
    q = jnp.asarray(spread * rng.normal(size=(len(lengths), heads * group, num_queries, channels)), jnp.bfloat16)
    return q, _poisoned(cache), cache.length, cache.quantized


def _poisoned(cache):
    layer, config = cache.layers[0], cache.config
    slots = kivi_jax.cache.window_positions(config, cache.length, cache.quantized) < 0
    rows = jnp.arange(layer.capacity) >= cache.quantized[:, None]
    dead = {
        "key_window": slots[:, None, :, None],
        "value_window": slots[:, None, :, None],
        "key_scale": rows[:, None, :: config.key_group_size, None],
        "key_zero": rows[:, None, :: config.key_group_size, None],
        "value_scale": rows[:, None, None],
        "value_zero": rows[:, None, None],
        "key_norm": rows[:, None],
    }
    fields = {name: getattr(layer, name) for name in dead}
    poison = {
        name: jnp.where(dead[name], jnp.bfloat16(jnp.nan), field) for name, field in fields.items() if field is not None
    }
    return dataclasses.replace(layer, **poison)


def attend(*args, excess_precision=False, interpret=True, **case):
    """`tpu.attend`, by default compiled so that every rounding takes place."""
    options = {"xla_allow_excess_precision": excess_precision, "xla_backend_optimization_level": 0}
    static = {name: case.pop(name) for name in ("sliding_window", "scale") if name in case}
    fn = functools.partial(tpu.attend, interpret=interpret, **static)
    return jax.jit(fn, compiler_options=options)(*args, **case)


@pytest.mark.parametrize("case", CASES)
def test_decode_step_holds_the_error_rule(case, rng):
    for spread in (1.0, 3.0):
        q, *state = make(case, rng, spread=spread)
        out = attend(q, *state)
        assert out.dtype == q.dtype and out.shape == q.shape
        assert_within_rule(out, q, *state, factor=4)


def test_long_steps_of_a_long_cache(rng, monkeypatch):
    """Steps of 3,072 tokens, the last of which goes past the capacity."""
    monkeypatch.setattr(plan, "_step_tokens", STEP_TOKENS)
    q, *state = make("g32", rng, lengths=(16384, 3300), capacity=16384)
    assert plan.choose(plan.SUBLANES, 1, state[0], sliding=False, interpret=True).tokens == 3072
    assert_within_rule(attend(q, *state), q, *state, factor=4)


@pytest.mark.parametrize("capacity", [2176, 3200])
def test_groups_on_lanes_that_fill_no_whole_step(capacity, rng, monkeypatch):
    """Scales with tokens on lanes come 128 groups at a time; a cache may have fewer."""
    monkeypatch.setattr(plan, "_step_tokens", STEP_TOKENS)
    monkeypatch.setitem(CASES, "tokens on lanes", (KiviConfig(residual_length=0), 2, 4, 64))
    q, *state = make("tokens on lanes", rng, lengths=(2176, 1300), capacity=capacity)
    assert_within_rule(attend(q, *state), q, *state, factor=4)


def test_rule_holds_with_excess_precision(rng):
    q, *state = make("two groups a register", rng, spread=3.0)
    assert_within_rule(attend(q, *state, excess_precision=True), q, *state, factor=4)


@pytest.mark.parametrize("case", ["g32", "4 bits"])
def test_rule_holds_with_codes_centred_as_for_narrow_matrix_units(case, rng, monkeypatch):
    monkeypatch.setattr(plan, "_has_wide_matrix_unit", lambda: False)
    config, heads, _, channels = CASES[case]
    monkeypatch.setitem(CASES, case, (config, heads, 5, channels))
    q, *state = make(case, rng, spread=3.0)
    assert_within_rule(attend(q, *state), q, *state, factor=4)


@pytest.mark.parametrize("case", ["g32", "two groups a register", "one value group of 64", "norms"])
def test_piece_beside_the_cache(case, rng):
    lengths = (0, 130, 256, 517)
    q, *state = make(case, rng, num_queries=8, lengths=lengths)
    _, heads, _, channels = CASES[case]
    new_key, new_value = keys_and_values(rng, len(lengths), heads, 8, channels, jnp.bfloat16)
    counts = jnp.asarray([8, 3, 0, 5], jnp.int32)
    padding = (jnp.arange(8) >= counts[:, None])[:, None, :, None]
    new_key, new_value = (jnp.where(padding, jnp.bfloat16(jnp.nan), x) for x in (new_key, new_value))
    piece = dict(new_key=new_key, new_value=new_value, counts=counts)
    assert_within_rule(attend(q, *state, **piece), q, *state, factor=4, **piece)


@pytest.mark.parametrize("sliding_window", [None, 1, 200])
def test_last_tokens_in_the_window(sliding_window, rng):
    q, *state = make("two groups a register", rng, num_queries=3, lengths=(3, 130, 300, 640))
    case = dict(sliding_window=sliding_window, scale=0.2)
    assert_within_rule(attend(q, *state, **case), q, *state, factor=4, **case)


@pytest.mark.parametrize("sliding_window", [100, 129, 257, 450])
def test_sliding_window_cuts_within_and_between_steps(sliding_window, rng):
    q, *state = make("one query head, groups of 128", rng)
    case = dict(sliding_window=sliding_window)
    assert_within_rule(attend(q, *state, **case), q, *state, factor=4, **case)


def test_groups_beyond_one_block_of_scales(rng):
    """With head_dim 64 the scales come 128 groups at a time, of which a step uses a part."""
    q, *state = make("tokens on lanes", rng, lengths=(4096 + 228,), capacity=8192)
    assert_within_rule(attend(q, *state), q, *state, factor=4)


def test_nothing_quantized(rng):
    q, *state = make("g32", rng, lengths=(5, 130))
    assert not state[2].any()
    assert_within_rule(attend(q, *state), q, *state, factor=4)


def test_memory_accesses_stay_within_bounds(rng):
    """The slow interpreter knows DMAs, uninitialized memory and bounds."""
    q, *state = make("tokens on lanes", rng, lengths=(300, 640))
    out = attend(q, *state, interpret=pltpu.InterpretParams(uninitialized_memory="nan"))
    assert_within_rule(out, q, *state, factor=4)


@pytest.mark.parametrize(
    ("config", "shape", "dtype", "message"),
    [
        (KiviConfig(key_bits=16), (2, 128), jnp.bfloat16, "quantized keys and values only"),
        (KiviConfig(), (2, 96), jnp.bfloat16, "head_dim 64, 128 and 256; got 96"),
        (KiviConfig(), (2, 128), jnp.float32, "bfloat16; got queries in float32"),
        (KiviConfig(key_axis="token"), (2, 128), jnp.bfloat16, "no cache with key_axis"),
        (KiviConfig(), (17, 128), jnp.bfloat16, "16 query heads of a KV head; got 17"),
    ],
)
def test_unsupported_cases_are_refused(config, shape, dtype, message, rng):
    group, channels = shape
    key, value = keys_and_values(rng, 1, 1, 128, channels, dtype)
    cache = filled(key, value, (128,), config)
    with pytest.raises(NotImplementedError, match=message):
        tpu.attend(jnp.zeros((1, group, 1, channels), dtype), cache.layers[0], cache.length, cache.quantized)


def test_more_queries_than_the_kernel_takes_are_refused(rng):
    q, *state = make("g32", rng, num_queries=9, lengths=(300,))
    with pytest.raises(NotImplementedError, match="up to 8 queries of a sequence; got 9"):
        tpu.attend(q, *state)


def test_work_list_has_each_visible_step_once():
    blocks = jnp.asarray([5, 0, 2, 9], jnp.int32)
    first_row = jnp.asarray([0, 0, 0, 4 * BLOCK], jnp.int32)
    *lists, count = work_list(blocks, first_row, 2, 5)
    items = list(zip(*(np.asarray(x)[: int(count)].tolist() for x in lists), strict=True))
    assert items == [(0, 0, 1), (0, 1, 0), (0, 2, 0), (2, 0, 1), (3, 2, 1), (3, 3, 0), (3, 4, 0)]


def test_work_list_of_empty_sequences_is_one_step():
    *lists, count = work_list(jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32), 2, 5)
    assert int(count) == 1
    assert all(0 <= int(x[0]) < 3 for x in lists)
