"""Texts to measure on; by default one that is on every Python installation, the topics of `pydoc`'s help."""

import dataclasses
import hashlib
import os
import platform
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Text:
    """A text and where it is from."""

    text: str
    name: str

    @property
    def sha256(self) -> str:
        """Of the text in UTF-8, the first 16 hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def about(self) -> dict[str, str]:
        """What names the text in results."""
        return {"name": self.name, "sha256": self.sha256}


def python_topics() -> Text:
    """All topics of the running Python, whose version says which they are, with an empty line between."""
    from pydoc_data.topics import topics

    return Text("\n\n".join(topics.values()), f"pydoc topics of Python {platform.python_version()}")


def read(path: str | os.PathLike) -> Text:
    """The text of a file in UTF-8."""
    return Text(Path(path).read_text(encoding="utf-8"), Path(path).name)


def stretches(ids, count: int, length: int, offset: int = 0) -> np.ndarray:
    """int32 `[count, length]`: stretches one after the other, from `offset` on.

    Raises:
        ValueError: the ids do not reach.
    """
    end = offset + count * length
    if end > len(ids):
        raise ValueError(f"the text must have {end} tokens for {count} stretches of {length}; got {len(ids)}.")
    return np.asarray(ids[offset:end], np.int32).reshape(count, length)
