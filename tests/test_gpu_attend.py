"""The GPU kernel against float64 attention over the dequantized cache, by the error rule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import filled, keys_and_values

from kivi_jax.cache import KVCache, window_positions
from kivi_jax.config import KiviConfig
from kivi_jax.kernels import gpu
from kivi_jax.kernels.reference import tokens
from kivi_jax.kernels.visibility import query_positions, visible

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "jax.default_backend() != 'gpu'", reason="needs an NVIDIA GPU: JAX_PLATFORMS=cuda pytest -m gpu"
    ),
]

RULE = 4.0  # how many times the error of plain attention in the model's dtype an implementation may have
FLOOR = 1e-6  # of the largest output, on top


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape. `lengths` are tokens in the cache, of each sequence; with `piece`, Lq more come beside it."""

    config: KiviConfig = dataclasses.field(default_factory=KiviConfig)
    lengths: tuple[int, ...] = (1291, 1, 130, 700)
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    queries: int = 1
    piece: bool = False
    counts: tuple[int, ...] | None = None
    sliding_window: int | None = None
    scale: float | None = None
    dtype: type = jnp.bfloat16


CASES = {
    "plain": Case(),
    "sinks": Case(KiviConfig(sink_length=4), lengths=(1291, 1, 3, 260, 4)),
    "no_residual": Case(KiviConfig(residual_length=0, sink_length=3), lengths=(1291, 128, 131, 700)),
    "short_residual": Case(KiviConfig(residual_length=32), lengths=(1291, 128, 160, 700)),
    "empty_sequence": Case(lengths=(0, 900, 0, 0, 5)),
    "many_sequences": Case(lengths=tuple(int(n) for n in np.random.default_rng(1).integers(0, 600, 70)), kv_heads=1),
    "mha": Case(group=1, kv_heads=4),
    "g3": Case(group=3, kv_heads=3, head_dim=64),
    "g8": Case(group=8),
    "g16": Case(group=16),
    "g20": Case(group=20, kv_heads=1),
    "d64": Case(head_dim=64),
    "d256": Case(head_dim=256),
    "groups_64": Case(KiviConfig(key_group_size=64, value_group_size=64)),
    "groups_128": Case(KiviConfig(key_group_size=128, value_group_size=128)),
    "groups_64_d64": Case(KiviConfig(key_group_size=128, value_group_size=64), head_dim=64),
    "groups_128_d256": Case(KiviConfig(key_group_size=64, value_group_size=128), head_dim=256),
    "4bit": Case(KiviConfig(key_bits=4, value_bits=4)),
    "4bit_groups_64": Case(KiviConfig(key_bits=4, value_bits=4, key_group_size=64, value_group_size=64)),
    "4bit_groups_128_d64": Case(KiviConfig(key_bits=4, value_bits=4, key_group_size=128), head_dim=64),
    "4bit_d256": Case(KiviConfig(key_bits=4, value_bits=4), head_dim=256),
    "8bit": Case(KiviConfig(key_bits=8, value_bits=8)),
    "8bit_groups_64": Case(KiviConfig(key_bits=8, value_bits=8, key_group_size=64, value_group_size=128)),
    "4bit_keys_2bit_values": Case(KiviConfig(key_bits=4, value_bits=2)),
    "2bit_keys_4bit_values": Case(KiviConfig(key_bits=2, value_bits=4, key_group_size=64)),
    "8bit_keys_2bit_values": Case(KiviConfig(key_bits=8, value_bits=2, key_group_size=64), head_dim=64),
    "sliding_short": Case(KiviConfig(sink_length=4), sliding_window=40),
    "sliding_long": Case(KiviConfig(sink_length=4), sliding_window=500),
    "sliding_4bit": Case(KiviConfig(key_bits=4, value_bits=4), sliding_window=333),
    "piece": Case(queries=5, piece=True),
    "piece_counts": Case(
        KiviConfig(sink_length=4), queries=8, piece=True, counts=(8, 1, 3, 5), lengths=(1291, 0, 2, 700)
    ),
    "piece_sliding": Case(queries=7, piece=True, group=3, sliding_window=300),
    "written": Case(queries=4, lengths=(1291, 4, 130, 700)),
    "written_sliding": Case(KiviConfig(sink_length=2), queries=8, lengths=(1291, 8, 130, 700), sliding_window=200),
    "norm": Case(KiviConfig(key_norm=True, key_clip=0.9, sink_length=4)),
    "norm_4bit_sliding": Case(KiviConfig(key_norm=True, key_bits=4, value_bits=4), head_dim=64, sliding_window=700),
    "rewind": Case(KiviConfig(rewind=40)),
    "scale": Case(scale=0.05),
    "float16": Case(dtype=jnp.float16),
    "float16_4bit_piece": Case(KiviConfig(key_bits=4, value_bits=4), dtype=jnp.float16, queries=3, piece=True),
}


def poisoned(cache: KVCache) -> KVCache:
    """The cache with NaN, and codes of all ones, in everything that is dead."""
    (layer,), config = cache.layers, cache.config
    dead_slot = (window_positions(config, cache.length, cache.quantized) < 0)[:, None, :, None]
    fields = {
        name: jnp.where(dead_slot, jnp.asarray(jnp.nan, layer.key_window.dtype), getattr(layer, name))
        for name in ("key_window", "value_window")
    }
    for name in ("key_codes", "value_codes", "key_scale", "key_zero", "value_scale", "value_zero", "key_norm"):
        if (field := getattr(layer, name)) is None:
            continue
        axis = 3 if name in ("value_scale", "value_zero") else 2
        rows = jnp.arange(field.shape[axis]) * layer.capacity // field.shape[axis]
        dead = rows[None] >= cache.quantized[:, None]
        dead = dead[:, None] if field.ndim == 3 else jnp.expand_dims(dead, (1, 3 if axis == 2 else 2))
        poison = 255 if field.dtype == jnp.uint8 else jnp.nan
        fields[name] = jnp.where(dead, jnp.asarray(poison, field.dtype), field)
    return dataclasses.replace(cache, layers=(dataclasses.replace(layer, **fields),))


