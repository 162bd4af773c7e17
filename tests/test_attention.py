"""Every implementation that runs here, against float64 attention over the dequantized cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import ROWS, filled, keys_and_values
from error_rule import assert_within_rule, oracle

import kivi_jax
from kivi_jax.cache import token_axis
from kivi_jax.config import KiviConfig
from kivi_jax.kernels import reference

ATTEND = {
    name: jax.jit(functools.partial(kivi_jax.attend, implementation=name), static_argnames=("sliding_window", "scale"))
    for name in ("reference", "xla")
}

CASES = {
    "gqa 2 bit": (KiviConfig(), 2, 3, 64),
    "mha 2 bit sinks": (KiviConfig(sink_length=4), 4, 1, 32),
    "4 bit groups of 64 and 32": (KiviConfig(key_bits=4, value_bits=4, key_group_size=64), 1, 4, 128),
    "8 bit groups of 128": (KiviConfig(key_bits=8, value_bits=8, key_group_size=128, value_group_size=128), 1, 2, 128),
    "4 bit keys, 2 bit values": (KiviConfig(key_bits=4, value_bits=2, value_group_size=64, sink_length=2), 2, 2, 64),
    "keys quantized only": (KiviConfig(value_bits=16, residual_length=0), 2, 2, 64),
    "not quantized": (KiviConfig(key_bits=16, value_bits=16), 2, 2, 80),
}
LENGTHS = (1, 127, 128, 300, 384, 900)


def make(case, rng, dtype, num_queries, spread=1.0, lengths=LENGTHS, poison=True):
    config, heads, group, channels = CASES[case]
    key, value = keys_and_values(rng, len(lengths), heads, 1024, channels, dtype)
    cache = filled(key, value, lengths, config)
    layer = cache.layers[0]
    if poison:
        layer = poisoned(layer, cache.quantized)
    q = jnp.asarray(spread * rng.normal(size=(len(lengths), heads * group, num_queries, channels)), dtype)
    return q, layer, cache.length, cache.quantized


def poisoned(layer, quantized):
    """The layer with NaN in every dead row: nothing of them may come through."""
    import dataclasses

    def poison(name):
        field = getattr(layer, name)
        if field is None or field.dtype == jnp.uint8:
            return field
        axis = token_axis(name, layer.config)
        rows = jnp.arange(field.shape[axis]) * (layer.capacity // field.shape[axis])
        dead = rows[None] >= quantized[:, None]
        dead = jnp.expand_dims(dead, [n for n in range(1, field.ndim) if n != axis])
        return jnp.where(dead, jnp.nan, field.astype(jnp.float32)).astype(field.dtype)

    return dataclasses.replace(layer, **{name: poison(name) for name in ROWS})


@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ATTEND)
def test_decode_step_holds_the_error_rule(name, case, dtype, spread, rng):
    q, *state = make(case, rng, dtype, 1, spread)
    assert_within_rule(ATTEND[name](q, *state), q, *state, factor=2)


@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.parametrize("case", ["gqa 2 bit", "mha 2 bit sinks", "4 bit keys, 2 bit values", "not quantized"])
@pytest.mark.parametrize("name", ATTEND)
def test_piece_beside_the_cache_holds_the_error_rule(name, case, spread, rng):
    q, layer, length, quantized = make(case, rng, jnp.bfloat16, 7, spread)
    _, heads, _, channels = CASES[case]
    new_key, new_value = keys_and_values(rng, len(LENGTHS), heads, 7, channels, jnp.bfloat16)
    counts = jnp.asarray([7, 1, 3, 7, 0, 5], jnp.int32)
    padding = (jnp.arange(7) >= counts[:, None])[:, None, :, None]
    new_key, new_value = (jnp.where(padding, jnp.bfloat16(jnp.nan), x) for x in (new_key, new_value))
    piece = dict(new_key=new_key, new_value=new_value, counts=counts)
    out = ATTEND[name](q, layer, length, quantized, **piece)
    assert_within_rule(out, q, layer, length, quantized, factor=2, **piece)


@pytest.mark.parametrize("name", ATTEND)
def test_queries_of_tokens_in_the_cache_see_only_up_to_themselves(name, rng):
    q, *state = make("mha 2 bit sinks", rng, jnp.float32, 5, lengths=(9, 300, 900))
    out = ATTEND[name](q, *state)
    assert_within_rule(out, q, *state, factor=2)
    layer, length, quantized = state
    for i in range(5):
        earlier = ATTEND[name](q[:, :, i : i + 1], layer, length - 4 + i, quantized)
        np.testing.assert_allclose(out[:, :, i : i + 1], earlier, atol=2e-6)


@pytest.mark.parametrize("sliding_window", [1, 64, 200, 2000])
@pytest.mark.parametrize("piece", [False, True])
@pytest.mark.parametrize("name", ATTEND)
def test_sliding_window_masks_what_is_outside_it_sinks_included(name, piece, sliding_window, rng):
    q, layer, length, quantized = make("mha 2 bit sinks", rng, jnp.float32, 6 if piece else 1)
    beside = {}
    if piece:
        new_key, new_value = keys_and_values(rng, len(LENGTHS), 4, 6, 32)
        beside = dict(new_key=new_key, new_value=new_value)
    out = ATTEND[name](q, layer, length, quantized, sliding_window=sliding_window, **beside)
    assert_within_rule(out, q, layer, length, quantized, factor=2, sliding_window=sliding_window, **beside)
    if sliding_window == 1 and piece:
        np.testing.assert_allclose(out, new_value, atol=1e-6)


@pytest.mark.parametrize("name", ATTEND)
def test_scale_replaces_the_default(name, rng):
    q, *state = make("gqa 2 bit", rng, jnp.float32, 1)
    got = ATTEND[name](q, *state, scale=0.5)
    np.testing.assert_allclose(got, ATTEND[name](q * 4, *state), rtol=2e-5, atol=2e-6)


def test_quantization_is_seen(rng):
    """Attention over the cache differs from attention over what was put in: a cache that quantizes nothing fails."""
    key, value = keys_and_values(rng, 1, 2, 900, 64)
    exact = filled(key, value, [900], KiviConfig(key_bits=16, value_bits=16))
    kivi = filled(key, value, [900], KiviConfig())
    q = jnp.asarray(rng.normal(size=(1, 4, 1, 64)), jnp.float32)
    out = [ATTEND["xla"](q, c.layers[0], c.length, c.quantized) for c in (exact, kivi)]
    assert 0.01 < float(jnp.abs(out[0] - out[1]).max()) < 1


def test_xla_holds_nothing_dequantized_in_memory():
    """Neither keys or values nor unpacked codes of the whole cache appear among the temporaries."""
    from kivi_jax import cache as kv

    tokens = 65536
    cache = jax.eval_shape(
        lambda: kv.init(KiviConfig(), num_layers=1, batch_size=1, num_kv_heads=2, head_dim=64, max_length=tokens)
    )
    q = jax.ShapeDtypeStruct((1, 4, 1, 64), jnp.bfloat16)
    memory = ATTEND["xla"].lower(q, cache.layers[0], cache.length, cache.quantized).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * tokens * 64  # a byte for each number of the keys alone


@pytest.mark.parametrize("sliding_window", [None, 100])
@pytest.mark.parametrize("tokens", [1, 40, 512, 700])
def test_prompt_attention_without_a_score_matrix_equals_plain_attention(tokens, sliding_window, rng):
    key, value = keys_and_values(rng, 2, 2, tokens, 32)
    q = jnp.asarray(rng.normal(size=(2, 6, tokens, 32)), jnp.float32)
    counts = jnp.asarray([tokens, max(1, tokens // 3)], jnp.int32)
    dead = (jnp.arange(tokens) >= counts[:, None])[:, None, :, None]
    value = jnp.where(dead, jnp.nan, value)
    got, want = (
        kivi_jax.attend_prompt(q, key, value, counts, sliding_window=sliding_window, implementation=name)
        for name in ("xla", "reference")
    )
    valid = ~np.broadcast_to(dead, got.shape)
    np.testing.assert_allclose(np.asarray(got)[valid], np.asarray(want)[valid], atol=5e-6)


def test_oracle_itself_is_plain_attention(rng):
    """With nothing quantized, the oracle equals softmax(q k) v over the keys and values that went in."""
    key, value = keys_and_values(rng, 1, 1, 200, 32)
    cache = filled(key, value, [200], KiviConfig(key_bits=16, value_bits=16, sink_length=3))
    q = jnp.asarray(rng.normal(size=(1, 1, 1, 32)), jnp.float32)
    scores = np.asarray(q, float)[0, 0] @ np.asarray(key, float)[0, 0].T / np.sqrt(32)
    weights = np.exp(scores - scores.max())
    want = weights @ np.asarray(value, float)[0, 0] / weights.sum()
    state = cache.layers[0], cache.length, cache.quantized
    np.testing.assert_allclose(oracle(q, *state)[0, 0], want, atol=1e-12)
    np.testing.assert_allclose(reference.attend(q, *state)[0, 0], want, atol=1e-5)


def test_bad_arguments_are_refused(rng):
    q, layer, length, quantized = make("gqa 2 bit", rng, jnp.float32, 1)
    attend = kivi_jax.attend
    with pytest.raises(ValueError, match="implementation must be None or one of reference, xla, gpu, tpu; got 'cuda'"):
        attend(q, layer, length, quantized, implementation="cuda")
    with pytest.raises(ValueError, match=r"q must be \[6, a multiple of 2, Lq, 64\]; got \[6, 5, 1, 64\]"):
        attend(q[:, :5], layer, length, quantized)
    with pytest.raises(ValueError, match=r"length must be int32 \[6\]; got int32 \[5\]"):
        attend(q, layer, length[:5], quantized)
    with pytest.raises(ValueError, match="new_key and new_value go together"):
        attend(q, layer, length, quantized, new_key=layer.key_window[:, :, :1])
    with pytest.raises(ValueError, match="counts without new_key"):
        attend(q, layer, length, quantized, counts=length)
    with pytest.raises(ValueError, match="sliding_window must be 1 token or more; got 0"):
        attend(q, layer, length, quantized, sliding_window=0)


def test_a_named_kernel_that_cannot_do_the_job_says_so(rng):
    """float32 queries: no GPU kernel takes them, and nothing else may be used in its place."""
    q, *state = make("gqa 2 bit", rng, jnp.float32, 1)
    with pytest.raises(NotImplementedError):
        kivi_jax.attend(q, *state, implementation="gpu")
