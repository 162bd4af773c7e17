"""The decoder: tokens in, hidden states and logits out, with attention and its cache supplied by the caller."""

import jax
import jax.numpy as jnp
from flax import nnx

from kivi_jax.models.config import LlamaConfig
from kivi_jax.models.layers import Attend, DecoderLayer, RMSNorm, linear
from kivi_jax.models.rope import Rotary


class Llama(nnx.Module):
    """A Llama-family decoder (Llama, Mistral, Qwen2, Qwen3): a pytree of parameters that carries its frozen config.

    Modules are named as in Hugging Face (`embed_tokens`, `layers[i].self_attn.q_proj`, `norm`, `lm_head`, ...);
    projections are stored as `kernel` [in, out]. All parameters have one dtype, and matrix products run in it; norms,
    rotations and logits are computed in float32.

    Attributes:
        mesh: the devices that the parameters are divided over, static; None: one device.

    Args:
        config: the shape of the model.
        dtype: of the parameters.
        rngs: keys for the initial weights, normal with a standard deviation of `config.initializer_range`.
    """

    def __init__(self, config: LlamaConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.mesh: jax.sharding.Mesh | None = None
        init = nnx.initializers.normal(config.initializer_range)
        self.embed_tokens = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=dtype, embedding_init=init, rngs=rngs
        )
        self.layers = nnx.List(
            [DecoderLayer(config, layer, dtype=dtype, rngs=rngs) for layer in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else linear(config.hidden_size, config.vocab_size, False, config, dtype=dtype, rngs=rngs)
        )

    @property
    def rotary(self) -> Rotary:
        """The rotary embedding of queries and keys."""
        config = self.config
        return Rotary(config.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, caches: tuple, attention: Attend, *, rotated: bool = True
    ) -> tuple[jax.Array, tuple]:
        """Runs the decoder over new tokens.

        Args:
            tokens: int32 [B, L].
            positions: int32 [B, L], of each token in its own sequence.
            caches: one entry for each layer, which only `attention` looks into.
            attention: called once a layer as `attention(query, key, value, cache, sliding_window)` with query
                [B, Hq, L, D], key and value [B, H, L, D], queries and keys rotated and not yet scaled by
                `1 / sqrt(D)`; returns `(output [B, Hq, L, D], cache)`.
            rotated: False leaves it to `attention` to rotate queries and keys, by `self.rotary`.

        Returns:
            (hidden [B, L, hidden_size] after the final norm, caches).
        """
        angles = self.rotary.angles(positions) if rotated else None
        hidden = self.embed_tokens(tokens)
        updated = []
        # Unrolled: caches that are scanned over would be copied, a layer a step.
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden, cache = layer(hidden, angles, cache, attention)
            updated.append(cache)
        return self.norm(hidden), tuple(updated)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of every token of the vocabulary: hidden [..., hidden_size] -> float32 [..., vocab_size]."""
        if self.lm_head is None:
            embedding = self.embed_tokens.embedding[...]
            return jnp.einsum("...h,vh->...v", hidden, embedding, preferred_element_type=jnp.float32)
        return jnp.dot(hidden, self.lm_head.kernel[...], preferred_element_type=jnp.float32)
