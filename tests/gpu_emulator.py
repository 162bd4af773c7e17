"""Runs the GPU kernels' own code on the CPU: `kernels.gpu.instructions` again, on 32 lanes of numpy.

What a kernel emits, one thread block after the other and one warp after the other, acts here on byte arrays that
stand for global and shared memory. Every access is checked against the arrays' bounds, asynchronous copies arrive
only when they are waited for, and memory that nobody wrote is NaN. Rounding follows the device's, but for the order
of float32 sums.
"""

import dataclasses
import threading

import jax
import ml_dtypes
import numpy as np

LANES = 32
_thread = threading.local()  # of the running warp: block, warp, mask, copies; shared by the block: memory, barrier

# ------------------------------------------------------------------------------------------------------------ memory


class Memory:
    """Byte arrays in one address space, with gaps between them that belong to nobody."""

    def __init__(self):
        self.bytes, self.owned, self.end = np.zeros(1 << 12, np.uint8), np.zeros(1 << 12, bool), 1 << 12

    def put(self, array: np.ndarray) -> int:
        """The address of a copy of the array."""
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        address, gap = self.end, 4096 + -data.size % 256
        self.bytes = np.concatenate([self.bytes, data, np.zeros(gap, np.uint8)])
        self.owned = np.concatenate([self.owned, np.ones(data.size, bool), np.zeros(gap, bool)])
        self.end = self.bytes.size
        return address

    def get(self, address: int, like: np.ndarray) -> np.ndarray:
        return self.bytes[address : address + like.nbytes].view(like.dtype).reshape(like.shape)

    def index(self, address, size: int) -> np.ndarray:
        """Indices [active lanes, size] of so many bytes at each active lane's address."""
        address = np.asarray(address, np.int64)[_thread.mask]
        assert (address % size == 0).all(), "misaligned access"
        index = address[:, None] + np.arange(size)
        assert index.min() >= 0 and index.max() < self.end and self.owned[index].all(), "access outside every array"
        return index

    def load(self, address, size: int) -> np.ndarray:
        out = np.zeros((LANES, size), np.uint8)
        out[_thread.mask] = self.bytes[self.index(address, size)]
        return out

    def store(self, address, data: np.ndarray):
        self.bytes[self.index(address, data.shape[1])] = data[_thread.mask]


# --------------------------------------------------------------------------------------------------------- registers


def _words(x):
    if isinstance(x, Int):
        return x.value
    return np.full(LANES, x & 0xFFFFFFFF, np.uint32)


