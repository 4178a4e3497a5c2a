"""Digests computed on a device equal those of xxhash, and damaged files are refused with the same messages as on the CPU.

interpreter.py describes which process runs which of these tests.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

import kvpack
from kvpack.cache import files, staged_load
from kvpack.cache.device_copy import HostCopyQueue
from kvpack.coding import dispatch
from kvpack.errors import KvpackError
from kvpack.file import container, payload
from kvpack.kernels.bitpack import digests
from support.caches import random_pairs
from support.interpreter import DEVICE, INTERPRETED, needs_loaded_bounds
from support.late_copy_queue import LateCopyQueue

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = [pytest.mark.kernels, needs_loaded_bounds]

BLOCK = digests.BLOCK_BYTES.value
LEAST = digests.MIN_BYTES


@pytest.fixture(autouse=True)
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels even on CPU tensors, in the interpreter. With a device, caches are packed on the CPU."""
    if INTERPRETED:
        monkeypatch.setenv(dispatch.VARIABLE, "triton")


def found_of(data: bytes, places: Sequence[tuple[int, int]]) -> list[bytes]:
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if INTERPRETED:
        # A device's memory begins at a multiple of 8; a bytearray's may not.
        memory = torch.cat([memory, memory.new_zeros(8)])[: len(data)]
    return dispatch.digests([(memory.to(DEVICE), *place) for place in places])()


def random_bytes(count: int, seed: int = 0) -> bytes:
    return numpy.random.default_rng(seed).bytes(count)


EDGES = (
    0, 1, 8, LEAST - 1, *range(LEAST, LEAST + 18), 319, 320, 321, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 63, BLOCK + 64, BLOCK + 65,
    2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 32 * BLOCK, 32 * BLOCK + 1, 33 * BLOCK, 33 * BLOCK + 1, 64 * BLOCK, 65 * BLOCK + 7, 100_001,
)  # fmt: skip


