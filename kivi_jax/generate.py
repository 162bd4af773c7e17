"""Text from a prompt: prefill, then one compiled loop that decodes and samples."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from kivi_jax import decoding, prompts
from kivi_jax.cache import KVCache
from kivi_jax.config import KiviConfig
from kivi_jax.models import Llama, Tokenizer
from kivi_jax.sampling import Sampler, sampler

BUFFER = 128  # the loop's token buffer is a multiple of this, so that max_new_tokens rarely recompiles


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Attributes:
        tokens: int32 `[B, L]`, this turn's prompt and continuation, EOS included, from the left, then the pad id.
        lengths: int32 `[B]`, how many of them are not padding.
        text: the continuation without special tokens, a string for a prompt that is a string, else a list of strings;
            None without a tokenizer.
        cache: has taken in every token, the last one sampled too.
    """

    tokens: jax.Array
    lengths: jax.Array
    text: str | list[str] | None
    cache: KVCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """The loop's state, donated from one call to the next.

    Attributes:
        step: int32, tokens sampled so far of the sequence that has most.
        tokens: int32 `[B, N]`, what was sampled; past `counts` the pad id.
        counts: int32 `[B]`, how many were sampled of each sequence.
        done: bool `[B]`, whether a sequence has ended.
        logits: float32 `[B, vocab_size]` for the token that comes next.
        cache: has taken in the prompt and `tokens`.
    """

    step: jax.Array
    tokens: jax.Array
    counts: jax.Array
    done: jax.Array
    logits: jax.Array
    cache: KVCache


def generate(
    params: Llama,
    prompt,
    *,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = 128,
    max_length: int | None = None,
    cache: KiviConfig | KVCache = KiviConfig(),  # noqa: B008, frozen
    attention_mask=None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    key: jax.Array | None = None,
) -> Generation:
    """Continues each prompt, with its keys and values in a quantized cache.

    A sequence's tokens do not depend on what else is in the batch, up to the rounding of differently shaped products.

    Args:
        params: the model, from `load`.
        prompt: a string or a list of strings (with a tokenizer), a sequence of ids, a ragged list of such sequences, or
            an integer array `[B, L]`.
        tokenizer: from `load`; needed for prompts of text, and for `text` in what comes back.
        max_new_tokens: of each sequence.
        max_length: tokens that each sequence of the cache has room for; None: what this call needs, or with a KVCache
            its own capacity.
        cache: how to quantize; or the cache of an earlier call, to continue after what it holds. That one is not
            changed, and can be continued again.
        attention_mask: for a prompt `[B, L]`: 1 for the tokens of each row, 0 for padding on either side.
        temperature: 0 takes the best token; above 0 tokens are drawn, with the logits divided by it.
        top_k, top_p: draw only from the k best tokens, from the best tokens that reach the probability p together.
        eos_token_id: ids that end a sequence; None: the checkpoint's; (): none.
        pad_token_id: fills `tokens` after the end; None: the checkpoint's, else its first EOS id, else 0.
        key: for drawing; None: `jax.random.key(0)`.

    Raises:
        ValueError: an argument is out of its range, or the tokens do not fit; before any work.
    """
    run = _Run(
        params, prompt, tokenizer, max_new_tokens, max_length, cache, attention_mask,
        sampler(temperature, top_k, top_p), eos_token_id, pad_token_id, key,
    )  # fmt: skip
    run.advance(max_new_tokens)
    new = run.sampled()
    rows = [np.concatenate([row, continuation]) for row, continuation in zip(run.rows, new, strict=True)]
    lengths = np.asarray([len(row) for row in rows], np.int32)
    text = None
    if tokenizer is not None:
        text = [tokenizer.decode(row) for row in new]
        text = text[0] if isinstance(prompt, str) else text
    tokens = prompts.pad(rows, int(lengths.max()), run.pad_token_id)
    return Generation(jnp.asarray(tokens), jnp.asarray(lengths), text, run.state.cache)


