"""The key/value cache of large language models in 2 bits, in JAX."""

from kivi_jax.attention import attend, attend_prompt
from kivi_jax.cache import KVCache, LayerCache
from kivi_jax.config import KiviConfig

__all__ = ["KVCache", "KiviConfig", "LayerCache", "attend", "attend_prompt"]
