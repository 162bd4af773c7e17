"""Models and caches over several devices: sequences along mesh axis "data", KV heads along "model".

Attention and what a cache does as a text grows are local to a sequence and a KV head, so each device does them for its
own (`per_device`). Weights are split as in Megatron-LM (arXiv 1909.08053): the compiler adds one sum over the devices
after the attention of a layer and one after its feed-forward part. A model carries its mesh, as static data; nothing
is read from the context.
"""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kivi_jax.cache import KVCache
from kivi_jax.models import Llama, LlamaConfig

DATA, MODEL = "data", "model"

_BY_OUTPUT = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"})
_BY_INPUT = frozenset({"o_proj", "down_proj"})

T = TypeVar("T", Llama, KVCache)


def shard(x: T, mesh: Mesh) -> T:
    """A model or a cache, laid out over a mesh; `generate` and the rest then run on all of its devices.

        mesh = jax.make_mesh((2, 4), ("data", "model"))
        params = kivi_jax.shard(params, mesh)

    A cache that `generate` makes lies as its model does, and its sequences must divide by the devices of "data" (with
    a `batch_size` below their number they need not: batches are filled up). `load(path, mesh=mesh)` puts each parameter
    in its place as it is read, for a model that no single device could hold.

    Args:
        x: a model or a `KVCache`. Not changed; what comes back may share arrays with it.
        mesh: of this process's devices, with an axis "data", over which the sequences of a batch are divided, or
            "model", over which heads and weights are, or both.

    Raises:
        ValueError: another kind of x, another axis, or heads, weights or sequences that do not divide.
    """
    mesh = checked_mesh(mesh)
    if isinstance(x, KVCache):
        check_divides("the number of sequences", x.batch_size, mesh, DATA)
        check_divides("num_kv_heads", x.layers[0].key_window.shape[1], mesh, MODEL)
        return jax.device_put(x, jax.tree.map(lambda leaf: by_rank(leaf, mesh), x))
    if not isinstance(x, Llama):
        raise ValueError(f"shard takes a model or a KVCache; got {type(x).__name__}.")
    check_model(x.config, mesh)
    graphdef, weights = nnx.split(x)
    place = lambda path, x: jax.device_put(x[...], parameter_sharding(path, x.shape, mesh))
    return with_mesh(nnx.merge(graphdef, placed(weights, place)), mesh)


def checked_mesh(mesh: Mesh) -> Mesh:
    """The mesh, with the axes that this library uses and left to the compiler (`AxisType.Auto`)."""
    if not isinstance(mesh, Mesh) or not mesh.axis_names or set(mesh.axis_names) - {DATA, MODEL}:
        got = mesh.axis_names if isinstance(mesh, Mesh) else type(mesh).__name__
        raise ValueError(f"mesh must be a jax.sharding.Mesh with axes named 'data' and 'model'; got {got}.")
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def check_model(config: LlamaConfig, mesh: Mesh) -> None:
    """Raises a ValueError unless heads and feed-forward part of a model divide by the mesh's "model" axis."""
    for name in ("num_key_value_heads", "intermediate_size"):
        check_divides(name, getattr(config, name), mesh, MODEL)


def check_divides(what: str, size: int, mesh: Mesh | None, axis: str) -> None:
    """Raises a ValueError unless `size` of `what` divides evenly over the devices of a mesh's axis."""
    if size % devices(mesh, axis):
        raise ValueError(
            f"{what} must be divisible by the {devices(mesh, axis)} devices of mesh axis {axis!r}; got {size}."
        )


def devices(mesh: Mesh | None, axis: str) -> int:
    """Over how many devices an axis goes."""
    return 1 if mesh is None else mesh.shape.get(axis, 1)


def with_mesh(model: Llama, mesh: Mesh | None) -> Llama:
    """The model, told that its parameters lie on `mesh`."""
    model.mesh = mesh
    return model


