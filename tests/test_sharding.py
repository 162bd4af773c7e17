"""Models and caches over several devices: the same tokens, and nothing of a cache that travels."""

import functools

import gpu_compile
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import DATA
from flax import nnx
from jax.sharding import Mesh
from sharded_steps import Steps, assert_only_activations_travel, assert_runs_the_kernels_in_place, wide
from small_models import NEAR_TIE, assert_same_tokens, continuations

import kivi_jax
from kivi_jax import KiviConfig, attention, batches, sharding
from kivi_jax import run as run_module
from kivi_jax.models import Llama, LlamaConfig
from kivi_jax.quality import Evaluation
from kivi_jax.run import begin, loop
from kivi_jax.sampling import sampler

VOCAB = 96
KIVI = KiviConfig(residual_length=0)


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, count).tolist()


PROMPTS = [ids(length, seed) for seed, length in enumerate((150, 20, 300, 7))]
MESHES = {"data and model": dict(data=2, model=2), "model": dict(model=2), "data": dict(data=4)}


@functools.cache
def model(vocab_size: int = VOCAB, tied: bool = False) -> Llama:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.3,
        eos_token_id=(),
        tie_word_embeddings=tied,
    )
    return Llama(config, rngs=nnx.Rngs(0))


def mesh_of(**axes: int):
    devices = jax.devices()[: np.prod(list(axes.values()))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices)


@functools.cache
def on_mesh(name: str) -> Llama:
    return kivi_jax.shard(model(), mesh_of(**MESHES[name]))


@functools.cache
def on_one_device():
    return kivi_jax.generate(model(), PROMPTS, max_new_tokens=150, cache=KIVI)


def assert_same(got, want, prompts=PROMPTS, config=KIVI):
    """Sums over two devices round differently: tokens agree up to near-ties, and a few codes may not be the same."""
    for prompt, a, b in zip(prompts, continuations(got, prompts), continuations(want, prompts), strict=True):
        assert_same_tokens(model(), prompt, a, b, config)
    for a, b in zip(got.cache.layers, want.cache.layers, strict=True):
        assert np.mean(np.asarray(a.key_codes) != np.asarray(b.key_codes)) < 3e-3
        np.testing.assert_allclose(a.value_window, b.value_window, atol=NEAR_TIE)


