"""Eviction keeps a directory within its budget. It removes the least recently used entries first, and descendants before ancestors.

Ordering entries by last use achieves both, because an ancestor's last use is never earlier than its descendants' (directory.py).
"""

from __future__ import annotations

import contextlib
import heapq
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvpack.file.atomic import remove_abandoned, try_lock
from kvpack.formats.errors import KvpackError

from .counters import Counters
from .disk_usage import DiskUsage, UsageCount
from .folder import Folder, may_be_store
from .index import MIN_ENTRIES, Index
from .index_tables import IndexRow, key_from_row
from .pins import Pins

WAIT_SECONDS = 1.0
"""Maximum time in seconds that a writer waits for other processes to count, evict or finish entries.

Only the requested sleeps are added up. On a busy machine, sleeps take longer, and so does the work that the writer waits for.
"""
_POLL_SECONDS = 0.001
_MAX_POLL_SECONDS = 0.016
"""First and longest sleep of a waiting writer, in seconds. More frequent polling would take CPU time from the evicting process."""

_LOW_FRACTION, _LOW_ENTRIES = 128, 256
"""With an index, eviction starts when there is less room left than 1/128 of the budget, and less than 256 such entries need."""
_FUTILE_SECONDS = 1.0
"""Time in seconds without early rounds after a round that found nothing to remove."""

STALE_SECONDS = 3600
"""Age in seconds at which an unfinished file counts as abandoned on a file system without locks."""

FUTURE_NS = 3600 * 10**9
"""A last use more than this many nanoseconds in the future must come from a wrong clock. Such entries are evicted first, in order."""

_EXTRA_FRACTION = 64
"""Share of the entries, 1/64, that a round removes beyond what the budget requires, so that writers seldom have to count."""
_MAX_EXTRA = 256
"""Maximum number of extra entries (see ``_EXTRA_FRACTION``) in a round that uses the index."""
_MAX_PER_ROUND = 384
"""Maximum number of entries that a round with the index removes, in about ten milliseconds."""
_BATCH_ENTRIES = 64
"""Number of entries removed in one transaction of the index. Other processes may change the index between transactions."""
_LIST_SECONDS = 0.01
"""Maximum time in seconds that a round spends listing folders that have changed since they were indexed."""
_ROWS_READ = 256
"""Number of index rows that one query reads."""
_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1
_LOST_FRACTION = 32
"""Share of the budget, 1/32, by which the count may exceed the entries, because writers died. Above it, the folder is counted again."""


class NoRoom(Exception):
    """Raised if there is no room for an entry, because stored entries cannot be removed, or not quickly enough."""


class EvictionResult(NamedTuple):
    """The outcome of an eviction round.

    ``missing`` is True if there is still not enough room. ``unfinished`` is the number of unfinished files, which may become removable
    entries.
    """

    missing: bool
    unfinished: int


class Reservation:
    """Disk space reserved for one entry before it is written. The entries of its ``chain`` are not evicted to make room."""

    def __init__(self, evictor: Evictor, size: int, chain: Sequence[bytes], path: str) -> None:
        self._evictor, self._size, self._protected = evictor, size, set(chain)
        self._cost, self._folders = evictor.folder.cost(size), evictor.folder.missing_folder_bytes(path)
        self._counted: UsageCount | None = None

    def acquire(self, descriptor: int) -> None:
        """Make room, and extend the entry's unfinished file to its final size. Raises NoRoom or OSError."""
        cost = self._cost + self._folders
        self._counted = self._evictor.reserve(cost, self._protected, lambda: os.ftruncate(descriptor, self._size))

    def release(self) -> None:
        """Release the reserved bytes. The unfinished file must have been removed already."""
        self._evictor.usage.release(self._cost, self._counted)


