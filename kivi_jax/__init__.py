"""The key/value cache of large language models in 2 bits, in JAX."""

from kivi_jax.attention import attend, attend_prompt
from kivi_jax.cache import KVCache, LayerCache, crop, fork, gather
from kivi_jax.cache_checkpoint import load_cache, save_cache
from kivi_jax.capacity import concatenate, resize
from kivi_jax.checkpoint import load, save
from kivi_jax.config import KiviConfig
from kivi_jax.finite import check_finite
from kivi_jax.generate import Generation, generate, stream
from kivi_jax.rewind import with_rewind
from kivi_jax.scoring import logits
from kivi_jax.sharding import shard
from kivi_jax.speculative import Verification, speculate, verify

__all__ = [
    "Generation",
    "KVCache",
    "KiviConfig",
    "LayerCache",
    "Verification",
    "attend",
    "attend_prompt",
    "check_finite",
    "concatenate",
    "crop",
    "fork",
    "gather",
    "generate",
    "load",
    "load_cache",
    "logits",
    "resize",
    "save",
    "save_cache",
    "shard",
    "speculate",
    "stream",
    "verify",
    "with_rewind",
]
