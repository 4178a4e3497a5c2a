"""Files truncated or overwritten while open are refused by name, or yield the checked bytes, but never cause a signal."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import pytest
import torch

import kvpack
from kvpack.file import container, payload, user_files
from kvpack.formats.errors import DigestMismatch, MissingFile, Truncated
from kvpack.runtime import reader
from kvpack.runtime.reader import ColdRead
from kvpack.store import trust
from support import warm_python
from support.file_parts import file_of, random_side
from support.strategies import create

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP = create("group", 64, "k", b="3", g="16")
COLUMNS = create("quaternion", 64, s="5", r="4")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    sides = random_side(GROUP, (64,), 5), random_side(COLUMNS, (64,), 5)
    (tmp_path / "a.kvpack").write_bytes(file_of(sides, sides))
    return tmp_path / "a.kvpack"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make readers read every tensor in small pieces."""
    monkeypatch.setattr(payload, "PIECE_BYTES", 1000)
    monkeypatch.setattr("kvpack.formats.value_blocks.BLOCK_VALUES", 1000)


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_only_tensors_are_mapped(path: Path) -> None:
    with container.open_file(path) as file:
        file.verify()
        assert not mapped(path), "opening or verifying mapped the file"
        file.tensor("0.k.tail")
        assert mapped(path)
    kept = kvpack.load(path, copy=True)
    assert not mapped(path)
    assert kept.tokens == 69


def test_a_file_is_checked_before_it_is_copied(path: Path) -> None:
    os.truncate(path, 10**13)
    with pytest.raises(Truncated, match="has 10000000000000 bytes, but its header declares"):
        kvpack.load(path, copy=True)


def test_a_copy_of_a_cold_file_bypasses_the_page_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def read_cold(descriptor: int, size: int) -> ColdRead:
        asked.append(size)
        return ColdRead(descriptor, size, os.dup(descriptor), reader.new_memory(size))

    monkeypatch.setattr(user_files, "read_cold", read_cold)
    for copied, own in zip(kvpack.load(path, copy=True).unpack()[0], kvpack.load(path).unpack()[0], strict=True):
        assert torch.equal(copied, own)
    monkeypatch.setattr(trust, "read_cold", read_cold)
    descriptor = os.open(path, os.O_RDONLY)
    assert trust.read_whole(descriptor, 100) == path.read_bytes()[:100]
    os.close(descriptor)
    assert asked == [path.stat().st_size, 100]


def test_a_cold_file_truncated_before_reading_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_cold(descriptor: int, size: int) -> ColdRead:
        os.truncate(path, size - 100)
        return ColdRead(descriptor, size, os.dup(descriptor), reader.new_memory(size))

    monkeypatch.setattr(user_files, "read_cold", read_cold)
    with pytest.raises(Truncated, match="another process truncated it"):
        kvpack.load(path, copy=True)
    monkeypatch.setattr(trust, "read_cold", read_cold)
    descriptor = os.open(path, os.O_RDWR)
    with pytest.raises(OSError, match="was truncated to"):
        trust.read_whole(descriptor, path.stat().st_size)
    os.close(descriptor)


@pytest.mark.usefixtures("small_pieces")
def test_verifying_in_pieces_finds_the_same_errors(path: Path) -> None:
    data = path.read_bytes()
    container.open_file(path).verify()
    at = len(container.open_bytes(data).front.text) + 4000
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(DigestMismatch) as in_pieces:
        container.open_file(path).verify()
    with pytest.raises(DigestMismatch) as whole:
        container.open_bytes(path.read_bytes(), where=str(path)).verify()
    assert str(in_pieces.value) == str(whole.value)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_a_file_truncated_after_opening_is_reported_as_truncated(path: Path, share: float) -> None:
    size = path.stat().st_size
    with container.open_file(path) as file:
        os.truncate(path, int(share * size))
        with pytest.raises(Truncated, match=rf"a\.kvpack: had {size} bytes when it was opened, but ended at byte \d+"):
            file.verify()
        with pytest.raises(Truncated, match=r"a\.kvpack: had \d+ bytes when it was opened"):
            file.tensor("0.k.tail")


def test_a_file_truncated_while_its_header_is_read_is_reported_as_truncated(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def cut_first(*arguments: object) -> int:
        os.truncate(path, 100)
        return real(*arguments)  # type: ignore[arg-type]

    for copy in (False, True):
        data = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(user_files.os, "preadv", cut_first)
            with pytest.raises(Truncated, match=r"a\.kvpack: had \d+ bytes"):
                container.open_file(path, copy=copy)
        path.write_bytes(data)


def test_an_unreadable_file_is_reported_as_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        raise OSError(5, os.strerror(5))

    file = container.open_file(path)
    monkeypatch.setattr(user_files.os, "preadv", failing)
    with pytest.raises(MissingFile, match=r"a\.kvpack: could not be read: Input/output error"):
        file.verify()


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 0), lambda path: path.write_bytes(b"\xff" * path.stat().st_size)])
def test_a_copy_is_unaffected_by_changes(path: Path, change: Callable[[Path], object]) -> None:
    before = kvpack.load(path, copy=True)[0].unpack(torch.float32)
    cache = kvpack.load(path, copy=True)
    change(path)
    for found, expected in zip(cache[0].unpack(torch.float32), before, strict=True):
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)
    cache.append([(torch.zeros(1, 2, 40, 64),) * 2] * 2)


