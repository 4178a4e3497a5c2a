"""The budget of a folder covers entries and unfinished files of all writers. A file contains the count."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvpack.store import disk_usage, eviction
from kvpack.store.counters import Counters
from kvpack.store.directory import Directory
from kvpack.store.folder import Folder
from support.store_caches import CHUNK, cache, entries, open_store, prompt, save
from support.store_stress import FORK

if TYPE_CHECKING:
    from pathlib import Path

WRITERS, ENTRY, BUDGET = 12, 60_000, 200_000
HEAD = (2000).to_bytes(8, "little") + b'{"__metadata__":{"format":"kvpack","kvpack":"'


def held(folder: Path) -> int:
    """Return the size in bytes of the entries and unfinished files that appear in both of two listings.

    These files certainly existed at the same time.
    """
    before, after = sizes(folder), sizes(folder)
    return sum(min(size, after[file]) for file, size in before.items() if file in after)


def sizes(folder: Path) -> dict[tuple[int, str], int]:
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            if len(name) > 30:
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(os.path.join(parent, name))
                    found[status.st_ino, name] = status.st_size
    return found


def key_of(writer: int, number: int) -> bytes:
    return (writer * 1000 + number).to_bytes(4, "little") * 8


def write(folder: str, writer: int, count: int, refused: Any = None) -> None:
    """Put entries in many pieces, so that writing takes some time."""
    counters = Counters()
    backend = Directory(folder, counters, max_bytes=BUDGET)
    pieces = [memoryview(HEAD), *([memoryview(bytes(250))] * ((ENTRY - len(HEAD)) // 250))]
    for number in range(count):
        backend.put([key_of(writer, number)], pieces, time.time_ns())
        if number % 5 == 4:
            backend.delete([key_of(writer, number - 2)])
    if refused is not None:
        refused.put(counters.as_dict())


ATTEMPTS = 30
"""Number of runs, at least one of which must show that the budget is exceeded."""


def most_held(folder: Path, writers: list[Any]) -> int:
    for writer in writers:
        writer.start()
    most = 0
    while any(writer.is_alive() for writer in writers):
        most = max(most, held(folder))
    for writer in writers:
        writer.join()
    return max(most, held(folder))


@pytest.mark.scenario
@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_the_budget_holds_at_all_times(kind: str, tmp_path: Path) -> None:
    """There are more writers than entries that fit, and none of them writes before there is room."""
    results = FORK.Queue()
    made: Any = FORK.Process if kind == "processes" else threading.Thread
    writers = [made(target=write, args=(str(tmp_path), number, 20, results)) for number in range(WRITERS)]
    most = most_held(tmp_path, writers)
    assert ENTRY < most <= BUDGET
    counts = [results.get(timeout=60) for _ in writers]
    assert all(count["faults"] == {} for count in counts)
    assert sum(count["saved_chunks"] for count in counts) > WRITERS * 10
    assert os.listdir(tmp_path / "unfinished") == []
    # The count is never less than what is there.
    assert disk_usage.DiskUsage(str(tmp_path / "usage"), lambda _: None).read().total >= held(tmp_path)


@pytest.mark.scenario
@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_budget_without_room_is_logged_once(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path if kind == "folder" else "memory://", max_bytes=1000)
    for _ in range(2):
        assert store.save(prompt(2), cache(len(prompt(2)))) == 0
    (record,) = caplog.records
    assert "protected entries fill the budget" in record.getMessage()
    assert "Pass a larger max_bytes=" in record.getMessage()


def test_reserving_too_late_violates_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction.Reservation, "acquire", lambda self, descriptor: None)

    def most_of(folder: Path) -> int:
        folder.mkdir()
        return most_held(folder, [FORK.Process(target=write, args=(str(folder), number, 10)) for number in range(WRITERS)])

    # Whether writers meet in the wrong moment, and the sampling too, is chance.
    assert any(most_of(tmp_path / str(attempt)) > BUDGET for attempt in range(ATTEMPTS))


def counts_while_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put an entry of 5,000 bytes, and return its file's size and the folder's count at the moment its bytes are reserved."""
    backend = Directory(folder, Counters(), max_bytes=BUDGET)
    real, seen = eviction.Reservation.acquire, []

    def take(self: Any, descriptor: int) -> None:
        assert os.fstat(descriptor).st_size == 0
        real(self, descriptor)
        seen.append(os.fstat(descriptor).st_size)
        # A count of the folder at this moment, by another process.
        other = Directory(folder, Counters(), max_bytes=BUDGET)
        other.collect()
        seen.append(other._usage.read().total)

    monkeypatch.setattr(eviction.Reservation, "acquire", take)
    assert backend.put([key_of(1, 1)], [memoryview(HEAD + bytes(5000))], time.time_ns())
    return seen


