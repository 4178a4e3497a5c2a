"""Atomic writing of files: a file always contains either the old or the new bytes (spec/container.md, Writing)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import sys
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from kvpack.formats.errors import WriteFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Progress = Callable[[int, int], None]

TEMPORARY_PREFIX = ".kvpack-"
TEMPORARY_SUFFIX = ".tmp"
"""Prefix and suffix of the name of an unfinished file."""
LOCKED_SUFFIX = "-locked.tmp"
"""Suffix of an unfinished file that its writer has locked with ``flock``. If the lock is gone, the writer has died."""

_ATTEMPTS = 100
"""Maximum number of attempts to create a file. Another process may remove a new file before its writer has locked it."""
_PIECES_AT_ONCE = 64
_PIECE_BYTES = 4 * 2**20
_RESERVED_BYTES = 2**20
"""Minimum size, in bytes, of a file with blocks that are reserved before it is written."""
_LOCAL_FILE_SYSTEMS = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlay",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
}
"""Local file systems by ``f_type`` from statfs. On other file systems, locks of other hosts may be invisible."""
_STATFS_BYTES = 512
_FSTATFS = getattr(ctypes.CDLL(None), "fstatfs64", None) or getattr(ctypes.CDLL(None), "fstatfs", None)
_FALLOCATE = getattr(ctypes.CDLL(None), "fallocate64", None)
"""The system's ``fallocate``, if available. ``os.posix_fallocate`` would write zeros if the file system cannot reserve blocks."""


def write_file(
    path: str | os.PathLike[str],
    pieces: Sequence[memoryview],
    *,
    durable: bool = False,
    progress: Progress | None = None,
    unfinished: str | None = None,
    begin: Callable[[int], None] | None = None,
    complete: Callable[[int], None] | None = None,
    rename: Callable[[str, str], None] | None = None,
) -> int:
    """Replace the file ``path`` with the bytes of ``pieces``, as ``replace_file`` does. Returns the number of bytes.

    ``progress(done, total)`` counts bytes. ``begin(descriptor)`` is called before the first byte is written, and ``complete(descriptor)``
    after the last. If ``rename`` is set, ``rename(unfinished, path)`` is called instead of renaming the file. An exception from any of
    these functions aborts the write.
    """

    # If a file replaces another, some file systems flush it before the rename, but only if its blocks were not reserved.
    new = not os.path.lexists(_link_target(path) if unfinished is None else path)

    def write(descriptor: int) -> int:
        if begin is not None:
            begin(descriptor)
        if new:
            _reserve(descriptor, sum(map(len, pieces)))
        total = _write_all(descriptor, pieces, progress)
        if complete is not None:
            complete(descriptor)
        return total

    return replace_file(path, write, durable=durable, unfinished=unfinished, rename=rename)


