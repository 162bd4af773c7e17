"""The same shapes in another library: transformers' Llama in PyTorch, its dynamic cache in bf16.

    python bench/transformers_baseline.py [--context N ...] [--batch N ...]

Times a decoding step (one token through the model, its keys and values appended to a filled cache, the best token
taken) for Llama-3.1-8B shapes with random weights: the median of the steps after a warm-up. Needs torch and
transformers.
"""

import argparse
import datetime
import json
import statistics
import time
from pathlib import Path

import torch
import transformers

RESULTS = Path(__file__).parent / "results" / "transformers_baseline.json"
WARM, STEPS = 3, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=["1x2048", "16x32768", "1x131072"], help="batch x context")
    arguments = parser.parse_args()
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        attn_implementation="sdpa",
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).eval()
    rows = []
    for case in arguments.cases:
        batch, context = map(int, case.split("x"))
        rows.append(
            {
                "model": "Llama-3.1-8B",
                "context": context,
                "batch": batch,
                "cache_bits": 16,
                "step_ms": round(1e3 * step_seconds(model, batch, context), 2),
            }
        )
        print(rows[-1], flush=True)
        torch.cuda.empty_cache()
    result = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


@torch.inference_mode()
def step_seconds(model, batch: int, context: int) -> float:
    config = model.config
    cache = transformers.DynamicCache()
    shape = (batch, config.num_key_value_heads, context, config.hidden_size // config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
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
    return statistics.median(times[WARM:])


if __name__ == "__main__":
    main()
