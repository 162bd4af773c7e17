"""A text that is on every Python installation: the topics of `pydoc`'s help, which differ by Python version."""

import dataclasses
import hashlib
import platform

import numpy as np


@dataclasses.dataclass(frozen=True)
class Text:
    """A text and what names it in results.

    Attributes:
        text: all topics, in the order of their dictionary, with an empty line between.
        sha256: of the text in UTF-8, the first 16 hexadecimal digits.
        python: the version whose topics they are.
    """

    text: str
    sha256: str
    python: str


def python_topics() -> Text:
    """The topics of the running Python."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics.values())
    return Text(text, hashlib.sha256(text.encode()).hexdigest()[:16], platform.python_version())


def stretches(ids, count: int, length: int, offset: int = 0) -> np.ndarray:
    """int32 `[count, length]`: stretches one after the other, from `offset` on.

    Raises:
        ValueError: the ids do not reach.
    """
    end = offset + count * length
    if end > len(ids):
        raise ValueError(f"the text must have {end} tokens for {count} stretches of {length}; got {len(ids)}.")
    return np.asarray(ids[offset:end], np.int32).reshape(count, length)
