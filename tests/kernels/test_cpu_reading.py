"""Reading in C: the bytes of a file, and the digests that xxhash gives of them."""

from __future__ import annotations

import os
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpack
from kvpack.cache.bus import HostBus
from kvpack.cache.files import read_to
from kvpack.file import container, payload
from kvpack.formats.errors import DigestMismatch, InvalidPayload, Truncated
from kvpack.kernels.cpu import library, reading

from caches import random_pairs  # isort: skip

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(library.library() is None, reason="the C kernels were not built")

DATA = os.urandom(600_000)
LENGTHS = st.one_of(st.sampled_from((1, 240, 241, 256, 1024, 1025, 2048, 2049, 131072, 131073)), st.integers(1, 5000))


@pytest.fixture(scope="module")
def descriptor(tmp_path_factory: pytest.TempPathFactory) -> int:
    path = tmp_path_factory.mktemp("read") / "bytes"
    path.write_bytes(DATA)
    return os.open(path, os.O_RDONLY)


@given(st.lists(st.tuples(st.integers(0, 70), LENGTHS), max_size=4), st.integers(0, 100), st.integers(0, 70), st.integers(0, 2))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_and_digested(descriptor: int, gaps: list[tuple[int, int]], offset: int, rest: int, level: int) -> None:
    ends = list(accumulate(gap + length for gap, length in gaps))
    parts = [(end - length, end) for end, (_, length) in zip(ends, gaps, strict=True)]
    memory = memoryview(bytearray(rest + max(ends, default=1)))
    found = reading.read(descriptor, offset, memory, parts, min(level, len(library.levels()) - 1))
    assert memory == DATA[offset : offset + len(memory)]
    assert found == [xxhash.xxh3_128_digest(memory[begin:end]) for begin, end in parts]


def test_what_cannot_be_read_is_left_to_python(descriptor: int) -> None:
    memory = memoryview(bytearray(100))
    assert reading.read(descriptor, len(DATA) - 99, memory, []) is None
    assert reading.read(-1, 0, memory, [(0, 100)]) is None


@pytest.mark.parametrize("in_c", [True, False])
def test_a_load_refuses_damage_and_cut_files(in_c: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, asked = payload.compiled, []
    assert compiled is not None

    def read(*given: Any) -> Any:
        asked.append(given)
        return compiled(*given) if in_c else None

    monkeypatch.setattr(payload, "compiled", read)
    path = tmp_path / "cache.kvpack"
    kvpack.save(kvpack.pack(random_pairs(2, 65, dims=(64, 64)), "kv=scalar:b=3"), path)
    good, file = path.read_bytes(), container.open_file(path)
    start, places = len(file.front.text), file.front.places
    pads = [start + place.pad for place in places.values() if place.pad < place.begin]
    values = [start + place.end - 1 for place in places.values() if place.end > place.begin]
    assert len(pads) > 1
    assert read_to(HostBus(), file).tokens == 65
    for error, damaged in ((InvalidPayload, pads), (DigestMismatch, values)):
        for at in damaged:
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            with pytest.raises(error):
                read_to(HostBus(), container.open_file(path))
    path.write_bytes(good)
    opened = container.open_file(path)
    os.truncate(path, len(good) - 8)
    with pytest.raises(Truncated, match="it was cut meanwhile"):
        read_to(HostBus(), opened)
    assert asked
