"""Decode attention over packed codes: the kernel, and the merge of its parts.

Launch one, `partials`: the work of all sequences and KV heads lies in one list of units, in order: for each sequence,
for each of its KV heads, first its full-precision tokens (sinks, ring, piece beside the cache) in spans of 32, then its
quantized blocks in steps. Every thread block takes an equal share of the list, which it finds from the lengths on the
device. Its warps take the units in turn, so that they read neighbouring memory, but each on its own: a warp leaves one
partial result for each head that it meets. No work exists for tokens a sequence does not have, and nobody waits.

Launch two, `merge`: the partials of each head, by their log-sum-exp.

On one block, with codes c, scales s, zeros z and the middle of the codes m = (2^bits - 1) / 2, scores and output are

    S^T = K q^T:   q . (s c + z) = (q s) . c + q . z + m (q . s - sum of q s as rounded)
    O^T = V^T p^T: sum of p (s c + z) = sum of (p s) c + sum of p z

The first terms are exact in the codes, which go to the tensor cores as they are (`instructions.Format`), with tokens
(or channels) as the rows and 8 queries as the columns of the product. The last one centres the codes of the keys: it
makes the rounding of q s act on `c - m` rather than on c, for the softmax magnifies errors of the scores. Zeros, scales
and sums are one more product each: zeros in its rows 0 to 7, a row for each group, the rest in rows 8 to 15.
"""

import dataclasses
import functools
import math

import jax

from kivi_jax.config import BLOCK
from kivi_jax.kernels.gpu import instructions as gpu
from kivi_jax.kernels.gpu import maps
from kivi_jax.kernels.gpu.instructions import Float, Int, Pointer
from kivi_jax.kernels.gpu.maps import COLUMNS, SPAN, TILES
from kivi_jax.kernels.gpu.stage import Copies, Stage, codes_of, even_and_odd, lane_pointers
from kivi_jax.kernels.gpu.work import HEAD_UNITS, Lane, Problem, Refs, Sequence, WorkList, first_column

LOG2_E = math.log2(math.e)
FLOOR = -1e30  # below any score, and finite: exp2(FLOOR - FLOOR) must not be NaN
UNSEEN = -math.inf


