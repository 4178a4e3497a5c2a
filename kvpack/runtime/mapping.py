"""Memory mapping of files, and queries of the page cache.

Unlike ``mmap.mmap``, ``map_file`` does not keep the file's descriptor open, because a long prefix consists of many files.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_READ = 22
"""Value of MADV_POPULATE_READ, which loads all pages in one call (Linux 5.14 and later)."""
_UNKNOWN_ADVICE = 22
"""The error (EINVAL) for advice that an older kernel does not know."""
_LOWEST_BITS = bytes(number & 1 for number in range(256))

_DEFAULT_MAX_MAPPINGS = 65_530
_MAPPING_DIVISOR = 4
"""The process's mapping limit is divided by this number. The rest is left for threads and allocators, which also need mappings."""
_MAPPED: set[int] = set()
"""Addresses of the mappings in use. A set can be changed without a lock. A finalizer could not wait for one."""


class _Mapping:
    """A mapping of a file. The file is unmapped when nothing references this object anymore."""

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size
        _MAPPED.add(address)

    def __del__(self, munmap: ctypes._NamedFuncPointer = _LIBC.munmap, mapped: set[int] = _MAPPED) -> None:
        mapped.discard(self._address)
        munmap(self._address, self._size)


@functools.cache
def max_mappings() -> int:
    """Return the number of files that kvpack may map at the same time, which depends on the system's limit per process."""
    try:
        with open("/proc/sys/vm/max_map_count", "rb") as file:
            return int(file.read(32)) // _MAPPING_DIVISOR
    except (OSError, ValueError):
        return _DEFAULT_MAX_MAPPINGS // _MAPPING_DIVISOR


def may_map() -> bool:
    """Return True if another file can be memory-mapped. If False, read the file instead."""
    return len(_MAPPED) < max_mappings()


def map_file(descriptor: int, size: int) -> memoryview:
    """Map the first ``size`` bytes (at least 1) of an open file into private memory. Writes to this memory do not change the file.

    All pages are mapped immediately, so that a disk error raises OSError now instead of causing a signal later.
    """
    address = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, 0)
    if address is None or address == _FAILED:
        raise _last_error()
    mapping = _Mapping(address, size)
    populate(address, size)
    array = (ctypes.c_ubyte * size).from_address(address)
    # The view keeps the array alive, and the array keeps the mapping alive.
    array.mapping = mapping  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def populate(address: int, size: int) -> None:
    """Load ``size`` bytes of a mapping into memory without blocking other threads. ``address`` must be page-aligned.

    One call is faster than loading page by page. Older kernels ignore it, and load pages on first use. Raises OSError if pages cannot be
    read.
    """
    if _LIBC.madvise(address, size, _MADV_POPULATE_READ) and ctypes.get_errno() != _UNKNOWN_ADVICE:
        raise _last_error()


def is_cold(descriptor: int, begin: int, end: int) -> bool:
    """Return True if the page cache has less than half of bytes ``[begin, end)`` of an open file. Returns False if that is unknown.

    Linux reports cached pages only for files that the user owns or may write to.
    """
    begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
    size = end - begin
    address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, begin)
    if address is None or address == _FAILED:
        return False
    try:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        # Only the lowest bit of each byte is defined.
        return not _LIBC.mincore(address, size, pages) and 2 * sum(bytes(pages).translate(_LOWEST_BITS)) < len(pages)
    finally:
        _LIBC.munmap(address, size)


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
