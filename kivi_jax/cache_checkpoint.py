"""Filled caches to and from disk, with Orbax."""

import dataclasses
import json
import os
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from kivi_jax import cache as kv
from kivi_jax.atomic import new_directory
from kivi_jax.cache import KVCache
from kivi_jax.config import KiviConfig

FORMAT = "kivi_jax.cache.1"
_DESCRIPTION, _ARRAYS = "kivi_jax_cache.json", "arrays"


def save_cache(cache: KVCache, path: str | os.PathLike) -> None:
    """Writes a cache and its config to a directory that `load_cache` reads: an Orbax checkpoint of its arrays by name,
    and a description with their shapes and checksums.

    Raises:
        FileExistsError: there is something at `path`; nothing is overwritten.
    """
    with new_directory(path) as partial:
        arrays = jax.device_get(_arrays(cache))
        with _checkpointer() as checkpointer:
            checkpointer.save(partial / _ARRAYS, args=ocp.args.PyTreeSave(arrays))
        _, heads, _, channels = cache.layers[0].key_window.shape
        description = {
            "format": FORMAT,
            "config": dataclasses.asdict(cache.config),
            "shape": {
                "num_layers": len(cache.layers),
                "batch_size": cache.batch_size,
                "num_kv_heads": heads,
                "head_dim": channels,
                "max_length": cache.capacity,
                "dtype": str(cache.layers[0].key_window.dtype),
            },
            "fields": {name: _describe(x) | {"crc32": _checksum(x)} for name, x in arrays.items()},
        }
        description["crc32"] = _checksum_of_text(description)
        (partial / _DESCRIPTION).write_text(json.dumps(description, indent=1))


def load_cache(path: str | os.PathLike) -> KVCache:
    """Reads a cache that `save_cache` wrote; its arrays are bit-identical to those saved. `resize` gives it more room.

    Raises:
        FileNotFoundError: there is no such cache at `path`.
        ValueError: the files are cut short, changed, or do not go together; names the field.
    """
    path = Path(path).absolute()
    if not (path / _DESCRIPTION).is_file():
        raise FileNotFoundError(f"path must be a directory that save_cache wrote; got {path}.")
    description = _read_description(path / _DESCRIPTION)
    try:
        config = {k: tuple(v) if isinstance(v, list) else v for k, v in description["config"].items()}
        shape = description["shape"]
        template = jax.eval_shape(lambda: kv.init(KiviConfig(**config), **shape))
    except TypeError as error:
        raise ValueError(f"config of {path} must be one that this version knows; got {error}.") from None
    want = _arrays(template)
    for name, field in want.items():
        got = {k: v for k, v in description["fields"].get(name, {}).items() if k != "crc32"}
        if got != _describe(field):
            raise ValueError(f"{name} must be {_describe(field)} for the config of {path}; got {got or 'none'}.")
    arrays = _restore_naming_failures(path / _ARRAYS, list(want))
    for name, x in arrays.items():
        if _describe(x) != _describe(want[name]) or _checksum(x) != description["fields"][name]["crc32"]:
            raise ValueError(f"{name} must have the contents that were saved in {path}; got others.")
    return _fill(template, {name: jnp.asarray(x) for name, x in arrays.items()})


def _arrays(cache: KVCache) -> dict[str, jax.Array]:
    """Every array of the cache by its name, as `layers.0.key_codes`."""
    nodes = {"": cache} | {f"layers.{n}.": layer for n, layer in enumerate(cache.layers)}
    return {
        prefix + name: x
        for prefix, node in nodes.items()
        for name in _fields(node)
        if (x := getattr(node, name)) is not None
    }


def _fill(cache: KVCache, arrays: dict[str, jax.Array]) -> KVCache:
    """The cache with `arrays`, named as by `_arrays`, in the place of its own."""

    def fill(node, prefix):
        return dataclasses.replace(node, **{name: arrays.get(prefix + name) for name in _fields(node)})

    layers = tuple(fill(layer, f"layers.{n}.") for n, layer in enumerate(cache.layers))
    return dataclasses.replace(fill(cache, ""), layers=layers)


def _fields(node) -> list[str]:
    return [f.name for f in dataclasses.fields(node) if f.name not in ("layers", "config")]


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _restore(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    # Which leaves, not what is in them: the item's values are placeholders.
    args = ocp.args.PyTreeRestore(item=dict.fromkeys(names, 0), restore_args=as_numpy, partial_restore=True)
    with _checkpointer() as checkpointer:
        return checkpointer.restore(path, args=args)


def _restore_naming_failures(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    try:
        return _restore(path, names)
    except Exception:  # of many kinds; one by one, to tell which
        for name in names:
            try:
                _restore(path, [name])
            except Exception as error:
                reason = str(error).splitlines()[0]
                raise ValueError(f"{name} must be whole in {path}; got an error reading it: {reason}") from error
        raise


def _read_description(path: Path) -> dict:
    try:
        description = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} must be whole; got {error}.") from None
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        got = description.get("format") if isinstance(description, dict) else type(description).__name__
        raise ValueError(f"{path} must say format {FORMAT}; got {got!r}.")
    if description.pop("crc32", None) != _checksum_of_text(description):
        raise ValueError(f"{path} must be as it was saved; got another checksum.")
    return description


def _describe(x) -> dict[str, object]:
    return {"shape": list(x.shape), "dtype": str(x.dtype)}


def _checksum(x: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(x).view(np.uint8))


def _checksum_of_text(description: dict) -> int:
    return zlib.crc32(json.dumps(description, sort_keys=True).encode())
