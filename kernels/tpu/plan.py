"""What a decode kernel is specialized for, and how that is chosen."""

import dataclasses

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import get_abstract_mesh

from kivi_jax.cache import LayerCache
from kivi_jax.config import BLOCK

SUBLANES = 8
"""Rows of a register."""

LANES = 128
"""Columns of a register."""

_STEP_BYTES = 2**22
"""Most bytes of codes in a grid step: twice as many must fit into VMEM, beside the scratch."""

_LONG = {64: 2048, 128: 3072, 256: 2048}
"""By head_dim, the tokens of a grid step for long caches. Twice 8 heads' codes and scratch for them fit into VMEM at 2
bits. Key groups on lanes, as head_dim 64 has them, come 128 at a time, which 3,072 tokens do not divide."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a kernel is specialized for.

    Attributes:
        key_bits, value_bits, key_group, value_group: as in `KiviConfig`.
        queries: Lq; rows of queries are query heads times queries, query last.
        rows: R, rows of scores, 8 or a multiple of 16, copies included.
        copies: 2 if there are 4 rows of queries at most, so that a register serves two groups; else 1.
        channels: D.
        heads: KV heads of a grid step.
        tokens: tokens of a grid step, whole blocks; the softmax state is updated once for each.
        depth: how many heads the scores run ahead of the values.
        width: blocks whose scores one product gives, as many as fill the matrix unit's columns and two registers' rows.
        chunk: blocks whose left operands are summed by one product.
        centred: whether key codes are centred by vector operations, which are scarce, rather than by a second product,
            whose matrix unit is scarcer if it is narrow and registers serve one group.
        key_codes_by_lanes, value_codes_by_lanes: whether codes come with tokens on lanes; see `tokens_on_lanes`.
        scale_lanes: key groups of a block of scales and zeros that come with groups on lanes; 0 if they do not.
        key_norm: whether scores are multiplied by a norm of each token's.
        sliding: whether rows see only tokens from some row of the cache on.
        interpret: whether the kernel runs without a TPU.
    """

    key_bits: int
    value_bits: int
    key_group: int
    value_group: int
    queries: int
    rows: int
    copies: int
    channels: int
    heads: int
    tokens: int
    depth: int
    width: int
    chunk: int
    centred: bool
    key_codes_by_lanes: bool
    value_codes_by_lanes: bool
    scale_lanes: int
    key_norm: bool
    sliding: bool
    interpret: bool

    @property
    def distinct_rows(self) -> int:
        """Rows of queries, padding included."""
        return self.rows // self.copies

    @property
    def half_rows(self) -> int:
        """E, rows of each half of the queries, the even and the odd ones: whole registers."""
        return max(self.rows // 2, SUBLANES)

    @property
    def pair_groups(self) -> int:
        """Key groups that the distinct rows of two registers serve."""
        return max(2 * SUBLANES // self.distinct_rows, 1)

    @property
    def key_repeats(self) -> int:
        """How many rows of key scales a group has: as many as it has in a register, or 1 if it fills registers."""
        return SUBLANES // self.pair_groups if self.pair_groups > 1 else 1

    @property
    def key_scale_rows(self) -> int:
        """Rows of key scales, whole registers."""
        return -(-self.step_groups // self.pair_groups) * self.pair_groups * self.key_repeats

    @property
    def blocks(self) -> int:
        """Blocks of a grid step."""
        return self.tokens // BLOCK

    @property
    def key_groups(self) -> int:
        """Key groups of a block."""
        return BLOCK // self.key_group

    @property
    def step_groups(self) -> int:
        """Key groups of a grid step."""
        return self.tokens // self.key_group

    @property
    def value_groups(self) -> int:
        """Value groups of a token."""
        return self.channels // self.value_group

    @property
    def value_registers(self) -> int:
        """Multiples of the rows that every value group of a token takes; even, since they are packed in pairs."""
        return -(-self.value_groups // (2 * self.copies)) * 2


def choose(num_rows: int, queries: int, layer: LayerCache, sliding: bool, interpret: bool) -> Plan:
    """The plan for `num_rows` rows of queries of each KV head.

    A grid step has a fixed cost of a few hundred bundles, and what it does not use of its last tokens is wasted: long
    caches take long steps. More rows take fewer heads, so that the program stays small.
    """
    config = layer.config
    heads, channels = layer.key_window.shape[1], layer.key_window.shape[3]
    rows = SUBLANES if num_rows <= SUBLANES else -(-num_rows // (2 * SUBLANES)) * 2 * SUBLANES
    wide = _has_wide_matrix_unit()
    copies = 2 if num_rows <= SUBLANES // 2 else 1
    has_norm = layer.key_norm is not None
    heads_on_sublanes = has_norm or channels == config.value_group_size
    step_heads = _step_heads(heads, rows, heads_on_sublanes)
    token_bytes = channels * (config.key_bits + config.value_bits) // 8
    return Plan(
        key_bits=config.key_bits,
        value_bits=config.value_bits,
        key_group=config.key_group_size,
        value_group=config.value_group_size,
        queries=queries,
        rows=rows,
        copies=copies,
        channels=channels,
        heads=step_heads,
        tokens=_step_tokens(layer.capacity, rows, config.key_group_size, channels, step_heads, token_bytes),
        depth=2 if copies == 1 else 3,
        width=max(2 if wide else 1, 2 * SUBLANES * copies // rows * config.key_group_size // BLOCK),
        chunk=8,
        centred=copies == 1 and not wide,
        key_codes_by_lanes=tokens_on_lanes(layer.key_codes),
        value_codes_by_lanes=tokens_on_lanes(layer.value_codes),
        scale_lanes=LANES if tokens_on_lanes(layer.key_scale) else 0,
        key_norm=has_norm,
        sliding=sliding,
        interpret=interpret,
    )


def tokens_on_lanes(field: jax.Array) -> bool:
    """Whether XLA lays `[B, H, N, D]` out with N along lanes, as it does where that pads less.

    A kernel's operand has its last axis along lanes: such a field must be handed over with its last two axes swapped,
    which costs nothing then, or XLA copies all of it.
    """
    rows, channels = field.shape[2:]
    padded = lambda n: -(-n // LANES) * LANES
    return channels * padded(rows) < rows * padded(channels)


def in_place(field: jax.Array, interpret: bool) -> jax.Array:
    """`field` as an operand that stays in HBM: XLA otherwise copies one that fits into VMEM as a whole."""
    return field if interpret else pltpu.with_memory_space_constraint(field, pltpu.HBM)


def _step_heads(heads: int, rows: int, heads_on_sublanes: bool) -> int:
    most = 8 if rows == SUBLANES else 2
    if heads_on_sublanes and heads > most:  # a block of them is a multiple of 8 heads, or all
        return 8 if heads % 8 == 0 else heads
    return next(n for n in range(most, 0, -1) if heads % n == 0)


def _step_tokens(capacity: int, rows: int, key_group: int, channels: int, heads: int, token_bytes: int) -> int:
    """Tokens of a grid step of so many KV heads; `token_bytes` are those of the codes of a token of one."""
    longest = 512
    if rows == SUBLANES:
        long = _LONG[channels]
        sizes = ((16384, long), (4096, 2048), (0, 1024))
        fits = lambda n: n * heads * token_bytes <= _STEP_BYTES and n * heads <= 8 * long
        longest = next((n for least, n in sizes if capacity >= least and fits(n)), longest)
    # A block of scales is a multiple of 8 rows, or all of them.
    tokens = min(max(longest, SUBLANES * key_group), capacity)
    if tokens * heads * token_bytes > _STEP_BYTES:
        raise NotImplementedError(f"The TPU kernel has no room for {tokens} tokens of {heads} KV heads in a step.")
    return tokens


def _has_wide_matrix_unit() -> bool:
    """Whether the TPU that is compiled for has 256 columns (v6e and later) rather than 128."""
    device = get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    return not any(name in kind.lower() for name in ("v4", "v5"))
