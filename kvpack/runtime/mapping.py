"""Mapping a file without keeping it open: ``mmap.mmap`` holds a descriptor for as long as it lives, and a long prefix has many files."""

from __future__ import annotations

import ctypes
import mmap
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_READ = 22
"""Map every page now (Linux 5.14)."""
_UNKNOWN_ADVICE = 22
"""EINVAL, the answer of an older kernel."""


class _Mapping:
    """Pages of a file, unmapped with the last reference."""

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size

    def __del__(self, munmap: ctypes._NamedFuncPointer = _LIBC.munmap) -> None:
        munmap(self._address, self._size)


def map_file(descriptor: int, size: int) -> memoryview:
    """The first ``size`` bytes, at least one, of an open file, writable and private: writes never reach the file.

    Every page is mapped at once, so a page that the disk cannot read is an error here and not a signal later.
    Raises OSError.
    """
    address = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, 0)
    if address is None or address == _FAILED:
        raise _error()
    mapping = _Mapping(address, size)
    if _LIBC.madvise(address, size, _MADV_POPULATE_READ) and ctypes.get_errno() != _UNKNOWN_ADVICE:
        raise _error()
    array = (ctypes.c_ubyte * size).from_address(address)
    # A view keeps the array alive, and the array the mapping.
    array.mapping = mapping  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
