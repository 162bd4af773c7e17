"""The same shapes in another library: transformers' Llama in PyTorch, not compiled, its dynamic cache in bf16.

    python bench/transformers_baseline.py [--model NAME ...] [--context N ...] [--no-paper]

Times a decoding step (one token through the model, its keys and values appended to a filled cache, the best token
taken): the median of the steps after a warm-up, at batch 1, at batch 16 for 32k tokens, and at the largest batch that
runs. Then the KIVI paper's workload (see paper_workload.py) by `model.generate`, prefill included, at the largest batch
that runs. A batch that runs out of memory is made smaller by a thirty-second part. Weights are random. Rows that the
file has already, of the same device and versions, are kept. Needs torch and transformers.
"""

import argparse
import gc
import statistics
import time
from pathlib import Path

import torch
import transformers
from record import Record

RESULTS = Path(__file__).parent / "results" / "transformers_baseline.json"
CONTEXTS = (2048, 8192, 32768, 131072)
WARM, STEPS = 3, 10
PROMPT, NEW = 161, 338
MODELS = {
    "Llama-3.1-8B": dict(vocab_size=128256, intermediate_size=14336, num_key_value_heads=8),
    "Llama-2-7B": dict(vocab_size=32000, intermediate_size=11008, num_key_value_heads=32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--context", nargs="*", type=int, default=list(CONTEXTS))
    parser.add_argument("--no-paper", dest="paper", action="store_false", help="leave out the paper's workload")
    arguments = parser.parse_args()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    identity = dict(rows=("model", "context", "batch"), paper_workload=("cache",))
    record = Record(RESULTS, torch.cuda.get_device_name(), versions, **identity)
    known = record.known()
    tried = {(row["model"], row["context"]) for row in record.content["rows"] if row["largest"]}
    for name in arguments.model:
        model = random_model(name)
        for context in arguments.context:
            for batch in (1, 16) if context == 32768 else (1,):
                if (name, context, batch) not in known and batch <= most(model, context + WARM + STEPS):
                    try:
                        record.keep(row(name, context, batch, step_figures(model, batch, context), largest=False))
                    except torch.OutOfMemoryError:
                        print(f"{name}, {context} tokens, batch {batch}: out of memory", flush=True)
                    release()
            if (name, context) not in tried:
                batch, figures = largest(step_figures, model, most(model, context + WARM + STEPS), context)
                record.keep(row(name, context, batch, figures, largest=True))
        if arguments.paper and name == "Llama-2-7B" and not record.known("paper_workload"):
            batch, figures = largest(paper_figures, model, most(model, PROMPT + NEW))
            record.keep({"cache": "transformers, bf16", "batch": batch} | figures, "paper_workload")
        del model
        release()


def row(name: str, context: int, batch: int, figures: dict, *, largest: bool) -> dict:
    """`largest`: whether no larger batch runs, to a thirty-second part."""
    return {"model": name, "context": context, "batch": batch, "cache_bits": 16} | figures | {"largest": largest}


def random_model(name: str):
    config = transformers.LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=131072,
        attn_implementation="sdpa",
        **MODELS[name],
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config).eval()


def cache_shape(model, batch: int, tokens: int) -> tuple[int, int, int, int]:
    config = model.config
    return batch, config.num_key_value_heads, tokens, config.hidden_size // config.num_attention_heads


def most(model, tokens: int) -> int:
    """Sequences whose cache alone has room beside the weights."""
    _, heads, _, channels = cache_shape(model, 1, tokens)
    free = torch.cuda.mem_get_info()[1] - torch.cuda.memory_allocated()
    return free // (4 * model.config.num_hidden_layers * heads * tokens * channels)


def largest(figures, model, batch: int, *arguments) -> tuple[int, dict]:
    """The first batch, from `batch` down, that does not run out of memory, and its figures."""
    while batch:
        try:
            return batch, figures(model, batch, *arguments)
        except torch.OutOfMemoryError:
            pass  # leave the except block first: until then its traceback holds the tensors
        release()
        batch -= max(1, batch // 32)
    raise RuntimeError("not even one sequence fits into the device's memory.")


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@torch.inference_mode()
def step_figures(model, batch: int, context: int) -> dict:
    torch.cuda.reset_peak_memory_stats()
    cache = transformers.DynamicCache()
    shape = cache_shape(model, batch, context)
    for layer in range(model.config.num_hidden_layers):
        cache.update(torch.rand(shape, device="cuda"), torch.rand(shape, device="cuda"), layer)
    token = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    times = []
    for _ in range(WARM + STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = model(token, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[WARM:])
    return {
        "step_ms": round(1e3 * seconds, 2),
        "tokens_per_s": round(batch / seconds, 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }


@torch.inference_mode()
def paper_figures(model, batch: int) -> dict:
    torch.cuda.reset_peak_memory_stats()
    prompts = torch.randint(model.config.vocab_size, (batch, PROMPT), device="cuda")
    request = dict(do_sample=False, eos_token_id=None, pad_token_id=0, attention_mask=torch.ones_like(prompts))
    model.generate(prompts[:1], max_new_tokens=2, do_sample=False, pad_token_id=0)  # loads what is loaded on first use
    torch.cuda.synchronize()
    start = time.perf_counter()
    tokens = model.generate(prompts, max_new_tokens=NEW, **request)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert tokens.shape == (batch, PROMPT + NEW)
    return {
        "seconds": round(seconds, 2),
        "tokens_per_s": round(batch * NEW / seconds, 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }


if __name__ == "__main__":
    main()
