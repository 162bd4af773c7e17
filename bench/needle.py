"""Retrieval over a long context: does a quantized cache still find one fact among thousands of tokens?

    python bench/needle.py recall                      # a small model trained here, on the spot
    python bench/needle.py passkey                     # a passkey in prose, with the default model

`recall` trains a two-layer Llama on in-context key-value recall (pairs of tokens, then keys whose values it must give)
until it solves contexts of 4,096 tokens with nothing quantized (minutes on a GPU), keeps it as an Orbax checkpoint, so
that a second run starts from it, and then asks through each cache. `passkey` hides a number at several depths of
texts of some lengths. In both, the text enters in pieces that attend to the quantized cache of all before.
Writes needle_<what>.json into bench/results, and a heat map needle_passkey.png.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.progress import Progress

import kivi_jax
from kivi_jax import KiviConfig
from kivi_jax.models import Llama, LlamaConfig
from kivi_jax.topics import python_topics

CACHES = {
    "unquantized": KiviConfig(key_bits=16, value_bits=16),
    "paper()": KiviConfig.paper(),
    "accurate()": KiviConfig.accurate(),
    "compact()": KiviConfig.compact(),
}

# ---------------------------------------------------------------------------------------------------------- recall

CONTEXT = 4096
KEYS, VALUES = 4096, 64
ASKED = 64  # keys at the end of a context whose values are asked for
RECALL = LlamaConfig(
    vocab_size=KEYS + VALUES,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    rope_theta=1e6,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
    attention_bias=True,
    initializer_range=0.05,
)


def contexts(key, count: int, pairs: int, asked: int):
    """Tokens and positions int32 `[count, 2 * pairs + asked]`, and the values `[count, asked]` that are asked for.

    A context is value, key, value, key, ..., of keys that all differ, then keys from among them, whose values are the
    answers. Positions run up to CONTEXT whatever the length: pairs and questions lie at random places, in order, more
    or less far apart, so that short contexts teach what long ones need.
    """
    which, order, what, again, where, how_far = jax.random.split(key, 6)
    shuffled = lambda key, x: jnp.take_along_axis(x, jnp.argsort(jax.random.uniform(key, x.shape), axis=1), axis=1)
    ascending = lambda key, n, end: jnp.sort(jax.random.randint(key, (count, n), 0, end - n + 1)) + jnp.arange(n)
    keys = shuffled(order, ascending(which, pairs, KEYS))
    values = KEYS + jax.random.randint(what, keys.shape, 0, VALUES)
    asked_pairs = jax.random.randint(again, (count, asked), 0, pairs)
    questions, answers = (jnp.take_along_axis(x, asked_pairs, axis=1) for x in (keys, values))
    tokens = jnp.concatenate([jnp.stack([values, keys], axis=-1).reshape(count, -1), questions], axis=1)
    length = tokens.shape[1]
    spread = jax.random.uniform(how_far, (count, 1)) * (CONTEXT - length)
    gaps = (jnp.sort(jax.random.uniform(where, (count, pairs + asked))) * spread).astype(jnp.int32)
    gaps = jnp.concatenate([jnp.repeat(gaps[:, :pairs], 2, axis=1), gaps[:, pairs:]], axis=1)
    return tokens, gaps + jnp.arange(length), answers


def plain_attention(query, key, value, cache, _):
    """Differentiable, unlike the library's, whose loops end where the text does."""
    by_token = lambda x: x.swapaxes(1, 2)
    out = jax.nn.dot_product_attention(by_token(query), by_token(key), by_token(value), is_causal=True)
    return by_token(out), cache


def untrained(seed: int) -> Llama:
    """A model whose attention starts near what recall needs: weights that only train from there in few steps.

    As in mimetic initialization (arXiv 2305.09828): the second layer looks for tokens like the one that it is at,
    values pass nearly unchanged, and the first layer, by its biases, looks nearby. Embeddings are as large as what
    attention adds to them, or the average over a context, the same everywhere, would hide which token is where.
    """
    model = Llama(RECALL, rngs=nnx.Rngs(seed))
    near, alike = (layer.self_attn for layer in model.layers)
    model.embed_tokens.embedding[...] /= RECALL.initializer_range
    model.norm.scale[...] *= RECALL.hidden_size**-0.5  # or logits, by these embeddings, would start far too large
    for bias in (near.q_proj.bias, near.k_proj.bias):
        bias[...] = jnp.full_like(bias[...], 1.5)
    alike.k_proj.kernel[...] = jnp.copy(alike.q_proj.kernel[...])
    for attention in (near, alike):
        attention.o_proj.kernel[...] = jnp.copy(attention.v_proj.kernel[...].T)
    return model


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98))
STEPS = 25  # of one call


