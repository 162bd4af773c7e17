"""The decode kernel's grid: which blocks of which sequence run, and where they come from."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kivi_jax.cache import LayerCache
from kivi_jax.config import BLOCK
from kivi_jax.kernels.online_softmax import FLOOR, State
from kivi_jax.kernels.tpu.kernel import decode_step
from kivi_jax.kernels.tpu.plan import LANES, Plan, choose, in_place


def decode(
    q: jax.Array,
    layer: LayerCache,
    quantized: jax.Array,
    first_position: jax.Array | None,
    *,
    queries: int,
    interpret: bool = False,
) -> State:
    """Attention of scaled queries over the quantized rows.

    Args:
        q: float32 `[B, H, M, D]` with M = G * Lq, query last; scaled.
        quantized: int32 `[B]`.
        first_position: int32 `[B]`, the first position that the first query of each sequence sees; a later query sees
            as many fewer tokens. None: all see everything.
        queries: Lq.

    Returns:
        The softmax state of `[B, H, M]` queries; that of no keys where `quantized` is 0.
    """
    used = q.shape[2]
    plan = choose(used, queries, layer, first_position is not None, bool(interpret))
    q = jnp.pad(q * math.log2(math.e), ((0, 0), (0, 0), (0, plan.distinct_rows - used), (0, 0)))
    halves = [q[:, :, n::2] for n in (0, 1)]
    q = jnp.concatenate([half for half in halves for _ in range(2 * plan.half_rows // plan.distinct_rows)], axis=2)
    blocks = jnp.minimum(quantized, layer.capacity) // BLOCK
    first_row = jnp.zeros_like(blocks)
    if first_position is not None:
        first_row = jnp.maximum(first_position - layer.config.sink_length, 0)
    state = _call(q, layer, blocks, first_row, plan, interpret)[:, :, :used]
    # What no step has written holds anything.
    ran = (_steps(blocks, first_row, plan.blocks)[1] > 0)[:, None, None]
    return State(
        top=jnp.where(ran, state[..., 0] * math.log(2), FLOOR),
        total=jnp.where(ran, state[..., BLOCK // 2], 0.0),
        out=jnp.where(ran[..., None], state[..., BLOCK:], 0.0),
    )


def _steps(blocks: jax.Array, first_row: jax.Array, blocks_of_step: int) -> tuple[jax.Array, jax.Array]:
    """How many steps of each sequence come before the first that any query sees, and how many it then has."""
    skipped = first_row // (blocks_of_step * BLOCK)
    return skipped, jnp.maximum((blocks + blocks_of_step - 1) // blocks_of_step - skipped, 0)


def work_list(blocks: jax.Array, first_row: jax.Array, blocks_of_step: int, max_steps: int):
    """Every (sequence, step) that holds a visible quantized block: a ragged batch costs its own tokens, no more.

    Returns:
        `(sequence, step, first)`, int32 `[B * max_steps]` each, and their number, at least 1; `first` is 1 on the first
        step of a sequence.
    """
    batch = blocks.shape[0]
    skipped, steps = _steps(blocks, first_row, blocks_of_step)
    ends = jnp.cumsum(steps, dtype=jnp.int32)
    items = jnp.arange(batch * max_steps, dtype=jnp.int32)
    items = jnp.minimum(items, jnp.maximum(ends[-1] - 1, 0))
    sequence = jnp.minimum(jnp.sum(items[:, None] >= ends[None], axis=1, dtype=jnp.int32), batch - 1)
    step = items - (ends - steps)[sequence]
    return sequence, step + skipped[sequence], (step == 0).astype(jnp.int32), jnp.maximum(ends[-1], 1)


def _call(q, layer, blocks, first_row, plan: Plan, interpret):
    batch, heads, _, channels = q.shape
    tokens = plan.tokens
    sequence, step, first, items = work_list(blocks, first_row, plan.blocks, -(-layer.capacity // tokens))
    # A dimension of one step would cost each step 20 bundles.
    grid = (items,) if heads == plan.heads else (heads // plan.heads, items)

    def spec(shape, index):
        def block(*args):
            *h, item = args[: len(grid)]
            item_sequence, item_step = args[len(grid) : len(grid) + 2]
            return item_sequence[item], h[0] if h else 0, *index(item_step[item])

        return pl.BlockSpec((1, plan.heads, *shape), block)

    on_sublanes = lambda n: spec((n, channels), lambda at: (at, 0))
    on_lanes = lambda d, n: spec((d, n), lambda at: (0, at))
    whole = lambda rows, d: spec((rows, d), lambda at: (0, 0))
    heads_on_sublanes = spec((tokens,), lambda at: (at,))

    def codes_input(codes, bits, by_lanes):
        n = tokens * bits // 8
        return (codes.swapaxes(2, 3), on_lanes(channels, n)) if by_lanes else (codes, on_sublanes(n))

    def key_scale_input(x):
        if not plan.scale_lanes:
            return x, on_sublanes(plan.step_groups)
        block = lambda at: (0, at * plan.step_groups // plan.scale_lanes)
        return x.swapaxes(2, 3), spec((channels, plan.scale_lanes), block)

    def value_scale_input(x):
        # XLA lays [.., H, 1, T] out as [.., H, T], and a kernel's operand [.., H, 1, T] would be a copy.
        return (x[:, :, 0], heads_on_sublanes) if plan.value_groups == 1 else (x, on_lanes(plan.value_groups, tokens))

    inputs = {
        "q": (q, whole(2 * plan.half_rows, channels)),
        "key_codes": codes_input(layer.key_codes, plan.key_bits, plan.key_codes_by_lanes),
        "key_scale": key_scale_input(layer.key_scale),
        "key_zero": key_scale_input(layer.key_zero),
        "value_codes": codes_input(layer.value_codes, plan.value_bits, plan.value_codes_by_lanes),
        "value_scale": value_scale_input(layer.value_scale),
        "value_zero": value_scale_input(layer.value_zero),
    }
    lane_tiles, lanes = -(-channels // LANES), min(channels, LANES)
    per_head = {
        "key_zeros": ((plan.rows, BLOCK), jnp.float32),
        "key_scales": ((lane_tiles, plan.key_scale_rows, lanes), jnp.float32),
        "value_scales": ((plan.value_groups, tokens), jnp.float32),
        "value_zeros": ((plan.value_groups, tokens), jnp.float32),
        "products": ((lane_tiles, plan.value_registers * plan.rows, lanes), jnp.float32),
    }
    if plan.key_norm:
        inputs["key_norm"] = layer.key_norm, heads_on_sublanes
        per_head["norms"] = (1, tokens), jnp.float32
    if plan.scale_lanes:
        per_head["block_scales"] = (plan.scale_lanes, channels), jnp.float32
    if plan.key_codes_by_lanes:
        per_head["key_bytes"] = (tokens * plan.key_bits // 8, channels), jnp.uint8
    if plan.value_codes_by_lanes:
        per_head["value_bytes"] = (tokens * plan.value_bits // 8, channels), jnp.uint8
    scratch = {name: pltpu.VMEM((plan.heads, *shape), dtype) for name, (shape, dtype) in per_head.items()}
    scalars = {"item_sequence": sequence, "item_step": step, "item_left": blocks[sequence] - step * plan.blocks}
    if plan.sliding:
        scalars |= {"item_first": first, "first_row": first_row}
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=grid,
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=whole(plan.rows, BLOCK + channels),
        scratch_shapes=list(scratch.values()),
    )
    return pl.pallas_call(
        functools.partial(decode_step, names=(*scalars, *inputs, "state", *scratch), plan=plan, axis=len(grid) - 1),
        grid_spec=grid_spec,
        out_shape=jax.ShapeDtypeStruct((batch, heads, plan.rows, BLOCK + channels), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary")[-len(grid) :],
            disable_bounds_checks=True,  # the work list holds no step past the capacity, and they cost 1 to 3%
        ),
        interpret=interpret,
        name="kivi_decode",
    )(*scalars.values(), *(in_place(x, interpret) for x, _ in inputs.values()))
