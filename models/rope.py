"""Rotary position embedding, with every frequency scaling that Llama-family checkpoints use.

Shapes: `B` batch, `L` new tokens, `D` head dim. Channel `i` of the first half is rotated with channel `i` of the second
half (the Hugging Face layout), both by the angle `position * frequency[i]`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

_FACTOR = ("factor",)
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = ("factor", "original_max_position_embeddings")
_YARN_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")

REQUIRED = {"linear": _FACTOR, "dynamic": _FACTOR, "llama3": _LLAMA3, "yarn": _YARN, "explicit": ("frequency_factors",)}
OPTIONAL = {"yarn": _YARN_OPTIONAL}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies of a checkpoint differ from `theta ** (-2 i / D)`; the names are Hugging Face's.

    Attributes:
        rope_type: "linear", "dynamic" (NTK), "llama3", "yarn", or "explicit": each frequency is divided by its own
            factor, as the `rope_freqs.weight` tensor of a GGUF file says.
        factor: how many times longer the context is made.
        low_freq_factor, high_freq_factor: llama3; wavelengths longer than `original_max_position_embeddings /
            low_freq_factor` are stretched by `factor`, those shorter than `.../ high_freq_factor` are kept.
        original_max_position_embeddings: llama3, yarn; the context length before it was extended.
        attention_factor: yarn; multiplies cos and sin. None: derived from `factor`, `mscale` and `mscale_all_dim`.
        beta_fast, beta_slow: yarn; rotations over the original context between which frequencies are blended.
        mscale, mscale_all_dim: yarn; see `attention_factor`.
        truncate: yarn; whether the bounds of the blend are rounded to whole channels.
        frequency_factors: explicit; D / 2 numbers.
    """

    rope_type: str
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None

    @classmethod
    def from_dict(cls, fields: dict) -> "RopeScaling | None":
        """Reads a `rope_scaling` entry of a config.json; None when it asks for plain frequencies.

        Raises:
            ValueError: an unknown type, a field that the type does not have or lacks, or a number out of range.
        """
        fields = {key: value for key, value in fields.items() if value is not None}
        rope_type, old_name = fields.pop("rope_type", None), fields.pop("type", None)
        if None not in (rope_type, old_name) and rope_type != old_name:
            raise ValueError(
                f"rope_scaling must give its type once; got rope_type {rope_type!r} and type {old_name!r}."
            )
        rope_type = rope_type or old_name or "default"
        if rope_type == "default":
            _check_fields(rope_type, fields, (), ())
            return None
        if rope_type not in REQUIRED:
            raise ValueError(
                f"rope_scaling must have rope_type default, {', '.join(REQUIRED)}; got {rope_type!r}, "
                "which is not supported."
            )
        _check_fields(rope_type, fields, REQUIRED[rope_type], OPTIONAL.get(rope_type, ()))
        if "frequency_factors" in fields:
            fields["frequency_factors"] = tuple(float(f) for f in fields["frequency_factors"])
        scaling = cls(rope_type, **fields)
        scaling._check_ranges()
        return scaling

    def to_dict(self) -> dict:
        """The fields that `rope_type` uses, in a form that JSON can hold and `from_dict` reads back."""
        names = REQUIRED[self.rope_type] + OPTIONAL.get(self.rope_type, ())
        values = {name: getattr(self, name) for name in names}
        return {"rope_type": self.rope_type} | {key: value for key, value in values.items() if value is not None}

    def _check_ranges(self):
        for name in ("factor", "low_freq_factor", "original_max_position_embeddings", "beta_slow"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"rope_scaling's {name} must be greater than 0; got {value!r}.")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            below, above = getattr(self, low), getattr(self, high)
            if above is not None and not above > below:
                raise ValueError(f"rope_scaling's {high} must be greater than its {low}; got {above!r} and {below!r}.")
        if self.frequency_factors is not None and not min(self.frequency_factors) > 0:
            raise ValueError(f"frequency_factors must be greater than 0; got {min(self.frequency_factors)!r}.")


