"""Groupwise asymmetric quantization, along tokens or along channels.

`zero = min`, `scale = (max - min) / (2**bits - 1)`, `code = clip(round((x - zero) / scale), 0, 2**bits - 1)` and
`x' = code * scale + zero`, with min and max over a group (KIVI, arXiv 2402.02750, section 3.1). KIVI quantizes keys
per channel and values per token. The other two pairings exist for the ablation: give keys to `quantize_per_token` or
values to `quantize_per_channel`.

Codes are computed from the scale and zero that are stored, rounded to bfloat16, in float32, rounding half to even.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Quantized(NamedTuple):
    """Codes with the affine map back to numbers.

    Attributes:
        codes: uint8 `[..., T, D]`, one code a byte (see `packing` for the stored form).
        scale: bfloat16, `[..., T/g, D]` per channel or `[..., D/g, T]` per token.
        zero: bfloat16, like `scale`: the number that code 0 stands for.
    """

    codes: jax.Array
    scale: jax.Array
    zero: jax.Array


def quantize_per_channel(x: jax.Array, bits: int, group_size: int) -> Quantized:
    """Quantizes `[..., T, D]` in groups of `group_size` consecutive tokens of one channel (the geometry of keys).

    A constant group gets scale 0 and codes 0. A group that holds a NaN or an infinity gets codes 0 and zero NaN, and
    touches no other group.
    """
    *lead, tokens, channels = x.shape
    _check_groups(bits, "tokens", tokens, group_size)
    grouped = x.reshape(*lead, tokens // group_size, group_size, channels)
    codes, scale, zero = _quantize(grouped, bits, axis=-2)
    return Quantized(codes.reshape(x.shape), scale, zero)


def quantize_per_token(x: jax.Array, bits: int, group_size: int) -> Quantized:
    """Quantizes `[..., T, D]` in groups of `group_size` consecutive channels of one token (the geometry of values).

    Constant groups and groups with a NaN or an infinity are treated as in `quantize_per_channel`.
    """
    *lead, tokens, channels = x.shape
    _check_groups(bits, "channels", channels, group_size)
    grouped = x.reshape(*lead, tokens, channels // group_size, group_size)
    codes, scale, zero = _quantize(grouped, bits, axis=-1)
    return Quantized(codes.reshape(x.shape), scale.swapaxes(-1, -2), zero.swapaxes(-1, -2))


def dequantize_per_channel(quantized: Quantized) -> jax.Array:
    """float32 `[..., T, D]` from codes with scales `[..., T/g, D]`."""
    codes, scale, zero = quantized
    group_size = codes.shape[-2] // scale.shape[-2]
    spread = lambda a: jnp.repeat(a.astype(jnp.float32), group_size, axis=-2)
    return codes.astype(jnp.float32) * spread(scale) + spread(zero)


def dequantize_per_token(quantized: Quantized) -> jax.Array:
    """float32 `[..., T, D]` from codes with scales `[..., D/g, T]`."""
    codes, scale, zero = quantized
    group_size = codes.shape[-1] // scale.shape[-2]
    spread = lambda a: jnp.repeat(a.astype(jnp.float32).swapaxes(-1, -2), group_size, axis=-1)
    return codes.astype(jnp.float32) * spread(scale) + spread(zero)


def as_stored(x: jax.Array, dtype) -> jax.Array:
    """`x` in float32, rounded to what `dtype` can hold.

    A cast to `dtype` and back is not enough: XLA may keep the excess precision, and two paths would see two numbers.
    """
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=kind.nexp, mantissa_bits=kind.nmant)


def _quantize(x: jax.Array, bits: int, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The one quantizer, over `axis`: codes like `x`, scale and zero without that axis."""
    x = as_stored(x, x.dtype)
    levels = 2**bits - 1
    # A product: a compiler may or may not make one of a division by a constant, and the two round differently.
    step = jnp.float32(1 / levels)
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    finite = jnp.isfinite(x).all(axis, keepdims=True)  # of x: a minimum may lose a NaN
    spread = high - low
    # The difference of two numbers near float32's limits overflows where the scale does not.
    scale = jnp.where(jnp.isfinite(spread), spread * step, high * step - low * step)
    scale = as_stored(jnp.where(finite, scale, 0.0), jnp.bfloat16)
    zero = as_stored(jnp.where(finite, low, jnp.nan), jnp.bfloat16)
    # The divisor depends on each x: XLA turns a division by a broadcast into a product with its reciprocal, where it
    # sees one, and 1.5 then becomes 1.4999999.
    coded = (scale > 0) & finite & jnp.isfinite(x)
    # Halves, because x - zero may overflow too.
    distance = x * 0.5 - zero * 0.5
    codes = jnp.round(distance / jnp.where(coded, scale * 0.5, 1.0))
    codes = jnp.where(coded, jnp.clip(codes, 0, levels), 0.0).astype(jnp.uint8)
    return codes, scale.squeeze(axis).astype(jnp.bfloat16), zero.squeeze(axis).astype(jnp.bfloat16)


def _check_groups(bits: int, name: str, size: int, group_size: int) -> None:
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8; got {bits!r}.")
    if group_size <= 0 or size % group_size:
        raise ValueError(f"group_size must divide the number of {name}; got group_size {group_size} and {size} {name}.")
