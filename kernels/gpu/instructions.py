"""The instructions of the GPU kernels: registers with Python operators, and one function an instruction.

The only module that touches MLIR, PTX and what differs between versions of jax. Everything in it runs while a kernel is
traced, inside `inline_mgpu`, and emits code for one thread of a warp. PTX names are those of the PTX ISA manual.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf

ALL_LANES = "0xffffffff"

# ---------------------------------------------------------------------------------------------------------- registers


def _i32():
    return ir.IntegerType.get_signless(32)


def _i64():
    return ir.IntegerType.get_signless(64)


def _f32():
    return ir.F32Type.get()


def _constant(x, kind):
    if isinstance(kind, ir.F32Type):
        return arith.constant(kind, ir.FloatAttr.get(kind, float(x)))
    if kind == _i32() and x >= 1 << 31:
        x -= 1 << 32  # MLIR's constants are signed
    return arith.constant(kind, ir.IntegerAttr.get(kind, x))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int:
    """A 32-bit register holding an integer; comparisons are signed, `>>`, `//` and `%` are not."""

    value: ir.Value

    def __add__(self, other):
        return Int(arith.addi(self.value, raw(other)))

    def __sub__(self, other):
        return Int(arith.subi(self.value, raw(other)))

    def __mul__(self, other):
        return Int(arith.muli(self.value, raw(other)))

    def __floordiv__(self, other):
        return Int(arith.divui(self.value, raw(other)))

    def __mod__(self, other):
        return Int(arith.remui(self.value, raw(other)))

    def __and__(self, other):
        return Int(arith.andi(self.value, raw(other)))

    def __or__(self, other):
        return Int(arith.ori(self.value, raw(other)))

    def __xor__(self, other):
        return Int(arith.xori(self.value, raw(other)))

    def __lshift__(self, other):
        return Int(arith.shli(self.value, raw(other)))

    def __rshift__(self, other):
        return Int(arith.shrui(self.value, raw(other)))

    def __lt__(self, other):
        return Bool(arith.cmpi(arith.CmpIPredicate.slt, self.value, raw(other)))

    def __le__(self, other):
        return Bool(arith.cmpi(arith.CmpIPredicate.sle, self.value, raw(other)))

    def __gt__(self, other):
        return Bool(arith.cmpi(arith.CmpIPredicate.sgt, self.value, raw(other)))

    def __ge__(self, other):
        return Bool(arith.cmpi(arith.CmpIPredicate.sge, self.value, raw(other)))

    def equals(self, other):
        return Bool(arith.cmpi(arith.CmpIPredicate.eq, self.value, raw(other)))

    __radd__, __rmul__, __rxor__ = __add__, __mul__, __xor__


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Float:
    """A 32-bit register holding a float32."""

    value: ir.Value

    def __add__(self, other):
        return Float(arith.addf(self.value, raw_float(other)))

    def __sub__(self, other):
        return Float(arith.subf(self.value, raw_float(other)))

    def __mul__(self, other):
        return Float(arith.mulf(self.value, raw_float(other)))

    def __truediv__(self, other):
        return Float(arith.divf(self.value, raw_float(other)))

    def __gt__(self, other):
        return Bool(arith.cmpf(arith.CmpFPredicate.OGT, self.value, raw_float(other)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bool:
    """A predicate."""

    value: ir.Value

    def __and__(self, other):
        return Bool(arith.andi(self.value, other.value))

    def __or__(self, other):
        return Bool(arith.ori(self.value, other.value))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pointer:
    """A 64-bit address in global memory; adding moves it by so many bytes."""

    value: ir.Value

    def __add__(self, offset):
        if isinstance(offset, int):
            return Pointer(arith.addi(self.value, _constant(offset, _i64())))
        return Pointer(arith.addi(self.value, arith.extui(_i64(), raw(offset))))

    def advance(self, index, stride):
        """`index * stride` bytes further; the product may pass 32 bits."""
        wide = arith.extui(_i64(), raw(index))
        return Pointer(arith.addi(self.value, arith.muli(wide, _constant(stride, _i64()))))


def raw(x):
    return _constant(x, _i32()) if isinstance(x, int) else getattr(x, "value", x)


def raw_float(x):
    return _constant(x, _f32()) if isinstance(x, int | float) else getattr(x, "value", x)


def integer(x) -> Int:
    return Int(raw(x))


def number(x) -> Float:
    return Float(raw_float(x))


def select(condition: Bool, then, otherwise):
    """`then` where the condition holds, register by register, for pytrees of registers."""
    pick = lambda a, b: arith.select(condition.value, a, b)
    return jax.tree.map(pick, then, otherwise)


def minimum(a, b) -> Int:
    return Int(arith.minsi(raw(a), raw(b)))


def maximum(a, b) -> Int:
    return Int(arith.maxsi(raw(a), raw(b)))


# ------------------------------------------------------------------------------------------------------- instructions

_CONSTRAINT = {"i32": "r", "f32": "f", "i64": "l"}
_CONVERGENT = hasattr(llvm.InlineAsmOp, "convergent")  # jaxlib 0.11.2; before it, a side effect keeps warps together


def _asm(ptx: str, *operands, out: str = "", volatile: bool = False, warp: bool = False):
    """One instruction of inline PTX: `$0 ..` are the results, then the operands.

    Args:
        out: the results' types, a letter each: `i` Int, `f` Float, `p` Pointer.
        volatile: must not be moved, merged or dropped.
        warp: all lanes take part, so that it must not be moved into a branch.
    """
    operands = [raw_float(x) if isinstance(x, float) else raw(x) for x in operands]
    kinds = {"i": (_i32, Int), "f": (_f32, Float), "p": (_i64, Pointer)}
    types = [kinds[letter][0]() for letter in out]
    constraints = ["=" + _CONSTRAINT[str(t)] for t in types] + [_CONSTRAINT[str(x.type)] for x in operands]
    result = ir.Type.parse("!llvm.void")
    if types:
        result = types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    volatile = volatile or not types or (warp and not _CONVERGENT)
    flags = {"convergent": True} if warp and _CONVERGENT else {}
    value = llvm.inline_asm(result, operands, ptx, ",".join(constraints), has_side_effects=volatile, **flags)
    if not types:
        return None
    if len(types) == 1:
        return kinds[out][1](value)
    return tuple(kinds[c][1](llvm.extractvalue(t, value, [n])) for n, (c, t) in enumerate(zip(out, types, strict=True)))


def exp2(x: Float) -> Float:
    return _asm("ex2.approx.ftz.f32 $0, $1;", x, out="f")


def fma(a: Float, b, c) -> Float:
    return _asm("fma.rn.f32 $0, $1, $2, $3;", a, _float(b), _float(c), out="f")


def larger(a: Float, b: Float) -> Float:
    """The maximum; a NaN loses."""
    return _asm("max.f32 $0, $1, $2;", a, b, out="f")


def _float(x):
    return float(x) if isinstance(x, int) else x


def ieee(operation: str, *operands) -> Float:
    """`add`, `sub` or `mul` as IEEE has it: rounded on its own, never fused with another operation."""
    places = ", ".join(f"${n + 1}" for n in range(len(operands)))
    return _asm(f"{operation}.rn.f32 $0, {places};", *map(_float, operands), out="f")


def divide(a, b) -> Float:
    """The division that XLA compiles to for NVIDIA GPUs: not IEEE's, up to 2 units in the last place off."""
    return _asm("div.full.f32 $0, $1, $2;", _float(a), _float(b), out="f")


