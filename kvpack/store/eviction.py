"""Keeping a directory within its budget: what was used longest ago goes first, leaves before their ancestors.

Times order a chain as well: an ancestor's last use is never earlier than that of what follows it (directory.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

from kvpack.atomic import TEMPORARY_PREFIX
from kvpack.formats.errors import KvpackError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .counters import Counters
    from .directory import Directory
    from .usage import Usage

WAIT_SECONDS = 1.0
"""How long a writer waits for another process that is making room, before it gives its entry up."""
_POLL_SECONDS = 0.001

STALE_SECONDS = 3600
"""Age at which an unfinished file is taken for one whose writer is gone, where its process number is in use."""

FUTURE_NS = 3600 * 10**9
"""A last use that is further ahead than this was noted by a clock that was wrong: such entries go first, in their order."""

_BEYOND = 64
"""A round removes a 64th of the entries beyond the budget, so that counting them costs each writer little."""


class NoRoom(Exception):
    """What is stored may not be removed, or not in time: the entry does not fit."""


class Evictor:
    """Makes room in a directory. Any number of processes may ask; one at a time removes."""

    def __init__(self, directory: Directory, usage: Usage, counters: Counters, max_bytes: int | None, min_free: int) -> None:
        self._directory, self._usage, self._counters = directory, usage, counters
        self._max_bytes, self._min_free = max_bytes, min_free

    def reserve(self, size: int, chain: Sequence[bytes]) -> None:
        """Count ``size`` bytes for the last of ``chain``, whose unfinished file is complete, and make room for them.

        Its ancestors stay: without them it would never be found. Raises NoRoom and OSError.
        """
        if self._max_bytes is not None and size > self._max_bytes:
            raise NoRoom
        try:
            total = self._usage.add(size)
        except FileNotFoundError:
            total = None
        try:
            self._make_room(total, set(chain))
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                self._usage.add(-size)
            raise

    def collect(self) -> None:
        """Remove unfinished files of dead writers, count afresh and evict what is above the budget."""
        try:
            if os.path.isdir(self._directory.root):
                self._directory.make_folders()
                self._try_round(set())
        except (OSError, KvpackError) as error:
            self._counters.fault("collect", error)

    def _make_room(self, total: int | None, kept: set[bytes]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not self._fits(total):
            removed = self._try_round(kept)
            total = self._total()
            if removed == 0 and not self._fits(total):
                raise NoRoom
            if removed is None:
                # Another process is at it.
                if time.monotonic() > deadline:
                    raise NoRoom
                time.sleep(_POLL_SECONDS)

    def _total(self) -> int | None:
        try:
            return self._usage.total()
        except FileNotFoundError:
            return None

    def _fits(self, total: int | None) -> bool:
        if total is None:
            return False
        return (self._max_bytes is None or total <= self._max_bytes) and self._missing_on_disk() <= 0

    def _missing_on_disk(self) -> int:
        if not self._min_free:
            return 0
        disk = os.statvfs(self._directory.root)
        return self._min_free - disk.f_bavail * disk.f_frsize

    def _try_round(self, kept: set[bytes]) -> int | None:
        """Sweep, count and evict, and return the entries removed, or None when another process is at it."""
        removed = 0

        def evict() -> int:
            nonlocal removed
            removed, total = self._evict(kept)
            return total

        with self._locked() as held:
            if not held:
                return None
            self.sweep()
            self._usage.replace(evict)
        return removed

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """An advisory lock that ends with its process; only evictors take it."""
        descriptor = os.open(os.path.join(self._directory.root, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    def _evict(self, kept: set[bytes]) -> tuple[int, int]:
        """Remove what is above the budget and not in ``kept``; (entries removed, bytes that stay, complete unfinished files among them)."""
        # Unfinished files first: one that is renamed meanwhile is then counted twice, not missed.
        pending = sum(status.st_size for _, status in self._directory.unfinished())
        latest = time.time_ns() + FUTURE_NS
        entries = [(status.st_mtime_ns <= latest, status.st_mtime_ns, status.st_size, name) for name, status in self._directory.scan()]
        total = pending + sum(size for *_, size, _ in entries)
        excess = self._missing_on_disk()
        if self._max_bytes is not None:
            excess = max(excess, total - self._max_bytes)
        count = 0
        if excess <= 0:
            return count, total
        kept = kept | self._directory.pinned()
        beyond = len(entries) // _BEYOND
        for *_, name in sorted(entries):
            if excess <= 0:
                if beyond <= 0:
                    break
                beyond -= 1
            key = _key(name)
            if key is None or key in kept:
                continue
            removed = self._directory.remove(self._directory.path(key))
            if removed is not None:
                count, total, excess = count + 1, total - removed, excess - removed
                self._counters.add("evicted_entries")
                self._counters.add("evicted_bytes", removed)
        return count, total

    def sweep(self) -> None:
        """Remove unfinished files whose writer is gone, by its process number or by their age."""
        for name, status in self._directory.unfinished():
            process = name.removeprefix(TEMPORARY_PREFIX).partition("-")[0]
            # Not the time that its writer sets, which will be the time of its last use.
            age = time.time() - status.st_ctime
            if _runs(process) and abs(age) < STALE_SECONDS:
                continue
            if self._directory.remove(os.path.join(self._directory.root, "unfinished", name)) is not None:
                self._counters.add("swept_files")


def _runs(process: str) -> bool:
    """Whether a process of this number runs on this machine."""
    if not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _key(name: str) -> bytes | None:
    try:
        return bytes.fromhex(name)
    except ValueError:
        return None