def assert_laid_out(cache, data: int = 1, model: int = 1):
    """Each device has its own sequences and heads, and nothing else."""
    for leaf in jax.tree.leaves(cache.layers):
        batch, heads, *rest = leaf.shape
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(batch // data, heads // model, *rest)}
        assert len(leaf.addressable_shards) == data * model


@pytest.mark.parametrize("name", MESHES)
def test_generation_over_devices_is_that_of_one(name):
    out = kivi_jax.generate(on_mesh(name), PROMPTS, max_new_tokens=150, cache=KIVI)
    assert_same(out, on_one_device())
    assert_laid_out(out.cache, **MESHES[name])


def test_a_second_turn_continues_a_cache_on_its_mesh():
    more = [ids(30, seed + 9) for seed in range(4)]
    first = kivi_jax.generate(on_mesh("data and model"), PROMPTS, max_new_tokens=150, max_length=640, cache=KIVI)
    turn = lambda params, cache: kivi_jax.generate(params, more, max_new_tokens=40, cache=cache)
    want = turn(model(), kivi_jax.resize(on_one_device().cache, 640))
    assert_same(turn(on_mesh("data and model"), first.cache), want, more)


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_does_not_divide_stays_whole(tied):
    params = model(VOCAB + 1, tied)
    got = kivi_jax.generate(kivi_jax.shard(params, mesh_of(model=2)), PROMPTS[1:2], max_new_tokens=9)
    np.testing.assert_array_equal(got.tokens, kivi_jax.generate(params, PROMPTS[1:2], max_new_tokens=9).tokens)


def test_the_loop_compiles_once_for_a_mesh():
    """What it gives back lies where it was taken from."""
    run = run_module.Run(
        on_mesh("data and model"), PROMPTS, tokenizer=None, max_new_tokens=9, max_length=None, cache=KIVI,
        sampler=sampler(0.0),
    ).start()  # fmt: skip
    run.advance(1)
    compiled = loop._cache_size()
    run.advance(5)
    run.advance()
    assert loop._cache_size() == compiled


def test_the_cache_stays_where_it_was_made():
    """From prefill through the loop's steps, the first flush among them."""
    run = run_module.Run(
        on_mesh("data and model"), PROMPTS, tokenizer=None, max_new_tokens=150, max_length=None, cache=KIVI,
        sampler=sampler(0.0),
    )  # fmt: skip
    logits, cache = run.prefill()
    where = lambda cache: [
        shard.data.unsafe_buffer_pointer()
        for layer in cache.layers
        for rows in (layer.key_codes, layer.value_codes)
        for shard in rows.addressable_shards
    ]
    before = where(cache)
    run.prefill = lambda: (logits, cache)
    run.start().advance()
    assert where(run.state.cache) == before


def test_groups_of_prompts_are_of_each_devices_own_sequences(monkeypatch):
    prompts = [ids(20 + n, n) for n in range(12)]
    want = kivi_jax.generate(model(), prompts, max_new_tokens=5, cache=KIVI)
    monkeypatch.setattr(run_module, "PREFILL_TOKENS", 2 * 32)
    shapes = []
    monkeypatch.setattr(run_module, "begin", lambda *a, **k: (shapes.append(a[2].shape), begin(*a, **k))[1])
    assert_same(kivi_jax.generate(on_mesh("data and model"), prompts, max_new_tokens=5, cache=KIVI), want, prompts)
    assert shapes == [(4, 32)] * 3


def test_batches_have_whole_sequences_for_each_device():
    prompts = [*PROMPTS, ids(3, 9)]
    run = run_module.Run(
        on_mesh("data and model"), prompts, tokenizer=None, max_new_tokens=9, max_length=None, cache=KIVI
    )
    for size, runs in ((1, 2), (2, 2), (3, 2), (4, 4)):
        assert {len(part.rows) for part, _ in batches.split(run, size)} == {runs}
    got = kivi_jax.generate(on_mesh("data and model"), prompts, max_new_tokens=20, cache=KIVI, batch_size=3)
    want = kivi_jax.generate(model(), prompts, max_new_tokens=20, cache=KIVI)
    np.testing.assert_array_equal(got.tokens, want.tokens)


def test_what_is_drawn_does_not_depend_on_the_devices():
    key = jax.device_put(jax.random.key(3), jax.devices()[0])
    draw = lambda params: kivi_jax.generate(
        params, PROMPTS[:2], max_new_tokens=20, cache=KIVI, temperature=1.0, top_p=0.9, num_return_sequences=2, key=key
    )
    got = draw(on_mesh("data and model"))
    np.testing.assert_array_equal(got.tokens, draw(model()).tokens)
    assert_laid_out(kivi_jax.fork(got.cache, 2), data=2, model=2)


def test_a_mesh_of_the_context_changes_nothing():
    """Neither another one, nor the same with its axes left to the user."""
    want = kivi_jax.generate(model(), PROMPTS[:2], max_new_tokens=9, cache=KIVI)
    other = jax.make_mesh((3,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])
    with jax.set_mesh(other):
        got = kivi_jax.generate(model(), PROMPTS[:2], max_new_tokens=9, max_length=300, cache=KIVI)
        np.testing.assert_array_equal(got.tokens, want.tokens)
        kivi_jax.generate(model(), None, max_new_tokens=9, cache=got.cache, logits=got.logits)
    with jax.set_mesh(mesh_of(**MESHES["data and model"])):
        got = kivi_jax.generate(on_mesh("data and model"), PROMPTS[:2], max_new_tokens=9, cache=KIVI)
        np.testing.assert_array_equal(got.tokens, want.tokens)


def test_verify_works_within_jit_on_a_mesh():
    cache = kivi_jax.generate(on_mesh("data and model"), PROMPTS, max_new_tokens=4, max_length=400).cache
    drafted = jax.device_put(jnp.asarray([ids(3, n) for n in range(4)]), jax.devices()[0])
    want = kivi_jax.verify(on_mesh("data and model"), cache, drafted)
    got = jax.jit(kivi_jax.verify)(on_mesh("data and model"), cache, np.asarray(drafted))
    np.testing.assert_allclose(got.logits, want.logits, atol=1e-4)
    assert_laid_out(got.cache, data=2, model=2)


def test_quality_is_measured_on_a_mesh():
    tokens = np.asarray([ids(200, n) for n in range(2)])
    got, want = (
        Evaluation(params, tokens, context=100, chunk=64)(KIVI) for params in (on_mesh("data and model"), model())
    )
    assert got.kl == pytest.approx(want.kl, rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [KiviConfig.accurate(), KiviConfig(pre_rope=True), KiviConfig(16, 16)],
    ids=["accurate", "pre_rope", "16 bits"],
)
def test_every_option_of_a_cache_works_on_a_mesh(options):
    run = lambda params: kivi_jax.generate(params, PROMPTS, max_new_tokens=10, cache=options, prefill_chunk=100)
    np.testing.assert_array_equal(run(on_mesh("data and model")).tokens, run(model()).tokens)


def test_logits_and_drafted_tokens_are_those_of_one_device():
    params = on_mesh("data and model")
    score = lambda params: kivi_jax.logits(params, PROMPTS, cache=KIVI, chunk=64)
    np.testing.assert_allclose(score(params), score(model()), atol=1e-3)
    draft = lambda so_far: so_far[-3:]  # some of it wrong
    speculate = lambda params: kivi_jax.speculate(params, PROMPTS, draft, max_new_tokens=20, cache=KIVI)
    drafted, plain = (continuations(out, PROMPTS) for out in (speculate(params), on_one_device()))
    for prompt, got, want in zip(PROMPTS, drafted, plain, strict=True):
        assert_same_tokens(model(), prompt, got, want[:20], KIVI)


def test_a_cache_is_laid_out_over_a_mesh_and_saved_from_it(tmp_path):
    out = kivi_jax.generate(on_mesh("data and model"), PROMPTS, max_new_tokens=150, max_length=512, cache=KIVI)
    kivi_jax.save_cache(out.cache, tmp_path / "cache")
    loaded = kivi_jax.load_cache(tmp_path / "cache")
    logits = jnp.asarray(np.asarray(out.logits))
    more = lambda params, cache: kivi_jax.generate(params, None, max_new_tokens=9, cache=cache, logits=logits)
    with pytest.raises(
        ValueError, match=r"cache must lie on devices .*, as the model does \(`shard`\); got one device"
    ):
        more(on_mesh("data and model"), loaded)
    with pytest.raises(ValueError, match=r"cache must lie on one device, .*; got devices \[0, 1, 2, 3\]"):
        more(model(), out.cache)
    again = kivi_jax.shard(loaded, mesh_of(**MESHES["data and model"]))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, out.cache))
    want = more(on_mesh("data and model"), out.cache)
    np.testing.assert_array_equal(more(on_mesh("data and model"), again).tokens, want.tokens)