def square_root(a: Float) -> Float:
    """The square root that XLA compiles to for NVIDIA GPUs."""
    return _asm("sqrt.approx.f32 $0, $1;", a, out="f")


def smaller(a: Float, b: Float) -> Float:
    """The minimum; a NaN loses."""
    return _asm("min.f32 $0, $1, $2;", a, b, out="f")


def round_half_even(x: Float) -> Int:
    """The nearest integer, saturating."""
    return _asm("cvt.rni.s32.f32 $0, $1;", x, out="i")


def bfloat16_bits(x: Float) -> Int:
    """The bits of x rounded to bfloat16."""
    return _asm("{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; cvt.u32.u16 $0, h; }", x, out="i")


def float_bits(x: Float) -> Int:
    return Int(arith.bitcast(_i32(), x.value))


def low_halves(x: Int, y: Int) -> Int:
    """The low 16 bits of x, then those of y."""
    return _asm("prmt.b32 $0, $1, $2, 0x5410;", x, y, out="i")


def high_halves(x: Int, y: Int) -> Int:
    """The high 16 bits of x, then those of y."""
    return _asm("prmt.b32 $0, $1, $2, 0x7632;", x, y, out="i")


def bits_as_float(x: Int) -> Float:
    return Float(arith.bitcast(_f32(), x.value))


