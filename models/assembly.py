"""Filling a model with the tensors of a checkpoint, one by one, under one rule: all consumed, all filled."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kivi_jax.models.config import LlamaConfig
from kivi_jax.models.llama import Llama

Path = tuple[str | int, ...]

Place = Callable[[Path, np.ndarray], jax.Array]
"""`place(path, array)` puts the parameter at `path` on its device or devices."""


def in_memory(_: Path, array: np.ndarray) -> jax.Array:
    """Puts a parameter on the default device."""
    return jnp.array(array)


DTYPES = {"float32": jnp.float32, "float16": jnp.float16, "bfloat16": jnp.bfloat16}


def parameter_dtype(dtype) -> np.dtype:
    """The dtype that a name ("float32", "float16", "bfloat16") or a dtype object stands for.

    Raises:
        ValueError: anything else.
    """
    try:
        name = np.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}.")
    return np.dtype(DTYPES[name])


class Assembly:
    """A model being filled. Holds each parameter on the device as soon as it is put, and nothing twice.

    Args:
        config: of the model.
        dtype: of its parameters, whatever the tensors' own.
        source: what the errors call the checkpoint.
        place: puts each parameter where it belongs.
    """

    def __init__(self, config: LlamaConfig, dtype, source: str, place: Place = in_memory):
        self.dtype = parameter_dtype(dtype)
        self._source, self._place = source, place
        model = nnx.eval_shape(lambda: Llama(config, dtype=self.dtype, rngs=nnx.Rngs(0)))
        self._graph, state = nnx.split(model)
        self._shapes: dict[Path, tuple[int, ...]] = {path: leaf.shape for path, leaf in nnx.to_flat_state(state)}
        self._variables = dict(nnx.to_flat_state(state))
        self._sources: dict[Path, str] = {}

    @property
    def paths(self) -> tuple[Path, ...]:
        """Where each parameter sits in the model, such as `("layers", 0, "self_attn", "q_proj", "kernel")`."""
        return tuple(self._shapes)

    def put(self, path: Path, name: str, tensor: np.ndarray) -> None:
        """Fills the parameter at `path` with the tensor that the checkpoint calls `name`.

        A `kernel` [in, out] takes a tensor [out, in], as checkpoints store it.

        Raises:
            ValueError: a shape other than the config's, or a second tensor for one parameter.
        """
        if path in self._sources:
            raise ValueError(f"{self._source} must hold {name} once; got it twice.")
        expected = self._shapes[path][::-1] if path[-1] == "kernel" else self._shapes[path]
        if tensor.shape != expected:
            raise ValueError(
                f"{self._source}: {name} must have the shape {list(expected)} that its config describes; "
                f"got {list(tensor.shape)}."
            )
        converted = np.ascontiguousarray((tensor.T if path[-1] == "kernel" else tensor).astype(self.dtype, copy=False))
        self._variables[path] = self._variables[path].replace(self._place(path, converted))
        self._sources[path] = name

    def finish(self, names: dict[Path, str]) -> Llama:
        """The model.

        Args:
            names: what the checkpoint's format calls each parameter, for the error.

        Raises:
            ValueError: a parameter that no tensor filled.
        """
        if missing := [names[path] for path in self._shapes if path not in self._sources]:
            more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
            raise ValueError(
                f"{self._source} must hold a tensor for every parameter of its config; got no {missing[0]}{more}."
            )
        return nnx.merge(self._graph, nnx.from_flat_state(list(self._variables.items())))
