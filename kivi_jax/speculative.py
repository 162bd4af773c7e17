"""Drafted tokens: verified all at once, and greedy decoding that is faster where drafts are right."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from kivi_jax import cache as kv
from kivi_jax import decoding, sharding
from kivi_jax.cache import KVCache
from kivi_jax.config import BLOCK, KiviConfig
from kivi_jax.generate import Generation, generation
from kivi_jax.models import Llama, Tokenizer
from kivi_jax.rewind import with_rewind
from kivi_jax.run import Run


class Verification(NamedTuple):
    """What `verify` returns.

    Attributes:
        logits: float32 `[B, K, vocab_size]`, after each drafted token; zero past a row's `counts`.
        cache: has taken in all drafted tokens; `crop` it to those that are accepted.
    """

    logits: jax.Array
    cache: KVCache


def verify(params: Llama, cache: KVCache, drafted_tokens: jax.Array, counts: jax.Array | None = None) -> Verification:
    """Runs K drafted tokens of each sequence at once, with the logits that decoding them one by one would give.

    Each token attends to the cache as a decoding step would: where a block falls due among the drafted tokens, those
    after it see it quantized, and those before it do not. Accept as many tokens as you like, none included:

        logits, ahead = verify(params, cache, drafted)
        cache = crop(ahead, lengths=cache.length + accepted)

    The cache is then as if no rejected token had ever been there. For that it needs `KiviConfig(rewind=K)`; a quantized
    cache with less comes back with a window widened to it. One that has it can be updated in place, by
    `jax.jit(verify, donate_argnames="cache")`.

    Logits differ from those of single steps by rounding alone, as differently shaped products do; a model with dynamic
    RoPE scaling, whose rotation depends on how far a piece reaches, is run a token at a time.

    Args:
        params: the model.
        cache: what comes before; not changed.
        drafted_tokens: integers `[B, K]`.
        counts: int32 `[B]`, how many of them each row has, the first ones; None: K. A row may have none.

    Raises:
        ValueError: shapes, ids or the cache do not fit, or (outside jit) the tokens are more than there is room for:
            under jit such a row takes in nothing, which its unchanged length tells.
    """
    decoding.check_cache(params, cache)
    drafted = jnp.asarray(drafted_tokens)
    batch, vocab_size = cache.batch_size, params.config.vocab_size
    if drafted.ndim != 2 or drafted.shape[0] != batch or drafted.size == 0 or drafted.dtype.kind not in "iu":
        raise ValueError(f"drafted_tokens must be integers [{batch}, K]; got {drafted.dtype} {list(drafted.shape)}.")
    counts = kv.fitting_counts(cache, drafted.shape[1], counts)
    if not isinstance(drafted, jax.core.Tracer) and not isinstance(counts, jax.core.Tracer):
        ids = np.asarray(drafted)[np.arange(drafted.shape[1]) < np.asarray(counts)[:, None]]
        if (outside := ids[(ids < 0) | (ids >= vocab_size)]).size:
            raise ValueError(f"drafted_tokens must be ids from 0 to {vocab_size - 1}; got {outside[0]}.")
    if cache.config.quantizes and cache.config.rewind < drafted.shape[1]:
        cache = with_rewind(cache, drafted.shape[1])
    graphdef, weights = nnx.split(params)
    drafted, counts = (sharding.replicated(x, params.mesh) for x in (drafted.astype(jnp.int32), counts))
    return _verify(graphdef, weights, drafted, counts, cache)


def speculate(
    params: Llama,
    prompt,
    draft: Callable[[np.ndarray], Sequence[int]],
    *,
    num_draft: int = 4,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int | None = 128,
    max_length: int | None = None,
    cache: KiviConfig | KVCache = KiviConfig(),  # noqa: B008, frozen
    attention_mask=None,
    prefill_chunk: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
) -> Generation:
    """Greedy `generate` with drafts: the tokens are those of `generate`, whatever `draft` proposes.

    In float32 that is so except where the two best logits are within 1e-3 of each other: a token verified beside others
    is computed by differently shaped products than one that is decoded alone, and either may come out best.

    Args:
        draft: called for each sequence that goes on as `draft(ids)` with its int32 ids `[L]`, this turn's prompt and
            continuation so far; returns the ids that it guesses come next, none too. It decides only how fast this is.
        num_draft: guesses that are verified at once; more are ignored.
        others: as for `generate`.

    Returns:
        As for `generate`; its cache has a config with a `rewind` of `num_draft + 1` or more, if it quantizes.

    Raises:
        ValueError: as for `generate`, or a guess is not an id of the vocabulary.
    """
    if isinstance(num_draft, bool) or not isinstance(num_draft, int) or num_draft < 1:
        raise ValueError(f"num_draft must be 1 or more; got {num_draft!r}.")
    run = Run(
        params, prompt, tokenizer=tokenizer, max_new_tokens=max_new_tokens, max_length=max_length, cache=cache,
        attention_mask=attention_mask, prefill_chunk=prefill_chunk, eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )  # fmt: skip
    logits, cache = run.prefill()
    if cache.config.quantizes and cache.config.rewind <= num_draft:
        cache = with_rewind(cache, num_draft + 1)
    batch, vocab_size = len(run.rows), params.config.vocab_size
    new: list[list[int]] = [[] for _ in range(batch)]
    done = np.zeros(batch, bool)
    while True:
        best = np.asarray(jnp.argmax(logits, axis=-1))
        pieces = np.zeros((batch, num_draft + 1), np.int32)
        counts = np.zeros(batch, np.int32)
        for row in np.flatnonzero(~done & ([len(x) for x in new] < run.room)):
            so_far = np.concatenate([run.rows[row], new[row], [best[row]]]).astype(np.int32)
            room = min(num_draft, int(run.room[row]) - len(new[row]) - 1)
            guesses = np.asarray(draft(so_far)).reshape(-1)[:room]
            if guesses.size and (guesses.dtype.kind not in "iu" or guesses.min() < 0 or guesses.max() >= vocab_size):
                raise ValueError(f"draft must return ids from 0 to {vocab_size - 1}; got {guesses.tolist()}.")
            counts[row] = 1 + guesses.size
            pieces[row, : counts[row]] = best[row], *guesses
        if not counts.any():
            break
        with sharding.on(run.mesh):
            kept, logits, cache = _accept(run.graphdef, run.weights, pieces, counts, run.eos, logits, cache)
        for row, n in enumerate(np.asarray(kept)):
            new[row] += pieces[row, :n].tolist()
            done[row] |= n > 0 and pieces[row, n - 1] in run.eos
    full = ~done & (max_new_tokens is None)
    new_rows = [np.asarray(row, np.int32) for row in new]
    one = isinstance(prompt, str)
    return generation(run.rows, new_rows, logits, cache, full, run.pad_token_id, tokenizer, one)


@functools.partial(jax.jit, static_argnames=("graphdef",))  # the cache is the caller's: not donated
def _verify(graphdef, weights, drafted, counts, cache):
    """The pieces between flushes, one after the other, each from the left of a piece of K tokens."""
    model = nnx.merge(graphdef, weights)
    config, num_tokens = cache.config, drafted.shape[1]
    index = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    take = lambda x, at: jnp.take_along_axis(x, jnp.clip(at, 0, num_tokens - 1), axis=1)
    scaling = model.config.rope_scaling
    dynamic = scaling is not None and scaling.rope_type == "dynamic"

    def body(state):
        taken, hidden, cache = state
        due = config.sink_length + config.residual_length + cache.quantized + BLOCK - cache.length
        part = jnp.minimum(counts - taken, 1 if dynamic else due)
        tokens = take(drafted, taken[:, None] + index)
        new, cache = decoding.extend(model, tokens, part, cache)
        at = index - taken[:, None]
        fresh = (at >= 0) & (at < part[:, None])
        hidden = jnp.where(fresh[..., None], take(new, at[..., None]), hidden)
        return taken + part, hidden, cache

    hidden = jnp.zeros((*drafted.shape, model.config.hidden_size), model.embed_tokens.embedding.dtype)
    state = jnp.zeros_like(counts), hidden, cache
    _, hidden, cache = lax.while_loop(lambda state: jnp.any(state[0] < counts), body, state)
    logits = jnp.where((index < counts[:, None])[..., None], model.logits(hidden), 0.0)
    return Verification(logits, cache)


@functools.partial(jax.jit, static_argnames=("graphdef",), donate_argnames=("logits", "cache"))
def _accept(graphdef, weights, pieces, counts, eos, logits, cache):
    """Verifies `pieces`, of which the first token is certain: how many of each are greedy's, up to an EOS, the logits
    after them, and the cache with them."""
    ahead = _verify(graphdef, weights, pieces, counts, cache)
    greedy = jnp.argmax(ahead.logits, axis=-1)
    ended = jnp.any(pieces[:, :-1, None] == eos, axis=-1)
    right = (pieces[:, 1:] == greedy[:, :-1]) & ~ended
    right &= jnp.arange(1, pieces.shape[1], dtype=jnp.int32) < counts[:, None]
    kept = jnp.where(counts > 0, 1 + jnp.cumprod(right.astype(jnp.int32), axis=1).sum(1), 0)
    last = jnp.take_along_axis(ahead.logits, jnp.maximum(kept - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = jnp.where((kept > 0)[:, None], last, logits)
    return kept, logits, kv.crop(ahead.cache, lengths=cache.length + kept)
