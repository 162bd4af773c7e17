"""Random lives of a cache, against a list of tokens and against the cache that took those tokens in at once.

KIVI_JAX_SEQUENCES=2000 runs that many sequences of operations instead of the usual few.
"""

import dataclasses
import functools
import os

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import assert_same
from hypothesis import strategies as st

from kivi_jax import cache as kv
from kivi_jax import concatenate, crop, fork, gather, resize
from kivi_jax.config import KiviConfig, quantized_length

CONFIGS = {
    "window": KiviConfig(residual_length=32, sink_length=2),
    "rewind": KiviConfig(residual_length=20, sink_length=3, rewind=40, key_bits=4),
    "no residual": KiviConfig(residual_length=0, rewind=300, value_bits=4),
    "unquantized": KiviConfig(key_bits=16, value_bits=16, residual_length=16, sink_length=1),
    "options": KiviConfig(
        residual_length=8, sink_length=4, rewind=9, rotate=True, key_norm=True, key_clip=0.9, value_clip=0.8
    ),
}
SEQUENCES = int(os.environ.get("KIVI_JAX_SEQUENCES", 100))
PIECE, MOST_ROWS, CHANNELS = 230, 3, 32
CAPACITIES = (256, 512)
TABLE = 1 << 15
KEYS, VALUES = (np.random.default_rng(n).normal(size=(TABLE, CHANNELS)).astype(np.float32) for n in (1, 2))


def tensors(rows, width):
    """Keys and values `[B, 1, width, D]` of rows of token ids, and their counts."""
    ids = np.zeros((len(rows), width), int)
    for n, row in enumerate(rows):
        ids[n, : len(row)] = row
    counts = jnp.asarray([len(row) for row in rows], jnp.int32)
    return jnp.asarray(KEYS[ids][:, None]), jnp.asarray(VALUES[ids][:, None]), counts


@jax.jit
def append(cache, key, value, counts):
    return kv.append(cache, key[None], value[None], counts)


@jax.jit
def decode(cache, key, value, counts):
    """The tokens one by one, each written, counted and flushed, by the sequences that still have some."""

    def step(n, cache):
        token = lambda x: jax.lax.dynamic_slice_in_dim(x, n, 1, axis=2)
        layers = (kv.write_token(cache.layers[0], token(key), token(value), cache.length),)
        active = (n < counts) & (cache.length < cache.capacity)
        return kv.flush(dataclasses.replace(cache, layers=layers, length=cache.length + active.astype(jnp.int32)))

    return jax.lax.fori_loop(0, jnp.max(counts), step, cache)


@functools.partial(jax.jit, static_argnames=("config", "capacity"))
def one_shot(key, value, counts, *, config, capacity):
    cache = empty(config, key.shape[0], capacity)
    layer = kv.prefill_layer(cache.layers[0], key, value, counts)
    return kv.advance(cache, (layer,), counts)


def empty(config, batch, capacity):
    return kv.init(
        config,
        num_layers=1,
        batch_size=batch,
        num_kv_heads=1,
        head_dim=CHANNELS,
        max_length=capacity,
        dtype=jnp.float32,
    )


select = jax.jit(gather)
join = jax.jit(lambda *caches: concatenate(caches))
rewind = jax.jit(crop)
enlarge = jax.jit(resize, static_argnums=1)


