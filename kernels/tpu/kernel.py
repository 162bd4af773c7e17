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

_DIGIT_MIDDLE = {True: 1.5, False: 2.0}
"""What key digits are counted from: their middle, or the digit whose number is 1.5 if it takes a product."""


def decode_step(*refs, names: tuple[str, ...], plan: Plan):
    """One grid step. The refs, by name, with those that only some plans have in brackets:

    scalars
        item_sequence [items]: the sequence of each grid step
        item_step [items]: which of the sequence's steps it is
        item_first [items]: 1 if it is the first that runs
        blocks [B]: quantized blocks of each sequence
        first_row [B]: the first row of the cache that the first query sees
    inputs
        q: f32 [1, heads, R, D], scaled
        key_codes: u8 [1, heads, tokens * key_bits / 8, D], or with the last two axes swapped
        key_scale, key_zero: bf16 [1, heads, tokens / g, D], or [1, heads, D, scale_lanes]
        value_codes: u8 [1, heads, tokens * value_bits / 8, D], or with the last two axes swapped
        value_scale, value_zero: bf16 [1, heads, D/g, tokens], or [1, heads, tokens] if there is one group
        [key_norm]: bf16 [1, heads, tokens]
    outputs, which stay in place over the steps of a sequence
        out: f32 [1, heads, R, D], values weighted by exp2(score - top)
        stats: f32 [1, heads, R, 128], top in the lower lanes, the sum of the weights in the upper
    scratch
        key_scales: f32 [heads, tokens / g, D]
        key_zeros: f32 [heads, R, 128], query times the zero of each group, a group a lane
        value_scales, value_zeros: f32 [heads, D/g, tokens], zero in dead blocks; a quarter of the zeros
        products: f32 [heads, D/128 or 1, value_registers * R, 128 or D]
        [norms]: f32 [heads, 1, tokens]
        [block_scales]: f32 [heads, scale_lanes, D], of which key_scales are a part
        [key_bytes, value_bytes]: u8 [heads, tokens * bits / 8, D], where the codes' axes are swapped
    """
    refs = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    item = pl.program_id(1)
    sequence, step = refs.item_sequence[item], refs.item_step[item]
    left = refs.blocks[sequence] - step * plan.blocks  # blocks of the sequence from this step on
    first = refs.item_first[item] == 1
    upper = _lane((plan.rows, BLOCK)) >= BLOCK // 2
    # The first group of the step among those that are here.
    first_group = step * plan.step_groups % plan.scale_lanes if plan.scale_lanes else 0
    visible_from = None
    if plan.sliding:
        row = lax.broadcasted_iota(jnp.int32, (plan.rows, BLOCK), 0) % plan.distinct_rows
        visible_from = refs.first_row[sequence] - step * plan.tokens + row % plan.queries

    def prepare(h):
        live = _lane((plan.value_groups, plan.tokens)) < left * BLOCK
        _prepare_keys(h, refs, first_group, plan)
        scratches = (refs.value_scales, refs.value_scale, 1), (refs.value_zeros, refs.value_zero, 0.25)
        for scratch, ref, factor in scratches:
            x = ref[0, h : h + 1] if plan.value_groups == 1 else ref[0, h]
            scratch[h] = _times(factor, jnp.where(live, x.astype(jnp.float32), 0.0))
        if plan.value_codes_by_lanes:
            refs.value_bytes[h] = refs.value_codes[0, h].T

    def scores(h):
        norm = refs.norms.at[h] if plan.key_norm else None
        packed = refs.key_bytes.at[h] if plan.key_codes_by_lanes else refs.key_codes.at[0, h]
        found = _scores(refs.q[0, h], packed, refs.key_scales.at[h], refs.key_zeros[h], norm, first_group, plan)
        return [_masked(score, block, left, visible_from) for block, score in enumerate(found)]

    def accumulate(h, scores):
        stat = refs.stats[0, h]
        top = jnp.where(first, FLOOR, jnp.broadcast_to(stat[:, :1], stat.shape))
        total = jnp.where(first, 0.0, jnp.broadcast_to(stat[:, BLOCK // 2 : BLOCK // 2 + 1], stat.shape))
        new_top = jnp.maximum(top, functools.reduce(jnp.maximum, scores).max(axis=1, keepdims=True))
        decay = jnp.exp2(top - new_top)
        weights = [jnp.exp2(s - new_top) for s in scores]
        total = total * decay + functools.reduce(jnp.add, weights).sum(axis=1, keepdims=True)
        packed = refs.value_bytes.at[h] if plan.value_codes_by_lanes else refs.value_codes.at[0, h]
        weighted = _weighted(
            weights, packed, refs.value_scales.at[h], refs.value_zeros.at[h], refs.products.at[h], plan
        )
        held = jnp.where(first, 0.0, refs.out[0, h])
        refs.out[0, h] = held * _lanes(decay, plan.channels) + weighted
        refs.stats[0, h] = jnp.where(upper, total, new_top)

    # The static scheduler keeps the program's order between dependent phases, so the order is already pipelined.
    pending = []
    for h in range(plan.heads):
        prepare(h)
        pending.append((h, scores(h)))
        if len(pending) > plan.depth:
            accumulate(*pending.pop(0))
    for ahead in pending:
        accumulate(*ahead)


def _prepare_keys(h, refs, first_group, plan):
    """Fills the scratch of one head's keys."""
    scale, zero = refs.key_scale[0, h], refs.key_zero[0, h]
    q = refs.q[0, h]
    high = q.astype(jnp.bfloat16)
    low = (q - high.astype(jnp.float32)).astype(jnp.bfloat16)  # a second term makes q good to 2**-17
    both = jnp.concatenate([high, low], axis=0)
    dot = lambda x: _dot(both, x, _BY_SUBLANES if plan.scale_lanes else _BY_LANES)
    middle = _DIGIT_MIDDLE[plan.centred] * codes.offset(plan.key_bits)
    zeros = dot(zero) + middle * dot(scale)
    refs.key_zeros[h, :, : zeros.shape[1]] = zeros[: plan.rows] + zeros[plan.rows :]
    scale = scale.astype(jnp.float32)
    if plan.scale_lanes:
        refs.block_scales[h] = scale.T
        scale = refs.block_scales[h, pl.ds(pl.multiple_of(first_group, SUBLANES), plan.step_groups)]
    refs.key_scales[h] = scale
    if plan.key_codes_by_lanes:
        refs.key_bytes[h] = refs.key_codes[0, h].T
    if plan.key_norm:
        refs.norms[h] = refs.key_norm[0, h : h + 1].astype(jnp.float32)


def _scores(q, packed, scales, zeros, norm, first_group, plan):
    """Scores of a head against the step's tokens: a list of f32 [R, 128], one a block.

    Where the plan has no centred codes, a second product, with the constant 1.5 (the number of digit 2), gives the sums
    of the rounded left operands, in every lane. So digits are counted from 2, near their middle, and exactly so.
    """
    byte_rows = BLOCK * plan.key_bits // 8
    group = _lane((plan.rows, BLOCK)) // plan.key_group
    constant = jnp.full((BLOCK, plan.channels), 1.5, codes.DTYPE)
    registers = range(-(-plan.key_groups // plan.copies))
    planes_of = codes.centred_planes if plan.centred else codes.planes
    q = q if plan.centred else 4 * q

    def left_operand(block):
        scaled = [q * _own_rows(scales, n, block * plan.key_groups, plan.key_groups, plan) for n in registers]
        return jnp.concatenate(scaled, axis=0).astype(jnp.bfloat16)

    out = []
    for chunk in _chunks(range(plan.blocks), plan.chunk):
        lefts = [left_operand(block) for block in chunk]
        rows = lefts[0].shape[0]
        if not plan.centred:
            sums = _dot(jnp.concatenate(lefts, axis=0), constant, _BY_LANES)
        for blocks in _chunks(chunk, plan.width):
            x = jnp.concatenate([lefts[b - chunk.start] for b in blocks], axis=0)
            x = jnp.concatenate([_times(w, x) for w in codes.weights(plan.key_bits)], axis=1)
            planes = [planes_of(packed[b * byte_rows : (b + 1) * byte_rows], plan.key_bits) for b in blocks]
            y = jnp.concatenate([jnp.concatenate(digits, axis=1) for digits in planes], axis=0)
            products = _dot(x, y, _BY_LANES)
            for n, block in enumerate(blocks):
                product = products[n * rows : (n + 1) * rows, n * BLOCK : (n + 1) * BLOCK]
                if not plan.centred:
                    at = (block - chunk.start) * rows
                    product = product - _times(codes.offset(plan.key_bits), sums[at : at + rows])
                parts = [product[m : m + plan.rows] for m in range(0, rows, plan.rows)]
                own = group + (first_group + plan.key_groups * block)
                zero = jnp.take_along_axis(zeros, own, axis=1, mode="promise_in_bounds")
                score = _own_group(parts, group, plan) + zero
                if plan.key_norm:
                    score = score * norm[:, block * BLOCK : (block + 1) * BLOCK]
                out.append(score)
    return out


def _masked(score, block, left, visible_from):
    """FLOOR where the block is dead or, if there is a `visible_from [R, 128]`, tokens precede it."""
    seen = block < left
    if visible_from is not None:
        seen = seen & (_lane(score.shape) + block * BLOCK >= visible_from)
    return jnp.where(seen, score, FLOOR)


def _own_rows(ref, n, first, groups, plan, tokens=slice(None)):
    """The scales or zeros that register n of the rows meets, [1 or R, lanes]: those of one group, or of two, in the two
    copies of the rows. `ref` has a row for each group; the groups are `groups` rows from `first` on."""
    row = lambda group: ref[pl.ds(first + min(group, groups - 1), 1), tokens]
    if plan.copies == 1:
        return row(n)
    return jnp.where(_is_second_copy((plan.rows, 1)), row(2 * n + 1), row(2 * n))


def _is_second_copy(shape):
    return lax.broadcasted_iota(jnp.int32, shape, 0) >= SUBLANES // 2


def _weighted(weights, packed, scales, zeros, products_ref, plan):
    """The step's values weighted: `weights` as a list of f32 [R, 128], one a block, to f32 [R, D]."""
    rows, channels, registers = plan.rows, plan.channels, range(plan.value_registers)
    used = -(-plan.value_groups // plan.copies)
    byte_rows = BLOCK * plan.value_bits // 8
    offset = codes.offset(plan.value_bits)
    lefts, rights, rest = [], [], [0.0] * used
    for block, weight in enumerate(weights):
        tokens = slice(block * BLOCK, (block + 1) * BLOCK)
        own = lambda ref, n, tokens=tokens: _own_rows(ref, n, 0, plan.value_groups, plan, tokens)
        scaled = [weight * own(scales, n) for n in registers]
        pairs = [pack(scaled[n], scaled[n + 1], plan.interpret) for n in registers[::2]]
        lefts.append(jnp.concatenate(pairs, axis=0))
        planes = codes.planes(packed[block * byte_rows : (block + 1) * byte_rows], plan.value_bits)
        rights.append(jnp.concatenate(planes, axis=1))
        rounded = [x for pair in pairs for x in unpack(pair)]
        rest = [have + (weight * own(zeros, n) - _times(offset, rounded[n])) for n, have in enumerate(rest)]
    products = _dot(jnp.concatenate(lefts, axis=1), jnp.concatenate(rights, axis=0), _BY_SUBLANES)
    by_digit = [products[:, k * channels : (k + 1) * channels] for k in range(codes.digits(plan.value_bits))]
    product = sum(_times(w, x) for w, x in zip(codes.weights(plan.value_bits), by_digit, strict=True))
    lane_tiles = range(products_ref.shape[0])
    for tile in lane_tiles:
        products_ref[tile] = product[:, tile * BLOCK : min((tile + 1) * BLOCK, channels)]
    parts = []
    for n in range(used):
        alternate = pl.ds(n // 2 * 2 * rows + n % 2, rows, stride=2)  # packed pairs have alternating rows
        product = jnp.concatenate([products_ref.at[tile][alternate] for tile in lane_tiles], axis=1)
        parts.append(product + rest[n].sum(axis=1, keepdims=True))
    return 4 * _own_group(parts, _lane((rows, channels)) // plan.value_group, plan)


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
