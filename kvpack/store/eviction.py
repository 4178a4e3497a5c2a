"""Keeping a directory within its budget: what was used longest ago goes first, leaves before their ancestors.

Times order a chain as well: an ancestor's last use is never earlier than that of what follows it (directory.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpack.file.atomic import lock_now, sweep
from kvpack.formats.errors import KvpackError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .counters import Counters
    from .folder import Folder
    from .pins import Pins
    from .usage import Count, Usage

WAIT_SECONDS = 1.0
"""How long a writer waits for others that are making room or writing, before it gives its entry up."""
_POLL_SECONDS = 0.001

STALE_SECONDS = 3600
"""Age at which an unfinished file is taken for one whose writer is gone, where no lock says so."""

FUTURE_NS = 3600 * 10**9
"""A last use that is further ahead than this was noted by a clock that was wrong: such entries go first, in their order."""

_BEYOND = 64
"""A round removes a 64th of the entries beyond the budget, so that counting them costs each writer little."""


class NoRoom(Exception):
    """What is stored may not be removed, or not in time: the entry does not fit."""


class Round(NamedTuple):
    """What an evictor leaves: whether room is still ``missing``, and unfinished files that may become entries it can remove."""

    missing: bool
    unfinished: int


class Reservation:
    """The bytes of one entry, taken before they are written; the entries of ``chain`` stay."""

    def __init__(self, evictor: Evictor, size: int, chain: Sequence[bytes]) -> None:
        self._evictor, self._size, self._kept = evictor, size, set(chain)
        self._counted: Count | None = None

    def take(self, descriptor: int) -> None:
        """Make room, and make the entry's unfinished file as long as it will be. Raises NoRoom and OSError."""
        self._counted = self._evictor.reserve(self._size, self._kept, lambda: os.ftruncate(descriptor, self._size))

    def give_back(self) -> None:
        """Give the bytes back of an entry whose unfinished file is gone. Raises OSError."""
        self._evictor.usage.give_back(self._size, self._counted)


class Evictor:
    """Makes room in a directory. Any number of processes may ask; one at a time removes."""

    def __init__(self, folder: Folder, pins: Pins, usage: Usage, counters: Counters, max_bytes: int | None, min_free: int) -> None:
        self._folder, self._pins, self.usage, self._counters = folder, pins, usage, counters
        self._max_bytes, self._min_free = max_bytes, min_free

    def reserve(self, size: int, kept: set[bytes], taken: Callable[[], None]) -> Count:
        """Take ``size`` bytes once they fit, removing none of ``kept``; ``taken`` shows them to whoever counts.

        Raises NoRoom and OSError.
        """
        if self._max_bytes is not None and size > self._max_bytes:
            raise NoRoom
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            count = self.usage.take(size, lambda total: self._fits(total, size), taken)
            if count is not None:
                return count
            if time.monotonic() > deadline:
                raise NoRoom
            found = self._try_round(size, kept)
            if found is not None and found.missing and not found.unfinished:
                raise NoRoom
            if found is None or found.missing:
                # Others are making room, or write what can be removed once it is written.
                time.sleep(_POLL_SECONDS)

    def collect(self) -> None:
        """Remove unfinished files of dead writers, count afresh and evict what is above the budget."""
        try:
            if os.path.isdir(self._folder.root):
                self._folder.make_folders()
                self._try_round(0, set())
        except (OSError, KvpackError) as error:
            self._counters.fault("collect", error)

    def _fits(self, total: int, size: int) -> bool:
        return (self._max_bytes is None or total <= self._max_bytes) and self._missing_on_disk(size) <= 0

    def _missing_on_disk(self, size: int) -> int:
        """The bytes that the disk lacks for ``size`` more, what is unfinished, and the minimum that stays free."""
        if not self._min_free:
            return 0
        unwritten = sum(max(0, status.st_size - status.st_blocks * 512) for _, status in self._folder.unfinished())
        disk = os.statvfs(self._folder.root)
        return self._min_free + unwritten + size - disk.f_bavail * disk.f_frsize

    def _try_round(self, size: int, kept: set[bytes]) -> Round | None:
        """Sweep, count, and evict what is above the budget with ``size`` more; None when another process is at it."""
        with self._locked() as held:
            if not held:
                return None
            self.sweep()
            before = self.usage.read()
            found, total = self._evict(size, kept)
            self.usage.replace(total, before)
        return found

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """An advisory lock that ends with its process; only evictors take it."""
        descriptor = self._open_lock()
        try:
            self._folder.trust.own(descriptor)
            yield lock_now(descriptor) is not False
        finally:
            os.close(descriptor)

    def _open_lock(self) -> int:
        path = os.path.join(self._folder.root, "lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(path, flags, 0o600)
        except PermissionError:
            # Made by another user, such as an administrator once.
            os.unlink(path)
            return os.open(path, flags, 0o600)

    def _evict(self, size: int, kept: set[bytes]) -> tuple[Round, int]:
        """Remove what is above the budget with ``size`` more and not in ``kept``; also the bytes that stay, unfinished ones among them."""
        # Unfinished files first: one that is renamed meanwhile is then counted twice, not missed.
        pending = [status.st_size for _, status in self._folder.unfinished() if status.st_size]
        latest = time.time_ns() + FUTURE_NS
        entries = [(status.st_mtime_ns <= latest, status.st_mtime_ns, status.st_size, name) for name, status in self._folder.scan()]
        total = sum(pending) + sum(size for *_, size, _ in entries)
        excess = self._missing_on_disk(size)
        if self._max_bytes is not None:
            excess = max(excess, total + size - self._max_bytes)
        if excess <= 0:
            return Round(False, len(pending)), total
        kept = kept | self._pins.keys()
        beyond = len(entries) // _BEYOND
        for *_, name in sorted(entries):
            if excess <= 0:
                if beyond <= 0:
                    break
                beyond -= 1
            key = _key(name)
            if key is None or key in kept:
                continue
            removed = self._folder.remove(self._folder.path(key))
            if removed is not None:
                total, excess = total - removed, excess - removed
                self._counters.add("evicted_entries")
                self._counters.add("evicted_bytes", removed)
        return Round(excess > 0, len(pending)), total

    def sweep(self) -> None:
        """Remove unfinished files whose writer is gone: nobody holds their lock, or where there is none, they are old."""
        for path, status in self._folder.unfinished():
            # Not the time that its writer sets, which will be the time of its last use.
            age = time.time() - status.st_ctime
            try:
                if sweep(path, old=abs(age) >= STALE_SECONDS):
                    self._counters.add("swept_files")
            except FileNotFoundError:
                continue
            except OSError as error:
                self._counters.fault("sweep", error)


def _key(name: str) -> bytes | None:
    try:
        return bytes.fromhex(name)
    except ValueError:
        return None
