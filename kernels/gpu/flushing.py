"""The flush: quantizes and packs the block of each sequence that is due, in place, on the device.

The formulas are those of `kivi_jax.quantize`, operation by operation, so that the bits are the same. A thread takes a
channel of the keys (a byte of a row of codes is one channel of several tokens), or one byte row of one value group.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from kivi_jax.cache import LayerCache
from kivi_jax.config import BLOCK
from kivi_jax.kernels.gpu import instructions as gpu
from kivi_jax.kernels.gpu.instructions import Bool, Float, Int, Pointer
from kivi_jax.packing import byte_rows

THREADS = 128
STORED = ("key_codes", "key_scale", "key_zero", "value_codes", "value_scale", "value_zero", "key_norm")


@dataclasses.dataclass(frozen=True)
class Job:
    """What the flush of a layer is compiled for."""

    batch: int
    kv_heads: int
    capacity: int
    head_dim: int
    dtype: jnp.dtype
    config: object  # KiviConfig

    @property
    def key_blocks(self) -> int:
        """Thread blocks for the keys of a head: a channel a thread."""
        return -(-self.head_dim // THREADS)

    @property
    def value_rows(self) -> int:
        """Byte rows of value codes times value groups, of a head's block: a thread each."""
        return byte_rows(self.config.value_bits) * self.head_dim // self.config.value_group_size

    @property
    def blocks(self) -> int:
        return self.key_blocks + -(-self.value_rows // THREADS)


def flush(layer: LayerCache, length: jax.Array, quantized: jax.Array) -> LayerCache:
    """`kivi_jax.cache.flush_layer` in one launch; see `kivi_jax.kernels.gpu.flush`."""
    batch, heads, _, head_dim = layer.key_window.shape
    job = Job(batch, heads, layer.capacity, head_dim, jnp.dtype(layer.key_window.dtype), layer.config)
    fields = {name: getattr(layer, name) for name in STORED if getattr(layer, name, None) is not None}
    read_only = dict(key_window=layer.key_window, value_window=layer.value_window, length=length, quantized=quantized)
    return dataclasses.replace(layer, **_launch(fields, read_only, job=job))


# In a jit of its own, so that the layers of a model share one kernel; `launch` says why.
@functools.partial(jax.jit, static_argnames="job")
def _launch(fields: dict[str, jax.Array], read_only: dict[str, jax.Array], *, job: Job) -> dict[str, jax.Array]:
    refs = {name: jax.new_ref(x) for name, x in fields.items()}
    names = [*read_only, *refs]

    def kernel(*arrays):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(arrays))
        def run(_, *arrays):
            *arrays, norms = arrays
            pointers = {name: gpu.global_pointer(ref) for name, ref in zip(names, arrays, strict=True)}
            flush_head(pointers, gpu.shared_address(norms), job)

        run(*arrays)

    plgpu.kernel(
        kernel,
        out_type=(),
        scratch_types=[plgpu.SMEM((BLOCK,), jnp.float32)],
        grid=(job.batch * job.kv_heads * job.blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="kivi_flush",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
    )(*read_only.values(), *refs.values())
    return {name: jax.freeze(ref) for name, ref in refs.items()}


def flush_head(pointers: dict[str, Pointer], norms: Int, job: Job):
    """This thread block's part of one head: nothing unless the sequence is due. `norms` is shared, [128] float32."""
    config = job.config
    head, part = gpu.block_index() // job.blocks, gpu.block_index() % job.blocks
    sequence = head // job.kv_heads
    length = gpu.load_global(pointers["length"].advance(sequence, 4))[0]
    quantized = gpu.load_global(pointers["quantized"].advance(sequence, 4))[0]
    older = gpu.maximum(length - (config.sink_length + config.residual_length), 0)
    block = quantized >> 7

    @gpu.when((older >> 7) > block)
    def _():
        gpu.when(part < job.key_blocks)(lambda: flush_keys(pointers, norms, head, part, quantized, job))
        gpu.when(part >= job.key_blocks)(lambda: flush_values(pointers, head, part - job.key_blocks, quantized, job))


def window_row(pointers: dict[str, Pointer], side: str, head: Int, token, quantized: Int, job: Job) -> Pointer:
    """Where the [D] numbers of a token of the block lie in the window."""
    config, row = job.config, 2 * job.head_dim
    slot = quantized % config.ring_length + token
    slot = gpu.select(slot >= config.ring_length, slot - config.ring_length, slot) + config.sink_length
    return pointers[f"{side}_window"].advance(head, config.window_length * row) + slot * row


# -------------------------------------------------------------------------------------------------------- the quantizer


@dataclasses.dataclass(frozen=True)
class Group:
    """The affine map of a group: the bits of its scale and zero as stored, and what makes codes of numbers."""

    scale_bits: Int
    zero_bits: Int
    half_scale: Float
    half_zero: Float
    coded: Bool

    @classmethod
    def of(cls, numbers: list[Float], bits: int, clip: float):
        low, high = (functools.reduce(pick, numbers) for pick in (gpu.smaller, gpu.larger))
        finite = functools.reduce(lambda a, b: a & b, map(is_finite, numbers))
        spread = gpu.ieee("sub", high, low)

        def share(part: np.float32) -> Float:
            overflown = gpu.ieee("sub", gpu.ieee("mul", high, float(part)), gpu.ieee("mul", low, float(part)))
            return gpu.select(is_finite(spread), gpu.ieee("mul", spread, float(part)), overflown)

        scale = share(np.float32(clip / (2**bits - 1)))
        if clip < 1:
            low = gpu.ieee("add", low, without_last_bit(share(np.float32((1 - clip) / 2))))
        scale_bits = gpu.select(finite, gpu.bfloat16_bits(scale), gpu.integer(0))
        zero_bits = gpu.bfloat16_bits(gpu.select(finite, low, gpu.number(math.nan)))
        scale, zero = gpu.bits_as_float(scale_bits << 16), gpu.bits_as_float(zero_bits << 16)
        half = lambda x: gpu.ieee("mul", x, 0.5)
        return cls(scale_bits, zero_bits, half(scale), half(zero), (scale > 0) & finite)

    def code(self, number: Float, bits: int) -> Int:
        distance = gpu.ieee("sub", gpu.ieee("mul", number, 0.5), self.half_zero)
        divisor = gpu.select(self.coded, self.half_scale, gpu.number(1))
        code = gpu.round_half_even(gpu.divide(distance, divisor))
        code = gpu.minimum(gpu.maximum(code, 0), 2**bits - 1)
        return gpu.select(self.coded, code, gpu.integer(0))


def is_finite(x: Float) -> Bool:
    return (gpu.float_bits(x) & 0x7F800000) < 0x7F800000


def without_last_bit(x: Float) -> Float:
    """x rounded to 22 bits of mantissa, half to even."""
    bits = gpu.float_bits(x)
    return gpu.bits_as_float((bits + ((bits >> 1) & 1)) & ~1 & 0xFFFFFFFF)


# -------------------------------------------------------------------------------------------------------------- keys


def flush_keys(pointers: dict[str, Pointer], norms: Int, head: Int, part: Int, quantized: Int, job: Job):
    """The keys of a head: each thread one channel of all 128 tokens."""
    config, bits, head_dim = job.config, job.config.key_bits, job.head_dim
    thread = gpu.thread_index()
    channel, block = part * THREADS + thread, quantized >> 7
    if config.key_norm:
        store_norms(pointers, norms, head, part, quantized, job)
        gpu.sync_block()

    @gpu.when(channel < head_dim)
    def _():
        numbers = []
        for token in range(BLOCK):
            row = window_row(pointers, "key", head, token, quantized, job) + channel * 2
            number, _ = gpu.format_of(job.dtype).unpack(gpu.load_global_half(row))
            if config.key_norm:
                inverse = gpu.load_shared_floats(norms, 4 * token)[0]
                number = gpu.ieee("mul", number, inverse)
            numbers.append(number)
        size, rows = config.key_group_size, byte_rows(bits)
        groups = [Group.of(numbers[n : n + size], bits, config.key_clip) for n in range(0, BLOCK, size)]
        scale_row = head_dim * 2
        for name, field in (("key_scale", "scale_bits"), ("key_zero", "zero_bits")):
            at = pointers[name].advance(head, job.capacity // size * scale_row)
            at = at.advance(block, BLOCK // size * scale_row) + channel * 2
            for n, group in enumerate(groups):
                gpu.store_global_half(at, getattr(group, field), n * scale_row)
        at = pointers["key_codes"].advance(head, job.capacity * bits // 8 * head_dim)
        at = at.advance(block, rows * head_dim) + channel
        for row in range(rows):
            tokens = range(row, BLOCK, rows)
            codes = [groups[token // size].code(numbers[token], bits) << bits * n for n, token in enumerate(tokens)]
            gpu.store_global_byte(at, functools.reduce(lambda a, b: a | b, codes), row * head_dim)


def store_norms(pointers: dict[str, Pointer], norms: Int, head: Int, part: Int, quantized: Int, job: Job):
    """Each thread the length of one token's key, into the cache, and its inverse into shared memory."""
    token = gpu.thread_index()
    row = window_row(pointers, "key", head, token, quantized, job)
    half = job.head_dim // 2
    squares = []
    for start in range(0, half, 8):
        low, high = (load_numbers(row, at, 8, job) for at in (start, start + half))
        square = lambda x: gpu.ieee("mul", x, x)
        squares += [gpu.ieee("add", square(x), square(y)) for x, y in zip(low, high, strict=True)]
    while len(squares) > 1:
        half = len(squares) // 2
        squares = [gpu.ieee("add", squares[n], squares[n + half]) for n in range(half)]
    bits = gpu.bfloat16_bits(gpu.square_root(squares[0]))
    norm = gpu.bits_as_float(bits << 16)
    divisor = gpu.select(bits.equals(0), gpu.number(1), norm)
    gpu.store_shared_floats(norms + (token << 2), [gpu.divide(gpu.number(1), divisor)])
    at = pointers["key_norm"].advance(head, job.capacity * 2) + (quantized + token) * 2
    gpu.when(part.equals(0))(lambda: gpu.store_global_half(at, bits))


def load_numbers(row: Pointer, start: int, count: int, job: Job) -> list[Float]:
    """`count` numbers, a multiple of 8, of a row from channel `start` on."""
    words = gpu.load_global(row, 2 * start, count // 2)
    return [x for word in words for x in gpu.format_of(job.dtype).unpack(word)]


# ------------------------------------------------------------------------------------------------------------ values


def flush_values(pointers: dict[str, Pointer], head: Int, part: Int, quantized: Int, job: Job):
    """The values of a head: each thread one group of channels of the tokens of one byte row."""
    config, bits, head_dim = job.config, job.config.value_bits, job.head_dim
    size, rows, block = config.value_group_size, byte_rows(bits), quantized >> 7
    index = part * THREADS + gpu.thread_index()
    row, group_index = index % rows, index // rows

    @gpu.when(index < job.value_rows)
    def _():
        packed = [gpu.integer(0)] * (size // 4)  # four channels a word
        scale_row = 2 * job.capacity
        for plane in range(8 // bits):
            token = row + plane * rows
            at = window_row(pointers, "value", head, token, quantized, job) + group_index * (2 * size)
            numbers = load_numbers(at, 0, size, job)
            group = Group.of(numbers, bits, config.value_clip)
            for name, field in (("value_scale", group.scale_bits), ("value_zero", group.zero_bits)):
                at = pointers[name].advance(head, head_dim // size * scale_row).advance(group_index, scale_row)
                gpu.store_global_half(at + (quantized + token) * 2, field)
            for n, number in enumerate(numbers):
                packed[n // 4] = packed[n // 4] | (group.code(number, bits) << (8 * (n % 4) + bits * plane))
        at = pointers["value_codes"].advance(head, job.capacity * bits // 8 * head_dim)
        at = at.advance(block, rows * head_dim) + (row * head_dim + group_index * size)
        gpu.store_global(at, packed)
