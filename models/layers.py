"""The parts of a Llama-family decoder layer, named as in Hugging Face.

`B` batch, `L` new tokens, `D` head dim, `Hq` query heads, `H` key and value heads.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from kivi_jax.models.config import LlamaConfig
from kivi_jax.models.rope import rotate

Attend = Callable[..., tuple[jax.Array, object]]
"""`attention(query [B, Hq, L, D], key [B, H, L, D], value [B, H, L, D], cache, sliding_window: int | None)` returns
`(output [B, Hq, L, D], cache)`. Queries and keys are rotated (or not, see `Llama`); the callback scales the scores by
`1 / sqrt(D)`."""

Angles = tuple[jax.Array, jax.Array] | None
"""Cos and sin of the rotary embedding, float32 [B, L, D / 2] each; None: queries and keys are not rotated."""


class RMSNorm(nnx.Module):
    """Scales the last axis to a root mean square of one, in float32, then by `scale` [features]."""

    def __init__(self, features: int, eps: float, *, dtype):
        self.scale = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype) * self.scale[...]


class Linear(nnx.Linear):
    """`nnx.Linear`, at the speed of the memory on a GPU for a single token too.

    XLA for GPUs makes a sum over a matrix of products, written to memory and read again, of one row times a small
    matrix. Two rows it leaves a matrix product.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., out]."""
        if x.size > x.shape[-1]:
            return super().__call__(x)
        more = [(0, 1), *[(0, 0)] * (x.ndim - 1)]
        two_rows = lambda x: super(Linear, self).__call__(jnp.pad(x, more))[:1]
        return jax.lax.platform_dependent(x, cuda=two_rows, default=super().__call__)


def linear(features_in: int, features_out: int, bias: bool, config: LlamaConfig, *, dtype, rngs: nnx.Rngs) -> Linear:
    """A projection with a `kernel` [in, out] and, where asked for, a `bias` [out], both of `dtype`."""
    init = nnx.initializers.normal(config.initializer_range)
    return Linear(features_in, features_out, use_bias=bias, dtype=dtype, param_dtype=dtype, kernel_init=init, rngs=rngs)


class Attention(nnx.Module):
    """Projects to queries, keys and values, rotates them, and leaves attention and cache to a callback."""

    def __init__(self, config: LlamaConfig, layer: int, *, dtype, rngs: nnx.Rngs):
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        query_size, key_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        self.head_dim = head_dim
        self.sliding_window = config.window(layer)
        self.q_proj = linear(hidden, query_size, bias, config, dtype=dtype, rngs=rngs)
        self.k_proj = linear(hidden, key_size, bias, config, dtype=dtype, rngs=rngs)
        self.v_proj = linear(hidden, key_size, bias, config, dtype=dtype, rngs=rngs)
        self.o_proj = linear(query_size, hidden, config.attention_out_bias, config, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype=dtype) if config.qk_norm else None

    def __call__(self, hidden: jax.Array, angles: Angles, cache, attention: Attend):
        """hidden [B, L, hidden_size] -> (hidden [B, L, hidden_size], cache)."""
        query, key, value = (self._heads(proj(hidden)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if angles is not None:
            query, key = rotate(query, *angles), rotate(key, *angles)
        output, cache = attention(query, key, value, cache, self.sliding_window)
        merged = output.astype(hidden.dtype).swapaxes(1, 2).reshape(*hidden.shape[:2], -1)
        return self.o_proj(merged), cache

    def _heads(self, x: jax.Array) -> jax.Array:
        """[B, L, H * D] -> [B, H, L, D]."""
        return x.reshape(*x.shape[:2], -1, self.head_dim).swapaxes(1, 2)


class MLP(nnx.Module):
    """The gated feed-forward part: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: LlamaConfig, *, dtype, rngs: nnx.Rngs):
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = linear(hidden, inner, bias, config, dtype=dtype, rngs=rngs)
        self.up_proj = linear(hidden, inner, bias, config, dtype=dtype, rngs=rngs)
        self.down_proj = linear(inner, hidden, bias, config, dtype=dtype, rngs=rngs)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nnx.Module):
    """Attention, then the feed-forward part, each on normalized input and added to the residual stream."""

    def __init__(self, config: LlamaConfig, layer: int, *, dtype, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, hidden: jax.Array, angles: Angles, cache, attention: Attend):
        attended, cache = self.self_attn(self.input_layernorm(hidden), angles, cache, attention)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), cache