def _signed(x):
    return _words(x).view(np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int:
    value: np.ndarray

    def __add__(self, other):
        return Int(self.value + _words(other))

    def __sub__(self, other):
        return Int(self.value - _words(other))

    def __mul__(self, other):
        return Int(self.value * _words(other))

    def __floordiv__(self, other):
        return Int(self.value // _words(other))

    def __mod__(self, other):
        return Int(self.value % _words(other))

    def __and__(self, other):
        return Int(self.value & _words(other))

    def __or__(self, other):
        return Int(self.value | _words(other))

    def __xor__(self, other):
        return Int(self.value ^ _words(other))

    def __lshift__(self, other):
        return Int(self.value << _words(other))

    def __rshift__(self, other):
        return Int(self.value >> _words(other))

    def __lt__(self, other):
        return Bool(_signed(self) < _signed(other))

    def __le__(self, other):
        return Bool(_signed(self) <= _signed(other))

    def __gt__(self, other):
        return Bool(_signed(self) > _signed(other))

    def __ge__(self, other):
        return Bool(_signed(self) >= _signed(other))

    def equals(self, other):
        return Bool(self.value == _words(other))

    __radd__, __rmul__, __rxor__ = __add__, __mul__, __xor__


def _floats(x):
    return x.value if isinstance(x, Float) else np.full(LANES, x, np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Float:
    value: np.ndarray

    def __add__(self, other):
        return Float(self.value + _floats(other))

    def __sub__(self, other):
        return Float(self.value - _floats(other))

    def __mul__(self, other):
        return Float(self.value * _floats(other))

    def __truediv__(self, other):
        return Float(self.value / _floats(other))

    def __gt__(self, other):
        return Bool(self.value > _floats(other))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bool:
    value: np.ndarray

    def __and__(self, other):
        return Bool(self.value & other.value)

    def __or__(self, other):
        return Bool(self.value | other.value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pointer:
    value: np.ndarray

    def __add__(self, offset):
        return Pointer(self.value + (offset if isinstance(offset, int) else offset.value.astype(np.int64)))

    def advance(self, index, stride):
        return Pointer(self.value + _words(index).astype(np.int64) * stride)


def integer(x):
    return x if isinstance(x, Int) else Int(_words(x))


def number(x):
    return x if isinstance(x, Float) else Float(_floats(x))


def select(condition, then, otherwise):
    return jax.tree.map(lambda a, b: np.where(condition.value, a, b), then, otherwise)


def minimum(a, b):
    return Int(np.minimum(_signed(a), _signed(b)).view(np.uint32))


def maximum(a, b):
    return Int(np.maximum(_signed(a), _signed(b)).view(np.uint32))


# ------------------------------------------------------------------------------------------------------ instructions


def exp2(x):
    return Float(np.exp2(x.value))


def fma(a, b, c):
    product = _floats(a).astype(np.float64) * _floats(b).astype(np.float64)
    return Float((product + _floats(c).astype(np.float64)).astype(np.float32))


def larger(a, b):
    return Float(np.fmax(a.value, b.value))


def ieee(operation, *operands):
    operate = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation]
    return Float(operate(*map(_floats, operands)))


def divide(a, b):
    return Float(_floats(a) / _floats(b))


def square_root(a):
    return Float(np.sqrt(a.value))


def smaller(a, b):
    return Float(np.fmin(a.value, b.value))


def round_half_even(x):
    return Int(
        np.clip(np.nan_to_num(np.rint(x.value.astype(np.float64))), -(2**31), 2**31 - 1)
        .astype(np.int32)
        .view(np.uint32)
    )


def bfloat16_bits(x):
    return Int(x.value.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32))


def float_bits(x):
    return Int(x.value.view(np.uint32))


def low_halves(x, y):
    return (x & 0xFFFF) | (y << 16)


def high_halves(x, y):
    return (x >> 16) | (y & 0xFFFF0000)


def bits_as_float(x):
    return Float(x.value.view(np.float32))


def bfloat16_pair(x):
    return bits_as_float(x << 16), bits_as_float(x & 0xFFFF0000)


def _halves(x, dtype):
    """[lane, 2]: the two 16-bit numbers of each word."""
    return np.ascontiguousarray(x.value).view(np.uint16).reshape(LANES, 2).view(dtype)


def transpose_8x8(x):
    matrix = _halves(x, np.uint16).reshape(8, 8)
    return Int(np.ascontiguousarray(matrix.T).reshape(LANES, 2).view(np.uint32).reshape(LANES))


def shuffle(x, lane):
    return Float(x.value[lane.value % LANES])


def shuffle_xor(x, distance):
    return Float(x.value[np.arange(LANES) ^ distance])


def shuffle_up(x, distance):
    lane = np.arange(LANES)
    return Int(x.value[np.where(lane >= distance, lane - distance, lane)])


def sum_lanes(x):
    return Int(np.full(LANES, x.value.sum(dtype=np.uint32), np.uint32))


def reduce_lanes(op, x, distances=(1, 2, 4, 8, 16)):
    for distance in distances:
        x = op(x, shuffle_xor(x, distance))
    return x


def any_lane(condition):
    return Bool(np.full(LANES, condition.value.any()))


def sync_warp():
    assert _thread.mask.all(), "a warp meets where not all of its lanes are"


def sync_block():
    sync_warp()
    _thread.barrier.wait(timeout=60)


def thread_index():
    return Int(np.arange(LANES, dtype=np.uint32) + LANES * _thread.warp)


def warp_index():
    return integer(_thread.warp)


def block_index():
    return integer(_thread.block)


def _load(space, address, offset, count, wrap, dtype):
    memory, scale = _memory(space), 4
    vector = scale * (count if count < 4 else 4)
    parts = [
        memory.load(address.value.astype(np.int64) + offset + at, vector) for at in range(0, scale * count, vector)
    ]
    words = np.ascontiguousarray(np.concatenate(parts, axis=1)).view(dtype)
    return [wrap(np.ascontiguousarray(words[:, n])) for n in range(count)]


def _memory(space):
    return _thread.shared if space == "shared" else _thread.memory


def load_shared(address, offset=0, count=1):
    return _load("shared", address, offset, count, Int, np.uint32)


def load_shared_floats(address, offset=0, count=1):
    return _load("shared", address, offset, count, Float, np.float32)


def load_global(pointer, offset=0, count=1):
    return _load("global", pointer, offset, count, Int, np.uint32)


def load_global_floats(pointer, offset=0, count=1):
    return _load("global", pointer, offset, count, Float, np.float32)


def load_global_half(pointer, offset=0):
    data = _thread.memory.load(pointer.value + offset, 2)
    return Int(np.ascontiguousarray(data).view(np.uint16).reshape(LANES).astype(np.uint32))


def _store(space, address, values, offset):
    for at in range(0, len(values), 4):
        data = np.stack([x.value for x in values[at : at + 4]], axis=1).view(np.uint8)
        _memory(space).store(address.value.astype(np.int64) + offset + 4 * at, data)


def store_shared_floats(address, values, offset=0):
    _store("shared", address, values, offset)


def store_global_floats(pointer, values, offset=0):
    _store("global", pointer, values, offset)


def store_global(pointer, values, offset=0):
    _store("global", pointer, values, offset)


def store_global_byte(pointer, value, offset=0):
    _thread.memory.store(pointer.value + offset, value.value.view(np.uint8).reshape(LANES, 4)[:, :1])


def store_global_half(pointer, value, offset=0):
    _thread.memory.store(pointer.value + offset, value.value.view(np.uint8).reshape(LANES, 4)[:, :2])


def copy_async(destination, source, destination_offset=0, source_offset=0):
    target = destination.value.astype(np.int64) + destination_offset
    data = _thread.memory.load(source.value + source_offset, 16)
    _thread.shared.store(target, np.full_like(data, 0xFF))  # on its way, it is neither what was there nor what comes
    _thread.copies[-1].append((_thread.mask, target, data))


def commit_copies():
    _thread.copies.append([])


def wait_copies(pending):
    while len(_thread.copies) - 1 > pending:
        for mask, target, data in _thread.copies.pop(0):
            with _masked(mask):
                _thread.shared.store(target, data)


class _masked:
    def __init__(self, mask):
        self.mask = mask

    def __enter__(self):
        self.before, _thread.mask = _thread.mask, _thread.mask & self.mask

    def __exit__(self, *_):
        _thread.mask = self.before


def when(condition):
    def run(body):
        with _masked(condition.value):
            if _thread.mask.any():
                body()

    return run


def _uniform(values):
    assert (values == values[0]).all(), "lanes of a warp part ways"
    return values[0]


def update_where(condition, update, values):
    return update() if _uniform(condition.value) else values


def loop(count, carry, body):
    for n in range(int(_uniform(_signed(count)))):
        carry = body(integer(n), carry)
    return carry


def loop_while(condition, carry, body):
    while _uniform(condition(carry).value):
        carry = body(carry)
    return carry


@dataclasses.dataclass(frozen=True)
class Format:
    """`instructions.Format`, of the same fields."""

    name: str
    code_exponent: int
    query_exponent: int
    weight_exponent: int
    mantissa_bits: int
    bias: int
    splits: bool

    @property
    def dtype(self):
        return ml_dtypes.bfloat16 if self.name == "bf16" else np.float16

    def power_of_two(self, exponent):
        return ((exponent + self.bias) << self.mantissa_bits) * 0x10001

    def _word(self, pairs):
        data = np.ascontiguousarray(pairs.astype(self.dtype)).view(np.uint16)
        return Int(data.view(np.uint32).reshape(LANES))

    def multiply(self, x, y):
        return self._word(_halves(x, self.dtype).astype(np.float32) * _halves(y, self.dtype).astype(np.float32))

    def lost(self, x, y, product):
        x, y, product = (_halves(z, self.dtype).astype(np.float64) for z in (x, y, product))
        return self._word(x * y - product)

    def pack(self, low, high):
        return self._word(np.stack([low.value, high.value], axis=1))

    def unpack(self, x):
        pairs = _halves(x, self.dtype).astype(np.float32)
        return Float(pairs[:, 0]), Float(pairs[:, 1])

    def from_bfloat16(self, x):
        return x if self.name == "bf16" else self.pack(*bfloat16_pair(x))

    def mma(self, accumulator, a, b):
        halves = lambda x: _halves(x, self.dtype).astype(np.float64).reshape(8, 8)  # [g, 2t + n]
        full = np.block([[halves(a[0]), halves(a[2])], [halves(a[1]), halves(a[3])]])
        other = np.concatenate([halves(b[0]), halves(b[1])], axis=1).T  # [k, column g]
        product = full @ other
        sums = np.stack([x.value for x in accumulator], axis=1).reshape(8, 4, 2, 2)  # [g, t, upper, n]
        product = product.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3)
        out = (sums + product).astype(np.float32).reshape(LANES, 4)
        return [Float(np.ascontiguousarray(out[:, n])) for n in range(4)]


BFLOAT16 = Format("bf16", 133, query_exponent=100, weight_exponent=100, mantissa_bits=7, bias=127, splits=False)
FLOAT16 = Format("f16", 24, query_exponent=-4, weight_exponent=6, mantissa_bits=10, bias=15, splits=True)


def format_of(dtype):
    return FLOAT16 if np.dtype(dtype) == np.float16 else BFLOAT16


# ----------------------------------------------------------------------------------------------------------- running


def launch(emit, arrays: dict[str, np.ndarray], shared_bytes: int, blocks: int, warps: int) -> dict[str, np.ndarray]:
    """Runs `emit(pointers, shared address)` in each warp of each block; returns the arrays as they are afterwards."""
    memory = Memory()
    addresses = {name: memory.put(x) for name, x in arrays.items()}
    failures = []

    def run(block, warp, shared, address, barrier):
        _thread.memory, _thread.shared, _thread.barrier = memory, shared, barrier
        _thread.block, _thread.warp = block, warp
        _thread.mask, _thread.copies = np.ones(LANES, bool), [[]]
        pointers = {name: Pointer(np.full(LANES, at, np.int64)) for name, at in addresses.items()}
        try:
            with np.errstate(all="ignore"):
                emit(pointers, integer(address))
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    for block in range(blocks):
        shared = Memory()
        address = shared.put(np.full(shared_bytes, 0xFF, np.uint8))
        barrier = threading.Barrier(warps)
        threads = [threading.Thread(target=run, args=(block, warp, shared, address, barrier)) for warp in range(warps)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
    return {name: memory.get(addresses[name], x) for name, x in arrays.items()}
