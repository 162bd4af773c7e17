"""Directories that are there whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_directory(path: str | os.PathLike) -> Iterator[Path]:
    """A directory to write into, which takes its place at `path` once all is written, and is removed if that fails.

    Raises:
        FileExistsError: there is something at `path`; nothing is overwritten.
    """
    path = Path(path).absolute()
    if path.exists():
        raise FileExistsError(f"path must not exist yet; got {path}.")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
