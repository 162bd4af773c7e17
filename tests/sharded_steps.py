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


def compiled_loop(mesh, max_length: int):
    """The decoding loop of `wide` for 4 sequences, compiled for a mesh, and the bytes of one device's part of the keys'
    codes of a layer."""
    model, batch = sharding.with_mesh(nnx.merge(*nnx.split(wide())), mesh), 4
    at = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    graphdef, weights = nnx.split(model)
    weights = sharding.placed(weights, lambda path, x: at(x, sharding.parameter_sharding(path, x.shape, mesh)))
    zeros = lambda *shape: jnp.zeros(shape, jnp.int32)

    def arguments():
        state = State(
            step=zeros(),
            tokens=zeros(batch, 128),
            counts=zeros(batch),
            done=zeros(batch) > 0,
            logits=jnp.zeros((batch, model.config.vocab_size), jnp.float32),
            cache=decoding.init_cache(model, KiviConfig(), batch, max_length),
        )
        return state, (jax.random.split(jax.random.key(0), batch), zeros(0), zeros(batch))

    state, rest = jax.tree.map(lambda x: at(x, sharding.by_rank(x, mesh)), jax.eval_shape(arguments))
    codes = state.cache.layers[0].key_codes
    return loop.lower(graphdef, weights, state, sampler(0.0), *rest).compile(), codes.size // mesh.size


def assert_only_activations_travel(compiled):
    """Nothing larger than the hidden states or logits of a step goes between devices."""
    exchange = r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    found = re.findall(exchange, compiled.as_text())
    shapes = [shape.split(",") for text in found for shape in re.findall(r"\[([\d,]*)\]", text)]
    config = wide().config
    assert len(found) >= 2 * config.num_hidden_layers
    largest = max(np.prod([int(n) for n in shape if n]) for shape in shapes)
    assert largest <= 4 * max(config.hidden_size, config.vocab_size)


def assert_runs_the_kernels_in_place(mesh):
    """On GPUs and TPUs: also, with twice the rows a step needs no more memory beside them."""
    (small, codes), (large, more) = (compiled_loop(mesh, tokens) for tokens in (8192, 16384))
    assert_only_activations_travel(large)
    assert large.as_text().count("kivi_decode") >= wide().config.num_hidden_layers
    temporaries = [compiled.memory_analysis().temp_size_in_bytes for compiled in (small, large)]
    assert temporaries[1] - temporaries[0] < (more - codes) / 2
