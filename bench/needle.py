"""Retrieval over a long context: does a quantized cache still find one fact among thousands of tokens?

    python bench/needle.py recall                      # a small model trained here, on the spot
    python bench/needle.py passkey                     # a passkey in prose, with the default model

`recall` trains a two-layer Llama on in-context key-value recall (pairs of tokens, then keys whose values it must give)
until it solves contexts of 4,096 tokens with nothing quantized, keeps it as an Orbax checkpoint, so that a second run
starts from it, and then asks through each cache. `passkey` hides a number at several depths of texts of some lengths.
Writes needle_<what>.json into bench/results, and a heat map needle_passkey.png.
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import time
from pathlib import Path

import jax
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
ASKED = 64  # pairs at the end of a context that repeat earlier ones: their values are what is scored
RECALL = LlamaConfig(
    vocab_size=KEYS + VALUES,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=64,
    rope_theta=1e6,
    max_position_embeddings=CONTEXT,
)


def contexts(rng, count: int, length: int, asked: int):
    """Tokens and positions int32 `[count, length]`: key, value, key, value, ..., the last `asked` pairs repeated ones.

    Positions run up to CONTEXT whatever the length: pairs lie at random places, in order, so that short contexts teach
    what long ones need.
    """
    stored = length // 2 - asked
    keys = np.stack([rng.permutation(KEYS)[:stored] for _ in range(count)])
    values = KEYS + rng.integers(0, VALUES, keys.shape)
    again = np.stack([rng.permutation(stored)[:asked] if asked <= stored else rng.integers(0, stored, asked)
                      for _ in range(count)])  # fmt: skip
    pairs = [np.concatenate([x, np.take_along_axis(x, again, axis=1)], axis=1) for x in (keys, values)]
    tokens = np.stack(pairs, axis=-1).reshape(count, length)
    places = np.stack([np.sort(rng.permutation(CONTEXT // 2)[: length // 2]) for _ in range(count)])
    positions = (2 * places[..., None] + np.arange(2)).reshape(count, length)
    return tokens.astype(np.int32), positions.astype(np.int32)


def plain_attention(query, key, value, cache, _):
    """Differentiable, unlike the library's, whose loops end where the text does."""
    by_token = lambda x: x.swapaxes(1, 2)
    out = jax.nn.dot_product_attention(by_token(query), by_token(key), by_token(value), is_causal=True)
    return by_token(out), cache


def answers(model, tokens, positions, asked):
    """Logits float32 `[B, asked, vocab]` of the values asked for, and these values `[B, asked]`."""
    hidden, _ = model(tokens, positions, (None,) * RECALL.num_hidden_layers, plain_attention)
    return model.logits(hidden[:, -2 * asked :: 2]), tokens[:, 1 - 2 * asked :: 2]


@functools.partial(jax.jit, static_argnames=("graphdef", "asked", "optimizer"), donate_argnames=("weights", "moments"))
def train_step(graphdef, weights, moments, tokens, positions, *, asked, optimizer):
    def loss(weights):
        logits, values = answers(nnx.merge(graphdef, weights), tokens, positions, asked)
        right = (logits.argmax(-1) == values).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, values).mean(), right

    (_, right), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
    updates, moments = optimizer.update(gradients, moments, weights)
    return optax.apply_updates(weights, updates), moments, right


# Length, batch, steps at most, and the share of right answers (over 20 steps) at which a stage has done its work.
STAGES = ((64, 64, 4000, 0.98), (256, 16, 2000, 0.99), (1024, 4, 1000, 0.995), (4096, 1, 1000, 0.998))


def train(progress: Progress, seed: int = 0) -> Llama:
    """Trains the recall model, on longer and longer contexts."""
    rng = np.random.default_rng(seed)
    graphdef, weights = nnx.split(Llama(RECALL, rngs=nnx.Rngs(seed)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3, b2=0.98, weight_decay=0.01))
    moments = optimizer.init(weights)
    for length, batch, steps, enough in STAGES:
        task = progress.add_task(f"training on {length} tokens", total=steps)
        asked = length // 4 if length < CONTEXT else ASKED * 4
        recent = []
        for _ in range(steps):
            tokens, positions = contexts(rng, batch, length, asked)
            weights, moments, right = train_step(
                graphdef, weights, moments, tokens, positions, asked=asked, optimizer=optimizer
            )
            recent = [*recent[-19:], float(right)]
            progress.update(task, advance=1, description=f"training on {length} tokens: {np.mean(recent):.3f} right")
            if len(recent) == 20 and np.mean(recent) >= enough:
                break
        progress.update(task, total=progress.tasks[task].completed)
    return nnx.merge(graphdef, weights)