class TextStream(Iterator[str]):
    """The pieces of text that `stream` gives, as they come.

    Attributes:
        tokens: the ids sampled so far.
        cache: the cache, which has taken in the prompt and `tokens`.
    """

    def __init__(self, run: "_Run", tokenizer: Tokenizer, max_new_tokens: int):
        self.tokens: list[int] = []
        self._run = run
        self._max_new_tokens = max_new_tokens
        self._decoder = tokenizer.stream_decoder()
        self._ended = False

    @property
    def cache(self) -> KVCache:
        return self._run.state.cache

    def __next__(self) -> str:
        while not self._ended:
            self._run.advance(len(self.tokens) + 1)
            self.tokens.append(int(self._run.state.tokens[0, len(self.tokens)]))
            piece = self._decoder.step(self.tokens[-1])
            if len(self.tokens) == self._max_new_tokens or bool(self._run.state.done[0]):
                self._ended = True
                piece += self._decoder.flush()
            if piece:
                return piece
        raise StopIteration


def stream(
    params: Llama,
    prompt,
    *,
    tokenizer: Tokenizer,
    max_new_tokens: int = 128,
    max_length: int | None = None,
    cache: KiviConfig | KVCache = KiviConfig(),  # noqa: B008, frozen
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    key: jax.Array | None = None,
) -> TextStream:
    """`generate` for one prompt, giving its text piece by piece; joined, the pieces are `generate`'s text.

    Arguments and errors are those of `generate`; `prompt` is a string or a sequence of ids.
    """
    if tokenizer is None:
        raise ValueError("stream gives text and needs a tokenizer; got tokenizer=None.")
    run = _Run(
        params, prompt, tokenizer, max_new_tokens, max_length, cache, None,
        sampler(temperature, top_k, top_p), eos_token_id, None, key,
    )  # fmt: skip
    if len(run.rows) != 1:
        raise ValueError(f"stream takes 1 prompt; got {len(run.rows)}.")
    return TextStream(run.start(), tokenizer, max_new_tokens)


