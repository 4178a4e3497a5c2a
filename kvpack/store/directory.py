"""The directory backend: one immutable file per entry. Any number of processes can read it without a lock.

folder.py defines the file layout. A complete file is renamed to its final name. Removal unlinks it, so a process that has mapped the file
keeps the mapping. An entry's modification time is the time of its last use. An ancestor's time is always later than its descendants'. An
entry's access time is its expiry time (expiry.py).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvpack.file.atomic import write_file
from kvpack.formats.errors import KvpackError, LimitExceeded
from kvpack.runtime.mapping import is_cold, map_file, may_map
from kvpack.runtime.threads import in_parallel

from .backend import Data, FoundEntry, Lease, NoLease, Pin, PinTerms, SingleTierBackend, StoredEntry
from .catalog import corrected_times, read_catalog
from .counters import Counters
from .disk_usage import DiskUsage, UsageCount
from .entry_descriptions import Descriptions, entry_description
from .entry_kind import FRONT_BYTES, UNENCRYPTED, EntryFormat, EntryKind, check_size
from .entry_probe import probe_kind
from .eviction import FUTURE_NS, Evictor, NoRoom, Reservation
from .expiry import Expiry, file_times, has_expired
from .folder import ENTRY_FOLDERS, Folder
from .index import MIN_ENTRIES, Index
from .leases import take_file_lease
from .pins import Pins
from .trust import NotAnEntry, Trust, Untrusted, read_beginning, read_whole

SETTLED_NS = 3 * 10**9
"""Age in nanoseconds from which a folder's modification time is reliable, even if the clock ticks only every 2 s."""

_COLD_READ_THREADS = 8
"""Number of threads that read entries from disk."""
_MAX_TEXTS_PER_TRANSACTION = 2048
"""Maximum number of entries whose texts are written in one transaction of the index."""


