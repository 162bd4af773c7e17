"""Text to ids and back, with the tokenizer that a checkpoint carries."""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream
from tokenizers.processors import TemplateProcessing

from kivi_jax.models import chat_template as chat
from kivi_jax.models.gguf_tokenizer import build_backend, read_special_tokens

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_ADD = ("add_bos_token", "add_eos_token")
# Classes of transformers that put the beginning-of-sequence token first when the files do not say.
_ADDS_BOS = ("LlamaTokenizer", "LlamaTokenizerFast")
_TEMPLATE_FILE = "chat_template.jinja"


class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        backend: the `tokenizers.Tokenizer` that does the work.
        special_tokens: texts by name: "bos_token", "eos_token", "unk_token", "pad_token", those that there are.
        chat_template: Jinja source, or None.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, special_tokens: dict[str, str], chat_template: str | None = None
    ):
        # A tokenizer.json may cut or pad to the length it was trained with; a prompt must arrive as it is.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; special tokens written out in it become their ids.

        Args:
            text: any text, the empty one too.
            add_special_tokens: whether the tokens that the checkpoint frames a text with, such as a beginning of
                sequence, are added. Give False for a text from `apply_chat_template`, which has them already.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are not UTF-8 come out as U+FFFD."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def stream_decoder(self, skip_special_tokens: bool = True) -> "StreamDecoder":
        """A decoder that takes ids as they come."""
        return StreamDecoder(self, skip_special_tokens)

    def apply_chat_template(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
        """The prompt for a conversation, in the form the checkpoint was trained on.

        Args:
            messages: dicts with "role" ("system", "user", "assistant") and "content".
            add_generation_prompt: whether to end with the opening of the assistant's turn.

        Raises:
            ValueError: the checkpoint has no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("apply_chat_template needs a checkpoint with a chat template; this one has none.")
        return chat.render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.special_tokens,
        )

    def save(self, directory: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja, which `from_hf` reads."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(directory / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        if self.chat_template is not None:
            (directory / _TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8", newline="")

    @classmethod
    def from_hf(cls, directory: str | Path) -> "Tokenizer | None":
        """Reads tokenizer.json and the files beside it; None where there is no tokenizer.json.

        Raises:
            ValueError: a file that cannot be read, or settings that contradict it.
        """
        directory = Path(directory)
        if not (file := directory / "tokenizer.json").is_file():
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{file} must be a tokenizer.json that can be read; got an error: {error}.") from error
        config = _read(directory / "special_tokens_map.json") | _read(directory / "tokenizer_config.json")
        special = {name: _content(config[name]) for name in _SPECIAL if config.get(name) is not None}
        _add_tokens(backend, config, special, file)
        if any(name in config for name in _ADD) or config.get("tokenizer_class") in _ADDS_BOS:
            bos = config.get("add_bos_token", config.get("tokenizer_class") in _ADDS_BOS)
            _frame(backend, special, bos=bool(bos), eos=bool(config.get("add_eos_token")))
        return cls(backend, special_tokens=special, chat_template=_template(directory, config))

    @classmethod
    def from_gguf(cls, reader) -> "Tokenizer | None":
        """Rebuilds the tokenizer of a `gguf.GGUFReader`; None where the file carries no vocabulary.

        Raises:
            ValueError: a kind of tokenizer or pre-tokenizer that is not supported.
        """
        if reader.get_field("tokenizer.ggml.tokens") is None:
            return None
        backend = build_backend(reader)
        special, bos, eos = read_special_tokens(reader)
        _frame(backend, special, bos=bos, eos=eos)
        template = reader.get_field("tokenizer.chat_template")
        return cls(backend, special_tokens=special, chat_template=None if template is None else template.contents())


class StreamDecoder:
    """Turns ids into text one by one, holding back what is not a whole character yet.

    The pieces and the final `flush` join to what `Tokenizer.decode` gives for all the ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._given = 0

    def step(self, token: int) -> str:
        """The text that this id completes, possibly empty."""
        self._ids.append(int(token))
        piece = self._stream.step(self._tokenizer.backend, int(token)) or ""
        self._given += len(piece)
        return piece

    def flush(self) -> str:
        """What was held back at the end: a character that never became whole, as U+FFFD."""
        text = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        rest, self._given = text[self._given :], len(text)
        return rest


def _read(file: Path) -> dict:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be a JSON file; it cannot be read: {error}. Download it again.") from error


def _content(token: str | dict) -> str:
    return token["content"] if isinstance(token, dict) else token


def _add_tokens(backend: tokenizers.Tokenizer, config: dict, special: dict[str, str], file: Path) -> None:
    """Makes tokens that only tokenizer_config.json declares known to the backend, under the ids it gives."""
    declared = config.get("added_tokens_decoder") or {}
    known = backend.get_added_tokens_decoder()
    for token_id, fields in sorted((int(i), fields) for i, fields in declared.items()):
        if token_id in known:
            continue
        backend.add_tokens([tokenizers.AddedToken(**{k: v for k, v in fields.items() if k != "__type"})])
        if backend.token_to_id(fields["content"]) != token_id:
            raise ValueError(
                f"tokenizer_config.json gives {fields['content']!r} the id {token_id}; "
                f"{file} gives it {backend.token_to_id(fields['content'])}."
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    named = [text for text in special.values() if text not in known and backend.token_to_id(text) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in named])


def _frame(backend: tokenizers.Tokenizer, special: dict[str, str], *, bos: bool, eos: bool) -> None:
    """Makes `encode` put the beginning and the end of sequence around a text, or neither."""
    before, after = ["bos_token"] * bos, ["eos_token"] * eos
    for name in (*before, *after):
        if name not in special or backend.token_to_id(special[name]) is None:
            raise ValueError(f"The tokenizer says add_{name}, so it must have a {name}; got {special.get(name)!r}.")
    backend.post_processor = TemplateProcessing(
        single=[*(special[name] for name in before), "$A", *(special[name] for name in after)],
        special_tokens=[(special[name], backend.token_to_id(special[name])) for name in (*before, *after)],
    )


def _template(directory: Path, config: dict) -> str | None:
    """The default chat template: a file of its own wins over tokenizer_config.json, where it may be one of several."""
    file = directory / _TEMPLATE_FILE
    if file.is_file():
        with open(file, encoding="utf-8", newline="") as opened:
            return opened.read()
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
