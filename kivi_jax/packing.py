"""Codes to bytes and back, in token-planar order.

A block of 128 tokens at `b` bits is `R = 16 * b` byte rows. Byte `(r, c)` of a block holds channel `c` of the block's
tokens `r, r + R, r + 2R, ...`, lowest bits first. So each plane of bits is a run of `R` consecutive tokens, in token
order, and is one shift and one mask away from its bytes.
"""

import jax
import jax.numpy as jnp

from kivi_jax.config import BLOCK


def byte_rows(bits: int) -> int:
    """Byte rows of one block of 128 tokens."""
    return BLOCK * bits // 8


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs codes into bytes.

    Args:
        codes: uint8 `[..., T, D]`, each below `2**bits`; T a multiple of 128.
        bits: 2, 4 or 8.

    Returns:
        uint8 `[..., T * bits / 8, D]`.
    """
    *lead, tokens, channels = codes.shape
    if tokens % BLOCK:
        raise ValueError(f"pack needs whole blocks of {BLOCK} tokens; got {tokens} tokens.")
    planes = 8 // bits
    codes = codes.astype(jnp.uint8).reshape(*lead, tokens // BLOCK, planes, byte_rows(bits), channels)
    packed = codes[..., 0, :, :]
    for plane in range(1, planes):
        packed = packed | (codes[..., plane, :, :] << (plane * bits))
    return packed.reshape(*lead, tokens * bits // 8, channels)


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """Inverse of `pack`: uint8 `[..., T * bits / 8, D]` to codes, uint8 `[..., T, D]`."""
    *lead, rows, channels = packed.shape
    if rows % byte_rows(bits):
        raise ValueError(f"unpack at {bits} bits needs whole blocks of {byte_rows(bits)} byte rows; got {rows} rows.")
    packed = packed.reshape(*lead, rows // byte_rows(bits), 1, byte_rows(bits), channels)
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)[:, None, None]
    codes = (packed >> shifts) & jnp.uint8(2**bits - 1)
    return codes.reshape(*lead, rows * 8 // bits, channels)