def attention(q, key, value, seen, scale, dtype):
    """Plain attention, `[B, H, M, D]` queries, `seen [B, M, N]`; in float64 by numpy or in a 16-bit dtype by jax."""
    if dtype == np.float64:
        q, key, value = (np.asarray(x, np.float64) for x in (q, key, value))
        scores = np.where(seen[:, None], np.einsum("bhmd,bhnd->bhmn", q, key) * scale, -1e30)
        weights = np.where(seen[:, None], np.exp(scores - scores.max(-1, keepdims=True)), 0)
        return np.einsum("bhmn,bhnd->bhmd", weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300), value)
    key, value = key.astype(dtype), value.astype(dtype)
    product = lambda form, x, y: jnp.einsum(form, x, y, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None], product("bhmd,bhnd->bhmn", q, key) * scale, -1e30)
    weights = jnp.where(seen[:, None], jax.nn.softmax(scores, axis=-1), 0)
    return product("bhmn,bhnd->bhmd", weights.astype(dtype), value).astype(dtype)


def errors(got, want):
    difference = np.asarray(got, np.float64) - want
    return np.sqrt(np.mean(difference**2)), np.abs(difference).max()


def make(case: Case, rng, times: float):
    """(queries, poisoned cache, arguments of `attend`)."""
    lengths = np.asarray(case.lengths)
    batch, held = len(lengths), int(lengths.max())
    shape = (batch, case.kv_heads, held + 8, case.head_dim)
    key, value = keys_and_values(rng, *shape, dtype=case.dtype)
    cache = poisoned(filled(key, value, lengths, case.config, capacity=held + 8))
    q = rng.normal(size=(batch, case.kv_heads * case.group, case.queries, case.head_dim)) * times
    arguments = dict(sliding_window=case.sliding_window, scale=case.scale)
    if case.piece:
        piece = [jnp.asarray(rng.normal(size=(*shape[:2], case.queries, case.head_dim)), case.dtype) for _ in range(2)]
        if case.counts is not None:
            counts = jnp.asarray(case.counts, jnp.int32)
            padding = (jnp.arange(case.queries)[None] >= counts[:, None])[:, None, :, None]
            piece = [jnp.where(padding, jnp.asarray(jnp.nan, case.dtype), x) for x in piece]
            arguments["counts"] = counts
        arguments |= dict(new_key=piece[0], new_value=piece[1])
    return jnp.asarray(q, case.dtype), cache, arguments


def compare(got, case: Case, q, cache: KVCache, arguments: dict):
    """RMS and maximum error, as multiples of what plain attention in q's dtype makes of the dequantized values."""
    assert got.shape == q.shape and got.dtype == q.dtype
    layer, length, quantized = cache.layers[0], cache.length, cache.quantized
    past = {name: arguments.get(name) for name in ("new_key", "new_value", "counts")}
    key, value, positions = tokens(layer, length, quantized, **past)
    queries = query_positions(length, case.queries, case.piece)
    seen = jnp.tile(visible(queries, positions, case.sliding_window), (1, case.group, 1))
    batch = len(case.lengths)
    grouped = q.reshape(batch, case.kv_heads, -1, case.head_dim)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    want = attention(grouped, key, value, np.asarray(seen), scale, np.float64)
    plain = attention(grouped, key, value, seen, scale, case.dtype)
    counts = np.full(batch, case.queries) if case.counts is None else np.asarray(case.counts)
    live = np.tile(np.arange(case.queries)[None] < counts[:, None], (1, case.group))[:, None, :, None]
    pick = lambda x: np.where(live, np.asarray(x, np.float64).reshape(want.shape), 0)
    allowance = FLOOR * np.abs(pick(want)).max()
    pairs = zip(errors(pick(got), pick(want)), errors(pick(plain), pick(want)), strict=True)
    return [max(mine - allowance, 0) / max(theirs, 1e-30) for mine, theirs in pairs]


@pytest.mark.parametrize("times", [1.0, 3.0], ids=["", "large_queries"])
@pytest.mark.parametrize("name", CASES)
def test_error_rule(name, times, rng):
    case = CASES[name]
    q, cache, arguments = make(case, rng, times)
    attend = jax.jit(gpu.attend, static_argnames=("sliding_window", "scale"))
    got = attend(q, cache.layers[0], cache.length, cache.quantized, **arguments)
    rms, largest = compare(got, case, q, cache, arguments)
    print(f"{name} x{times:.0f}: rms {rms:.2f}, max {largest:.2f} of plain attention's")
    assert rms <= RULE and largest <= RULE


def test_same_whatever_the_division(rng):
    """Shares of any size give the same result up to float32's rounding: no unit of work is lost or taken twice."""
    from kivi_jax.kernels.gpu.launch import Division
    from kivi_jax.kernels.gpu.launch import attend as attend_divided

    q, cache, arguments = make(Case(lengths=(1291, 1, 0, 700)), rng, 1.0)
    results = [
        attend_divided(q, cache.layers[0], cache.length, cache.quantized, **arguments, division=division)
        for division in (Division(1, 1), Division(2, 7), Division(1, 50), Division(2, 132))
    ]
    for other in results[1:]:
        np.testing.assert_allclose(
            np.asarray(other, np.float32), np.asarray(results[0], np.float32), rtol=0.01, atol=1e-3
        )
