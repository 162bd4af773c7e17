"""The decode kernel: queries against the quantized rows of the cache, one grid step of tokens at a time.

The affine map is folded around the dot products. With `s` the scale and `z` the zero of a group,
`q . (s c + z) = (q s) . c + q . z` for each key group: the left operand stacks `q * s` over the groups of a block, one
product gives every group's rows for every token, and each lane takes the rows of its own group. Values are the mirror
image: `sum p (s c + z) = sum (p s) c + sum p z`, and each lane, a channel, takes the rows of its own value group.

The products meet `codes.planes`, not codes; the offset between the two is taken out with the rounded left operands.

Scores are in units of log 2. A register is 8 rows of 128 lanes.
"""

import functools
from types import SimpleNamespace

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kivi_jax.config import BLOCK
from kivi_jax.kernels.online_softmax import FLOOR
from kivi_jax.kernels.tpu import codes
from kivi_jax.kernels.tpu.pairs import pack, unpack
from kivi_jax.kernels.tpu.plan import SUBLANES, Plan

_BY_LANES = (((1,), (1,)), ((), ()))
_BY_SUBLANES = (((1,), (0,)), ((), ()))


def decode_step(*refs, names: tuple[str, ...], plan: Plan, axis: int):
    """One step of the grid, whose items are along `axis`. The refs, by name, with those that only some plans have in
    brackets:

    scalars
        item_sequence [items]: the sequence of each grid step
        item_step [items]: which of the sequence's steps it is
        item_left [items]: quantized blocks of the sequence from this step on
        [item_first] [items]: 1 if it is the first that runs, where that may be another than step 0
        [first_row] [B]: the first row of the cache that the first query sees
    inputs
        q: f32 [1, heads, 2E, D], scaled: the even rows, repeated to E, then the odd rows
        key_codes: u8 [1, heads, tokens * key_bits / 8, D], or with the last two axes swapped
        key_scale, key_zero: bf16 [1, heads, tokens / g, D], or [1, heads, D, scale_lanes]
        value_codes: u8 [1, heads, tokens * value_bits / 8, D], or with the last two axes swapped
        value_scale, value_zero: bf16 [1, heads, D/g, tokens], or [1, heads, tokens] if there is one group
        [key_norm]: bf16 [1, heads, tokens]
    output, which stays in place over the steps of a sequence
        state: f32 [1, heads, R, 128 + D]: top in 64 lanes, the sum of the weights in 64, the weighted values in D; a
            weight is exp2(score - top)
    scratch
        key_zeros: f32 [heads, R, 128], query times the zero of each group, a group a lane; FLOOR in dead blocks
        key_scales: f32 [heads, D/128 or 1, groups * key_repeats, 128 or D], each group's row that many times
        value_scales, value_zeros: f32 [heads, D/g, tokens]
        products: f32 [heads, D/128 or 1, value_registers * R, 128 or D]
        [norms]: f32 [heads, 1, tokens]
        [block_scales]: f32 [heads, scale_lanes, D], of which key_scales are a part
        [key_bytes, value_bytes]: u8 [heads, tokens * bits / 8, D], where the codes' axes are swapped
    """
    refs = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    item = pl.program_id(axis)
    step, left = refs.item_step[item], refs.item_left[item]
    first = refs.item_first[item] == 1 if plan.sliding else step == 0
    upper = _lane((plan.rows, BLOCK)) >= BLOCK // 2
    # The first group of the step among those that are here.
    first_group = step * plan.step_groups % plan.scale_lanes if plan.scale_lanes else 0
    visible_from = None
    if plan.sliding:
        row = lax.broadcasted_iota(jnp.int32, (plan.rows, BLOCK), 0) % plan.distinct_rows
        visible_from = refs.first_row[refs.item_sequence[item]] - step * plan.tokens + row % plan.queries

    lax.fori_loop(jnp.maximum(left, 0), plan.blocks, lambda block, _: _clear_dead(block, refs, plan), None)

    def scores(h):
        _prepare_keys(h, refs, left, first_group, plan)
        found = _scores(h, refs, first_group, plan)
        if plan.sliding:
            token = lambda block: _lane((plan.rows, BLOCK)) + block * BLOCK
            found = [jnp.where(token(block) >= visible_from, s, FLOOR) for block, s in enumerate(found)]
        return found

    def weigh(h):
        found = scores(h)
        stats = refs.state[0, h, :, :BLOCK]
        top = jnp.where(first, FLOOR, jnp.broadcast_to(stats[:, :1], stats.shape))
        total = jnp.where(first, 0.0, jnp.broadcast_to(stats[:, BLOCK // 2 : BLOCK // 2 + 1], stats.shape))
        new_top = jnp.maximum(top, functools.reduce(jnp.maximum, found).max(axis=1, keepdims=True))
        decay = jnp.exp2(top - new_top)
        weights = [jnp.exp2(s - new_top) for s in found]
        total = total * decay + functools.reduce(jnp.add, weights).sum(axis=1, keepdims=True)
        refs.state[0, h, :, :BLOCK] = jnp.where(upper, total, new_top)
        return weights, decay

    def accumulate(h, weights, decay):
        _prepare_values(h, refs, plan)
        held = jnp.where(first, 0.0, refs.state[0, h, :, BLOCK:])
        refs.state[0, h, :, BLOCK:] = held * _lanes(decay, plan.channels) + _weighted(h, refs, weights, plan)

    # The static scheduler keeps the program's order between dependent phases, so the order is already pipelined.
    pending = []
    for h in range(plan.heads):
        pending.append((h, *weigh(h)))
        if len(pending) > plan.depth:
            accumulate(*pending.pop(0))
    for ahead in pending:
        accumulate(*ahead)


def _clear_dead(block, refs, plan):
    """Overwrites what came with a sequence's last blocks but is past them: it may be NaN, and 0 times NaN is NaN."""
    tokens = pl.ds(pl.multiple_of(block * BLOCK, BLOCK), BLOCK)
    for ref in (refs.value_scale, refs.value_zero):
        ref[..., tokens] = jnp.zeros((*ref.shape[:-1], BLOCK), ref.dtype)
    if plan.key_norm:  # by which FLOOR is multiplied
        refs.key_norm[..., tokens] = jnp.ones((*refs.key_norm.shape[:-1], BLOCK), refs.key_norm.dtype)


def _prepare_keys(h, refs, left, first_group, plan):
    """Fills the scratch of one head's keys."""
    scale, zero = refs.key_scale[0, h], refs.key_zero[0, h]
    q = _two_terms(refs.q[0, h], plan)
    dot = lambda x: _dot(q, x, _BY_SUBLANES if plan.scale_lanes else _BY_LANES)
    zeros = dot(zero)
    if plan.centred:
        zeros = zeros + codes.middle(plan.key_bits) * dot(scale)
    zeros = zeros[: plan.rows] + zeros[plan.rows :]
    live = _lane(zeros.shape) < first_group + left * plan.key_groups
    refs.key_zeros[h, :, : zeros.shape[1]] = jnp.where(live, zeros, FLOOR)
    scale = scale.astype(jnp.float32)
    if plan.scale_lanes:
        refs.block_scales[h] = scale.T
        scale = refs.block_scales[h, pl.ds(pl.multiple_of(first_group, SUBLANES), plan.step_groups)]
    live = lax.broadcasted_iota(jnp.int32, scale.shape, 0) < left * plan.key_groups
    scale = jnp.where(live, scale, 0.0)
    for tile, ref in _lane_tiles(refs.key_scales.at[h]):
        _spread(ref, scale[:, tile], plan.key_repeats)
    if plan.key_codes_by_lanes:
        refs.key_bytes[h] = refs.key_codes[0, h].T
    if plan.key_norm:
        refs.norms[h] = refs.key_norm[0, h : h + 1].astype(jnp.float32)


def _prepare_values(h, refs, plan):
    """Fills the scratch of one head's values."""
    for scratch, ref in ((refs.value_scales, refs.value_scale), (refs.value_zeros, refs.value_zero)):
        x = ref[0, h : h + 1] if plan.value_groups == 1 else ref[0, h]
        scratch[h] = x.astype(jnp.float32)
    if plan.value_codes_by_lanes:
        refs.value_bytes[h] = refs.value_codes[0, h].T


def _two_terms(q, plan):
    """The rows of `q [2E, D]`, bf16 [2R, D]: rounded, and then what rounding left, which makes them good to 2**-17."""
    halves = _even_and_odd(q)
    rounded = unpack(pack(*halves, plan.interpret))
    rest = [x - r for x, r in zip(halves, rounded, strict=True)]
    if plan.rows > SUBLANES:
        return jnp.concatenate([pack(*rounded, plan.interpret), pack(*rest, plan.interpret)], axis=0)
    # A half has every row twice: enough for both terms.
    second = _is_second_copy(rest[0].shape)
    return pack(*(jnp.where(second, b, a) for a, b in zip(rounded, rest, strict=True)), plan.interpret)


def _spread(ref, x, repeats):
    """Writes each row of x that many times, one below the other."""
    for n in range(repeats):
        ref[pl.ds(n, x.shape[0], stride=repeats)] = x


def _scores(h, refs, first_group, plan):
    """Scores of a head against the step's tokens: a list of f32 [R, 128], one a block.

    Where the plan has no centred codes, a second product, with the constant 1, gives the sums of the rounded left
    operands, in every lane: what the offset of the digits' numbers adds, exactly.
    """
    packed = refs.key_bytes.at[h] if plan.key_codes_by_lanes else refs.key_codes.at[0, h]
    byte_rows = BLOCK * plan.key_bits // 8
    group = _lane((plan.rows, BLOCK)) // plan.key_group
    constant = jnp.ones((plan.channels, BLOCK), codes.DTYPE)
    planes_of = codes.centred_planes if plan.centred else codes.planes
    even, odd = _even_and_odd(_times(1 if plan.centred else 4, refs.q[0, h]))

    def left_operand(run):
        """bf16 rows of q * scale, for each group of a run of blocks each distinct row; whole registers."""
        groups = range(run.start * plan.key_groups, run.stop * plan.key_groups, plan.pair_groups)
        rows = SUBLANES if plan.key_repeats > 1 else 1
        scales = [_join_lanes(refs.key_scales.at[h], pl.ds(n * plan.key_repeats, rows)) for n in groups]
        return jnp.concatenate([pack(even * s, odd * s, plan.interpret) for s in scales], axis=0)

    out = []
    for chunk in _chunks(range(plan.blocks), plan.chunk):
        runs = _chunks(chunk, plan.width)
        lefts = [left_operand(run) for run in runs]
        if not plan.centred:
            sums = _dot(jnp.concatenate(lefts, axis=0), constant, _BY_SUBLANES)
            sums = _times(codes.offset(plan.key_bits), sums)
        for run, left in zip(runs, lefts, strict=True):
            x = jnp.concatenate([_times(w, left) for w in codes.weights(plan.key_bits)], axis=1)
            planes = [planes_of(packed[b * byte_rows : (b + 1) * byte_rows], plan.key_bits) for b in run]
            y = jnp.concatenate([jnp.concatenate(digits, axis=1) for digits in planes], axis=0)
            products = _dot(x, y, _BY_LANES)
            if not plan.centred:
                above = (run.start - chunk.start) // plan.width * lefts[0].shape[0]
                run_sums = sums[above : above + left.shape[0]]
            for n, block in enumerate(run):
                at = n * plan.key_groups  # the block's first group among those of the run
                parts = []
                for m in range(at // plan.copies, -(-(at + plan.key_groups) // plan.copies)):
                    own_rows = slice(m * plan.rows, (m + 1) * plan.rows)
                    part = products[own_rows, n * BLOCK : (n + 1) * BLOCK]
                    parts.append(part if plan.centred else part - run_sums[own_rows])
                lanes = group + (first_group + block * plan.key_groups)
                zero = jnp.take_along_axis(refs.key_zeros[h], lanes, axis=1, mode="promise_in_bounds")
                score = _own_group(parts, group + at % plan.copies, plan) + zero
                if plan.key_norm:
                    score = score * refs.norms[h, :, block * BLOCK : (block + 1) * BLOCK]
                out.append(score)
    return out


def _weighted(h, refs, weights, plan):
    """The step's values of a head weighted: `weights` as a list of f32 [R, 128], one a block, to f32 [R, D]."""
    packed = refs.value_bytes.at[h] if plan.value_codes_by_lanes else refs.value_codes.at[0, h]
    rows, channels, registers = plan.rows, plan.channels, range(plan.value_registers)
    used = -(-plan.value_groups // plan.copies)
    byte_rows = BLOCK * plan.value_bits // 8
    lefts, rights, zeros, sums = [], [], [0.0] * used, [0.0] * used
    for block, weight in enumerate(weights):
        tokens = slice(block * BLOCK, (block + 1) * BLOCK)
        scaled = [weight * _own_rows(refs.value_scales.at[h], n, tokens, plan) for n in registers]
        pairs = [pack(scaled[n], scaled[n + 1], plan.interpret) for n in registers[::2]]
        lefts.append(jnp.concatenate(pairs, axis=0))
        planes = codes.planes(packed[block * byte_rows : (block + 1) * byte_rows], plan.value_bits)
        rights.append(jnp.concatenate(planes, axis=1))
        rounded = [x for pair in pairs for x in unpack(pair)]
        for n in range(used):
            zeros[n] += weight * _own_rows(refs.value_zeros.at[h], n, tokens, plan)
            sums[n] += rounded[n]
    products = _dot(jnp.concatenate(lefts, axis=1), jnp.concatenate(rights, axis=0), _BY_SUBLANES)
    by_digit = [products[:, k * channels : (k + 1) * channels] for k in range(codes.digits(plan.value_bits))]
    product = sum(_times(w, x) for w, x in zip(codes.weights(plan.value_bits), by_digit, strict=True))
    for tile, ref in _lane_tiles(refs.products.at[h]):
        ref[...] = product[:, tile]
    parts = []
    for n in range(used):
        alternate = pl.ds(n // 2 * 2 * rows + n % 2, rows, stride=2)  # packed pairs have alternating rows
        rest = zeros[n] - 4 * codes.offset(plan.value_bits) * sums[n]
        parts.append(4 * _join_lanes(refs.products.at[h], alternate) + rest.sum(axis=1, keepdims=True))
    return _own_group(parts, _lane((rows, channels)) // plan.value_group, plan)


def _own_rows(ref, n, tokens, plan):
    """The value scales or zeros, `ref [D/g, tokens]`, that register n of the weights meets, [1 or R, lanes]: those of
    one group, or of two, in the two copies of the rows."""
    row = lambda group: ref[pl.ds(min(group, plan.value_groups - 1), 1), tokens]
    if plan.copies == 1:
        return row(n)
    return jnp.where(_is_second_copy((plan.rows, 1)), row(2 * n + 1), row(2 * n))


def _is_second_copy(shape):
    return lax.broadcasted_iota(jnp.int32, shape, 0) >= SUBLANES // 2


def _own_group(parts, group, plan):
    """[R, n] whose lanes take the rows of their own `group [R, n]`, from a list of [R, n] of `copies` groups each."""
    if plan.copies == 1:
        return _select(parts, group)
    mine = _select(parts, group // 2)
    other = pltpu.roll(mine, SUBLANES // 2, 0)
    return jnp.where((group % 2 == 1) == _is_second_copy(mine.shape), mine, other)


def _select(parts, index):
    """`parts[index]`, elementwise."""
    out = parts[0]
    for i, part in enumerate(parts[1:], 1):
        out = jnp.where(index == i, part, out)
    return out


def _even_and_odd(q):
    """The halves of the ref q, f32 [E, D] each."""
    return q[: q.shape[0] // 2], q[q.shape[0] // 2 :]


def _lane_tiles(ref):
    """For each [N, 128 or D] of `ref [D/128 or 1, N, 128 or D]`, its lanes of the whole and itself."""
    width = ref.shape[2]
    return [(slice(n * width, (n + 1) * width), ref.at[n]) for n in range(ref.shape[0])]


def _join_lanes(ref, rows):
    """Rows of `ref [D/128 or 1, N, 128 or D]`, as [rows, D]."""
    return jnp.concatenate([tile[rows] for _, tile in _lane_tiles(ref)], axis=1)


def _chunks(blocks, size):
    return [range(n, min(n + size, blocks.stop)) for n in range(blocks.start, blocks.stop, size)]


def _times(factor, x):
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def _dot(a, b, dims):
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _lane(shape):
    return lax.broadcasted_iota(jnp.int32, shape, 1)


def _lanes(x, channels):
    """[R, 128] with all lanes alike to [R, channels]."""
    return x[:, :channels] if channels <= BLOCK else jnp.concatenate([x] * (channels // BLOCK), axis=1)
