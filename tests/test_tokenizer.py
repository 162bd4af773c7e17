"""Tokenizers of Hugging Face directories and of GGUF files, and chat templates.

The two small vocabularies of `tests/data` are written out as GGUF too, so that what is rebuilt from such a file is held
against the `tokenizers` file it came from.
"""

import json
import shutil
from pathlib import Path

import gguf
import gguf_files
import pytest

from kivi_jax.models import Tokenizer

DATA = Path(__file__).parent / "data"
CHECKPOINTS = DATA / "checkpoints"
BYTE_LEVEL, SENTENCEPIECE = CHECKPOINTS / "llama3-gqa-rope-scaled", CHECKPOINTS / "llama2-mha"
TEXTS = [
    json.loads((DATA / "smollm2_golden.json").read_text(encoding="utf-8"))["doc"],
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "the inner in on --  --- and\nnew\n\nlines\t",
    "12345 67.89",
    "naïve café — “quotes” 日本語 🙂",
    "don't can't I'LL",
    "x</s>y<s><unk> z",
    "a<|eot_id|> b<|begin_of_text|>",
]


@pytest.fixture
def copy(tmp_path):
    """Copies a tokenizer's files to where they can be changed, tokenizer_config.json edited; None removes a key."""

    def make(source, **fields):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(source / name, tmp_path / name)
        file = tmp_path / "tokenizer_config.json"
        merged = json.loads(file.read_text()) | fields
        file.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))
        return tmp_path

    return make


def edit(file, change):
    contents = json.loads(file.read_text(encoding="utf-8"))
    change(contents)
    file.write_text(json.dumps(contents), encoding="utf-8")