def replace_file(
    path: str | os.PathLike[str],
    write: Callable[[int], int],
    *,
    durable: bool = False,
    unfinished: str | None = None,
    rename: Callable[[str, str], None] | None = None,
) -> int:
    """Replace the file ``path`` with a new one that ``write(descriptor)`` fills. Returns the result of ``write``.

    The new file has mode 0600. Until it is renamed to ``path``, it is locked, so that ``remove_abandoned`` recognizes files of live
    writers. By default, it is created in the folder of ``path``, and the files of dead writers in this folder are removed first. As with
    ``open``, symbolic links are followed, and the file gets the mode of the file that it replaces, or the umask's mode.

    If ``unfinished`` is set, ``path`` is an entry of a store. The new file is then created in the folder ``unfinished`` on the same file
    system, keeps mode 0600, and replaces a symbolic link. With ``durable=True``, the bytes and the rename are on disk before the function
    returns.

    On failure, the new file is removed, the old file is unchanged, and WriteFailed is raised with the path and the system's reason.
    """
    where = os.fsdecode(path)
    if "\0" in where:
        raise WriteFailed(f"{where!r}: could not be written, because the path contains a null byte: pass a path without one")
    # A rename would replace a device or a pipe, even /dev/null, with a file.
    if _is_special(where):
        raise WriteFailed(f"{where}: could not be written, because it is not a regular file: pass the path of a regular or a new file")
    target = where
    if unfinished is None:
        target = _link_target(where)
        _check_writable(where, target)
    folder = os.path.dirname(target) or "."
    lock_descriptor = -1
    try:
        if unfinished is None:
            remove_dead(folder)
        descriptor, temporary = _create_locked(folder if unfinished is None else unfinished)
    except OSError as error:
        raise _write_error(where, error) from None
    try:
        try:
            total = write(descriptor)
            if unfinished is None:
                _set_mode(descriptor, target, folder)
            if durable:
                os.fsync(descriptor)
            # Closing reports failed writes, but must not release the lock before the rename.
            lock_descriptor = os.dup(descriptor)
        finally:
            os.close(descriptor)
        (rename or os.replace)(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and not isinstance(error, WriteFailed):
            raise _write_error(where, error) from None
        raise
    finally:
        if lock_descriptor != -1:
            with contextlib.suppress(OSError):
                os.close(lock_descriptor)
    if durable:
        try:
            sync_folder(folder)
        except OSError as error:
            raise WriteFailed(f"{where}: written, but its folder could not be synced: {error.strerror or error}") from None
    return total


def file_version(path: str | os.PathLike[str]) -> tuple[str, int, int] | None:
    """Return the file that ``path`` refers to, with its inode number and time of change, or None if there is no file."""
    try:
        target = os.path.realpath(path)
        status = os.stat(target)
    except (OSError, ValueError):
        return None
    return target, status.st_ino, status.st_mtime_ns


@contextlib.contextmanager
def keep_version(path: str | os.PathLike[str], version: tuple[str, int, int] | None) -> Iterator[None]:
    """Return a context manager for replacing the file of ``version``. Raises WriteFailed if another writer has replaced it, or is about to.

    Other files may have any contents.
    """
    now = file_version(path)
    if version is None or now is None or now[0] != version[0]:
        yield
        return
    descriptor = os.open(now[0], os.O_RDONLY | os.O_CLOEXEC)
    try:
        if try_lock(descriptor) is False or file_version(path) != version:
            raise WriteFailed(
                f"{os.fsdecode(path)}: not saved, because another process or chat has changed the file meanwhile: load it and send the "
                "message again, or save to another path"
            )
        yield
    finally:
        os.close(descriptor)


class UnfinishedFiles(NamedTuple):
    """Paths of the unfinished files in a folder: the removed files, and the files that were kept."""

    removed: list[str]
    kept: list[str]


def remove_dead(folder: str) -> UnfinishedFiles:
    """Remove the unfinished files of dead writers from ``folder``. Never raises.

    A file is kept if its writer may be alive: the file is locked, has never been locked (older versions did not lock files), belongs to
    another user, or is on a network file system, where locks of other hosts may be invisible. A folder that cannot be listed is not
    changed.
    """
    result = UnfinishedFiles([], [])
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if _is_unfinished(entry)]
    except OSError:
        return result
    for name in names:
        path = os.path.join(folder, name)
        try:
            removed = name.endswith(LOCKED_SUFFIX) and remove_abandoned(path, old=False, local_only=True)
        except FileNotFoundError:
            continue
        except OSError:
            removed = False
        (result.removed if removed else result.kept).append(path)
    return result


def _is_unfinished(entry: os.DirEntry[str]) -> bool:
    name = entry.name
    return name.startswith(TEMPORARY_PREFIX) and name.endswith(TEMPORARY_SUFFIX) and entry.is_file(follow_symlinks=False)


def _link_target(path: str | os.PathLike[str]) -> str:
    """Follow symbolic links and return the final path, even if it does not exist. Raises WriteFailed if the links form a loop."""
    where = os.fsdecode(path)
    if "\0" in where or not os.path.islink(where):
        return where
    target = os.path.realpath(where)
    if os.path.islink(target):
        raise WriteFailed(_error_reason(where, OSError(errno.ELOOP, os.strerror(errno.ELOOP))))
    return target


def check_output_path(path: str) -> None:
    """Raise WriteFailed if a regular file ``path`` cannot be written. Commands call this before they compute what they write."""
    target = _link_target(path)
    folder = os.path.dirname(target) or "."
    if path in ("", "-") or _is_special(path):
        raise WriteFailed(f"cannot write {path!r}: it is not a regular file: pass the path of a regular or a new file")
    _check_writable(path, target)
    if not os.path.isdir(folder):
        raise WriteFailed(f"cannot write {path}: {folder} is not a folder: pass a path in an existing folder")
    if not os.access(folder, os.W_OK):
        raise WriteFailed(f"cannot write {path}: {folder} is not writable: pass a path in a folder that is")


def _check_writable(where: str, target: str) -> None:
    """Raise WriteFailed if ``target`` is a read-only file, which a rename would replace."""
    try:
        status = os.stat(target)
    except OSError:
        return
    # Root can write to any file, but a file without any write permission is meant to be kept.
    writable = status.st_mode & 0o222 and os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
    if stat.S_ISREG(status.st_mode) and not writable:
        raise WriteFailed(
            f"{where}: could not be written, because the file is read-only for this user (mode {stat.S_IMODE(status.st_mode):04o}, owner "
            f"{status.st_uid}): make it writable with chmod, or write to another path",
            filename=where,
            number=errno.EACCES,
        )