@pytest.mark.parametrize("source", ["own", "huggingface"])
def test_a_checkpoint_is_loaded_onto_a_mesh(source, tmp_path):
    path = DATA / "checkpoints" / "llama3-gqa-rope-scaled"
    if source == "own":
        kivi_jax.save(kivi_jax.load(path)[0], tmp_path / "own")
        path = tmp_path / "own"
    mesh = mesh_of(model=2)
    whole, got = (kivi_jax.load(path, dtype="float32", mesh=on)[0] for on in (None, mesh))
    for (where, a), (_, b) in zip(*(nnx.to_flat_state(nnx.state(x)) for x in (got, whole)), strict=True):
        np.testing.assert_array_equal(a[...], b[...])
        assert a[...].sharding.is_equivalent_to(sharding.parameter_sharding(where, a.shape, mesh), a.ndim)
    if source == "own":  # from several devices to one
        kivi_jax.save(got, tmp_path / "again")
        alone = kivi_jax.load(tmp_path / "again")[0]
        assert {len(x.devices()) for x in jax.tree.leaves(nnx.state(alone))} == {1}
    attention = got.layers[0].self_attn
    for x, axis in ((got.embed_tokens.embedding, 0), (attention.q_proj.kernel, 1), (attention.o_proj.kernel, 0)):
        half = [size // 2 if n == axis else size for n, size in enumerate(x.shape)]
        assert [shard.data.shape for shard in x[...].addressable_shards] == [tuple(half)] * 2


def test_what_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"num_key_value_heads must be divisible by the 4 devices .*'model'; got 2"):
        kivi_jax.shard(model(), mesh_of(model=4))
    with pytest.raises(ValueError, match=r"mesh must be .* axes named 'data' and 'model'; got .*'x'"):
        kivi_jax.shard(model(), mesh_of(x=2))
    with pytest.raises(ValueError, match="shard takes a model or a KVCache; got tuple"):
        kivi_jax.shard((model(), None), mesh_of(model=2))
    with pytest.raises(ValueError, match=r"prompts of a batch must be divisible by the 4 devices .*'data'; got 3"):
        kivi_jax.generate(on_mesh("data"), PROMPTS[:3], max_new_tokens=2)
    with pytest.raises(ValueError, match=r"number of sequences must be divisible by the 3 devices .*'data'; got 4"):
        kivi_jax.shard(on_one_device().cache, mesh_of(data=3))


