import jax.numpy as jnp
import numpy as np
import pytest

from kivi_jax.packing import pack, unpack


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_byte_holds_tokens_a_plane_apart_lowest_bits_first(bits, rng):
    codes = rng.integers(0, 2**bits, (2, 384, 5), dtype=np.uint8)
    packed = np.asarray(pack(jnp.asarray(codes), bits))
    rows = 16 * bits
    assert packed.shape == (2, 3 * rows, 5) and packed.dtype == np.uint8
    for block in range(3):
        for row in (0, 1, rows - 1):
            byte = packed[:, block * rows + row].astype(int)
            for plane in range(8 // bits):
                token = block * 128 + row + plane * rows
                assert np.array_equal(byte >> (bits * plane) & (2**bits - 1), codes[:, token])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_unpack_inverts_pack(bits, rng):
    codes = rng.integers(0, 2**bits, (3, 256, 4), dtype=np.uint8)
    assert np.array_equal(unpack(pack(jnp.asarray(codes), bits), bits), codes)


def test_partial_blocks_are_refused():
    with pytest.raises(ValueError, match="blocks of 128 tokens; got 100"):
        pack(jnp.zeros((100, 4), jnp.uint8), 2)
    with pytest.raises(ValueError, match="blocks of 32 byte rows; got 33"):
        unpack(jnp.zeros((33, 4), jnp.uint8), 2)
