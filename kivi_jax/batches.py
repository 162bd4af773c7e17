"""More prompts than fit at once: in batches, the longest prompts first."""

import jax
import numpy as np

from kivi_jax import decoding
from kivi_jax.config import BLOCK, KiviConfig
from kivi_jax.run import PREFILL_TOKENS, Run
from kivi_jax.sharding import DATA, MODEL, devices

USED = 0.9  # of the free memory: what is left is for the compiler's temporaries and for fragments


def split(run: Run, batch_size: int | None) -> list[tuple[Run, np.ndarray]]:
    """Runs of `batch_size` sequences (None: as many as fit into the device's memory), of one size but for less than
    that many prompts, and which sequences of `run` each answers with its first ones. On a mesh that divides sequences,
    `batch_size` is rounded down to as many on each device, but at least one.

    Raises:
        ValueError: a cache is continued, whose sequences are one batch, in batches of another size.
    """
    sequences = len(run.rows)
    if not isinstance(run.cache, KiviConfig):
        if batch_size is not None and batch_size < sequences:
            raise ValueError(f"batch_size must be the {sequences} sequences of the cache, or None; got {batch_size}.")
        return [(run, np.arange(sequences))]
    shards = devices(run.mesh, DATA)
    most = (fitting(run) if batch_size is None else batch_size) // run.copies
    most = max(shards, most // shards * shards)  # whole sequences for each device
    prompts = sequences // run.copies
    if prompts <= most:
        return [(run, np.arange(sequences))]
    size = -(-prompts // -(-prompts // most))  # as even as can be, for batches of one size compile once
    size = -(-size // shards) * shards
    order = np.argsort([-len(row) for row in run.rows[:: run.copies]], kind="stable")
    batches = []
    for start in range(0, prompts, size):
        which = order[start : start + size]
        rows = (which[:, None] * run.copies + np.arange(run.copies)).ravel()
        batches.append((run.part(which, size), rows))
    return batches


def fitting(run: Run) -> int:
    """How many sequences the memory that is free on the model's device has room for, by an estimate; all of them where
    the device does not say."""
    device = next(iter(run.params.embed_tokens.embedding[...].devices()))
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return len(run.rows)
    room = USED * (stats["bytes_limit"] - stats["bytes_in_use"])
    capacity = -(-run.capacity // BLOCK) * BLOCK
    shards = devices(run.mesh, DATA)
    cache = jax.eval_shape(lambda: decoding.init_cache(run.params, run.cache, shards, capacity)).nbytes // shards
    logits = 3 * 4 * run.params.config.vocab_size  # of the step before, of this one, and one for the sampler
    parts = shards * devices(run.mesh, MODEL)
    return int((room - prefill_bytes(run, cache)) / (cache + logits) * parts)


def prefill_bytes(run: Run, cache_bytes: int) -> int:
    """What taking in prompts needs besides their cache: the activations of the widest point of a layer, for the tokens
    that are taken in together, and the cache of these alone (`cache_bytes` of each sequence)."""
    config = run.params.config
    tokens = max(PREFILL_TOKENS, run.chunk)
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    numbers = 2 * config.intermediate_size + 4 * config.hidden_size + 2 * heads * config.head_dim
    itemsize = run.params.embed_tokens.embedding.dtype.itemsize
    return tokens * numbers * itemsize + tokens // run.chunk * cache_bytes
