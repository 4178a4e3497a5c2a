"""Mapped files and the page cache.

``map_file`` maps a file without keeping it open: an ``mmap.mmap`` keeps a descriptor open as long as it lives, and a long prefix has many
files.
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
"""Map every page now (Linux 5.14)."""
_UNKNOWN_ADVICE = 22
"""EINVAL, the answer of an older kernel."""
_LOWEST_BITS = bytes(number & 1 for number in range(256))

_USUAL_MAPPINGS = 65_530
_SHARE = 4
"""A process has this many times the mappings that are made here: beyond its limit, its threads and allocators fail too."""
_MAPPED: set[int] = set()
"""The addresses of the mappings that are in use. Changes of a set need no lock, which a finalizer could not wait for."""


class _Mapping:
    """Pages of a file, unmapped with the last reference."""

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size
        _MAPPED.add(address)

    def __del__(self, munmap: ctypes._NamedFuncPointer = _LIBC.munmap, mapped: set[int] = _MAPPED) -> None:
        mapped.discard(self._address)
        munmap(self._address, self._size)


@functools.cache
def max_mappings() -> int:
    """Return the number of files that may be mapped at a time, a share of the system's limit for the process."""
    try:
        with open("/proc/sys/vm/max_map_count", "rb") as file:
            return int(file.read(32)) // _SHARE
    except (OSError, ValueError):
        return _USUAL_MAPPINGS // _SHARE


def may_map() -> bool:
    """Return True if another file may be mapped; otherwise it must be read."""
    return len(_MAPPED) < max_mappings()


def map_file(descriptor: int, size: int) -> memoryview:
    """Map the first ``size`` bytes, at least one, of an open file, writable and private: writes never reach the file.

    Every page is mapped at once, so a page that the disk cannot read is an error here and not a signal later. Raises OSError.
    """
    address = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, 0)
    if address is None or address == _FAILED:
        raise _error()
    mapping = _Mapping(address, size)
    populate(address, size)
    array = (ctypes.c_ubyte * size).from_address(address)
    # A view keeps the array alive, and the array the mapping.
    array.mapping = mapping  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def populate(address: int, size: int) -> None:
    """Map ``size`` bytes of a mapping from ``address``, a page's first byte, now, while other threads run.

    The disk is then read faster than page by page. Older kernels map pages on first use. Raises OSError if they cannot be read.
    """
    if _LIBC.madvise(address, size, _MADV_POPULATE_READ) and ctypes.get_errno() != _UNKNOWN_ADVICE:
        raise _error()


def is_cold(descriptor: int, begin: int, end: int) -> bool:
    """Return True if less than half of bytes ``[begin, end)`` of an open file is in the page cache; False if that is unknown.

    Linux reports this only for files that this user owns or may write.
    """
    begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
    size = end - begin
    address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, begin)
    if address is None or address == _FAILED:
        return False
    try:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        # Only the lowest bit of each byte says something.
        return not _LIBC.mincore(address, size, pages) and 2 * sum(bytes(pages).translate(_LOWEST_BITS)) < len(pages)
    finally:
        _LIBC.munmap(address, size)


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