@functools.partial(
    jax.jit, static_argnames=("graphdef", "count", "pairs", "asked"), donate_argnames=("weights", "moments")
)
def train_steps(graphdef, weights, moments, key, rates, *, count, pairs, asked):
    """A step for each of the learning rates `rates` float32 `[STEPS]`, on new contexts: the weights and moments after
    them, the mean loss and the share of right answers."""

    def loss(weights, key):
        tokens, positions, answers = contexts(key, count, pairs, asked)
        model = nnx.merge(graphdef, weights)
        hidden, _ = model(tokens, positions, (None,) * RECALL.num_hidden_layers, plain_attention)
        logits = model.logits(hidden[:, -asked:])
        right = (logits.argmax(-1) == answers).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, answers).mean(), right

    def step(state, key_and_rate):
        weights, moments = state
        key, rate = key_and_rate
        (value, right), gradients = jax.value_and_grad(loss, has_aux=True)(weights, key)
        updates, moments = OPTIMIZER.update(gradients, moments)
        weights = jax.tree.map(lambda x, update: x - rate * update, weights, updates)
        return (weights, moments), (value, right)

    (weights, moments), means = jax.lax.scan(step, (weights, moments), (jax.random.split(key, len(rates)), rates))
    return weights, moments, *(x.mean() for x in means)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Contexts of `pairs` pairs and `asked` questions, `count` a step, until the share of right answers is `enough`."""

    pairs: int
    asked: int
    count: int
    steps: int
    enough: float
    rate: float = 1e-3


STAGES = (
    Stage(pairs=2, asked=8, count=1024, steps=4000, enough=0.97),
    Stage(pairs=8, asked=32, count=512, steps=2000, enough=0.97),
    Stage(pairs=32, asked=64, count=256, steps=2000, enough=0.98),
    Stage(pairs=128, asked=128, count=128, steps=2000, enough=0.99),
    Stage(pairs=512, asked=256, count=32, steps=2000, enough=0.99),
    Stage(pairs=1920, asked=256, count=8, steps=2000, enough=0.995),
    Stage(pairs=1920, asked=256, count=8, steps=2000, enough=0.998, rate=2e-4),
)


def train(progress: Progress, seed: int = 0) -> Llama:
    """Trains the recall model, on contexts of more and more pairs.

    Raises:
        RuntimeError: a stage has used up its steps before enough of its answers were right.
    """
    key = jax.random.key(seed)
    graphdef, weights = nnx.split(untrained(seed))
    moments = OPTIMIZER.init(weights)
    before = 0
    for stage in STAGES:
        task = progress.add_task("", total=stage.steps)
        for done in range(0, stage.steps, STEPS):
            key, now = jax.random.split(key)
            rates = stage.rate * np.minimum(1, (before + np.arange(1, STEPS + 1)) / 100, dtype=np.float32)
            weights, moments, loss, right = train_steps(
                graphdef, weights, moments, now, rates, count=stage.count, pairs=stage.pairs, asked=stage.asked
            )
            before += STEPS
            described = f"{stage.pairs} pairs: loss {float(loss):.3f}, {100 * float(right):.2f} % right"
            progress.update(task, completed=done + STEPS, description=described)
            if right >= stage.enough:
                break
        else:
            raise RuntimeError(
                f"training must reach {100 * stage.enough:g} % of right answers on {stage.pairs} pairs within "
                f"{stage.steps} steps; got {100 * float(right):.2f} %."
            )
        progress.update(task, total=done + STEPS)
        progress.console.print(f"{described}, after {before} steps")
    return nnx.merge(graphdef, weights)


def recall(arguments):
    checkpoint, started = arguments.checkpoint, time.perf_counter()
    with Progress() as progress:
        if not checkpoint.exists():
            kivi_jax.save(train(progress), checkpoint)
        trained = time.perf_counter() - started
        params, _ = kivi_jax.load(checkpoint)
        tokens, _, answers = contexts(jax.random.key(1), arguments.contexts, (CONTEXT - ASKED) // 2, ASKED)
        shares = {}
        for name in progress.track(CACHES, description="asking"):
            right = []
            for start in range(0, arguments.contexts, arguments.batch):
                rows = slice(start, start + arguments.batch)
                # The context enters in pieces that attend to the quantized cache, and so do the questions.
                logits = kivi_jax.logits(params, tokens[rows], cache=CACHES[name], chunk=ASKED)
                right.append(np.asarray(logits[:, -ASKED:].argmax(-1) == answers[rows]))
            shares[name] = float(np.concatenate(right).mean())
            progress.console.print(f"{name}: {100 * shares[name]:.2f} % right")
    asked = {"contexts": arguments.contexts, "tokens": CONTEXT, "questions": arguments.contexts * ASKED}
    _write({"asked": asked, "seconds_of_training": round(trained, 1), "right": shares}, arguments)


# --------------------------------------------------------------------------------------------------------- passkey

# A line of its own, and its beginning as the question: the small model finds little that is asked for in other words.
NEEDLE = "\n\nThe pass key is {}. Remember it. {} is the pass key.\n\n"
QUESTION = "\n\nThe pass key is"

PIECE = 128  # tokens of a prompt that enter at once; they attend to all before them through the quantized cache


def passkey(arguments):
    """Writes its results after each length."""
    params, tokenizer = kivi_jax.load(dtype="float32")
    text = python_topics()
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    filler, question = encode(text.text), encode(QUESTION)
    found = {name: np.zeros((len(arguments.depths), len(arguments.lengths))) for name in CACHES}
    rng = np.random.default_rng(0)
    with Progress() as progress:
        task = progress.add_task("asking", total=len(arguments.lengths) * len(CACHES))
        for column, length in enumerate(arguments.lengths):
            numbers = rng.integers(10_000, 99_999, (len(arguments.depths), arguments.keys)).astype(str)
            prompts = []
            for depth, row in zip(arguments.depths, numbers, strict=True):
                for number in row:
                    needle = encode(NEEDLE.format(number, number))
                    room = length - len(needle) - len(question)
                    cut = int(depth * room)
                    prompts.append([*filler[:cut], *needle, *filler[cut:room], *question])
            for name, config in CACHES.items():
                # The same capacity for all lengths: compiled once.
                out = kivi_jax.generate(
                    params,
                    prompts,
                    tokenizer=tokenizer,
                    max_new_tokens=8,
                    max_length=max(arguments.lengths) + PIECE,
                    cache=config,
                    prefill_chunk=PIECE,
                    eos_token_id=(),
                )
                right = [number in answer for number, answer in zip(numbers.ravel(), out.text, strict=True)]
                found[name][:, column] = np.reshape(right, numbers.shape).mean(1)
                progress.update(task, advance=1, description=f"{length} tokens, {name}")
            done = {name: grid[:, : column + 1] for name, grid in found.items()}
            results = {
                "model": "SmolLM2-135M-Instruct",
                "lengths": arguments.lengths[: column + 1],
                "depths": arguments.depths,
                "keys": arguments.keys,
                "text": text.about(),
                "found": {name: grid.tolist() for name, grid in done.items()},
            }
            _write(results, arguments)
            _heat_map(done, arguments)


def _heat_map(found: dict, arguments):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(found), 3), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True)
    for panel, (name, grid) in zip(panels, found.items(), strict=True):
        image = panel.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        panel.set(title=name, xlabel="tokens", xticks=range(grid.shape[1]), yticks=range(len(grid)))
        panel.set_xticklabels(arguments.lengths[: grid.shape[1]])
        panel.set_yticklabels(arguments.depths)
    panels[0].set_ylabel("depth of the pass key")
    figure.colorbar(image, ax=panels, label="found")
    figure.savefig(arguments.out / "needle_passkey.png", dpi=120)


# ------------------------------------------------------------------------------------------------------------ both


def _write(results: dict, arguments):
    about = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": {name: importlib.metadata.version(name) for name in ("kivi-jax", "jax", "flax", "optax")},
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"needle_{arguments.what}.json").write_text(json.dumps(about | results, indent=2) + "\n")


def main():
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["recall", "passkey"])
    parser.add_argument("--out", type=Path, default=here / "results")
    parser.add_argument("--checkpoint", type=Path, default=here / "results" / "recall_model", help="of `recall`")
    parser.add_argument("--contexts", type=int, default=32, help="of `recall`: how many")
    parser.add_argument("--batch", type=int, default=4, help="of `recall`: contexts at once, 0.1 GB each")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="of `passkey`")
    parser.add_argument("--depths", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0], help="of `passkey`")
    parser.add_argument("--keys", type=int, default=1, help="of `passkey`: tries at each depth and length")
    arguments = parser.parse_args()
    {"recall": recall, "passkey": passkey}[arguments.what](arguments)


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")  # a GPU would round float32 to 10 bits
    main()