def placed(weights: nnx.State, place: Callable[[tuple, nnx.Variable], object]) -> nnx.State:
    """The state of a model with `place(path, parameter)` for each parameter, its path such as
    `("layers", 0, "self_attn", "q_proj", "kernel")`."""
    return nnx.from_flat_state([(path, x.replace(place(path, x))) for path, x in nnx.to_flat_state(weights)])


def parameter_sharding(path: tuple, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Where the parameter at `path` of a model lies."""
    module, kind = path[-2:]
    axes = [None] * len(shape)
    if module in _BY_OUTPUT:
        axes[-1] = MODEL
    elif (module in _BY_INPUT and kind == "kernel") or module == "embed_tokens":
        axes[0] = MODEL
    # A vocabulary that does not divide stays whole on each device; all else is checked to.
    fits = lambda axis, size: axis if axis and size % devices(mesh, axis) == 0 else None
    return _sharding([fits(axis, size) for axis, size in zip(axes, shape, strict=True)], mesh)


def check_same_place(mesh: Mesh | None, cache: KVCache) -> None:
    """Raises a ValueError unless a cache lies where a model on `mesh` does. Under jit that is not known."""
    codes = cache.layers[0].key_codes
    lies = None if isinstance(codes, jax.core.Tracer) else getattr(codes, "sharding", None)
    got = lies.mesh if isinstance(lies, NamedSharding) else None
    # A model of one device goes with whatever is whole on its device, as all is that is made in a context with a mesh.
    if lies is None or got == mesh or (mesh is None and lies.is_fully_replicated):
        return
    where = lambda mesh: (
        "one device" if mesh is None else f"devices {np.ravel(mesh.device_ids).tolist()} as {dict(mesh.shape)}"
    )
    raise ValueError(f"the cache must lie on {where(mesh)}, as the model does (`shard`); got {where(got)}.")


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """A context in which new arrays are made on `mesh`, whatever mesh the caller's context has."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def per_device(function: Callable, mesh: Mesh | None, like) -> Callable:
    """`function`, called on each device with its own sequences and heads; itself without a mesh.

    Arguments and results are pytrees of arrays `[B, H, ...]` of three axes or more, and `[B]` or `[B, N]`.

    Args:
        like: a pytree with the structure of the result, its arrays with as many axes.
    """
    if mesh is None:
        return function
    specs = lambda tree: jax.tree.map(lambda leaf: by_rank(leaf, mesh).spec, tree)
    local = lambda *args: function(*args)  # a name for what may be a partial
    return lambda *args: jax.shard_map(local, mesh=mesh, in_specs=specs(args), out_specs=specs(like), check_vma=False)(
        *args
    )


def constrained(tree, mesh: Mesh | None):
    """The pytree, its arrays laid out as `per_device` has them; for use within jit."""
    if mesh is None:
        return tree
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, by_rank(leaf, mesh)), tree)


def replicated(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """A small array, whole on each device."""
    return x if mesh is None else jax.device_put(x, _sharding([], mesh))


def over_vocabulary(logits: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Logits `[B, vocab_size]`, each device with those of its own part of the vocabulary, as `lm_head` gives them."""
    return logits if mesh is None else jax.device_put(logits, logits_sharding(logits.shape[1], mesh))


def logits_sharding(vocab_size: int, mesh: Mesh) -> NamedSharding:
    """Where logits `[B, vocab_size]` lie."""
    return _sharding([DATA, MODEL if vocab_size % devices(mesh, MODEL) == 0 else None], mesh)


def by_rank(leaf, mesh: Mesh) -> NamedSharding:
    """Sequences over "data"; of arrays with three axes or more, the second, heads, over "model"."""
    return _sharding([DATA, MODEL] if len(leaf.shape) > 2 else [DATA][: len(leaf.shape)], mesh)


def _sharding(axes: list[str | None], mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(axis if axis in mesh.axis_names else None for axis in axes)))
