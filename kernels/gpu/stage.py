"""A step's codes, scales and zeros in shared memory: the copies into it, and a lane's reads of it."""

import dataclasses
import functools

from kivi_jax.config import BLOCK
from kivi_jax.kernels.gpu import instructions as gpu
from kivi_jax.kernels.gpu import maps
from kivi_jax.kernels.gpu.instructions import Float, Int, Pointer
from kivi_jax.kernels.gpu.maps import SPAN, TILES, Geometry
from kivi_jax.kernels.gpu.work import Lane, Problem, Refs


def lane_pointers(refs: Refs, head: Int, lane: Lane, problem: Problem) -> dict[str, Pointer]:
    """Where the lane's first 16 bytes of block 0 of a head lie in each array that is staged."""
    geometry, capacity = problem.geometry, problem.capacity
    first = lane.index << 4
    key_scale, _ = maps.key_scale_source(lane.index, geometry)
    value_scale, _ = maps.value_scale_source(lane.index, geometry, capacity)
    key_row, value_row = (capacity // 8 * bits * geometry.head_dim for bits in (geometry.key_bits, geometry.value_bits))
    key_scale_row = capacity // geometry.key_group * geometry.head_dim * 2
    value_scale_row = geometry.value_groups * capacity * 2
    pointers = {
        "key_codes": refs.key_codes.advance(head, key_row) + first,
        "value_codes": refs.value_codes.advance(head, value_row) + first,
        "key_scale": refs.key_scale.advance(head, key_scale_row) + key_scale,
        "key_zero": refs.key_zero.advance(head, key_scale_row) + key_scale,
        "value_scale": refs.value_scale.advance(head, value_scale_row) + value_scale,
        "value_zero": refs.value_zero.advance(head, value_scale_row) + value_scale,
    }
    if geometry.has_norm:
        span, _ = maps.value_scale_source(lane.index & (geometry.value_scale_pieces - 1), geometry, capacity)
        pointers["key_norm"] = refs.key_norm.advance(head, capacity * 2) + span
    return pointers


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copies of a head's keys and values, a step at a time, into a stage.

    Attributes:
        pointers: of `lane_pointers`.
    """

    stage: "Stage"
    pointers: dict[str, Pointer]
    problem: Problem

    @property
    def lane(self) -> Lane:
        return self.stage.lane

    def keys(self, step: Int):
        """Starts those of a step's key codes, scales, zeros and norms."""
        geometry = self.problem.geometry
        block, part = step // geometry.steps, step % geometry.steps
        self._codes("key", maps.key_copy, step, geometry.key_bits)
        row = block * (BLOCK // geometry.key_group) + geometry.key_group_row(part)
        target, target_round = maps.scale_target(self.lane.index, geometry.key_scale_pieces, geometry.key_scale_row)
        _, source_round = maps.key_scale_source(0, geometry)
        pieces = geometry.key_groups * geometry.key_scale_pieces
        for name in ("key_scale", "key_zero"):
            source = self.pointers[name].advance(row, 2 * geometry.head_dim)
            self._copy(name, pieces, source, source_round, lambda n: target, target_round)
        if geometry.has_norm:
            source = self.pointers["key_norm"].advance(_first_token(block, part), 2)
            self._copy("key_norm", geometry.value_scale_pieces, source, 0, lambda n: self.lane.index << 4)

    def values(self, step: Int):
        """Starts those of a step's value codes, scales and zeros."""
        geometry = self.problem.geometry
        block, part = step // geometry.steps, step % geometry.steps
        self._codes("value", maps.value_copy, step, geometry.value_bits)
        target, target_round = maps.scale_target(self.lane.index, geometry.value_scale_pieces, geometry.value_scale_row)
        _, source_round = maps.value_scale_source(0, geometry, self.problem.capacity)
        pieces = geometry.value_groups * geometry.value_scale_pieces
        for name in ("value_scale", "value_zero"):
            source = self.pointers[name].advance(_first_token(block, part), 2)
            self._copy(name, pieces, source, source_round, lambda n: target, target_round)

    def _codes(self, side: str, target, step: Int, bits: int):
        size = self.problem.geometry.code_bytes(bits)
        place = functools.partial(target, self.lane.index, head_dim=self.problem.geometry.head_dim)
        name = f"{side}_codes"
        self._copy(name, size // 16, self.pointers[name].advance(step, size), 512, place)

    def _copy(self, name, pieces, source, source_round, target, target_round=512):
        """The lane's 16-byte pieces: numbers lane, lane + 32, ...; round n at `target(n)` and so many bytes further."""
        base, offset = self.stage.place(name)
        for n in range(-(-pieces // 32)):
            move = functools.partial(
                gpu.copy_async, base + target(n), source, offset + n * target_round, n * source_round
            )
            if pieces - 32 * n < 32:
                gpu.when(self.lane.index < pieces - 32 * n)(move)
            else:
                move()


def _first_token(block: Int, part: Int) -> Int:
    return (block << 7) + (part << 5)


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step's codes, scales and zeros in shared memory, and this lane's reads of them.

    Attributes:
        keys, values: the addresses of the two parts; `Geometry.offsets` says where each array lies in its part.
    """

    keys: Int
    values: Int
    lane: Lane
    geometry: Geometry

    def place(self, name: str) -> tuple[Int, int]:
        """(the part's address, bytes to add) of an array."""
        side, _ = name.split("_")
        return self.keys if side == "key" else self.values, self.geometry.offsets(side)[name]

    def _at(self, name: str) -> Int:
        part, offset = self.place(name)
        return part + offset

    def key_words(self, half: int, chunk: int) -> list[list[Int]]:
        """[2 tile + upper][k]: 4 codes, those of row `g + 8 upper` of a tile at the channels of product k of a half."""
        geometry = self.geometry
        base = self._at("key_codes") + maps.key_read(self.lane.g, self.lane.t, half, geometry.head_dim)
        rows = [chunk * SPAN + maps.key_row(tile, upper) for tile in range(TILES) for upper in range(2)]
        return [gpu.load_shared(base, row * geometry.head_dim, 4) for row in rows]

    def key_pairs(self, name: str, half: int, group, problem: Problem) -> list[list[Int]]:
        """[k][2]: scales or zeros of a key group at the channels of product k of a half, paired as the codes are."""
        piece = maps.key_piece(self.lane.t, half, self.geometry.head_dim)
        base = self._at(name) + (piece << 5)
        row = self.geometry.key_scale_row
        base, offset = (base, group * row) if isinstance(group, int) else (base + group * row, 0)
        words = gpu.load_shared(base, offset, 4) + gpu.load_shared(base, offset + 16, 4)
        words = [problem.format.from_bfloat16(word) for word in words]
        return even_and_odd(words)

    def value_words(self, part: int, tile: int, upper: int, chunk: int) -> list[Int]:
        """[2]: codes of tokens k = 2t + 8 upper and the next of a tile: the lane's channels 0, 1 and 2, 3."""
        words = []
        for odd in range(2):
            row = maps.key_row(tile, upper) + odd
            base, offset = maps.value_read(self.lane.g, self.lane.t, part, row, self.geometry.head_dim)
            offset += chunk * SPAN * self.geometry.head_dim
            words += gpu.load_shared(self._at("value_codes") + base, offset)
        return [gpu.low_halves(*words), gpu.high_halves(*words)]

    def value_pairs(self, name: str, span: int, group, problem: Problem, tile: int) -> list[Int]:
        """[upper]: scales or zeros of tokens k = 2t + 8 upper and the next of a tile, of a value group."""
        row = self.geometry.value_scale_row
        base = self._at(name) + (self.lane.t << 4)
        base, offset = (base, group * row) if isinstance(group, int) else (base + group * row, 0)
        words = gpu.load_shared(base, offset + span * 2 * SPAN + 8 * tile, 2)
        return [problem.format.from_bfloat16(word) for word in words]

    def norms(self, span: int) -> list[Float]:
        """[2 tile + upper]: the key norms of the tokens of row `g + 8 upper` of a tile."""
        base = self._at("key_norm") + ((self.lane.g >> 1) << 4)
        odd = (self.lane.g & 1).equals(1)
        pairs = [gpu.bfloat16_pair(word) for word in gpu.load_shared(base, span * 2 * SPAN, 4)]
        return [gpu.select(odd, second, first) for first, second in pairs]


def even_and_odd(words: list[Int]) -> list[list[Int]]:
    """[k][2]: 8 words of 16 numbers as (0, 2), (1, 3); (4, 6), (5, 7); ..., as the bytes of codes come apart."""
    return [[pick(words[n], words[n + 1]) for pick in (gpu.low_halves, gpu.high_halves)] for n in range(0, 8, 2)]


def codes_of(word: Int, bits: int, plane: int) -> list[Int]:
    """Two operands from 4 bytes: `code * 2**(bits * plane - code_exponent)` of bytes 0, 2 and of bytes 1, 3."""
    mask = (2**bits - 1 << bits * plane) * 0x10001
    return [word & mask, (word >> 8) & mask]
