"""The decoder, and the checkpoints it is loaded from."""

from kivi_jax.models.assembly import in_memory
from kivi_jax.models.config import LlamaConfig
from kivi_jax.models.default import default_model_path
from kivi_jax.models.gguf import load_gguf
from kivi_jax.models.huggingface import load_huggingface
from kivi_jax.models.llama import Llama
from kivi_jax.models.progress import loading_bar
from kivi_jax.models.rope import RopeScaling
from kivi_jax.models.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "Llama",
    "LlamaConfig",
    "RopeScaling",
    "StreamDecoder",
    "Tokenizer",
    "default_model_path",
    "in_memory",
    "load_gguf",
    "load_huggingface",
    "loading_bar",
]
