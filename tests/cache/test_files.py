"""Tests of save and load: another process reads the same cache, and anything else raises a clear error."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvpack
from kvpack.formats.errors import KvpackError, LimitExceeded, MissingFile, NotKvpack, Truncated
from support import warm_python
from support.caches import RECIPES, random_pairs, unpack_all

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "zstd"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_loaded_caches_equal_saved_ones(recipe: str, compress: bool, tmp_path: Path) -> None:
    cache = kvpack.pack(random_pairs(2, 100, batch=2, dims=(64, 96)), recipe, model={"name": "test", "revision": "1"}, start=7)
    cache = cache.append(random_pairs(2, 41, batch=2, dims=(64, 96), seed=1))
    size = kvpack.save(cache, tmp_path / "a.kvpack", compress=compress)
    loaded = kvpack.load(tmp_path / "a.kvpack")
    assert (tmp_path / "a.kvpack").stat().st_size == size
    assert size == cache.nbytes or (compress and size < cache.nbytes)
    assert (loaded.recipe, dict(loaded.model), loaded.start, loaded.tokens) == (cache.recipe, {"name": "test", "revision": "1"}, 7, 141)
    assert cache.recipe == kvpack.Recipe(recipe).text
    assert all(torch.equal(a, b) for a, b in zip(unpack_all(loaded), unpack_all(cache), strict=True))
    assert [side.codec for layer in loaded for side in layer.sides.values()] == [
        side.codec for layer in cache for side in layer.sides.values()
    ]
    q = torch.randn(2, 4, 3, 64)
    assert torch.equal(kvpack.attend(q, loaded[1]), kvpack.attend(q, kvpack.load(tmp_path / "a.kvpack")[1]))
    kvpack.save(loaded, tmp_path / "b.kvpack", compress=compress)
    assert (tmp_path / "a.kvpack").read_bytes() == (tmp_path / "b.kvpack").read_bytes(), "saving again changed the file"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_official_safetensors_library_opens_every_file(recipe: str, tmp_path: Path) -> None:
    cache = kvpack.pack(random_pairs(2, 70), recipe)
    kvpack.save(cache, tmp_path / "a.kvpack")
    tensors = safetensors.torch.load_file(tmp_path / "a.kvpack")
    streams = cache[1].v.runs[0].streams
    for name, stream in streams.items():
        assert torch.equal(tensors[f"1.v.{name}"].view(torch.uint8), stream.view(torch.uint8)), name


def test_another_process_loads_appends_and_attends(tmp_path: Path) -> None:
    cache = kvpack.pack(random_pairs(1, 100), "kivi-2")
    kvpack.save(cache, tmp_path / "a.kvpack")
    program = (
        "import json, sys, torch, kvpack\n"
        "cache = kvpack.load(sys.argv[1])\n"
        "torch.manual_seed(0)\n"
        "q = torch.randn(1, 4, 1, 64)\n"
        "print(json.dumps(kvpack.attend(q, cache[0]).flatten().tolist()))\n"
    )
    run = subprocess.run([warm_python.python(), "-c", program, tmp_path / "a.kvpack"], capture_output=True, text=True, check=True)
    torch.manual_seed(0)
    q = torch.randn(1, 4, 1, 64)
    torch.testing.assert_close(torch.tensor(json.loads(run.stdout)), kvpack.attend(q, cache[0]).flatten(), rtol=1e-6, atol=1e-6)


def test_a_loaded_cache_outlives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.kvpack"
    cache = kvpack.pack(random_pairs(1, 100), "kivi-2")
    kvpack.save(cache, path)
    loaded = kvpack.load(path)
    path.unlink()
    assert all(torch.equal(a, b) for a, b in zip(unpack_all(loaded), unpack_all(cache), strict=True))


def test_saving_over_the_mapped_file_keeps_the_loaded_cache(tmp_path: Path) -> None:
    path = tmp_path / "a.kvpack"
    cache = kvpack.pack(random_pairs(1, 100), "kivi-2")
    kvpack.save(cache, path)
    loaded = kvpack.load(path)
    kvpack.save(kvpack.pack(random_pairs(1, 10, seed=5), "bf16"), path)
    assert all(torch.equal(a, b) for a, b in zip(unpack_all(loaded), unpack_all(cache), strict=True))


def test_bits_per_value_include_the_whole_file(tmp_path: Path) -> None:
    for tokens in (1, 64, 1000):
        cache = kvpack.pack(random_pairs(2, tokens), "octopus-3")
        size = kvpack.save(cache, tmp_path / "a.kvpack")
        assert cache.bits_per_value == 8 * size / cache.values
        assert cache.bits_per_value > cache.nominal_bits


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), recipe=st.sampled_from(RECIPES))
def test_any_flipped_bit_is_refused(data: st.DataObject, recipe: str, tmp_path: Path) -> None:
    path = tmp_path / "a.kvpack"
    kvpack.save(kvpack.pack(random_pairs(1, 40), recipe), path)
    damaged = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    with pytest.raises(KvpackError):
        kvpack.load(path)


def test_files_of_other_formats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(MissingFile, match=str(path)):
        kvpack.load(path)
    path.write_bytes(b"")
    with pytest.raises(NotKvpack):
        kvpack.load(path)
    safetensors.torch.save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(NotKvpack):
        kvpack.load(path)
    size = kvpack.save(kvpack.pack(random_pairs(1, 40), "kivi-2"), path)
    with pytest.raises(LimitExceeded, match=str(size)):
        kvpack.load(path, memory_limit=size - 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Truncated):
        kvpack.load(path)
