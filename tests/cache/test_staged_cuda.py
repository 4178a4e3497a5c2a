"""Tests of loading to and saving from a CUDA device: bytes are the same as on the CPU, and no memory is reused during a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import kvpack
from kvpack.cache import staged_load
from kvpack.cache.cache import Cache
from kvpack.formats.errors import DigestMismatch
from support.caches import RECIPES, random_pairs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cuda


def bytes_of(cache: Cache) -> list[torch.Tensor]:
    sides = [side for layer in cache for side in layer.sides.values()]
    tensors = [tensor for side in sides for streams in side.stored_streams() for tensor in streams.values()]
    return [tensor.contiguous().view(torch.uint8) for tensor in (*tensors, *(side.tail for side in sides))]


def long_cache(recipe: str, tokens: int = 8192, layers: int = 8) -> Cache:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, 8, tokens, 128)
    return kvpack.pack(
        [tuple(torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in "kv") for _ in range(layers)], recipe
    )


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "zstd"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_round_trip_through_a_file_is_exact(recipe: str, compress: bool, tmp_path: Path) -> None:
    cache = kvpack.pack(random_pairs(3, 200, batch=2, dims=(64, 96)), recipe)
    kvpack.save(cache, tmp_path / "a", compress=compress)
    there = kvpack.load(tmp_path / "a", device="cuda")
    assert all(torch.equal(a.cpu(), b) for a, b in zip(bytes_of(there), bytes_of(kvpack.load(tmp_path / "a")), strict=True))
    kvpack.save(there[:, :128], tmp_path / "b")
    kvpack.save(cache[:, :128], tmp_path / "c")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()


def test_loads_and_saves_in_quick_succession_do_not_mix_bytes(tmp_path: Path) -> None:
    """Each load may reuse the memory of the previous one while copies are running, because nothing waits for the device in between."""
    caches = {recipe: long_cache(recipe) for recipe in ("octopus-3", "k=group:b=4;v=group:b=4")}
    for number, cache in enumerate(caches.values()):
        kvpack.save(cache, tmp_path / str(number))
    expected = [[tensor.sum(dtype=torch.int64) for tensor in bytes_of(cache)] for cache in caches.values()]
    for attempt in range(10):
        loaded = kvpack.load(tmp_path / str(attempt % 2), device="cuda")
        found = [tensor.sum(dtype=torch.int64) for tensor in bytes_of(loaded)]
        kvpack.save(loaded, tmp_path / "again")
        del loaded
        assert torch.stack(found).tolist() == torch.stack(expected[attempt % 2]).tolist()
        assert (tmp_path / "again").read_bytes() == (tmp_path / str(attempt % 2)).read_bytes()


@pytest.mark.parametrize("recipe", ["octopus-3", "kivi-2"])
def test_a_cold_file_bypasses_the_page_cache(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read into pinned memory in whole blocks, and the same bytes are copied from there."""
    kvpack.save(long_cache(recipe), tmp_path / "a")
    expected = bytes_of(kvpack.load(tmp_path / "a"))
    opened: list[int | None] = []
    open_direct = staged_load.open_direct
    monkeypatch.setattr(staged_load, "is_cold", lambda *_: True)
    monkeypatch.setattr(staged_load, "open_direct", lambda descriptor: (opened.append(open_direct(descriptor)), opened[-1])[1])
    for _ in range(3):
        found = bytes_of(kvpack.load(tmp_path / "a", device="cuda"))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
    assert len(opened) == 3


def test_a_load_on_another_stream_is_correct(tmp_path: Path) -> None:
    kvpack.save(long_cache("octopus-3"), tmp_path / "a")
    expected = bytes_of(kvpack.load(tmp_path / "a"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = bytes_of(kvpack.load(tmp_path / "a", device="cuda"))
        assert torch.cuda.current_stream() == stream
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


def test_a_damaged_file_is_refused_without_breaking_the_device(tmp_path: Path) -> None:
    kvpack.save(long_cache("octopus-3"), tmp_path / "a")
    good = kvpack.load(tmp_path / "a", device="cuda")
    data = bytearray((tmp_path / "a").read_bytes())
    data[-1000] ^= 1
    (tmp_path / "b").write_bytes(data)
    for _ in range(3):
        with pytest.raises(DigestMismatch, match=r"b: 7\.v\."):
            kvpack.load(tmp_path / "b", device="cuda")
        again = kvpack.load(tmp_path / "a", device="cuda")
        assert all(torch.equal(a, b) for a, b in zip(bytes_of(again), bytes_of(good), strict=True))