def test_the_count_includes_the_size_of_unfinished_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that counts the folder therefore includes the bytes that a writer has yet to write."""
    assert counts_while_writing(tmp_path, monkeypatch) == [len(HEAD) + 5000] * 2


def test_a_count_without_unfinished_files_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Folder, "unfinished", lambda self: iter(()))
    real = disk_usage.DiskUsage.replace
    monkeypatch.setattr(disk_usage.DiskUsage, "replace", lambda self, total, before: real(self, total, None))
    assert counts_while_writing(tmp_path, monkeypatch) == [len(HEAD) + 5000, 0]


def test_the_count_file_stays_small(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=10**8)
    ids, whole = prompt(2), cache(2 * CHUNK + 5)
    lengths = set()
    for _ in range(20):
        assert store.save(ids, whole) == 2 * CHUNK
        assert store.delete(ids) == 2
        lengths.add(os.stat(tmp_path / "usage").st_size)
    assert lengths == {72}
    assert store._backend._usage.read().total == 0


def test_a_count_by_an_earlier_version_is_recomputed(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=10**8)
    save(store, prompt(2))
    stored = held(tmp_path)
    (tmp_path / "usage").write_bytes(b"kvpu1234" + b"".join(n.to_bytes(8, "little", signed=True) for n in (8320, -8320) * 1000))
    save(store, prompt(1, seed=1))
    assert store._backend._usage.read().total == held(tmp_path) > stored


def test_a_count_from_before_a_reboot_is_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power loss, the count may be older than the entries."""
    store = open_store(tmp_path, max_bytes=10**8)
    save(store, prompt(1))
    early = (tmp_path / "usage").read_bytes()
    save(store, prompt(3, seed=1))
    (tmp_path / "usage").write_bytes(early)
    monkeypatch.setattr(disk_usage, "boot_id", lambda: b"this run")
    save(store, prompt(1, seed=2))
    assert store._backend._usage.read().total == held(tmp_path)


def test_released_bytes_are_not_released_twice(tmp_path: Path) -> None:
    """A count that begins after an entry is removed does not include the entry."""
    counted = disk_usage.DiskUsage(str(tmp_path / "usage"), lambda _: None)
    counted.replace(1000, None)
    before = counted.read()
    counted.replace(900, before)
    counted.release(100, before)
    assert counted.read().total == 900
    counted.release(100, counted.read())
    assert counted.read().total == 800
    # What is taken while the folder is counted is added to the count.
    before = counted.read()
    assert counted.reserve(50, lambda total: total <= 850, lambda: None) is not None
    assert counted.reserve(1, lambda total: total <= 850, lambda: None) is None
    counted.replace(800, before)
    assert counted.read().total == 850


def test_a_dead_writer_reserves_no_bytes(tmp_path: Path) -> None:
    def die(folder: str) -> None:
        eviction.Reservation.acquire = lambda self, descriptor: (real(self, descriptor), os._exit(9))  # type: ignore[method-assign]
        write(folder, 1, 1)

    real = eviction.Reservation.acquire
    for _ in range(5):
        child = FORK.Process(target=die, args=(str(tmp_path),))
        child.start()
        child.join()
        assert child.exitcode == 9
    assert held(tmp_path) <= BUDGET
    write(str(tmp_path), 2, 3)
    assert len(entries(tmp_path)) == 3
    assert os.listdir(tmp_path / "unfinished") == []


def test_a_stopped_writer_that_locks_the_count_blocks_others_only_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_usage, "WAIT_SECONDS", 0.05)
    store = open_store(tmp_path, max_bytes=10**8)
    save(store, prompt(1))
    with open(tmp_path / "usage") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert store.save(prompt(1, seed=1), cache(37)) == 0
        assert store.load(prompt(1))[0] == CHUNK
    assert store.save(prompt(1, seed=1), cache(37)) == CHUNK
