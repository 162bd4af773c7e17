"""The decoder: against the logits that transformers computed, and its own properties."""

import functools
from pathlib import Path

import gpu_compile
import jax
import jax.numpy as jnp
import numpy as np
import plain_attention
import pytest
from flax import nnx

from kivi_jax.models import Llama, LlamaConfig, load_huggingface
from kivi_jax.models.layers import Linear, RMSNorm

CHECKPOINTS = sorted((Path(__file__).parent / "data" / "checkpoints").iterdir())
CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)


@functools.cache
def fresh(dtype=jnp.float32, **fields):
    config = LlamaConfig.from_dict(CONFIG.to_dict() | fields)
    return Llama(config, dtype=dtype, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("directory", CHECKPOINTS, ids=lambda path: path.name)
def test_logits_of_real_checkpoints_match_transformers(directory):
    model, _ = load_huggingface(directory, dtype="float32")
    golden = np.load(directory / "golden.npz")
    got = plain_attention.logits(model, golden["input_ids"])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got[:, -64:], golden["logits"], atol=2e-3, rtol=0)


@pytest.mark.parametrize("directory", CHECKPOINTS, ids=lambda path: path.name)
def test_logits_in_the_checkpoints_own_dtype_stay_close(directory):
    model, _ = load_huggingface(directory)
    golden = np.load(directory / "golden.npz")
    got = plain_attention.logits(model, golden["input_ids"][:, :64])
    exact = plain_attention.logits(load_huggingface(directory, dtype="float32")[0], golden["input_ids"][:, :64])
    error = np.sqrt(np.mean((got - exact) ** 2)) / np.std(exact)
    own = model.embed_tokens.embedding[...].dtype
    assert error < {jnp.float32: 1e-6, jnp.float16: 0.02, jnp.bfloat16: 0.1}[own.type]


def test_there_are_six_checkpoints():
    assert len(CHECKPOINTS) == 6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_parameters_and_hidden_states_have_the_dtype_and_logits_are_float32(dtype):
    model = fresh(dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(dtype)}
    tokens = jnp.zeros((2, 3), jnp.int32)
    hidden, _ = model(tokens, tokens, (None, None), plain_attention.attend)
    assert (hidden.dtype, hidden.shape) == (dtype, (2, 3, 64))
    scores = model.logits(hidden)
    assert (scores.dtype, scores.shape) == (jnp.float32, (2, 3, 96))


def test_logits_accumulate_in_float32():
    model = fresh(jnp.bfloat16, hidden_size=2048, num_hidden_layers=1, tie_word_embeddings=True)
    hidden = jax.random.normal(jax.random.key(0), (4, 2048), jnp.bfloat16)
    expected = np.asarray(hidden, np.float64) @ np.asarray(model.embed_tokens.embedding[...], np.float64).T
    error = np.abs(np.asarray(model.logits(hidden)) - expected).max()
    assert error < 1e-4 * np.abs(expected).max()


def test_norms_are_computed_in_float32():
    x = jax.random.normal(jax.random.key(0), (8, 4096)).astype(jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    got = np.asarray(RMSNorm(4096, 1e-6, dtype=jnp.bfloat16)(x), np.float64)
    # Half a unit in the last place of bfloat16: nothing but the final rounding.
    assert (np.abs(got - expected) <= 2.0**-8 * np.abs(expected) * 1.01).all()


def test_tied_head_is_the_embedding_and_an_untied_one_is_not():
    assert fresh(tie_word_embeddings=True).lm_head is None
    hidden = jax.random.normal(jax.random.key(0), (5, 64))
    model = fresh(tie_word_embeddings=True)
    np.testing.assert_allclose(model.logits(hidden), hidden @ model.embed_tokens.embedding[...].T, atol=1e-5)
    model = fresh()
    np.testing.assert_allclose(model.logits(hidden), hidden @ model.lm_head.kernel[...], atol=1e-5)


def test_attention_gets_grouped_heads_the_layers_cache_and_its_window():
    model = fresh(sliding_window=8, layer_types=("full_attention", "sliding_attention"))
    seen = []

    def attention(query, key, value, cache, window):
        seen.append((query.shape, key.shape, value.shape, cache, window))
        return query, cache + "'"

    tokens = jnp.zeros((3, 5), jnp.int32)
    _, caches = model(tokens, tokens, ("first", "second"), attention)
    shapes = (3, 4, 5, 32), (3, 2, 5, 32), (3, 2, 5, 32)
    assert seen == [(*shapes, "first", None), (*shapes, "second", 8)]
    assert caches == ("first'", "second'")


def test_a_cache_for_each_layer_is_required():
    tokens = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="shorter"):
        fresh()(tokens, tokens, (None,), plain_attention.attend)


def test_only_relative_positions_matter():
    model = fresh()
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 96, (1, 12)), jnp.int32)
    positions = jnp.arange(12, dtype=jnp.int32)[None]
    here, _ = model(tokens, positions, (None, None), plain_attention.attend)
    there, _ = model(tokens, positions + 100, (None, None), plain_attention.attend)
    np.testing.assert_allclose(here, there, atol=1e-4)
    other, _ = model(tokens, positions * 2, (None, None), plain_attention.attend)
    assert np.abs(np.asarray(here - other)).max() > 1e-3


