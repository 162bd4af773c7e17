"""The work behind `generate`: arguments checked, prompts taken in, and one compiled loop that decodes and samples."""

import copy
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from kivi_jax import decoding, prompts, sharding
from kivi_jax.cache import KVCache, fork
from kivi_jax.config import BLOCK, KiviConfig
from kivi_jax.models import Llama
from kivi_jax.sampling import Sampler

BUFFER = 128  # the loop's token buffer is a multiple of this, so that max_new_tokens rarely recompiles
REPORT = 64  # steps between two reports of progress
PREFILL_TOKENS = 8192
"""Tokens of prompts that are taken in together, padding counted: enough to keep a device busy, and few enough that
their activations, and the cache of these prompts alone, are small beside a model."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
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


class Run:
    """One call of `generate`, `stream` or `speculate`: checks its arguments, then holds the loop's state.

    Attributes:
        rows: the prompts, int32 `[L]` each, `copies` of each one after the other.
        room: int32 `[B]`, the new tokens that each sequence has room for.
        most_new: tokens that the sequence with most room may get.
        capacity: tokens of each sequence that the cache is to hold; `fits_prompt`: by the longest prompt.
        mesh: what the model lies on; None: one device.
    """

    def __init__(
        self, params: Llama, prompt, *, tokenizer, max_new_tokens, max_length, cache, sampler=None, eos_token_id=None,
        key=None, logits=None, attention_mask=None, prefill_chunk=None, pad_token_id=None, copies=1,
    ):  # fmt: skip
        config, self.mesh = params.config, params.mesh
        if isinstance(cache, KVCache):
            decoding.check_cache(params, cache)
        elif isinstance(cache, KiviConfig):
            cache.check_head_dim(config.head_dim)
        else:
            raise ValueError(f"cache must be a KiviConfig or a KVCache; got {type(cache).__name__}.")
        check_count("num_return_sequences", copies)
        if max_new_tokens is not None:
            check_count("max_new_tokens", max_new_tokens)
        if prefill_chunk is not None:
            check_count("prefill_chunk", prefill_chunk)
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
        self.fits_prompt = max_length is None and isinstance(cache, KiviConfig)
        self.most_new = int(self.room.max())
        self.params = params
        self.graphdef, self.weights = nnx.split(params)
        self.sampler = sampler
        eos_token_id = config.eos_token_id if eos_token_id is None else eos_token_id
        self.eos = np.asarray(_ids("eos_token_id", eos_token_id, config.vocab_size), np.int32)
        if pad_token_id is None:
            pad_token_id = next((i for i in (config.pad_token_id, *config.eos_token_id) if i is not None), 0)
        (self.pad_token_id,) = _ids("pad_token_id", pad_token_id, config.vocab_size)
        self.rows = [row for row in self.rows for _ in range(copies)]
        self.room = np.repeat(self.room, copies).astype(np.int32)
        with sharding.on(self.mesh):
            key = jax.random.key(0) if key is None else sharding.replicated(key, self.mesh)
            self.keys = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(len(self.rows)))
        self.state: State | None = None

    def _nothing_more(self, vocab_size: int) -> list[np.ndarray]:
        if not isinstance(self.cache, KVCache) or self.logits is None:
            raise ValueError("prompt=None goes on from a KVCache and its logits; got no prompt without both of them.")
        shape = (self.cache.batch_size, vocab_size)
        if self.logits.shape != shape or self.logits.dtype != np.float32:
            got = f"{self.logits.dtype} {list(self.logits.shape)}"
            raise ValueError(f"logits must be float32 {list(shape)}; got {got}.")
        self.logits = sharding.over_vocabulary(self.logits, self.mesh)
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
        """Takes in the prompts, some at a time and in chunks if asked to: float32 `[B, vocab_size]` for the tokens that
        come next, and the cache, both with `copies` of each sequence and the caller's to donate."""
        rows = self.rows[:: self.copies]
        sharding.check_divides("the number of prompts of a batch", len(rows), self.mesh, sharding.DATA)
        with sharding.on(self.mesh):
            logits, cache = self._take_in_groups(rows)
            if self.copies > 1:
                return jnp.repeat(logits, self.copies, axis=0), fork(cache, self.copies)
            return logits, cache

    def _take_in_groups(self, rows: list[np.ndarray]) -> tuple[jax.Array, KVCache]:
        # A device holds the sequences of one stretch of the batch, and takes in some of them with each group.
        stretches = sharding.devices(self.mesh, sharding.DATA)
        each = len(rows) // stretches
        together = max(1, PREFILL_TOKENS // self.chunk)
        if isinstance(self.cache, KVCache) or each <= together:
            return self._take_in(rows)
        whole = None
        for start in range(0, each, together):
            start = min(start, each - together)  # the last ones overlap those before, to have their shape
            group = [rows[n * each + start + i] for n in range(stretches) for i in range(together)]
            part = self._take_in(group)
            if whole is None:
                whole = _room_for(part, len(rows), self.mesh)
            whole = _place(whole, part, start, self.mesh)
            del part  # or the next one would come to lie beside it
        return whole

    @property
    def _blocks(self) -> int:
        """The capacity of the cache to make, in whole blocks."""
        return -(-self.capacity // BLOCK) * BLOCK

    @property
    def chunk(self) -> int:
        """Tokens of each prompt that are taken in at once, padding counted."""
        if self.prefill_chunk is not None and self.prefill_chunk < self.longest:
            return self.prefill_chunk
        chunk = prompts.bucket(self.longest) if self.longest else 1
        return chunk if isinstance(self.cache, KVCache) else min(chunk, self._blocks)

    def _take_in(self, rows: list[np.ndarray]) -> tuple[jax.Array, KVCache]:
        """`prefill` for some of the prompts, or for all where they continue a cache; one copy of each."""
        logits, cache, ours = self.logits, self.cache, False
        for start in range(0, max(len(row) for row in rows), self.chunk):
            pieces = [row[start : start + self.chunk] for row in rows]
            tokens = prompts.pad(pieces, self.chunk, self.pad_token_id)
            counts = np.asarray([len(piece) for piece in pieces], np.int32)
            if isinstance(cache, KiviConfig):
                logits, cache = begin(
                    self.graphdef, self.weights, tokens, counts, config=cache, max_length=self._blocks
                )
            elif not ours:
                logits, cache = _continue(self.graphdef, self.weights, tokens, counts, cache=cache)
            else:
                logits, cache = next_chunk(self.graphdef, self.weights, tokens, counts, logits, cache)
            ours = True
        return (logits, cache) if ours else jax.tree.map(jnp.copy, (logits, cache))

    def start(self) -> "Run":
        """Takes in the prompts and makes ready for the loop."""
        logits, cache = self.prefill()
        batch = len(self.rows)
        with sharding.on(self.mesh):
            state = State(
                step=jnp.zeros((), jnp.int32),
                tokens=jnp.full((batch, -(-self.most_new // BUFFER) * BUFFER), self.pad_token_id, jnp.int32),
                counts=jnp.zeros(batch, jnp.int32),
                done=jnp.zeros(batch, bool),
                logits=logits,
                cache=cache,
            )
            self.state = laid_out(state, self.mesh)
        return self

    def advance(self, limit: int | None = None, *, report: Callable[[int], None] | None = None) -> None:
        """Samples until each sequence has `limit` tokens (None: all it has room for) or has ended.

        report: called every 64 steps with the tokens done of all sequences; what an ended one had room for counts too.
        """
        if self.state is None:
            self.start()
        room = self.room if limit is None else np.minimum(self.room, np.int32(limit))
        if report is None:
            self._sample(room)
            return
        for steps in range(REPORT, self.most_new + REPORT, REPORT):
            self._sample(np.minimum(room, np.int32(steps)))
            counts, done = jax.device_get((self.state.counts, self.state.done))
            report(int(np.where(done, self.room, counts).sum()))
            if np.all(done | (counts == room)):
                break

    def _sample(self, room: np.ndarray) -> None:
        with sharding.on(self.mesh):
            self.state = loop(self.graphdef, self.weights, self.state, self.sampler, self.keys, self.eos, room)

    def part(self, which: np.ndarray, size: int) -> "Run":
        """The run of prompts `which` only, as a batch of `size` prompts: what is missing are copies of the last one
        with no room for a token. Each sequence draws as it would in the whole."""
        part = copy.copy(self)
        which = np.concatenate([which, np.repeat(which[-1:], size - len(which))])
        rows = (which[:, None] * self.copies + np.arange(self.copies)).ravel()
        part.rows = [self.rows[row] for row in rows]
        part.longest = max(len(row) for row in part.rows)
        part.room, part.keys = self.room[rows], self.keys[rows]
        part.room[len(set(which)) * self.copies :] = 0
        if self.fits_prompt:
            part.capacity = prompts.bucket(part.longest) + self.most_new
        return part


def check_count(name: str, value) -> None:
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
def begin(graphdef, weights, tokens, counts, *, config, max_length):
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
def next_chunk(graphdef, weights, tokens, counts, logits, cache):
    """`_continue` in place; a sequence whose prompt has ended before keeps the logits after its last token."""
    new, cache = _continue(graphdef, weights, tokens, counts, cache=cache)
    return jnp.where((counts > 0)[:, None], new, logits), cache


@functools.partial(jax.jit, static_argnames=("batch", "mesh"))
def _room_for(part, batch, mesh):
    """Zeros like a pytree of `[b, ...]`, for `batch` sequences."""
    return sharding.constrained(jax.tree.map(lambda x: jnp.zeros((batch, *x.shape[1:]), x.dtype), part), mesh)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames="whole")
def _place(whole, part, start, mesh):
    """`part [b, ...]` in the rows of `whole [B, ...]` from `start` on, of every array of a pytree; on a mesh in those
    of each device's own sequences."""

    def place(whole, part):
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, axis=0), whole, part)

    return sharding.per_device(place, mesh, whole)(whole, part)


def laid_out(state: State, mesh: jax.sharding.Mesh | None) -> State:
    """The state where the loop leaves it, so that a second call finds it as the first did. Its cache lies there since
    it was made."""
    if mesh is None:
        return state
    small = dataclasses.replace(state, logits=None, cache=None)
    small = jax.tree.map(lambda x: jax.device_put(x, sharding.by_rank(x, mesh)), small)
    return dataclasses.replace(small, logits=sharding.over_vocabulary(state.logits, mesh), cache=state.cache)


@functools.partial(jax.jit, static_argnames=("graphdef",), donate_argnames=("state",))
def loop(graphdef, weights, state: State, sampler: Sampler, keys, eos, room) -> State:
    model = nnx.merge(graphdef, weights)
    running = lambda state: ~state.done & (state.counts < room)

    def body(state: State) -> State:
        active = running(state)
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, state.step)
        token = sampler(state.logits, step_keys)
        pad = lax.dynamic_slice_in_dim(state.tokens, state.step, 1, axis=1)[:, 0]
        tokens = lax.dynamic_update_slice_in_dim(
            state.tokens, jnp.where(active, token, pad)[:, None], state.step, axis=1
        )
        hidden, cache = decoding.decode_step(model, token, active, state.cache)
        return State(
            step=state.step + 1,
            tokens=tokens,
            counts=state.counts + active.astype(jnp.int32),
            done=state.done | active & jnp.any(token[:, None] == eos, axis=1),
            logits=jnp.where(active[:, None], model.logits(hidden), state.logits),
            cache=cache,
        )

    return lax.while_loop(lambda state: jnp.any(running(state)), body, state)
