"""Atomic writes: at every moment a file's name holds the old bytes or the new, never a mixture (spec/container.md, Writing)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from kvpack.formats.errors import WriteFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Progress = Callable[[int, int], None]

TEMPORARY_PREFIX = ".kvpack-"
TEMPORARY_SUFFIX = ".tmp"
"""The prefix and suffix of an unfinished file's name: a crash may leave one behind, which the folder's owner may remove."""
LOCKED_SUFFIX = "-locked.tmp"
"""The suffix of an unfinished file on which its writer holds an exclusive ``flock``: without a lock, the writer is gone."""

_ATTEMPTS = 100
"""How often a writer creates a file again after it was swept before the writer held the lock."""
_PIECES_AT_ONCE = 64
_PIECE_BYTES = 4 * 2**20
_RESERVED_BYTES = 2**20
"""Files of at least this size get their blocks before their bytes."""
_FALLOCATE = getattr(ctypes.CDLL(None), "fallocate64", None)
"""The system's own, where there is one: ``os.posix_fallocate`` would write zeros where a file system cannot reserve blocks."""


def write_file(
    path: str | os.PathLike[str],
    pieces: Sequence[memoryview],
    *,
    durable: bool = False,
    progress: Progress | None = None,
    unfinished: str | None = None,
    begin: Callable[[int], None] | None = None,
    complete: Callable[[int], None] | None = None,
) -> int:
    """Replace ``path`` with the bytes of ``pieces`` and return their number, as ``replace_file`` does.

    ``progress(done, total)`` counts bytes. ``begin(descriptor)`` is called before the first byte is written and
    ``complete(descriptor)`` after the last, before the rename: an exception from either ends the writing.
    """

    # A file system may write the bytes of a file that replaces another before the rename, unless its blocks were reserved.
    new = not os.path.lexists(path)

    def write(descriptor: int) -> int:
        if begin is not None:
            begin(descriptor)
        if new:
            _reserve(descriptor, sum(map(len, pieces)))
        total = _write_all(descriptor, pieces, progress)
        if complete is not None:
            complete(descriptor)
        return total

    return replace_file(path, write, durable=durable, unfinished=unfinished)


def replace_file(path: str | os.PathLike[str], write: Callable[[int], int], *, durable: bool = False, unfinished: str | None = None) -> int:
    """Replace ``path`` with the file that ``write(descriptor)`` makes of a new empty one, and return what it returns.

    The bytes go to a new file of mode 0600, which is renamed over ``path`` when complete. The new file is in the folder of
    ``path``, or in the folder ``unfinished`` of the same file system: then it is locked until the rename, so that ``sweep`` can
    tell it from the file of a dead writer. ``durable`` forces the bytes, then the rename, to the disk before returning.
    Raises WriteFailed, which names the path and the system's reason, after removing the new file; the old file is untouched.
    """
    target = os.fsdecode(path)
    if "\0" in target:
        raise WriteFailed(f"{target!r}: could not be written: a path cannot contain a zero byte")
    # A rename would replace a device or a pipe, even /dev/null, with a file.
    if _is_special(target):
        raise WriteFailed(f"{target}: could not be written: it is a device, a pipe or a socket, expected a file or nothing")
    folder = os.path.dirname(target) or "."
    held = -1
    try:
        descriptor, temporary = _create(folder) if unfinished is None else _create_locked(unfinished)
    except OSError as error:
        raise WriteFailed(_reason(target, error)) from None
    try:
        try:
            total = write(descriptor)
            if durable:
                os.fsync(descriptor)
            if unfinished is not None:
                # Closing reports failed writes, but must not release the lock before the rename.
                held = os.dup(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise WriteFailed(_reason(target, error)) from None
        raise
    finally:
        if held != -1:
            with contextlib.suppress(OSError):
                os.close(held)
    if durable:
        try:
            sync_folder(folder)
        except OSError as error:
            raise WriteFailed(f"{target}: written, but its folder could not be synced: {error.strerror or error}") from None
    return total


def _create(folder: str, suffix: str = TEMPORARY_SUFFIX) -> tuple[int, str]:
    """Create a new file; return its descriptor and its path. Raises OSError."""
    path = os.path.join(folder, f"{TEMPORARY_PREFIX}{os.getpid()}-{os.urandom(8).hex()}{suffix}")
    # KV states are as private as the prompt that they hold.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), path


def _create_locked(folder: str) -> tuple[int, str]:
    """Create a new file, lock it, and make sure that no sweep removed it before the lock. Raises OSError."""
    for _ in range(_ATTEMPTS):
        descriptor, path = _create(folder, LOCKED_SUFFIX)
        try:
            if lock_now(descriptor) is not False and _names(path, descriptor):
                return descriptor, path
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        os.close(descriptor)
    raise BlockingIOError(errno.EAGAIN, "unfinished files are removed as soon as they are created")


def sweep(path: str, *, old: bool) -> bool:
    """Remove an unfinished file unless its writer holds its lock; return whether it was removed. Raises OSError.

    A file that is never locked (by its name, or because the file system has no locks) is removed only if it is ``old``.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        locked = lock_now(descriptor)
        gone = locked is not None and path.endswith(LOCKED_SUFFIX)
        if locked is False or not (gone or old) or not _names(path, descriptor):
            return False
        # A writer that has only just created the file notices that its name is gone and creates another.
        os.unlink(path)
        return True
    finally:
        os.close(descriptor)


def lock_now(descriptor: int) -> bool | None:
    """Take an exclusive lock that ends with the descriptor: False if it is taken, None if files cannot be locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _names(path: str, descriptor: int) -> bool:
    """Whether ``path`` is the name of an open file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write_all(descriptor: int, pieces: Sequence[memoryview], progress: Progress | None) -> int:
    """Write ``pieces``, many per call: one call for each small piece would take twice the time."""
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


def _reserve(descriptor: int, nbytes: int) -> None:
    """Get the blocks of a new file at once, where the file system can: found page by page, they take half as long again as the bytes."""
    if _FALLOCATE is not None and nbytes >= _RESERVED_BYTES:
        # Writing tells what is wrong where this fails.
        _FALLOCATE(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes))


def _is_special(target: str) -> bool:
    try:
        mode = os.stat(target).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def sync_folder(folder: str) -> None:
    """Force the directory entries of a folder to the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(target: str, error: OSError) -> str:
    return f"{target}: could not be written: {error.strerror or error}"
