"""What a cache costs a model: a text scored through it, beside the same model with nothing quantized."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kivi_jax import decoding, prompts
from kivi_jax.config import KiviConfig
from kivi_jax.models import Llama
from kivi_jax.scoring import take_in


@dataclasses.dataclass(frozen=True)
class Quality:
    """How close a model with a quantized cache stays to itself.

    Attributes:
        perplexity: of the text, through the cache.
        exact_perplexity: of the text, unquantized.
        kl: nats a token from the unquantized to the quantized next-token distribution, mean of `sum p log(p / q)`.
        top1: how often the two agree on the best token.
        bits_per_element: what the cache stores of a quantized number.
        tokens: how many were scored.
    """

    perplexity: float
    exact_perplexity: float
    kl: float
    top1: float
    bits_per_element: float
    tokens: int


class Evaluation:
    """Scores one text through caches, one after the other: `Evaluation(params, tokens)(config)` is a `Quality`.

    Every token goes through the cache by the path that decoding takes: a piece attends to the cache of all before it
    and exactly to itself, is written, and blocks are quantized as they fall due.

    Args:
        params: the model.
        tokens: int `[B, L]`, stretches of text.
        context: the first tokens of each, which are not scored.
        chunk: tokens of a piece. 1 is decoding step by step; up to `chunk - 1` more tokens are seen exactly otherwise.

    Raises:
        ValueError: `tokens` leave nothing to score, or `chunk` is less than 1.
    """

    def __init__(self, params: Llama, tokens, *, context: int = 512, chunk: int = 16):
        rows = prompts.to_ids(np.asarray(tokens), vocab_size=params.config.vocab_size)
        self._tokens = np.stack(rows)
        batch, length = self._tokens.shape
        if not 0 < context < length:
            raise ValueError(f"context must be between 1 and {length - 1} of the {length} tokens; got {context}.")
        if chunk < 1:
            raise ValueError(f"chunk must be 1 token or more; got {chunk}.")
        self._params, self._context, self._chunk = params, context, chunk
        self.tokens = batch * (length - context)
        self._graphdef, self._weights = nnx.split(params)
        counts = np.full(batch, length, np.int32)
        padded = np.pad(self._tokens, ((0, 0), (0, prompts.bucket(length) - length)))
        self._hidden = _exact_hidden(self._graphdef, self._weights, padded, counts)[:, :length]

    def __call__(self, cache: KiviConfig, *, progress: Callable[[int, int], None] | None = None) -> Quality:
        """Scores the text through a cache.

        Args:
            cache: how it is quantized.
            progress: called as `progress(done, total)`, in tokens of each stretch, from 0 on.
        """
        batch, length = self._tokens.shape
        state = decoding.init_cache(self._params, cache, batch, length)
        bits = state.bits_per_element
        total = np.zeros(4)
        for start in range(0, length, self._chunk):
            if progress:
                progress(start, length)
            piece = lambda x, at=start: _padded(x[:, at : at + self._chunk], self._chunk)
            # The token after each; a token is scored where the one after it is past the context.
            follows = np.arange(start + 1, start + self._chunk + 1)
            scored = (follows >= self._context) & (follows < length)
            counts = np.full(batch, min(self._chunk, length - start), np.int32)
            sums, state = _score_piece(
                self._graphdef,
                self._weights,
                piece(self._tokens),
                counts,
                piece(self._tokens[:, 1:]),
                scored,
                piece(self._hidden),
                state,
            )
            total += np.asarray(sums, np.float64)
        if progress:
            progress(length, length)
        loss, exact_loss, kl, agree = total / self.tokens
        return Quality(math.exp(loss), math.exp(exact_loss), float(kl), float(agree), bits, self.tokens)


def _padded(x, length: int):
    module = np if isinstance(x, np.ndarray) else jnp
    return module.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


@functools.partial(jax.jit, static_argnames="graphdef")
def _exact_hidden(graphdef, weights, tokens, counts):
    """The unquantized model's hidden states `[B, L, hidden_size]`: a hundredth of its logits."""
    model = nnx.merge(graphdef, weights)
    cache = decoding.init_cache(model, KiviConfig(key_bits=16, value_bits=16), *tokens.shape)
    return decoding.prefill(model, tokens, counts, cache)[0]


@functools.partial(jax.jit, static_argnames="graphdef", donate_argnames="cache")
def _score_piece(graphdef, weights, tokens, counts, targets, scored, exact_hidden, cache):
    """Sums float32 [4] over the scored tokens `[L]` (loss, unquantized loss, KL, agreement), and the cache after."""
    model = nnx.merge(graphdef, weights)
    hidden, cache = take_in(model, tokens, counts, cache)

    def score(hidden, exact_hidden):
        log_q, log_p = (jax.nn.log_softmax(model.logits(x)) for x in (hidden, exact_hidden))
        pick = lambda log: jnp.take_along_axis(log, targets[..., None], axis=-1)[..., 0]
        kl = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
        agree = (log_p.argmax(-1) == log_q.argmax(-1)).astype(jnp.float32)
        sums = [jnp.where(scored, x, 0.0).sum() for x in (-pick(log_q), -pick(log_p), kl, agree)]
        return jnp.stack(sums)

    # The output head is a fifth of a small model's work: not for tokens that are not scored.
    sums = jax.lax.cond(scored.any(), score, lambda *_: jnp.zeros(4, jnp.float32), hidden, exact_hidden)
    return sums, cache
