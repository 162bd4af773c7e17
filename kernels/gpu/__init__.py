"""Attention over the quantized cache, and its flush, on NVIDIA GPUs: Pallas kernels for Mosaic GPU.

Importing this starts nothing and works without a GPU; the kernels themselves are imported when they are first called.
"""

import jax
import jax.numpy as jnp

from kivi_jax.cache import LayerCache, flush_layer
from kivi_jax.kernels.gpu import cudnn
from kivi_jax.kernels.gpu.cudnn import attend_prompt

__all__ = ["FEATURES", "attend", "attend_prompt", "flush"]

FEATURES = frozenset({"key_norm"})
"""The options of a cache that the kernels read (`KiviConfig.features`)."""

_HEAD_DIMS = (64, 128, 256)


def attend(
    q: jax.Array,
    layer: LayerCache,
    length: jax.Array,
    quantized: jax.Array,
    *,
    new_key: jax.Array | None = None,
    new_value: jax.Array | None = None,
    counts: jax.Array | None = None,
    sliding_window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """`kivi_jax.attend` in two launches, at the speed of the memory; for bfloat16 and float16.

    A cache of 16 bits is left to cuDNN. The kernels support 2, 4 and 8 bits (keys and values may differ), groups of
    32, 64 and 128, head_dim 64, 128 and 256, and any number of query heads and queries: the query heads of a KV head
    times the queries cost one reading of the cache each eight of them. `length`, `quantized` and `counts` are read on
    the device.

    Args:
        q: `[B, Hq, Lq, D]`.
        layer: a layer with B sequences and H KV heads.
        length, quantized: int32 `[B]`.
        new_key, new_value: `[B, H, Lq, D]`, a piece beside the cache.
        counts: int32 `[B]`, the valid tokens of the piece.
        sliding_window: tokens that a query sees, its own included.
        scale: of the scores, a Python number; None: `D ** -0.5`.

    Returns:
        `[B, Hq, Lq, D]` in q's dtype; zeros for a sequence without tokens.

    Raises:
        NotImplementedError: the case, the device or the version of jax is not supported.
    """
    options = dict(new_key=new_key, new_value=new_value, counts=counts, sliding_window=sliding_window, scale=scale)
    if not layer.config.quantizes:
        return cudnn.attend(q, layer, length, quantized, **options)
    _check_support(layer, q.dtype)
    from kivi_jax.kernels.gpu import launch

    return launch.attend(q, layer, length, quantized, **options)


def flush(layer: LayerCache, length: jax.Array, quantized: jax.Array) -> LayerCache:
    """`kivi_jax.cache.flush_layer` in one launch, with the same bits: in place where the layer is donated.

    Args:
        layer: a layer with B sequences, in bfloat16 or float16. length, quantized: int32 `[B]`, before the flush. A
        sequence is due if `quantized_length(length) > quantized`; its
            next block of 128 tokens is quantized then, and nothing else is read or written.

    Returns:
        The layer with the blocks in its rows. `quantized` is the caller's to advance.

    Raises:
        NotImplementedError: as for `attend`.
    """
    if not layer.config.quantizes:  # nothing to compute: XLA moves the block
        return flush_layer(layer, length, quantized)
    _check_support(layer, layer.key_window.dtype)
    from kivi_jax.kernels.gpu import flushing

    return flushing.flush(layer, length, quantized)


def _check_support(layer: LayerCache, dtype) -> None:
    config, head_dim = layer.config, layer.key_window.shape[3]
    if jax.__version_info__ < (0, 11):
        raise NotImplementedError(f"the GPU kernels need jax 0.11 or newer; this is {jax.__version__}.")
    _check_device()
    if unknown := config.features - FEATURES:
        raise NotImplementedError(f"the GPU kernels support no cache with {' or '.join(sorted(unknown))}.")
    if 16 in (config.key_bits, config.value_bits):
        raise NotImplementedError("the GPU kernels need keys and values of 2, 4 or 8 bits; got 16.")
    if head_dim not in _HEAD_DIMS:
        raise NotImplementedError(f"the GPU kernels need a head_dim of 64, 128 or 256; got {head_dim}.")
    if dtype != layer.key_window.dtype or dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            "the GPU kernels need queries and cache in bfloat16, or both in float16; "
            f"got {jnp.dtype(dtype)} and {layer.key_window.dtype}."
        )


def _check_device() -> None:
    if getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is not None:
        return  # compiled ahead of time, for the device that the mesh names
    device = next((device for device in jax.devices() if device.platform == "gpu"), None)
    found = "no GPU" if device is None else f"compute capability {device.compute_capability}"
    if device is None or not found.split()[-1].replace(".", "").isdigit() or float(device.compute_capability) < 8:
        raise NotImplementedError(f"the GPU kernels need an NVIDIA GPU of compute capability 8.0 or more; got {found}.")
