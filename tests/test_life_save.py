"""A cache on disk: what comes back is what went in, or nothing does."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import assert_same, filled, keys_and_values
from small_models import ids, small

import kivi_jax
from kivi_jax import KiviConfig

CONFIG = KiviConfig(residual_length=32, sink_length=2, rewind=5)


def identical(a, b):
    same = jax.tree.map(lambda x, y: x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b)
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(same)


@pytest.fixture
def cache(rng):
    key, value = keys_and_values(rng, 2, 2, 300, 32, jnp.bfloat16)
    return filled(key, value, [300, 7], CONFIG)


@pytest.mark.parametrize(
    "config",
    [
        KiviConfig(sink_length=3),
        CONFIG,
        KiviConfig(key_bits=16, value_bits=16),
        KiviConfig(key_bits=(2, 16), value_bits=(4, 2), rotate=True, key_norm=True, scale_dtype="float32"),
    ],
    ids=["sinks", "rewind", "unquantized", "options"],
)
def test_a_restored_cache_has_every_bit_and_its_config(config, tmp_path, rng):
    key, value = keys_and_values(rng, 2, 1, 300, 64, jnp.bfloat16)
    cache = kivi_jax.cache.init(
        config, num_layers=2, batch_size=2, num_kv_heads=1, head_dim=64, max_length=300, dtype=jnp.bfloat16
    )
    counts = jnp.asarray([300, 7], jnp.int32)
    cache = jax.jit(kivi_jax.cache.append)(cache, [key, value], [value, key], counts)
    kivi_jax.save_cache(cache, tmp_path / "cache")
    restored = kivi_jax.load_cache(tmp_path / "cache")
    assert restored.config == config and identical(restored, cache)


def test_another_process_continues_with_the_same_tokens(tmp_path):
    """As far as the last bit of the logits."""
    first = kivi_jax.generate(small(), [ids(190), ids(60)], max_new_tokens=5, max_length=256, cache=CONFIG)
    kivi_jax.save_cache(first.cache, tmp_path / "cache")
    want = kivi_jax.generate(small(), [[5, 6, 7], [8]], max_new_tokens=9, cache=first.cache)
    script = """