def bfloat16_pair(x: Int) -> tuple[Float, Float]:
    """Two bfloat16 numbers of one word, as float32."""
    return bits_as_float(x << 16), bits_as_float(x & 0xFFFF0000)


def transpose_8x8(x: Int) -> Int:
    """An 8x8 matrix of 16-bit numbers, two a lane: from rows in lanes 4r .. 4r + 3 to columns there."""
    return _asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", x, out="i", warp=True)


def shuffle(x: Float, lane: Int) -> Float:
    """The register of another lane."""
    return _asm(f"shfl.sync.idx.b32 $0, $1, $2, 0x1f, {ALL_LANES};", x, lane, out="f", volatile=True, warp=True)


def shuffle_xor(x: Float, distance: int) -> Float:
    return _asm(f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, {ALL_LANES};", x, out="f", volatile=True, warp=True)


def shuffle_up(x: Int, distance: int) -> Int:
    """The register of the lane `distance` before this one; the lane's own in the first lanes."""
    return _asm(f"shfl.sync.up.b32 $0, $1, {distance}, 0, {ALL_LANES};", x, out="i", volatile=True, warp=True)


def sum_lanes(x: Int) -> Int:
    return _asm(f"redux.sync.add.s32 $0, $1, {ALL_LANES};", x, out="i", volatile=True, warp=True)


def reduce_lanes(op, x: Float, distances=(1, 2, 4, 8, 16)) -> Float:
    """`op` over all lanes whose numbers differ only in the bits of `distances`."""
    for distance in distances:
        x = op(x, shuffle_xor(x, distance))
    return x


def any_lane(condition: Bool) -> Bool:
    ptx = (
        "{ .reg .pred p, q; setp.ne.u32 p, $1, 0; "
        f"vote.sync.any.pred q, p, {ALL_LANES}; selp.u32 $0, 1, 0, q; }}"  # a predicate cannot cross inline PTX
    )
    flag = _asm(ptx, Int(arith.extui(_i32(), condition.value)), out="i", volatile=True, warp=True)
    return Bool(arith.cmpi(arith.CmpIPredicate.ne, flag.value, raw(0)))


def sync_warp():
    _asm(f"bar.warp.sync {ALL_LANES};", warp=True)


def sync_block():
    _asm("barrier.sync 0;", warp=True)


# ------------------------------------------------------------------------------------------------ memory and the grid


def thread_index() -> Int:
    return Int(utils.thread_idx())


def warp_index() -> Int:
    """The warp's number in the block, known to be the same in all its lanes."""
    return Int(utils.warp_idx())


def block_index() -> Int:
    return Int(arith.index_cast(_i32(), gpu.block_id(gpu.Dimension.x)))


def global_pointer(ref) -> Pointer:
    return Pointer(llvm.ptrtoint(_i64(), utils.memref_ptr(ref)))


def shared_address(ref) -> Int:
    """Shared memory has 32-bit addresses."""
    return Int(llvm.ptrtoint(_i32(), utils.memref_ptr(ref)))


def _vector(first: int, count: int) -> tuple[str, str]:
    """PTX's vector suffix and operand list for registers `$first ..`."""
    names = ", ".join(f"${first + n}" for n in range(count))
    return (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)


def _load(space: str, kind: str, address, offset: int, count: int):
    if count > 4:  # 16 bytes at a time
        return _load(space, kind, address, offset, 4) + _load(space, kind, address, offset + 16, count - 4)
    vector, results = _vector(0, count)
    letter = "f" if kind == "f32" else "i"
    ptx = f"ld.{space}{vector}.{kind} {results}, [${count}+{offset}];"
    values = _asm(ptx, address, out=letter * count, volatile=True)
    return list(values) if count > 1 else [values]


def load_shared(address: Int, offset: int = 0, count: int = 1) -> list[Int]:
    return _load("shared", "u32", address, offset, count)


def load_shared_floats(address: Int, offset: int = 0, count: int = 1) -> list[Float]:
    return _load("shared", "f32", address, offset, count)


def load_global(pointer: Pointer, offset: int = 0, count: int = 1) -> list[Int]:
    """Words that no thread writes during the kernel."""
    return _load("global.nc", "u32", pointer, offset, count)


def load_global_floats(pointer: Pointer, offset: int = 0, count: int = 1) -> list[Float]:
    return _load("global.nc", "f32", pointer, offset, count)


def load_global_half(pointer: Pointer, offset: int = 0) -> Int:
    """One 16-bit number, zero-extended."""
    ptx = f"{{ .reg .u16 h; ld.global.u16 h, [$1+{offset}]; cvt.u32.u16 $0, h; }}"
    return _asm(ptx, pointer, out="i", volatile=True)


def _store(space: str, kind: str, address, values, offset: int):
    if len(values) > 4:
        _store(space, kind, address, values[:4], offset)
        return _store(space, kind, address, values[4:], offset + 16)
    vector, operands = _vector(1, len(values))
    return _asm(f"st.{space}{vector}.{kind} [$0+{offset}], {operands};", address, *values)


def store_shared_floats(address: Int, values: list[Float], offset: int = 0):
    _store("shared", "f32", address, values, offset)


def store_global_floats(pointer: Pointer, values: list[Float], offset: int = 0):
    _store("global", "f32", pointer, values, offset)


def store_global(pointer: Pointer, values: list[Int], offset: int = 0):
    _store("global", "u32", pointer, values, offset)


def store_global_byte(pointer: Pointer, value: Int, offset: int = 0):
    _asm(f"st.global.u8 [$0+{offset}], $1;", pointer, value)


def store_global_half(pointer: Pointer, value: Int, offset: int = 0):
    _asm(f"{{ .reg .u16 h; cvt.u16.u32 h, $1; st.global.u16 [$0+{offset}], h; }}", pointer, value)


def copy_async(destination: Int, source: Pointer, destination_offset: int = 0, source_offset: int = 0):
    """Starts copying 16 bytes from global to shared memory, past the L1 cache."""
    ptx = f"cp.async.cg.shared.global [$0+{destination_offset}], [$1+{source_offset}], 16;"
    _asm(ptx, destination, source)


def commit_copies():
    """Closes a group of this thread's copies."""
    _asm("cp.async.commit_group;")


def wait_copies(pending: int):
    """Waits until at most the last `pending` groups of this thread's copies are still on their way."""
    _asm(f"cp.async.wait_group {pending};")


# ------------------------------------------------------------------------------------------------------- control flow


def when(condition: Bool):
    """Decorates a function of no arguments, which runs where the condition holds."""

    def run(body):
        op = scf.IfOp(condition.value)
        with ir.InsertionPoint(op.then_block):
            body()
            scf.yield_([])

    return run


def update_where(condition: Bool, update, values):
    """The registers that `update()` returns where the condition holds, else `values`: two pytrees of one structure.

    Unlike `select`, it skips the work where the condition does not hold.
    """
    flat, tree = jax.tree.flatten(values)
    op = scf.IfOp(condition.value, [x.type for x in flat], has_else=True)
    with ir.InsertionPoint(op.then_block):
        scf.yield_(jax.tree.leaves(update()))
    with ir.InsertionPoint(op.else_block):
        scf.yield_(flat)
    return jax.tree.unflatten(tree, list(op.results))


def loop(count: Int, carry, body):
    """`carry = body(n, carry)` for n from 0 to `count - 1`; the carry is a pytree of registers."""
    flat, tree = jax.tree.flatten(carry)
    op = scf.ForOp(raw(0), raw(count), raw(1), flat)
    with ir.InsertionPoint(op.body):
        step = body(Int(op.induction_variable), jax.tree.unflatten(tree, list(op.inner_iter_args)))
        scf.yield_(jax.tree.leaves(step))
    return jax.tree.unflatten(tree, list(op.results))


def loop_while(condition, carry, body):
    """`carry = body(carry)` as long as `condition(carry)`; the carry is a pytree of registers."""
    flat, tree = jax.tree.flatten(carry)
    types = [x.type for x in flat]
    op = scf.WhileOp(types, flat)
    before, after = op.before.blocks.append(*types), op.after.blocks.append(*types)
    with ir.InsertionPoint(before):
        scf.condition(condition(jax.tree.unflatten(tree, list(before.arguments))).value, list(before.arguments))
    with ir.InsertionPoint(after):
        scf.yield_(jax.tree.leaves(body(jax.tree.unflatten(tree, list(after.arguments)))))
    return jax.tree.unflatten(tree, list(op.results))


# ---------------------------------------------------------------------------------------------------- tensor cores


@dataclasses.dataclass(frozen=True)
class Format:
    """A 16-bit float format as tensor-core operands, and the powers of two that keep products in its range.

    A code of up to 8 bits in the low byte of a 16-bit float is the number `code * 2**-code_exponent`: below 2**8 the
    bit patterns are equidistant, and the tensor cores multiply subnormal numbers exactly. So codes are multiplied as
    they are.

    Attributes:
        name: of the type in PTX.
        code_exponent: what a code's bit pattern stands for.
        query_exponent: queries are multiplied by 2 to it,
        weight_exponent: and attention weights too, both exactly, so that products with codes are not lost.
        mantissa_bits, bias: of the format.
        splits: whether what a product of query and scale loses to rounding is multiplied too. Codes with bfloat16
            scales are so coarse that float16 hardly rounds them, and nothing else is as exact.
    """

    name: str
    code_exponent: int
    query_exponent: int
    weight_exponent: int
    mantissa_bits: int
    bias: int
    splits: bool

    def power_of_two(self, exponent: int) -> int:
        """The bit pattern of `2**exponent`, in both halves of a word."""
        return ((exponent + self.bias) << self.mantissa_bits) * 0x10001

    def multiply(self, x: Int, y: Int) -> Int:
        """Two products, rounded."""
        return _asm(f"mul.rn.{self.name}x2 $0, $1, $2;", x, y, out="i")

    def lost(self, x: Int, y: Int, product: Int) -> Int:
        """What two rounded products lost to rounding."""
        return _asm(f"fma.rn.{self.name}x2 $0, $1, $2, $3;", x, y, product ^ 0x80008000, out="i")

    def pack(self, low: Float, high: Float) -> Int:
        """Two float32 numbers, rounded."""
        return _asm(f"cvt.rn.{self.name}x2.f32 $0, $1, $2;", high, low, out="i")

    def unpack(self, x: Int) -> tuple[Float, Float]:
        """Two numbers of one word, as float32."""
        if self.name == "bf16":
            return bfloat16_pair(x)
        ptx = "{ .reg .f16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
        return _asm(ptx, x, out="ff")

    def from_bfloat16(self, x: Int) -> Int:
        """A pair of stored scales or zeros in this format."""
        return x if self.name == "bf16" else self.pack(*bfloat16_pair(x))

    def mma(self, accumulator: list[Float], a: list[Int], b: list[Int]) -> list[Float]:
        """accumulator [16, 8] float32 += a [16, 16] @ b [16, 8], `mma.m16n8k16`.

        Lane 4g + t holds, two to a word, rows g, g + 8 (of columns 2t, 2t + 1), g, g + 8 (of columns 2t + 8, 2t + 9)
        of a; rows 2t, 2t + 1 and 2t + 8, 2t + 9 of column g of b; and rows g, g, g + 8, g + 8 of columns 2t, 2t + 1
        in turn of the accumulator.
        """
        ptx = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{self.name}.{self.name}.f32 "
            "{$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};"
        )
        return list(_asm(ptx, *a, *b, *accumulator, out="ffff", warp=True))


BFLOAT16 = Format("bf16", 133, query_exponent=100, weight_exponent=100, mantissa_bits=7, bias=127, splits=False)
FLOAT16 = Format("f16", 24, query_exponent=-4, weight_exponent=6, mantissa_bits=10, bias=15, splits=True)


def format_of(dtype) -> Format:
    return {jnp.dtype(jnp.bfloat16): BFLOAT16, jnp.dtype(jnp.float16): FLOAT16}[jnp.dtype(dtype)]
