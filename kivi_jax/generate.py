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
from kivi_jax.cache import KVCache, fork
from kivi_jax.config import BLOCK, KiviConfig
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
        logits: float32 `[B, vocab_size]`, for the token that would come next.
        full: bool `[B]`, sequences that ended only because they reached the capacity (with max_new_tokens=None).
    """

    tokens: jax.Array
    lengths: jax.Array
    text: str | list[str] | None
    cache: KVCache
    logits: jax.Array
    full: jax.Array


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
    max_new_tokens: int | None = 128,
    max_length: int | None = None,
    cache: KiviConfig | KVCache = KiviConfig(),  # noqa: B008, frozen
    logits: jax.Array | None = None,
    attention_mask=None,
    prefill_chunk: int | None = None,
    num_return_sequences: int = 1,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    key: jax.Array | None = None,
) -> Generation:
    """Continues each prompt, with its keys and values in a quantized cache.

    A sequence's tokens do not depend on what else is in the batch, up to the rounding of differently shaped products.

    A second turn is `generate(params, more, cache=out.cache)`. It attends to what the cache holds, quantized, and
    exactly to itself. `generate(params, None, cache=out.cache, logits=out.logits)` goes on without a further prompt, as
    if the first call had not stopped. One prompt, many continuations: `num_return_sequences`; or, each with a question
    of its own, `generate(params, questions, cache=fork(out.cache, len(questions)))`.

    Args:
        params: the model, from `load`.
        prompt: a string or a list of strings (with a tokenizer), a sequence of ids, a ragged list of such sequences, or
            an integer array `[B, L]`. None: nothing more than `cache` holds, with `logits`.
        tokenizer: from `load`; needed for prompts of text, and for `text` in what comes back.
        max_new_tokens: of each sequence; None: until it ends or is full, which `full` then tells.
        max_length: tokens that each sequence of the cache has room for; None: what this call needs, or with a KVCache
            its own capacity.
        cache: how to quantize; or the cache of an earlier call, to continue after what it holds. That one is not
            changed, and can be continued again.
        logits: float32 `[B, vocab_size]`, in place of a prompt: those after the last token that `cache` holds, as
            `Generation.logits` has them.
        attention_mask: for a prompt `[B, L]`: 1 for the tokens of each row, 0 for padding on either side.
        prefill_chunk: takes in prompts this many tokens at a time, which bounds the memory that they need. Each chunk
            attends to the chunks before it through the quantized cache, and exactly to itself; in one shot (None) a
            prompt attends exactly to all of itself. On SmolLM2-135M that moves the next-token distributions after 512
            tokens by a KL of 0.08 (chunks of 512) to 0.15 (128 or fewer) at 2 bits and by 0.003 to 0.02 with
            `KiviConfig.accurate()`; with an unquantized cache only rounding differs (`bench/chunked_prefill.py`).
        num_return_sequences: continuations of each prompt, drawn after one prefill: row `b * n + i` is number i of
            prompt b.
        temperature: 0 takes the best token; above 0 tokens are drawn, with the logits divided by it.
        top_k, top_p: draw only from the k best tokens, from the best tokens that reach the probability p together.
        eos_token_id: ids that end a sequence; None: the checkpoint's; (): none.
        pad_token_id: fills `tokens` after the end; None: the checkpoint's, else its first EOS id, else 0.
        key: for drawing; None: `jax.random.key(0)`.

    Raises:
        ValueError: an argument is out of its range, or the tokens do not fit; before any work.
    """
    run = Run(
        params, prompt, tokenizer=tokenizer, max_new_tokens=max_new_tokens, max_length=max_length, cache=cache,
        logits=logits, attention_mask=attention_mask, prefill_chunk=prefill_chunk, copies=num_return_sequences,
        sampler=sampler(temperature, top_k, top_p), eos_token_id=eos_token_id, pad_token_id=pad_token_id, key=key,
    )  # fmt: skip
    run.advance()
    tokens, counts, done = jax.device_get((run.state.tokens, run.state.counts, run.state.done))
    new = [row[:count] for row, count in zip(tokens, counts, strict=True)]
    full = ~done & (max_new_tokens is None)
    one = isinstance(prompt, str) and num_return_sequences == 1
    return generation(run.rows, new, run.state.logits, run.state.cache, full, run.pad_token_id, tokenizer, one)


def generation(rows, new, logits, cache, full, pad_token_id, tokenizer, one) -> Generation:
    """The `Generation` of prompts `rows` and their continuations `new`, lists of ids; `one`: its text is a string."""
    rows = [np.concatenate([row, continuation]) for row, continuation in zip(rows, new, strict=True)]
    lengths = np.asarray([len(row) for row in rows], np.int32)
    text = None
    if tokenizer is not None:
        text = [tokenizer.decode(row) for row in new]
        text = text[0] if one else text
    tokens = prompts.pad(rows, int(lengths.max()), pad_token_id)
    return Generation(jnp.asarray(tokens), jnp.asarray(lengths), text, cache, logits, jnp.asarray(full))


class TextStream(Iterator[str]):
    """The pieces of text that `stream` gives, as they come.

    Attributes:
        tokens: the ids sampled so far.
        cache: the cache, which has taken in the prompt and `tokens`.
    """

    def __init__(self, run: "Run", tokenizer: Tokenizer):
        self.tokens: list[int] = []
        self._run = run
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
            if len(self.tokens) == self._run.most_new or bool(self._run.state.done[0]):
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
    max_new_tokens: int | None = 128,
    max_length: int | None = None,
    cache: KiviConfig | KVCache = KiviConfig(),  # noqa: B008, frozen
    prefill_chunk: int | None = None,
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
    run = Run(
        params, prompt, tokenizer=tokenizer, max_new_tokens=max_new_tokens, max_length=max_length, cache=cache,
        prefill_chunk=prefill_chunk, sampler=sampler(temperature, top_k, top_p), eos_token_id=eos_token_id, key=key,
    )  # fmt: skip
    if len(run.rows) != 1:
        raise ValueError(f"stream takes 1 prompt; got {len(run.rows)}.")
    return TextStream(run.start(), tokenizer)


class Run:
    """One call of `generate`, `stream` or `speculate`: checks its arguments, then holds the loop's state.

    Attributes:
        rows: the prompts, int32 `[L]` each.
        most_new: tokens that the sequence with most room may get.
    """

    def __init__(
        self, params: Llama, prompt, *, tokenizer, max_new_tokens, max_length, cache, sampler=None, eos_token_id=None,
        key=None, logits=None, attention_mask=None, prefill_chunk=None, pad_token_id=None, copies=1,
    ):  # fmt: skip
        config = params.config
        if isinstance(cache, KVCache):
            decoding.check_cache(params, cache)
        elif isinstance(cache, KiviConfig):
            cache.check_head_dim(config.head_dim)
        else:
            raise ValueError(f"cache must be a KiviConfig or a KVCache; got {type(cache).__name__}.")
        _check_count("num_return_sequences", copies)
        if max_new_tokens is not None:
            _check_count("max_new_tokens", max_new_tokens)
        if prefill_chunk is not None:
            _check_count("prefill_chunk", prefill_chunk)
        self.cache, self.logits, self.prefill_chunk, self.copies = cache, logits, prefill_chunk, copies
        if prompt is None:
            self.rows = self._nothing_more(config.vocab_size)
        elif logits is not None:
            raise ValueError("logits go with prompt=None, as those after a prompt are computed; got both.")
        else:
            self.rows = prompts.to_ids(
                prompt, tokenizer=tokenizer, attention_mask=attention_mask, vocab_size=config.vocab_size
            )
        self.longest = max(len(row) for row in self.rows)
        self.capacity, self.room = self._capacity(max_new_tokens, max_length)
        self.most_new = int(self.room.max())
        self.graphdef, self.weights = nnx.split(params)
        self.sampler = sampler
        eos_token_id = config.eos_token_id if eos_token_id is None else eos_token_id
        self.eos = np.asarray(_ids("eos_token_id", eos_token_id, config.vocab_size), np.int32)
        if pad_token_id is None:
            pad_token_id = next((i for i in (config.pad_token_id, *config.eos_token_id) if i is not None), 0)
        (self.pad_token_id,) = _ids("pad_token_id", pad_token_id, config.vocab_size)
        key = jax.random.key(0) if key is None else key
        self.rows = [row for row in self.rows for _ in range(copies)]
        self.room = np.repeat(self.room, copies).astype(np.int32)
        self.keys = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(len(self.rows)))
        self.state: _State | None = None

    def _nothing_more(self, vocab_size: int) -> list[np.ndarray]:
        if not isinstance(self.cache, KVCache) or self.logits is None:
            raise ValueError("prompt=None goes on from a KVCache and its logits; got no prompt without both of them.")
        shape = (self.cache.batch_size, vocab_size)
        if self.logits.shape != shape or self.logits.dtype != np.float32:
            got = f"{self.logits.dtype} {list(self.logits.shape)}"
            raise ValueError(f"logits must be float32 {list(shape)}; got {got}.")
        return [np.zeros(0, np.int32)] * self.cache.batch_size

    def _capacity(self, max_new_tokens: int | None, max_length: int | None) -> tuple[int, np.ndarray]:
        """The capacity to make or that there is, and the new tokens `[B]` that each sequence has room for."""
        held = np.zeros(len(self.rows), int)
        if isinstance(self.cache, KVCache):
            if self.cache.batch_size != len(self.rows):
                raise ValueError(f"the cache holds {self.cache.batch_size} sequences; got {len(self.rows)} prompts.")
            held = np.asarray(self.cache.length)
            if max_length is not None and max_length > self.cache.capacity:
                raise ValueError(f"max_length must be at most the cache's {self.cache.capacity}; got {max_length}.")
            limit = self.cache.capacity if max_length is None else max_length
        elif max_length is None:
            if max_new_tokens is None:
                raise ValueError("max_new_tokens=None needs a max_length, or a KVCache to fill; got neither.")
            limit = prompts.bucket(self.longest) + max_new_tokens
        else:
            limit = max_length
        room = limit - held - np.asarray([len(row) for row in self.rows])
        least = max_new_tokens or 1
        for n in np.flatnonzero(room < least):
            parts = f"{held[n]} tokens in the cache, " * bool(held[n]) + f"{len(self.rows[n])} in the prompt"
            raise ValueError(
                f"max_length must leave room for all tokens of sequence {n}, {parts} and {least} new ones; got {limit}."
            )
        return limit, room if max_new_tokens is None else np.full(len(self.rows), max_new_tokens)

    def prefill(self) -> tuple[jax.Array, KVCache]:
        """Takes in the prompts, in chunks if asked to: float32 `[B, vocab_size]` for the tokens that come next, and
        the cache, both with `copies` of each sequence and the caller's to donate."""
        logits, cache = self.logits, self.cache
        blocks = -(-self.capacity // BLOCK) * BLOCK
        chunk = self.prefill_chunk
        if chunk is None or chunk >= self.longest:
            chunk = prompts.bucket(self.longest) if self.longest else 1
            chunk = chunk if isinstance(cache, KVCache) else min(chunk, blocks)
        ours = False
        prompt_rows = self.rows[:: self.copies]
        for start in range(0, self.longest, chunk):
            rows = [row[start : start + chunk] for row in prompt_rows]
            tokens = prompts.pad(rows, chunk, self.pad_token_id)
            counts = np.asarray([len(row) for row in rows], np.int32)
            if isinstance(cache, KiviConfig):
                logits, cache = _begin(self.graphdef, self.weights, tokens, counts, config=cache, max_length=blocks)
            elif not ours:
                logits, cache = _continue(self.graphdef, self.weights, tokens, counts, cache=cache)
            else:
                logits, cache = _next_chunk(self.graphdef, self.weights, tokens, counts, logits, cache)
            ours = True
        if self.copies > 1:
            return jnp.repeat(logits, self.copies, axis=0), fork(cache, self.copies)
        return (logits, cache) if ours else jax.tree.map(jnp.copy, (logits, cache))

    def start(self) -> "Run":
        """Takes in the prompts and makes ready for the loop."""
        logits, cache = self.prefill()
        batch = len(self.rows)
        self.state = _State(
            step=jnp.zeros((), jnp.int32),
            tokens=jnp.full((batch, -(-self.most_new // BUFFER) * BUFFER), self.pad_token_id, jnp.int32),
            counts=jnp.zeros(batch, jnp.int32),
            done=jnp.zeros(batch, bool),
            logits=logits,
            cache=cache,
        )
        return self

    def advance(self, limit: int | None = None) -> None:
        """Samples until each sequence has `limit` tokens (None: all it has room for) or has ended."""
        if self.state is None:
            self.start()
        room = self.room if limit is None else np.minimum(self.room, np.int32(limit))
        self.state = _loop(self.graphdef, self.weights, self.state, self.sampler, self.keys, self.eos, room)


def _check_count(name: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be 1 or more; got {value!r}.")


def _ids(name: str, ids, vocab_size: int) -> tuple[int, ...]:
    ids = (ids,) if np.ndim(ids) == 0 else tuple(ids)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < vocab_size:
            raise ValueError(f"{name} must be ids from 0 to {vocab_size - 1}; got {i!r}.")
    return tuple(int(i) for i in ids)


def _last_logits(model, hidden, counts):
    """float32 `[B, vocab_size]` after the last token of each row; no other position's logits are computed."""
    last = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
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


@functools.partial(jax.jit, static_argnames=("graphdef",), donate_argnames=("logits", "cache"))
def _next_chunk(graphdef, weights, tokens, counts, logits, cache):
    """`_continue` in place; a sequence whose prompt has ended before keeps the logits after its last token."""
    new, cache = _continue(graphdef, weights, tokens, counts, cache=cache)
    return jnp.where((counts > 0)[:, None], new, logits), cache


@functools.partial(jax.jit, static_argnames=("graphdef",), donate_argnames=("state",))
def _loop(graphdef, weights, state: _State, sampler: Sampler, keys, eos, room) -> _State:
    model = nnx.merge(graphdef, weights)
    running = lambda state: ~state.done & (state.counts < room)

    def body(state: _State) -> _State:
        active = running(state)
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
            done=state.done | active & jnp.any(token[:, None] == eos, axis=1),
            logits=jnp.where(active[:, None], model.logits(hidden), state.logits),
            cache=cache,
        )

    return lax.while_loop(lambda state: jnp.any(running(state)), body, state)
