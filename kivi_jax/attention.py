"""The public attention ops: check the case, choose an implementation, call it."""

import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kivi_jax.cache import LayerCache, check_piece
from kivi_jax.hadamard import hadamard
from kivi_jax.kernels.visibility import piece_positions, query_positions

IMPLEMENTATIONS = ("reference", "xla", "gpu", "tpu")


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
    rotary: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of the last `Lq` tokens of each sequence over its quantized cache.

    Without `new_key` the queries are those of the last `Lq` tokens in the cache, which the caller has written
    (`cache.write_token`) and counted in `length`. With it, the piece of `Lq` tokens is not in the cache yet: it is
    attended to from `new_key` and `new_value`, exactly, and query i is at position `length + i`.

    Whatever the options of the cache, queries, keys, values and the output are the plain ones: what `rotate` does to
    the cache is done to the queries, and undone on the output, here.

    Args:
        q: `[B, Hq, Lq, D]`; Hq is a multiple of the cache's H, and queries `h * Hq/H ..` share KV head h.
        layer: the cache of this layer.
        length: int32 `[B]`, tokens in the cache.
        quantized: int32 `[B]`, how many of them are quantized.
        new_key, new_value: `[B, H, Lq, D]`, in the cache's dtype.
        counts: int32 `[B]`, the valid tokens of each row of the piece, the first ones; the rest may hold anything, and
            what they give is unspecified. None: all.
        sliding_window: a query sees this many tokens, its own included, and no sink beyond them; None: all before it.
        scale: of the scores; None: `D ** -0.5`.
        rotary: for a cache with `pre_rope`, and then q and new_key come without their rotary embedding: called as
            `rotary(x [B, H, N, D], positions int32 [B, N])`, gives x with it, in its dtype (as `Llama.rotary` does).
        implementation: "reference" (float32 oracle), "xla" (portable), "gpu" or "tpu" (Pallas kernels). None: the
            fastest for the default device that supports the case.

    Returns:
        `[B, Hq, Lq, D]` in q's dtype.

    Raises:
        ValueError: shapes or dtypes do not go together, or there is no such implementation.
        NotImplementedError: the implementation asked for does not support the case.
    """
    _check(q, layer, length, quantized, new_key, new_value, counts, sliding_window)
    config = layer.config
    if config.pre_rope != (rotary is not None):
        raise ValueError(
            f"rotary goes with a cache that has pre_rope=True; got pre_rope={config.pre_rope} "
            f"and {'no ' if rotary is None else 'a '}rotary."
        )
    if config.pre_rope:
        q = rotary(q, query_positions(length, q.shape[2], new_key is not None))
        if new_key is not None:
            new_key = rotary(new_key, piece_positions(length, new_key.shape[2], counts))
    if config.rotate:
        q = hadamard(q)
        if new_key is not None:
            new_key, new_value = hadamard(new_key), hadamard(new_value)
    arguments = dict(new_key=new_key, new_value=new_value, counts=counts, sliding_window=sliding_window, scale=scale)
    if config.pre_rope:
        arguments["rotary"] = rotary
    out = _first(implementation, "attend", q, layer, length, quantized, **arguments)
    return hadamard(out) if config.rotate else out


def attend_prompt(
    q: jax.Array,
    key: jax.Array,
    value: jax.Array,
    counts: jax.Array | None = None,
    *,
    sliding_window: int | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Exact causal attention of a prompt over itself, with nothing in the cache before it.

    Args:
        q: `[B, Hq, L, D]`; key, value: `[B, H, L, D]`.
        counts: int32 `[B]`, the valid tokens of each row, the first ones; the rest may hold anything. None: all.
        sliding_window, scale, implementation: as for `attend`.

    Returns:
        `[B, Hq, L, D]` in q's dtype; unspecified for tokens past `counts`.
    """
    if q.ndim != 4 or key.shape != value.shape or q.shape[::2] != key.shape[::2] or q.shape[1] % key.shape[1]:
        raise ValueError(
            "expected q [B, Hq, L, D] and key and value [B, H, L, D] with Hq a multiple of H; "
            f"got {list(q.shape)}, {list(key.shape)} and {list(value.shape)}."
        )
    return _first(implementation, "attend_prompt", q, key, value, counts, sliding_window=sliding_window, scale=scale)


def flush_layer(
    layer: LayerCache, length: jax.Array, quantized: jax.Array, *, implementation: str | None = None
) -> LayerCache:
    """`cache.flush_layer` by the implementation named, or the fastest: the bits are the same."""
    return _first(implementation, "flush", layer, length, quantized)


def flush_skips(implementation: str | None) -> bool:
    """Whether `flush_layer` by this implementation costs next to nothing where no sequence is due."""
    module = importlib.import_module(f"kivi_jax.kernels.{_candidates(implementation)[0]}")
    return getattr(module, "FLUSH_SKIPS", False)


def _first(implementation: str | None, op: str, *args, **kwargs) -> jax.Array:
    """`op` of the implementation named, or of the first that supports the case."""
    candidates = _candidates(implementation)
    for name in candidates[:-1]:
        try:
            return _call(name, op, *args, **kwargs)
        except NotImplementedError:
            continue
    return _call(candidates[-1], op, *args, **kwargs)


def _call(name: str, op: str, *args, **kwargs) -> jax.Array:
    module = importlib.import_module(f"kivi_jax.kernels.{name}")  # a device's kernels are imported where they are used
    if op != "attend_prompt":
        # An implementation says which features of a cache it knows, and must never see another.
        layer = next(x for x in args if isinstance(x, LayerCache))
        features = layer.config.features - getattr(module, "FEATURES", frozenset())
        if features:
            raise NotImplementedError(
                f"implementation {name!r} supports no cache with {' or '.join(sorted(features))}; use 'xla' or None."
            )
    return getattr(module, op)(*args, **kwargs)


def _candidates(implementation: str | None) -> tuple[str, ...]:
    if implementation is None:
        return {"gpu": ("gpu", "xla"), "tpu": ("tpu", "xla")}.get(_platform(), ("xla",))
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {', '.join(IMPLEMENTATIONS)}; got {implementation!r}.")
    return (implementation,)


def _platform() -> str:
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    platform = device if isinstance(device, str) else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def _check(q, layer, length, quantized, new_key, new_value, counts, sliding_window) -> None:
    batch, heads, _, channels = layer.key_window.shape
    if q.ndim != 4 or q.shape[0] != batch or q.shape[1] % heads or q.shape[3] != channels or 0 in q.shape:
        raise ValueError(f"q must be [{batch}, a multiple of {heads}, Lq, {channels}]; got {list(q.shape)}.")
    vectors = {"length": length, "quantized": quantized} | ({} if counts is None else {"counts": counts})
    for name, x in vectors.items():
        if x.shape != (batch,) or x.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32 [{batch}]; got {x.dtype} {list(x.shape)}.")
    if (new_key is None) != (new_value is None):
        raise ValueError("new_key and new_value go together; got one of them.")
    if new_key is not None:
        check_piece(new_key, new_value, layer)
        if new_key.shape[2] != q.shape[2]:
            raise ValueError(f"new_key must have the {q.shape[2]} tokens of q; got {new_key.shape[2]}.")
    elif counts is not None:
        raise ValueError("counts are of the tokens in new_key; got counts without new_key.")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be 1 token or more; got {sliding_window}.")
