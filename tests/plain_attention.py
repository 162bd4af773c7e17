"""Exact attention without a cache, and running a model with it: what the model tests hold the decoder against."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def attend(query, key, value, cache, sliding_window):
    """Causal attention over the new tokens alone, in float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(x.astype(jnp.float32), groups, axis=1) for x in (key, value))
    scores = jnp.einsum("bhid,bhjd->bhij", query.astype(jnp.float32), key) / np.float32(query.shape[-1] ** 0.5)
    distance = jnp.arange(query.shape[2])[:, None] - jnp.arange(query.shape[2])[None]
    seen = distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bhjd->bhid", weights, value).astype(query.dtype), cache


def logits(model, tokens):
    """float32 [B, L, vocab_size] of int tokens [B, L], as numpy."""
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, tokens):
        model = nnx.merge(graph, state)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        hidden, _ = model(tokens, positions, (None,) * model.config.num_hidden_layers, attend)
        return model.logits(hidden)

    return np.asarray(run(state, jnp.asarray(tokens, jnp.int32)))
