"""What a launch works on: the problem it is compiled for, the arrays, and the list of work as the device sees it."""

import dataclasses
import functools
import operator

import jax.numpy as jnp

from kivi_jax.kernels.gpu import instructions as gpu
from kivi_jax.kernels.gpu.instructions import Int, Pointer
from kivi_jax.kernels.gpu.maps import COLUMNS, SPAN, Geometry

WARPS_PER_GROUP = 4
HEAD_UNITS = 8
"""Units that count for the start of a head, in which its first tokens are still on their way: about a step of each
warp's time. Without them a thread block with many short sequences would be the last to finish."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a launch is compiled for. The sizes are those of the cache and the queries; see `launch.attend`.

    Attributes:
        columns: queries of one KV head, query heads times positions, `h * queries + i`.
        queries: Lq.
        has_piece: whether the tokens of the queries come beside the cache.
        scale: of the scores.
        warpgroups, blocks: warps / 4 of a thread block, thread blocks for each eight columns.
    """

    batch: int
    kv_heads: int
    capacity: int
    sinks: int
    ring: int
    columns: int
    queries: int
    has_piece: bool
    sliding_window: int | None
    scale: float
    dtype: jnp.dtype
    geometry: Geometry
    warpgroups: int
    blocks: int

    @property
    def column_tiles(self) -> int:
        return -(-self.columns // COLUMNS)

    @property
    def warps(self) -> int:
        return WARPS_PER_GROUP * self.warpgroups

    @property
    def heads(self) -> int:
        return self.batch * self.kv_heads

    @property
    def partial_rows(self) -> int:
        return self.column_tiles * (self.blocks + self.heads) * self.warps

    @property
    def window(self) -> int:
        return self.sinks + self.ring

    @property
    def masks_codes(self) -> bool:
        """Whether some query may not see some quantized token."""
        return self.sliding_window is not None or (self.queries > 1 and not self.has_piece)

    @property
    def format(self) -> gpu.Format:
        return gpu.format_of(self.dtype)


# ----------------------------------------------------------------------------------------------- this thread's place


@dataclasses.dataclass(frozen=True)
class Lane:
    """A thread in its warp; g is its row and t its column pair in tensor-core operands (`maps`)."""

    index: Int
    g: Int
    t: Int

    @classmethod
    def current(cls):
        index = gpu.thread_index() & 31
        return cls(index, index >> 2, index & 3)


# ------------------------------------------------------------------------------------------------ sequences and work


@dataclasses.dataclass(frozen=True)
class Sequence:
    """What the device knows of one sequence.

    Attributes:
        sinks, exact: sink tokens, and all full-precision tokens: sinks, ring, piece.
        ring_position: the position of the first token in the ring; those of the piece follow on its last.
        ring_slot: its slot in the ring.
        query: the position of the first query.
        first_block, end_block: quantized blocks that some query sees.
    """

    sinks: Int
    exact: Int
    ring_position: Int
    ring_slot: Int
    query: Int
    first_block: Int
    end_block: Int
    ring_end: Int

    @classmethod
    def load(cls, index: Int, refs: "Refs", problem: Problem):
        read = lambda pointer: gpu.load_global(pointer.advance(index, 4))[0]
        length, quantized = read(refs.length), read(refs.quantized)
        sinks = gpu.minimum(length, problem.sinks)
        ring = gpu.maximum(length - problem.sinks - quantized, 0)
        exact, query = sinks + ring, length - problem.queries
        if problem.has_piece:
            exact, query = exact + read(refs.counts), length
        first, end = gpu.integer(0), quantized >> 7
        if problem.sliding_window is not None:
            oldest = query - (problem.sliding_window - 1 + problem.sinks)
            first = gpu.minimum(gpu.maximum(oldest, 0) >> 7, end)
        return cls(sinks, exact, length - ring, quantized % problem.ring, query, first, end, sinks + ring)

    @property
    def exact_units(self) -> Int:
        return (self.exact + (SPAN - 1)) >> 5

    def units(self, geometry: Geometry) -> Int:
        """Of a head: `HEAD_UNITS` that stand for its start, exact spans, steps. None if there are no tokens."""
        real = self.exact_units + (self.end_block - self.first_block) * geometry.steps
        return gpu.select(real > 0, real + HEAD_UNITS, real)


@dataclasses.dataclass(frozen=True)
class WorkList:
    """The units of all sequences, spread over the lanes of a warp.

    Attributes:
        units: [n], the units of a KV head of sequence `32 n + lane`; none if there is no such sequence.
        heads: KV heads of a sequence.
    """

    units: list
    heads: int
    lane: Lane

    @classmethod
    def load(cls, refs: "Refs", lane: Lane, problem: Problem):
        units = []
        for start in range(0, problem.batch, 32):
            index = lane.index + start
            mine = Sequence.load(gpu.minimum(index, problem.batch - 1), refs, problem).units(problem.geometry)
            units.append(gpu.select(index < problem.batch, mine, gpu.integer(0)))
        return cls(units, problem.kv_heads, lane)

    def total(self) -> Int:
        return gpu.sum_lanes(functools.reduce(operator.add, self.units)) * self.heads

    def find(self, unit: Int) -> tuple[Int, Int]:
        """(sequence, its first unit) of a unit of the list; all lanes get the same."""
        sequence, first, before = gpu.integer(0), gpu.integer(0), gpu.integer(0)
        for n, units in enumerate(self.units):
            units = units * self.heads
            end = units
            for distance in (1, 2, 4, 8, 16):
                end = gpu.select(self.lane.index >= distance, end + gpu.shuffle_up(end, distance), end)
            start = before + end - units
            here = (start <= unit) & (unit < start + units)
            sequence = gpu.select(here, self.lane.index + 32 * n, sequence)
            first = gpu.select(here, start, first)
            before = before + gpu.sum_lanes(units)
        return gpu.sum_lanes(sequence), gpu.sum_lanes(first)


# ------------------------------------------------------------------------------------------------------- the arrays


@dataclasses.dataclass(frozen=True)
class Refs:
    """Pointers to the arrays in global memory, and the shapes behind them; None for what a launch does not have."""

    q: Pointer | None = None  # [B, H, columns, D] model dtype
    key_codes: Pointer | None = None  # [B, H, T * key_bits / 8, D] uint8
    key_scale: Pointer | None = None  # [B, H, T / key_group, D] bfloat16
    key_zero: Pointer | None = None
    value_codes: Pointer | None = None  # [B, H, T * value_bits / 8, D] uint8
    value_scale: Pointer | None = None  # [B, H, D / value_group, T] bfloat16
    value_zero: Pointer | None = None
    key_window: Pointer | None = None  # [B, H, sinks + ring, D] model dtype
    value_window: Pointer | None = None
    length: Pointer | None = None  # [B] int32
    quantized: Pointer | None = None  # [B] int32
    key_norm: Pointer | None = None  # [B, H, T] bfloat16
    new_key: Pointer | None = None  # [B, H, Lq, D] model dtype
    new_value: Pointer | None = None
    counts: Pointer | None = None  # [B] int32
    out: Pointer | None = None  # [partial_rows, columns or 8, D] float32
    top: Pointer | None = None  # [partial_rows, 2, 8] float32: largest score, and sum of the weights relative to it
    plan: Pointer | None = None  # [B * H, 4] int32: first thread block, how many, first unit of the list, its length


def first_column(problem: Problem) -> Int:
    """The first query of this thread block's column tile."""
    return (gpu.block_index() % problem.column_tiles) * COLUMNS