def test_a_sliding_layer_forgets_what_left_its_window():
    model = fresh(num_hidden_layers=1, sliding_window=4)
    tokens = np.random.default_rng(1).integers(1, 96, (1, 10))
    changed = tokens.copy()
    changed[0, 2] = 0
    difference = np.abs(plain_attention.logits(model, tokens) - plain_attention.logits(model, changed)).max(axis=(0, 2))
    assert (difference[2:6] > 1e-5).all()
    assert (difference[6:] == 0).all()


def test_biases_and_query_key_norms_are_used():
    tokens = jnp.arange(6, dtype=jnp.int32)[None]
    model = fresh(num_hidden_layers=1, attention_bias=True, attention_out_bias=True, mlp_bias=True, qk_norm=True)
    graph, state = nnx.split(model)

    @jax.jit
    def run(state):
        return nnx.merge(graph, state)(tokens, tokens, (None,), plain_attention.attend)[0]

    before = run(state)
    flat = dict(nnx.to_flat_state(state))
    paths = [path for path in flat if path[-1] == "bias" or path[-2] in ("q_norm", "k_norm")]
    assert len(paths) == 9
    for path in paths:
        raised = flat[path].replace(flat[path][...] + jnp.linspace(0, 0.5, flat[path].shape[0]))
        moved = run(nnx.from_flat_state(list((flat | {path: raised}).items())))
        assert np.abs(np.asarray(moved - before)).max() > 1e-4, path


def test_fresh_weights_have_the_configs_standard_deviation():
    model = fresh(hidden_size=256, initializer_range=0.05)
    for weights in (model.embed_tokens.embedding, model.layers[0].mlp.up_proj.kernel, model.lm_head.kernel):
        assert float(jnp.std(weights[...])) == pytest.approx(0.05, rel=0.05)
    assert (
        float(
            jnp.abs(model.layers[0].self_attn.q_proj.kernel[...] - model.layers[1].self_attn.q_proj.kernel[...]).max()
        )
        > 0
    )


def test_projections_are_stored_in_by_out():
    attention = fresh().layers[0].self_attn
    assert attention.q_proj.kernel.shape == (64, 128)
    assert attention.k_proj.kernel.shape == (64, 64)
    assert attention.o_proj.kernel.shape == (128, 64)


def test_shapes_are_known_without_computing():
    model = nnx.eval_shape(lambda: Llama(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(model)))
    assert model.config == CONFIG


def test_split_once_and_jitted_with_a_static_graph_it_computes_the_same():
    model = fresh()
    tokens = jnp.arange(10, dtype=jnp.int32)[None]
    graph, state = nnx.split(model)

    def run(graph, state):
        hidden, _ = nnx.merge(graph, state)(tokens, tokens, (None, None), plain_attention.attend)
        return hidden

    expected, _ = model(tokens, tokens, (None, None), plain_attention.attend)
    np.testing.assert_allclose(jax.jit(run, static_argnums=0)(graph, state), expected, atol=1e-6)
    assert hash(graph) == hash(nnx.split(fresh())[0])


def test_the_model_is_a_pytree_that_carries_its_config():
    model = fresh()
    doubled = jax.jit(lambda model: jax.tree.map(lambda x: 2 * x, model))(model)
    assert doubled.config == CONFIG
    np.testing.assert_array_equal(doubled.lm_head.kernel[...], 2 * model.lm_head.kernel[...])


def test_every_parameter_gets_a_gradient():
    model = fresh(attention_bias=True, qk_norm=True)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 96, (1, 8)), jnp.int32)
    positions = jnp.arange(8, dtype=jnp.int32)[None]
    graph, state = nnx.split(model)

    def loss(state):
        model = nnx.merge(graph, state)
        hidden, _ = model(tokens, positions, (None, None), plain_attention.attend)
        return -jax.nn.log_softmax(model.logits(hidden))[:, :, 3].mean()

    gradients = jax.jit(jax.grad(loss))(state)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradients))


@pytest.mark.h200_compile
@pytest.mark.skipif("gpu_compile.why_not()", reason="needs jax's CUDA compiler (tests/gpu_compile.py)")
def test_a_lone_token_is_multiplied_as_a_matrix_on_a_gpu(tmp_path, monkeypatch):
    """XLA would write all products with a small matrix to memory, and sum them in a second kernel."""
    graphdef, weights = nnx.split(nnx.eval_shape(lambda: Linear(512, 256, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))
    apply = lambda weights, x: nnx.merge(graphdef, weights)(x)
    token = jax.ShapeDtypeStruct((1, 1, 512), jnp.bfloat16)
    compiled, _ = gpu_compile.compile_for_h200(apply, (weights, token), tmp_path, monkeypatch)
    assert "gemm" in compiled.as_text()


@pytest.mark.gpu
@pytest.mark.skipif("jax.default_backend() != 'gpu'", reason="needs an NVIDIA GPU: JAX_PLATFORMS=cuda pytest -m gpu")
def test_a_lone_token_gives_on_a_gpu_what_it_gives_beside_another(rng):
    linear = Linear(512, 256, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.normal(size=(2, 1, 512)), jnp.float32)
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(linear(x[:1]), linear(x)[:1], rtol=1e-5, atol=1e-5)