def _set_mode(descriptor: int, target: str, folder: str) -> None:
    """Give a new file the mode, owner and group of the file that it replaces. If it replaces none, the umask determines its mode."""
    try:
        old = os.stat(target)
    except OSError:
        mode = _default_mode(folder)
    else:
        mode = stat.S_IMODE(old.st_mode) & 0o777
        status = os.fstat(descriptor)
        if (old.st_uid, old.st_gid) != (status.st_uid, status.st_gid):
            for owner in (old.st_uid, -1):
                with contextlib.suppress(OSError):
                    os.fchown(descriptor, owner, old.st_gid)
                    break
            if os.fstat(descriptor).st_gid != old.st_gid:
                # If the file could not keep its group, the new group gets only the permissions granted to others.
                mode = mode & 0o707 | (mode & 0o007) << 3
    # Some file systems have no modes.
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, mode)


def _default_mode(folder: str) -> int:
    """Return the mode that the umask gives to a new file in ``folder``.

    This creates and removes a file. Reading the umask instead would briefly change it for all threads.
    """
    descriptor, path = _create(folder, mode=0o666)
    try:
        # Another writer's sweep may remove the file first, because it is not locked.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o666
    finally:
        os.close(descriptor)


def _create(folder: str, *, mode: int = 0o600) -> tuple[int, str]:
    """Create an unfinished file. Returns its descriptor and path."""
    path = os.path.join(folder, f"{TEMPORARY_PREFIX}{os.getpid()}-{os.urandom(8).hex()}{LOCKED_SUFFIX}")
    # KV caches are as private as their prompts.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), path


def _create_locked(folder: str) -> tuple[int, str]:
    """Create and lock an unfinished file. Returns its descriptor and path."""
    for _ in range(_ATTEMPTS):
        descriptor, path = _create(folder)
        try:
            if try_lock(descriptor) is not False and _path_refers_to(path, descriptor):
                return descriptor, path
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        os.close(descriptor)
    raise BlockingIOError(errno.EAGAIN, "another process removes each unfinished file as soon as it is created")


def remove_abandoned(path: str, *, old: bool, local_only: bool = False) -> bool:
    """Remove an unfinished file unless its writer holds its lock. Returns True if it was removed.

    A file that cannot be locked, or that was never locked according to its name, is removed only with ``old=True``. With
    ``local_only=True``, files on network file systems are kept, because locks of other hosts may be invisible there.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if local_only and not _is_local(descriptor):
            return False
        locked = try_lock(descriptor)
        removed = locked is not None and path.endswith(LOCKED_SUFFIX)
        if locked is False or not (removed or old) or not _path_refers_to(path, descriptor):
            return False
        # A writer that has only just created the file notices the removal and creates another.
        os.unlink(path)
        return True
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool | None:
    """Lock a file until its descriptor is closed. Returns True on success, and False if another process holds the lock.

    Returns None if the file system does not support locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_local(descriptor: int) -> bool:
    """Return True if an open file is on a local file system, and therefore cannot be locked by another host."""
    status = ctypes.create_string_buffer(_STATFS_BYTES)
    if sys.platform != "linux" or _FSTATFS is None or _FSTATFS(descriptor, status):
        return False
    # The first field of the struct is f_type, one machine word.
    return ctypes.c_ulong.from_buffer(status).value & 0xFFFFFFFF in _LOCAL_FILE_SYSTEMS


def is_local_path(path: str) -> bool:
    """Return True if ``path`` is on a local file system, and therefore cannot be written by another host."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _is_local(descriptor)
    finally:
        os.close(descriptor)


def _path_refers_to(path: str, descriptor: int) -> bool:
    """Return True if ``path`` still refers to the open file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write_all(descriptor: int, pieces: Sequence[memoryview], progress: Progress | None) -> int:
    """Write ``pieces``. Returns the number of bytes.

    Small pieces are written together. One system call for each would take twice as long.
    """
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
    """Reserve all blocks of a new file if the file system supports it.

    Otherwise, the system allocates blocks page by page, which takes 1.5x as long as writing them.
    """
    if _FALLOCATE is not None and nbytes >= _RESERVED_BYTES:
        # If this fails, writing reports the reason.
        _FALLOCATE(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes))


def _is_special(target: str) -> bool:
    return os.path.exists(target) and not os.path.isfile(target)


def sync_folder(folder: str) -> None:
    """Sync a folder's directory entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_error(where: str, error: OSError) -> WriteFailed:
    return WriteFailed(_error_reason(where, error), filename=where, number=error.errno)


def _error_reason(target: str, error: OSError) -> str:
    advice = ": pass a path in an existing folder" if error.errno in (errno.ENOENT, errno.ENOTDIR) else ""
    return f"{target or repr(target)}: could not be written: {error.strerror or error}{advice}"
