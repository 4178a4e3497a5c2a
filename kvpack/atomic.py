"""Writing a file so that at every moment its name holds the old bytes or the new, never a mixture (spec/container.md, Writing)."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from .formats.errors import WriteFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Progress = Callable[[int, int], None]

TEMPORARY_PREFIX = ".kvpack-"
TEMPORARY_SUFFIX = ".tmp"
"""What the name of an unfinished file begins and ends with: a crash may leave one behind, and whoever owns the folder may remove it."""

_PIECES_AT_ONCE = 64
_PIECE_BYTES = 4 * 2**20


def write_file(
    path: str | os.PathLike[str],
    pieces: Sequence[memoryview],
    *,
    durable: bool = False,
    progress: Progress | None = None,
    unfinished: str | None = None,
    complete: Callable[[int], None] | None = None,
) -> int:
    """Replace ``path`` by the bytes of ``pieces``, and return their number.

    They go to a new file of mode 0600 in the folder ``unfinished`` of the same file system (without one, in that of
    ``path``), which is renamed over ``path`` when complete. ``durable`` forces the bytes, then the rename, to the disk
    before returning. ``progress(done, total)`` counts bytes. ``complete(descriptor)`` is called when all are written, before
    the rename: what it raises ends the writing.
    Raises WriteFailed, which names the path and the system's reason, after removing the new file; the old one is as it was.
    """
    target = os.fsdecode(path)
    if "\0" in target:
        raise WriteFailed(f"{target!r}: could not be written: a path holds no zero byte")
    # A rename would put a file in the place of a device or a pipe, /dev/null as well.
    if _is_special(target):
        raise WriteFailed(f"{target}: could not be written: it is a device, a pipe or a socket, expected a file or nothing")
    folder = os.path.dirname(target) or "."
    temporary = os.path.join(unfinished or folder, f"{TEMPORARY_PREFIX}{os.getpid()}-{os.urandom(8).hex()}{TEMPORARY_SUFFIX}")
    try:
        # KV states are as private as the prompt that they hold.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise WriteFailed(_reason(target, error)) from None
    try:
        try:
            total = _write_all(descriptor, pieces, progress)
            if complete is not None:
                complete(descriptor)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise WriteFailed(_reason(target, error)) from None
        raise
    if durable:
        try:
            sync_folder(folder)
        except OSError as error:
            raise WriteFailed(f"{target}: written, but its folder could not be synced: {error.strerror or error}") from None
    return total


def _write_all(descriptor: int, pieces: Sequence[memoryview], progress: Progress | None) -> int:
    """Write ``pieces``, many in one call: a call for each of many small ones takes twice the time."""
    waiting = deque(piece[at : at + _PIECE_BYTES] for piece in pieces for at in range(0, len(piece), _PIECE_BYTES))
    total, done = sum(map(len, waiting)), 0
    while waiting:
        written = os.writev(descriptor, list(islice(waiting, _PIECES_AT_ONCE)))
        done += written
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.popleft())
        if written:
            waiting[0] = waiting[0][written:]
        if progress is not None:
            progress(done, total)
    return total


def _is_special(target: str) -> bool:
    try:
        mode = os.stat(target).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def sync_folder(folder: str) -> None:
    """Force the names in a folder to the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(target: str, error: OSError) -> str:
    return f"{target}: could not be written: {error.strerror or error}"
