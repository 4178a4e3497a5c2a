"""How many bytes a folder's entries take, known to every process without a lock: a file of changes that all append to.

A writer adds the size of an entry when its unfinished file is complete, before the entry gets its name, so the sum is
not below what is stored. Every process reads what is new since it last looked. Whoever counts the folder afresh puts the
count in place of the changes. The file is a hint: one that is missing or makes no sense is replaced likewise.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvpack.atomic import write_file

from .locks import Lock

if TYPE_CHECKING:
    from collections.abc import Callable

_MAGIC = b"kvpu"
"""What the file begins with; 4 random bytes follow, which tell one file from the next, then the changes."""
_RECORD = 8
"""Bytes of a change, a signed integer, little-endian, and of what is before them.

An append of so few bytes is never torn on a local file system.
"""
_READ_AT_ONCE = 1 << 20


class Usage:
    """The sum of the changes in the file ``path``. Methods raise OSError, and FileNotFoundError where there is no file."""

    def __init__(self, path: str, unfinished: str) -> None:
        self._path, self._unfinished = path, unfinished
        self._beginning = b""
        self._read_to = _RECORD
        self._sum = 0
        self._lock = Lock()

    def add(self, change: int) -> int | None:
        """Append a change and return the new sum, or None when the file makes no sense."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(descriptor, _record(change))
                # Appended to a file that was replaced meanwhile, it may be lost; added twice, it is soon counted right.
                if os.stat(self._path).st_ino == os.fstat(descriptor).st_ino:
                    return self._summed(descriptor)
            finally:
                os.close(descriptor)

    def total(self) -> int | None:
        """The sum, or None when the file makes no sense."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._summed(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, count: Callable[[], int]) -> int:
        """Put the bytes that ``count()`` finds, and what was added since it began, in the place of all changes."""
        try:
            replaced = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return self._write(count())
        try:
            start = os.fstat(replaced).st_size
            counted = count()
            late = _changes(replaced, start)
            total = self._write(counted + _added(late))
            # What came between the last look and the new file.
            last = _added(_changes(replaced, start + _RECORD * len(late)))
            if last:
                self.add(last)
            return total + last
        finally:
            os.close(replaced)

    def _write(self, total: int) -> int:
        write_file(self._path, [memoryview(_MAGIC + os.urandom(_RECORD - len(_MAGIC)) + _record(total))], unfinished=self._unfinished)
        return total

    def _summed(self, descriptor: int) -> int | None:
        with self._lock:
            beginning = os.pread(descriptor, _RECORD, 0)
            if beginning != self._beginning:
                self._beginning, self._read_to, self._sum = beginning, _RECORD, 0
            changes = _changes(descriptor, self._read_to)
            self._sum += sum(changes)
            self._read_to += _RECORD * len(changes)
            whole = beginning.startswith(_MAGIC) and os.fstat(descriptor).st_size % _RECORD == 0
            return self._sum if whole and self._sum >= 0 else None


def _record(change: int) -> bytes:
    return change.to_bytes(_RECORD, "little", signed=True)


def _added(changes: list[int]) -> int:
    return sum(max(0, change) for change in changes)


def _changes(descriptor: int, start: int) -> list[int]:
    """The changes from byte ``start`` of an open file on; a last one that is not whole is left out."""
    changes: list[int] = []
    while True:
        data = os.pread(descriptor, _READ_AT_ONCE, start)
        whole = len(data) - len(data) % _RECORD
        changes += (int.from_bytes(data[at : at + _RECORD], "little", signed=True) for at in range(0, whole, _RECORD))
        start += whole
        if len(data) < _READ_AT_ONCE:
            return changes
