"""Pallas TPU kernels over the quantized cache. Importing this on a machine without a TPU is fine; running needs
`interpret=True` there."""

from kivi_jax.kernels.tpu.attend import FEATURES, attend
from kivi_jax.kernels.tpu.flush import flush
from kivi_jax.kernels.tpu.prompt import attend_prompt

__all__ = ["FEATURES", "FLUSH_SKIPS", "attend", "attend_prompt", "flush"]

FLUSH_SKIPS = True
"""Where no sequence is due, `flush` is a launch of one step."""