class Evictor:
    """Makes room in the folder of a directory backend. Any number of processes may request room, but only one at a time evicts entries.

    ``restore`` corrects the entries' times if the folder has been copied.
    """

    def __init__(
        self,
        folder: Folder,
        index: Index,
        pins: Pins,
        usage: DiskUsage,
        counters: Counters,
        max_bytes: int | None,
        min_free: int,
        restore: Callable[[], None],
    ) -> None:
        self.folder, self._index, self._pins, self.usage, self._counters = folder, index, pins, usage, counters
        self._max_bytes, self._min_free, self._restore = max_bytes, min_free, restore
        self._futile_until = 0.0

    def reserve(self, size: int, protected: set[bytes], on_reserve: Callable[[], None]) -> UsageCount:
        """Reserve ``size`` bytes and return the new count. Evicts entries if necessary, except those in ``protected``.

        ``on_reserve`` makes the bytes visible when the folder is counted. Raises NoRoom or OSError.
        """
        if self._max_bytes is not None and size > self._max_bytes:
            raise NoRoom
        waited, wait = 0.0, _POLL_SECONDS
        while True:
            count = self.usage.reserve(size, lambda total: self._fits(total, size), on_reserve, self._max_bytes)
            if count is not None:
                self._keep_free_space(size, protected, count)
                return count
            if waited >= WAIT_SECONDS or self._exceeds_larger_budget(size):
                raise NoRoom
            result = self._try_round(size, protected)
            if result is not None and result.missing and not result.unfinished:
                raise NoRoom
            waited += wait
            if result is None or result.missing:
                # Other processes are making room, or are writing entries that can be removed once written.
                time.sleep(wait)
                wait = min(2 * wait, _MAX_POLL_SECONDS)

    def _keep_free_space(self, size: int, protected: set[bytes], count: UsageCount) -> None:
        """Evict entries before the budget is used up, so that other processes need not wait for room.

        Does nothing if another process is evicting, or without an index, because a round is then too expensive to start early. ``count``
        includes the ``size`` bytes just reserved.
        """
        if self._max_bytes is None:
            return
        low = min(self._max_bytes // _LOW_FRACTION, _LOW_ENTRIES * size)
        # Small budgets are filled to the last byte.
        if low < size or count.total + low <= count.effective_budget(self._max_bytes):
            return
        if time.monotonic() < self._futile_until or not self._index.exists:
            return
        # The bytes are reserved already, so a fault must not reach the writer.
        with contextlib.suppress(OSError, KvpackError):
            result = self._try_round(low, protected)
            if result is not None and result.missing:
                self._futile_until = time.monotonic() + _FUTILE_SECONDS

    def _exceeds_larger_budget(self, size: int) -> bool:
        """Return True if ``size`` more bytes would exceed this store's budget, but another store has a larger budget.

        This store must then not evict entries.
        """
        count = self.usage.read() if self._max_bytes is not None else None
        return count is not None and count.effective_budget(self._max_bytes or 0) > (self._max_bytes or 0) < count.total + size

    def collect(self) -> None:
        """Remove unfinished files of dead writers, recount the bytes, and evict entries above the budget."""
        try:
            if os.path.isdir(self.folder.root) and may_be_store(self.folder.root):
                self.folder.make_folders()
                self._try_round(0, set(), recount=True)
        except (OSError, KvpackError) as error:
            self._counters.fault("collect", error)

    def _fits(self, total: int, size: int) -> bool:
        return (self._max_bytes is None or total <= self._max_bytes) and self._disk_shortfall(size) <= 0

    def _disk_shortfall(self, size: int) -> int:
        """Return the number of bytes to free on disk for ``size`` more bytes, the unfinished files, and the minimum to keep free."""
        if not self._min_free:
            return 0
        unwritten = sum(max(0, status.st_size - status.st_blocks * 512) for _, status in self.folder.unfinished())
        disk = os.statvfs(self.folder.root)
        return self._min_free + unwritten + size - disk.f_bavail * disk.f_frsize

    def _try_round(self, size: int, protected: set[bytes], *, recount: bool = False) -> EvictionResult | None:
        """Sweep, count, and evict until ``size`` more bytes fit. Returns None if another process is evicting.

        With an index, the folder is counted again only if ``recount`` is True or the count does not match the index.
        """
        with self._try_lock() as locked:
            if not locked:
                return None
            self.sweep()
            self._pins.sweep()
            usage_before = self.usage.read()
            budget = self._max_bytes if usage_before is None or self._max_bytes is None else usage_before.effective_budget(self._max_bytes)
            if (
                usage_before is not None
                and not recount
                and (result := self._evict_indexed(size, protected, budget, usage_before)) is not None
            ):
                return result
            if usage_before is None and self.usage.is_copy():
                self._restore()
            result, total, entries = self._evict(size, protected, budget)
            self.usage.replace(total, usage_before)
            if entries >= MIN_ENTRIES:
                self._index.build()
        return result

    @contextlib.contextmanager
    def _try_lock(self) -> Iterator[bool]:
        """Try to acquire the advisory lock for eviction. Yields True on success. If the process dies, the system releases the lock."""
        descriptor = self._open_lock()
        try:
            self.folder.trust.assign_owner(descriptor)
            yield try_lock(descriptor) is not False
        finally:
            os.close(descriptor)

    def _open_lock(self) -> int:
        path = os.path.join(self.folder.root, "lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(path, flags, 0o600)
        except PermissionError:
            # The file belongs to another user, such as an administrator who ran kvpack once.
            os.unlink(path)
            return os.open(path, flags, 0o600)

    def _evict(self, size: int, protected: set[bytes], budget: int | None) -> tuple[EvictionResult, int, int]:
        """List the folder, and evict entries until ``size`` more bytes fit into ``budget``. Entries in ``protected`` are kept.

        Returns the ``EvictionResult``, the number of bytes still in use, and the number of entries before the eviction.
        """
        # Unfinished files are counted first: a file renamed during the count is then counted twice, not missed.
        pending, cost = self._pending_bytes(), self.folder.cost
        latest = time.time_ns() + FUTURE_NS
        entries = [(status.st_mtime_ns <= latest, status.st_mtime_ns, status.st_size, key) for key, status in self.folder.scan()]
        total = sum(pending) + sum(cost(size) for *_, size, _ in entries) + self.folder.overhead()
        excess = self._excess_bytes(total, size, budget)
        if excess <= 0:
            return EvictionResult(False, len(pending)), total, len(entries)
        order = ((key, size) for *_, size, key in sorted(entries))
        freed = self._remove(order, excess, protected, len(entries) // _EXTRA_FRACTION)
        return EvictionResult(freed < excess, len(pending)), total - freed, len(entries)

    def _evict_indexed(self, size: int, protected: set[bytes], budget: int | None, usage_before: UsageCount) -> EvictionResult | None:
        """Evict as ``_evict`` does, but use the index and the count ``usage_before``. Returns None if they do not match the folder.

        Outdated rows are nearly always good enough. Folders that changed without the index are therefore listed only after room has been
        made, because other writers are waiting for it.
        """
        if not self._index.exists:
            return None
        result = self._evict_rows(size, protected, budget, usage_before)
        if (result is None or result.missing) and not self._index.matches() and self._index.refresh():
            result = self._evict_rows(size, protected, budget, usage_before)
        elif result is not None and self._index.refresh(_LIST_SECONDS):
            self._index.check_next_folder()
        return result

    def _evict_rows(self, size: int, protected: set[bytes], budget: int | None, usage_before: UsageCount) -> EvictionResult | None:
        """Evict entries that have a row in the index. Returns None if the rows add up to much less than the count ``usage_before``."""
        pending, overhead, totals = self._pending_bytes(), self.folder.overhead(), self._index.totals()
        if totals is None:
            return None
        used = sum(pending) + overhead + totals.cost
        if usage_before.total - used > max(budget or 0, used) // _LOST_FRACTION:
            return None
        old_overhead = self._index.exchange_number("overhead", overhead)
        growth = max(0, overhead - (old_overhead or overhead))
        if growth:
            self.usage.release(-growth, usage_before)
        excess = self._excess_bytes(max(usage_before.total + growth, used), size, budget)
        if excess <= 0:
            return EvictionResult(False, len(pending))
        latest = time.time_ns() + FUTURE_NS
        order = least_recently_used(self._index, self.folder, latest)
        with contextlib.closing(order):
            freed = self._remove(order, excess, protected, min(totals.entries // _EXTRA_FRACTION, _MAX_EXTRA), _MAX_PER_ROUND, usage_before)
        # If more must be evicted, other processes may run a round first.
        return EvictionResult(not freed, len(pending))

    def _pending_bytes(self) -> list[int]:
        """Return the disk space, in bytes, that each unfinished file uses or has reserved."""
        return [self.folder.cost(status.st_size) for _, status in self.folder.unfinished() if status.st_size]

    def _excess_bytes(self, total: int, size: int, budget: int | None) -> int:
        excess = self._disk_shortfall(size)
        return excess if budget is None else max(excess, total + size - budget)

    def _remove(
        self,
        order: Iterator[tuple[bytes, int]],
        excess: int,
        protected: set[bytes],
        extra: int,
        max_entries: int | None = None,
        usage_before: UsageCount | None = None,
    ) -> int:
        """Remove entries in ``order`` until ``excess`` bytes are freed, and then up to ``extra`` more entries. Returns the freed bytes.

        ``order`` yields (key, size) pairs. Pinned and ``protected`` entries are kept. At most ``max_entries`` are removed. After each batch
        of entries, the freed bytes are subtracted from the count ``usage_before``, for other writers to use.
        """
        protected = protected | self._pins.keys()
        removable = islice(((key, size) for key, size in order if key not in protected), max_entries)
        freed = 0
        while freed < excess and (batch := self._next_batch(removable, excess - freed)):
            freed += self._remove_batch(batch, usage_before)
        while freed >= excess and extra > 0 and (batch := [key for key, _ in islice(removable, min(extra, _BATCH_ENTRIES))]):
            freed += self._remove_batch(batch, usage_before)
            extra -= len(batch)
        return freed

    def _next_batch(self, removable: Iterator[tuple[bytes, int]], missing: int) -> list[bytes]:
        """Return the keys to remove next: enough to free ``missing`` bytes, but at most ``_BATCH_ENTRIES``."""
        batch: list[bytes] = []
        while missing > 0 and len(batch) < _BATCH_ENTRIES and (entry := next(removable, None)) is not None:
            batch.append(entry[0])
            missing -= self.folder.cost(entry[1])
        return batch

    def _remove_batch(self, keys: list[bytes], usage_before: UsageCount | None) -> int:
        """Remove entries, and return the freed disk space in bytes.

        The freed bytes are also subtracted from the count ``usage_before``, if any.
        """
        removed = self._index.remove(keys, lambda key: self.folder.remove(self.folder.path(key)))
        self._counters.add("evicted_entries", len(removed))
        self._counters.add("evicted_bytes", sum(removed.values()))
        freed = sum(map(self.folder.cost, removed.values()))
        if usage_before is not None:
            self.usage.release(freed, usage_before)
        return freed

    def sweep(self) -> None:
        """Remove the unfinished files of dead writers: files without a lock, or old files on file systems without locks."""
        for path, status in self.folder.unfinished():
            # Not the modification time, which the writer sets to the time of the entry's last use.
            age = time.time() - status.st_ctime
            try:
                if remove_abandoned(path, old=abs(age) >= STALE_SECONDS):
                    self._counters.add("swept_files")
            except FileNotFoundError:
                continue
            except OSError as error:
                # A file of another user that does not belong to the group yet has only just been created.
                if self.folder.trust.trusted_group is None or not isinstance(error, PermissionError):
                    self._counters.fault("sweep", error)


def least_recently_used(index: Index, folder: Folder, latest_ns: int) -> Generator[tuple[bytes, int], None, None]:
    """Yield the keys and sizes of entries, least recently used first. Entries last used after ``latest_ns`` come before all others.

    Uses change only a file's time, so it may be later than the time in the file's row. If the two are equal, the entry is the next in
    order. Otherwise, the later time is written to the index.
    """
    latest_ns = min(latest_ns, _MAX_INT64)
    heap: list[tuple[bool, int, int, tuple[bytes, int]]] = []
    uses: list[tuple[int, int]] = []
    try:
        for number, key_rest, size, recorded in _rows_by_last_use(index, latest_ns):
            sort_key = (recorded <= latest_ns, recorded, number)
            while heap and heap[0][:3] < sort_key:
                yield heapq.heappop(heap)[3]
            key = key_from_row(number, key_rest)
            try:
                used = os.stat(folder.path(key), follow_symlinks=False).st_mtime_ns
            except OSError:
                # The entry is gone. The process that removed it corrects the row.
                used = recorded
            if used == recorded:
                yield key, size
                continue
            uses.append((used, number))
            heapq.heappush(heap, (used <= latest_ns, used, number, (key, size)))
        while heap:
            yield heapq.heappop(heap)[3]
    finally:
        if uses:
            index.update_last_uses(uses)


def _rows_by_last_use(index: Index, latest_ns: int) -> Iterator[IndexRow]:
    for after, before in (((latest_ns, _MAX_INT64), _MAX_INT64), ((_MIN_INT64, _MIN_INT64), latest_ns)):
        while rows := index.least_recently_used(_ROWS_READ, after, before):
            yield from rows
            after = rows[-1][3], rows[-1][0]
