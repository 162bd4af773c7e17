"""More prompts than fit at once, and the progress of long batches."""

import functools

import gpu_compile
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import VOCAB, assert_same_tokens, continuations, ids, small

import kivi_jax
from kivi_jax import KiviConfig, attention, batches
from kivi_jax import run as run_module
from kivi_jax.run import Run, begin

KIVI = KiviConfig(residual_length=0)
LENGTHS = (5, 190, 20, 7, 160, 33, 2)
PROMPTS = [ids(length, seed) for seed, length in enumerate(LENGTHS)]


def generate(prompts, new, **options):
    return kivi_jax.generate(small(), prompts, max_new_tokens=new, cache=KIVI, **options)


def check_same(got, want, prompts):
    for prompt, a, b in zip(prompts, continuations(got, prompts), continuations(want, prompts), strict=True):
        assert_same_tokens(small(), prompt, a, b, KIVI)


def test_batches_give_what_all_at_once_gives_in_the_order_of_the_prompts():
    """Three batches of at most 3, the last one short of a prompt."""
    got, want = generate(PROMPTS, 40, batch_size=3), generate(PROMPTS, 40)
    check_same(got, want, PROMPTS)
    assert got.lengths.tolist() == want.lengths.tolist() == [n + 40 for n in LENGTHS]
    assert got.cache is None and got.logits is None and want.cache.batch_size == len(PROMPTS)


def test_what_is_drawn_for_a_prompt_does_not_depend_on_its_batch():
    options = dict(num_return_sequences=2, temperature=1.0, key=jax.random.key(3))
    prompts = [prompt for prompt in PROMPTS[2:5] for _ in range(2)]
    got, want = (generate(PROMPTS[2:5], 10, **options, batch_size=size) for size in (4, None))
    assert continuations(got, prompts) == continuations(want, prompts)
    first, second = continuations(got, prompts)[:2]
    assert first != second


def test_batches_hold_prompts_of_similar_length_and_one_shape(monkeypatch):
    taken = []
    start = Run.start
    monkeypatch.setattr(Run, "start", lambda run: (taken.append([len(row) for row in run.rows]), start(run))[1])
    generate(PROMPTS, 2, batch_size=3)
    assert taken == [[190, 160, 33], [20, 7, 5], [2, 2, 2]]


def test_a_batch_is_what_the_memory_has_room_for(monkeypatch):
    """The estimate is of the longest prompt; a device that says nothing gets all prompts."""
    run = lambda: Run(small(), PROMPTS, tokenizer=None, max_new_tokens=30, max_length=None, cache=KIVI)
    assert batches.fitting(run()) == len(PROMPTS)
    cache = generate([PROMPTS[1]], 30).cache.nbytes
    device = type(jax.devices()[0])
    for room in (3.5, 2.2):
        needed = batches.prefill_bytes(run(), cache) + room * (cache + 12 * VOCAB)
        stats = {"bytes_limit": int(needed / batches.USED) + 1000, "bytes_in_use": 1000}
        monkeypatch.setattr(device, "memory_stats", lambda _, stats=stats: stats, raising=False)
        assert batches.fitting(run()) == int(room)
        assert [len(rows) for _, rows in batches.split(run(), None)] == ([3, 3, 1] if room > 3 else [2, 2, 2, 1])


def test_prompts_are_taken_in_some_at_a_time(monkeypatch):
    """Groups of 2 of 5 prompts, the last overlapping the one before: the same cache as all at once."""
    want = generate(PROMPTS[:5], 1)
    monkeypatch.setattr(run_module, "PREFILL_TOKENS", 2 * 192)
    shapes = []
    monkeypatch.setattr(run_module, "begin", lambda *a, **k: (shapes.append(a[2].shape), begin(*a, **k))[1])
    got = generate(PROMPTS[:5], 1)
    assert shapes == [(2, 192)] * 3
    assert got.cache.length.tolist() == want.cache.length.tolist()
    np.testing.assert_allclose(got.logits, want.logits, atol=1e-4)
    check_same(got, want, PROMPTS[:5])


@pytest.mark.h200_compile
@pytest.mark.skipif("gpu_compile.why_not()", reason="needs jax's CUDA compiler (tests/gpu_compile.py)")
def test_prefill_keeps_one_layers_keys_and_values_unquantized(tmp_path, monkeypatch):
    """Its temporaries do not grow with the number of layers, on a GPU."""
    monkeypatch.setattr(attention, "_platform", lambda: "gpu")

    def temporaries(layers):
        model = nnx.eval_shape(lambda: small.__wrapped__(64, jnp.bfloat16, layers))
        graphdef, weights = nnx.split(model)
        take_in = functools.partial(begin, graphdef, config=KIVI, max_length=4096)
        shapes = weights, jax.ShapeDtypeStruct((1, 4096), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        compiled, _ = gpu_compile.compile_for_h200(take_in, shapes, tmp_path, monkeypatch)
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(5) < temporaries(2) + 4096 * 2 * 64


def test_progress_counts_tokens_up_to_the_end_of_all_batches():
    steps = []
    generate(PROMPTS[:4], 130, batch_size=2, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(128, 520), (256, 520), (260, 520), (388, 520), (516, 520), (520, 520)]


def test_progress_counts_a_sequence_that_ended_as_done():
    steps = []
    out = generate([PROMPTS[0]], 200, eos_token_id=range(VOCAB), progress=lambda done, _: steps.append(done))
    assert steps == [200] and out.lengths.tolist() == [6]


def test_progress_can_be_a_bar_in_the_terminal(capsys):
    generate([PROMPTS[0]], 3, progress=True)
    shown = capsys.readouterr()
    assert "generating" in shown.err and "3/3 tokens" in shown.err and not shown.out


def test_bad_batch_sizes_are_refused():
    with pytest.raises(ValueError, match="batch_size must be 1 or more; got 0"):
        generate(PROMPTS, 2, batch_size=0)
    cache = generate(PROMPTS[:2], 2, max_length=512).cache
    with pytest.raises(ValueError, match="batch_size must be the 2 sequences of the cache, or None; got 1"):
        kivi_jax.generate(small(), PROMPTS[:2], max_new_tokens=2, cache=cache, batch_size=1)
