"""A bounded queue of entries that are written to slower tiers in the background. A lost entry is only a miss there."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .counters import Counters

    Write = Callable[[Sequence[bytes], bytes, int], object]

QUEUE_BYTES = 256 * 2**20
"""Maximum number of queued bytes. An entry that does not fit is dropped, because the engine must not wait."""
FLUSH_SECONDS = 30.0
"""Maximum time in seconds that ``close`` waits for the queued entries."""


class WriteBack:
    """A queue whose thread calls ``write(chain, entry, now_ns)`` in the order of ``add``. Safe to use from any thread.

    After a fork, the child's queue is empty; the parent still writes its entries.
    """

    _queue: OrderedDict[bytes, tuple[Sequence[bytes], bytes, int]]
    _bytes: int
    _writing: bytes | None
    _thread: threading.Thread | None

    def __init__(self, write: Write, counters: Counters) -> None:
        self._write, self._counters = write, counters
        self._reset()

    def add(self, chain: Sequence[bytes], data: bytes, now_ns: int) -> None:
        """Queue an entry. If there is no room for it, it is dropped and counted."""
        self._reset_in_child()
        with self._condition:
            if self._bytes + len(data) > QUEUE_BYTES:
                self._counters.add("dropped_writes")
                return
            if chain[-1] in self._queue:
                return
            self._queue[chain[-1]] = (chain, data, now_ns)
            self._bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvpack-write-back", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def cancel(self, keys: Iterable[bytes]) -> None:
        """Drop the queued entries of ``keys``. If one of them is being written, wait until that is done."""
        self._reset_in_child()
        forgotten = set(keys)
        with self._condition:
            for key in forgotten & set(self._queue):
                self._bytes -= len(self._queue.pop(key)[1])
            while self._writing in forgotten:
                self._condition.wait()
            self._condition.notify_all()

    def close(self) -> None:
        """Write queued entries for at most ``FLUSH_SECONDS``. What is left is dropped and counted."""
        self._reset_in_child()
        deadline = time.monotonic() + FLUSH_SECONDS
        with self._condition:
            while (self._queue or self._writing is not None) and time.monotonic() < deadline:
                self._condition.wait(max(0, deadline - time.monotonic()))
            self._counters.add("dropped_writes", len(self._queue))
            self._queue.clear()
            self._bytes = 0
            self._thread = None
            self._condition.notify_all()

    def _run(self) -> None:
        thread = threading.current_thread()
        while True:
            with self._condition:
                self._writing = None
                self._condition.notify_all()
                while not self._queue and self._thread is thread:
                    self._condition.wait()
                if self._thread is not thread:
                    return
                self._writing, (chain, data, now_ns) = self._queue.popitem(last=False)
            try:
                self._write(chain, data, now_ns)
            except Exception as error:
                self._counters.fault("put", error)
            with self._condition:
                self._bytes -= len(data)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._queue = OrderedDict()
        self._bytes = 0
        self._writing = self._thread = None

    def _reset_in_child(self) -> None:
        if os.getpid() != self._pid:
            self._reset()
