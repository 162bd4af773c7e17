import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import assert_same, filled, keys_and_values

from kivi_jax import cache as kv
from kivi_jax import inplace
from kivi_jax.config import KiviConfig, quantized_length
from kivi_jax.kernels import reference

LENGTHS = (1, 31, 32, 127, 128, 129, 255, 256, 257, 300, 511)
"""1, g-1, g, 127, 128, 129, R+127, R+128, R+129, 300, 511, for R = 128."""

append = jax.jit(kv.append, donate_argnums=0)


@functools.partial(jax.jit, donate_argnums=0)
def step(cache, key, value, active):
    """A decode step's dealings with the cache: write, count, flush."""
    layers = tuple(kv.write_token(layer, key[0], value[0], cache.length) for layer in cache.layers)
    return kv.flush(dataclasses.replace(cache, layers=layers, length=cache.length + active))


def streamed(key, value, counts, config, piece):
    """The cache that took in `counts` tokens of each row, `piece` at a time, beginning with an uneven piece."""
    batch, heads, tokens, channels = key.shape
    cache = kv.init(
        config,
        num_layers=1,
        batch_size=batch,
        num_kv_heads=heads,
        head_dim=channels,
        max_length=tokens,
        dtype=key.dtype,
    )
    # Whole pieces of one shape; rows that are done get no more tokens.
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, piece), (0, 0)))
    key, value = pad(key), pad(value)
    for start in range(0, int(max(counts)), piece):
        left = jnp.clip(jnp.asarray(counts) - start, 0, piece).astype(jnp.int32)
        new_key, new_value = (x[None, :, :, start : start + piece] for x in (key, value))
        cache = (step if piece == 1 else append)(cache, new_key, new_value, left)
    return cache


@pytest.mark.parametrize("piece", [1, 3, 128, 200])
@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (KiviConfig(), 2),
        (KiviConfig(sink_length=4), 2),
        (KiviConfig(key_bits=4, value_bits=4, sink_length=5), 1),
        (KiviConfig(key_bits=8, value_bits=8, key_group_size=64), 4),
        (KiviConfig(key_bits=4, value_bits=2, key_group_size=128, residual_length=40), 1),
        (KiviConfig(key_bits=16, value_bits=2), 1),
        (KiviConfig(residual_length=0, sink_length=3), 1),
    ],
    ids=lambda x: x if isinstance(x, int) else f"k{x.key_bits}v{x.value_bits}R{x.residual_length}S{x.sink_length}",
)
def test_streamed_equals_one_shot(config, heads, piece, rng):
    """The lengths are the rows of one ragged batch, so rows of different schedules also meet in one step."""
    key, value = keys_and_values(rng, len(LENGTHS), heads, 511, 32, jnp.bfloat16)
    want = filled(key, value, LENGTHS, config)
    assert_same(streamed(key, value, LENGTHS, config, piece), want)
    assert int(want.quantized[-1]) == quantized_length(511, config) > 0


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantized_positions_have_error_and_the_window_none(bits, rng):
    config = KiviConfig(key_bits=bits, value_bits=bits, sink_length=4)
    key, value = keys_and_values(rng, 1, 2, 511, 64)
    cache = filled(key, value, [511], config)
    held_key, held_value, positions = reference.tokens(cache.layers[0], cache.length, cache.quantized)
    order = np.argsort(np.where(positions[0] < 0, 10**6, positions[0]))[:511]
    assert np.array_equal(positions[0, order], np.arange(511))
    quantized = slice(4, 4 + int(cache.quantized[0]))
    assert quantized.stop == 4 + 256
    for held, true in ((held_key, key), (held_value, value)):
        error = np.abs(np.asarray(held)[0][:, order] - np.asarray(true[0]))
        assert (error[:, quantized].max(axis=(0, 2)) > 1e-3).all()  # every quantized token
        error[:, quantized] = 0
        assert not error.any()


