"""Loading a Hugging Face directory: config.json, safetensors files, and the tokenizer beside them."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes  # noqa: F401  safetensors finds numpy's bfloat16 only once this is imported
import numpy as np
from safetensors import SafetensorError, safe_open

from kivi_jax.models import assembly
from kivi_jax.models.assembly import Assembly, Place, in_memory
from kivi_jax.models.config import LlamaConfig
from kivi_jax.models.llama import Llama
from kivi_jax.models.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
"""Called as tensors arrive with the bytes read so far and the bytes in all."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Old files keep the rotary frequencies, which the config describes already.
_ROTARY = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def load_huggingface(
    directory: str | Path, *, dtype=None, place: Place = in_memory, progress: Progress | None = None
) -> tuple[Llama, Tokenizer | None]:
    """Loads a Llama, Mistral, Qwen2 or Qwen3 checkpoint.

    Reads tensor by tensor: beside the model, memory holds one tensor at a time.

    Args:
        directory: with config.json and either model.safetensors or the shards that model.safetensors.index.json names.
        dtype: of the parameters, such as "float32" or "bfloat16"; None: the checkpoint's own.
        place: puts a parameter on its device or devices; by default on one.
        progress: called with the bytes read so far and in all.

    Returns:
        The model and its tokenizer; None for the latter where the directory has no tokenizer.json.

    Raises:
        FileNotFoundError: config.json, the weights or one of their shards is missing.
        ValueError: an unsupported model, a damaged file, or weights that do not match the config one for one.
    """
    directory = Path(directory)
    config = read_config(directory)
    files = _weight_files(directory)
    with_types = {file: _tensor_types(file) for file in files}
    types = {name: kind for tensors in with_types.values() for name, (kind, _) in tensors.items()}
    own = _DTYPES[types.get(_EMBEDDING) or next(iter(types.values()))] if types else "float32"
    model = Assembly(config, own if dtype is None else dtype, str(directory), place)
    names = {path: parameter_name(path) for path in model.paths}
    paths = {name: path for path, name in names.items()}
    tied_copies = {}

    total, done = sum(size for tensors in with_types.values() for _, size in tensors.values()), 0
    for file in files:
        for name, tensor in _tensors(file):
            if name in paths:
                model.put(paths[name], name, tensor)
            elif name == _HEAD and config.tie_word_embeddings:
                tied_copies[name] = file
            elif not _ROTARY.fullmatch(name):
                raise ValueError(f"{directory} must hold only tensors that its config describes; got {name} as well.")
            done += with_types[file][name][1]
            if progress is not None:
                progress(done, total)
    llama = model.finish(names)
    if tied_copies:
        _check_tied(directory, files, tied_copies[_HEAD])
    return llama, Tokenizer.from_hf(directory)


def read_config(directory: str | Path) -> LlamaConfig:
    """The config of a Hugging Face directory; ids of special tokens in generation_config.json win.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: it is not JSON, or describes a model that is not supported.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"{directory} must be a directory with a config.json and safetensors files, as Hugging Face lays them out; "
            f"got {'no config.json in it' if directory.is_dir() else 'no such directory'}."
        )
    fields = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    overrides = read_json(generation) if generation.is_file() else {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if overrides.get(name) is not None:
            fields[name] = overrides[name]
    return LlamaConfig.from_hf(fields)


def read_json(file: Path) -> dict:
    """The object in a JSON file; ValueError where it holds anything else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be a JSON file; it cannot be read: {error}. Download it again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object; got {type(value).__name__}. Download it again.")
    return value


def parameter_name(path: assembly.Path) -> str:
    """What Hugging Face calls the parameter at a path of `Llama`."""
    name = ".".join(map(str, (*path[:-1], _LEAVES[path[-1]])))
    return name if path[0] == "lm_head" else f"model.{name}"


def _weight_files(directory: Path) -> list[Path]:
    index, single = directory / _INDEX, directory / _SINGLE
    if single.is_file() and not index.is_file():
        return [single]
    if not index.is_file():
        raise FileNotFoundError(
            f"{directory} must hold {_SINGLE} or {_INDEX}; got neither: "
            "download the safetensors files, or convert other formats with transformers' save_pretrained."
        )
    shards = sorted(set((read_json(index).get("weight_map") or {}).values()))
    if not shards:
        raise ValueError(f"{index} must name the shards in a weight_map; got none. Download it again.")
    if missing := [shard for shard in shards if not (directory / shard).is_file()]:
        raise FileNotFoundError(
            f"{directory} must hold the {len(shards)} shards that {_INDEX} names; "
            f"got no {', '.join(missing)}: download what is missing."
        )
    return [directory / shard for shard in shards]


def _open(file: Path):
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(
            f"{file} must be a complete safetensors file; it cannot be read: {error}. Download it again."
        ) from error


def _tensor_types(file: Path) -> dict[str, tuple[str, int]]:
    """Type and bytes of each tensor in a file."""
    types = {}
    with _open(file) as tensors:
        for name in tensors.keys():  # noqa: SIM118  not a dict
            view = tensors.get_slice(name)
            kind = view.get_dtype()
            if kind not in _DTYPES:
                raise ValueError(f"{file}: {name} must be F32, F16 or BF16; got {kind}, which is not supported.")
            types[name] = kind, int(np.prod(view.get_shape())) * np.dtype(_DTYPES[kind]).itemsize
    return types


def _tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    with _open(file) as tensors:
        for name in tensors.keys():  # noqa: SIM118  not a dict
            yield name, tensors.get_tensor(name)


def _check_tied(directory: Path, files: list[Path], head_file: Path) -> None:
    """Refuses a tied model whose stored head is not its embedding: which one it was trained with is anyone's guess."""
    for file in files:
        with _open(file) as tensors:
            if _EMBEDDING in tensors.keys():  # noqa: SIM118  not a dict
                embedding = tensors.get_tensor(_EMBEDDING)
    with _open(head_file) as tensors:
        head = tensors.get_tensor(_HEAD)
    if not np.array_equal(head, embedding):
        raise ValueError(
            f"{directory}: {_HEAD} must equal {_EMBEDDING}, as the config ties them; got another: "
            "set tie_word_embeddings to false in config.json if the head is meant to be used."
        )
