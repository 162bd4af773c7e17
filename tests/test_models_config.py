"""Reading config.json: both of its forms, what each architecture implies, and what is refused."""

import json

import pytest

from kivi_jax.models import LlamaConfig, RopeScaling

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def of(kind, **fields):
    architecture = {"mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    names = {"model_type": kind, "architectures": [architecture.get(kind, "LlamaForCausalLM")]}
    return LlamaConfig.from_hf(LLAMA | names | fields)


def test_config_is_hashable_and_equal_by_value():
    scaling = {"rope_type": "linear", "factor": 2.0}
    one, two = of("llama", rope_scaling=scaling), of("llama", rope_scaling=scaling)
    assert one == two
    assert hash(one) == hash(two)
    assert one != of("llama", rope_scaling={"rope_type": "linear", "factor": 3.0})


def test_old_and_new_rope_fields_mean_the_same():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    old = of("llama", rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = of("llama", rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **scaling})
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == RopeScaling("llama3", **scaling)


def test_rope_theta_reaches_the_config_from_either_form():
    assert of("llama").rope_theta == 10000.0
    assert of("llama", rope_theta=7.0).rope_theta == 7.0
    assert of("llama", rope_parameters={"rope_theta": 7.0, "rope_type": "default"}).rope_theta == 7.0


def test_both_rope_forms_at_once_must_agree():
    new = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    both = of("llama", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters=new)
    assert both == of("llama", rope_parameters=new)
    with pytest.raises(ValueError, match=r"give factor once, or twice the same; got 2.0 and 4.0"):
        of("llama", rope_scaling={"type": "linear", "factor": 4.0}, rope_parameters=new)
    with pytest.raises(ValueError, match="give rope_theta once, or twice the same"):
        of("llama", rope_theta=1e4, rope_parameters=new)


def test_yarn_takes_its_context_and_factor_from_the_model_where_they_are_left_out():
    assert (
        of("llama", rope_scaling={"type": "yarn", "factor": 4.0}).rope_scaling.original_max_position_embeddings == 1024
    )
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 256}
    assert of("llama", rope_scaling=scaling).rope_scaling.factor == 4.0
    assert of("llama", rope_scaling=scaling | {"factor": 2.0}).rope_scaling.factor == 2.0


def test_dynamic_scaling_may_repeat_the_models_context_but_not_contradict_it():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 1024}
    assert of("llama", rope_scaling=scaling).rope_scaling == RopeScaling("dynamic", factor=2.0)
    with pytest.raises(ValueError, match=r"original_max_position_embeddings, which is not supported"):
        of("llama", rope_scaling=scaling | {"original_max_position_embeddings": 512})


def test_head_dim_is_derived_only_where_it_is_not_given():
    assert of("llama").head_dim == 32
    assert of("llama", head_dim=64).head_dim == 64
    assert of("qwen3").head_dim == 128


def test_llama_biases_follow_attention_bias_and_mlp_bias():
    config = of("llama", attention_bias=True, mlp_bias=True)
    assert (config.attention_bias, config.attention_out_bias, config.mlp_bias) == (True, True, True)
    config = of("llama")
    assert (config.attention_bias, config.attention_out_bias, config.mlp_bias) == (False, False, False)


def test_qwen2_has_query_key_value_biases_but_no_output_bias():
    config = of("qwen2")
    assert (config.attention_bias, config.attention_out_bias, config.qk_norm) == (True, False, False)


def test_qwen3_normalizes_queries_and_keys_and_has_no_biases():
    config = of("qwen3")
    assert (config.attention_bias, config.attention_out_bias, config.qk_norm) == (False, False, True)


@pytest.mark.parametrize(
    ("kind", "fields", "windows"),
    [
        ("llama", {}, [None] * 4),
        ("mistral", {"sliding_window": 64}, [64] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("mistral", {}, [4096] * 4),
        ("qwen2", {"sliding_window": 64, "max_window_layers": 0}, [None] * 4),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, [None] * 3 + [64]),
        ("qwen3", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, [None] + [64] * 3),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, [None] * 4),
        (
            "qwen3",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            [None, 64] * 2,
        ),
    ],
)
def test_each_layer_has_the_window_its_architecture_gives_it(kind, fields, windows):
    config = of(kind, **fields)
    assert [config.window(layer) for layer in range(4)] == windows


def test_special_tokens_one_several_or_none():
    assert of("llama").eos_token_id == (2,)
    assert of("llama", eos_token_id=[1, 2]).eos_token_id == (1, 2)
    assert of("llama", eos_token_id=None).eos_token_id == ()
    assert of("qwen2").eos_token_id == ()
    assert of("llama", pad_token_id=7).pad_token_id == 7


def test_dict_form_survives_json():
    config = of(
        "mistral",
        sliding_window=64,
        eos_token_id=[1, 2],
        rope_scaling={"type": "yarn", "factor": 4.0, "mscale": 0.7, "truncate": False},
    )
    assert LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "must hold a LlamaForCausalLM; got 'LlamaForSeq"),
        ({"hidden_act": "gelu"}, "hidden_act must be one of 'silu'.*got 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config must be absent.*gptq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor.*0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be 1",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "the same for all layers"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope.*not supported"),
        ({"sliding_window": 64}, "sliding_window must be absent for a llama model; got 64"),
        ({"vocab_size": None}, "must give vocab_size; it does not"),
        ({"hidden_size": 100.5}, "hidden_size must be a whole number, 1 or more; got 100.5"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads; got 4 and 3"),
        ({"hidden_size": 126}, "divisible by num_attention_heads"),
        ({"head_dim": 33}, "head_dim must be even.*got 33"),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "attention_bias": True}, "must be False"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "attention_bias": False}, "must be True"),
        (
            {"model_type": "mistral", "architectures": None, "layer_types": ["full_attention"]},
            "each of the 4 layers; got 1",
        ),
        (
            {"model_type": "mistral", "architectures": None, "layer_types": ["chunked_attention"] * 4},
            "chunked_attention.*not supported",
        ),
    ],
)
def test_what_would_change_results_and_is_not_supported_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hf(LLAMA | fields)
