"""The small checkpoints of `tests/data`, written by another library, with what it computes for them."""

import functools
from pathlib import Path

import numpy as np

import kivi_jax

DATA = Path(__file__).parent / "data"
NAMES = tuple(sorted(path.name for path in (DATA / "checkpoints").iterdir()))
EXACT = kivi_jax.KiviConfig(key_bits=16, value_bits=16)


@functools.cache
def model(name: str, dtype: str = "float32"):
    """(params, tokenizer or None); loaded once."""
    return kivi_jax.load(DATA / "checkpoints" / name, dtype=dtype)


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / "checkpoints" / name / "golden.npz") as file:
        return dict(file)


@functools.cache
def default_model():
    """(params, tokenizer) of the default model, in float32."""
    return kivi_jax.load(dtype="float32")


@functools.cache
def default_golden() -> dict[str, np.ndarray]:
    with np.load(DATA / "smollm2_golden.npz") as file:
        return dict(file)
