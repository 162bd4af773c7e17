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
from kivi_jax.kernels.visibility import piece_positions, query_positions, row_positions, visible


def _setting(q, layer, length, quantized, new_key=None, new_value=None, counts=None, sliding_window=None, rotary=None):
    """Dequantized keys and values, bool `[B, Lq, N]` of what is seen, and bool `[B, Lq]` of the queries that count.

    Keys and values of the cache are the plain ones, with what `rotate` and `pre_rope` do to them undone.
    """
    key, value, positions = reference.tokens(layer, length, quantized, rotary=rotary)
    if layer.config.rotate:
        key, value = (unrotated(np.asarray(x)).astype(np.float32) for x in (key, value))
    if new_key is not None:
        piece = piece_positions(length, new_key.shape[2], counts)
        new_key = new_key if rotary is None else rotary(new_key, piece)
        live = (piece >= 0)[:, None, :, None]
        beside = [jnp.where(live, x.astype(jnp.float32), 0) for x in (new_key, new_value)]
        key, value = (jnp.concatenate(pair, axis=2) for pair in zip((key, value), beside, strict=True))
        positions = jnp.concatenate([positions, piece], axis=1)
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
    token = lambda axis: axis == "token"
    key = side(layer.key_codes, layer.key_scale, layer.key_zero, config.key_bits, token(config.key_axis))
    if layer.key_norm is not None:
        key = key * np.asarray(layer.key_norm, np.float64)[..., None]
    value = side(layer.value_codes, layer.value_scale, layer.value_zero, config.value_bits, token(config.value_axis))
    return (unrotated(key), unrotated(value)) if config.rotate else (key, value)


def unrotated(x):
    """`x [..., D]` times the orthonormal Hadamard matrix, in float64; NaN, as dead rows have, stays in its token."""
    matrix = np.ones((1, 1))
    while len(matrix) < x.shape[-1]:
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    return np.asarray(x, np.float64) @ matrix / np.sqrt(x.shape[-1])


def _rotated64(x, positions, rotary):
    """`x [B, H, N, D]` with its rotary embedding, in float64, by the angles that `rotary` has."""
    cos, sin = (np.asarray(a, np.float64)[:, None] for a in rotary.angles(positions))
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def oracle(q, layer, length, quantized, *, scale=None, **case):
    """float64 `[B, Hq, Lq, D]`, in numpy."""
    key, value, seen, _ = _setting(q, layer, length, quantized, **case)
    key_rows, value_rows = dequantize64(layer)
    if rotary := case.get("rotary"):
        positions = row_positions(layer, jnp.arange(layer.capacity, dtype=jnp.int32), quantized)
        key_rows = _rotated64(key_rows, positions, rotary)
        q = _rotated64(q, query_positions(length, q.shape[2], case.get("new_key") is not None), rotary)
    exact = []
    for rounded, rows in zip((key, value), (key_rows, value_rows), strict=True):
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
    if rotary := case.get("rotary"):
        q = rotary(q, query_positions(length, q.shape[2], case.get("new_key") is not None))
    key, value = (jnp.repeat(jnp.asarray(x).astype(q.dtype), q.shape[1] // x.shape[1], axis=1) for x in (key, value))
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
