"""Groupwise asymmetric quantization, along tokens or along channels.

`zero = min`, `scale = (max - min) / (2**bits - 1)`, `code = clip(round((x - zero) / scale), 0, 2**bits - 1)` and
`x' = code * scale + zero`, with min and max over a group (KIVI, arXiv 2402.02750, section 3.1). KIVI quantizes keys
per channel and values per token. The other two pairings exist for the ablation: give keys to `quantize_per_token` or
values to `quantize_per_channel`.

Codes are computed from the scale and zero that are stored, rounded to bfloat16 or what else is asked for, in float32,
rounding half to even. With a `clip` below 1, min and max are first moved towards their middle, to `clip` times their
distance, and what is outside goes to the ends.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Quantized(NamedTuple):
    """Codes with the affine map back to numbers.

    Attributes:
        codes: uint8 `[..., T, D]`, one code a byte (see `packing` for the stored form).
        scale: `[..., T/g, D]` per channel or `[..., D/g, T]` per token.
        zero: like `scale`: the number that code 0 stands for.
    """

    codes: jax.Array
    scale: jax.Array
    zero: jax.Array


def quantize_per_channel(
    x: jax.Array, bits: int, group_size: int, *, clip: float = 1.0, scale_dtype=jnp.bfloat16
) -> Quantized:
    """Quantizes `[..., T, D]` in groups of `group_size` consecutive tokens of one channel (the geometry of keys).

    A constant group gets scale 0 and codes 0. A group that holds a NaN or an infinity gets codes 0 and zero NaN, and
    touches no other group.
    """
    *lead, tokens, channels = x.shape
    _check_groups(bits, "tokens", tokens, group_size)
    grouped = x.reshape(*lead, tokens // group_size, group_size, channels)
    codes, scale, zero = _quantize(grouped, bits, -2, clip, scale_dtype)
    return Quantized(codes.reshape(x.shape), scale, zero)


def quantize_per_token(
    x: jax.Array, bits: int, group_size: int, *, clip: float = 1.0, scale_dtype=jnp.bfloat16
) -> Quantized:
    """Quantizes `[..., T, D]` in groups of `group_size` consecutive channels of one token (the geometry of values).

    Constant groups and groups with a NaN or an infinity are treated as in `quantize_per_channel`.
    """
    *lead, tokens, channels = x.shape
    _check_groups(bits, "channels", channels, group_size)
    grouped = x.reshape(*lead, tokens, channels // group_size, group_size)
    codes, scale, zero = _quantize(grouped, bits, -1, clip, scale_dtype)
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


def token_norm(x: jax.Array) -> jax.Array:
    """The length of each token's vector: `[..., D]` to bfloat16 `[...]`, the same bits whatever else is in `x`."""
    # Squares of 12 bits are exact, so that it does not matter whether a compiler fuses them with the sums; and these
    # are taken pair by pair, in one order.
    x = lax.reduce_precision(as_stored(x, x.dtype), exponent_bits=8, mantissa_bits=11)
    total = x * x
    width = 1 << (x.shape[-1] - 1).bit_length()
    total = jnp.pad(total, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
    while width > 1:
        width //= 2
        total = total[..., :width] + total[..., width:]
    return as_stored(jnp.sqrt(total[..., 0]), jnp.bfloat16).astype(jnp.bfloat16)


def normalize(x: jax.Array, norm: jax.Array) -> jax.Array:
    """float32 `x [..., D]` divided by `norm [...]`; a token of zeros stays so."""
    norm = norm.astype(jnp.float32)
    inverse = 1 / jnp.where(norm == 0, 1.0, norm)
    return as_stored(x, x.dtype) * inverse[..., None]


def as_stored(x: jax.Array, dtype) -> jax.Array:
    """`x` in float32, rounded to what `dtype` can hold.

    A cast to `dtype` and back is not enough: XLA may keep the excess precision, and two paths would see two numbers.
    """
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=kind.nexp, mantissa_bits=kind.nmant)


def _quantize(x: jax.Array, bits: int, axis: int, clip: float, scale_dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The one quantizer, over `axis`: codes like `x`, scale and zero without that axis."""
    x = as_stored(x, x.dtype)
    levels = 2**bits - 1
    # A product: a compiler may or may not make one of a division by a constant, and the two round differently.
    step = jnp.float32(clip / levels)
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    finite = jnp.isfinite(x).all(axis, keepdims=True)  # of x: a minimum may lose a NaN
    spread = high - low
    # The difference of two numbers near float32's limits overflows where the scale does not.
    share = lambda part: jnp.where(jnp.isfinite(spread), spread * part, high * part - low * part)
    scale = share(step)
    if clip < 1:
        # Rounded to 23 bits, so that no compiler can fuse the product with the sum on one path and not on another.
        inset = lax.reduce_precision(share(jnp.float32((1 - clip) / 2)), exponent_bits=8, mantissa_bits=22)
        low = low + inset
    scale = as_stored(jnp.where(finite, scale, 0.0), scale_dtype)
    zero = as_stored(jnp.where(finite, low, jnp.nan), scale_dtype)
    # The divisor depends on each x: XLA turns a division by a broadcast into a product with its reciprocal, where it
    # sees one, and 1.5 then becomes 1.4999999.
    coded = (scale > 0) & finite & jnp.isfinite(x)
    # Halves, because x - zero may overflow too.
    distance = x * 0.5 - zero * 0.5
    codes = jnp.round(distance / jnp.where(coded, scale * 0.5, 1.0))
    codes = jnp.where(coded, jnp.clip(codes, 0, levels), 0.0).astype(jnp.uint8)
    return codes, scale.squeeze(axis).astype(scale_dtype), zero.squeeze(axis).astype(scale_dtype)


def _check_groups(bits: int, name: str, size: int, group_size: int) -> None:
    if bits not in (2, 4, 8):
        raise ValueError(f"bits must be 2, 4 or 8; got {bits!r}.")
    if group_size <= 0 or size % group_size:
        raise ValueError(f"group_size must divide the number of {name}; got group_size {group_size} and {size} {name}.")
