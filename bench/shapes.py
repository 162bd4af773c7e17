"""Models of real shapes with random weights, and caches that look filled: a step costs the same with any."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from kivi_jax import decoding
from kivi_jax.cache import KVCache
from kivi_jax.config import KiviConfig, quantized_length
from kivi_jax.models import Llama, LlamaConfig

MODELS = {
    "Llama-3.1-8B": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=500000.0,
        max_position_embeddings=131072,
    ),
    "Llama-2-7B": LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=4096,
    ),
}

CACHES = {
    # The 16-bit cache keeps no residual window beyond the block that is being filled: it does not need one.
    "bf16": KiviConfig(key_bits=16, value_bits=16, residual_length=0),
    "4": KiviConfig(key_bits=4, value_bits=4),
    "2": KiviConfig(),
}


def random_model(name: str) -> Llama:
    """The model in bfloat16, made on the device."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(MODELS[name], dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, jax.tree.map(lambda x: _noise(x.shape, x.dtype), state))


def filled_cache(model: Llama, config: KiviConfig, batch: int, max_length: int, length: int) -> KVCache:
    """A cache of `length` tokens in each sequence, of random codes and numbers."""
    cache = jax.eval_shape(lambda: decoding.init_cache(model, config, batch, max_length))
    layers = jax.tree.map(lambda x: _noise(x.shape, x.dtype), cache.layers)
    full = jnp.full(batch, length, jnp.int32)
    return dataclasses.replace(cache, layers=layers, length=full, quantized=quantized_length(full, config))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _noise(shape: tuple[int, ...], dtype) -> jax.Array:
    bits = jax.random.bits(jax.random.key(0), shape, jnp.uint8)
    return bits if dtype == jnp.uint8 else ((bits.astype(jnp.float32) - 127.5) / 4096).astype(dtype)


def cache_bytes(model: Llama, config: KiviConfig, batch: int, max_length: int) -> int:
    return jax.eval_shape(lambda: decoding.init_cache(model, config, batch, max_length)).nbytes
