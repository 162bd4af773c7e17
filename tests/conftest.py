"""Settings for every test: CPU unless a device is asked for, and no silent dtype promotion."""

import os

import pytest

if "gpu" not in os.environ.get("PYTEST_ADDOPTS", "") + os.environ.get("JAX_PLATFORMS", ""):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 4)  # for what runs on a mesh; all else runs on the first of them


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True, scope="module")
def _compiled_code_goes_with_its_module():
    """Each function that XLA compiles for a CPU takes memory maps, and a process may have 65,530 of them on Linux."""
    yield
    jax.clear_caches()


@pytest.fixture
def rng():
    return np.random.default_rng(0)
