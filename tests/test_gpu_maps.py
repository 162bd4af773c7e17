"""The index maps of the GPU kernel, as integers: against the packing, against each other, and for bank conflicts."""

import itertools

import numpy as np
import pytest

from kivi_jax import packing
from kivi_jax.kernels.gpu import maps
from kivi_jax.kernels.gpu.maps import SPAN, TILES, Geometry

GEOMETRIES = [
    Geometry(head_dim, key_bits, value_bits, key_group, value_group)
    for head_dim, key_group, value_group in ((64, 32, 32), (64, 128, 64), (128, 32, 32), (128, 64, 128), (256, 32, 32))
    for key_bits, value_bits in ((2, 2), (4, 4), (8, 8), (4, 2), (2, 8))
]
LANES = [(lane, lane // 4, lane % 4) for lane in range(32)]
geometries = pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)


def staged(packed: np.ndarray, bits: int, geometry: Geometry, part: int, copy) -> np.ndarray:
    """Shared memory after the copies of step `part` of a block of codes, `[rows, D]` bytes."""
    size = geometry.code_bytes(bits)
    flat, out = packed.reshape(-1)[part * size : (part + 1) * size], np.full(size, 255, np.uint8)
    chunk = SPAN * geometry.head_dim
    for n, (lane, _, _) in itertools.product(range(size // 512), LANES):
        piece = 32 * n + lane
        address = copy(lane, n, geometry.head_dim) + 512 * n
        assert address // chunk == 16 * piece // chunk
        out[address : address + 16] = flat[16 * piece : 16 * piece + 16]
    return out


def block_of_codes(bits: int, head_dim: int):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (128, head_dim)).astype(np.uint8)
    return codes, np.asarray(packing.pack(codes, bits))


def token_of(geometry: Geometry, part: int, span: int, row: int) -> int:
    """The token of the block in row 0 .. 31 of a step's span."""
    return (part + span * geometry.steps) * SPAN + row


@geometries
def test_key_reads_find_their_codes(geometry):
    bits = geometry.key_bits
    codes, packed = block_of_codes(bits, geometry.head_dim)
    for part in range(geometry.steps):
        memory = staged(packed, bits, geometry, part, maps.key_copy)
        seen = np.zeros_like(codes, int)
        for (_, g, t), half, span in itertools.product(LANES, range(geometry.head_dim // 64), range(geometry.spans)):
            chunk, plane = geometry.place(span, bits)
            for tile, upper in itertools.product(range(TILES), range(2)):
                address = maps.key_read(g, t, half, geometry.head_dim)
                address += (chunk * SPAN + maps.key_row(tile, upper)) * geometry.head_dim
                read = memory[address : address + 16] >> (bits * plane) & (2**bits - 1)
                token = token_of(geometry, part, span, maps.token_of_row(g) + maps.key_row(tile, upper))
                channels = 16 * maps.key_piece(t, half, geometry.head_dim) + np.arange(16)
                np.testing.assert_array_equal(read, codes[token, channels])
                seen[token, channels] += 1
        tokens = [token_of(geometry, part, span, row) for span in range(geometry.spans) for row in range(SPAN)]
        assert (seen[tokens] == 1).all()


@geometries
def test_value_reads_find_their_codes(geometry):
    bits = geometry.value_bits
    codes, packed = block_of_codes(bits, geometry.head_dim)
    for part in range(geometry.steps):
        memory = staged(packed, bits, geometry, part, maps.value_copy)
        for (_, g, t), channels, span in itertools.product(
            LANES, range(geometry.head_dim // 32), range(geometry.spans)
        ):
            chunk, plane = geometry.place(span, bits)
            for row in range(8):
                address, offset = maps.value_read(g, t, channels, row, geometry.head_dim)
                address += offset + chunk * SPAN * geometry.head_dim
                read = memory[address : address + 4] >> (bits * plane) & (2**bits - 1)
                token = token_of(geometry, part, span, 8 * t + row)
                np.testing.assert_array_equal(read, codes[token, 32 * channels + 4 * g + np.arange(4)])


def test_keys_and_values_order_their_tokens_alike():
    """Row g + 8 upper of a tile of keys and weights is token k of the same tile of values."""
    for g, tile, upper in itertools.product(range(8), range(TILES), range(2)):
        t, odd = g // 2, g % 2  # of token k = 8 upper + g = 8 upper + 2t + odd
        assert maps.token_of_row(g) + maps.key_row(tile, upper) == 8 * t + maps.key_row(tile, upper) + odd


@geometries
def test_no_bank_conflicts(geometry):
    """Reads of 16 bytes go by 8 lanes, of 4 bytes by 32; lanes of a turn must not meet in a bank of 4 bytes."""
    head_dim, groups = geometry.head_dim, geometry.key_groups

    def conflicts(addresses: list[int], size: int) -> bool:
        words = {a // 4 + n for a in addresses for n in range(size // 4)}
        return len({word % 32 for word in words}) != len(words)

    turns = [LANES[n : n + 8] for n in range(0, 32, 8)]
    for turn, half in itertools.product(turns, range(head_dim // 64)):
        assert not conflicts([maps.key_read(g, t, half, head_dim) for _, g, t in turn], 16)
        own = [g % groups * geometry.key_scale_row + 32 * maps.key_piece(t, half, head_dim) for _, g, t in turn]
        assert not conflicts(own, 16)
    for turn in turns:
        own = [g % geometry.value_groups * geometry.value_scale_row + 16 * t for _, g, t in turn]
        assert not conflicts(own, 16)
    for part, row in itertools.product(range(head_dim // 32), range(8)):
        assert not conflicts([sum(maps.value_read(g, t, part, row, head_dim)) for _, g, t in LANES], 4)


@geometries
def test_scale_copies_take_each_piece_once(geometry):
    capacity = 512
    key, value = {}, {}
    for lane, n in itertools.product(range(32), range(8)):
        if lane + 32 * n < geometry.key_groups * geometry.key_scale_pieces:
            target, target_round = maps.scale_target(lane, geometry.key_scale_pieces, geometry.key_scale_row)
            source, source_round = maps.key_scale_source(lane, geometry)
            key[target + n * target_round] = source + n * source_round
        if lane + 32 * n < geometry.value_groups * geometry.value_scale_pieces:
            target, target_round = maps.scale_target(lane, geometry.value_scale_pieces, geometry.value_scale_row)
            source, source_round = maps.value_scale_source(lane, geometry, capacity)
            value[target + n * target_round] = source + n * source_round
    for group, piece in itertools.product(range(geometry.key_groups), range(geometry.key_scale_pieces)):
        row = group * geometry.key_group_stride * 2 * geometry.head_dim
        assert key.pop(group * geometry.key_scale_row + 16 * piece) == row + 16 * piece
    for group, piece in itertools.product(range(geometry.value_groups), range(geometry.value_scale_pieces)):
        token = token_of(geometry, 0, piece // 4, piece % 4 * 8)
        assert value.pop(group * geometry.value_scale_row + 16 * piece) == 2 * (group * capacity + token)
    assert not key and not value


@geometries
def test_key_groups_are_those_of_the_tokens(geometry):
    for part, span in itertools.product(range(geometry.steps), range(geometry.spans)):
        (group,) = [n for n in range(geometry.key_groups) if span in geometry.spans_of(n)]
        row = geometry.key_group_row(part) + group * geometry.key_group_stride
        assert row == token_of(geometry, part, span, 0) // geometry.key_group


@pytest.mark.parametrize("blocks", [1, 7, 132])
@pytest.mark.parametrize("total", [0, 1, 5, 131, 132, 1000, 33333])
def test_shares_cover_the_list(total, blocks):
    starts = [maps.first_unit(block, total, blocks) for block in range(blocks + 1)]
    sizes = np.diff(starts)
    assert starts[0] == 0 and starts[-1] == total and sizes.max() - sizes.min() <= 1
    for unit in range(0, total, 7):
        block = maps.block_of(unit, total, blocks)
        assert starts[block] <= unit < starts[block + 1]


def test_warps_take_turns_and_leave_their_parts_apart():
    heads, blocks, warps, units = 5, 4, 8, 33
    rows = set()
    for block in range(blocks):
        begin, end = (maps.first_unit(block + n, heads * units, blocks) for n in range(2))
        for head in range(begin // units, -(-end // units)):
            first, last = max(begin, head * units), min(end, (head + 1) * units)
            taken = []
            for warp in range(warps):
                mine = range(first + maps.units_before(warp, first, warps), last, warps)
                taken += mine
                row = maps.partial_row(block, head, warp, warps)
                assert row not in rows and row < (blocks + heads) * warps
                rows.add(row)
            assert sorted(taken) == list(range(first, last))