def test_window_holds_the_sinks_and_at_least_the_residual(rng):
    config = KiviConfig(sink_length=4, residual_length=40)
    key, value = keys_and_values(rng, 3, 1, 400, 32)
    lengths = [3, 171, 400]
    cache = filled(key, value, lengths, config)
    positions = np.asarray(kv.window_positions(config, cache.length, cache.quantized))
    for row, n in enumerate(lengths):
        held = {p for p in positions[row].tolist() if p >= 0}
        assert held == set(range(min(4, n))) | set(range(4 + int(cache.quantized[row]), n))
        assert held >= set(range(max(0, n - 40), n))
        for slot, p in enumerate(positions[row]):
            if p >= 0:
                assert np.array_equal(cache.layers[0].key_window[row, :, slot], key[row, :, p])


def test_rows_that_are_not_due_keep_every_bit(rng):
    """A flush of one sequence must not touch another, its dead rows included, nor wrap at the capacity."""
    config = KiviConfig(residual_length=0)
    key, value = keys_and_values(rng, 2, 1, 256, 32)
    cache = filled(key, value, [256, 127], config)
    before = jax.tree.map(lambda x: np.asarray(x[0]), cache.layers)
    after = step(cache, key[None, :, :, 127:128], value[None, :, :, 127:128], jnp.asarray([0, 1], jnp.int32))
    assert after.quantized.tolist() == [256, 128]
    for name in ("key_codes", "key_scale", "key_zero", "value_codes", "value_scale", "value_zero"):
        assert np.array_equal(getattr(after.layers[0], name)[0], getattr(before[0], name)), name


def test_past_capacity_is_refused_naming_the_sequence(rng):
    key, value = keys_and_values(rng, 2, 1, 256, 32)
    cache = filled(key, value, [100, 250], KiviConfig())
    piece = key[None, :, :, :7], value[None, :, :, :7]
    with pytest.raises(ValueError, match="sequence 1 would have 257 tokens; the cache holds 256 of each"):
        kv.append(cache, *piece)
    after = jax.jit(kv.append)(cache, *piece)
    assert after.length.tolist() == [107, 250]
    assert np.array_equal(after.layers[0].key_window[1], cache.layers[0].key_window[1])


def test_bytes_and_bits(rng):
    shape = dict(num_layers=2, batch_size=3, num_kv_heads=4, head_dim=64, max_length=1000)
    cache = kv.init(KiviConfig(), **shape)
    assert cache.capacity == 1024
    assert cache.nbytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    assert cache.nbytes == jax.eval_shape(lambda: kv.init(KiviConfig(), **shape)).nbytes
    rows = [
        x
        for layer in cache.layers
        for x in jax.tree.leaves(dataclasses.replace(layer, key_window=None, value_window=None))
    ]
    numbers = 2 * 2 * 3 * 4 * 1024 * 64
    assert cache.bits_per_element == 3.0 == sum(8 * x.nbytes for x in rows) / numbers
    mixed = KiviConfig(key_bits=4, value_bits=16, key_group_size=128)
    assert kv.init(mixed, **shape).bits_per_element == (4 + 32 / 128 + 16) / 2


