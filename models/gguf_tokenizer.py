"""The tokenizer inside a GGUF file, rebuilt from its vocabulary, its merges or scores, and its pre-tokenizer's name.

Pre-tokenizers and defaults are those of llama.cpp, which is what GGUF files are made for.
"""

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from kivi_jax.models.gguf_fields import read

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


def _cased(digits: str) -> str:
    """The pattern of Llama 3 and Qwen2, which differ in how many digits go together."""
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"(?i:{_CONTRACTIONS})|{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Each name's patterns, applied one after the other to the pieces that the one before left.
_PATTERNS = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "exaone4", "phi-2"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", _GPT2)
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), (_cased(r"\p{N}{1,3}"),)
    ),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), (_cased(r"\p{N}"),)),
    "tekken": (_TEKKEN,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
# These take a whole piece that is in the vocabulary as it is, and begin a text with the beginning of sequence.
_WHOLE_PIECES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")


def build_backend(reader) -> tokenizers.Tokenizer:
    """The tokenizer of a `gguf.GGUFReader`, without the tokens that frame a text.

    Raises:
        ValueError: another kind than "gpt2" (byte-level BPE) or "llama" (SentencePiece BPE), a pre-tokenizer that is
            not supported, or fields that do not fit together.
    """
    kind = read(reader, "tokenizer.ggml.model")
    tokens = read(reader, "tokenizer.ggml.tokens")
    types = read(reader, "tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type must have {len(tokens)} entries, one a token; got {len(types)}.")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise ValueError(f"tokenizer.ggml.tokens must hold each token once; got {twice!r} twice.")
    if kind == "gpt2":
        backend = _byte_level(reader, vocabulary)
    elif kind == "llama":
        backend = _sentencepiece(reader, tokens, types, vocabulary)
    else:
        raise ValueError(
            f"tokenizer.ggml.model must be gpt2 (byte-level BPE) or llama (SentencePiece); got {kind!r}, not supported."
        )
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            backend.add_tokens([AddedToken(token, special=kind != _USER_DEFINED, normalized=False)])
    return backend


def _byte_level(reader, vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    name = read(reader, "tokenizer.ggml.pre", "default")
    if name not in _PATTERNS:
        raise ValueError(
            f"tokenizer.ggml.pre must be one of {', '.join(sorted(_PATTERNS))}; got {name!r}, which is not supported: "
            "load the Hugging Face directory of this model instead."
        )
    # A merge's parts have no spaces of their own: in byte-level text a space is another character.
    merges = [tuple(merge.split(" ", 1)) for merge in read(reader, "tokenizer.ggml.merges")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_PIECES))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[name]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(reader, tokens, types, vocabulary) -> tokenizers.Tokenizer:
    scores = read(reader, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores must have {len(tokens)} entries, one a token; got {len(scores)}.")
    merges = _merges_from_scores(tokens, types, scores, vocabulary)
    unknown = tokens[types.index(_UNKNOWN)] if _UNKNOWN in types else None
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    prefix = read(reader, "tokenizer.ggml.add_space_prefix", True)
    escape = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), escape]) if prefix else escape
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    return backend


def _merges_from_scores(tokens, types, scores, vocabulary) -> list[tuple[str, str]]:
    """Every pair of tokens that joins to a token, best score first: SentencePiece always joins the best pair."""
    merges = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind not in (_NORMAL, _UNUSED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-score, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def read_special_tokens(reader) -> tuple[dict[str, str], bool, bool]:
    """Special tokens by name, and whether a text begins with the first and ends with the last of a sequence."""
    tokens = read(reader, "tokenizer.ggml.tokens")
    sentencepiece = read(reader, "tokenizer.ggml.model") == "llama"
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if sentencepiece else {}
    special = {}
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        token_id = read(reader, f"tokenizer.ggml.{key}_token_id", defaults.get(key))
        if token_id is not None and token_id < len(tokens):
            special[name] = tokens[token_id]
    begins = sentencepiece or read(reader, "tokenizer.ggml.pre", "default") in _WHOLE_PIECES
    bos = read(reader, "tokenizer.ggml.add_bos_token", begins)
    return special, bool(bos), bool(read(reader, "tokenizer.ggml.add_eos_token", False))