@pytest.mark.parametrize("what", ["loop", "piece", "prompt"])
def test_only_activations_travel(what):
    steps = Steps(sharding.checked_mesh(mesh_of(data=2, model=2)), 8192)
    tokens = {"loop": 1, "piece": 64, "prompt": 256}[what]
    assert_only_activations_travel(getattr(steps, what)(*() if what == "loop" else (tokens,)), tokens)


@pytest.mark.h200_compile
@pytest.mark.skipif("gpu_compile.why_not()", reason="needs jax's CUDA compiler (tests/gpu_compile.py)")
def test_two_h200_run_the_kernels_in_place(monkeypatch):
    monkeypatch.setattr(attention, "_platform", lambda: "gpu")
    devices = gpu_compile.topology("1x2x1").devices
    mesh = sharding.checked_mesh(Mesh(np.array(devices), ("model",)))
    assert_runs_the_kernels_in_place(mesh)


@pytest.mark.gpu
@pytest.mark.skipif("jax.default_backend() != 'gpu'", reason="needs NVIDIA GPUs and JAX_PLATFORMS=cuda,cpu")
def test_a_mesh_of_the_gpus_is_as_close_to_float32_as_one_gpu():
    """Through the kernels, with flushes on the way."""
    exact = Llama(wide().config, rngs=nnx.Rngs(0))
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(exact))
    one = nnx.merge(nnx.split(wide())[0], narrow)
    several = kivi_jax.shard(one, mesh_of(model=min(len(jax.devices()), 4)))
    score = lambda params: np.asarray(kivi_jax.logits(params, PROMPTS, chunk=1)[0])
    want, *got = (score(params) for params in (exact, one, several))
    errors = [np.sqrt(np.mean((x - want) ** 2)) for x in got]
    assert 0 < errors[1] < 2 * errors[0]
