"""From logits to a token."""

import dataclasses
import math

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampler:
    """How a token is chosen. Which fields are None is static; their values are traced.

    Attributes:
        temperature: float32, divides the logits; None: the best token is taken. top_k: int32, only the k best tokens
        are drawn from; None: all. top_p: float32, only the best tokens that reach this probability together are drawn
        from, after top_k; None: all.
    """

    temperature: jax.Array | None
    top_k: jax.Array | None
    top_p: jax.Array | None

    def __call__(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """Tokens int32 `[B]` for logits float32 `[B, V]`, with a random key for each sequence, `[B]`."""
        if self.temperature is None:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        draw = jax.vmap(jax.random.categorical)
        if self.top_k is None and self.top_p is None:
            return draw(keys, logits).astype(jnp.int32)
        order = jnp.argsort(logits, axis=-1, descending=True)
        logits = jnp.take_along_axis(logits, order, axis=-1)
        if self.top_k is not None:
            logits = jnp.where(jnp.arange(logits.shape[-1]) < self.top_k, logits, -jnp.inf)
        if self.top_p is not None:
            probability = jax.nn.softmax(logits, axis=-1)
            better = jnp.cumsum(probability, axis=-1) - probability
            logits = jnp.where(better < self.top_p, logits, -jnp.inf)
        return jnp.take_along_axis(order, draw(keys, logits)[:, None], axis=-1)[:, 0].astype(jnp.int32)


def sampler(temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None) -> Sampler:
    """The sampler of these settings; temperature 0 takes the best token, whatever top_k and top_p say.

    Raises:
        ValueError: a setting is out of its range.
    """
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be 0 or more; got {temperature!r}.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be 1 token or more; got {top_k!r}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1; got {top_p!r}.")
    if temperature == 0:
        return Sampler(None, None, None)
    return Sampler(
        jnp.asarray(temperature, jnp.float32),
        None if top_k is None else jnp.asarray(top_k, jnp.int32),
        None if top_p is None else jnp.asarray(top_p, jnp.float32),
    )