@pytest.mark.scenario
@pytest.mark.parametrize("blocks", [1, 60, digests.BLOCKS_AT_ONCE])
def test_digests_equal_those_of_xxhash_at_every_boundary(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors are in one call. Tensors of different sizes share launches, up to the maximum number per launch."""
    monkeypatch.setattr(digests, "BLOCKS_AT_ONCE", blocks)
    data = random_bytes(max(EDGES) + 64)
    places = [(8 * (number % 8), 8 * (number % 8) + size) for number, size in enumerate(EDGES)]
    assert found_of(data, places) == [xxhash.xxh3_128_digest(data[begin:end]) for begin, end in places]


@given(st.data())
@example(None)
def test_digests_of_any_bytes_equal_those_of_xxhash(data: Any) -> None:
    if data is None:
        content, seed = b"\xff" * (2 * BLOCK + 100), 0
    else:
        seed = data.draw(st.integers(0, 1 << 20))
        content = data.draw(st.one_of(st.binary(min_size=LEAST, max_size=LEAST + 40), st.integers(LEAST, 3 * BLOCK).map(random_bytes)))
    other = random_bytes(LEAST + seed % BLOCK, seed)
    begin = len(content) + -len(content) % 8
    places = [(0, len(content)), (begin, begin + len(other))]
    assert found_of(content + bytes(begin - len(content)) + other, places) == [xxhash.xxh3_128_digest(part) for part in (content, other)]


def test_the_digest_of_a_large_tensor_equals_that_of_xxhash() -> None:
    """The tensor has several programs in the first launch, and at least one full program in the second."""
    data = random_bytes(200 * BLOCK + 777)
    assert found_of(data, [(0, len(data))]) == [xxhash.xxh3_128_digest(data)]


def load(path: Path) -> kvpack.Cache:
    return files.read_to_device(LateCopyQueue(), container.open_file(path)) if INTERPRETED else kvpack.load(path, device=DEVICE)


def outcome(call: Any) -> tuple[str, str]:
    try:
        call()
    except KvpackError as error:
        return type(error).__name__, str(error)
    return "loaded", ""


def on_the_cpu(path: Path) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(dispatch.VARIABLE, raising=False)
        return outcome(lambda: kvpack.load(path))


def hashed_by_the_host(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the names of tensors that the host checks are appended."""
    names: list[str] = []

    def counted(check: Any) -> Any:
        return lambda name, *rest: (names.append(name), check(name, *rest))

    for module, check in ((payload, "check_digest"), (payload, "check_hash"), (container, "check_digest")):
        monkeypatch.setattr(module, check, counted(getattr(module, check)))
    return names


def reads_of(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIECE_BYTES", "READ_BYTES"):
        monkeypatch.setattr(staged_load, name, nbytes)


@pytest.fixture(params=["threads in C", "Python's threads"])
def _readers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python's threads":
        monkeypatch.setattr(staged_load, "library", lambda: None)
    elif staged_load.library() is None:
        pytest.skip("the C library was not built")


@pytest.mark.scenario
@pytest.mark.usefixtures("_readers")
@pytest.mark.parametrize(("recipe", "piece_bytes"), [("k=octahedral:b=3;v=group:b=3", 1 << 10), ("kivi-2;raw=0", 1 << 21)])
def test_damage_gives_the_same_error_as_on_the_cpu(recipe: str, piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit is flipped in the first, the last and another byte of every tensor, and in the padding. The host hashes nothing."""
    reads_of(piece_bytes, monkeypatch)
    path = tmp_path / "a"
    kvpack.save(kvpack.pack(random_pairs(1, 85, batch=1, dims=(64, 96)), recipe), path)
    data = path.read_bytes()
    with container.open_file(path) as file:
        start, places = len(file.front.text), file.front.places
        pads = [start + place.pad for place in places.values() if place.pad < place.begin]
        assert pads
        assert all(file.tensors[name].stored_bytes >= LEAST for name in places)
    ends = [at for place in places.values() for at in (start + place.begin, start + place.end - 1)]
    names = hashed_by_the_host(monkeypatch)
    assert load(path).tokens == 85
    assert not names
    for at in (*ends, *pads, *(a + (b - a) // 3 for a, b in pairwise(ends))):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        names.clear()
        found = outcome(lambda: load(path))
        assert not names
        assert found == on_the_cpu(path)
        assert found[0] in ("DigestMismatch", "InvalidPayload")


@pytest.mark.scenario
@pytest.mark.usefixtures("_readers")
def test_damage_is_found_by_every_check_of_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device checks some layers and the host checks others, in reads smaller than a tensor."""
    reads_of(1 << 10, monkeypatch)
    path = tmp_path / "a"
    recipe = "kv=group:b=2,g=32;layers=1:kv=group:b=2,g=32,scales=u8;layers=3:k=octahedral:b=3"
    kvpack.save(kvpack.pack(random_pairs(4, 85, batch=1, dims=(64, 64)), recipe), path)
    data = path.read_bytes()
    with container.open_file(path) as file:
        start, places = len(file.front.text), file.front.places
    names = hashed_by_the_host(monkeypatch)
    load(path)
    assert {name.partition(".")[0] for name in names} == {"1"}
    for place in places.values():
        at = start + (place.begin + place.end) // 2
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        found = outcome(lambda: load(path))
        assert found == on_the_cpu(path)
        assert found[0] == "DigestMismatch"


def test_the_first_wrong_digest_in_the_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a"
    kvpack.save(kvpack.pack(random_pairs(5, 40), "kivi-2"), path)
    with container.open_file(path) as file:
        start, places = len(file.front.text), file.front.places
    data = bytearray(path.read_bytes())
    for name in ("4.k.scales", "3.k.codes.0", "1.v.codes.0"):
        data[start + places[name].begin] ^= 1
    path.write_bytes(data)
    with pytest.raises(KvpackError, match=r"a: 1\.v\.codes\.0 is damaged"):
        load(path)


def test_sides_without_stored_bytes_are_loaded(tmp_path: Path) -> None:
    kvpack.save(kvpack.pack([(torch.zeros(1, 1, 0, 64),) * 2], "kivi-2"), tmp_path / "a")
    assert load(tmp_path / "a").tokens == 0


@pytest.mark.scenario
@pytest.mark.parametrize("recipe", ["kvpack-2", "octopus-3", "oscar-2", "kivi-2", "turboangle-k8v4", "int-3-med3", "fp16"])
def test_the_device_checks_what_presets_store(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors include those of sidecars, whose streams have few bytes or none."""
    cache = kvpack.pack(random_pairs(2, 70, batch=1), recipe)
    kvpack.save(cache, tmp_path / "a")
    with container.open_file(tmp_path / "a") as file:
        assert recipe == "fp16" or min(tensor.stored_bytes for tensor in file.tensors.values()) < LEAST
    names = hashed_by_the_host(monkeypatch)
    assert load(tmp_path / "a").tokens == cache.tokens
    assert not names


@pytest.mark.scenario
@pytest.mark.parametrize(
    "options", [{"compress": True}, {"recipe": "kivi-2-u8"}, {"recipe": "nvfp4"}, {"recipe": "octopus-qjl-2"}], ids=str
)
def test_the_host_hashes_tensors_that_a_device_does_not_check(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host must hash zstd frames, and bytes whose rules it checks, before using them."""
    recipe, path = options.get("recipe", "octopus-3"), tmp_path / "a"
    kvpack.save(kvpack.pack(random_pairs(2, 70, batch=1), recipe), path, compress="compress" in options)
    names = hashed_by_the_host(monkeypatch)
    load(path)
    with container.open_file(path) as file:
        compressed = [name for name, tensor in file.tensors.items() if tensor.filter != "none"]
        assert bool(compressed) == ("compress" in options)
        assert sorted(names) == sorted(file.tensors)


@pytest.mark.scenario
@pytest.mark.usefixtures("_readers")
def test_a_file_truncated_after_opening_is_reported_as_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads_of(1 << 10, monkeypatch)
    kvpack.save(kvpack.pack(random_pairs(3, 70), "octopus-3"), tmp_path / "a")
    file = container.open_file(tmp_path / "a")
    os.truncate(tmp_path / "a", (tmp_path / "a").stat().st_size // 2)
    with pytest.raises(KvpackError, match="another process truncated it"):
        files.read_to_device(HostCopyQueue(), file)


def stored(cache: kvpack.Cache) -> dict[str, bytes]:
    contents, arrays = files.header_and_arrays(cache.to("cpu"))
    return {"": repr(contents).encode(), **{name: bytes(array) for name, array in arrays.items()}}


@pytest.mark.scenario
@pytest.mark.usefixtures("_readers")
@pytest.mark.parametrize(
    ("layers", "least", "copy_bytes", "read_bytes"),
    [
        (None, 2, 1 << 10, 1 << 10),
        ([0, 1, 3], 2, 1 << 14, 1 << 12),
        ([0, 1, 3], 2, 1 << 25, 1 << 22),
        (slice(2, 4), 1, 1 << 25, 1 << 22),
    ],
    ids=str,
)
def test_copies_of_any_size_equal_those_on_the_cpu(
    layers: Any, least: int, copy_bytes: int, read_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that are adjacent in a file are copied together, unless there is a layer between them that is omitted or has states."""
    monkeypatch.setattr(staged_load, "COPY_BYTES", copy_bytes)
    reads_of(read_bytes, monkeypatch)
    cache = kvpack.pack(random_pairs(5, 85, batch=1, dims=(64, 96)), "k=octahedral:b=3;v=group:b=3")
    states = MappingProxyType({"conv.0": torch.arange(6.0)[None]})
    cache = replace(cache, layers=(cache.layers[0], replace(cache.layers[1], states=states), *cache.layers[2:]))
    kvpack.save(cache, tmp_path / "a")
    begun: list[int] = []

    class Counting(HostCopyQueue):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            begun.append(len(source))
            super().copy(target, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(dispatch.VARIABLE, raising=False)
        expected = stored(kvpack.load(tmp_path / "a", layers=layers))
    if INTERPRETED:
        assert stored(files.read_to_device(Counting(), container.open_file(tmp_path / "a"), layers)) == expected
        assert len(begun) == least if copy_bytes > sum(begun) else len(begun) > least
    else:
        assert stored(kvpack.load(tmp_path / "a", device=DEVICE, layers=layers)) == expected


@pytest.mark.scenario
@pytest.mark.usefixtures("_readers")
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_load_leaves_no_thread(error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread goes on reading into freed memory or from a closed file descriptor."""
    for name, nbytes in (("COPY_BYTES", 1 << 12), ("PIECE_BYTES", 1 << 10), ("READ_BYTES", 1 << 10)):
        monkeypatch.setattr(staged_load, name, nbytes)
    kvpack.save(kvpack.pack(random_pairs(4, 85, batch=1, dims=(64, 96)), "octopus-3"), tmp_path / "a")
    tasks = Path("/proc/self/task")
    before = len(list(tasks.iterdir()))

    class Interrupted(LateCopyQueue):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            if self.begun == 3:
                raise error
            super().copy(target, source)

    queue, file = Interrupted(), container.open_file(tmp_path / "a")
    with pytest.raises(error):
        files.read_to_device(queue, file)
    assert queue.closed
    deadline = time.monotonic() + 60
    # Python's threads end soon after they are told to.
    while len(list(tasks.iterdir())) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(list(tasks.iterdir())) == before
