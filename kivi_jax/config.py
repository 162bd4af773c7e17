"""How a cache is quantized and scheduled."""

import dataclasses

BLOCK = 128
"""Tokens in a block: the unit in which tokens leave the full-precision window."""

BITS = (2, 4, 8, 16)
"""Bits a code may have; 16 stands for "not quantized, in the model's dtype"."""

GROUP_SIZES = (32, 64, 128)

SCALE_DTYPES = ("bfloat16", "float16", "float32")

AXES = ("channel", "token")


@dataclasses.dataclass(frozen=True)
class KiviConfig:
    """The quantization of a key/value cache, after KIVI (arXiv 2402.02750): keys per channel, values per token.

    Attributes:
        key_bits: 2, 4 or 8; or 16 to keep keys in the model's dtype (`key_group_size` is then ignored). A tuple gives
            each layer its own.
        value_bits: the same for values.
        key_group_size: tokens that share a key scale and zero in each channel: 32, 64 or 128.
        value_group_size: channels that share a value scale and zero in each token: 32, 64 or 128; divides head_dim.
        residual_length: how many of the most recent tokens are always held in full precision.
        sink_length: how many of the first tokens stay in full precision for good.
        rotate: store keys and values multiplied by the orthonormal Hadamard matrix of the head dimension, which
            spreads outliers over all channels; `attend` rotates queries and outputs to match (as in QuaRot, arXiv
            2404.00456). Needs a head_dim that is a power of two.
        key_norm: divide each key by its length, stored in bfloat16, before it is quantized.
        key_clip, value_clip: each group is quantized to its range shrunk about its middle by this factor, above 0 and
            at most 1; numbers outside go to the ends.
        pre_rope: store keys before the rotary embedding, which is then applied whenever they are read.
        scale_dtype: of scales and zeros: "bfloat16", "float16" (numbers must stay below 65504) or "float32".
        key_axis, value_axis: "channel": tokens of one channel share a scale; "token": channels of one token do. The
            defaults are KIVI's, the other choices are there to show why.
        rewind: how many tokens `crop` can always drop as if they had never been there, the flush of a block undone
            too; costs as many further window slots.

    Raises:
        ValueError: a field has a value that no cache can have, or two options exclude each other.
    """

    key_bits: int | tuple[int, ...] = 2
    value_bits: int | tuple[int, ...] = 2
    key_group_size: int = 32
    value_group_size: int = 32
    residual_length: int = 128
    sink_length: int = 0
    rotate: bool = False
    key_norm: bool = False
    key_clip: float = 1.0
    value_clip: float = 1.0
    pre_rope: bool = False
    scale_dtype: str = "bfloat16"
    key_axis: str = "channel"
    value_axis: str = "token"
    rewind: int = 0

    @classmethod
    def paper(cls) -> "KiviConfig":
        """KIVI as published, as nearly as flushing in blocks allows: no token is guaranteed to stay exact (the paper
        also keeps its last R values exact)."""
        return cls(residual_length=0)

    @classmethod
    def accurate(cls) -> "KiviConfig":
        """The closest to the unquantized model without tuning, at about 3.1 bits an element."""
        return cls(sink_length=4, rotate=True, key_norm=True, key_clip=0.9, value_clip=0.9)

    @classmethod
    def compact(cls) -> "KiviConfig":
        """The closest to the unquantized model at no more than 2.5 bits an element from a head_dim of 64 on."""
        return dataclasses.replace(
            cls.accurate(), key_group_size=128, value_group_size=64, key_clip=0.8, value_clip=0.8
        )

    def __post_init__(self):
        for name in ("key_bits", "value_bits"):
            value = getattr(self, name)
            if isinstance(value, list | tuple):
                object.__setattr__(self, name, tuple(value))
            for bits in value if isinstance(value, list | tuple) and value else (value,):
                _check_one_of(name, bits, BITS)
        for name, allowed in (
            ("key_group_size", GROUP_SIZES),
            ("value_group_size", GROUP_SIZES),
            ("scale_dtype", SCALE_DTYPES),
            ("key_axis", AXES),
            ("value_axis", AXES),
            ("rotate", (False, True)),
            ("key_norm", (False, True)),
            ("pre_rope", (False, True)),
        ):
            _check_one_of(name, getattr(self, name), allowed)
        for name in ("residual_length", "sink_length", "rewind"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a number of tokens, 0 or more; got {value!r}.")
        for name in ("key_clip", "value_clip"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise ValueError(f"{name} must be a number above 0 and at most 1; got {value!r}.")
        if self.rotate and self.pre_rope:
            raise ValueError(
                "rotate must be False with pre_rope=True, as reading would need an inverse for each token; got True."
            )
        if self.key_norm and self.key_axis == "token":
            raise ValueError(
                "key_norm must be False with key_axis='token', whose scales already are a token's own; got True."
            )
        self._check_layers()
        if self.key_norm and self.key_bits == 16:
            raise ValueError("key_norm must be False with key_bits=16, which divides no key; got True.")

    def _check_layers(self) -> None:
        counts = [len(x) for x in (self.key_bits, self.value_bits) if isinstance(x, tuple)]
        if len(counts) == 2 and counts[0] != counts[1]:
            raise ValueError(
                f"key_bits and value_bits must name the same layers; got {counts[0]} and {counts[1]} of them."
            )

    @property
    def num_layers(self) -> int | None:
        """How many layers the bits are given for one by one; None where all layers have the same."""
        return next((len(x) for x in (self.key_bits, self.value_bits) if isinstance(x, tuple)), None)

    def of_layer(self, layer: int) -> "KiviConfig":
        """The config of one layer: with its own bits, as ints."""
        bits = {name: x[layer] for name in ("key_bits", "value_bits") if isinstance(x := getattr(self, name), tuple)}
        # A layer that does not quantize its keys stores no norms.
        norm = self.key_norm and bits.get("key_bits", self.key_bits) != 16
        return dataclasses.replace(self, **bits, key_norm=norm) if bits else self

    @property
    def quantizes(self) -> bool:
        """Whether keys or values are stored in fewer than 16 bits, in any layer."""
        bits = lambda x: x if isinstance(x, tuple) else (x,)
        return min(bits(self.key_bits) + bits(self.value_bits)) < 16

    @property
    def features(self) -> frozenset[str]:
        """What an implementation of attention must know about rows beyond codes with bfloat16 scales and zeros per
        channel for keys and per token for values. It names what it knows in its module's `FEATURES`, and is given no
        cache with another."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        names = ("key_norm", "pre_rope", "scale_dtype", "key_axis", "value_axis")
        return frozenset(name for name in names if getattr(self, name) != defaults[name])

    @property
    def ring_length(self) -> int:
        """Window slots after the sinks: the residual tokens, one block that waits for its flush, and what a rewind
        would need again."""
        return self.residual_length + BLOCK + self.rewind

    @property
    def window_length(self) -> int:
        """Slots of the full-precision window: the sinks, then the ring."""
        return self.sink_length + self.ring_length

    @property
    def bits_per_element(self) -> float:
        """Stored bits for each key or value number of a quantized token: codes, scales and zeros.

        Key norms come on top, 8 bits divided by head_dim: `KVCache.bits_per_element` counts them.
        """
        if self.num_layers is not None:
            return sum(self.of_layer(n).bits_per_element for n in range(self.num_layers)) / self.num_layers
        pair = 64 if self.scale_dtype == "float32" else 32
        key = 16 if self.key_bits == 16 else self.key_bits + pair / self.key_group_size
        value = 16 if self.value_bits == 16 else self.value_bits + pair / self.value_group_size
        return (key + value) / 2

    def check_head_dim(self, head_dim: int) -> None:
        """Raises a ValueError if keys and values of `head_dim` channels cannot be stored by this config."""
        for n in range(self.num_layers or 1):
            layer = self.of_layer(n)
            for side in ("key", "value"):
                bits, axis = getattr(layer, f"{side}_bits"), getattr(layer, f"{side}_axis")
                if bits < 16 and axis == "token":
                    _check_groups(head_dim, f"{side}_group_size", getattr(layer, f"{side}_group_size"), side)
        if self.rotate and head_dim & (head_dim - 1):
            raise ValueError(f"rotate needs a head_dim that is a power of two; got head_dim {head_dim}.")


def _check_one_of(name: str, value, allowed: tuple) -> None:
    # True == 1 and 2.0 == 2: neither is what was meant.
    if not any(value == x and type(value) is type(x) for x in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}.")


def _check_groups(head_dim: int, name: str, group_size: int, side: str) -> None:
    if head_dim % group_size == 0:
        return
    fits = [str(g) for g in GROUP_SIZES if head_dim % g == 0]
    advice = f"{name}={' or '.join(fits)}" if fits else f"{side}_bits=16"
    raise ValueError(
        f"head_dim must be divisible by {name}; got head_dim {head_dim} and {name} {group_size}: use {advice}."
    )


def quantized_length(length, config: KiviConfig):
    """Tokens of a sequence of `length` tokens that the schedule quantizes: whole blocks older than the window.

    Sequence positions `sink_length .. sink_length + quantized_length - 1` are the quantized ones. Works on ints,
    numpy and jax arrays.
    """
    older = length - config.sink_length - config.residual_length
    return (older + abs(older)) // 2 // BLOCK * BLOCK  # the positive part, in a form that suits all three