def recall(arguments) -> dict:
    checkpoint, started = arguments.checkpoint, time.perf_counter()
    with Progress() as progress:
        if not checkpoint.exists():
            kivi_jax.save(train(progress), checkpoint)
        trained = time.perf_counter() - started
        params, _ = kivi_jax.load(checkpoint)
        tokens, _ = contexts(np.random.default_rng(1), arguments.contexts, CONTEXT, ASKED)
        shares = {}
        for name in progress.track(CACHES, description="asking"):
            right = []
            for row in tokens:
                # The context enters in pieces that attend to the quantized cache, and so do the questions.
                logits = kivi_jax.logits(params, row[None], cache=CACHES[name], chunk=128)
                best = np.asarray(logits[0, -2 * ASKED :: 2].argmax(-1))
                right.append(float((best == row[1 - 2 * ASKED :: 2]).mean()))
            shares[name] = float(np.mean(right))
            print(f"{name}: {100 * shares[name]:.2f} % right")
    asked = {"contexts": arguments.contexts, "tokens": CONTEXT, "questions": arguments.contexts * ASKED}
    return {"asked": asked, "seconds_of_training": round(trained, 1), "right": shares}


# --------------------------------------------------------------------------------------------------------- passkey

NEEDLE = " The pass key is {}. Remember it: {} is the pass key. "
QUESTION = "\n\nWhat is the pass key? The pass key is"


def passkey(arguments) -> dict:
    params, tokenizer = kivi_jax.load(dtype="float32")
    text = python_topics()
    filler = tokenizer.encode(text.text)
    found = {name: np.zeros((len(arguments.depths), len(arguments.lengths))) for name in CACHES}
    rng = np.random.default_rng(0)
    with Progress() as progress:
        task = progress.add_task("asking", total=found["paper()"].size * len(CACHES) * arguments.keys)
        for column, length in enumerate(arguments.lengths):
            for row, depth in enumerate(arguments.depths):
                for _ in range(arguments.keys):
                    number = str(rng.integers(10_000, 99_999))
                    needle, question = (tokenizer.encode(x) for x in (NEEDLE.format(number, number), QUESTION))
                    room = length - len(needle) - len(question)
                    cut = int(depth * room)
                    prompt = [*filler[:cut], *needle, *filler[cut:room], *question]
                    for name, config in CACHES.items():
                        out = kivi_jax.generate(
                            params, prompt, tokenizer=tokenizer, max_new_tokens=8, cache=config, eos_token_id=()
                        )
                        answer = tokenizer.decode(np.asarray(out.tokens)[0, len(prompt) :])
                        found[name][row, column] += (number in answer) / arguments.keys
                        progress.update(task, advance=1)
    _heat_map(found, arguments)
    return {
        "lengths": arguments.lengths,
        "depths": arguments.depths,
        "keys": arguments.keys,
        "text": text.about(),
        "found": {name: grid.tolist() for name, grid in found.items()},
    }


def _heat_map(found: dict, arguments):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(found), 3), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True)
    for panel, (name, grid) in zip(panels, found.items(), strict=True):
        image = panel.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        panel.set(title=name, xlabel="tokens", xticks=range(len(arguments.lengths)), yticks=range(len(grid)))
        panel.set_xticklabels(arguments.lengths)
        panel.set_yticklabels(arguments.depths)
    panels[0].set_ylabel("depth of the pass key")
    figure.colorbar(image, ax=panels, label="found")
    arguments.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out / "needle_passkey.png", dpi=120)


def main():
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["recall", "passkey"])
    parser.add_argument("--out", type=Path, default=here / "results")
    parser.add_argument("--checkpoint", type=Path, default=here / "results" / "recall_model", help="of `recall`")
    parser.add_argument("--contexts", type=int, default=32, help="of `recall`: how many")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="of `passkey`")
    parser.add_argument("--depths", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0], help="of `passkey`")
    parser.add_argument("--keys", type=int, default=1, help="of `passkey`: tries at each depth and length")
    arguments = parser.parse_args()
    results = {"recall": recall, "passkey": passkey}[arguments.what](arguments)
    about = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": {name: importlib.metadata.version(name) for name in ("kivi-jax", "jax", "flax", "optax")},
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"needle_{arguments.what}.json").write_text(json.dumps(about | results, indent=2) + "\n")


if __name__ == "__main__":
    main()
