"""The decoding loop compiled for a mesh, and what then goes between its devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kivi_jax import KiviConfig, decoding, sharding
from kivi_jax.models import Llama, LlamaConfig
from kivi_jax.run import State, loop
from kivi_jax.sampling import sampler


@functools.cache
def wide() -> Llama:
    """The shapes of a model that the kernels for GPUs and TPUs take."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
    )
    return nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


def lowered_loop(mesh, model: Llama, batch: int, max_length: int):
    """The decoding loop, lowered for a model of which only shapes count, and the bytes of a device's share of its
    cache."""
    graphdef, weights = nnx.split(model)
    at = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    flat = nnx.to_flat_state(weights)
    placed = [(path, x.replace(at(x, sharding.parameter_sharding(path, x.shape, mesh)))) for path, x in flat]
    state = jax.eval_shape(
        lambda: State(
            step=jnp.zeros((), jnp.int32),
            tokens=jnp.zeros((batch, 128), jnp.int32),
            counts=jnp.zeros(batch, jnp.int32),
            done=jnp.zeros(batch, bool),
            logits=jnp.zeros((batch, model.config.vocab_size), jnp.float32),
            cache=decoding.init_cache(model, KiviConfig(), batch, max_length),
        )
    )
    by_rank = lambda x: at(x, jax.sharding.NamedSharding(mesh, sharding.by_rank(x, mesh)))
    rest = jax.eval_shape(
        lambda: (jax.random.split(jax.random.key(0), batch), np.zeros(0, np.int32), jnp.zeros(batch, jnp.int32))
    )
    with sharding.on(mesh):
        state, rest = jax.tree.map(by_rank, (state, rest))
        low = loop.lower(graphdef, nnx.from_flat_state(placed), state, sampler(0.0), *rest)
    return low, state.cache.nbytes // mesh.size


def assert_only_activations_travel(compiled, model: Llama, batch: int, share: int):
    """Nothing larger than the hidden states or logits of a step goes between devices, and the cache is updated in
    place."""
    exchange = r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    found = re.findall(exchange, compiled.as_text())
    shapes = [shape.split(",") for text in found for shape in re.findall(r"\[([\d,]*)\]", text)]
    assert len(found) >= 2 * len(model.layers)
    largest = max(np.prod([int(n) for n in shape if n]) for shape in shapes)
    assert largest <= batch * max(model.config.hidden_size, model.config.vocab_size)
    assert compiled.memory_analysis().alias_size_in_bytes >= share
