"""Models and caches over several devices: sequences along mesh axis "data", KV heads along "model".

Attention and everything that the cache does is local to a sequence and a KV head, so each device does it for its own
(`per_device`), and nothing of a cache ever travels. Weights are split as in Megatron-LM (arXiv 1909.08053): the
compiler adds one sum over the devices after the attention of a layer and one after its feed-forward part.
"""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import jax
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

    A cache that `generate` makes lies as its model does. `load(path, mesh=mesh)` puts each parameter in its place as it
    is read, for a model that no single device could hold.

    Args:
        x: a model or a `KVCache`. Not changed; what comes back may share arrays with it.
        mesh: with an axis "data", over which the sequences of a batch are divided, or "model", over which heads and
            weights are, or both.

    Raises:
        ValueError: the mesh has another axis, or heads, weights or sequences do not divide by its sizes.
    """
    mesh = checked_mesh(mesh)
    if isinstance(x, KVCache):
        check_divides("the sequences of the cache", x.batch_size, mesh, DATA)
        check_divides("num_kv_heads", x.layers[0].key_window.shape[1], mesh, MODEL)
        return jax.device_put(x, jax.tree.map(lambda leaf: NamedSharding(mesh, by_rank(leaf, mesh)), x))
    place = placer(x.config, mesh)
    graphdef, weights = nnx.split(x)
    flat = [(path, variable.replace(place(path, variable[...]))) for path, variable in nnx.to_flat_state(weights)]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def checked_mesh(mesh: Mesh) -> Mesh:
    """The mesh, with the axes that this library uses and left to the compiler (`AxisType.Auto`)."""
    if not isinstance(mesh, Mesh) or not mesh.axis_names or set(mesh.axis_names) - {DATA, MODEL}:
        got = mesh.axis_names if isinstance(mesh, Mesh) else type(mesh).__name__
        raise ValueError(f"mesh must be a jax.sharding.Mesh with axes named 'data' and 'model'; got {got}.")
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def placer(config: LlamaConfig, mesh: Mesh) -> Callable[[tuple, jax.Array], jax.Array]:
    """`place(path, parameter)` puts a parameter of a model, at `("layers", 0, "self_attn", "q_proj", "kernel")` or so,
    where it belongs on the mesh.

    Raises:
        ValueError: heads or the feed-forward part of the model do not divide.
    """
    mesh = checked_mesh(mesh)
    for name in ("num_key_value_heads", "intermediate_size"):
        check_divides(name, getattr(config, name), mesh, MODEL)
    return lambda path, x: jax.device_put(x, parameter_sharding(path, x.shape, mesh))


def check_divides(what: str, size: int, mesh: Mesh, axis: str) -> None:
    """Raises a ValueError unless `size` of `what` divides evenly over the devices of a mesh's axis."""
    devices = mesh.shape.get(axis, 1)
    if size % devices:
        raise ValueError(f"{what} must be divisible by the {devices} devices of mesh axis {axis!r}; got {size}.")


def parameter_sharding(path: tuple, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Where the parameter at `path` of a model lies."""
    module, kind = path[-2:]
    axes = [None] * len(shape)
    if module in _BY_OUTPUT:
        axes[-1] = MODEL
    elif (module in _BY_INPUT and kind == "kernel") or module == "embed_tokens":
        axes[0] = MODEL
    # A vocabulary that does not divide stays whole on each device; all else is checked to.
    axes = [
        axis if axis and size % mesh.shape.get(axis, 1) == 0 else None for axis, size in zip(axes, shape, strict=True)
    ]
    return NamedSharding(mesh, _spec(axes, mesh))


def mesh_of(x) -> Mesh | None:
    """The mesh that a model, a cache or any pytree of arrays lies on; None for a single device."""
    leaves = jax.tree.leaves(nnx.split(x)[1] if isinstance(x, nnx.Module) else x)
    sharding = None if isinstance(leaves[0], jax.core.Tracer) else getattr(leaves[0], "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """A context in which what is traced runs on `mesh`."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def per_device(function: Callable, like) -> Callable:
    """`function`, called on each device with its own sequences and heads.

    Arguments and results are pytrees of arrays `[B, H, ...]` of three axes or more, and `[B]` or `[B, N]`. Without a
    mesh in the context (`on`), or within another `per_device`, it is `function` itself.

    Args:
        like: a pytree with the structure of the result, its arrays with as many axes.
    """
    mesh = _current()
    if mesh is None:
        return function
    specs = lambda tree: jax.tree.map(lambda leaf: by_rank(leaf, mesh), tree)
    local = lambda *args: function(*args)  # a name for what may be a partial
    return lambda *args: jax.shard_map(local, in_specs=specs(args), out_specs=specs(like), check_vma=False)(*args)


def constrained(tree):
    """The pytree, its arrays laid out as `per_device` has them; as it is without a mesh in the context."""
    mesh = _current()
    if mesh is None:
        return tree
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, by_rank(leaf, mesh)), tree)


def over_vocabulary(logits: jax.Array) -> jax.Array:
    """Logits `[B, vocab_size]`, each device with those of its own part of the vocabulary, as `lm_head` gives them."""
    mesh = _current()
    return logits if mesh is None else jax.lax.with_sharding_constraint(logits, logits_spec(logits.shape[1], mesh))


def logits_spec(vocab_size: int, mesh) -> PartitionSpec:
    divides = vocab_size % mesh.shape.get(MODEL, 1) == 0
    return _spec([DATA, MODEL if divides else None], mesh)


def by_rank(leaf, mesh) -> PartitionSpec:
    """Sequences over "data"; of arrays with three axes or more, the second, heads, over "model"."""
    axes = [DATA, MODEL] if len(leaf.shape) > 2 else [DATA][: len(leaf.shape)]
    return _spec(axes, mesh)


def _spec(axes: list[str | None], mesh) -> PartitionSpec:
    return PartitionSpec(*(axis if axis in mesh.axis_names else None for axis in axes))


def _current():
    """The mesh of the context if it is left to the compiler; within `shard_map` it is not."""
    mesh = jax.sharding.get_abstract_mesh()
    ours = mesh.axis_names and not set(mesh.axis_names) - {DATA, MODEL}
    return mesh if ours and all(kind == AxisType.Auto for kind in mesh.axis_types) else None
