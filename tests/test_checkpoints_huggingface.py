"""Hugging Face directories: what loads, what a load reports, and how a bad one fails."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  safetensors finds numpy's bfloat16 only once this is imported
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from kivi_jax.models import load_huggingface

CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"
DTYPES = {
    "llama-tied": jnp.float32,
    "llama2-mha": jnp.float16,
    "llama3-gqa-rope-scaled": jnp.bfloat16,
    "mistral-sliding-window": jnp.bfloat16,
    "qwen2-bias": jnp.bfloat16,
    "qwen3-qk-norm": jnp.float16,
}


@pytest.fixture
def copy(tmp_path):
    """Copies a checkpoint to where it can be damaged."""

    def make(name):
        return Path(shutil.copytree(CHECKPOINTS / name, tmp_path / name))

    return make


def edit_json(file, **fields):
    contents = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in (contents | fields).items() if v != "absent"}))


def edit_tensors(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def leaves(model):
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


@pytest.mark.parametrize("name", DTYPES)
def test_parameters_keep_the_checkpoints_dtype_and_every_number(name):
    model, _ = load_huggingface(CHECKPOINTS / name)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(DTYPES[name])}
    stored = {}
    for file in (CHECKPOINTS / name).glob("*.safetensors"):
        stored |= load_file(file)
    got = leaves(model)
    assert len(got) == len(stored)
    kernel = got["layers", 1, "mlp", "down_proj", "kernel"]
    np.testing.assert_array_equal(kernel, stored["model.layers.1.mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(got["norm", "scale"], stored["model.norm.weight"])


def test_dtype_converts_the_parameters():
    exact, _ = load_huggingface(CHECKPOINTS / "llama-tied")
    for dtype in ("bfloat16", jnp.bfloat16):
        model, _ = load_huggingface(CHECKPOINTS / "llama-tied", dtype=dtype)
        for path, leaf in leaves(model).items():
            np.testing.assert_array_equal(leaf, leaves(exact)[path].astype(jnp.bfloat16))


def test_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16; got 'int8'"):
        load_huggingface(CHECKPOINTS / "llama-tied", dtype="int8")


def test_config_carries_what_generation_needs():
    config = load_huggingface(CHECKPOINTS / "llama3-gqa-rope-scaled")[0].config
    assert (config.bos_token_id, config.eos_token_id, config.rope_theta) == (0, (1, 2), 500000.0)
    assert load_huggingface(CHECKPOINTS / "mistral-sliding-window")[0].config.window(2) == 64


def test_ids_of_generation_config_win(copy):
    directory = copy("llama-tied")
    edit_json(directory / "generation_config.json", eos_token_id=[7, 9], pad_token_id=3)
    config = load_huggingface(directory)[0].config
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == ((7, 9), 3, 1)
    (directory / "generation_config.json").unlink()
    assert load_huggingface(directory)[0].config.eos_token_id == (2,)


def test_tokenizer_is_none_where_there_is_none():
    assert load_huggingface(CHECKPOINTS / "llama-tied")[1] is None
    assert load_huggingface(CHECKPOINTS / "llama2-mha")[1] is not None


@pytest.mark.parametrize("name", ["llama-tied", "llama3-gqa-rope-scaled"])
def test_progress_counts_the_bytes_up_to_all_of_them(name):
    calls = []
    load_huggingface(CHECKPOINTS / name, progress=lambda done, total: calls.append((done, total)))
    stored = [load_file(file) for file in (CHECKPOINTS / name).glob("*.safetensors")]
    size = sum(tensor.nbytes for tensors in stored for tensor in tensors.values())
    assert calls[-1] == (size, size)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_tied_checkpoint_may_repeat_its_embedding_as_head(copy):
    directory = copy("llama-tied")

    def repeat(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    edit_tensors(directory / "model.safetensors", repeat)
    assert load_huggingface(directory)[0].lm_head is None


def test_tied_checkpoint_with_another_head_is_refused(copy):
    directory = copy("llama-tied")

    def differ(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    edit_tensors(directory / "model.safetensors", differ)
    with pytest.raises(ValueError, match=r"lm_head.weight must equal model.embed_tokens.weight"):
        load_huggingface(directory)


def test_rotary_buffers_of_old_files_are_harmless(copy):
    directory = copy("llama-tied")

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)

    edit_tensors(directory / "model.safetensors", add)
    load_huggingface(directory)


def test_biases_of_llama_are_loaded(copy):
    directory = copy("llama-tied")
    edit_json(directory / "config.json", attention_bias=True, mlp_bias=True)
    sizes = {
        "q_proj": 128,
        "k_proj": 64,
        "v_proj": 64,
        "o_proj": 128,
        "gate_proj": 192,
        "up_proj": 192,
        "down_proj": 128,
    }

    def add(tensors):
        for name in [name for name in tensors if name.split(".")[-2] in sizes]:
            size = sizes[name.split(".")[-2]]
            tensors[name.replace("weight", "bias")] = np.arange(size, dtype=np.float32)

    edit_tensors(directory / "model.safetensors", add)
    attention = load_huggingface(directory)[0].layers[2].self_attn
    np.testing.assert_array_equal(attention.o_proj.bias[...], np.arange(128))
    np.testing.assert_array_equal(attention.k_proj.bias[...], np.arange(64))


def test_an_unconsumed_tensor_is_named(copy):
    directory = copy("llama-tied")

    def add(tensors):
        tensors["model.layers.3.mlp.up_proj.weight"] = np.ones((192, 128), np.float32)

    edit_tensors(directory / "model.safetensors", add)
    with pytest.raises(
        ValueError, match=r"only tensors that its config describes; got model.layers.3.mlp.up_proj.weight"
    ):
        load_huggingface(directory)


def test_an_unfilled_parameter_is_named(copy):
    directory = copy("llama-tied")
    edit_tensors(directory / "model.safetensors", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"a tensor for every parameter.*got no model.layers.1.mlp.up_proj.weight\."):
        load_huggingface(directory)


def test_a_wrong_shape_is_named_with_both_shapes(copy):
    directory = copy("llama-tied")

    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"] = np.ones((192, 127), np.float32)

    edit_tensors(directory / "model.safetensors", change)
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj.weight.*\[192, 128\].*got \[192, 127\]"):
        load_huggingface(directory)


def test_a_transposed_tensor_is_not_taken(copy):
    directory = copy("llama-tied")

    def change(tensors):
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = np.ascontiguousarray(tensors[name].T)

    edit_tensors(directory / "model.safetensors", change)
    with pytest.raises(ValueError, match=r"\[192, 128\].*got \[128, 192\]"):
        load_huggingface(directory)


def test_an_unsupported_tensor_type_is_named(copy):
    directory = copy("llama-tied")

    def change(tensors):
        tensors["model.norm.weight"] = np.ones(128, np.int8)

    edit_tensors(directory / "model.safetensors", change)
    with pytest.raises(ValueError, match=r"model.norm.weight must be F32, F16 or BF16; got I8"):
        load_huggingface(directory)


def test_a_missing_shard_is_named(copy):
    directory = copy("llama3-gqa-rope-scaled")
    (directory / "model-00003-of-00017.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"17 shards.*got no model-00003-of-00017.safetensors: download"):
        load_huggingface(directory)


def test_a_tensor_in_two_shards_is_refused(copy):
    directory = copy("llama3-gqa-rope-scaled")
    name = "model.layers.0.self_attn.k_proj.weight"
    tensor = load_file(directory / "model-00002-of-00017.safetensors")[name]
    edit_tensors(directory / "model-00016-of-00017.safetensors", lambda tensors: tensors.update({name: tensor}))
    with pytest.raises(ValueError, match=f"must hold {name} once; got it twice"):
        load_huggingface(directory)


@pytest.mark.parametrize("kept", [0, 4, 100, 100_000])
def test_a_truncated_file_is_refused(copy, kept):
    file = copy("llama-tied") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model.safetensors must be a complete safetensors file.*Download it again"):
        load_huggingface(file.parent)


def test_no_such_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must be a directory with a config.json.*got no such directory"):
        load_huggingface(tmp_path / "nowhere")


def test_no_config(copy):
    directory = copy("llama-tied")
    (directory / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"got no config.json in it"):
        load_huggingface(directory)


def test_no_weights(copy):
    directory = copy("llama-tied")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"must hold model.safetensors or .*index.json; got neither"):
        load_huggingface(directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_damaged_json(copy, name):
    directory = copy("llama-tied")
    (directory / name).write_text('{"model_type": "lla')
    with pytest.raises(ValueError, match=rf"{name} must be a JSON file; it cannot be read"):
        load_huggingface(directory)


def test_an_index_without_shards(copy):
    directory = copy("llama3-gqa-rope-scaled")
    edit_json(directory / "model.safetensors.index.json", weight_map="absent")
    with pytest.raises(ValueError, match="name the shards in a weight_map; got none"):
        load_huggingface(directory)


def test_an_unsupported_architecture(copy):
    directory = copy("llama-tied")
    edit_json(directory / "config.json", model_type="gemma2", architectures=["Gemma2ForCausalLM"])
    with pytest.raises(ValueError, match=r"must be one of LlamaForCausalLM.*got 'Gemma2ForCausalLM'"):
        load_huggingface(directory)
