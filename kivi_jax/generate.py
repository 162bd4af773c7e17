"""Text from a prompt."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kivi_jax import batches, prompts
from kivi_jax.cache import KVCache
from kivi_jax.config import KiviConfig
from kivi_jax.models import Llama, Tokenizer
from kivi_jax.progress import reporting
from kivi_jax.run import Run, check_count
from kivi_jax.sampling import sampler


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Attributes:
        tokens: int32 `[B, L]`, this turn's prompt and continuation, EOS included, from the left, then the pad id.
        lengths: int32 `[B]`, how many of them are not padding.
        text: the continuation without special tokens, a string for a prompt that is a string, else a list of strings;
            None without a tokenizer.
        cache: has taken in every token, the last one sampled too; None if the prompts took more than one batch.
        logits: float32 `[B, vocab_size]`, for the token that would come next; None with `cache`.
        full: bool `[B]`, sequences that ended only because they reached the capacity (with max_new_tokens=None).
    """

    tokens: jax.Array
    lengths: jax.Array
    text: str | list[str] | None
    cache: KVCache | None
    logits: jax.Array | None
    full: jax.Array


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
    batch_size: int | None = None,
    progress: bool | Callable[[int, int], None] = False,
) -> Generation:
    """Continues each prompt, with its keys and values in a quantized cache.

    More prompts than fit at once run in batches, those of similar length together, and come back in their order; what
    is drawn for a prompt is the same in any batch.

    A sequence's tokens do not depend on what else is in the batch, up to the rounding of differently shaped products.

    A second turn is `generate(params, more, cache=out.cache)`. It attends to what the cache holds, quantized, and
    exactly to itself. `generate(params, None, cache=out.cache, logits=out.logits)` goes on without a further prompt, as
    if the first call had not stopped. One prompt, many continuations: `num_return_sequences`; or, each with a question
    of its own, `generate(params, questions, cache=fork(out.cache, len(questions)))`.

    Args:
        params: the model, from `load` or `shard`.
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
        batch_size: sequences that run at once; None: as many as the free memory of the device has room for, by an
            estimate (all, on a device that does not say). With more than that there is no `cache` and no `logits` in
            what comes back: they would not fit.
        progress: True shows a bar in the terminal (standard error). A function is called as `progress(done, total)`
            every 64 steps, in tokens to generate; what an ended sequence had room for counts as done.

    Raises:
        ValueError: an argument is out of its range, or the tokens do not fit; before any work.
    """
    if batch_size is not None:
        check_count("batch_size", batch_size)
    run = Run(
        params, prompt, tokenizer=tokenizer, max_new_tokens=max_new_tokens, max_length=max_length, cache=cache,
        logits=logits, attention_mask=attention_mask, prefill_chunk=prefill_chunk, copies=num_return_sequences,
        sampler=sampler(temperature, top_k, top_p), eos_token_id=eos_token_id, pad_token_id=pad_token_id, key=key,
    )  # fmt: skip
    parts = batches.split(run, batch_size)
    new, ended, taken = [np.zeros(0, np.int32)] * len(run.rows), np.zeros(len(run.rows), bool), 0
    with reporting(progress, int(run.room.sum())) as report:
        for part, rows in parts:
            part.advance(report=report and (lambda done, taken=taken: report(taken + done)))
            tokens, counts, done = jax.device_get((part.state.tokens, part.state.counts, part.state.done))
            for n, row in enumerate(rows):
                new[row], ended[row] = tokens[n, : counts[n]], done[n]
            taken += int(run.room[rows].sum())
            if len(parts) > 1:
                part.state = None  # the next batch needs the memory
    logits, cache = (run.state.logits, run.state.cache) if len(parts) == 1 else (None, None)
    full = ~ended & (max_new_tokens is None)
    one = isinstance(prompt, str) and num_return_sequences == 1
    return generation(run.rows, new, logits, cache, full, run.pad_token_id, tokenizer, one)


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
