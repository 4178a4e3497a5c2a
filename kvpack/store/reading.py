"""Reads a folder's files into private memory, which later writes to the files do not affect."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from kvpack.runtime.reader import read_cold

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .counters import Counters


def read_whole(descriptor: int, size: int) -> bytearray | memoryview:
    """Return all ``size`` bytes of an open file. Raises MemoryError, or OSError if the file is shorter."""
    if (cold := read_cold(descriptor, size)) is not None:
        with contextlib.closing(cold):
            done = cold.wait(size)
        if done < size:
            raise _truncated_error(size, done)
        return cold.data
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = os.preadv(descriptor, [view[done:]], done)
        if not count:
            raise _truncated_error(size, done)
        done += count
    return data


def _truncated_error(size: int, done: int) -> OSError:
    return OSError(errno.EIO, f"a file of {size} bytes was truncated to {done} while it was read")


def read_beginning(descriptor: int, max_bytes: int) -> bytes:
    """Return the first ``max_bytes`` bytes of an open file, or all if it has fewer. Raises OSError."""
    data = b""
    while len(data) < max_bytes and (more := os.pread(descriptor, max_bytes - len(data), len(data))):
        data += more
    return data


def regular_files(folder: str, counters: Counters) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (name, status) of every regular file in a folder. System errors are counted as faults."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield entry.name, status
    except FileNotFoundError:
        return
    except OSError as error:
        counters.fault("list", error)
