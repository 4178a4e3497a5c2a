"""Reads in threads, in memory that later reads use again once it is copied; and the first bytes of a file, read while it is opened.

A thread takes one read after the other, and the caller is woken once for each copy: threads that read wait for each other whenever one
of them runs Python.
"""

from __future__ import annotations

import _thread
from threading import Event
from typing import TYPE_CHECKING, Any

from kvpack.file.parallel import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from kvpack.file.sources import Source

    from .bus import Bus

AHEAD_BYTES = 1 << 27
"""The most bytes of a file that are read while it is opened."""
AHEAD_READERS = 16
LEAST_AHEAD = 1 << 20
"""The fewest bytes that a thread reads of these, at once: opening a file is Python, for which threads that call more often would wait."""


class StagedReads:
    """The reads of copies, ``reads[number]`` of them for copy ``number``, made by ``read(number, part)`` in ``threads`` threads, in order.

    Those of a copy begin once the copy ``after[number]``, if there is one, is done. The caller of ``ready`` waits for that, by ``wait`` of
    the mark that ``copied`` was given: where each thread did, all waited for the driver. A read that no thread has begun is made by the
    caller.
    """

    def __init__(
        self,
        read: Callable[[int, int], None],
        reads: Sequence[int],
        after: Sequence[int | None],
        wait: Callable[[Any], None],
        threads: int,
    ) -> None:
        self._read, self._after, self._wait = read, after, wait
        self._parts = [(number, part) for number, count in enumerate(reads) for part in range(count)]
        self._left = list(reads)
        self._ready, self._free = [Event() for _ in reads], [Event() for _ in reads]
        for event, count in zip(self._ready, reads, strict=True):
            if not count:
                event.set()
        self._marks: list[Any] = [None] * len(reads)
        self._errors: dict[tuple[int, int], BaseException] = {}
        self._lock, self._idle = _thread.allocate_lock(), _thread.allocate_lock()
        self._idle.acquire()
        self._next = self._running = self._freed = 0
        self._closed = False
        for _ in range(min(threads, len(self._parts))):
            try:
                _thread.start_new_thread(self._help, ())
            except (RuntimeError, MemoryError):
                break

    def ready(self, number: int) -> None:
        """Wait until all of copy ``number`` is read; copies are asked for in order. Raises what the first of its reads raised."""
        # While the bus has nothing else to do, it is not waited for.
        for freed in range(self._freed, number - self._ready[number].is_set()):
            self._wait(self._marks[freed])
            self._free[freed].set()
            self._freed = freed + 1
        while (taken := self._take(number)) is not None:
            self._make(*taken)
        self._ready[number].wait()
        if failed := sorted(place for place in self._errors if place[0] == number):
            raise self._errors[failed[0]]

    def copied(self, number: int, mark: Any) -> None:
        """Note that copy ``number`` has begun, and is done at ``mark``."""
        self._marks[number] = mark

    def close(self) -> None:
        """Begin no more reads, and wait for those under way."""
        with self._lock:
            self._closed, idle = True, not self._running
        for event in self._free:
            event.set()
        if not idle:
            self._idle.acquire()

    def _take(self, number: int | None = None) -> tuple[int, int] | None:
        """The next read, if there is one; with ``number``, if it is of that copy."""
        with self._lock:
            if self._closed or self._next == len(self._parts) or number not in (None, self._parts[self._next][0]):
                return None
            self._next += 1
            return self._parts[self._next - 1]

    def _make(self, number: int, part: int) -> None:
        try:
            after = self._after[number]
            if after is not None:
                self._free[after].wait()
                if self._closed:
                    return
            self._read(number, part)
        except BaseException as error:
            self._errors[number, part] = error
        finally:
            with self._lock:
                self._left[number] -= 1
                done = not self._left[number]
            if done:
                self._ready[number].set()

    def _help(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._running += 1
        while (taken := self._take()) is not None:
            self._make(*taken)
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._running -= 1
            last = self._closed and not self._running
        if last:
            self._idle.release()


class ReadAhead:
    """The first ``nbytes`` bytes of a file in staging ``memory``, which ``begin`` starts to read; none before."""

    def __init__(self, bus: Bus, most: int = AHEAD_BYTES) -> None:
        self._bus, self.most = bus, most
        self.memory: torch.Tensor | None = None
        self.nbytes = 0

    def begin(self, source: Source) -> None:
        """Begin to read; ``source`` stays open until ``close``, or reads that nobody waits for fail."""
        self.nbytes = min(source.size, self.most)
        threads = min(usable_cores(), AHEAD_READERS)
        self._step = step = max(LEAST_AHEAD, -(-self.nbytes // threads))
        self.memory = self._bus.staging(self.nbytes)
        data, count = self.memory.numpy().data, -(-self.nbytes // step)

        def read(number: int, _: int) -> None:
            source.read_into(number * step, data[number * step : (number + 1) * step])

        self._reads = StagedReads(read, [1] * count, [None] * count, self._bus.wait, threads)
        self._done = 0

    def ready(self, end: int) -> None:
        """Wait until the bytes before ``end`` are read. Raises what ``Source.read_into`` raises."""
        while self._done * self._step < end:
            self._reads.ready(self._done)
            self._done += 1

    def close(self) -> None:
        """Wait for the reads under way."""
        if self.memory is not None:
            self._reads.close()
