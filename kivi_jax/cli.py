"""The command `kivi-jax`."""

import argparse
import sys
import time

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kivi_jax import checkpoint, decoding, geometry, topics
from kivi_jax.config import KiviConfig
from kivi_jax.generate import stream
from kivi_jax.models import Llama, LlamaConfig, loading_bar

UNQUANTIZED = KiviConfig(key_bits=16, value_bits=16)


def main(argv: list[str] | None = None) -> int:
    """Runs a command line and returns the exit status: 0, or 2 for what the user can mend, said in one sentence."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"kivi-jax: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kivi-jax", description="Language models with a 2-bit key/value cache.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="continue a prompt, streaming the text")
    generate.add_argument("prompt")
    generate.add_argument("--model", metavar="PATH", help="Hugging Face directory, .gguf file or saved model")
    generate.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="default: float32 on a CPU, else the checkpoint's own",
    )
    generate.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    generate.add_argument("--bits", type=int, default=2, choices=[2, 4, 8], help="of keys and values (default: 2)")
    generate.add_argument("--cache", choices=["kivi", "bf16"], default="kivi", help="bf16: do not quantize")
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default): the best token")
    generate.add_argument("--seed", type=int, default=0, metavar="N")
    generate.set_defaults(run=_generate)

    inspect = commands.add_parser("inspect", help="show a model's config and what its cache costs")
    inspect.add_argument("model", metavar="PATH", nargs="?", help="default: the default model")
    inspect.set_defaults(run=_inspect)

    shape = commands.add_parser("geometry", help="report why keys go per channel and values per token, on a model")
    shape.add_argument("--model", metavar="PATH", help="Hugging Face directory, .gguf file or saved model")
    shape.add_argument("--text", metavar="FILE", help="what is scored (default: the topics of Python's help)")
    shape.add_argument("--context", type=int, default=512, metavar="N", help="tokens before those that are scored")
    shape.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens that are scored")
    shape.add_argument("--layers", type=int, nargs="+", metavar="N", help="whose keys and values are drawn")
    shape.add_argument("--output", default="geometry", metavar="DIRECTORY", help="(default: geometry)")
    shape.set_defaults(run=_geometry)
    return parser


def _generate(arguments) -> None:
    config = UNQUANTIZED
    if arguments.cache == "kivi":
        config = KiviConfig(key_bits=arguments.bits, value_bits=arguments.bits)
    with loading_bar("loading") as progress:
        dtype = arguments.dtype or ("float32" if jax.default_backend() == "cpu" else None)
        params, tokenizer = checkpoint.load(arguments.model, dtype=dtype, progress=progress)
    if tokenizer is None:
        raise ValueError("the model must have a tokenizer to continue text; got files without one.")
    prompt = arguments.prompt
    if arguments.chat:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    pieces = stream(
        params,
        prompt,
        tokenizer=tokenizer,
        max_new_tokens=arguments.max_new_tokens,
        cache=config,
        temperature=arguments.temperature,
        key=jax.random.key(arguments.seed),
    )
    if not arguments.chat:
        print(prompt, end="", flush=True)
    start = None
    for piece in pieces:
        print(piece, end="", flush=True)
        start = start or time.perf_counter()  # the first piece waits for the compiler
    seconds = time.perf_counter() - start
    print()
    count = len(pieces.tokens)
    rate = f"{(count - 1) / seconds:.1f} tokens/s" if count > 1 else "1 token, no rate"
    sizes = [
        f"{_cache_megabytes(params, config, length):.1f} MB for {length:,} tokens "
        f"({_cache_megabytes(params, UNQUANTIZED, length, jnp.bfloat16):.1f} in bf16)"
        for length in (pieces.cache.capacity, params.config.max_position_embeddings)
    ]
    print(f"{count} tokens, {rate}, cache {', '.join(sizes)}", file=sys.stderr)


def _inspect(arguments) -> None:
    config = checkpoint.read_config(arguments.model)
    model = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    console = Console()
    table = Table("field", "value", title="config")
    for name, value in vars(config).items():
        table.add_row(name, str(value))
    table.add_row("parameters", f"{parameters:,}", end_section=True)
    console.print(table)
    table = Table("cache", "bits an element", "MB per 1,000 tokens", "of bf16")
    plain = _megabytes(config, UNQUANTIZED)
    for bits in (16, 4, 2):
        cache = KiviConfig(key_bits=bits, value_bits=bits)
        cost = _megabytes(config, cache)
        name = "bf16" if bits == 16 else f"{bits} bit, groups of {cache.key_group_size}"
        table.add_row(name, f"{cache.bits_per_element:g}", f"{cost:.3f}", f"1/{plain / cost:.2f}")
    console.print(table)
    window = 2 * KiviConfig().window_length * _numbers(config) / 1e6
    console.print(f"and {window:.3f} MB a sequence for the full-precision window of the last tokens")


def _geometry(arguments) -> None:
    with loading_bar("loading") as progress:
        params, tokenizer = checkpoint.load(arguments.model, dtype="float32", progress=progress)
    if tokenizer is None:
        raise ValueError("the model must have a tokenizer to read a text; got files without one.")
    text = topics.python_topics() if arguments.text is None else topics.read(arguments.text)
    tokens = topics.stretches(tokenizer.encode(text.text), 1, arguments.context + arguments.tokens)
    about = {"model": arguments.model or "the default model", "context": arguments.context, "text": text.about()}
    with Progress(transient=True, console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=None)
        page, numbers = geometry.report(
            params,
            tokens,
            arguments.output,
            layers=arguments.layers,
            about=about,
            context=arguments.context,
            progress=lambda done, total, what: bar.update(task, completed=done, total=total, description=what),
        )
    print(f"{page}\n{numbers}")


def _cache_megabytes(params: Llama, config: KiviConfig, length: int, dtype=None) -> float:
    return jax.eval_shape(lambda: decoding.init_cache(params, config, 1, length, dtype)).nbytes / 1e6


def _numbers(config: LlamaConfig) -> int:
    """Numbers in the keys and values of one token, all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def _megabytes(config: LlamaConfig, cache: KiviConfig) -> float:
    return 1000 * _numbers(config) * cache.bits_per_element / 8 / 1e6