class Directory(SingleTierBackend):
    """A backend that keeps entries in a folder, which is created with the first entry.

    ``max_bytes`` is a hard budget for the entries, and ``min_free`` is the number of bytes to leave free on the disk. ``durable`` forces
    each entry to disk before ``put`` returns. ``ttl`` is the number of seconds after which an unused entry expires. With ``skip_sweep``,
    opening the folder does not remove unfinished or expired files. Files are mapped if this user owns the folder. With another owner or a
    ``trusted_group``, they are copied, and ``is_private`` is False.

    Raises InvalidParameter if untrusted users may write to the folder, or if the path is not a folder.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        counters: Counters,
        entry_format: EntryFormat = UNENCRYPTED,
        *,
        max_bytes: int | None = None,
        min_free: int = 0,
        durable: bool = False,
        ttl: int | None = None,
        trusted_group: int | str | None = None,
        skip_sweep: bool = False,
    ) -> None:
        self._folder = Folder(root, counters, durable=durable, trusted_group=trusted_group)
        self._counters, self._form = counters, entry_format
        self._pins = Pins(self._folder, counters)
        self._sizes = FolderSizes(self._folder)
        self._usage = DiskUsage(os.path.join(self._folder.root, "usage"), self.trust.assign_owner)
        self._index = Index(self._folder)
        self._evictor = Evictor(self._folder, self._index, self._pins, self._usage, counters, max_bytes, min_free, self._restore_times)
        self._ttl = ttl
        self._expiry = Expiry(self._folder, self._pins, counters, self.delete, ttl)
        if not skip_sweep and self.trust.may_write:
            self._evictor.sweep()
            self._expiry.step()

    @property
    def trust(self) -> Trust:
        return self._folder.trust

    @property
    def is_private(self) -> bool:
        return self.trust.is_private

    def count_present(self, keys: Sequence[bytes]) -> int:
        for index, key in enumerate(keys):
            try:
                with self.trust.open_checked(self._folder.path(key)) as (descriptor, status):
                    kind = self._form.kind(read_beginning(descriptor, FRONT_BYTES), status.st_size)
                    expired = self._is_expired(key, status)
            except FileNotFoundError:
                return index
            except OSError as error:
                self._counters.fault("match", error)
                return index
            if kind is not EntryKind.READABLE or expired:
                return index
        return len(keys)

    def get(self, keys: Sequence[bytes]) -> list[Data]:
        result: list[Data] = []
        with contextlib.closing(in_parallel(self._read, keys, self._reader_count(keys))) as entries:
            try:
                result.extend(entries)
            except FileNotFoundError:
                pass
            except (OSError, ValueError, MemoryError, KvpackError) as error:
                self._counters.fault("get", error)
        return result

    def _reader_count(self, keys: Sequence[bytes]) -> int:
        """Return the number of threads to use for reading entries.

        It is 1 if the last entry is in the page cache, where threads do not help. The threads wait for the disk, so their number does not
        depend on the number of cores.
        """
        if len(keys) > 1:
            with contextlib.suppress(OSError, KvpackError), self.trust.open_checked(self._folder.path(keys[-1])) as (descriptor, status):
                if status.st_size and is_cold(descriptor, 0, status.st_size):
                    return _COLD_READ_THREADS
        return 1

    def peek(self, key: bytes, *, front: bool = False) -> Data | None:
        try:
            return self._read(key, lazy=True)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, MemoryError, KvpackError) as error:
            self._counters.fault("get", error)
            return None

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        key, size = chain[-1], sum(map(len, pieces))
        path, used = self._folder.path(key), now_ns - len(chain) + 1
        reservation = Reservation(self._evictor, size, chain, path)

        def begin(descriptor: int) -> None:
            self.trust.assign_owner(descriptor)
            reservation.acquire(descriptor)
            # Folders are created after their bytes are reserved, because they count toward the budget.
            self._folder.make_folders(os.path.dirname(path))

        def complete(descriptor: int) -> None:
            os.utime(descriptor, ns=file_times(used, self._ttl))

        def rename(unfinished: str, path: str) -> None:
            self._index.add(key, size, used, entry_description(pieces), lambda: os.replace(unfinished, path))

        try:
            if not self.trust.may_write:
                raise Untrusted(
                    f"{self._folder.root} belongs to user {self.trust.owner}, and only that user can store entries: use another folder, "
                    "or share this one with trusted_group="
                )
            kind = self._kind(key)
            if kind is EntryKind.READABLE and self._renew(path, used):
                return True
            if kind is EntryKind.FOREIGN:
                raise NoRoom
            self._folder.make_folders()
            self._remove_junk(path)
            try:
                unfinished, durable = self._folder.unfinished_folder, self._folder.durable
                write_file(path, pieces, durable=durable, unfinished=unfinished, begin=begin, complete=complete, rename=rename)
            except BaseException:
                if not os.path.lexists(path):
                    with contextlib.suppress(OSError):
                        reservation.release()
                raise
        except NoRoom:
            self._counters.add("refused_chunks")
            return False
        except (OSError, MemoryError, KvpackError) as error:
            self._counters.fault("put", error)
            return False
        self._counters.add("saved_chunks")
        self._counters.add("saved_bytes", size)
        self._expiry.step()
        return True

    def touch(self, chain: Sequence[bytes], now_ns: int) -> None:
        if not self.trust.may_write:
            return
        # The first entry comes first, so that an ancestor's time is later than its descendants' at every moment.
        denied = False
        for depth, key in enumerate(chain):
            path, used = self._folder.path(key), now_ns - depth
            try:
                recorded_ns = os.stat(path, follow_symlinks=False).st_mtime_ns
                if recorded_ns < used or recorded_ns > now_ns + FUTURE_NS:
                    os.utime(path, ns=file_times(used, self._ttl), follow_symlinks=False)
            except FileNotFoundError:
                continue
            except PermissionError as error:
                if self.trust.trusted_group is None:
                    self._counters.fault("touch", error)
                    return
                denied = True
            except OSError as error:
                # A read-only folder still serves reads.
                self._counters.fault("touch", error)
                return
        if denied:
            self._touch_others(chain)

    def _touch_others(self, chain: Sequence[bytes]) -> None:
        """Record a use of a chain that includes files of other trusted users.

        The times of such files can only be set to the current time, which removes their expiry time.
        """
        for key in reversed(chain):
            try:
                os.utime(self._folder.path(key), follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._counters.fault("touch", error)
                return

    def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        # A new count of the folder, from here on, may no longer include the removed entries.
        counted = self._read_usage()
        removed = self._index.remove(list(reversed(keys)), lambda key: self._folder.remove(self._folder.path(key)))
        if removed:
            try:
                self._usage.release(sum(map(self._folder.cost, removed.values())), counted)
            except OSError as error:
                self._counters.fault("count", error)
        return {*removed}

    def discard(self, key: bytes, entry: FoundEntry) -> None:
        # Another process may have replaced it with a good entry.
        if self.trust.may_write and (data := self.peek(key)) is not None and memoryview(data) == memoryview(entry.data):
            self.delete([key])

    def list(self) -> Iterator[StoredEntry]:
        for key, status in self._folder.scan():
            yield StoredEntry(key, status.st_size, status.st_mtime_ns)

    def size(self) -> tuple[int, int]:
        if self._index.refresh() and (totals := self._index.totals()) is not None:
            return totals.entries, totals.size
        entries, size = self._sizes.total()
        if entries >= MIN_ENTRIES and self.trust.may_write:
            self._index.build()
        return entries, size

    def read_descriptions(self, listed_kind: str | None = None) -> Descriptions | None:
        """Return entry counts and total sizes grouped by description, or None if the index is out of date.

        The result also lists, one by one, the entries that have no description or whose description is of kind ``listed_kind``.
        """
        known = self._index.descriptions() if self.size()[0] and self._index.refresh() else None
        if known is None:
            return None
        missing = self._index.entries_without_description("" if listed_kind is None else f'%"kind": "{listed_kind}"%')
        return Descriptions(
            [(text, entries, size) for text, entries, size in known if text is not None],
            [StoredEntry(entry.key, entry.size, self._last_used_ns(entry)) for entry in missing],
        )

    def set_descriptions(self, descriptions: Sequence[tuple[bytes, str]]) -> None:
        """Store descriptions of entries, passed as (key, text) pairs."""
        for start in range(0, len(descriptions), _MAX_TEXTS_PER_TRANSACTION):
            self._index.set_descriptions(descriptions[start : start + _MAX_TEXTS_PER_TRANSACTION])

    def _last_used_ns(self, stored: StoredEntry) -> int:
        try:
            return os.stat(self._folder.path(stored.key), follow_symlinks=False).st_mtime_ns
        except OSError:
            return stored.used_ns

    def largest_budget(self) -> int:
        """Return the largest budget in effect, or the disk space in use if it is larger. Returns 0 if the folder has not been counted yet.
        """
        count = self._read_usage()
        return 0 if count is None else count.effective_budget(count.total)

    def pin(self, keys: Sequence[bytes], terms: PinTerms) -> bool:
        return self._pins.add(keys, terms)

    def unpin(self, keys: Sequence[bytes], owner: str | None = None) -> bool:
        return self._pins.remove(keys, owner)

    def pins(self) -> Sequence[Pin]:
        try:
            return self._pins.active()
        except OSError as error:
            self._counters.fault("pinned", error)
            return ()

    def pinned_keys(self) -> set[bytes]:
        return self._pins.keys()

    def forget_budgets(self) -> None:
        """Ignore the larger budgets of other stores. Such a budget takes effect again when its store puts an entry."""
        try:
            self._usage.forget_budgets()
        except OSError as error:
            self._counters.fault("collect", error)

    def take_lease(self, key: bytes, seconds: float) -> Lease | None:
        try:
            return take_file_lease(self._folder, key, seconds)
        except (OSError, KvpackError) as error:
            self._counters.fault("lease", error)
            return NoLease()

    def collect(self) -> None:
        if self.trust.may_write:
            self._expiry.run_all()
        self._evictor.collect()

    def close(self) -> None:
        self._index.close()

    def _restore_times(self) -> None:
        """Correct last-use times, which may have changed when the folder was copied.

        An ancestor's time must be later than its descendants' times.
        """
        for key, used in corrected_times(read_catalog(self)).items():
            with contextlib.suppress(OSError):
                os.utime(self._folder.path(key), ns=(used, used), follow_symlinks=False)

    def _is_expired(self, key: bytes, status: os.stat_result) -> bool:
        """Return True if an entry has expired and is not pinned."""
        if not has_expired(status):
            return False
        pinned = self._pins.keys()
        return key not in pinned

    def _renew(self, path: str, used_ns: int) -> bool:
        """Renew an expired entry that still exists. Returns False if it has been removed."""
        try:
            if has_expired(os.stat(path, follow_symlinks=False)):
                os.utime(path, ns=file_times(used_ns, self._ttl), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _read(self, key: bytes, *, lazy: bool = False) -> Data:
        """Return an entry's bytes, which are mapped if no other user can change them.

        With ``lazy``, bytes are read on access, and expired entries are returned too. Raises OSError if it cannot be read, and
        LimitExceeded if the entry is too large.
        """
        with self.trust.open_checked(self._folder.path(key)) as (descriptor, status):
            if not lazy and self._is_expired(key, status):
                raise FileNotFoundError(errno.ENOENT, "the entry has expired")
            size = status.st_size
            if not size:
                # An empty file cannot be mapped; it is refused like any truncated file.
                return b""
            check_size(f"entry {key.hex()}", size, self._form.max_bytes)
            if not self.is_private:
                return read_whole(descriptor, size)
            if lazy:
                return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY))
            return map_file(descriptor, size) if may_map() else read_whole(descriptor, size)

    def _kind(self, key: bytes) -> EntryKind | None:
        """Return the kind of the file at an entry's path, or None if there is no file."""
        try:
            data = self._read(key, lazy=True)
        except FileNotFoundError:
            return None
        except (Untrusted, NotAnEntry, LimitExceeded):
            return EntryKind.JUNK
        return probe_kind(key, data, self._form)

    def _remove_junk(self, path: str) -> None:
        """Remove a file at an entry's path that is not an entry. A folder is moved aside instead."""
        try:
            status = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISDIR(status.st_mode):
            # Another program created a folder at the entry's path. Do not remove its contents.
            os.rename(path, os.path.join(self._folder.unfinished_folder, f"{os.path.basename(path)}-{os.urandom(8).hex()}"))
        else:
            self.delete([bytes.fromhex(os.path.basename(path))])

    def _read_usage(self) -> UsageCount | None:
        try:
            return self._usage.read()
        except OSError as error:
            self._counters.fault("count", error)
            return None


class _FolderTotals(NamedTuple):
    """The number of entries in a folder, their total size in bytes, and the folder's modification time before it was listed."""

    changed_ns: int
    entries: int
    size: int


class FolderSizes:
    """Counts a store's entries, listing only the folders that have changed since the last count.

    Entries are never rewritten, and creating or removing one changes the modification time of its folder.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._listed: dict[str, _FolderTotals] = {}

    def total(self) -> tuple[int, int]:
        listed = [self._folder_totals(folder) for folder in ENTRY_FOLDERS]
        return sum(part.entries for part in listed), sum(part.size for part in listed)

    def _folder_totals(self, folder: str) -> _FolderTotals:
        now, path = time.time_ns(), os.path.join(self._folder.root, folder)
        try:
            changed = os.stat(path).st_mtime_ns
        except FileNotFoundError:
            return _FolderTotals(now, 0, 0)
        except OSError:
            # Listing it counts the fault.
            changed = now
        known = self._listed.get(path)
        if known is not None and known.changed_ns == changed:
            return known
        sizes = [status.st_size for _, status in self._folder.entries(folder)]
        result = _FolderTotals(changed, len(sizes), sum(sizes))
        if changed < now - SETTLED_NS:
            self._listed[path] = result
        return result
