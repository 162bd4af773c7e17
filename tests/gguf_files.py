"""Writing small GGUF files for tests, the way llama.cpp's converter would."""

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def converted_name(name):
    """What llama.cpp calls a Hugging Face tensor."""
    module, leaf = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, module = module.split(".", 3)
        return f"blk.{layer}.{NAMES[module]}.{leaf}"
    return f"{NAMES[module]}.{leaf}"


def interleave(rows, heads):
    """llama.cpp's row order: the channel pair (i, i + D/2) of a head becomes neighbours, rows 2 i and 2 i + 1."""
    head_dim = rows.shape[0] // heads
    order = []
    for head in range(heads):
        for i in range(head_dim // 2):
            order += [head * head_dim + i, head * head_dim + i + head_dim // 2]
    return rows[order]


def converted_tensors(tensors, heads, key_value_heads):
    """Hugging Face tensors as GGUF stores them."""
    converted = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            tensor = interleave(tensor, heads)
        if ".k_proj." in name:
            tensor = interleave(tensor, key_value_heads)
        converted[converted_name(name)] = tensor
    return converted


def write(path, fields, tensors, architecture="llama"):
    """Writes a GGUF file.

    Args:
        path: where to.
        fields: metadata; a key that begins with a dot is put under the architecture.
        tensors: name -> float32 array, or (array of bytes, quantization type).
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        key = architecture + key if key.startswith(".") else key
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
