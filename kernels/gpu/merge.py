"""The merge of the partial results of `decode`, by their log-sum-exp, in float32."""

import functools
import math
import operator

from kivi_jax.kernels.gpu import instructions as gpu
from kivi_jax.kernels.gpu import maps
from kivi_jax.kernels.gpu.decode import FLOOR
from kivi_jax.kernels.gpu.instructions import Bool, Int, Pointer
from kivi_jax.kernels.gpu.maps import COLUMNS
from kivi_jax.kernels.gpu.work import Lane, Problem, Refs, Sequence


def choose_division(problem: Problem) -> tuple[int, int]:
    """(warps of a thread block, parts whose loads a warp has on their way together).

    Enough to load all parts of a usual head at once, for a launch this short is all latency.
    """
    parts = math.ceil((problem.blocks / problem.heads + 2) * problem.warps)
    warps = 4 if parts <= 24 else 8 if parts <= 64 else 16
    return warps, min(-(-parts // warps), 10)


def scratch_floats(head_dim: int) -> int:
    """Per warp, in shared memory: a weighted sum [D], its maximum and its sum of weights; 16 bytes for the last two."""
    return head_dim + 4


def merge_head(refs: Refs, result: Pointer, shared: Int, problem: Problem):
    """The output of one query (this thread block's), [D]: the warps share its parts and meet in shared memory."""
    lane, warp = Lane.current(), gpu.warp_index()
    head_dim = problem.geometry.head_dim
    per_lane = head_dim // 32
    warps, at_once = choose_division(problem)
    query = gpu.block_index()  # h * columns + column, of all sequences' heads
    head, column = query // problem.columns, query % problem.columns
    tile, column = column // COLUMNS, column % COLUMNS
    block, blocks, first, total = gpu.load_global(refs.plan.advance(head, 16), 0, 4)
    units = Sequence.load(head // problem.kv_heads, refs, problem).units(problem.geometry)
    parts = gpu.select(units > 0, blocks * problem.warps, gpu.integer(0))  # a head without tokens has no plan
    row = maps.partial_row(tile * (problem.blocks + problem.heads) + block, head, 0, problem.warps)
    columns = min(problem.columns, COLUMNS)
    tops = refs.top.advance(row, 2 * COLUMNS * 4) + (column << 2)
    outs = refs.out.advance(row, columns * head_dim * 4) + column * (head_dim * 4) + lane.index * (4 * per_lane)

    def take_in(n: Int, carry):
        best, sums = carry
        tops_here, sums_here = [], []
        for k in range(at_once):
            part = (n * at_once + k) * warps + warp
            real = (part < parts) & has_units(part, block, first, units, total, problem)
            part = gpu.select(real, part, first % problem.warps)
            at = tops + part * (2 * COLUMNS * 4)
            top = gpu.load_global_floats(at)[0]
            values = gpu.load_global_floats(outs + part * (columns * head_dim * 4), 0, per_lane)
            sums_here.append(values + gpu.load_global_floats(at, COLUMNS * 4))
            tops_here.append(gpu.select(real, top, gpu.number(2 * FLOOR)))
        return weigh([*tops_here, best], [*sums_here, sums])

    # A part of a warp that has none would be weighed as if its maximum were FLOOR: 2 FLOOR gives it no weight.
    nothing = [gpu.number(0)] * (per_lane + 1)
    rounds = (gpu.maximum(parts - warp, 0) + (warps * at_once - 1)) // (warps * at_once)
    best, sums = gpu.loop(rounds, (gpu.number(FLOOR), nothing), take_in)
    stride = 4 * scratch_floats(head_dim)
    mine = shared + warp * stride
    gpu.store_shared_floats(mine + lane.index * (4 * per_lane), sums[:-1])
    gpu.when(lane.index.equals(0))(lambda: gpu.store_shared_floats(mine, [best, sums[-1]], 4 * head_dim))
    gpu.sync_block()

    @gpu.when(warp.equals(0))
    def _():
        tops, sums = [], []
        for other in range(warps):
            values = gpu.load_shared_floats(shared + lane.index * (4 * per_lane), other * stride, per_lane)
            top, weight = gpu.load_shared_floats(shared, other * stride + 4 * head_dim, 2)
            tops.append(top)
            sums.append([*values, weight])
        _, (*values, weight) = weigh(tops, sums)
        weight = gpu.select(weight > 0, weight, gpu.number(1))  # a sequence without tokens gives zeros
        values = [x / weight for x in values]
        words = [problem.format.pack(values[n], values[n + 1]) for n in range(0, per_lane, 2)]
        gpu.store_global(result.advance(query, 2 * head_dim) + lane.index * (2 * per_lane), words)


def has_units(part: Int, block: Int, first: Int, units: Int, total: Int, problem: Problem) -> Bool:
    """Whether the warp of a part, the warps of thread block `block` and the next ones in order, met the head at all."""
    block, warp = block + part // problem.warps, part % problem.warps
    begin, end = (maps.first_unit(block + n, total, problem.blocks, gpu.minimum) for n in range(2))
    begin, end = gpu.maximum(begin, first), gpu.minimum(end, first + units)
    return maps.units_before(warp, begin, problem.warps) < end - begin


def weigh(tops: list, sums: list):
    """(maximum, sum) of some sums [n][values] that are relative to their maxima [n]."""
    best = functools.reduce(gpu.larger, tops)
    weights = [gpu.exp2(top - best) for top in tops]
    weighed = [[x * weight for x in values] for weight, values in zip(weights, sums, strict=True)]
    return best, [functools.reduce(operator.add, column) for column in zip(*weighed, strict=True)]
