"""How a cache is quantized and scheduled."""

import dataclasses

BLOCK = 128
"""Tokens in a block: the unit in which tokens leave the full-precision window."""

BITS = (2, 4, 8, 16)
"""Bits a code may have; 16 stands for "not quantized, in the model's dtype"."""

GROUP_SIZES = (32, 64, 128)


@dataclasses.dataclass(frozen=True)
class KiviConfig:
    """The quantization of a key/value cache, after KIVI (arXiv 2402.02750): keys per channel, values per token.

    Attributes:
        key_bits: 2, 4 or 8; or 16 to keep keys in the model's dtype (`key_group_size` is then ignored).
        value_bits: the same for values.
        key_group_size: tokens that share a key scale and zero in each channel: 32, 64 or 128.
        value_group_size: channels that share a value scale and zero in each token: 32, 64 or 128; divides head_dim.
        residual_length: how many of the most recent tokens are always held in full precision.
        sink_length: how many of the first tokens stay in full precision for good.

    Raises:
        ValueError: a field has a value that no cache can have.
    """

    key_bits: int = 2
    value_bits: int = 2
    key_group_size: int = 32
    value_group_size: int = 32
    residual_length: int = 128
    sink_length: int = 0

    def __post_init__(self):
        for name, allowed in (
            ("key_bits", BITS),
            ("value_bits", BITS),
            ("key_group_size", GROUP_SIZES),
            ("value_group_size", GROUP_SIZES),
        ):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}.")
        for name in ("residual_length", "sink_length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a number of tokens, 0 or more; got {value!r}.")

    @property
    def quantizes(self) -> bool:
        """Whether keys or values are stored in fewer than 16 bits."""
        return min(self.key_bits, self.value_bits) < 16

    @property
    def ring_length(self) -> int:
        """Window slots after the sinks: the residual tokens and one block that waits for its flush."""
        return self.residual_length + BLOCK

    @property
    def window_length(self) -> int:
        """Slots of the full-precision window: the sinks, then the ring."""
        return self.sink_length + self.ring_length

    @property
    def bits_per_element(self) -> float:
        """Stored bits for each key or value number of a quantized token: codes, scales and zeros."""
        key = 16 if self.key_bits == 16 else self.key_bits + 32 / self.key_group_size
        value = 16 if self.value_bits == 16 else self.value_bits + 32 / self.value_group_size
        return (key + value) / 2

    def check_head_dim(self, head_dim: int) -> None:
        """Raises a ValueError if values of `head_dim` channels cannot be split into this config's groups."""
        if self.value_bits == 16 or head_dim % self.value_group_size == 0:
            return
        fits = [str(g) for g in GROUP_SIZES if head_dim % g == 0]
        advice = f"value_group_size={' or '.join(fits)}" if fits else "value_bits=16"
        raise ValueError(
            f"head_dim must be divisible by value_group_size; got head_dim {head_dim} and "
            f"value_group_size {self.value_group_size}: use {advice}."
        )


def quantized_length(length, config: KiviConfig):
    """Tokens of a sequence of `length` tokens that the schedule quantizes: whole blocks older than the window.

    Sequence positions `sink_length .. sink_length + quantized_length - 1` are the quantized ones. Works on ints,
    numpy and jax arrays.
    """
    older = length - config.sink_length - config.residual_length
    return (older + abs(older)) // 2 // BLOCK * BLOCK  # the positive part, in a form that suits all three
