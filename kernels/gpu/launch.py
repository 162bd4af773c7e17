"""The GPU implementation of `kivi_jax.attend`: what it supports, how it divides a device, and its two launches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kivi_jax.cache import LayerCache
from kivi_jax.kernels.gpu import instructions as gpu
from kivi_jax.kernels.gpu import merge
from kivi_jax.kernels.gpu.decode import work
from kivi_jax.kernels.gpu.maps import COLUMNS, Geometry
from kivi_jax.kernels.gpu.work import WARPS_PER_GROUP, Problem, Refs

SHARED_BYTES = 227 * 1024  # of a multiprocessor of compute capability 9.0, for one thread block


@dataclasses.dataclass(frozen=True)
class Division:
    """How a launch divides a device.

    Attributes:
        warpgroups: of a thread block, which has a multiprocessor to itself.
        blocks: thread blocks for each eight queries of a KV head.
    """

    warpgroups: int
    blocks: int


def choose_division(geometry: Geometry, heads: int, column_tiles: int, multiprocessors: int) -> Division:
    """Eight warps, or four if shared memory has no room for more, and about one thread block a multiprocessor.

    Eight warps with a step of 12 KB each (D 128, 2 bits), half of it on its way, have as much on its way as the
    memory's latency asks for, and more is slower: room for two steps costs 3 to 7 % on an H200. Where a whole number
    of thread blocks for each of the `heads` fills nine tenths of the device, that number it is: in a batch of equal
    lengths no thread block then starts on a second head.
    """
    fits = lambda warpgroups: WARPS_PER_GROUP * warpgroups * geometry.step_bytes <= SHARED_BYTES
    warpgroups = next((n for n in (2, 1) if fits(n)), None)
    if warpgroups is None:
        raise NotImplementedError(
            f"the GPU kernel has no room in shared memory for blocks of {geometry.key_bits}-bit keys and "
            f"{geometry.value_bits}-bit values at head_dim {geometry.head_dim}."
        )
    blocks = max(1, multiprocessors // column_tiles)
    whole = blocks // heads * heads
    return Division(warpgroups, whole if whole >= 0.9 * blocks else blocks)


def attend(q, layer: LayerCache, length, quantized, **options) -> jax.Array:
    """`kivi_jax.kernels.gpu.attend`; `division` overrides `choose_division`."""
    inputs, problem = describe(q, layer, length, quantized, **options)
    return _both(inputs, problem=problem).reshape(q.shape)


# Emitting a kernel takes a second; within a jit of its own, the layers of a model share one.
@functools.partial(jax.jit, static_argnames="problem")
def _both(inputs: dict[str, jax.Array], *, problem: Problem) -> jax.Array:
    return merged(partials(inputs, problem), inputs, problem)


def describe(
    q: jax.Array,
    layer: LayerCache,
    length: jax.Array,
    quantized: jax.Array,
    *,
    new_key: jax.Array | None = None,
    new_value: jax.Array | None = None,
    counts: jax.Array | None = None,
    sliding_window: int | None = None,
    scale: float | None = None,
    division: Division | None = None,
) -> tuple[dict[str, jax.Array], Problem]:
    """The arrays of a launch, by their names in `Refs`, and what it is compiled for."""
    batch, query_heads, queries, head_dim = q.shape
    config, key_norm = layer.config, getattr(layer, "key_norm", None)
    heads = layer.key_window.shape[1]
    columns = query_heads // heads * queries
    geometry = Geometry(
        head_dim=head_dim,
        key_bits=config.key_bits,
        value_bits=config.value_bits,
        key_group=config.key_group_size,
        value_group=config.value_group_size,
        has_norm=key_norm is not None,
    )
    division = division or choose_division(geometry, batch * heads, -(-columns // COLUMNS), multiprocessors())
    problem = Problem(
        batch=batch,
        kv_heads=heads,
        capacity=layer.capacity,
        sinks=config.sink_length,
        ring=config.ring_length,
        columns=columns,
        queries=queries,
        has_piece=new_key is not None,
        sliding_window=sliding_window,
        scale=head_dim**-0.5 if scale is None else float(scale),
        dtype=jnp.dtype(q.dtype),
        geometry=geometry,
        warpgroups=division.warpgroups,
        blocks=division.blocks,
    )
    if problem.has_piece and counts is None:
        counts = jnp.full(batch, queries, jnp.int32)
    stored = ("key_codes", "key_scale", "key_zero", "value_codes", "value_scale", "value_zero")
    inputs = dict(
        q=q,
        **{name: getattr(layer, name) for name in (*stored, "key_window", "value_window")},
        length=length,
        quantized=quantized,
        key_norm=key_norm,
        new_key=new_key,
        new_value=new_value,
        counts=counts,
    )
    return {name: x for name, x in inputs.items() if x is not None}, problem


def partial_shapes(problem: Problem) -> dict[str, jax.ShapeDtypeStruct]:
    """What the first launch leaves for the second."""
    columns, head_dim = min(problem.columns, COLUMNS), problem.geometry.head_dim
    return {
        "out": jax.ShapeDtypeStruct((problem.partial_rows, columns, head_dim), jnp.float32),
        "top": jax.ShapeDtypeStruct((problem.partial_rows, 2, COLUMNS), jnp.float32),
        "plan": jax.ShapeDtypeStruct((problem.heads, 4), jnp.int32),
    }


def partials(inputs: dict[str, jax.Array], problem: Problem) -> dict[str, jax.Array]:
    """The first launch: `decode.work` in every warp. Inputs and results by their names in `Refs`."""
    results = partial_shapes(problem)
    shared = plgpu.SMEM((problem.warps, problem.geometry.step_bytes), jnp.uint8)
    emit = lambda refs, _, shared: work(refs, shared, problem)
    return _launch(
        emit, inputs, results, shared, problem.blocks * problem.column_tiles, problem.warpgroups, "kivi_decode"
    )


def merged(parts: dict[str, jax.Array], inputs: dict[str, jax.Array], problem: Problem) -> jax.Array:
    """The second launch: `merge.merge_head` for each query. Returns `[B * H * columns, D]` in the model's dtype."""
    head_dim = problem.geometry.head_dim
    queries = problem.heads * problem.columns
    inputs = parts | {name: inputs[name] for name in ("length", "quantized", "counts") if name in inputs}
    results = {"result": jax.ShapeDtypeStruct((queries, head_dim), problem.dtype)}
    warps, _ = merge.choose_division(problem)
    scratch = plgpu.SMEM((warps, merge.scratch_floats(head_dim)), jnp.float32)
    emit = lambda refs, result, shared: merge.merge_head(refs, result, shared, problem)
    return _launch(emit, inputs, results, scratch, queries, warps // WARPS_PER_GROUP, "kivi_merge")["result"]


def _launch(emit, inputs, results, scratch, blocks: int, warpgroups: int, name: str) -> dict[str, jax.Array]:
    """Runs `emit(refs, result pointer or None, shared address)` in each thread of `blocks` thread blocks."""
    names = [*inputs, *results]

    def kernel(*refs):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def run(_, *refs):
            *arrays, shared = refs
            pointers = {name: gpu.global_pointer(ref) for name, ref in zip(names, arrays, strict=True)}
            result = pointers.pop("result", None)
            emit(Refs(**pointers), result, gpu.shared_address(shared))

        run(*refs)

    outputs = plgpu.kernel(
        kernel,
        out_type=tuple(results.values()),
        scratch_types=[scratch],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
    )(*inputs.values())
    return dict(zip(results, outputs, strict=True))


def multiprocessors() -> int:
    """Of the device that is compiled for."""
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None and getattr(abstract, "num_cores", None):
        return abstract.num_cores
    return jax.devices("gpu")[0].core_count
