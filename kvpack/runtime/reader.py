"""Multithreaded reading of files, with or without the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_int, c_int64, c_void_p
from typing import Self

from .mapping import is_cold
from .threads import in_parallel

MIN_DIRECT_BYTES = 2**24
"""Minimum size, in bytes, of a file to read without the page cache. For smaller files, the page cache is as fast."""
_PIECE_BYTES, _THREADS = 2**21, 8
"""Size in bytes of one direct read, and the number of threads. The threads mostly wait for the disk."""
_MILLISECONDS = 100
"""Maximum duration of one wait, in milliseconds. Between waits, Python can run signal handlers."""


BLOCK = 4096
"""Alignment of direct reads, in bytes, in the file and in memory. The rare disks with larger blocks are read through the page cache."""


def open_direct(descriptor: int) -> int | None:
    """Open the same file again for direct reads, which bypass the page cache. Returns the new descriptor.

    Returns None if the file system, such as tmpfs, does not support direct reads.
    """
    try:
        # Open it via /proc, because the file may have been renamed or removed.
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except (OSError, AttributeError):
        return None
    try:
        with mmap.mmap(-1, BLOCK) as block:
            os.preadv(direct, [block], 0)
    except OSError:
        os.close(direct)
        return None
    return direct


class ColdRead:
    """Reads the first ``size`` bytes of an open file into ``memory``, in order, with several threads. ``data`` is a view of these bytes.

    Direct reads use ``direct``, a descriptor from ``open_direct``. If one fails, ``descriptor`` is used. ``close`` waits for running reads
    and closes ``direct``. Until then, ``descriptor`` must stay open.
    """

    def __init__(self, descriptor: int, size: int, direct: int, memory: memoryview) -> None:
        self._descriptor, self._direct, self._size, self._memory = descriptor, direct, size, memory
        self.data = memory[:size]
        pieces = range(0, len(self._memory), _PIECE_BYTES)
        # All reads are queued, so that they continue while the caller checks bytes that have arrived.
        self._ends = in_parallel(self._read, pieces, _THREADS, len(pieces))
        self._reached, self._is_short = 0, False

    def _read(self, begin: int) -> int:
        end, source = min(begin + _PIECE_BYTES, len(self._memory)), self._direct
        while begin < min(end, self._size):
            try:
                count = os.preadv(source, [self._memory[begin:end]], begin)
            except OSError:
                if source == self._descriptor:
                    raise
                count = 0
            if not count and source == self._descriptor:
                break
            # The page cache may have data that direct reads do not return, such as the last block of a file that has shrunk.
            begin, source = begin + count, source if count else self._descriptor
        return min(begin, self._size)

    def wait(self, end: int) -> int:
        """Wait for the bytes before ``end``. Returns the end of the bytes that have arrived.

        It is less than ``end`` if the file is shorter.
        """
        while self._reached < end and not self._is_short:
            expected = min(self._reached + _PIECE_BYTES, self._size)
            self._reached = next(self._ends)
            self._is_short = self._reached < expected
        return self._reached

    def close(self) -> None:
        """Wait for running reads, cancel reads that have not started, and close the direct descriptor."""
        self._ends.close()
        direct, self._direct = self._direct, -1
        if direct >= 0:
            os.close(direct)

    __del__ = close


def read_cold(descriptor: int, size: int) -> ColdRead | None:
    """Start reading the first ``size`` bytes of an open file into new memory, bypassing the page cache.

    Returns None if the page cache should be used instead: the file is small, at least half of it is cached, or direct reads fail.
    """
    if size < MIN_DIRECT_BYTES or not is_cold(descriptor, 0, size) or (direct := open_direct(descriptor)) is None:
        return None
    try:
        memory = new_memory(size)
    except OSError:
        os.close(direct)
        return None
    return ColdRead(descriptor, size, direct, memory)


def new_memory(size: int) -> memoryview:
    """Return at least ``size`` bytes of zeroed memory for direct reads. Raises OSError if there is not enough memory."""
    return memoryview(mmap.mmap(-1, -(-size // BLOCK) * BLOCK))


class Read(Structure):
    _fields_ = (("offset", c_int64), ("bytes", c_int64), ("data", c_void_p), ("ended", c_int64), ("failed", c_int64))


def declare(library: ctypes.CDLL) -> None:
    """Declare the types of the reader's functions in the compiled library."""
    library.kvpack_reader_start.restype = c_void_p
    library.kvpack_reader_start.argtypes = c_int, POINTER(Read), c_int64, c_int64, c_int64, c_int64
    library.kvpack_reader_allow.restype, library.kvpack_reader_allow.argtypes = None, (c_void_p, c_int64)
    library.kvpack_reader_wait.restype, library.kvpack_reader_wait.argtypes = c_int64, (c_void_p, c_int64, c_int64)
    library.kvpack_reader_stop.restype, library.kvpack_reader_stop.argtypes = None, (c_void_p,)


class Reader:
    """Reads ranges of an open file in order, with C threads.

    Each read is (offset, number of bytes, target address). Threads split each read into pieces of at most ``piece_bytes``. With ``direct``,
    a descriptor from ``open_direct``, reads bypass the page cache. Reads and pieces must then begin at multiples of ``BLOCK`` in the file
    and in memory, and whole blocks are written.

    No read starts until ``allow`` is called. Use the reader as a context manager. Until it exits, the file's descriptor must stay open.
    ``memory`` contains the target addresses, and is kept alive. The reader closes ``direct``. Raises MemoryError if no thread can be
    started.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        descriptor: int,
        reads: Sequence[tuple[int, int, int]],
        memory: object,
        piece_bytes: int,
        threads: int,
        direct: int | None = None,
    ) -> None:
        self._library, self._reader, self._memory, self._direct = library, None, memory, direct
        self._reads = (Read * len(reads))(*(Read(*read) for read in reads))
        source, block = (descriptor, 1) if direct is None else (direct, BLOCK)
        self._reader = library.kvpack_reader_start(source, self._reads, len(reads), piece_bytes, threads, block)
        if not self._reader:
            raise MemoryError("cannot start a thread to read the file: not enough memory")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        reader, self._reader = self._reader, None
        if reader:
            self._library.kvpack_reader_stop(reader)
        direct, self._direct = self._direct, None
        if direct is not None:
            os.close(direct)

    __del__ = _stop

    def allow(self, stop: int) -> None:
        """Allow all reads with an index below ``stop`` to start."""
        self._library.kvpack_reader_allow(self._reader, stop)

    def wait(self, read_index: int) -> bool:
        """Wait for all reads up to index ``read_index``. Returns True if read ``read_index`` succeeded."""
        while not self._library.kvpack_reader_wait(self._reader, read_index + 1, _MILLISECONDS):
            continue
        return not self._reads[read_index].failed