def _check_fields(rope_type: str, fields: dict, required: tuple[str, ...], optional: tuple[str, ...]):
    if missing := [name for name in required if name not in fields]:
        raise ValueError(f"rope_scaling of type {rope_type} must have {', '.join(required)}; got no {missing[0]}.")
    if unknown := sorted(set(fields) - set(required) - set(optional)):
        known = ", ".join(required + optional) or "no other field"
        raise ValueError(f"rope_scaling of type {rope_type} has {known}; got {unknown[0]}, which is not supported.")


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """The angle by which a step of one position turns each channel pair, float64 [head_dim / 2].

    For the "dynamic" type these are the frequencies of a sequence within `max_position_embeddings`.
    """
    plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None or scaling.rope_type == "dynamic":
        return plain
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    if scaling.rope_type == "explicit":
        return plain / np.asarray(scaling.frequency_factors, np.float64)
    kept = _llama3_kept(plain, scaling) if scaling.rope_type == "llama3" else _yarn_kept(head_dim, theta, scaling)
    return plain * kept + plain / scaling.factor * (1 - kept)


def _llama3_kept(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Which share of each frequency llama3 keeps: 1 for short wavelengths, 0 for long ones, blended between."""
    rotations = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return np.clip(blend, 0, 1)


def _yarn_kept(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Which share of each frequency YaRN keeps (arXiv 2309.00071, section 3.2): a ramp over the channel pairs."""

    def channel(rotations):
        """The channel pair that turns `rotations` times over the original context."""
        span = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    return 1 - np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)


def attention_factor(scaling: RopeScaling | None) -> float:
    """The number that multiplies cos and sin: 1 except for YaRN (arXiv 2309.00071, section 3.4)."""
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def temperature(mscale):
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)


def rotation(
    positions: jax.Array, *, head_dim: int, theta: float, scaling: RopeScaling | None, max_position_embeddings: int
) -> tuple[jax.Array, jax.Array]:
    """Cos and sin of every position's angles.

    Args:
        positions: int [B, L].
        head_dim: channels of a head, even.
        theta: the base of the frequencies.
        scaling: how they are scaled, or None.
        max_position_embeddings: where the "dynamic" type starts to stretch: a row whose largest position reaches it
            gets the base of a sequence of that length, as transformers does for a single sequence.

    Returns:
        (cos, sin), each float32 [B, L, head_dim / 2].
    """
    if scaling is not None and scaling.rope_type == "dynamic":
        frequencies = _dynamic_frequencies(positions, head_dim, theta, scaling.factor, max_position_embeddings)
    else:
        frequencies = jnp.asarray(inverse_frequencies(head_dim, theta, scaling), jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    factor = np.float32(attention_factor(scaling))
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a model as one hashable function: `rotary(x [B, H, L, D], positions int [B, L])` gives x
    rotated, in its dtype. The fields are those of `rotation`."""

    head_dim: int
    theta: float
    scaling: RopeScaling | None
    max_position_embeddings: int

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return rotate(x, *self.angles(positions))

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cos and sin of every position's angles, as `rotation` gives them."""
        return rotation(positions, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


def _dynamic_frequencies(positions, head_dim, theta, factor, max_position_embeddings) -> jax.Array:
    """Frequencies of each row, float32 [B, 1, head_dim / 2]: the base grows with the row's own length."""
    beyond = jnp.maximum(positions.max(axis=-1, keepdims=True) + 1 - max_position_embeddings, 0).astype(jnp.float32)
    growth = 1 + beyond * np.float32(factor / max_position_embeddings)
    base = np.float32(theta) * growth ** np.float32(head_dim / (head_dim - 2))
    exponents = -np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return base[..., None] ** exponents


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the channel pairs of `x` [B, H, L, D] by the angles of `rotation`, in float32; same dtype out."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
