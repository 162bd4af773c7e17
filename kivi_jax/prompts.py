"""Prompts in all their forms, to rows of ids."""

from collections.abc import Sequence

import numpy as np


def to_ids(prompt, *, tokenizer=None, attention_mask=None, vocab_size: int) -> list[np.ndarray]:
    """The ids of each prompt, int32, without padding.

    Args:
        prompt: a string or a list of strings (with a tokenizer), a sequence of ids, a list of such sequences, or an
            integer array `[L]` or `[B, L]`.
        attention_mask: for an array `[B, L]`: 1 for the tokens of each row, 0 for padding on either side.
        vocab_size: ids are below this.

    Raises:
        ValueError: a prompt that is empty or not of these forms, an id outside the vocabulary, a mask that does not
        fit.
    """
    rows = _rows(prompt, tokenizer)
    if attention_mask is not None:
        rows = _unpadded(prompt, attention_mask)
    if not rows:
        raise ValueError("prompt must hold 1 sequence or more; got none.")
    for n, ids in enumerate(rows):
        if ids.size == 0:
            raise ValueError(f"prompt {n} must have 1 token or more; got 0.")
        if ids.min() < 0 or ids.max() >= vocab_size:
            bad = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise ValueError(f"prompt {n} must have ids from 0 to {vocab_size - 1}; got {bad}.")
    return [ids.astype(np.int32) for ids in rows]


def _rows(prompt, tokenizer) -> list[np.ndarray]:
    if isinstance(prompt, str):
        return [_encode(prompt, tokenizer)]
    if hasattr(prompt, "ndim"):
        if prompt.ndim not in (1, 2):
            raise ValueError(f"a prompt array must be [L] or [B, L]; got {list(prompt.shape)}.")
        return list(_integers(np.atleast_2d(np.asarray(prompt))))
    if not isinstance(prompt, Sequence):
        raise ValueError(f"prompt must be text, ids, or a list of either; got {type(prompt).__name__}.")
    if any(isinstance(row, str) for row in prompt):
        return [_encode(row, tokenizer) for row in prompt]
    if all(np.ndim(row) == 0 for row in prompt):
        return [_integers(np.asarray(prompt))] if prompt else []
    return [_integers(np.asarray(row)) for row in prompt]


def _encode(text, tokenizer) -> np.ndarray:
    if not isinstance(text, str):
        raise ValueError(f"a list of prompts must be all text or all ids; got {type(text).__name__} beside text.")
    if tokenizer is None:
        raise ValueError("a prompt of text needs a tokenizer; got tokenizer=None.")
    return np.asarray(tokenizer.encode(text), np.int64)


def _integers(ids: np.ndarray) -> np.ndarray:
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"ids must be integers; got {ids.dtype}.")
    return ids.astype(np.int64)


def _unpadded(prompt, attention_mask) -> list[np.ndarray]:
    ids, mask = np.asarray(prompt), np.asarray(attention_mask)
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise ValueError("attention_mask goes with a prompt that is an integer array [B, L]; got another form.")
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask must have the prompt's shape {list(ids.shape)}; got {list(mask.shape)}.")
    rows = []
    for n, (row, kept) in enumerate(zip(ids, mask.astype(bool), strict=True)):
        where = np.flatnonzero(kept)
        if where.size and where[-1] - where[0] + 1 != where.size:
            raise ValueError(f"attention_mask must mark one run of tokens in each row; row {n} has a gap.")
        rows.append(row[where].astype(np.int64))
    return rows


def bucket(length: int) -> int:
    """`length` rounded up so that there are at most 8 sizes, and so 8 compilations, to each doubling."""
    step = max(32, 2 ** ((length - 1).bit_length() - 3))
    return -(-length // step) * step


def pad(rows: list[np.ndarray], length: int, value: int) -> np.ndarray:
    """int32 `[B, length]`: the rows from the left, then `value`."""
    out = np.full((len(rows), length), value, np.int32)
    for n, row in enumerate(rows):
        out[n, : len(row)] = row
    return out
