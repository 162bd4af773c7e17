"""Loading a GGUF file of the llama architecture, the format of llama.cpp."""

import math
from pathlib import Path

import gguf
import numpy as np

from kivi_jax.models import assembly
from kivi_jax.models.assembly import Assembly, Place, in_memory
from kivi_jax.models.config import LlamaConfig
from kivi_jax.models.gguf_fields import read
from kivi_jax.models.huggingface import Progress
from kivi_jax.models.llama import Llama
from kivi_jax.models.tokenizer import Tokenizer

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

_MODULES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_FREQUENCY_FACTORS = "rope_freqs.weight"

# Every field of the architecture that this loader reads or that changes nothing; another one may change results.
_FIELDS = {
    "vocab_size",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "tensor_data_layout",
    "expert_count",
    "expert_used_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}


def load_gguf(
    path: str | Path, *, dtype=None, place: Place = in_memory, progress: Progress | None = None
) -> tuple[Llama, Tokenizer | None]:
    """Loads a .gguf file whose `general.architecture` is "llama".

    Reads tensor by tensor: beside the model, memory holds one dequantized tensor at a time.

    Args:
        path: of the file.
        dtype: of the parameters, such as "float32" or "bfloat16"; None: bfloat16 if any tensor is quantized, else the
            type of the file's embedding.
        place: puts a parameter on its device or devices; by default on one.
        progress: called with the bytes read so far and in all.

    Returns:
        The model and its tokenizer; None for the latter where the file has no vocabulary.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a whole GGUF file, another architecture, an unsupported tensor type or setting, or tensors that
            do not match the file's own config one for one.
    """
    reader = open_gguf(path)
    config = read_config(reader)
    types = {tensor.name: _type(path, tensor) for tensor in reader.tensors}
    own = "bfloat16" if set(types.values()) & set(_QUANTIZED) else _FLOATS[types["token_embd.weight"]]
    model = Assembly(config, own if dtype is None else dtype, str(path), place)
    names = {parameter: tensor_name(parameter) for parameter in model.paths}
    parameters = {name: parameter for parameter, name in names.items()}

    total, done = sum(int(tensor.n_bytes) for tensor in reader.tensors), 0
    for tensor in reader.tensors:
        if tensor.name in parameters:
            parameter = parameters[tensor.name]
            model.put(parameter, tensor.name, _unpermute(parameter, _values(tensor), config))
        elif tensor.name != _FREQUENCY_FACTORS:
            raise ValueError(f"{path} must hold only tensors of a llama model; got {tensor.name} as well.")
        done += int(tensor.n_bytes)
        if progress is not None:
            progress(done, total)
    return model.finish(names), Tokenizer.from_gguf(reader)


def open_gguf(path: str | Path) -> gguf.GGUFReader:
    """Opens a GGUF file and checks that it is whole.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no GGUF file, or only a part of one.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} must be a .gguf file; got {'a directory' if path.is_dir() else 'no such file'}."
        )
    with open(path, "rb") as opened:
        magic = opened.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} must be a GGUF file, which begins with b'GGUF'; got {magic!r}.")
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # a file cut short fails anywhere in the reader, with errors of many kinds
        raise ValueError(
            f"{path} must be a complete GGUF file; it ends too soon or is damaged: download it again."
        ) from error
    if reader.byte_order == "S":
        raise ValueError(f"{path} must have the byte order of this machine; got the other one: convert it again.")
    if (parts := read(reader, "split.count", 1)) > 1:
        raise ValueError(
            f"{path} must hold the whole model; got one of {parts} parts: join them with llama-gguf-split."
        )
    return reader


def read_config(reader: gguf.GGUFReader) -> LlamaConfig:
    """The config that a GGUF file's metadata and tensors describe.

    Raises:
        ValueError: another architecture than llama, or a setting that changes results and is not supported.
    """
    architecture = read(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"general.architecture must be llama; got {architecture!r}, which is not supported.")
    for key in reader.fields:
        if key.startswith("llama.") and key.removeprefix("llama.") not in _FIELDS:
            raise ValueError(f"The GGUF file sets {key}, which may change results and is not supported.")

    def field(name, *default):
        return _one_for_all_layers(f"llama.{name}", read(reader, f"llama.{name}", *default))

    if experts := field("expert_count", 0):
        raise ValueError(f"llama.expert_count must be 0; got {experts}: mixtures of experts are not supported.")
    shapes = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise ValueError("The GGUF file must hold a tensor token_embd.weight; it does not.")
    hidden, heads = field("embedding_length"), field("attention.head_count")
    head_dim = field("attention.key_length", hidden // heads)
    for name, size in (
        ("rope.dimension_count", field("rope.dimension_count", head_dim)),
        ("attention.value_length", field("attention.value_length", head_dim)),
    ):
        if size != head_dim:
            raise ValueError(f"llama.{name} must be the head dim {head_dim}; got {size}, which is not supported.")
    ends = [read(reader, f"tokenizer.ggml.{kind}_token_id", None) for kind in ("eos", "eot", "eom")]
    return LlamaConfig(
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=field("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_theta=field("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(reader, field),
        max_position_embeddings=field("context_length"),
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        attention_out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        bos_token_id=read(reader, "tokenizer.ggml.bos_token_id", None),
        eos_token_id=tuple(dict.fromkeys(end for end in ends if end is not None)),
        pad_token_id=read(reader, "tokenizer.ggml.padding_token_id", None),
    )


def _one_for_all_layers(key: str, value):
    """The one value of a field that may be given layer by layer."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ValueError(f"{key} must be the same for every layer; got {sorted(set(value))}, which is not supported.")
    return value[0]


def _rope_scaling(reader: gguf.GGUFReader, field) -> dict | None:
    factor = field("rope.scaling.factor", field("rope.scale_linear", 1.0))
    kind = field("rope.scaling.type", "linear")
    # Multiplies cos and sin, and YaRN's own factor where there is one.
    scale = field("rope.scaling.yarn_attn_factor", field("rope.scaling.attn_factor", 1.0))
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"llama.rope.scaling.type must be none, linear or yarn; got {kind!r}, which is not supported.")
    if scale != 1 and kind != "yarn":
        raise ValueError(f"llama.rope.scaling.attn_factor must be 1 without yarn; got {scale}, which is not supported.")
    explicit = [tensor for tensor in reader.tensors if tensor.name == _FREQUENCY_FACTORS]
    if explicit and (kind == "yarn" or (kind == "linear" and factor != 1)):
        raise ValueError(f"The GGUF file must scale rotations in one way; got {_FREQUENCY_FACTORS} and {kind} scaling.")
    if explicit:
        return {"rope_type": "explicit", "frequency_factors": _values(explicit[0]).tolist()}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": field("rope.scaling.original_context_length", field("context_length")),
            "beta_fast": field("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": field("rope.scaling.yarn_beta_slow", 1.0),
            "attention_factor": scale * (0.1 * math.log(factor) + 1.0),
        }
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else None


def tensor_name(path: assembly.Path) -> str:
    """What GGUF calls the parameter at a path of `Llama`."""
    leaf = "bias" if path[-1] == "bias" else "weight"
    block = f"blk.{path[1]}." if path[0] == "layers" else ""
    return f"{block}{_MODULES[path[-2]]}.{leaf}"


def _type(path, tensor) -> str:
    kind = tensor.tensor_type.name
    if kind not in _FLOATS and kind not in _QUANTIZED:
        raise ValueError(
            f"{path}: {tensor.name} must be of type {', '.join((*_FLOATS, *_QUANTIZED))}; got {kind}, "
            "which is not supported."
        )
    return kind


def _values(tensor) -> np.ndarray:
    """The tensor as numbers, [out, in] for a matrix."""
    if tensor.tensor_type.name in ("F32", "F16"):
        return tensor.data
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def _unpermute(path: assembly.Path, values: np.ndarray, config: LlamaConfig) -> np.ndarray:
    """Undoes llama.cpp's order of query and key rows, which puts the two channels of a rotated pair side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(path[-2])
    if heads is None or values.shape[0] != heads * config.head_dim:
        return values
    pairs = values.reshape(heads, config.head_dim // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
