"""Models of real shapes with random weights, and caches that look filled: a step costs the same with any."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from kivi_jax import decoding, sharding
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
    "Llama-3.1-70B": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=500000.0,
        max_position_embeddings=131072,
    ),
}

CACHES = {
    # The 16-bit cache keeps no residual window beyond the block that is being filled: it does not need one.
    "bf16": KiviConfig(key_bits=16, value_bits=16, residual_length=0),
    "4": KiviConfig(key_bits=4, value_bits=4),
    "2": KiviConfig(),
}


def random_model(name: str, mesh: Mesh | None = None) -> Llama:
    """The model in bfloat16, made on the device, or each part of it on its device of the mesh."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(MODELS[name], dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))
    where = lambda path, x: None if mesh is None else sharding.parameter_sharding(path, x.shape, mesh)
    state = sharding.placed(state, lambda path, x: _noise(x.shape, x.dtype, where(path, x)))
    return sharding.with_mesh(nnx.merge(graphdef, state), mesh)


def filled_cache(model: Llama, config: KiviConfig, batch: int, max_length: int, length: int) -> KVCache:
    """A cache of `length` tokens in each sequence, of random codes and numbers."""
    cache = jax.eval_shape(lambda: decoding.init_cache(model, config, batch, max_length))
    where = lambda x: None if model.mesh is None else sharding.by_rank(x, model.mesh)
    layers = jax.tree.map(lambda x: _noise(x.shape, x.dtype, where(x)), cache.layers)
    full = jnp.full(batch, length, jnp.int32)
    cache = dataclasses.replace(cache, layers=layers, length=full, quantized=quantized_length(full, config))
    return cache if model.mesh is None else sharding.shard(cache, model.mesh)


def _noise(shape: tuple[int, ...], dtype, where: NamedSharding | None) -> jax.Array:
    return _maker(shape, dtype, where)()


@functools.cache
def _maker(shape: tuple[int, ...], dtype, where: NamedSharding | None):
    def make():
        bits = jax.random.bits(jax.random.key(0), shape, jnp.uint8)
        return bits if dtype == jnp.uint8 else ((bits.astype(jnp.float32) - 127.5) / 4096).astype(dtype)

    return jax.jit(make, out_shardings=where)


def cache_bytes(model: Llama, config: KiviConfig, batch: int, max_length: int) -> int:
    return jax.eval_shape(lambda: decoding.init_cache(model, config, batch, max_length)).nbytes