def as_gguf(path, source, **fields):
    """A Hugging Face vocabulary as a GGUF file, opened; None removes a field."""
    contents = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, merges = contents["model"]["vocab"], contents["model"]["merges"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    names = {entry["content"] for entry in contents["added_tokens"]}
    if contents["model"]["byte_fallback"]:
        kind, pre = "llama", None
        types = [2 if t == "<unk>" else 6 if t.startswith("<0x") else 3 if t in names else 1 for t in tokens]
        ranks = {left + right: rank for rank, (left, right) in enumerate(merges)}
        extra = {"scores": [-float(ranks.get(token, 1000)) for token in tokens]}
    else:
        kind, pre = "gpt2", "smollm"
        types = [3 if token in names else 1 for token in tokens]
        extra = {"merges": [f"{left} {right}" for left, right in merges]}
    given = {"model": kind, "pre": pre, "tokens": tokens, "token_type": types, **extra, **fields}
    held = {f"tokenizer.ggml.{key}": value for key, value in given.items() if value is not None}
    return gguf.GGUFReader(gguf_files.write(path, held, {}))


@pytest.fixture
def sentencepiece_gguf(tmp_path):
    return lambda **fields: as_gguf(tmp_path / "model.gguf", SENTENCEPIECE, **fields)


@pytest.fixture
def byte_level_gguf(tmp_path):
    return lambda **fields: as_gguf(tmp_path / "model.gguf", BYTE_LEVEL, **fields)


def test_beginning_of_sequence_is_added_as_tokenizer_config_says(copy):
    for source, bos in ((SENTENCEPIECE, 1), (BYTE_LEVEL, 0)):
        tokenizer = Tokenizer.from_hf(source)
        with_bos, without = tokenizer.encode("Hello"), tokenizer.encode("Hello", add_special_tokens=False)
        assert with_bos == [bos, *without]
        assert bos not in without
        assert Tokenizer.from_hf(copy(source, add_bos_token=False)).encode("Hello") == without


def test_end_of_sequence_is_added_as_tokenizer_config_says(copy):
    plain = Tokenizer.from_hf(BYTE_LEVEL).encode("Hello", add_special_tokens=False)
    assert Tokenizer.from_hf(copy(BYTE_LEVEL, add_eos_token=True)).encode("Hello") == [0, *plain, 1]
    assert Tokenizer.from_hf(copy(BYTE_LEVEL, add_eos_token=True, add_bos_token=None)).encode("Hello") == [*plain, 1]


def test_where_tokenizer_config_is_silent_tokenizer_json_decides(copy):
    directory = copy(BYTE_LEVEL, add_bos_token=None)
    plain = Tokenizer.from_hf(BYTE_LEVEL).encode("Hello", add_special_tokens=False)
    assert Tokenizer.from_hf(directory).encode("Hello") == plain

    def frame(contents):
        ids = {"<|eot_id|>": {"id": "<|eot_id|>", "ids": [2], "tokens": ["<|eot_id|>"]}}
        single = [{"SpecialToken": {"id": "<|eot_id|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        contents["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": single,
            "special_tokens": ids,
        }
        contents["post_processor"]["pair"] = [*single, {"Sequence": {"id": "B", "type_id": 1}}]

    edit(directory / "tokenizer.json", frame)
    assert Tokenizer.from_hf(directory).encode("Hello") == [2, *plain]


def test_llama_classes_add_the_beginning_of_sequence_where_the_files_are_silent(copy):
    assert Tokenizer.from_hf(copy(SENTENCEPIECE, add_bos_token=None, add_eos_token=None)).encode("Hello")[0] == 1


def test_adding_a_token_that_there_is_none_of_is_refused(copy):
    with pytest.raises(ValueError, match="add_bos_token, so it must have a bos_token; got None"):
        Tokenizer.from_hf(copy(BYTE_LEVEL, bos_token=None))
    with pytest.raises(ValueError, match="must have a eos_token; got '<nowhere>'"):
        Tokenizer.from_hf(copy(BYTE_LEVEL, add_eos_token=True, eos_token="<nowhere>"))


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12])
@pytest.mark.parametrize("source", [SENTENCEPIECE, BYTE_LEVEL], ids=lambda path: path.name)
def test_decoding_gives_the_text_back(source, text):
    tokenizer = Tokenizer.from_hf(source)
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    if source == SENTENCEPIECE and "<s>" in text:
        # Each stretch between special tokens gets a leading space of its own.
        decoded, text = decoded.replace(" ", ""), text.replace(" ", "")
    assert decoded == text


def test_special_tokens_in_a_text_become_their_ids_and_are_left_out_of_decoded_text():
    tokenizer = Tokenizer.from_hf(BYTE_LEVEL)
    ids = tokenizer.encode("a<|eot_id|>b")
    assert ids.count(2) == 1
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|begin_of_text|>a<|eot_id|>b"


def test_a_prompt_is_never_cut_or_padded_to_the_length_tokenizer_json_names(copy):
    directory = copy(BYTE_LEVEL)

    def shorten(contents):
        contents["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        contents["padding"] = {
            "strategy": {"Fixed": 4},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|begin_of_text|>",
        }

    edit(directory / "tokenizer.json", shorten)
    for text in ("a", "a much longer text than that"):
        assert Tokenizer.from_hf(directory).encode(text) == Tokenizer.from_hf(BYTE_LEVEL).encode(text)


def test_tokens_that_only_tokenizer_config_declares_are_known(copy):
    fields = {"content": "<|extra|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    tokenizer = Tokenizer.from_hf(copy(BYTE_LEVEL, added_tokens_decoder={"320": {**fields, "special": True}}))
    assert tokenizer.vocab_size == 321
    assert tokenizer.encode("<|extra|>", add_special_tokens=False) == [320]
    assert tokenizer.decode([320]) == ""
    with pytest.raises(ValueError, match=r"'<|extra|>' the id 400; .*tokenizer.json gives it 320"):
        Tokenizer.from_hf(copy(BYTE_LEVEL, added_tokens_decoder={"400": {**fields, "special": True}}))


def test_special_tokens_may_be_objects_and_come_from_the_old_map(copy):
    directory = copy(BYTE_LEVEL, bos_token={"content": "<|begin_of_text|>", "special": True}, eos_token=None)
    (directory / "special_tokens_map.json").write_text('{"eos_token": "<|eot_id|>", "bos_token": "x"}')
    special = Tokenizer.from_hf(directory).special_tokens
    assert special == {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def test_no_tokenizer_file_means_no_tokenizer(tmp_path):
    assert Tokenizer.from_hf(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_refused(copy, name):
    directory = copy(BYTE_LEVEL)
    (directory / name).write_text('{"version": "1.')
    with pytest.raises(ValueError, match=rf"{name} must be"):
        Tokenizer.from_hf(directory)


@pytest.mark.parametrize("source", [SENTENCEPIECE, BYTE_LEVEL], ids=lambda path: path.name)
def test_saved_and_read_again_it_is_the_same(tmp_path, source):
    original = Tokenizer.from_hf(source)
    original.save(tmp_path / "new")
    again = Tokenizer.from_hf(tmp_path / "new")
    assert again.special_tokens == original.special_tokens
    assert again.chat_template == original.chat_template
    for text in TEXTS:
        assert again.encode(text) == original.encode(text)
        assert again.decode(again.encode(text)) == original.decode(original.encode(text))


# Streaming


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12])
@pytest.mark.parametrize("source", [SENTENCEPIECE, BYTE_LEVEL], ids=lambda path: path.name)
def test_streamed_pieces_join_to_the_decoded_text(source, text, skip):
    tokenizer = Tokenizer.from_hf(source)
    ids = tokenizer.encode(text)
    stream = tokenizer.stream_decoder(skip_special_tokens=skip)
    pieces = [stream.step(i) for i in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join([*pieces, stream.flush()]) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_character_of_several_tokens_is_held_back_until_it_is_whole():
    tokenizer = Tokenizer.from_hf(BYTE_LEVEL)
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert len(ids) == 4
    stream = tokenizer.stream_decoder()
    assert [stream.step(i) for i in ids] == ["", "", "", "🙂"]
    assert stream.flush() == ""


def test_a_character_that_never_became_whole_comes_with_the_flush():
    tokenizer = Tokenizer.from_hf(BYTE_LEVEL)
    ids = tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
    stream = tokenizer.stream_decoder()
    assert "".join(stream.step(i) for i in ids) == "a"
    assert stream.flush() == tokenizer.decode(ids)[1:] != ""
    assert stream.flush() == ""


# Chat templates

TURNS = [{"role": "user", "content": "Hi <b> & é"}, {"role": "assistant", "content": "Yes"}]


def rendered(template, messages=TURNS, **kwargs):
    tokenizer = Tokenizer.from_hf(BYTE_LEVEL)
    tokenizer.chat_template = template
    return tokenizer.apply_chat_template(messages, **kwargs)


def test_the_checkpoints_template_renders_with_its_special_tokens():
    tokenizer = Tokenizer.from_hf(BYTE_LEVEL)
    text = tokenizer.apply_chat_template(TURNS[:1])
    assert text == "<|begin_of_text|><|user|>Hi <b> & é<|eot_id|><|assistant|>"
    assert tokenizer.apply_chat_template(TURNS[:1], add_generation_prompt=False) == text.removesuffix("<|assistant|>")


def test_without_a_template_a_chat_is_refused():
    with pytest.raises(ValueError, match="needs a checkpoint with a chat template; this one has none"):
        Tokenizer.from_hf(SENTENCEPIECE).apply_chat_template(TURNS)


def test_blocks_leave_no_line_breaks_or_indentation():
    template = "{% for m in messages %}\n    {% if true %}\n{{ m.role }},\n    {% endif %}\n{% endfor %}\n"
    assert rendered(template) == "user,\nassistant,\n"


def test_json_in_a_template_is_not_escaped_for_html():
    assert rendered("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi <b> & é"}'
    assert rendered("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"


def test_loop_controls_and_generation_blocks_are_understood():
    template = "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% break %}{% endfor %}"
    assert rendered(template) == "user"


def test_the_date_is_available():
    assert rendered("{{ strftime_now('%Y') }}").isdigit()


def test_tools_and_documents_are_none_and_other_names_undefined():
    assert rendered("{{ tools is none and documents is none and nothing is not defined }}") == "True"


def test_a_template_that_refuses_says_why():
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


def test_a_template_that_does_not_compile_is_refused():
    with pytest.raises(ValueError, match="must be Jinja that compiles"):
        rendered("{% for %}")


@pytest.mark.parametrize("template", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_can_neither_reach_python_nor_change_the_messages(template):
    with pytest.raises(ValueError, match=r"cannot take these messages.*(unsafe|not safely)"):
        rendered(template)


def test_a_template_of_its_own_file_wins_over_the_one_in_tokenizer_config(copy):
    directory = copy(BYTE_LEVEL)
    (directory / "chat_template.jinja").write_text("own")
    assert Tokenizer.from_hf(directory).apply_chat_template(TURNS) == "own"


def test_of_several_templates_the_default_is_taken(copy):
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert Tokenizer.from_hf(copy(BYTE_LEVEL, chat_template=several)).apply_chat_template(TURNS) == "plain"


# GGUF


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12])
def test_sentencepiece_rebuilt_from_scores_encodes_as_the_original(sentencepiece_gguf, text):
    original, rebuilt = Tokenizer.from_hf(SENTENCEPIECE), Tokenizer.from_gguf(sentencepiece_gguf())
    assert rebuilt.encode(text) == original.encode(text)
    ids = rebuilt.encode(text, add_special_tokens=False)
    assert rebuilt.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12])
def test_byte_level_rebuilt_from_merges_encodes_as_the_original(byte_level_gguf, text):
    fields = {"bos_token_id": 0, "eos_token_id": 1, "add_bos_token": True}
    original, rebuilt = Tokenizer.from_hf(BYTE_LEVEL), Tokenizer.from_gguf(byte_level_gguf(**fields))
    ids = rebuilt.encode(text)
    assert ids == original.encode(text)
    assert rebuilt.decode(ids) == original.decode(ids)
    assert rebuilt.special_tokens == {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}


def test_byte_tokens_of_sentencepiece_are_text_and_not_special(sentencepiece_gguf):
    rebuilt = Tokenizer.from_gguf(sentencepiece_gguf())
    assert rebuilt.decode(rebuilt.encode("日本 🙂")) == "日本 🙂"


def test_space_prefix_of_sentencepiece_follows_the_file(sentencepiece_gguf):
    def first(**fields):
        tokenizer = Tokenizer.from_gguf(sentencepiece_gguf(**fields))
        for text in ("hello", " hello", "  hello"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids) == text
        ids = tokenizer.encode("hello", add_special_tokens=False)
        return tokenizer.backend.id_to_token(ids[0])

    assert first().startswith("▁")
    assert first(add_space_prefix=False) == "h"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pre": "smollm"}, False),
        ({"pre": "smollm", "add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_beginning_of_sequence_is_added_as_the_file_or_its_pre_tokenizer_says(byte_level_gguf, fields, expected):
    ids = Tokenizer.from_gguf(byte_level_gguf(bos_token_id=0, **fields)).encode("hello")
    assert (ids[0] == 0) == expected


def test_sentencepiece_files_add_the_beginning_of_sequence_unless_they_say_otherwise(sentencepiece_gguf):
    plain = Tokenizer.from_gguf(sentencepiece_gguf(add_bos_token=False)).encode("hello")
    assert Tokenizer.from_gguf(sentencepiece_gguf()).encode("hello") == [1, *plain]
    assert Tokenizer.from_gguf(sentencepiece_gguf(add_eos_token=True)).encode("hello") == [1, *plain, 2]


def test_user_defined_tokens_are_whole_but_not_special(byte_level_gguf):
    reader = byte_level_gguf()
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    types = reader.get_field("tokenizer.ggml.token_type").contents()
    tokens[-1], types[-1] = "tool call", 4
    tokenizer = Tokenizer.from_gguf(byte_level_gguf(tokens=tokens, token_type=types, merges=["h e"]))
    ids = tokenizer.encode("a tool call b")
    assert ids.count(len(tokens) - 1) == 1
    assert tokenizer.decode(ids) == "a tool call b"


def pieces(tokenizer, text):
    return [piece for piece, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I'll see 1234 x", ["I", "'ll", "Ġsee", "Ġ1234", "Ġx"]),
        ("gpt-2", "I'LL  go", ["I", "'", "LL", "Ġ", "Ġgo"]),
        ("smollm", "ab 12c", ["ab", "Ġ", "1", "2", "c"]),
        ("llama-bpe", "I'LLx 12345", ["I", "'LL", "x", "Ġ", "123", "45"]),
        ("llama-bpe", "(see)\n\n x", ["(see", ")ĊĊ", "Ġx"]),
        ("qwen2", "I'LLx 123", ["I", "'LL", "x", "Ġ", "1", "2", "3"]),
        ("tekken", "CamelCase 12", ["Camel", "Case", "Ġ", "1", "2"]),
        ("default", "a+b 12345", ["a", "+", "b", "Ġ", "123", "45"]),
    ],
)
def test_text_is_split_as_the_pre_tokenizer_that_the_file_names(byte_level_gguf, pre, text, expected):
    tokenizer = Tokenizer.from_gguf(byte_level_gguf(pre=pre, bos_token_id=0))
    assert pieces(tokenizer, text) == expected


def test_a_file_without_a_pre_tokenizer_gets_the_default_one(byte_level_gguf):
    assert pieces(Tokenizer.from_gguf(byte_level_gguf(pre=None)), "a+b") == ["a", "+", "b"]


def test_llama3_takes_a_piece_that_is_a_token_without_merging(byte_level_gguf):
    def ids(pre):
        tokens = byte_level_gguf().get_field("tokenizer.ggml.tokens").contents()
        tokens[-1] = "zqz"
        reader = byte_level_gguf(pre=pre, tokens=tokens, merges=["h e"], add_bos_token=False)
        return Tokenizer.from_gguf(reader).encode("zqz")

    assert ids("llama-bpe") == [319]
    assert len(ids("qwen2")) == 3


def test_chat_template_of_the_file_is_used(tmp_path, byte_level_gguf):
    reader = byte_level_gguf()
    assert Tokenizer.from_gguf(reader).chat_template is None
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": reader.get_field("tokenizer.ggml.tokens").contents(),
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.chat_template": "{{ messages[0].content }}!",
    }
    path = gguf_files.write(tmp_path / "chat.gguf", fields, {})
    assert Tokenizer.from_gguf(gguf.GGUFReader(path)).apply_chat_template(TURNS) == "Hi <b> & é!"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pre": "deepseek-v3"}, "tokenizer.ggml.pre must be one of .*; got 'deepseek-v3', which is not supported"),
        ({"model": "bert"}, "must be gpt2 .* or llama .*; got 'bert'"),
        ({"merges": None}, "must have the field tokenizer.ggml.merges"),
        ({"token_type": [1, 1]}, "token_type must have 320 entries, one a token; got 2"),
        ({"add_bos_token": True}, "add_bos_token, so it must have a bos_token"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_refused(byte_level_gguf, fields, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(byte_level_gguf(**fields))


def test_damaged_vocabularies_are_refused(byte_level_gguf, sentencepiece_gguf):
    tokens = byte_level_gguf().get_field("tokenizer.ggml.tokens").contents()
    with pytest.raises(ValueError, match=r"each token once; got 'a' twice"):
        Tokenizer.from_gguf(byte_level_gguf(tokens=[*tokens[:-1], "a"]))
    with pytest.raises(ValueError, match=r"scores must have 400 entries, one a token; got 1"):
        Tokenizer.from_gguf(sentencepiece_gguf(scores=[1.0]))


def test_a_file_without_vocabulary_has_no_tokenizer(tmp_path):
    assert Tokenizer.from_gguf(gguf.GGUFReader(gguf_files.write(tmp_path / "m.gguf", {".block_count": 1}, {}))) is None
