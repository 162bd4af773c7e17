"""Packed codes to matrix-unit operands, without unpacking them.

Every TPU multiplies bfloat16 by float8_e5m2, which has two bits of mantissa: a 2-bit digit `d` put into the mantissa of
1 is the number `1 + d / 4`. That takes three operations for four bytes, and token-planar order makes each plane of
digits a run of whole tiles, in token order. Wider codes are several digits, `code = sum of 4**k * d_k`, and so

    code = 4 * (sum of 4**k * (1 + d_k / 4) - offset)

The offset, the sum of 4**k, is large. Whoever multiplies these numbers by rounded ones must take it out with the very
numbers that were rounded, or their rounding errors are multiplied by it. For 17 more operations a block of four tiles,
`centred_planes` have no offset.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

DTYPE = jnp.float8_e5m2

_DIGIT_BITS = 2
_DIGIT_MIDDLE = 1.5
_DIGIT = 0x03030303  # the mantissa of each byte of a word
_ONE = 0x3C3C3C3C  # 1 in each byte

_HIGH_BITS = -0x55555556  # 0xAAAAAAAA: the high bit of each digit of a word
_MAGNITUDE = 0x06060606  # the bits in which 0.5 and 1.5 differ
_SIGN = -0x7F7F7F80  # 0x80808080
_MINUS_ONE_AND_A_HALF = -0x41414142  # 0xBEBEBEBE


def digits(bits: int) -> int:
    """Digits of a code."""
    return bits // _DIGIT_BITS


def weights(bits: int) -> list[int]:
    """What the numbers of each digit count for, lowest digit first."""
    return [4**k for k in range(digits(bits))]


def offset(bits: int) -> int:
    """What the weighted numbers exceed a quarter of the code by."""
    return sum(weights(bits))


def middle(bits: int) -> float:
    """The middle of the codes."""
    return _DIGIT_MIDDLE * offset(bits)


def planes(packed: jax.Array, bits: int) -> list[jax.Array]:
    """One block of 128 tokens, uint8 `[16 * bits, D]`, to `1 + digit / 4`, float8_e5m2 `[128, D]`, for each digit."""
    words = pltpu.bitcast(packed, jnp.int32)
    return _by_digit(lambda shift: (_shift_right(words, shift) & _DIGIT) | _ONE, bits)


def centred_planes(packed: jax.Array, bits: int) -> list[jax.Array]:
    """Like `planes`, but to `digit - 1.5`.

    With `h` and `l` the bits of a digit, the number's sign is `not h`, and it is 1.5 for `h == l`, else 0.5.
    """
    words = pltpu.bitcast(packed, jnp.int32)
    differ = (words ^ (words << 1)) & _HIGH_BITS
    differ = differ | (differ >> 1)

    def plane(shift):
        magnitude = _shift_right(differ, shift - 1) & _MAGNITUDE
        sign = _shift_right(words, shift - 6) & _SIGN
        return (magnitude | sign) ^ _MINUS_ONE_AND_A_HALF

    return _by_digit(plane, bits)


def _by_digit(plane, bits):
    """The bytes of `plane(shift)`, of the digits that start at bit `shift`, as one array a digit."""
    shifts = lambda digit: range(digit * _DIGIT_BITS, 8, bits)
    return [
        jnp.concatenate([pltpu.bitcast(plane(shift), DTYPE) for shift in shifts(digit)], axis=0)
        for digit in range(digits(bits))
    ]


def _shift_right(words, by):
    """Arithmetic: every caller masks away what comes in at the top, and a logical shift costs more."""
    if by == 0:
        return words
    return words >> by if by > 0 else words << -by
