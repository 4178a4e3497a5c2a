"""Reading a file into memory of one's own, once: what its writer does to it afterwards changes nothing."""

from __future__ import annotations

import errno
import os


def read_whole(descriptor: int, size: int) -> bytearray:
    """The ``size`` bytes of an open file. Raises OSError when they are not all there, and MemoryError."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = os.preadv(descriptor, [view[done:]], done)
        if not count:
            raise OSError(errno.EIO, f"a file of {size} bytes was cut to {done} while it was read")
        done += count
    return data


def read_beginning(descriptor: int, most: int) -> bytes:
    """The first bytes of an open file, up to ``most``. Raises OSError."""
    data = b""
    while len(data) < most and (more := os.pread(descriptor, most - len(data), len(data))):
        data += more
    return data
