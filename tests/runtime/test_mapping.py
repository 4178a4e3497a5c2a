"""Tests of detecting cold files, and of mapping pages before they are used."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from typing import TYPE_CHECKING

import pytest

from kvpack.runtime.mapping import is_cold, populate

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the contents of the page cache")
PAGES = 64


def cached(descriptor: int, begin: int) -> bool:
    """Return True if a nonblocking read shows that a page is in memory."""
    try:
        return bool(os.preadv(descriptor, [bytearray(1)], begin, os.RWF_NOWAIT))
    except BlockingIOError:
        return False


def test_a_file_is_cold_until_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(PAGES * mmap.PAGESIZE))
    descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    assert not is_cold(descriptor, 0, PAGES * mmap.PAGESIZE)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    # Asked first: the read that does not wait begins one that does. A tmpfs has nowhere to drop files to.
    found = is_cold(descriptor, 5, PAGES * mmap.PAGESIZE)
    assert found == (not cached(descriptor, 0))
    os.pread(descriptor, PAGES * mmap.PAGESIZE, 0)
    assert not is_cold(descriptor, 5, PAGES * mmap.PAGESIZE)
    # Behind the end, and of no file at all.
    assert not is_cold(descriptor, 0, 0)
    os.close(descriptor)
    assert not is_cold(descriptor, 0, 10)


def test_pages_beyond_the_end_of_a_file_raise_an_error_instead_of_a_signal(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(4 * mmap.PAGESIZE))
    with (tmp_path / "a").open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
        populate(address, 4 * mmap.PAGESIZE)
        file.truncate(mmap.PAGESIZE)
        populate(address, mmap.PAGESIZE)
        with pytest.raises(OSError, match="Bad address") as raised:
            populate(address, 4 * mmap.PAGESIZE)
        assert raised.value.errno == errno.EFAULT
