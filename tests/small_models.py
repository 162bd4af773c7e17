"""A decoder with random weights that compiles fast, and tokens compared up to near-ties."""

import functools

import jax.numpy as jnp
import numpy as np
from flax import nnx

import kivi_jax
from kivi_jax.models import Llama, LlamaConfig

VOCAB = 97
NEAR_TIE = 1e-3
"""The bound of the documentation: two best logits closer than this may come out in either order."""


@functools.cache
def small(head_dim: int = 32, dtype=jnp.float32, layers: int = 1) -> Llama:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        initializer_range=0.3,
        eos_token_id=(),
    )
    return Llama(config, dtype=dtype, rngs=nnx.Rngs(0))


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, count).tolist()


def continuations(out, prompts) -> list[list[int]]:
    """What was generated, row by row."""
    rows = zip(np.asarray(out.tokens), out.lengths.tolist(), prompts, strict=True)
    return [row[len(prompt) : length].tolist() for row, length, prompt in rows]


def assert_same_tokens(params, before, got, want, config):
    """Fails unless continuations `got` and `want` of the tokens `before` are one, or part at a near-tie."""
    assert len(got) == len(want)
    if got == want:
        return
    first = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    logits = kivi_jax.logits(params, [*before, *want[:first]], cache=config, chunk=1)[0, -1]
    second, best = np.sort(np.asarray(logits))[-2:]
    assert best - second <= NEAR_TIE, f"token {first} is {got[first]}, not {want[first]}, by {best - second:.1e}"
    assert {got[first], want[first]} == set(np.argsort(logits)[-2:].tolist())