class _Run:
    """One call of `generate` or `stream`: checks its arguments, then holds the state between the loop's calls."""

    def __init__(
        self, params, prompt, tokenizer, max_new_tokens, max_length, cache, attention_mask,
        sampler, eos_token_id, pad_token_id, key,
    ):  # fmt: skip
        config = params.config
        self.rows = prompts.to_ids(
            prompt, tokenizer=tokenizer, attention_mask=attention_mask, vocab_size=config.vocab_size
        )
        if isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be 1 or more; got {max_new_tokens!r}.")
        self.graphdef, self.weights = nnx.split(params)
        self.max_new_tokens = max_new_tokens
        self.sampler = sampler
        eos_token_id = config.eos_token_id if eos_token_id is None else eos_token_id
        self.eos = _ids("eos_token_id", eos_token_id, config.vocab_size)
        if pad_token_id is None:
            pad_token_id = next((i for i in (config.pad_token_id, *config.eos_token_id) if i is not None), 0)
        (self.pad_token_id,) = _ids("pad_token_id", pad_token_id, config.vocab_size)
        key = jax.random.key(0) if key is None else key
        self.keys = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(len(self.rows)))
        self.longest = max(len(row) for row in self.rows)
        self.cache = cache
        self.capacity = self._capacity(max_length, config.head_dim)
        self.state: _State | None = None

    def _capacity(self, max_length: int | None, head_dim: int) -> int:
        """The capacity to make or that there is, checked against what is to come."""
        held = np.zeros(len(self.rows), int)
        if isinstance(self.cache, KVCache):
            if self.cache.batch_size != len(self.rows):
                raise ValueError(f"the cache holds {self.cache.batch_size} sequences; got {len(self.rows)} prompts.")
            held = np.asarray(self.cache.length)
            if max_length is not None and max_length > self.cache.capacity:
                raise ValueError(f"max_length must be at most the cache's {self.cache.capacity}; got {max_length}.")
            limit = self.cache.capacity if max_length is None else max_length
        elif isinstance(self.cache, KiviConfig):
            self.cache.check_head_dim(head_dim)
            limit = prompts.bucket(self.longest) + self.max_new_tokens if max_length is None else max_length
        else:
            raise ValueError(f"cache must be a KiviConfig or a KVCache; got {type(self.cache).__name__}.")
        for n, (row, before) in enumerate(zip(self.rows, held, strict=True)):
            if before + len(row) + self.max_new_tokens > limit:
                parts = f"{before} tokens in the cache, " * bool(before) + f"{len(row)} in the prompt"
                raise ValueError(
                    f"max_length must leave room for all tokens of sequence {n}, {parts} and {self.max_new_tokens} "
                    f"new ones; got {limit}."
                )
        return limit

    def start(self) -> "_Run":
        """Takes in the prompts."""
        if isinstance(self.cache, KVCache):
            length = prompts.bucket(self.longest)
            begin = functools.partial(_continue, cache=self.cache)
        else:
            blocks = -(-self.capacity // 128) * 128
            length = min(prompts.bucket(self.longest), blocks)
            begin = functools.partial(_begin, config=self.cache, max_length=blocks)
        tokens = prompts.pad(self.rows, length, self.pad_token_id)
        counts = np.asarray([len(row) for row in self.rows], np.int32)
        logits, cache = begin(self.graphdef, self.weights, tokens, counts)
        batch = len(self.rows)
        self.state = _State(
            step=jnp.zeros((), jnp.int32),
            tokens=jnp.full((batch, -(-self.max_new_tokens // BUFFER) * BUFFER), self.pad_token_id, jnp.int32),
            counts=jnp.zeros(batch, jnp.int32),
            done=jnp.zeros(batch, bool),
            logits=logits,
            cache=cache,
        )
        return self

    def advance(self, limit: int) -> None:
        """Samples until each sequence has `limit` tokens or has ended."""
        if self.state is None:
            self.start()
        eos = np.asarray(self.eos, np.int32)
        self.state = _loop(self.graphdef, self.weights, self.state, self.sampler, self.keys, eos, np.int32(limit))

    def sampled(self) -> list[np.ndarray]:
        """What was sampled of each sequence."""
        tokens, counts = jax.device_get((self.state.tokens, self.state.counts))
        return [row[:count] for row, count in zip(tokens, counts, strict=True)]


def _ids(name: str, ids, vocab_size: int) -> tuple[int, ...]:
    ids = (ids,) if np.ndim(ids) == 0 else tuple(ids)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < vocab_size:
            raise ValueError(f"{name} must be ids from 0 to {vocab_size - 1}; got {i!r}.")
    return tuple(int(i) for i in ids)


def _last_logits(model, hidden, counts):
    """float32 `[B, vocab_size]` after the last token of each row; no other position's logits are computed."""
    last = jnp.take_along_axis(hidden, (counts - 1)[:, None, None], axis=1)[:, 0]
    return model.logits(last)


@functools.partial(jax.jit, static_argnames=("graphdef", "config", "max_length"))
def _begin(graphdef, weights, tokens, counts, *, config, max_length):
    model = nnx.merge(graphdef, weights)
    cache = decoding.init_cache(model, config, tokens.shape[0], max_length)
    hidden, cache = decoding.prefill(model, tokens, counts, cache)
    return _last_logits(model, hidden, counts), cache


@functools.partial(jax.jit, static_argnames=("graphdef",))  # the cache is the caller's: not donated
def _continue(graphdef, weights, tokens, counts, *, cache):
    model = nnx.merge(graphdef, weights)
    hidden, cache = decoding.extend(model, tokens, counts, cache)
    return _last_logits(model, hidden, counts), cache


@functools.partial(jax.jit, static_argnames=("graphdef",), donate_argnames=("state",))
def _loop(graphdef, weights, state: _State, sampler: Sampler, keys, eos, limit) -> _State:
    model = nnx.merge(graphdef, weights)

    def body(state: _State) -> _State:
        active = ~state.done
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, state.step)
        token = sampler(state.logits, step_keys)
        pad = lax.dynamic_slice_in_dim(state.tokens, state.step, 1, axis=1)[:, 0]
        tokens = lax.dynamic_update_slice_in_dim(
            state.tokens, jnp.where(active, token, pad)[:, None], state.step, axis=1
        )
        hidden, cache = decoding.decode_step(model, token, active, state.cache)
        return _State(
            step=state.step + 1,
            tokens=tokens,
            counts=state.counts + active.astype(jnp.int32),
            done=state.done | jnp.any(token[:, None] == eos, axis=1),
            logits=model.logits(hidden),
            cache=cache,
        )

    return lax.while_loop(lambda state: (state.step < limit) & ~jnp.all(state.done), body, state)
