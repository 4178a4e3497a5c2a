"""Tests of reads by C threads: every byte is at its place, failures are reported by number, and no thread outlives the reader."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import pytest

from kvpack.kernels.cpu.library import library
from kvpack.runtime import reader as reader_module
from kvpack.runtime.reader import BLOCK, Reader, open_direct, read_cold

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(library() is None, reason="the C library was not built")

SIZE = 300_000


@pytest.fixture
def data() -> bytes:
    return numpy.random.default_rng(0).bytes(SIZE)


@pytest.fixture
def descriptor(data: bytes, tmp_path: Path) -> Iterator[int]:
    (tmp_path / "a").write_bytes(data)
    found = os.open(tmp_path / "a", os.O_RDONLY)
    yield found
    os.close(found)


def ended_threads(before: int) -> bool:
    """Return True if there are at most ``before`` threads now or soon. A joined thread stays listed for a moment."""
    deadline = time.monotonic() + 60
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    return threads() <= before


def threads() -> int:
    """Return the number of threads of this process, including C threads."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


@pytest.mark.parametrize("piece", [1, 4096, 1 << 20])
@pytest.mark.parametrize(("nbytes", "count"), [(0, 2), (1, 100), (4096, 3), (70_001, 1), (70_001, 30)])
def test_reads_of_any_size_return_the_right_bytes(nbytes: int, count: int, piece: int, data: bytes, descriptor: int) -> None:
    before = threads()
    # A piece of one byte takes a call: few are enough.
    nbytes = min(nbytes, 1000 * piece)
    starts = [(7919 * number) % (SIZE - nbytes) for number in range(count)]
    memory = numpy.zeros((count, nbytes), numpy.uint8)
    reads = [(start, nbytes, row.ctypes.data) for start, row in zip(starts, memory, strict=True)]
    with Reader(library(), descriptor, reads, memory, piece, 4) as running:
        for number in range(count):
            running.allow(number + 1)
            assert running.wait(number)
            assert memory[number].tobytes() == data[starts[number] :][:nbytes]
    # Fewer if a thread of an earlier test has ended meanwhile.
    assert ended_threads(before)


def test_no_memory_is_written_before_the_read_is_allowed(data: bytes, descriptor: int) -> None:
    memory = numpy.full((40, 1000), 7, numpy.uint8)
    with Reader(library(), descriptor, [(0, 1000, row.ctypes.data) for row in memory], memory, 300, 8) as running:
        running.allow(10)
        # Fewer than before are none less.
        running.allow(3)
        assert running.wait(9)
    assert all(row.tobytes() == data[:1000] for row in memory[:10])
    assert (memory[10:] == 7).all()


def test_failed_reads_are_reported_and_others_complete(data: bytes, descriptor: int) -> None:
    """Some reads are partly or completely past the end of the file, or have an invalid target address."""
    memory = numpy.zeros((6, 1000), numpy.uint8)
    starts = (0, SIZE - 999, 1000, SIZE + 5, 2000, 3000)
    reads = [(start, 1000, row.ctypes.data) for start, row in zip(starts, memory, strict=True)]
    # An address that no process has.
    reads[4] = (2000, 1000, 8)
    with Reader(library(), descriptor, reads, memory, 200, 3) as running:
        running.allow(6)
        assert [running.wait(number) for number in range(6)] == [True, False, True, False, False, True]
    assert memory[5].tobytes() == data[3000:4000]
    folder = os.open(".", os.O_RDONLY)
    with Reader(library(), folder, reads[:1], memory, 1000, 1) as running:
        running.allow(1)
        assert not running.wait(0)
    os.close(folder)


def test_an_abandoned_reader_ends(descriptor: int) -> None:
    before, memory = threads(), numpy.zeros(SIZE, numpy.uint8)
    for _ in range(20):
        running = Reader(library(), descriptor, [(0, SIZE, memory.ctypes.data)] * 30, memory, 4096, 8)
        running.allow(15)
        del running
    # Fewer if a thread of an earlier test has ended meanwhile.
    assert ended_threads(before)


def test_reads_work_without_threads(descriptor: int) -> None:
    with pytest.raises(MemoryError, match="cannot start a thread"):
        Reader(library(), descriptor, [], None, 4096, 0)


