"""Tests of loading to and saving from a device through staging memory, with the same bytes, checks and errors as on the CPU."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack.cache import files, staged_load
from kvpack.cache.device_copy import HostCopyQueue
from kvpack.cache.parts import CachePart
from kvpack.cache.staged_save import Piece, save_from, write_pieces
from kvpack.file import container, payload
from kvpack.file.header import Contents
from kvpack.formats.errors import DigestMismatch, InvalidParameter, InvalidPayload, KvpackError, OutOfBounds, Truncated, WriteFailed
from kvpack.kernels.cpu.library import library
from support.caches import RECIPES, random_pairs, unpack_all
from support.late_copy_queue import LateCopyQueue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvpack.cache.cache import Cache


def cache_of(recipe: str = "octopus-3", layers: int = 6) -> Cache:
    cache = kvpack.pack(random_pairs(layers, 100, batch=2, dims=(64, 96)), recipe, start=7)
    return cache.append(random_pairs(layers, 41, batch=2, dims=(64, 96), seed=1))


def same(a: Cache, b: Cache) -> None:
    assert (a.recipe, dict(a.model), a.start, a.tokens, a.inputs) == (b.recipe, dict(b.model), b.start, b.tokens, b.inputs)
    for one, other in zip(a, b, strict=True):
        assert one.skipped == other.skipped
        assert list(one.sides) == list(other.sides)
        for name, side in one.sides.items():
            found = other.sides[name]
            assert (side.codec, side.window, side.merged_runs()) == (found.codec, found.window, found.merged_runs())
            assert torch.equal(side.tail.view(torch.int16), found.tail.view(torch.int16))
            for streams, others in zip(side.stored_streams(), found.stored_streams(), strict=True):
                assert list(streams) == list(others)
                assert all(torch.equal(streams[key].view(torch.uint8), others[key].view(torch.uint8)) for key in streams)


@pytest.mark.scenario
@pytest.mark.parametrize("compress", [False, True], ids=["plain", "zstd"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_device_loads_equal_cpu_loads(recipe: str, compress: bool, tmp_path: Path) -> None:
    kvpack.save(cache_of(recipe), tmp_path / "a.kvpack", compress=compress)
    queue, pieces, layers = LateCopyQueue(), [], []
    found = files.read_to_device(queue, container.open_file(tmp_path / "a.kvpack"), progress=lambda *counts: pieces.append(counts))
    same(found, kvpack.load(tmp_path / "a.kvpack", progress=lambda *counts: layers.append(counts)))
    assert queue.closed
    assert pieces == [(done, len(pieces)) for done in range(1, len(pieces) + 1)] != []
    assert layers == [(done, len(found)) for done in range(1, len(found) + 1)]


def test_progress_of_a_part_counts_only_the_part(tmp_path: Path) -> None:
    kvpack.save(cache_of(RECIPES[0], 3), tmp_path / "a.kvpack")
    pieces, layers = [], []
    options = {"layers": [2, 0], "tokens": 64}
    kvpack.load(tmp_path / "a.kvpack", **options, progress=lambda *counts: layers.append(counts))
    file = container.open_file(tmp_path / "a.kvpack")
    files.read_to_device(LateCopyQueue(), file, **options, progress=lambda *counts: pieces.append(counts))
    assert layers == [(1, 2), (2, 2)]
    assert pieces[-1] == (len(pieces), len(pieces))


@pytest.mark.scenario
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("piece_bytes", [1 << 12, 1 << 23])
def test_device_saves_equal_cpu_saves(recipe: str, piece_bytes: int, tmp_path: Path) -> None:
    cache, queue = cache_of(recipe, 3), LateCopyQueue()
    cache = cache[:, :64] if recipe == "bf16" else cache
    kvpack.save(cache, tmp_path / "a")
    counted: list[tuple[int, int]] = []
    size = save_from(
        queue,
        cache,
        tmp_path / "b",
        progress=lambda done, total: counted.append((done, total)),
        piece_bytes=piece_bytes,
    )
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert size == (tmp_path / "a").stat().st_size == counted[-1][0]
    assert {total for _, total in counted} == {size}
    assert all(a <= b for (a, _), (b, _) in pairwise(counted))
    assert queue.closed


def test_caches_without_layers_tokens_or_sides_are_loaded(tmp_path: Path) -> None:
    x = torch.randn(1, 2, 5, 64)
    packed = [kvpack.pack(pairs, "octopus-3") for pairs in ([(x[:, :, :0], x[:, :, :0])], [(x, None), (None, x)])]
    for number, cache in enumerate((kvpack.Cache([], packed[0].recipe), *packed)):
        save_from(LateCopyQueue(), cache, tmp_path / "a")
        assert (tmp_path / "a").stat().st_size == cache.nbytes, number
        kvpack.save(cache, tmp_path / "b")
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        same(files.read_to_device(LateCopyQueue(), container.open_file(tmp_path / "a")), cache)


def test_a_golden_file_is_loaded_to_a_device(golden: list[Path]) -> None:
    for path in golden:
        same(files.read_to_device(LateCopyQueue(), container.open_file(path)), kvpack.load(path))


@pytest.fixture
def golden() -> list[Path]:
    from pathlib import Path

    return sorted((Path(__file__).resolve().parents[1] / "golden").glob("*.kvpack"))


def test_staging_memory_is_bounded_and_reused(tmp_path: Path) -> None:
    kvpack.save(cache_of(layers=12), tmp_path / "a")
    asked: list[int] = []

    class Counting(LateCopyQueue):
        def allocate_staging(self, nbytes: int) -> torch.Tensor:
            asked.append(nbytes)
            return super().allocate_staging(nbytes)

    file = container.open_file(tmp_path / "a")
    largest = max(file.side_offsets(number, side).nbytes for number in range(12) for side in "kv")
    found = staged_load.load_layers(file, CachePart.from_arguments(file.header, None, None), Counting(), staging_bytes=4 * largest)
    assert asked == [4 * largest]
    assert list(found) == list(range(12))
    asked.clear()
    same(files.read_to_device(Counting(), file), kvpack.load(tmp_path / "a"))
    assert asked[0] <= min(staged_load.STAGING_BYTES, 26 * largest)


def test_each_layer_is_one_buffer_with_streams_aligned_to_64_bytes(tmp_path: Path) -> None:
    kvpack.save(cache_of("kivi-2"), tmp_path / "a")
    for layer in files.read_to_device(HostCopyQueue(), container.open_file(tmp_path / "a")):
        tensors = [tensor for side in layer.sides.values() for tensor in (*side.stored_streams()[0].values(), side.tail)]
        tensors = [tensor for tensor in tensors if tensor.numel()]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
        assert all(tensor.data_ptr() % 64 == tensors[0].untyped_storage().data_ptr() % 64 for tensor in tensors)


def outcome(load: Any) -> tuple[str, str]:
    try:
        load()
    except KvpackError as error:
        return type(error).__name__, str(error)
    return "loaded", ""


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "zstd"])
def test_damage_gives_the_same_error_as_on_the_cpu(compress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "PIECE_BYTES", 1000)
    path = tmp_path / "a"
    kvpack.save(kvpack.pack(random_pairs(2, 40), "kivi-2"), path, compress=compress)
    data, refused = path.read_bytes(), 0
    for at in range(0, len(data), 211):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        queue = LateCopyQueue()
        found = outcome(lambda queue=queue: files.read_to_device(queue, container.open_file(path)))
        assert found == outcome(lambda: kvpack.load(path))
        assert queue.begun == 0 or queue.closed
        refused += found[0] != "loaded"
    assert refused > len(data) // 211 // 2


def test_the_first_error_in_the_file_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "a"
    kvpack.save(cache_of("kivi-2", layers=8), path)
    with container.open_file(path) as file:
        start, places = len(file.front.text), file.front.places
    data = bytearray(path.read_bytes())
    for name in ("7.k.tail", "5.k.codes.0", "1.v.codes.0"):
        data[start + places[name].begin] ^= 1
    path.write_bytes(data)
    with pytest.raises(KvpackError, match=r"a: 1\.v\.codes\.0 is damaged"):
        files.read_to_device(LateCopyQueue(), container.open_file(path))


def test_values_that_no_writer_produces_are_refused(tmp_path: Path) -> None:
    cache = kvpack.pack(random_pairs(2, 40), "kivi-2")
    contents, arrays = files.header_and_arrays(cache)
    arrays["1.v.scales"].view("<f2")[5] = float("nan")
    container.write(tmp_path / "a", contents, arrays)
    with pytest.raises(InvalidPayload) as mapped:
        kvpack.load(tmp_path / "a")
    with pytest.raises(InvalidPayload) as staged:
        files.read_to_device(LateCopyQueue(), container.open_file(tmp_path / "a"))
    assert str(staged.value) == str(mapped.value)


def test_a_file_truncated_after_opening_is_reported_as_truncated(tmp_path: Path) -> None:
    path = tmp_path / "a"
    kvpack.save(cache_of(), path)
    file = container.open_file(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(Truncated, match="another process truncated it"):
        files.read_to_device(LateCopyQueue(), file)


def test_later_changes_to_the_file_have_no_effect(tmp_path: Path) -> None:
    path = tmp_path / "a"
    cache = cache_of()
    kvpack.save(cache, path)
    loaded = files.read_to_device(HostCopyQueue(), container.open_file(path))
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert all(torch.equal(a, b) for a, b in zip(unpack_all(loaded), unpack_all(cache), strict=True))


def test_no_thread_remains_after_a_failed_load(tmp_path: Path) -> None:
    kvpack.save(cache_of(layers=12), tmp_path / "a")
    queue, threads = LateCopyQueue(), threading.active_count()
    file = container.open_file(tmp_path / "a")
    start, place = len(file.front.text), next(place for name, place in file.front.places.items() if name.startswith("3.k."))
    with (tmp_path / "a").open("r+b") as damaged:
        damaged.seek(start + place.begin)
        damaged.write(bytes([damaged.read(1)[0] ^ 1]))
    with pytest.raises(KvpackError, match=r"a: 3\.k\."):
        files.read_to_device(queue, file)
    assert (queue.closed, threading.active_count()) == (True, threads)


def test_a_missing_device_is_refused(tmp_path: Path) -> None:
    kvpack.save(cache_of(layers=1), tmp_path / "a")
    count = torch.cuda.device_count()
    with pytest.raises(InvalidParameter, match=f"device is 'cuda:{count}', but the number of CUDA devices is {count}"):
        kvpack.load(tmp_path / "a", device=f"cuda:{count}")


PARTS: list[dict[str, Any]] = [
    {"layers": 2},
    {"layers": [-1, 0, 0]},
    {"layers": slice(1, 4)},
    {"layers": slice(None, None, -2)},
    {"layers": []},
    {"tokens": 0},
    {"tokens": 1},
    {"tokens": 77},
    {"tokens": (64, 64)},
    {"tokens": (32, 100)},
    {"tokens": (128, 141)},
    {"tokens": 141},
    {"layers": [1, 3], "tokens": (64, 129)},
]
PART_RECIPES = ["kivi-2", "octopus-3", "bf16", "k=group:b=2,g=32,raw_tokens=fp16,sinks=2;v=group:b=2,g=32,outliers=10"]


@pytest.mark.scenario
@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("recipe", PART_RECIPES)
def test_loading_a_part_of_a_file_returns_that_part_of_the_cache(recipe: str, part: dict[str, Any], tmp_path: Path) -> None:
    cache = kvpack.pack(random_pairs(5, 141, batch=2, dims=(64, 96)), recipe, start=7, inputs=kvpack.Inputs(bytes(4 * 141)))
    kvpack.save(cache, tmp_path / "a")
    layers, tokens = part.get("layers"), part.get("tokens", 141)
    numbers = {None: range(5), 2: [2]}.get(layers, layers) if not isinstance(layers, slice | list) else layers
    chosen = set(range(5)[numbers]) if isinstance(numbers, slice) else {number % 5 for number in numbers}
    expected = replace(cache, layers=tuple(layer if number in chosen else kvpack.Layer(None, None) for number, layer in enumerate(cache)))
    expected = expected[:, slice(*((0, tokens) if isinstance(tokens, int) else tokens))] if chosen else expected
    queue = LateCopyQueue()
    same(kvpack.load(tmp_path / "a", **part), expected)
    same(files.read_to_device(queue, container.open_file(tmp_path / "a"), **part), expected)
    assert queue.closed
    kvpack.save(kvpack.load(tmp_path / "a", **part), tmp_path / "b")
    # A file without sides has no tokens, whose ids could be known.
    saved = expected if chosen else replace(expected, inputs=replace(expected.inputs, token_ids=b""))
    same(kvpack.load(tmp_path / "b"), saved)


def test_only_the_requested_layers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    kvpack.save(cache_of(layers=3), path)
    with container.open_file(path) as file:
        at = len(file.front.text) + next(place.begin for name, place in file.front.places.items() if name.startswith("1.k."))
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    for part in ({"layers": [0, 2]}, {"layers": 2, "tokens": 64}):
        assert kvpack.load(path, **part)[2].sides
        assert files.read_to_device(LateCopyQueue(), container.open_file(path), **part)[2].sides
    for part in ({"layers": [1]}, {"layers": 1, "tokens": 1}):
        with pytest.raises(DigestMismatch):
            kvpack.load(path, **part)
        with pytest.raises(DigestMismatch):
            files.read_to_device(LateCopyQueue(), container.open_file(path), **part)


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        ({"layers": 6}, OutOfBounds, r"a: layer 6 is out of range: the cache has 6 layers"),
        ({"layers": [0, -7]}, OutOfBounds, r"a: layer -7 is out of range: the cache has 6 layers"),
        ({"layers": "12"}, InvalidParameter, r"layers is '12', expected an integer, a list of integers or a slice"),
        ({"layers": 1.5}, InvalidParameter, r"layers is 1\.5, expected an integer"),
        ({"layers": [0, "1"]}, InvalidParameter, r"layers is \[0, '1'\], expected an integer"),
        ({"tokens": 142}, OutOfBounds, r"a: tokens \[0:142\] are out of range: the cache has 141"),
        ({"tokens": -1}, OutOfBounds, r"a: tokens \[0:-1\] are out of range: the cache has 141"),
        ({"tokens": (64, 32)}, OutOfBounds, r"a: tokens \[64:32\] are out of range: the cache has 141"),
        ({"tokens": (1, 2, 3)}, InvalidParameter, r"tokens is \(1, 2, 3\), expected a number of tokens or a pair"),
        ({"tokens": "64"}, InvalidParameter, r"tokens is '64', expected a number of tokens or a pair"),
        ({"tokens": True}, InvalidParameter, r"tokens is True, expected a number of tokens or a pair"),
        ({"tokens": (5, 100)}, OutOfBounds, r"a: layers\[0\]: a slice from token 5 begins 5 tokens into a run"),
    ],
    ids=str,
)
def test_a_part_outside_the_file_is_refused(part: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    kvpack.save(cache_of("kivi-2"), tmp_path / "a")
    with pytest.raises(error, match=message) as mapped:
        kvpack.load(tmp_path / "a", **part)
    queue = LateCopyQueue()
    with pytest.raises(error) as staged:
        files.read_to_device(queue, container.open_file(tmp_path / "a"), **part)
    assert str(staged.value) == str(mapped.value)
    assert queue.begun == 0 or queue.closed


def test_layers_that_have_dropped_tokens_are_loaded(tmp_path: Path) -> None:
    pairs = random_pairs(2, 40)
    cache = kvpack.pack([pairs[0], (*(x[:, :, 24:] for x in pairs[1]), 24)], "k=octahedral:b=3;v=group:b=3,g=32")
    kvpack.save(cache, tmp_path / "a")
    for part in ({}, {"layers": 1}, {"layers": 0, "tokens": 8}, {"tokens": (24, 32)}):
        found = kvpack.load(tmp_path / "a", **part)  # type: ignore[arg-type]
        same(files.read_to_device(LateCopyQueue(), container.open_file(tmp_path / "a"), **part), found)  # type: ignore[arg-type]
    for part in ({"tokens": 8}, {"layers": 1, "tokens": (16, 40)}):
        with pytest.raises(OutOfBounds, match=r"a: tokens \[\d+:\d+\] were requested from layers\[1\], .* only positions") as mapped:
            kvpack.load(tmp_path / "a", **part)  # type: ignore[arg-type]
        with pytest.raises(OutOfBounds) as staged:
            files.read_to_device(LateCopyQueue(), container.open_file(tmp_path / "a"), **part)  # type: ignore[arg-type]
        assert str(staged.value) == str(mapped.value)


def contents_and_data() -> tuple[Contents, dict[str, memoryview]]:
    contents, arrays = files.header_and_arrays(cache_of(layers=1))
    return contents, {name: array.data for name, array in arrays.items()}


def pieces_of(data: dict[str, memoryview], size: int, released: list[str]) -> Iterator[Piece]:
    for name, view in data.items():
        for at in range(0, len(view), size):
            yield Piece(name, view[at : at + size], lambda name=name: released.append(name))  # type: ignore[misc]


def test_all_pieces_are_released_and_the_file_equals_that_of_container_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents, data = contents_and_data()
    container.write(tmp_path / "a", contents, data)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, piece, at: real(descriptor, piece[:100], at))
    released: list[str] = []
    write_pieces(tmp_path / "b", contents, pieces_of(data, 1000, released))
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert len(released) == sum(-(-len(view) // 1000) for view in data.values())


@pytest.mark.parametrize("change", ["cut", "longer", "missing"])
def test_pieces_that_are_no_tensors_are_refused(change: str, tmp_path: Path) -> None:
    contents, data = contents_and_data()
    name = list(data)[1]
    data[name] = {"cut": data[name][:-1], "longer": memoryview(bytes(data[name]) + b"1"), "missing": memoryview(b"")}[change]
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(InvalidParameter, match=f"{name} has \\d+ bytes, expected \\d+ for U16"):
        write_pieces(tmp_path / "a", contents, pieces_of(data, 100, []))
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("call", ["open", "ftruncate", "pwrite", "fsync", "replace"])
def test_any_failing_call_keeps_the_old_file(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"old")
    cache = cache_of(layers=1)

    def failing(*arguments: Any, **options: Any) -> Any:
        raise OSError(28, os.strerror(28))

    queue = LateCopyQueue()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(WriteFailed) as caught:
            save_from(queue, cache, tmp_path / "a", durable=True, piece_bytes=1000)
    assert str(caught.value) == f"{tmp_path / 'a'}: could not be written: {os.strerror(28)}"
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]
    assert queue.closed


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_an_interrupt_leaves_no_trace(calls: int, tmp_path: Path) -> None:
    left = calls

    def interrupt(done: int, total: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    queue = LateCopyQueue()
    with pytest.raises(KeyboardInterrupt):
        save_from(queue, cache_of(), tmp_path / "a", progress=interrupt, piece_bytes=1000)
    assert not os.listdir(tmp_path)
    assert queue.closed


@pytest.fixture
def spanned(tmp_path: Path) -> tuple[container.File, list[staged_load.StagedCopy], bytes]:
    """Return a file, the staged copies of all its sides, and the bytes that result.

    The copies are split into pieces, as on a device that checks digests.
    """
    kvpack.save(kvpack.pack(random_pairs(6, 300), "kivi-2"), tmp_path / "a")
    file = container.open_file(tmp_path / "a")
    places = [file.side_offsets(number, side) for number in range(6) for side in "kv"]
    span = file.span(places)
    assert span is not None
    size = span.end - span.begin
    copies = [staged_load.StagedCopy(0, begin, min(begin + 5120, size), span, places[0]) for begin in range(0, size, 5120)]
    return file, copies, (tmp_path / "a").read_bytes()[span.begin : span.end]


@pytest.mark.skipif(library() is None, reason="the C library was not built")
@pytest.mark.parametrize("way", ["cached", "cold", "refused", "failing"])
def test_cold_files_bypass_the_page_cache(
    way: str, spanned: tuple[container.File, list[staged_load.StagedCopy], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If direct reads are refused or fail, the same bytes are read through the page cache."""
    file, copies, expected = spanned
    (tmp_path / "empty").write_bytes(b"")
    opened: list[int | None] = []
    ways = {
        "cold": staged_load.open_direct,
        "refused": lambda _: None,
        "failing": lambda _: os.open(tmp_path / "empty", os.O_RDONLY),
    }

    def open_direct(descriptor: int) -> int | None:
        opened.append(ways[way](descriptor))
        return opened[0]

    monkeypatch.setattr(staged_load, "is_cold", lambda *_: way != "cached")
    monkeypatch.setattr(staged_load, "open_direct", open_direct)
    queue = LateCopyQueue()
    found = [piece.clone() for piece in staged_load.stage_bytes(copies, file, queue, staged_load.STAGING_BYTES, set(), set())]
    assert b"".join(piece.numpy().tobytes() for piece in found) == expected
    assert len(opened) == (way != "cached")
    for descriptor in opened:
        if descriptor is not None:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)
