"""Where things are: the index maps of the decode kernel, as plain formulas.

Every function takes Python integers or registers (`instructions.Int`) alike, so that what the kernel computes is what
the CPU tests check. `lane` is a thread's number in its warp; `g = lane // 4` and `t = lane % 4` are its row and its
column pair in a tensor-core operand.

A block of 128 tokens is four spans of 32. A warp takes a block in one or several steps: where keys and values have
the same number of bits, a step is 32 byte rows of each (4, 2 or 1 spans at 2, 4 and 8 bits), otherwise a whole block.
Byte row r of a span is split into tiles of 16 tokens so that a lane's tokens are 8 neighbours: row `8t + 4j + 2e + b`
is token `k = 8e + 2t + b` of tile j. Any order will do, as long as keys, scales, weights and values share it.
"""

import dataclasses
import math

from kivi_jax.config import BLOCK

SPAN = 32  # tokens; also the byte rows of a chunk of codes
SPANS = BLOCK // SPAN
TILES = 2  # tiles of 16 tokens in a span
COLUMNS = 8  # queries that share a tensor-core instruction


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The shapes of one step: 32 byte rows, or a block, of one KV head.

    Attributes:
        head_dim: D.
        key_bits, value_bits: of the codes.
        key_group, value_group: tokens of a key group, channels of a value group.
        has_norm: whether each token's key has a norm beside its codes.
    """

    head_dim: int
    key_bits: int
    value_bits: int
    key_group: int
    value_group: int
    has_norm: bool = False

    @property
    def steps(self) -> int:
        """Steps of a block: a power of two."""
        return self.key_bits // 2 if self.key_bits == self.value_bits else 1

    @property
    def spans(self) -> int:
        """Spans of a step; span n is span `c + n * steps` of the block in its step c."""
        return SPANS // self.steps

    @property
    def tokens(self) -> int:
        return self.spans * SPAN

    def chunks(self, bits: int) -> int:
        """Chunks of 32 byte rows that a step holds of codes of so many bits."""
        return bits // 2 // self.steps

    def place(self, span: int, bits: int) -> tuple[int, int]:
        """(chunk, plane) of the step in which a span's codes lie."""
        return span % self.chunks(bits), span // self.chunks(bits)

    @property
    def key_groups(self) -> int:
        """Key groups that a step touches."""
        return min(self.spans, BLOCK // self.key_group)

    def spans_of(self, group: int) -> range:
        """The spans of a step that share one of its key groups."""
        each = self.spans // self.key_groups
        return range(group * each, (group + 1) * each)

    @property
    def key_group_stride(self) -> int:
        """Rows of the block's key scales from one group of a step to the next."""
        return max(1, SPAN * self.steps // self.key_group)

    def key_group_row(self, part):
        """The row of the block's key scales that holds the first group of its step `part`."""
        return (part * SPAN) >> _log2(self.key_group)

    @property
    def value_groups(self) -> int:
        return self.head_dim // self.value_group

    def parts_of(self, group: int) -> range:
        """The parts of 32 channels of a head that share a value group."""
        each = self.value_group // 32
        return range(group * each, (group + 1) * each)

    # Bytes of each array in a step, and where each begins in the shared memory of a step.

    def code_bytes(self, bits: int) -> int:
        return self.chunks(bits) * SPAN * self.head_dim

    @property
    def key_scale_pieces(self) -> int:
        """Pieces of 16 bytes of the scales of a key group, and of a step's scales of a value group."""
        return self.head_dim // 8

    @property
    def value_scale_pieces(self) -> int:
        return self.tokens // 8

    @property
    def key_scale_row(self) -> int:
        """Bytes from one key group to the next; the odd 16 keep lanes that read two groups off the same banks."""
        return self.head_dim * 2 + 16

    @property
    def value_scale_row(self) -> int:
        """The same for value groups."""
        row = self.tokens * 2
        return row + 64 if row % 128 == 0 else row

    @property
    def norm_bytes(self) -> int:
        return self.tokens * 2 if self.has_norm else 0

    def offsets(self, side: str) -> dict[str, int]:
        """Of a step's keys or values ("key" or "value"); `end` is what they take, in whole lines of 128 bytes."""
        if side == "key":
            scales = self.key_groups * self.key_scale_row
            sizes = {"key_codes": self.code_bytes(self.key_bits), "key_scale": scales, "key_zero": scales}
            sizes["key_norm"] = self.norm_bytes
        else:
            scales = self.value_groups * self.value_scale_row
            sizes = {"value_codes": self.code_bytes(self.value_bits), "value_scale": scales, "value_zero": scales}
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += size
        return offsets | {"end": -(-end // 128) * 128}

    @property
    def step_bytes(self) -> int:
        """A warp's shared memory: the keys of a step, then its values."""
        return self.offsets("key")["end"] + self.offsets("value")["end"]


def _log2(x: int) -> int:
    return int(math.log2(x))


# ------------------------------------------------------------------------------ codes in shared memory, and their reads


def key_code_address(row: int, piece: int, head_dim: int) -> int:
    """Where 16 bytes (`piece`) of a byte row of key codes lie: odd rows swap neighbouring pieces."""
    return row * head_dim + ((piece ^ (row & 1)) << 4)


def value_code_address(row: int, piece: int, head_dim: int) -> int:
    """Where 16 bytes (`piece`) of a byte row of value codes lie: 32-byte sectors are permuted by row // 8."""
    sector = row * (head_dim // 32) + piece // 2
    return ((sector ^ ((row >> 3) & 3)) << 5) + (piece % 2 << 4)


def key_copy(lane, n: int, head_dim: int):
    """The lane's part of `key_code_address` for 16-byte piece `lane + 32 n` of a chunk; add 512 n."""
    del n  # 32 pieces are an even number of rows
    return (lane ^ ((lane >> _log2(head_dim // 16)) & 1)) << 4


def value_copy(lane, n: int, head_dim: int):
    """The lane's part of `value_code_address` for 16-byte piece `lane + 32 n` of a chunk; add 512 n."""
    row = 32 * n // (head_dim // 16)  # of lane 0; its 32 pieces are within 8 rows
    return (lane << 4) ^ (((row >> 3) & 3) << 5)


def scale_target(lane, pieces: int, row: int):
    """(address of the lane, bytes a round) of 16-byte pieces lane, lane + 32, ... in rows of `pieces`, `row` bytes."""
    return (lane >> _log2(pieces)) * row + ((lane & (pieces - 1)) << 4), (32 // pieces) * row


def key_scale_source(lane, geometry: Geometry):
    """(bytes from the lane, bytes a round) in a block's key scales, of the pieces that `scale_target` places."""
    return scale_target(lane, geometry.key_scale_pieces, 2 * geometry.head_dim * geometry.key_group_stride)


def value_scale_source(lane, geometry: Geometry, capacity: int):
    """The same in the value scales of `capacity` tokens a group: some spans of 64 bytes of each group."""
    span = ((lane >> 2) & (geometry.spans - 1)) * (2 * SPAN * geometry.steps)
    pieces = geometry.value_scale_pieces
    return (lane >> _log2(pieces)) * (2 * capacity) + span + ((lane & 3) << 4), (32 // pieces) * 2 * capacity


def key_piece(t, half: int, head_dim: int):
    """Which 16 channels lane column t multiplies in each half of 64, without bank conflicts for codes and scales."""
    if head_dim == 64:
        return t
    return ((t << 1) ^ (t >> 1) ^ (half & 1)) + 8 * (half >> 1)


def key_read(g, t, half: int, head_dim: int):
    """Shared address of the lane's 16 key codes in row `8 (g // 2) + g % 2` of a chunk; `key_row` gives what to add."""
    return ((g >> 1) * 8 + (g & 1)) * head_dim + ((key_piece(t, half, head_dim) ^ (g & 1)) << 4)


def key_row(tile: int, upper: int) -> int:
    """Rows to add to a lane's first for row `g + 8 * upper` of a tile."""
    return 4 * tile + 2 * upper


def value_read(g, t, part: int, row: int, head_dim: int):
    """(address from the lane, bytes to add) of 4 codes, from channel `32 part + 4g` on, of byte row `8t + row`."""
    sector = row * (head_dim // 32) + part
    return (t * (8 * head_dim)) + (((sector & 3) ^ t) << 5) + (g << 2), (sector & ~3) * 32


def token_of_row(g):
    """The lane's first row of a span as the token it is; `key_row` adds to it."""
    return (g >> 1) * 8 + (g & 1)


# ---------------------------------------------------------------------------------------- the work of a launch, divided


def first_unit(block, total, blocks: int, minimum=min):
    """Where a thread block's share of `total` units begins, and the one before ends; shares differ by 1 at most."""
    return block * (total // blocks) + minimum(block, total % blocks)


def block_of(unit, total, blocks: int, maximum=max):
    """The thread block whose share a unit is in: the inverse of `first_unit`."""
    each, rest = total // blocks, total % blocks
    return maximum(unit // (each + 1), maximum(unit - rest, 0) // maximum(each, 1))


def units_before(warp, first, warps: int):
    """How many units from unit `first` on come before the first that is this warp's: unit u is warp `u % warps`'s."""
    return (warp - first % warps + warps) % warps


def partial_row(block, head, warp, warps: int):
    """Where a warp leaves its part of KV head `head` (of all sequences' heads, in order).

    Going through the units in order, each change of block or head raises their sum by at least one, so no two meet.
    """
    return (block + head) * warps + warp