def test_a_signal_ends_a_wait(tmp_path: Path) -> None:
    """The signal handler runs in the waiting thread, not in a reading one."""
    before, found = threads(), []

    def interrupt(*_: object) -> None:
        found.append(threading.current_thread() is threading.main_thread())
        raise KeyboardInterrupt

    memory = numpy.zeros(10, numpy.uint8)
    (tmp_path / "a").write_bytes(bytes(10))
    descriptor, own = os.open(tmp_path / "a", os.O_RDONLY), signal.signal(signal.SIGALRM, interrupt)
    try:
        with Reader(library(), descriptor, [(0, 10, memory.ctypes.data)], memory, 4096, 4) as running:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                # It was never allowed.
                running.wait(0)
    finally:
        signal.signal(signal.SIGALRM, own)
        os.close(descriptor)
    assert found == [True]
    # Fewer if a thread of an earlier test has ended meanwhile.
    assert ended_threads(before)


def opened() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_direct_reads_return_bytes_at_any_offset(data: bytes, descriptor: int) -> None:
    """Whole blocks are read up to the end of the file, where the last block is partial."""
    before, direct = opened(), open_direct(descriptor)
    if direct is None:
        pytest.skip("the file system of the tests does not support direct reads")
    space = numpy.zeros(SIZE + 3 * BLOCK, numpy.uint8)
    memory = space[-space.ctypes.data % BLOCK :]
    reads = [(0, 10, 0), (BLOCK, 3 * BLOCK + 5, BLOCK), (8 * BLOCK, SIZE - 8 * BLOCK, 8 * BLOCK)]
    given = [(start, nbytes, memory.ctypes.data + place) for start, nbytes, place in reads]
    with Reader(library(), descriptor, given, memory, 2 * BLOCK, 4, direct) as running:
        running.allow(len(reads))
        assert all(running.wait(number) for number in range(len(reads)))
    for start, nbytes, place in reads:
        assert memory[place : place + nbytes].tobytes() == data[start : start + nbytes]
    assert opened() == before


def no_memory(size: int) -> memoryview:
    raise OSError(errno.ENOMEM, f"no memory for {size} bytes")


def test_a_cold_file_bypasses_the_page_cache(tmp_path: Path, data: bytes, descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read in pieces, the last of which is not a whole block. What direct reads cannot read is in the page cache."""
    before, cold = opened(), [True]
    monkeypatch.setattr(reader_module, "_PIECE_BYTES", 2 * BLOCK)
    monkeypatch.setattr(reader_module, "is_cold", lambda *_: cold[0])
    assert read_cold(descriptor, SIZE) is None
    monkeypatch.setattr(reader_module, "MIN_DIRECT_BYTES", SIZE)
    direct = open_direct(descriptor)
    if direct is None:
        assert read_cold(descriptor, SIZE) is None
        pytest.skip("the file system of the tests does not support direct reads")
    os.close(direct)
    found = read_cold(descriptor, SIZE)
    assert found is not None
    assert found.wait(1) == 2 * BLOCK
    assert found.wait(SIZE) == SIZE
    found.close()
    assert found.data == data
    found.data[:4] = b"mine"
    assert os.pread(descriptor, 4, 0) == data[:4]
    longer = read_cold(descriptor, SIZE + 3 * BLOCK)
    assert longer is not None
    assert longer.wait(SIZE + 3 * BLOCK) == SIZE
    longer.close()
    dropped = read_cold(descriptor, SIZE)
    assert dropped is not None
    dropped.close()
    cold[0] = False
    assert read_cold(descriptor, SIZE) is None
    cold[0] = True
    with monkeypatch.context() as patch:
        patch.setattr(reader_module, "new_memory", no_memory)
        assert read_cold(descriptor, SIZE) is None
    assert opened() == before
    monkeypatch.setattr(reader_module, "open_direct", lambda _: os.open(tmp_path, os.O_RDONLY))
    refused = read_cold(descriptor, SIZE)
    assert refused is not None
    assert refused.wait(SIZE) == SIZE
    assert refused.data == data
    refused.close()
    assert opened() == before


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux can reopen an open file")
def test_files_without_direct_reads_are_refused() -> None:
    """A pipe cannot be read at an offset, and its file descriptor is closed."""
    reading, writing = os.pipe()
    before = opened()
    os.write(writing, bytes(BLOCK))
    assert open_direct(reading) is None
    assert opened() == before
    os.close(reading)
    os.close(writing)
    assert open_direct(reading) is None
