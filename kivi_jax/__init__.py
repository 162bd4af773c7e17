"""The key/value cache of large language models in 2 bits, in JAX."""

from kivi_jax.attention import attend, attend_prompt
from kivi_jax.cache import KVCache, LayerCache
from kivi_jax.checkpoint import load, save
from kivi_jax.config import KiviConfig
from kivi_jax.generate import Generation, generate, stream
from kivi_jax.scoring import logits

__all__ = [
    "Generation",
    "KVCache",
    "KiviConfig",
    "LayerCache",
    "attend",
    "attend_prompt",
    "generate",
    "load",
    "logits",
    "save",
    "stream",
]
