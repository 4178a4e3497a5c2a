"""Reads in threads: in order, in memory that is free, and all over when they are closed."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from kvpack.cache import staged_reads
from kvpack.cache.bus import HostBus
from kvpack.cache.staged_reads import ReadAhead, StagedReads
from kvpack.file.sources import InMemory
from kvpack.formats.errors import Truncated


def test_a_read_waits_for_the_copy_of_what_its_memory_holds() -> None:
    slots, found, marks = [-1, -1], [], []

    def read(number: int, part: int) -> None:
        assert part or number < 2 or slots[number % 2] == number - 2
        if part:
            slots[number % 2] = number

    reads = StagedReads(read, [2] * 50, [None, None, *range(48)], marks.append, 1)
    for number in range(50):
        reads.ready(number)
        found.append(slots[number % 2])
        reads.copied(number, number)
    reads.close()
    assert found == list(range(50))
    assert marks[:48] == list(range(48))


def _none(*_: Any) -> int:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("start", [_none, lambda *_: 0], ids=["no thread starts", "threads end before they begin"])
def test_without_threads_the_caller_reads(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_reads._thread, "start_new_thread", start)
    done: list[tuple[int, int]] = []
    reads = StagedReads(lambda *place: done.append(place), [3, 0, 2], [None, None, 0], lambda _: None, 4)
    for number in range(3):
        reads.ready(number)
        reads.copied(number, None)
    reads.close()
    assert done == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]


def test_the_first_error_of_a_copy_is_raised_in_its_place() -> None:
    def read(number: int, part: int) -> None:
        if number == 1 and part:
            raise ValueError(part)

    reads = StagedReads(read, [2, 4], [None, None], lambda _: None, 4)
    reads.ready(0)
    with pytest.raises(ValueError, match="1"):
        reads.ready(1)
    reads.close()


def test_after_it_closed_nothing_is_under_way() -> None:
    """Whether threads read, or wait for memory that is never free."""
    under_way = threading.Semaphore(0)

    def read(number: int, part: int) -> None:
        under_way.release()
        time.sleep(0.01)
        assert not ended

    for after in ([None] * 40, [None, *[0] * 39]):
        ended = False
        reads = StagedReads(read, [1] * 40, after, lambda _: None, 4)
        under_way.acquire()
        reads.close()
        ended = True
        assert (reads._errors, reads._running) == ({}, 0)


@pytest.mark.parametrize("size", [1, 999, 1000, 1001, 5000])
def test_the_first_bytes_of_a_file(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_reads, "LEAST_AHEAD", 100)
    data = bytes(torch.randint(0, 256, (size,), dtype=torch.uint8).tolist())
    ahead = ReadAhead(HostBus(), 1000)
    ahead.begin(InMemory(data))
    assert ahead.nbytes == min(size, 1000)
    for end in (1, ahead.nbytes):
        ahead.ready(end)
        assert bytes(ahead.memory[:end].tolist()) == data[:end]
    ahead.close()


def test_reads_ahead_that_fail_are_told_to_those_who_wait() -> None:
    class Cut(InMemory):
        def read_into(self, begin: int, memory: memoryview) -> None:
            raise Truncated("was cut meanwhile")

    ahead = ReadAhead(HostBus(), 1000)
    ahead.close()
    ahead.begin(Cut(bytes(10)))
    with pytest.raises(Truncated, match="was cut meanwhile"):
        ahead.ready(5)
    ahead.close()
