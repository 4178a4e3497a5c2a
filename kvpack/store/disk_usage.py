"""The disk space that a store's folder uses, including files being written. The count is stored in a file and changed under a file lock.

A writer reserves bytes before it writes them, and only if they fit, so the files never use more than the count. The folder is counted again
if the file is missing or invalid, or if this machine has not counted the folder since it booted. The result replaces the count. Machines
that share a folder share the count.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import xxhash

from kvpack.file.atomic import is_local_path, try_lock

from .trust import read_beginning

_MAGIC = b"kvpusag2"
_FIELDS = struct.Struct("<8s8sQQQQQ")
_ID_BYTES = _SUM_BYTES = 8
_MAX_RUNS = 32
"""Maximum number of boots to remember. A machine whose boot has been dropped counts the folder again."""
_MAX_BYTES = _FIELDS.size + _MAX_RUNS * _ID_BYTES + _SUM_BYTES

WAIT_SECONDS = 1.0
"""Maximum time in seconds to wait for the lock, which a suspended process may hold.

Only the requested sleeps are added up (see eviction.py).
"""
_POLL_SECONDS = 0.0005

LIMIT_SECONDS = 7 * 86_400
"""Time in seconds that a budget stays in effect after its writer's last put."""


class UsageCount(NamedTuple):
    """A count of the disk space in use.

    ``total`` is the number of bytes in use, and ``reserved`` is the sum of all bytes ever reserved. ``generation`` changes whenever the
    folder is counted. ``limit`` is the largest budget of the current writers, which ends at ``until``, in seconds since 1970. ``boots`` are
    the boot ids of machines that have counted the folder. ``node`` is the folder's inode, which differs in a copy of the folder. On a
    network file system, ``node`` is 0.
    """

    generation: bytes
    total: int
    reserved: int
    limit: int = 0
    until: int = 0
    node: int = 0
    boots: tuple[bytes, ...] = ()

    def effective_budget(self, budget: int) -> int:
        return max(budget, self.limit) if time.time() < self.until else budget

    def with_budget(self, budget: int | None) -> UsageCount:
        """Return the count after a writer with this budget has put an entry."""
        if budget is None or self.effective_budget(budget) > budget:
            return self
        return self._replace(limit=min(budget, 2**64 - 1), until=int(time.time()) + LIMIT_SECONDS)


