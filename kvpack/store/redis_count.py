"""Count the entries of a Redis server in pages: no call takes long, and other clients can put, load and evict in between.

The server keeps the state of a count, which all writers share: the keys counted so far, their sum, and the cursor. Every script that
changes a counted entry also changes the sum, so that the sum is exact when the last page is counted.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvpack.runtime.locks import Lock

if TYPE_CHECKING:
    from .counters import Counters
    from .redis_client import Client

SUM_SECONDS = 600.0
"""The age at which the sum of the sizes is counted again to keep the budget: any user of the server may have changed it."""
WAIT_SECONDS = 10.0
"""Seconds that one put waits for a count; the next put continues it."""
NAMES_AT_ONCE = 300
SIZES_AT_ONCE = 250
"""Names, and sizes, in one page."""
MAX_PAGES = 2**20
"""Maximum number of pages of a scan: a server of a billion names has no more."""
AGAIN_SECONDS = 60.0
"""Seconds after which a put without room counts again, because another writer may have changed the sum."""

_PHASES = ("sizes", "used", "names")
"""Phases of a scan after the count was lost: forget keys that are counted or noted but missing, then count all entries."""
_BEGIN = b"0"
"""The cursor of the first page, and after the last."""
_DONE, _UNSOUND = 1, -1
"""Result of the script that sums sizes for the last page, and for a store whose contents cannot be determined."""


class EntryCount:
    """The count of the server of ``client``, which one thread of this process updates at a time. Safe to use from any thread."""

    def __init__(self, client: Client, counters: Counters) -> None:
        self._client, self._counters = client, counters
        self._lock = Lock()
        self._summed: float | None = None
        self._running = False
        self._phase, self._cursor = 0, _BEGIN

    def prepare(self) -> bool:
        """Return True if the sum has been counted since, or shortly before, this store was opened. The first put waits for that.

        Later counts continue page by page.
        """
        with self._lock:
            if self._summed is None:
                return self._sum(time.monotonic() + WAIT_SECONDS, trusted=True)
            if self._running or time.monotonic() - self._summed > SUM_SECONDS:
                answer = self._client.call("sum", int(not self._running), SIZES_AT_ONCE, 0)
                self._running = answer == 0
                if answer == _DONE:
                    self._summed = time.monotonic()
                return answer is not None and (answer != _UNSOUND or self._recount(time.monotonic() + WAIT_SECONDS))
        return True

    def sum_again(self) -> bool:
        """Sum the sizes again unless they were just summed; return True if they were summed again."""
        with self._lock:
            if self._summed is not None and time.monotonic() - self._summed < AGAIN_SECONDS:
                return False
            return self._sum(time.monotonic() + WAIT_SECONDS)

    def recount(self) -> bool:
        """Count all entries by the server's names.

        Returns False if it does not answer or has too many names for the time; the count then continues later.
        """
        with self._lock:
            return self._recount(time.monotonic() + WAIT_SECONDS)

    def collect(self) -> bool:
        """Run ``recount`` from the beginning, however long it takes."""
        with self._lock:
            self._phase, self._cursor = 0, _BEGIN
            return self._recount(float("inf"))

    def _recount(self, deadline: float) -> bool:
        while self._phase < len(_PHASES):
            answer = self._client.call("count", _PHASES[self._phase], self._cursor, NAMES_AT_ONCE)
            if answer is None or answer[0] == self._cursor != _BEGIN:
                self._phase, self._cursor = 0, _BEGIN
                return False
            self._cursor, vanished = answer
            self._counters.add("vanished_entries", vanished)
            if self._cursor == _BEGIN:
                self._phase += 1
            elif time.monotonic() > deadline:
                return self._report_timeout()
        self._phase = 0
        return self._sum(deadline, counted=True)

    def _sum(self, deadline: float, *, counted: bool = False, trusted: bool = False) -> bool:
        begin = 2 if counted else 1
        for _ in range(MAX_PAGES):
            answer = self._client.call("sum", begin, SIZES_AT_ONCE, int(trusted))
            if answer == _DONE:
                self._summed, self._running = time.monotonic(), False
                return True
            if answer != 0:
                return answer == _UNSOUND and not counted and self._recount(deadline)
            begin = 0
            if time.monotonic() > deadline:
                return self._report_timeout()
        return False

    def _report_timeout(self) -> bool:
        self._counters.fault("count", TimeoutError(f"the server has more keys than a put counts in {WAIT_SECONDS} s; the next goes on"))
        return False
