"""Sources of an open file's bytes: memory, or a descriptor that is read piece by piece and mapped when a tensor is requested."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from typing import TYPE_CHECKING, Protocol

from kvpack.formats.errors import MissingFile, Truncated
from kvpack.runtime.mapping import populate
from kvpack.runtime.threads import in_parallel

if TYPE_CHECKING:
    from collections.abc import Generator

    Buffer = bytes | bytearray | memoryview | mmap.mmap


PIECE_BYTES = 1 << 22
"""Bytes that a thread maps at a time."""
THREADS = 16
"""Maximum number of threads that map at a time: they wait for the disk, which needs many requests to be busy."""


class Source(Protocol):
    """The bytes of a file."""

    size: int

    @property
    def descriptor(self) -> int | None:
        """The descriptor of an open file; None for other bytes."""
        ...

    def read(self, begin: int, end: int, into: bytearray | None = None) -> memoryview:
        """Read bytes ``[begin, end)`` of the file as it is now. Raises Truncated, MissingFile.

        The copy goes ``into`` memory that the caller reuses, if it is given and large enough.
        """
        ...

    def read_into(self, begin: int, memory: memoryview) -> None:
        """Read the bytes from ``begin`` on as they are now into all of ``memory``. Raises Truncated, MissingFile."""
        ...

    def view(self, begin: int, end: int) -> memoryview:
        """Bytes ``[begin, end)`` as they are in memory or in the mapped file. Raises Truncated, MissingFile."""
        ...

    def ahead(self, begin: int, end: int) -> Generator[int, None, None]:
        """Bring bytes ``[begin, end)`` into memory for views, in order, and give the end of what is there so far. Raises as ``view``."""
        ...

    def close(self) -> None:
        """Release the file; views stay valid."""
        ...


class InMemory:
    """A file in memory; all results are views of it."""

    descriptor = None

    def __init__(self, data: Buffer) -> None:
        self._view = memoryview(data)
        self.size = len(data)

    def read(self, begin: int, end: int, into: bytearray | None = None) -> memoryview:
        """A view."""
        return self._view[begin:end]

    def read_into(self, begin: int, memory: memoryview) -> None:
        """A copy."""
        memory[:] = self._view[begin : begin + len(memory)]

    def view(self, begin: int, end: int) -> memoryview:
        """A view."""
        return self._view[begin:end]

    def ahead(self, begin: int, end: int) -> Generator[int, None, None]:
        """They are in memory."""
        yield end

    def close(self) -> None:
        """Release the view."""
        self._view.release()


class OnDisk:
    """An open file: ``read`` copies its bytes, ``view`` returns a view of a private mapping, made on first use.

    ``read`` raises Truncated if the file was cut meanwhile. Touching the mapping of such a file ends the process.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapping: InMemory | None = None
        self.size = os.fstat(descriptor).st_size

    @property
    def descriptor(self) -> int:
        """The descriptor."""
        self._check_open()
        return self._descriptor

    def read(self, begin: int, end: int, into: bytearray | None = None) -> memoryview:
        """A copy."""
        size = end - begin
        data = memoryview(bytearray(size) if into is None or len(into) < size else into)[:size]
        self.read_into(begin, data)
        return data

    def read_into(self, begin: int, memory: memoryview) -> None:
        """A copy."""
        self._check_open()
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self._descriptor, [memory[done:]], begin + done)
            except OSError as error:
                raise _failed("read", error) from None
            if not count:
                raise self._cut(begin + done)
            done += count

    def view(self, begin: int, end: int) -> memoryview:
        """A view of the mapping: writable and private."""
        self._check_open()
        if self._mapping is None:
            try:
                now = os.fstat(self._descriptor).st_size
                # A private mapping never changes the file.
                made = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_COPY) if now >= self.size else None
            except (OSError, ValueError) as error:
                raise _failed("mapped", error, "; kvpack.load(path, copy=True) reads a file into memory instead") from None
            if made is None:
                raise self._cut(now)
            self._mapping = InMemory(made)
        return self._mapping.view(begin, end)

    def ahead(self, begin: int, end: int) -> Generator[int, None, None]:
        """Threads map the pages of the next pieces meanwhile: views alone make the disk wait at every page."""
        page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        memory = self.view(page, end)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) if end > page else 0

        def mapped(first: int) -> int:
            last = min(first + PIECE_BYTES, end - page)
            populate(address + first, last - first)
            return page + last

        pieces = range(0, end - page, PIECE_BYTES)
        try:
            with contextlib.closing(in_parallel(mapped, pieces, THREADS)) as done:
                yield from done
        except OSError as error:
            now = os.fstat(self._descriptor).st_size
            raise (self._cut(now) if now < end else _failed("read", error)) from None

    def close(self) -> None:
        """Close the descriptor."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if self._mapping is not None:
            self._mapping.close()

    __del__ = close

    def _check_open(self) -> None:
        if self._descriptor < 0:
            raise ValueError("the file was released")

    def _cut(self, size: int) -> Truncated:
        return Truncated(f"had {self.size} bytes when it was opened, and ended at byte {size} when that was read: it was cut meanwhile")


def _failed(what: str, error: OSError | ValueError, instead: str = "") -> MissingFile:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return MissingFile(f"could not be {what}: {reason}{instead}", number=getattr(error, "errno", None) or errno.EIO)