def test_fields_have_the_shapes_of_the_design():
    cache = kv.init(
        KiviConfig(key_bits=4, value_group_size=64, sink_length=4),
        num_layers=1,
        batch_size=2,
        num_kv_heads=3,
        head_dim=128,
        max_length=300,
        dtype=jnp.float16,
    )
    shapes = {
        f.name: (getattr(cache.layers[0], f.name).shape, getattr(cache.layers[0], f.name).dtype.name)
        for f in dataclasses.fields(cache.layers[0])
        if f.name not in ("config", "key_norm")
    }
    assert cache.layers[0].key_norm is None
    assert shapes == {
        "key_codes": ((2, 3, 384 // 2, 128), "uint8"),
        "key_scale": ((2, 3, 384 // 32, 128), "bfloat16"),
        "key_zero": ((2, 3, 384 // 32, 128), "bfloat16"),
        "value_codes": ((2, 3, 384 // 4, 128), "uint8"),
        "value_scale": ((2, 3, 2, 384), "bfloat16"),
        "value_zero": ((2, 3, 2, 384), "bfloat16"),
        "key_window": ((2, 3, 4 + 128 + 128, 128), "float16"),
        "value_window": ((2, 3, 4 + 128 + 128, 128), "float16"),
    }


@pytest.mark.parametrize("sinks", [0, 4])
def test_step_updates_the_cache_in_place(sinks):
    """Compiled with the cache donated, nothing of a layer's size is copied or allocated."""
    cache = jax.eval_shape(
        lambda: kv.init(
            KiviConfig(sink_length=sinks), num_layers=2, batch_size=2, num_kv_heads=2, head_dim=64, max_length=16384
        )
    )
    token = jax.ShapeDtypeStruct((1, 2, 2, 1, 64), jnp.bfloat16)
    active = jax.ShapeDtypeStruct((2,), jnp.int32)
    memory = step.lower(cache, token, token, active).compile().memory_analysis()
    assert memory.alias_size_in_bytes == cache.nbytes
    # XLA:CPU, which computes no bfloat16, copies the scales of the block it flushes; that is all.
    assert memory.temp_size_in_bytes < cache.layers[0].key_codes.size


@pytest.mark.parametrize("active", [None, [True, False, True]])
def test_both_forms_of_writing_in_place_agree(active, rng):
    field = jnp.asarray(rng.normal(size=(3, 2, 8, 5)), jnp.bfloat16)
    new = jnp.asarray(rng.normal(size=(3, 2, 2, 5)), jnp.bfloat16)
    start = jnp.asarray([0, 7, 5], jnp.int32)  # the second has no room, and must be left alone
    active = None if active is None else jnp.asarray(active)
    start = start if active is not None else start.at[1].set(6)
    got, want = (form(2)(field, new, start, active) for form in (inplace._by_loop, inplace._at_once))
    assert np.array_equal(got, want)
    expected = np.array(field)
    for row, at in ((0, 0), (2, 5)) if active is not None else ((0, 0), (1, 6), (2, 5)):
        expected[row, :, at : at + 2] = new[row]
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(key_bits=3), "key_bits must be one of 2, 4, 8, 16; got 3"),
        (dict(value_group_size=48), "value_group_size must be one of 32, 64, 128; got 48"),
        (dict(residual_length=-1), "residual_length must be a number of tokens, 0 or more; got -1"),
        (dict(sink_length=1.5), "sink_length must be a number of tokens, 0 or more; got 1.5"),
    ],
)
def test_bad_config_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        KiviConfig(**change)


@pytest.mark.parametrize(
    ("head_dim", "advice"),
    [(80, "use value_bits=16"), (96, "use value_group_size=32"), (64, "use value_group_size=32 or 64")],
)
def test_head_dim_that_does_not_split_is_refused_with_what_would_work(head_dim, advice):
    with pytest.raises(ValueError, match=f"got head_dim {head_dim} and value_group_size 128: {advice}"):
        kv.init(
            KiviConfig(value_group_size=128),
            num_layers=1,
            batch_size=1,
            num_kv_heads=1,
            head_dim=head_dim,
            max_length=8,
        )


def test_pieces_that_do_not_fit_the_cache_are_refused(rng):
    key, value = keys_and_values(rng, 2, 1, 256, 32)
    cache = filled(key, value, [1, 1], KiviConfig())
    with pytest.raises(ValueError, match=r"keys must be \[2, 1, L, 32\]; got \[1, 1, 256, 32\]"):
        kv.append(cache, key[None, :1], value[None, :1])
    with pytest.raises(ValueError, match="dtype float32; got bfloat16"):
        kv.append(cache, key[None].astype(jnp.bfloat16), value[None])
    with pytest.raises(ValueError, match="expected 1 layers of keys and values; got 2 and 1"):
        kv.append(cache, jnp.stack([key, key]), value[None])
    with pytest.raises(ValueError, match="counts must be between 0 and 256; got 257"):
        kv.append(cache, key[None], value[None], jnp.asarray([257, 0]))
