"""The directory backend: one immutable file an entry, which any number of processes read and write without a lock.

    <root>/3/f/3f...e1       an entry, named by the hexadecimal digits of its key
    <root>/unfinished/       what writers have not finished
    <root>/pins/             one file a pinned chain: its keys
    <root>/usage, lock       what usage.py counts, and the evictor's lock

A name appears by rename when all its bytes are there, and goes by unlink: who has mapped the file keeps it. The time of an
entry's last use is its modification time, an ancestor's always later than that of what follows it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from typing import TYPE_CHECKING

from kvpack.atomic import TEMPORARY_PREFIX, sync_folder, write_file
from kvpack.formats.errors import InvalidParameter, KvpackError, LimitExceeded

from .backend import OneTier, Stored
from .eviction import FUTURE_NS, Evictor, NoRoom
from .forms import PLAIN, check_size
from .mapping import map_file
from .pins import Pins
from .usage import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .backend import Data, Found
    from .counters import Counters
    from .forms import Form

ENTRY_FOLDERS = [f"{first:x}/{second:x}" for first in range(16) for second in range(16)]
UNFINISHED = "unfinished"


class Directory(OneTier):
    """A folder of entries. ``max_bytes`` is a hard budget of their bytes, ``min_free`` the bytes of disk left to others.

    Nothing is made before the first entry is put. ``durable`` forces each entry to the disk before ``put`` returns.
    Raises InvalidParameter when others may write to the folder, or it is no folder.
    """

    private = True
    puts_at_once = 1

    def __init__(
        self,
        root: str | os.PathLike[str],
        counters: Counters,
        form: Form = PLAIN,
        *,
        max_bytes: int | None = None,
        min_free: int = 0,
        durable: bool = False,
    ) -> None:
        self.root = os.path.abspath(os.path.expanduser(os.fsdecode(root)))
        self.durable = durable
        self._counters, self._form = counters, form
        self._unfinished = os.path.join(self.root, UNFINISHED)
        self._pins = Pins(self, os.path.join(self.root, "pins"), self._unfinished, counters)
        self._usage = Usage(os.path.join(self.root, "usage"), self._unfinished)
        self._evictor = Evictor(self, self._usage, counters, max_bytes, min_free)
        self._check_owner()
        self._evictor.sweep()

    def present(self, keys: Sequence[bytes]) -> int:
        for number, key in enumerate(keys):
            if not os.access(self.path(key), os.R_OK):
                return number
        return len(keys)

    def get(self, keys: Sequence[bytes]) -> list[Data]:
        found: list[Data] = []
        for key in keys:
            try:
                data = self._mapped(self.path(key))
            except (OSError, ValueError, MemoryError, LimitExceeded) as error:
                if not isinstance(error, FileNotFoundError):
                    self._counters.fault("get", error)
                break
            found.append(data)
        return found

    def peek(self, key: bytes, *, front: bool = False) -> Data | None:
        try:
            with open(self.path(key), "rb") as file:
                check_size(file.name, os.fstat(file.fileno()).st_size, self._form.max_bytes)
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except FileNotFoundError:
            return None
        except LimitExceeded as error:
            self._counters.fault("get", error)
            return None
        except (OSError, ValueError) as error:
            self._counters.fault("get", error)
            # What cannot be mapped is empty.
            return b""

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        path, size = self.path(chain[-1]), sum(map(len, pieces))
        try:
            if os.access(path, os.F_OK):
                return True
            self.make_folders(os.path.dirname(path))
            used = now_ns - len(chain) + 1

            def complete(descriptor: int) -> None:
                os.utime(descriptor, ns=(used, used))
                self._evictor.reserve(size, chain)

            write_file(path, pieces, durable=self.durable, unfinished=self._unfinished, complete=complete)
        except NoRoom:
            self._counters.add("refused_chunks")
            return False
        except (OSError, KvpackError) as error:
            self._counters.fault("put", error)
            return False
        self._counters.add("saved_chunks")
        self._counters.add("saved_bytes", size)
        return True

    def touch(self, chain: Sequence[bytes], now_ns: int) -> None:
        # From the first on: at every moment an ancestor's time is the later one.
        for depth, key in enumerate(chain):
            path, used = self.path(key), now_ns - depth
            try:
                noted = os.stat(path).st_mtime_ns
                if noted < used or noted > now_ns + FUTURE_NS:
                    os.utime(path, ns=(used, used))
            except FileNotFoundError:
                continue
            except OSError as error:
                # A folder that may only be read still serves.
                self._counters.fault("touch", error)
                return

    def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        removed = set()
        for key in reversed(keys):
            size = self.remove(self.path(key))
            if size is not None:
                removed.add(key)
                self._count(-size)
        return removed

    def discard(self, key: bytes, found: Found) -> None:
        self.delete([key])

    def remove(self, path: str) -> int | None:
        """Unlink an entry and return the bytes that it had, or None."""
        try:
            size = os.stat(path).st_size
            os.unlink(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._counters.fault("delete", error)
            return None
        return size

    def list(self) -> Iterator[Stored]:
        for name, status in self.scan():
            with contextlib.suppress(ValueError):
                yield Stored(bytes.fromhex(name), status.st_size, status.st_mtime_ns)

    def scan(self) -> Iterator[tuple[str, os.stat_result]]:
        """(name, status) of every entry."""
        for folder in ENTRY_FOLDERS:
            yield from self.files(os.path.join(self.root, folder))

    def unfinished(self) -> Iterator[tuple[str, os.stat_result]]:
        """(name, status) of every unfinished file."""
        for name, status in self.files(self._unfinished):
            if name.startswith(TEMPORARY_PREFIX):
                yield name, status

    def size(self) -> tuple[int, int]:
        sizes = [entry.size for entry in self.list()]
        return len(sizes), sum(sizes)

    def pin(self, keys: Sequence[bytes]) -> bool:
        return self._pins.add(keys)

    def unpin(self, keys: Sequence[bytes]) -> bool:
        return self._pins.remove(keys)

    def pinned(self) -> set[bytes]:
        return self._pins.keys()

    def collect(self) -> None:
        self._evictor.collect()

    def close(self) -> None:
        """Nothing is open between calls."""

    def path(self, key: bytes) -> str:
        """Where the entry ``key`` is."""
        name = key.hex()
        return f"{self.root}/{name[0]}/{name[1]}/{name}"

    def _mapped(self, path: str) -> Data:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path} is no regular file")
            check_size(path, status.st_size, self._form.max_bytes)
            if not status.st_size:
                # It cannot be mapped, and is refused as any file that is cut short.
                return b""
            return map_file(descriptor, status.st_size)
        finally:
            os.close(descriptor)

    def files(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """(name, status) of every regular file in a folder."""
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            yield entry.name, status
        except FileNotFoundError:
            return
        except OSError as error:
            self._counters.fault("list", error)

    def _count(self, change: int) -> None:
        try:
            self._usage.add(change)
        except FileNotFoundError:
            return
        except OSError as error:
            self._counters.fault("count", error)

    def make_folders(self, *folders: str) -> None:
        """Make ``folders`` and that of unfinished files, where they are not there. Raises OSError."""
        for folder in (self._unfinished, *folders):
            if not os.path.isdir(folder):
                self._make_folder(folder)

    def _make_folder(self, folder: str) -> None:
        parent = os.path.dirname(folder)
        if not os.path.isdir(parent):
            self._make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        if self.durable:
            sync_folder(parent)

    def _check_owner(self) -> None:
        try:
            status = os.stat(self.root)
        except OSError:
            return
        if not stat.S_ISDIR(status.st_mode):
            raise InvalidParameter(f"{self.root}: is no folder, a store is one")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InvalidParameter(
                f"{self.root}: has the mode {stat.S_IMODE(status.st_mode):04o}, expected a folder that neither group nor others may write: "
                "whoever writes an entry decides what models read"
            )
