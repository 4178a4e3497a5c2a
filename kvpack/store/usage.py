"""The bytes that a folder's entries take, including those being written: one number in a file, changed under the file's lock.

A writer takes bytes before it writes them, and only if they fit, so entries and unfinished files never exceed the number.
A new count of the folder replaces the number. The file is a hint: if it is missing, invalid or from before the machine
started, the folder is counted again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from kvpack.file.atomic import lock_now

from .reading import read_beginning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MAGIC = b"kvpusage"
_FIELDS = struct.Struct("<8s8s8sQQ")
_SUM_BYTES = 8
_SIZE = _FIELDS.size + _SUM_BYTES

WAIT_SECONDS = 1.0
"""How long a writer waits for a writer that is stopped while it holds the lock."""
_POLL_SECONDS = 0.0005


class Count(NamedTuple):
    """``total`` bytes; ``taken`` is the sum of all bytes ever taken; ``generation`` changes with every count of the folder."""

    generation: bytes
    total: int
    taken: int


class Usage:
    """The count in the file ``path``. Methods raise OSError, and BlockingIOError if the lock could not be taken in time.

    ``own`` is called with the descriptor of a newly created file.
    """

    def __init__(self, path: str, own: Callable[[int], None]) -> None:
        self._path, self._own = path, own

    def read(self) -> Count | None:
        """The count, or None if it is missing or invalid."""
        with self._opened() as descriptor:
            return None if descriptor is None else _read(descriptor)

    def take(self, size: int, fits: Callable[[int], bool], taken: Callable[[], None]) -> Count | None:
        """Add ``size``, and call ``taken`` while nobody else can count; return the new count, or None if there is none that ``fits``."""
        with self._opened(locked=True) as descriptor:
            count = None if descriptor is None else _read(descriptor)
            if descriptor is None or count is None or not fits(count.total + size):
                return None
            # A later count of the folder sees the file that ``taken`` made at length ``size``, or the bytes added here.
            taken()
            return _write(descriptor, Count(count.generation, count.total + size, count.taken + size))

    def give_back(self, size: int, counted: Count | None) -> None:
        """Subtract ``size`` bytes, removed since they were ``counted``; a later count does not include them."""
        with self._opened(locked=True) as descriptor:
            count = None if descriptor is None else _read(descriptor)
            if descriptor is None or count is None or counted is None or count.generation != counted.generation:
                return
            _write(descriptor, count._replace(total=max(0, count.total - size)))

    def replace(self, total: int, before: Count | None) -> None:
        """Replace the count by ``total``, counted since the count was ``before``, plus the bytes taken since then."""
        with self._opened(locked=True, make=True) as descriptor:
            assert descriptor is not None
            count = _read(descriptor)
            if count is None or before is None:
                taken, late = 0, 0
            else:
                taken, late = count.taken, max(0, count.taken - before.taken)
            _write(descriptor, Count(os.urandom(8), total + late, taken))

    @contextlib.contextmanager
    def _opened(self, *, locked: bool = False, make: bool = False) -> Iterator[int | None]:
        flags = os.O_RDWR if locked else os.O_RDONLY
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if make else 0)
        try:
            try:
                descriptor = os.open(self._path, flags, 0o600)
            except PermissionError:
                if not make:
                    raise
                # Created by another user, such as an administrator who ran kvpack once.
                os.unlink(self._path)
                descriptor = os.open(self._path, flags, 0o600)
        except (FileNotFoundError, PermissionError):
            if make:
                raise
            yield None
            return
        try:
            if make:
                self._own(descriptor)
            if locked:
                _wait_for_lock(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)


def _wait_for_lock(descriptor: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while lock_now(descriptor) is False:
        if time.monotonic() > deadline:
            raise BlockingIOError(f"the count of bytes was locked for {WAIT_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)


def _read(descriptor: int) -> Count | None:
    data = read_beginning(descriptor, _SIZE + 1)
    if len(data) != _SIZE or data[_FIELDS.size :] != xxhash.xxh3_64_digest(data[: _FIELDS.size]):
        return None
    magic, boot, generation, total, taken = _FIELDS.unpack(data[: _FIELDS.size])
    return Count(generation, total, taken) if (magic, boot) == (_MAGIC, _boot()) else None


def _write(descriptor: int, count: Count) -> Count:
    data = _FIELDS.pack(_MAGIC, _boot(), *count)
    data += xxhash.xxh3_64_digest(data)
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], done)
    if os.fstat(descriptor).st_size != _SIZE:
        os.ftruncate(descriptor, _SIZE)
    return count


@functools.cache
def _boot() -> bytes:
    """Identifies this boot of the machine: after a power loss a count may be older than the files that it counts."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return xxhash.xxh3_64_digest(file.read(64))
    except OSError:
        return bytes(8)
