"""The design's error rule, which every implementation of attention is held to.

The oracle is float64 attention over the dequantized cache. The comparator dequantizes to the compute dtype and does
plain attention in it. An implementation's root-mean-square and maximum error are at most `factor` times the
comparator's, plus 1e-6 of the largest output.
"""

import jax
import jax.numpy as jnp
import numpy as np

from kivi_jax import packing
from kivi_jax.kernels import reference
from kivi_jax.kernels.visibility import query_positions, visible


def _setting(q, layer, length, quantized, new_key=None, new_value=None, counts=None, sliding_window=None):
    """Dequantized keys and values, bool `[B, Lq, N]` of what is seen, and bool `[B, Lq]` of the queries that count."""
    key, value, positions = reference.tokens(layer, length, quantized, new_key, new_value, counts)
    queries = query_positions(length, q.shape[2], new_key is not None)
    seen = visible(queries, positions, sliding_window)
    valid = queries >= 0
    if counts is not None:
        valid = jnp.arange(q.shape[2])[None] < counts[:, None]
    return key, value, seen, np.asarray(valid)


def dequantize64(layer):
    """Keys and values of every row in float64: no rounding but the quantizer's."""

    def side(codes, scale, zero, bits, per_token):
        if bits == 16:
            return np.asarray(codes, np.float64)
        codes = np.asarray(packing.unpack(codes, bits), np.float64)
        scale, zero = (np.asarray(x, np.float64) for x in (scale, zero))
        if per_token:
            scale, zero = scale.swapaxes(2, 3), zero.swapaxes(2, 3)
        axis = 3 if per_token else 2
        spread = lambda x: np.repeat(x, codes.shape[axis] // x.shape[axis], axis)
        return codes * spread(scale) + spread(zero)

    config = layer.config
    return (
        side(layer.key_codes, layer.key_scale, layer.key_zero, config.key_bits, per_token=False),
        side(layer.value_codes, layer.value_scale, layer.value_zero, config.value_bits, per_token=True),
    )


def oracle(q, layer, length, quantized, *, scale=None, **case):
    """float64 `[B, Hq, Lq, D]`, in numpy."""
    key, value, seen, _ = _setting(q, layer, length, quantized, **case)
    exact = []
    for rounded, rows in zip((key, value), dequantize64(layer), strict=True):
        x = np.array(rounded, np.float64)
        live = (np.arange(layer.capacity) < np.asarray(quantized)[:, None])[:, None, :, None]
        x[:, :, : layer.capacity] = np.where(live, rows, 0)
        exact.append(np.repeat(x, q.shape[1] // x.shape[1], axis=1))
    key, value = exact
    scores = np.asarray(q, np.float64) @ key.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = np.where(np.asarray(seen)[:, None], scores, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True), -1e300)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return weights @ value / np.where(total > 0, total, 1)


def comparator(q, layer, length, quantized, *, scale=None, **case):
    """Plain attention in q's dtype over the cache dequantized to it; products accumulate in float32."""
    key, value, seen, _ = _setting(q, layer, length, quantized, **case)
    key, value = (jnp.repeat(x.astype(q.dtype), q.shape[1] // x.shape[1], axis=1) for x in (key, value))
    wide = dict(preferred_element_type=jnp.float32, precision="highest" if q.dtype == jnp.float32 else None)
    scores = jnp.einsum("bhld,bhnd->bhln", q, key, **wide) * (q.shape[3] ** -0.5 if scale is None else scale)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1).astype(q.dtype)
    return jnp.einsum("bhln,bhnd->bhld", weights, value, **wide).astype(q.dtype)


def assert_within_rule(out, q, layer, length, quantized, *, factor, **case):
    """Fails unless `out` holds the rule on the queries that count."""
    *_, valid = _setting(q, layer, length, quantized, **{k: v for k, v in case.items() if k != "scale"})
    pick = lambda x: np.asarray(x, np.float64).swapaxes(1, 2)[valid]
    want = pick(oracle(q, layer, length, quantized, **case))
    errors = [np.abs(pick(x) - want) for x in (out, comparator(q, layer, length, quantized, **case))]
    assert np.isfinite(errors[0]).all()
    slack = 1e-6 * np.abs(want).max()
    for name, measure in (("RMS", lambda e: np.sqrt((e**2).mean())), ("maximum", np.max)):
        got, plain = (float(measure(e)) for e in errors)
        assert got <= factor * plain + slack, f"{name} error {got:.2e} is {got / plain:.2f} times the comparator's"
