import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kivi_jax.sampling import sampler

LOGITS = jnp.log(jnp.asarray([[0.5, 0.05, 0.3, 0.15]]))
DRAWS = 4000


def frequencies(logits=LOGITS, **settings):
    keys = jax.random.split(jax.random.key(0), DRAWS)
    tokens = sampler(**settings)(jnp.tile(logits, (DRAWS, 1)), keys)
    return np.bincount(np.asarray(tokens), minlength=logits.shape[1]) / DRAWS


def test_temperature_zero_takes_the_best():
    assert np.array_equal(frequencies(temperature=0.0), [1, 0, 0, 0])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 1.0}, [0.5, 0.05, 0.3, 0.15]),
        ({"temperature": 0.5}, np.array([0.25, 0.0025, 0.09, 0.0225]) / 0.365),
        ({"temperature": 1.0, "top_k": 2}, [0.625, 0, 0.375, 0]),
        ({"temperature": 1.0, "top_k": 99}, [0.5, 0.05, 0.3, 0.15]),
        ({"temperature": 1.0, "top_p": 0.5}, [1, 0, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.51}, [0.625, 0, 0.375, 0]),
        ({"temperature": 1.0, "top_p": 1.0}, [0.5, 0.05, 0.3, 0.15]),
        # top_p is of what top_k leaves: 0.526, 0.316, 0.158
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.84}, [0.625, 0, 0.375, 0]),
    ],
    ids=str,
)
def test_tokens_are_drawn_from_what_the_filters_leave(settings, expected):
    assert np.abs(frequencies(**settings) - expected).max() < 0.03


def test_settings_are_traced():
    """A new temperature, k or p compiles nothing; which of them are given does."""
    draw = jax.jit(lambda s, logits, keys: s(logits, keys))
    keys = jax.random.split(jax.random.key(0), 1)
    for temperature, k, p in ((0.5, 3, 0.9), (0.7, 2, 0.5)):
        draw(sampler(temperature, k, p), LOGITS, keys)
    assert draw._cache_size() == 1
    draw(sampler(0.7, 2), LOGITS, keys)
    assert draw._cache_size() == 2
