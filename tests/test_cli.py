import json

import pytest
from checkpoints import DATA, model

import kivi_jax
from kivi_jax.cli import main

LLAMA2 = str(DATA / "checkpoints" / "llama2-mha")
LLAMA3 = str(DATA / "checkpoints" / "llama3-gqa-rope-scaled")


def test_generate_streams_the_text_and_ends_with_one_line_of_numbers(capsys):
    assert main(["generate", "Once upon", "--model", LLAMA2, "--max-new-tokens", "9", "--bits", "4"]) == 0
    out, err = capsys.readouterr()
    params, tokenizer = model("llama2-mha")
    config = kivi_jax.KiviConfig(key_bits=4, value_bits=4)
    want = kivi_jax.generate(params, "Once upon", tokenizer=tokenizer, max_new_tokens=9, cache=config)
    assert out == "Once upon" + want.text + "\n"
    line = err.strip().splitlines()[-1]
    assert "9 tokens" in line and "tokens/s" in line and "in bf16" in line


def test_chat_sampling_and_the_unquantized_cache(capsys):
    command = ["generate", "Hello", "--model", LLAMA3, "--max-new-tokens", "5", "--chat", "--cache", "bf16"]
    texts = []
    for seed in ("1", "1", "2"):
        assert main([*command, "--temperature", "2", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_inspect_shows_config_parameters_and_cost(capsys):
    assert main(["inspect", LLAMA3]) == 0
    out = capsys.readouterr().out
    params = model("llama3-gqa-rope-scaled")[0]
    config = json.loads((DATA / "checkpoints" / "llama3-gqa-rope-scaled" / "config.json").read_text())
    import jax
    from flax import nnx

    assert f"{sum(x.size for x in jax.tree.leaves(nnx.state(params))):,}" in out
    assert str(config["hidden_size"]) in out and "llama3" in out
    # 3 layers, 2 heads, 32 channels, keys and values: 384 numbers a token
    for bits in (16, 5, 3):
        assert f"{1000 * 384 * bits / 8 / 1e6:.3f}" in out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["generate", "x", "--model", "no/such/place"], "which does not exist"),
        (["generate", "x", "--model", str(DATA / "checkpoints" / "llama-tied")], "must have a tokenizer"),
        (["generate", "x", "--model", LLAMA2, "--max-new-tokens", "0"], "max_new_tokens must be 1 or more; got 0"),
        (["generate", "x", "--model", LLAMA2, "--temperature", "-1"], "temperature must be 0 or more; got -1.0"),
        (["inspect", str(DATA)], "config.json"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence_and_status_2(command, message, capsys):
    assert main(command) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("kivi-jax: ") and message in lines[-1]
