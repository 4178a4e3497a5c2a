"""Counts the entries on a Redis server page by page, so that no call takes long and other clients are served in between.

All writers share one count, whose state is on the server: the keys counted so far, the sum of their sizes, and the cursor. Every script
that changes a counted entry also changes the sum, so the sum is exact once the last page has been counted.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from kvpack.runtime.locks import Lock

if TYPE_CHECKING:
    from collections.abc import Callable

    from .counters import Counters
    from .redis_client import Client

SUM_SECONDS = 600.0
"""Time in seconds after which sizes are summed again, because any user of the server may have changed the sum."""
WAIT_SECONDS = 0.05
"""Time in seconds for which one put continues a count. Until it is complete, a new entry replaces older ones (redis_scripts.py)."""
TIME_SHARE = 0.25
"""Maximum share of the time that a client spends on counting, so that a put with several requests does not wait in each of them."""
NAMES_AT_ONCE = 300
SIZES_AT_ONCE = 250
"""Number of server keys, or of sizes, in one page."""
MAX_PAGES = 2**20
"""Maximum number of pages in a scan, enough for a server with 300 million keys."""
MIN_RECOUNT_SECONDS = 60.0
"""Minimum time in seconds between counts for puts that find no room. Another program may have changed the sum."""

_PHASES = ("sizes", "used", "names")
"""Phases of a complete count: check the entries with a size, check those with a last use, and add entries that have neither."""
_BEGIN = b"0"
"""Cursor of the first page. The last page returns it, too."""
_DONE, _UNSOUND = 1, -1
"""Results of the script that sums sizes: the sum is complete, or the counts on the server are inconsistent."""


class EntryCount:
    """The count of the entries on the server of ``client``. Safe to use from any thread. Only one thread at a time updates the count."""

    def __init__(self, client: Client, counters: Counters) -> None:
        self._client, self._counters = client, counters
        self._lock = Lock()
        self._summed: float | None = None
        self._running = False
        self._due = 0.0
        self._phase, self._cursor = 0, _BEGIN

    @property
    def is_known(self) -> bool:
        """True if the sum of the sizes is known."""
        return self._summed is not None

    def advance(self) -> None:
        """Continue a count for at most ``WAIT_SECONDS``. If the sum is known but old, count only one more page."""
        with self._lock:
            if self._summed is None:
                self._step(partial(self._sum, trusted=True))
            elif self._running or time.monotonic() - self._summed > SUM_SECONDS:
                reply = self._client.call("sum", int(not self._running), SIZES_AT_ONCE, 0)
                self._running = reply == 0
                if reply == _DONE:
                    self._summed = time.monotonic()
                elif reply == _UNSOUND:
                    self._summed = None
                    self._step(self._recount)

    def sum_again(self) -> bool:
        """Sum the sizes again, unless this was done in the last ``MIN_RECOUNT_SECONDS``. Returns True if the new sum is complete."""
        with self._lock:
            if self._summed is None or time.monotonic() - self._summed < MIN_RECOUNT_SECONDS:
                return False
            return self._step(self._sum)

    def recount(self) -> bool:
        """Count the entries again by scanning the server's keys. Returns True if the sum of their sizes is known now.

        If the server does not answer or the time is up, it returns False, and later puts continue the count.
        """
        with self._lock:
            self._summed = None
            return self._step(self._recount)

    def collect(self) -> bool:
        """Count all entries from the beginning, without a time limit."""
        with self._lock:
            self._phase, self._cursor = 0, _BEGIN
            return self._recount(float("inf"))

    def _step(self, count: Callable[[float], bool]) -> bool:
        """Call ``count`` with a deadline, unless it is too early for another count. Returns True if the count is complete."""
        begun = time.monotonic()
        if begun < self._due:
            return False
        is_done = count(begun + WAIT_SECONDS)
        now = time.monotonic()
        self._due = 0.0 if is_done else now + (now - begun) * (1 / TIME_SHARE - 1)
        return is_done

    def _recount(self, deadline: float) -> bool:
        while self._phase < len(_PHASES):
            reply = self._client.call("count", _PHASES[self._phase], self._cursor, NAMES_AT_ONCE)
            if reply is None or reply[0] == self._cursor != _BEGIN:
                self._phase, self._cursor = 0, _BEGIN
                return False
            self._cursor, vanished = reply
            self._counters.add("vanished_entries", vanished)
            if self._cursor == _BEGIN:
                self._phase += 1
            elif time.monotonic() > deadline:
                return False
        self._phase = 0
        return self._sum(deadline, counted=True)

    def _sum(self, deadline: float, *, counted: bool = False, trusted: bool = False) -> bool:
        begin = 2 if counted else 1
        for _ in range(MAX_PAGES):
            reply = self._client.call("sum", begin, SIZES_AT_ONCE, int(trusted))
            if reply == _DONE:
                self._summed, self._running = time.monotonic(), False
                return True
            if reply == _UNSOUND and not counted:
                self._summed = None
                return self._recount(deadline)
            if reply != 0:
                return False
            begin = 0
            if time.monotonic() > deadline:
                return False
        return False