class DiskUsage:
    """The file ``path``, which stores the count of a folder's disk space.

    ``assign_owner`` is called with the descriptor of a newly created file. Methods raise OSError. It is a BlockingIOError if another
    process holds the lock for too long.
    """

    def __init__(self, path: str, assign_owner: Callable[[int], None]) -> None:
        self._path, self._assign_owner = path, assign_owner
        self._local: bool | None = None

    def read(self) -> UsageCount | None:
        """Return the count, or None if the file is missing or invalid."""
        with self._open() as descriptor:
            return None if descriptor is None else _read(descriptor, self._node())

    def reserve(
        self, size: int, fits: Callable[[int], bool], on_reserve: Callable[[], None], budget: int | None = None
    ) -> UsageCount | None:
        """Reserve ``size`` more bytes and return the new count. If ``fits(new total)`` is False, return None instead.

        ``on_reserve`` is called under the lock, and must make the bytes visible when the folder is counted. ``budget`` is the writer's
        budget.
        """
        with self._open(locked=True) as descriptor:
            count = None if descriptor is None else _read(descriptor, self._node())
            if descriptor is None or count is None or not fits(count.total + size):
                return None
            # A later count of the folder includes either the file that ``on_reserve`` extended to ``size``, or the bytes added here.
            on_reserve()
            return _write(descriptor, count._replace(total=count.total + size, reserved=count.reserved + size).with_budget(budget))

    def release(self, size: int, counted: UsageCount | None) -> None:
        """Subtract ``size`` removed bytes from the count, unless the folder has been counted again since the count ``counted``."""
        with self._open(locked=True) as descriptor:
            count = None if descriptor is None else _read(descriptor, self._node())
            if descriptor is None or count is None or counted is None or count.generation != counted.generation:
                return
            _write(descriptor, count._replace(total=max(0, count.total - size)))

    def replace(self, total: int, before: UsageCount | None) -> None:
        """Replace the count after the folder was counted. The new count is ``total`` plus the bytes reserved since the count ``before``."""
        with self._open(locked=True, create=True) as descriptor:
            assert descriptor is not None
            count = _read(descriptor, self._node())
            reserved_since = 0 if count is None or before is None else max(0, count.reserved - before.reserved)
            # A count from an earlier boot is not trusted, but its budget and its boots are kept.
            previous = count or _read(descriptor, self._node(), any_boot=True) or UsageCount(b"", 0, 0)
            boots = (boot_id(), *(boot for boot in previous.boots if boot != boot_id()))[:_MAX_RUNS]
            reserved = previous.reserved if count else 0
            replacement = previous._replace(
                generation=os.urandom(8), total=total + reserved_since, reserved=reserved, node=self._node(), boots=boots
            )
            _write(descriptor, replacement)

    def is_copy(self) -> bool:
        """Return True if the folder may be a copy of another folder. The times of its entries may then be the times of copying."""
        with self._open() as descriptor:
            previous = None if descriptor is None else _read(descriptor, 0, any_boot=True)
        return previous is None or previous.node not in (0, self._node())

    def _node(self) -> int:
        """Return the folder's inode, or 0 on a network file system, where machines may see different inodes."""
        folder = os.path.dirname(self._path)
        if self._local is None:
            self._local = is_local_path(folder)
        return os.stat(folder).st_ino if self._local else 0

    def forget_budgets(self) -> None:
        """Ignore the budgets of all writers. A budget takes effect again when its writer puts an entry."""
        with self._open(locked=True) as descriptor:
            count = None if descriptor is None else _read(descriptor, self._node())
            if descriptor is not None and count is not None:
                _write(descriptor, count._replace(limit=0, until=0))

    @contextlib.contextmanager
    def _open(self, *, locked: bool = False, create: bool = False) -> Iterator[int | None]:
        flags = os.O_RDWR if locked else os.O_RDONLY
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
        try:
            try:
                descriptor = os.open(self._path, flags, 0o600)
            except PermissionError:
                if not create:
                    raise
                # Created by another user, such as an administrator who ran kvpack once.
                os.unlink(self._path)
                descriptor = os.open(self._path, flags, 0o600)
        except (FileNotFoundError, PermissionError):
            if create:
                raise
            yield None
            return
        try:
            if create:
                self._assign_owner(descriptor)
            if locked:
                _wait_for_lock(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)


def _wait_for_lock(descriptor: int) -> None:
    waited = 0.0
    while try_lock(descriptor) is False:
        if waited >= WAIT_SECONDS:
            raise BlockingIOError(f"another process has locked the byte count for {WAIT_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)
        waited += _POLL_SECONDS


def _read(descriptor: int, node: int, *, any_boot: bool = False) -> UsageCount | None:
    """Return the count in an open file if it is valid, from this boot, and for the folder with inode ``node``. Otherwise, return None.

    With ``any_boot``, the count may be from another boot or folder.
    """
    data = read_beginning(descriptor, _MAX_BYTES + 1)
    body = data[:-_SUM_BYTES]
    if not _FIELDS.size <= len(body) <= _MAX_BYTES - _SUM_BYTES or data[len(body) :] != xxhash.xxh3_64_digest(body):
        return None
    magic, generation, total, reserved, limit, until, folder_node = _FIELDS.unpack(body[: _FIELDS.size])
    boots = tuple(body[at : at + _ID_BYTES] for at in range(_FIELDS.size, len(body), _ID_BYTES))
    if magic != _MAGIC or not (any_boot or (boot_id() in boots and folder_node in (0, node))):
        return None
    return UsageCount(generation, total, reserved, limit, until, folder_node, boots)


def _write(descriptor: int, count: UsageCount) -> UsageCount:
    *fields, boots = count
    data = _FIELDS.pack(_MAGIC, *fields) + b"".join(boots)
    data += xxhash.xxh3_64_digest(data)
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], done)
    if os.fstat(descriptor).st_size != len(data):
        os.ftruncate(descriptor, len(data))
    return count


@functools.cache
def boot_id() -> bytes:
    """Return the id of the machine's current boot. A power loss may have undone writes, so counts from earlier boots are not used."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return xxhash.xxh3_64_digest(file.read(64))
    except OSError:
        return bytes(8)