# --------------------------------------------------------------------------------------------------- running softmax


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of the tiles of one span: `raw * unit + offset`, in units of log 2.

    Attributes:
        raw: [tile][4], as products come: rows g, g, g + 8, g + 8 of columns 2t, 2t + 1 in turn; -inf if not seen.
        unit: above 0.
        offset: [2], for each column.
    """

    raw: list
    unit: float
    offset: list

    def largest(self, column: int) -> Float:
        best = functools.reduce(gpu.larger, [tile[n] for tile in self.raw for n in (column, column + 2)])
        return gpu.fma(best, self.unit, self.offset[column])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What a lane holds of the attention to the tokens so far, for the queries of columns 2t and 2t + 1.

    Attributes:
        top: [2], the largest score, in units of log 2.
        out: [D / 32][2][4], weighted values: of columns 2t, 2t + 1 (entries 0, 1 and 2, 3) of channels
            `32 part + 4g + 2 half` and the one after it.
        sums: [4], the weighted zeros of value group g (0, 1) and the sums of the weights (2, 3).
    """

    top: list
    out: list
    sums: list

    @classmethod
    def empty(cls, head_dim: int):
        zero = gpu.number(0)
        out = [[[zero] * 4 for _ in range(2)] for _ in range(head_dim // 32)]
        return cls([gpu.number(FLOOR)] * 2, out, [zero] * 4)


def update_softmax(spans: list[Scores], state: State, problem: Problem) -> tuple[list, State]:
    """Takes in the scores of some spans.

    Returns the weights `exp2(score - top)` as operands b [span][tile][2] of the product with the values, in units of
    2**-weight_exponent, and the state with the sums so far relative to the new maximum.
    """
    fmt = problem.format
    top = [functools.reduce(gpu.larger, [state.top[n], *(span.largest(n) for span in spans)]) for n in range(2)]
    top = [gpu.reduce_lanes(gpu.larger, x, (4, 8, 16)) for x in top]
    grew = gpu.any_lane((top[0] > state.top[0]) | (top[1] > state.top[1]))

    def rescale():
        factors = [gpu.exp2(old - new) for old, new in zip(state.top, top, strict=True)]
        by = lambda values: [x * factors[n & 1] for n, x in enumerate(values)]
        return State(top, [[by(tile) for tile in part] for part in state.out], by(state.sums))

    state = gpu.update_where(grew, rescale, state)
    weights = []
    for span in spans:
        offset = [span.offset[n] - state.top[n] + float(fmt.weight_exponent) for n in range(2)]
        tiles = [[gpu.exp2(gpu.fma(x, span.unit, offset[n & 1])) for n, x in enumerate(tile)] for tile in span.raw]
        weights.append([[gpu.transpose_8x8(fmt.pack(p[n], p[n + 1])) for n in (0, 2)] for p in tiles])
    return weights, state


# ------------------------------------------------------------------------------------------------ quantized tokens


def score_codes(stage: Stage, q: list, lane: Lane, problem: Problem) -> list[Scores]:
    """The scores of a step's spans, from query operands [k][2]."""
    geometry, fmt = problem.geometry, problem.format
    bits, groups = geometry.key_bits, geometry.key_groups
    zero, one = gpu.integer(0), gpu.integer(fmt.power_of_two(0))
    empty = [gpu.number(0)] * 4
    raw = [[empty] * TILES for _ in range(geometry.spans)]
    terms = empty  # rows 0 .. 7: q . zero of each group; rows 8 .. 15: q . scale
    rounded = [empty] * groups  # the sums of q scale as rounded, in every row
    for half in range(geometry.head_dim // 64):
        own = lane.g & (groups - 1)
        zeros = stage.key_pairs("key_zero", half, own, problem)
        scales = [[zero] * 2] * 4 if fmt.splits else stage.key_pairs("key_scale", half, own, problem)
        for k in range(4):
            a = [zeros[k][0], scales[k][0], zeros[k][1], scales[k][1]]
            terms = fmt.mma(terms, a, q[4 * half + k])
        words = [stage.key_words(half, chunk) for chunk in range(geometry.chunks(bits))]
        for group in range(groups):
            scales = stage.key_pairs("key_scale", half, group, problem)
            for k in range(4):
                b = [fmt.multiply(q[4 * half + k][n], scales[k][n]) for n in range(2)]
                lost = [fmt.lost(q[4 * half + k][n], scales[k][n], b[n]) for n in range(2)] if fmt.splits else None
                if not fmt.splits:
                    rounded[group] = fmt.mma(rounded[group], [one] * 4, b)
                for span in geometry.spans_of(group):
                    chunk, plane = geometry.place(span, bits)
                    for tile in range(TILES):
                        upper, lower = (codes_of(words[chunk][2 * tile + n][k], bits, plane) for n in range(2))
                        a = [upper[0], lower[0], upper[1], lower[1]]
                        raw[span][tile] = fmt.mma(raw[span][tile], a, b)
                        if fmt.splits:
                            raw[span][tile] = fmt.mma(raw[span][tile], a, lost)
    factor = problem.scale * LOG2_E * 2.0**-fmt.query_exponent
    middle = 0.0 if fmt.splits else (2**bits - 1) / 2
    own = [gpu.fma(terms[n + 2], middle, terms[n]) for n in range(2)]
    spans = []
    for group in range(groups):
        offset = [gpu.fma(rounded[group][n], -middle, gpu.shuffle(own[n], lane.t + 4 * group)) for n in range(2)]
        offset = [x * factor for x in offset]
        for span in geometry.spans_of(group):
            unit = factor * 2.0 ** (fmt.code_exponent - bits * geometry.place(span, bits)[1])
            scores = Scores(raw[span], unit, offset)
            spans.append(with_norms(scores, stage.norms(span)) if geometry.has_norm else scores)
    return spans


def with_norms(scores: Scores, norms: list[Float]) -> Scores:
    """The scores of normalized keys, times the norms [2 tile + upper]."""
    full = [[gpu.fma(x, scores.unit, scores.offset[n & 1]) for n, x in enumerate(tile)] for tile in scores.raw]
    raw = [[x * norms[2 * at + n // 2] for n, x in enumerate(tile)] for at, tile in enumerate(full)]
    return Scores(raw, 1.0, [gpu.number(0)] * 2)


def mask_codes(spans: list[Scores], step: Int, sequence: Sequence, lane: Lane, problem: Problem) -> list[Scores]:
    """Hides, for each column's query, the tokens of a step that are too old or too new for it."""
    geometry = problem.geometry
    block, part = step // geometry.steps, step % geometry.steps
    start = (block << 7) + problem.sinks
    partly = start + (BLOCK - 1) > sequence.query
    if problem.sliding_window is not None:
        newest = sequence.query + (problem.queries - 1)
        partly = partly | (start <= newest - problem.sliding_window)

    def hide():
        query = column_positions(sequence, lane, problem)
        first = start + part * SPAN + maps.token_of_row(lane.g)
        hidden = []
        for at, span in enumerate(spans):
            rows = [
                [at * geometry.steps * SPAN + maps.key_row(tile, n // 2) for n in range(4)] for tile in range(TILES)
            ]
            see = lambda x, row, n: show(x, first + row, query[n & 1], problem)
            hidden.append([[see(x, rows[j][n], n) for n, x in enumerate(tile)] for j, tile in enumerate(span.raw)])
        return hidden

    raw = gpu.update_where(partly, hide, [span.raw for span in spans])
    return [dataclasses.replace(span, raw=x) for span, x in zip(spans, raw, strict=True)]


def show(score: Float, position: Int, query: Int, problem: Problem) -> Float:
    """The score if the query at a position sees the token at another."""
    seen = position <= query
    if problem.sliding_window is not None:
        seen = seen & (position > query - problem.sliding_window)
    return gpu.select(seen, score, gpu.number(UNSEEN))


def column_positions(sequence: Sequence, lane: Lane, problem: Problem) -> list[Int]:
    """Positions of the queries of columns 2t and 2t + 1."""
    if problem.queries == 1:
        return [sequence.query] * 2
    column = first_column(problem) + (lane.t << 1)
    return [sequence.query + (column + n) % problem.queries for n in range(2)]


def add_coded_values(stage: Stage, weights: list, state: State, lane: Lane, problem: Problem) -> State:
    """The state with a step's weighted values; weights are operands [span][tile][2]."""
    geometry, fmt = problem.geometry, problem.format
    bits, groups = geometry.value_bits, geometry.value_groups
    one, own = gpu.integer(fmt.power_of_two(0)), lane.g & (geometry.value_groups - 1)
    sums, out, planed = state.sums, [list(part) for part in state.out], []
    for span, tiles in enumerate(weights):
        for tile in range(TILES):
            zeros = stage.value_pairs("value_zero", span, own, problem, tile)
            sums = fmt.mma(sums, [zeros[0], one, zeros[1], one], tiles[tile])
        plane = geometry.place(span, bits)[1]  # whose power of two the weights make up for, exactly
        power = gpu.integer(fmt.power_of_two(-bits * plane))
        planed.append([[fmt.multiply(x, power) for x in pair] if plane else pair for pair in tiles])
    # Part by part innermost, so that consecutive products go to different accumulators.
    parts = range(geometry.head_dim // 32)
    for chunk in range(geometry.chunks(bits)):
        for tile in range(TILES):
            words = [[stage.value_words(part, tile, upper, chunk) for upper in range(2)] for part in parts]
            for span in range(chunk, geometry.spans, geometry.chunks(bits)):
                plane = geometry.place(span, bits)[1]
                for group in range(groups):
                    scales = stage.value_pairs("value_scale", span, group, problem, tile)
                    b = [fmt.multiply(planed[span][tile][n], scales[n]) for n in range(2)]
                    for part in geometry.parts_of(group):
                        for half in range(2):
                            low, high = (codes_of(words[part][upper][half], bits, plane) for upper in range(2))
                            out[part][half] = fmt.mma(out[part][half], [*low, *high], b)
    return State(state.top, out, sums)


# --------------------------------------------------------------------------------------------- full-precision tokens


@dataclasses.dataclass(frozen=True)
class ExactTokens:
    """The sinks, the ring and the piece of one head, in one row: where each token lies, read without staging.

    The lanes read straight into operands; there are at most some hundreds of these tokens.
    """

    sequence: Sequence
    refs: Refs
    head: Int
    problem: Problem

    def position(self, index: Int) -> Int:
        shift = self.sequence.ring_position - self.sequence.sinks
        return gpu.select(index < self.sequence.sinks, index, index + shift)

    def pointer(self, index: Int, side: str) -> Pointer:
        """Where the [D] numbers of a token lie; of the last token for an index past it."""
        problem, sequence = self.problem, self.sequence
        row = 2 * problem.geometry.head_dim
        index = gpu.minimum(index, sequence.exact - 1)
        slot = sequence.ring_slot + (index - sequence.sinks)
        slot = gpu.select(slot >= problem.ring, slot - problem.ring, slot) + problem.sinks
        slot = gpu.select(index < sequence.sinks, index, slot)
        window = getattr(self.refs, f"{side}_window").advance(self.head, problem.window * row)
        if not problem.has_piece:
            return window + slot * row
        piece = getattr(self.refs, f"new_{side}").advance(self.head, problem.queries * row)
        in_piece = index >= sequence.ring_end
        offset = gpu.select(in_piece, index - sequence.ring_end, slot) * row
        return gpu.select(in_piece, piece, window) + offset


def load_exact_keys(rows: list[Int], tokens: ExactTokens, lane: Lane) -> list:
    """[half][k][row][2]: operands of the keys of two rows, as `even_and_odd` takes them apart."""
    head_dim = tokens.problem.geometry.head_dim
    pointers = [tokens.pointer(row, "key") for row in rows]
    loaded = []
    for half in range(head_dim // 64):
        piece = maps.key_piece(lane.t, half, head_dim) << 5
        words = [gpu.load_global(p + piece, 0, 4) + gpu.load_global(p + piece, 16, 4) for p in pointers]
        loaded.append(list(zip(*map(even_and_odd, words), strict=True)))
    return loaded


def load_exact_values(rows: list[Int], tokens: ExactTokens, lane: Lane) -> list:
    """[part][row][2]: the lane's four channels of each part of the values of some rows; zero past the last token."""
    pointers = [tokens.pointer(row, "value") + (lane.g << 3) for row in rows]
    parts = range(tokens.problem.geometry.head_dim // 32)
    loaded = [[gpu.load_global(pointer, 64 * part, 2) for pointer in pointers] for part in parts]
    # A dead slot may hold a NaN, which a weight of zero does not remove.
    nothing = [gpu.integer(0)] * 2
    real = [row < tokens.sequence.exact for row in rows]
    return [[gpu.select(live, pair, nothing) for live, pair in zip(real, pairs, strict=True)] for pairs in loaded]


def exact_span(unit: Int, q: list, state: State, tokens: ExactTokens, lane: Lane, problem: Problem) -> State:
    """The state after 32 full-precision tokens; its sums have no code's power of two yet."""
    head_dim, fmt, sequence = problem.geometry.head_dim, problem.format, tokens.sequence
    first = unit * SPAN
    # Of each tile, rows g and g + 8 as keys, and tokens k = 2t, 2t + 1, 2t + 8, 2t + 9 as values.
    key_rows = [[first + lane.g + (16 * tile + 8 * n) for n in range(2)] for tile in range(TILES)]
    value_rows = [[first + (lane.t << 1) + (16 * tile + n) for n in (0, 1, 8, 9)] for tile in range(TILES)]
    keys = [load_exact_keys(rows, tokens, lane) for rows in key_rows]
    # All loads are on their way before the first is used, where registers allow.
    load_values = lambda: [load_exact_values(rows, tokens, lane) for rows in value_rows]
    values = load_values() if head_dim <= 128 else None
    query = column_positions(sequence, lane, problem)
    always_seen = problem.queries == 1 and problem.sliding_window is None
    raw = []
    for rows, halves in zip(key_rows, keys, strict=True):
        score = [gpu.number(0)] * 4
        for half, products in enumerate(halves):
            for k, (upper, lower) in enumerate(products):
                score = fmt.mma(score, [upper[0], lower[0], upper[1], lower[1]], q[4 * half + k])
        for n in range(4):
            if not always_seen:
                score[n] = show(score[n], tokens.position(rows[n // 2]), query[n & 1], problem)
            score[n] = gpu.select(rows[n // 2] < sequence.exact, score[n], gpu.number(UNSEEN))
        raw.append(score)
    unit = problem.scale * LOG2_E * 2.0**-fmt.query_exponent
    (weights,), state = update_softmax([Scores(raw, unit, [gpu.number(0)] * 2)], state, problem)
    zero, one, sums = gpu.integer(0), gpu.integer(fmt.power_of_two(0)), state.sums
    out = [list(part) for part in state.out]
    for tile, parts in enumerate(values or load_values()):
        sums = fmt.mma(sums, [zero, one, zero, one], weights[tile])
        for part, pairs in enumerate(parts):
            for half in range(2):
                words = [pair[half] for pair in pairs]
                a = [pick(words[n], words[n + 1]) for n in (0, 2) for pick in (gpu.low_halves, gpu.high_halves)]
                out[part][half] = fmt.mma(out[part][half], a, weights[tile])
    return State(state.top, out, sums)


# ------------------------------------------------------------------------------------------------------- one worker


def load_queries(refs: Refs, head: Int, lane: Lane, problem: Problem) -> list:
    """Query operands [k][2]: column g is a query, zero past the last; times 2**query_exponent."""
    fmt, head_dim = problem.format, problem.geometry.head_dim
    column = first_column(problem) + lane.g
    real = column < problem.columns
    row = refs.q.advance(head, problem.columns * head_dim * 2)
    row = row + gpu.minimum(column, problem.columns - 1) * (2 * head_dim)
    power = gpu.integer(fmt.power_of_two(fmt.query_exponent))
    operands = []
    for half in range(head_dim // 64):
        at = row + (maps.key_piece(lane.t, half, head_dim) << 5)
        words = gpu.load_global(at, 0, 4) + gpu.load_global(at, 16, 4)
        words = [gpu.select(real, fmt.multiply(word, power), gpu.integer(0)) for word in words]
        operands += even_and_odd(words)
    return operands


def store_partial(state: State, row: Int, refs: Refs, lane: Lane, problem: Problem):
    """One head's part: the weighted values, the largest scores and the sums of the weights, of this tile's columns."""
    geometry, fmt = problem.geometry, problem.format
    head_dim = geometry.head_dim
    weight = 2.0**-fmt.weight_exponent
    unit = 2.0 ** (fmt.code_exponent - fmt.weight_exponent)
    sums = [x * weight for x in state.sums]
    column = lane.t << 1
    columns = min(problem.columns, COLUMNS)
    out = refs.out.advance(row, columns * head_dim * 4) + column * (head_dim * 4) + (lane.g << 4)
    for part, halves in enumerate(state.out):
        source = lane.t + 4 * (part * 32 // geometry.value_group)
        offset = [gpu.shuffle(x, source) for x in sums[:2]]
        for n in range(2):
            values = [gpu.fma(halves[half][n + 2 * odd], unit, offset[n]) for half in range(2) for odd in range(2)]
            store = functools.partial(gpu.store_global_floats, out, values, n * head_dim * 4 + 128 * part)
            if columns == COLUMNS:
                store()
            else:
                gpu.when(column + n < columns)(store)
    top = refs.top.advance(row, 2 * COLUMNS * 4) + (column << 2)

    @gpu.when(lane.g.equals(0))
    def _():
        gpu.store_global_floats(top, state.top)
        gpu.store_global_floats(top, sums[2:], COLUMNS * 4)


def attend_head(
    head: Int, sequence: Sequence, first: Int, end: Int, row: Int, shared: Int, refs: Refs, lane: Lane, problem: Problem
):
    """Units `first`, `first + warps`, ... before `end` of a head, of which the first `HEAD_UNITS` are nothing to do.

    Leaves partial `row`. `shared` is this warp's part of shared memory, which holds the keys of one step and the values
    of one: those of the next are on their way as soon as they have been read.
    """
    geometry, fmt, warps = problem.geometry, problem.format, problem.warps
    exact_units = sequence.exact_units
    count = lambda start, stop: gpu.maximum(stop - start + (warps - 1), 0) // warps
    first = first + count(first, gpu.minimum(end, HEAD_UNITS)) * warps - HEAD_UNITS
    end = end - HEAD_UNITS
    exact = count(first, gpu.minimum(end, exact_units))
    steps = count(first + exact * warps, end)
    step_of = lambda n: first - exact_units + (exact + n) * warps + sequence.first_block * geometry.steps
    stage = Stage(shared, shared + geometry.offsets("key")["end"], lane, geometry)
    copies = Copies(stage, lane_pointers(refs, head, lane, problem), problem)

    def start(copy, n: Int):
        gpu.sync_warp()  # all lanes have left what is there
        gpu.when(n < steps)(lambda: copy(step_of(n)))
        gpu.commit_copies()

    def wait():
        """For keys and values in turn: for all copies but those started last."""
        gpu.wait_copies(1)
        gpu.sync_warp()  # those of all lanes

    start(copies.keys, gpu.integer(0))
    start(copies.values, gpu.integer(0))
    q = load_queries(refs, head, lane, problem)
    tokens = ExactTokens(sequence, refs, head, problem)
    state = gpu.loop(
        exact,
        State.empty(geometry.head_dim),
        lambda n, state: exact_span(first + n * warps, q, state, tokens, lane, problem),
    )
    # From here on the weighted values count in units of a code's bit pattern; in two factors, for float32's range.
    down = [fmt.code_exponent // 2, fmt.code_exponent - fmt.code_exponent // 2]
    out = [[[x * 2.0 ** -down[0] * 2.0 ** -down[1] for x in tile] for tile in part] for part in state.out]
    state = dataclasses.replace(state, out=out)

    def step(n: Int, state: State) -> State:
        wait()
        scores = score_codes(stage, q, lane, problem)
        start(copies.keys, n + 1)
        if problem.masks_codes:
            scores = mask_codes(scores, step_of(n), sequence, lane, problem)
        weights, state = update_softmax(scores, state, problem)
        wait()
        state = add_coded_values(stage, weights, state, lane, problem)
        start(copies.values, n + 1)
        return state

    store_partial(gpu.loop(steps, state, step), row, refs, lane, problem)


def work(refs: Refs, shared: Int, problem: Problem):
    """One warp's part of its thread block's share of the list: of each head there, every so many units."""
    lane, warp = Lane.current(), gpu.warp_index()
    tile, block = gpu.block_index() % problem.column_tiles, gpu.block_index() // problem.column_tiles
    shared = shared + warp * problem.geometry.step_bytes
    work_list = WorkList.load(refs, lane, problem)
    total = work_list.total()
    unit, end = (maps.first_unit(block + n, total, problem.blocks, gpu.minimum) for n in range(2))
    index, first = work_list.find(unit)

    def attend_next(carry):
        """Goes on to the next sequence, or attends to this one's next head."""
        unit, index, first = carry
        sequence = Sequence.load(index, refs, problem)
        units = sequence.units(problem.geometry)
        last = first + units * problem.kv_heads

        def attend():
            head = (unit - first) // units
            start = (unit - first) - head * units
            stop = gpu.minimum(units, start + (end - unit))
            head = head + index * problem.kv_heads

            @gpu.when(start.equals(0) & warp.equals(0) & lane.index.equals(0))
            def _():
                last_block = maps.block_of(unit + (units - 1), total, problem.blocks, gpu.maximum)
                gpu.store_global(refs.plan.advance(head, 16), [block, last_block + 1 - block, unit, total])

            skip = maps.units_before(warp, unit, problem.warps)
            row = maps.partial_row(tile * (problem.blocks + problem.heads) + block, head, warp, problem.warps)

            @gpu.when(skip < stop - start)
            def _():
                attend_head(head, sequence, start + skip, stop, row, shared, refs, lane, problem)

            return unit + (stop - start), index, first

        return gpu.update_where(unit < last, attend, (unit, index + 1, last))

    gpu.loop_while(lambda carry: carry[0] < end, (unit, index, first), attend_next)