CHANGING_SCRIPT = """
import os, sys, threading
path, size = sys.argv[1], os.path.getsize(sys.argv[1])
data = open(path, "rb").read()
stop = threading.Event()
def change():
    while not stop.is_set():
        os.truncate(path, size // 3)
        with open(path, "r+b") as file:
            file.write(data)
        with open(path, "r+b") as file:
            file.seek(size // 2)
            file.write(b"\\xff" * (size // 4))
            file.seek(0)
            file.write(data)
thread = threading.Thread(target=change)
thread.start()
import kvpack
from kvpack import cli
refused = 0
try:
    for _ in range(8):
        try:
            kvpack.load(path, copy=True).unpack()
            kvpack.file.container.open_file(path).verify()
        except kvpack.KvpackError:
            refused += 1
        assert cli.main(["verify", path]) in (0, 1)
finally:
    stop.set()
    thread.join()
print(refused)
"""


def test_a_process_survives_a_constantly_changing_file(path: Path) -> None:
    """With a plain memory mapping, the process died of SIGBUS in eight of eight runs."""
    ended = subprocess.run([warm_python.python(), "-c", CHANGING_SCRIPT, str(path)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert int(ended.stdout.split()[-1]) > 0, "no read was refused, so the file did not change"


@pytest.mark.parametrize("command", ["verify", "inspect", "unpack", "convert"])
def test_commands_do_not_map_their_input(command: str, path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvpack import cli

    def mapping(*_: object) -> None:
        raise AssertionError("a file was mapped")

    monkeypatch.setattr(user_files.DiskFile, "view", mapping)
    output = {"unpack": [str(tmp_path / "o")], "convert": [str(tmp_path / "o"), "raw"]}.get(command, [])
    assert cli.main([command, str(path), *output]) == 0


def test_importing_into_a_store_does_not_map_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack import cli

    def mapping(*_: object) -> None:
        raise AssertionError("a file was mapped")

    path, tokens = tmp_path / "in.kvpack", tmp_path / "ids.json"
    kvpack.save(kvpack.pack([(torch.zeros(1, 1, 300, 32),) * 2], "raw", model={"name": "m", "weights": "w"}), path)
    tokens.write_text(json.dumps([*range(300)]))
    monkeypatch.setattr(user_files.DiskFile, "view", mapping)
    words = ["store", "import", str(tmp_path / "store"), str(path), "--tokens", str(tokens), "--trust-names"]
    assert cli.main(words) == 0
    cut = path.stat().st_size // 2
    read = user_files.DiskFile.read

    def cutting(source: user_files.DiskFile, begin: int, end: int, into: bytearray | None = None) -> memoryview:
        if end - begin == source.size:
            os.truncate(path, cut)
        return read(source, begin, end, into)

    monkeypatch.setattr(user_files.DiskFile, "read", cutting)
    assert cli.main(words) == 1


def test_verify_needs_little_memory(tmp_path: Path) -> None:
    """A process that may use only a few MiB of memory verifies a file of 96 MiB with two tensors."""
    codec = create("raw", 64, dtype="fp32")
    values = numpy.zeros(12 * 2**20, numpy.float32)
    from kvpack.file.header import Contents, LayerEntry, SideEntry

    side = SideEntry(0, 1, 1, (values.size // 64,), 0, "bf16", 0)
    made = Contents(codecs=(codec,), layers=(LayerEntry(side, side),))
    container.write(tmp_path / "a", made, {"0.k.values": values, "0.v.values": values})
    code = """
import resource, sys
from kvpack.file import container
import numpy
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with container.open_file(sys.argv[1]) as file:
    file.verify()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    start = time.perf_counter()
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, check=True)
    assert int(ended.stdout) * 1024 < 2**24, f"verify took {ended.stdout} KiB in {time.perf_counter() - start:.1f} s"


def test_layers_are_yielded_in_order_as_they_are_loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that the caller does not request are not read."""
    monkeypatch.setattr(user_files, "PIECE_BYTES", mmap.PAGESIZE)
    asked: list[tuple[int, int]] = []
    ahead = user_files.DiskFile.read_ahead
    monkeypatch.setattr(
        user_files.DiskFile, "read_ahead", lambda self, begin, end: (asked.append((begin, end)), ahead(self, begin, end))[1]
    )
    path.write_bytes(file_of(*[(random_side(GROUP, (64,), 5), random_side(COLUMNS, (64,), 5))] * 4))
    with container.open_file(path) as file:
        start = len(file.front.text)
        places = {name: (start + place.begin, start + place.end) for name, place in file.front.places.items()}
        assert list(file.read_ahead([0, 1, 3])) == [0, 1, 3]
        first, last = min(places.values())[0], max(end for name, (_, end) in places.items() if name.startswith("1."))
        assert asked[0] == (first, last)
        assert asked[1][0] == min(begin for name, (begin, _) in places.items() if name.startswith("3."))
        assert asked[1][1] == max(end for _, end in places.values())
        assert list(file.read_ahead([])) == []


def test_a_file_truncated_after_mapping_is_reported_as_truncated(path: Path) -> None:
    path.write_bytes(file_of(*[(random_side(GROUP, (640,), 5), random_side(COLUMNS, (640,), 5))] * 4))
    with container.open_file(path) as file:
        file.tensor("0.k.tail")
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(Truncated, match="another process truncated it"):
            list(file.read_ahead(range(4)))
