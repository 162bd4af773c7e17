"""Generation compiled for a mesh, and what then goes between its devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kivi_jax import KiviConfig, decoding, sharding
from kivi_jax.models import Llama, LlamaConfig
from kivi_jax.run import State, begin, loop, next_chunk
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


class Steps:
    """What generation does with `wide` for 4 sequences, compiled for a mesh."""

    def __init__(self, mesh, max_length: int):
        self.mesh, self.batch, self.max_length = mesh, 4, max_length
        self.model = sharding.with_mesh(nnx.merge(*nnx.split(wide())), mesh)
        at = lambda path, x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding.parameter_sharding(path, x.shape, mesh)
        )
        graphdef, weights = nnx.split(self.model)
        self.parameters = graphdef, sharding.placed(weights, at)

    def loop(self):
        zeros = lambda *shape: jnp.zeros(shape, jnp.int32)

        def arguments():
            logits, cache = self._state()
            state = State(zeros(), zeros(self.batch, 128), zeros(self.batch), zeros(self.batch) > 0, logits, cache)
            return state, (jax.random.split(jax.random.key(0), self.batch), zeros(0), zeros(self.batch))

        state, rest = self._laid_out(arguments)
        return loop.lower(*self.parameters, state, sampler(0.0), *rest).compile()

    def prompt(self, tokens: int):
        prompt, _ = self._laid_out(lambda: self._piece(tokens))
        return begin.lower(*self.parameters, *prompt, config=KiviConfig(), max_length=self.max_length).compile()

    def piece(self, tokens: int):
        """A further piece of each sequence."""
        piece, state = self._laid_out(lambda: self._piece(tokens))
        return next_chunk.lower(*self.parameters, *piece, *state).compile()

    @property
    def codes(self) -> int:
        """Bytes of a device's part of the keys' codes of a layer."""
        return jax.eval_shape(self._state)[1].layers[0].key_codes.size // self.mesh.size

    def _state(self):
        cache = decoding.init_cache(self.model, KiviConfig(), self.batch, self.max_length)
        return jnp.zeros((self.batch, self.model.config.vocab_size), jnp.float32), cache

    def _piece(self, tokens):
        return (jnp.zeros((self.batch, tokens), jnp.int32), jnp.zeros(self.batch, jnp.int32)), self._state()

    def _laid_out(self, make):
        at = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.by_rank(x, self.mesh))
        return jax.tree.map(at, jax.eval_shape(make))


def assert_only_activations_travel(compiled, tokens: int = 1):
    """Nothing larger than hidden states or logits of so many tokens of each sequence goes between devices."""
    exchange = r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    found = re.findall(exchange, compiled.as_text())
    shapes = [shape.split(",") for text in found for shape in re.findall(r"\[([\d,]*)\]", text)]
    config = wide().config
    assert len(found) >= 2 * config.num_hidden_layers
    largest = max(np.prod([int(n) for n in shape if n]) for shape in shapes)
    assert largest <= 4 * tokens * max(config.hidden_size, config.vocab_size)


def assert_runs_the_kernels_in_place(mesh):
    """On GPUs and TPUs: on each device the kernels run, and with twice the rows a step needs no more memory beside
    them."""
    small, large = Steps(mesh, 8192), Steps(mesh, 16384)
    loops = small.loop(), large.loop()
    temporaries = [compiled.memory_analysis().temp_size_in_bytes for compiled in loops]
    assert temporaries[1] - temporaries[0] < (large.codes - small.codes) / 2
    for compiled, tokens, kernels in (
        (loops[1], 1, ("kivi_decode", "kivi_flush")),
        (large.piece(8), 8, ("kivi_decode",)),
        (large.prompt(256), 256, ()),
    ):
        assert_only_activations_travel(compiled, tokens)
        for kernel in kernels:
            assert compiled.as_text().count(kernel) >= wide().config.num_hidden_layers
