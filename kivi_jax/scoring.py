"""Logits of every position of a text, exactly or through the cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kivi_jax import decoding, prompts
from kivi_jax.cache import KVCache
from kivi_jax.config import KiviConfig
from kivi_jax.models import Llama


def logits(
    params: Llama,
    tokens,
    *,
    cache: KiviConfig = KiviConfig(),  # noqa: B008, frozen
    chunk: int | None = None,
) -> jax.Array:
    """The logits after each token.

    Args:
        params: the model.
        tokens: ids: a sequence, a list of sequences, or an integer array `[B, L]`.
        cache: how the cache is quantized that a `chunk` attends to.
        chunk: None: one exact prefill, in which nothing is attended to through the cache. Else the text goes in `chunk`
            tokens at a time, each of which attends to the cache of all before it.

    Returns:
        float32 `[B, L, vocab_size]`; zero after the end of a shorter sequence.

    Raises:
        ValueError: ids outside the vocabulary, an empty sequence, or a chunk of less than 1.
    """
    rows = prompts.to_ids(tokens, vocab_size=params.config.vocab_size)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be 1 token or more; got {chunk!r}.")
    if chunk is not None:
        cache.check_head_dim(params.config.head_dim)
    graphdef, weights = nnx.split(params)
    counts = np.asarray([len(row) for row in rows], np.int32)
    longest = int(counts.max())
    if chunk is None:
        padded = prompts.pad(rows, prompts.bucket(longest), 0)
        return _exact(graphdef, weights, padded, counts)[:, :longest]
    padded = prompts.pad(rows, -(-longest // chunk) * chunk, 0)
    state = decoding.init_cache(params, cache, len(rows), padded.shape[1])
    parts = []
    for start in range(0, longest, chunk):
        left = np.clip(counts - start, 0, chunk).astype(np.int32)
        part, state = _extend(graphdef, weights, padded[:, start : start + chunk], left, state)
        parts.append(part)
    return jnp.concatenate(parts, axis=1)[:, :longest]


def _masked(model, hidden, counts):
    valid = jnp.arange(hidden.shape[1])[None] < counts[:, None]
    return jnp.where(valid[..., None], model.logits(hidden), 0.0)


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _exact(graphdef, weights, tokens, counts):
    model = nnx.merge(graphdef, weights)
    unquantized = KiviConfig(key_bits=16, value_bits=16)
    cache = decoding.init_cache(model, unquantized, *tokens.shape)
    hidden, _ = decoding.prefill(model, tokens, counts, cache)
    return _masked(model, hidden, counts)


@functools.partial(jax.jit, static_argnames=("graphdef",), donate_argnames=("cache",))
def _extend(graphdef, weights, tokens, counts, cache):
    model = nnx.merge(graphdef, weights)
    hidden, cache = take_in(model, tokens, counts, cache)
    return _masked(model, hidden, counts), cache


def take_in(model: Llama, tokens: jax.Array, counts: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
    """Runs a piece int32 `[B, L]` of each sequence through the cache: the hidden states `[B, L, hidden_size]`, and the
    cache with the piece's first `counts` int32 `[B]` tokens. A single token is the decoding step, as generation takes
    it."""
    if tokens.shape[1] > 1:
        return decoding.extend(model, tokens, counts, cache)
    hidden, cache = decoding.decode_step(model, tokens[:, 0], counts > 0, cache)
    return hidden[:, None], cache
