"""Expiry of a folder's entries, which is stored in the files' access times (spec/store.md, Expiry).

An entry's modification time is its last use. If the entry expires, its access time is later than that. The difference is the ``ttl``, in
seconds, of the store that last used the entry.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from .counters import Counters
from .folder import ENTRY_FOLDERS, Folder
from .pins import Pins

SECOND_NS = 10**9
MAX_TTL = 10**9
"""Longest ``ttl`` in seconds, about 31 years. Some file systems cannot store much later times."""
_STEP_SECONDS = 0.005
"""Maximum time in seconds that one put spends searching for expired entries."""
_TIME_SHARE = 64
"""A store spends at most 1/64 of its time searching for expired entries."""
_MIN_PASS_SECONDS, _MAX_PASS_SECONDS = 1.0, 900.0


def limit_ttl(ttl: int | None) -> int | None:
    return None if ttl is None else min(ttl, MAX_TTL)


def pass_seconds(ttl: int) -> float:
    """Return the interval, in seconds, at which all folders are searched for expired entries."""
    return min(max(ttl / 8, _MIN_PASS_SECONDS), _MAX_PASS_SECONDS)


def file_times(used_ns: int, ttl: int | None) -> tuple[int, int]:
    """Return the access and modification times, in nanoseconds, of an entry used at ``used_ns``."""
    return used_ns + (limit_ttl(ttl) or 0) * SECOND_NS, used_ns


def has_expired(status: os.stat_result) -> bool:
    lifetime = status.st_atime_ns - status.st_mtime_ns
    # On a file system with times in whole seconds, the difference means nothing.
    return lifetime > 0 and lifetime % SECOND_NS == 0 and status.st_mtime_ns % SECOND_NS != 0 and status.st_atime_ns <= time.time_ns()


class Expiry:
    """Removes the expired entries of all writers from a directory backend by calling ``delete``. Pinned entries are kept.

    ``step`` is called at every put. From time to time, it searches a few folders, unless ``ttl`` is None. No lock is needed.
    """

    def __init__(
        self, folder: Folder, pins: Pins, counters: Counters, delete: Callable[[Sequence[bytes]], set[bytes]], ttl: int | None
    ) -> None:
        self._folder, self._pins, self._counters, self._delete = folder, pins, counters, delete
        self._ttl = ttl
        self._due = self._begun = 0.0
        self._next = 0

    def step(self) -> None:
        """Search some more folders for expired entries, if enough time has passed."""
        now = time.monotonic()
        if self._ttl is None or now < self._due:
            return
        if self._next == 0:
            self._begun = now
        while self._next < len(ENTRY_FOLDERS) and time.monotonic() < now + _STEP_SECONDS:
            self._remove_expired_in(self._next)
            self._next += 1
        ended = time.monotonic()
        self._due = ended + _TIME_SHARE * (ended - now)
        if self._next == len(ENTRY_FOLDERS):
            self._next = 0
            self._due = max(self._due, self._begun + pass_seconds(self._ttl))

    def run_all(self) -> None:
        """Search all folders for expired entries, even in a store without ``ttl``."""
        for folder_index in range(len(ENTRY_FOLDERS)):
            self._remove_expired_in(folder_index)

    def _remove_expired_in(self, folder_index: int) -> None:
        expired = [key for key, status in self._folder.entries_starting_with(folder_index) if has_expired(status)]
        if not expired:
            return
        try:
            pinned = self._pins.keys()
        except OSError as error:
            self._counters.fault("pinned", error)
            return
        self._counters.add("expired_entries", len(self._delete([key for key in expired if key not in pinned])))
