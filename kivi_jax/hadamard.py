"""Multiplication by the orthonormal Hadamard matrix of the head dimension."""

import jax
import jax.numpy as jnp
from jax import lax

from kivi_jax.quantize import as_stored


def hadamard(x: jax.Array) -> jax.Array:
    """`x [..., D]` times the orthonormal Hadamard matrix (Sylvester's order), in x's dtype; D is a power of two.

    The matrix is its own inverse. Computed in float32 by log2(D) rounds of sums and differences rather than a matrix
    product, so that a token gives the same bits whatever else is in `x`.
    """
    channels = x.shape[-1]
    y = as_stored(x, x.dtype)
    half = 1
    while half < channels:
        y = y.reshape(*x.shape[:-1], -1, 2, half)
        first, second = y[..., 0, :], y[..., 1, :]
        y = jnp.stack([first + second, first - second], axis=-2)
        half *= 2
    y = y.reshape(x.shape) * jnp.float32(channels**-0.5)
    if x.dtype == jnp.float32:
        # A compiler may fuse a float32 product with a sum that follows, and round once where the window, from which
        # the same number is read otherwise, has it rounded twice. It cannot take out a rounding to 23 bits.
        return lax.reduce_precision(y, exponent_bits=8, mantissa_bits=22)
    return as_stored(y, x.dtype).astype(x.dtype)
