"""Two float32 registers in one of bfloat16 and back, at one operation a register.

Casting `[16, n]` would keep each row in its place, which takes five operations a register on v5e and v5p. Packing row r
of two `[8, n]` halves into the two halves of one word makes rows 2r and 2r + 1 of the bfloat16 array of them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu


def pack(low: jax.Array, high: jax.Array, interpret: bool) -> jax.Array:
    """Two float32 `[R, n]` to bfloat16 `[2R, n]`, rows low 0, high 0, low 1, high 1, ..., rounded to nearest."""
    if interpret:
        rounded = [lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) for x in (low, high)]
        return jnp.stack(rounded, axis=1).reshape(2 * low.shape[0], low.shape[1]).astype(jnp.bfloat16)
    return pltpu.bitcast(pltpu.pack_elementwise([low, high], packed_dtype=jnp.bfloat16), jnp.bfloat16)


def unpack(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inverse of `pack`, but for the rounding."""
    words = pltpu.bitcast(packed, jnp.int32)
    as_float = lambda bits: lax.bitcast_convert_type(bits, jnp.float32)
    return as_float(words << 16), as_float(words & -0x10000)