@jax.jit
def same(got, want):
    """Whether everything live has the same bits, of two caches of one capacity; see `caches.assert_same`."""
    rows = jnp.arange(want.capacity, dtype=jnp.int32)[None] < want.quantized[:, None]
    slots = kv.window_positions(want.config, want.length, want.quantized) >= 0
    equal = [(got.length == want.length).all(), (got.quantized == want.quantized).all()]
    for field in dataclasses.fields(got.layers[0]):
        if field.name == "config" or getattr(want.layers[0], field.name) is None:
            continue
        bits = lambda layer, name=field.name: (
            x if (x := getattr(layer, name)).dtype == jnp.uint8 else x.view(f"uint{8 * x.dtype.itemsize}")
        )
        a, b = bits(got.layers[0]), bits(want.layers[0])
        axis = 2 if "window" in field.name else kv.token_axis(field.name, want.config)
        live = slots if "window" in field.name else rows[:, :: want.capacity // a.shape[axis]]
        live = jnp.expand_dims(live, [n for n in range(1, a.ndim) if n != axis])
        equal.append(jnp.where(live, a == b, True).all())
    return jnp.stack(equal).all()


@dataclasses.dataclass
class Row:
    """What a sequence should be: its tokens, how many are quantized, and the most it has held."""

    tokens: list
    quantized: int = 0
    most: int = 0

    def grow(self, new, config):
        self.tokens = self.tokens + new
        self.quantized = max(self.quantized, quantized_length(len(self.tokens), config))
        self.most = max(self.most, len(self.tokens))


class Life:
    """A cache beside its rows; every operation is done to both, and compared."""

    def __init__(self, config):
        self.config, self.used = config, 0
        self.cache, self.rows = empty(config, 2, CAPACITIES[0]), [Row([]), Row([])]

    def fresh(self, counts):
        """New tokens, none of which was ever there before."""
        out = []
        for n in counts:
            out.append([(self.used + i) % TABLE for i in range(n)])
            self.used += n
        return out

    def grow(self, how, a, b):
        counts = [(a * (n + 1) + b * n * n) % (PIECE + 1) for n in range(len(self.rows))]
        new = self.fresh(counts)
        piece = tensors(new, PIECE)
        capacity = self.cache.capacity
        over = [n for n, row in enumerate(self.rows) if len(row.tokens) + counts[n] > capacity]
        if over:
            before = self.cache
            with pytest.raises(ValueError, match=f"sequence {over[0]} would have"):
                kv.append(self.cache, *(x[None] for x in piece[:2]), piece[2])
            assert self.cache is before
        self.cache = (append if how == "append" else decode)(self.cache, *piece)
        for n, row in enumerate(self.rows):
            room = capacity - len(row.tokens)
            # Under jit a piece that does not fit is left out whole; single tokens are taken until the row is full.
            row.grow(new[n][:room] if how == "decode" or counts[n] <= room else [], self.config)

    def crop(self, a, b):
        lengths = [len(row.tokens) for row in self.rows]
        targets = [max(0, n - (a + b * i) % (1 + (n if a % 3 == 0 else 45))) for i, n in enumerate(lengths)]
        after = rewind(self.cache, lengths=np.asarray(targets, np.int32))
        refused = [int(after.length[n]) != target for n, target in enumerate(targets)]
        if any(refused):
            with pytest.raises(ValueError, match=f"sequence {refused.index(True)} must keep at least"):
                crop(self.cache, lengths=np.asarray(targets))
        else:
            drop = np.asarray(lengths, np.int32) - np.asarray(targets, np.int32)
            assert same(crop(self.cache, drop), after)
        for n, (row, target) in enumerate(zip(self.rows, targets, strict=True)):
            exact = row.most - target <= self.config.rewind or not self.config.quantizes
            exact |= target <= self.config.sink_length
            if refused[n]:
                assert not exact and target < self.config.sink_length + row.quantized
                continue
            scheduled = quantized_length(target, self.config)
            quantized = int(after.quantized[n])
            if exact:
                assert quantized == min(row.quantized, scheduled)
            assert min(row.quantized, scheduled) <= quantized <= row.quantized
            assert target <= self.config.sink_length or self.config.sink_length + quantized <= target
            self.rows[n] = Row(row.tokens[:target], quantized, row.most)
        self.cache = after

    def gather(self, a, b):
        index = [(a + b * n) % len(self.rows) for n in range(1 + (a + b) % MOST_ROWS)]
        self.cache = select(self.cache, np.asarray(index))
        self.rows = [dataclasses.replace(self.rows[n]) for n in index]

    def fork(self, a, b):
        n = 1 + (a + b) % (MOST_ROWS // len(self.rows))
        self.cache = fork(self.cache, n)
        self.rows = [dataclasses.replace(row) for row in self.rows for _ in range(n)]

    def join(self, a, b):
        """With a cache of another capacity that took in its tokens at once."""
        if len(self.rows) == MOST_ROWS:
            return
        new = self.fresh([a % CAPACITIES[0]])
        key, value, counts = tensors(new, CAPACITIES[0])
        other = one_shot(key, value, counts, config=self.config, capacity=CAPACITIES[0])
        row = Row([])
        row.grow(new[0], self.config)
        if b % 2:
            self.cache, self.rows = join(self.cache, other), [*self.rows, row]
        else:
            self.cache, self.rows = join(other, self.cache), [row, *self.rows]

    def resize(self, a, b):
        capacity = CAPACITIES[a % len(CAPACITIES)]
        longest = max(len(row.tokens) for row in self.rows)
        if longest > capacity:
            with pytest.raises(ValueError, match=f"max_length must be at least the {longest} tokens"):
                resize(self.cache, capacity)
        else:
            self.cache = resize(self.cache, capacity)
            assert self.cache.capacity == capacity

    def check(self):
        """The cache is the one that took in each row's tokens at once.

        A row that is quantized further than it is long (after a crop without a shadow) has the blocks of a longer one.
        """
        window = self.config.sink_length + self.config.residual_length
        ahead = [row.quantized > quantized_length(len(row.tokens), self.config) for row in self.rows]
        tokens = [
            row.tokens + [0] * (window + row.quantized - len(row.tokens)) * more
            for row, more in zip(self.rows, ahead, strict=True)
        ]
        key, value, counts = tensors(tokens, CAPACITIES[-1] + 128)
        want = one_shot(key, value, counts, config=self.config, capacity=CAPACITIES[-1] + 128)
        assert want.quantized.tolist() == [row.quantized for row in self.rows]
        lengths = jnp.asarray([len(row.tokens) for row in self.rows], jnp.int32)
        want = dataclasses.replace(want, length=lengths)
        got = enlarge(self.cache, want.capacity)
        if not same(got, want):
            assert_same(got, want)  # says what differs
            raise AssertionError("the two comparisons disagree")


numbers = st.integers(0, 400)
operations = st.tuples(
    st.sampled_from(
        ["append", "append", "decode", "decode", "crop", "crop", "crop", "gather", "fork", "join", "resize"]
    ),
    numbers,
    numbers,
)


@pytest.mark.parametrize("name", CONFIGS)
def test_any_life_of_a_cache_leaves_what_its_tokens_give_at_once(name):
    @hypothesis.settings(
        max_examples=-(-SEQUENCES // len(CONFIGS)), deadline=None, database=None, derandomize=SEQUENCES <= 100
    )
    @hypothesis.given(st.lists(operations, min_size=3, max_size=9))
    def run(steps):
        life = Life(CONFIGS[name])
        for kind, a, b in steps:
            if kind in ("append", "decode"):
                life.grow(kind, a, b)
            else:
                getattr(life, kind)(a, b)
            life.check()

    run()