import sys, numpy as np, kivi_jax
from small_models import small
out = kivi_jax.generate(small(), [[5, 6, 7], [8]], max_new_tokens=9, cache=kivi_jax.load_cache(sys.argv[1]))
np.savez(sys.argv[2], tokens=out.tokens, logits=out.logits)
"""
    arguments = [sys.executable, "-c", script, str(tmp_path / "cache"), str(tmp_path / "out.npz")]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run(arguments, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path})
    got = np.load(tmp_path / "out.npz")
    assert np.array_equal(got["tokens"], want.tokens)
    assert got["logits"].tobytes() == np.asarray(want.logits).tobytes()


def test_a_cache_restored_into_a_larger_capacity_goes_on(cache, tmp_path, rng):
    """Past what it had room for, as if it had had the room from the start."""
    key, value = keys_and_values(rng, 2, 2, 600, 32, jnp.bfloat16)
    small = filled(key[:, :, :300], value[:, :, :300], [300, 7], CONFIG)
    assert small.capacity == 384
    kivi_jax.save_cache(small, tmp_path / "cache")
    larger = kivi_jax.resize(kivi_jax.load_cache(tmp_path / "cache"), 600)
    assert larger.capacity == 640
    piece = [x[None, :, :, 300:] for x in (key, value)]
    got = kivi_jax.cache.append(larger, *piece, jnp.asarray([300, 0], jnp.int32))
    assert_same(got, filled(key, value, [600, 7], CONFIG, 640))


def test_nothing_is_overwritten_and_a_failed_save_leaves_nothing(cache, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="path must not exist yet"):
        kivi_jax.save_cache(cache, tmp_path / "cache")
    assert [x.name for x in (tmp_path / "cache").iterdir()] == ["mine"]
    monkeypatch.setattr(json, "dumps", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kivi_jax.save_cache(cache, tmp_path / "other")
    assert [x.name for x in tmp_path.iterdir()] == ["cache"]


def test_what_is_no_cache_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="directory that save_cache wrote"):
        kivi_jax.load_cache(tmp_path)


# A read that fails leaves others of the same restore to end by themselves.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_truncated_checkpoint_is_refused_naming_a_field(cache, tmp_path):
    """Each file of the arrays cut in half, one at a time: refused, or every bit is there all the same."""
    kivi_jax.save_cache(cache, tmp_path / "cache")
    files = [x.relative_to(tmp_path / "cache") for x in (tmp_path / "cache" / "arrays").rglob("*") if x.is_file()]
    refused = 0
    for file in sorted(files, key=lambda x: -(tmp_path / "cache" / x).stat().st_size)[:6]:
        broken = tmp_path / "broken"
        shutil.copytree(tmp_path / "cache", broken)
        data = (broken / file).read_bytes()
        (broken / file).write_bytes(data[: len(data) // 2])
        try:
            assert identical(kivi_jax.load_cache(broken), cache)
        except ValueError as error:
            assert str(error).startswith(("layers.0.", "length", "quantized", "retained")), error
            refused += 1
        shutil.rmtree(broken)
    assert refused >= 2


def test_a_missing_part_is_refused(cache, tmp_path):
    kivi_jax.save_cache(cache, tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache" / "arrays")
    with pytest.raises(ValueError, match=r"length must be whole in .* got an error"):
        kivi_jax.load_cache(tmp_path / "cache")


def change(path, edit, *, sign=True):
    """The description after `edit`, signed anew or not."""
    from kivi_jax import cache_checkpoint

    file = path / "kivi_jax_cache.json"
    description = json.loads(file.read_text())
    description.pop("crc32")
    edit(description)
    checksum = cache_checkpoint._checksum_of_text(description) if sign else 0
    file.write_text(json.dumps(description | {"crc32": checksum}))


@pytest.mark.parametrize(
    ("edit", "sign", "message"),
    [
        (lambda d: d["config"].update(residual_length=33), False, "must be as it was saved; got another checksum"),
        (lambda d: d.update(format="kivi_jax.cache.9"), True, "must say format kivi_jax.cache.1; got 'kivi_jax.cache"),
        (lambda d: d["config"].update(key_bits=4), True, r"layers.0.key_codes must be .*192, 32.* got .*96, 32"),
        (lambda d: d["config"].update(speed=4), True, "config of .* must be one that this version knows; .*speed"),
        (lambda d: d["fields"].pop("length"), True, "length must be .* got none"),
        (lambda d: d["fields"]["layers.0.value_zero"].update(crc32=1), True, "layers.0.value_zero must have the cont"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_match_is_refused_naming_the_field(edit, sign, message, cache, tmp_path):
    kivi_jax.save_cache(cache, tmp_path / "cache")
    change(tmp_path / "cache", edit, sign=sign)
    with pytest.raises(ValueError, match=message) as caught:
        kivi_jax.load_cache(tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_a_description_cut_short_is_refused(cache, tmp_path):
    kivi_jax.save_cache(cache, tmp_path / "cache")
    file = tmp_path / "cache" / "kivi_jax_cache.json"
    file.write_text(file.read_text()[:200])
    with pytest.raises(ValueError, match=r"kivi_jax_cache.json must be whole; got"):
        kivi_jax.load_cache(tmp_path / "cache")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_layers=2), "the cache must have the model's num_layers 1; got 2"),
        (dict(num_kv_heads=4), "the cache must have the model's num_kv_heads 1; got 4"),
        (dict(head_dim=64), "the cache must have the model's head_dim 32; got 64"),
        (dict(dtype=jnp.bfloat16), "the cache must have the model's dtype float32; got bfloat16"),
    ],
)
def test_a_cache_of_another_model_is_refused_naming_what_differs(change, message):
    shape = dict(num_layers=1, batch_size=1, num_kv_heads=1, head_dim=32, max_length=128, dtype=jnp.float32) | change
    cache = kivi_jax.cache.init(CONFIG, **shape)
    cache = dataclasses.replace(cache, length=jnp.ones(1, jnp.int32))
    for call in (
        lambda: kivi_jax.generate(small(), [[3]], cache=cache, max_new_tokens=2),
        lambda: kivi_jax.verify(small(), cache, [[3]]),
    ):
        with pytest.raises(ValueError, match=message):
            call()
