"""Checks that only the owner of a store's folder can have written its files (spec/store.md, Trust).

Folders and files that belong to other users, or that the group or others may write to, are used only if the caller trusts the members of
that group. Files that another user may change are copied before they are checked, so that they cannot change between check and use.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvpack.file.atomic import sync_folder
from kvpack.formats.arguments import describe
from kvpack.formats.errors import InvalidParameter
from kvpack.runtime.reader import read_cold

if TYPE_CHECKING:
    from .counters import Counters

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_GROUP_FOLDER, _GROUP_FILE = 0o2770, 0o660
"""Modes of folders and files for a trusted group. With the set-group-ID bit, new files belong to the folder's group."""
_MAX_GID = 2**32 - 2

_PERMANENT_ERRORS = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Errors which mean that a path can never be a store for this user. A faulty disk causes other errors."""


class Untrusted(PermissionError):
    """Raised if users other than the store's owner may have written to a folder or file."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EPERM, message)


class NotAnEntry(OSError):
    """Raised if an entry's path is a folder, a link, a FIFO or a device."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, f"{path} is not a regular file")


class Trust:
    """Checks which users may write to the folder ``root``. If it does not exist yet, this user becomes its ``owner``.

    ``trusted_group`` is the id or name of a group. Its members may write there and are trusted like the owner. Raises InvalidParameter if
    this user is not in that group, or if ``root`` is not a folder, is not accessible, or may be written to by others.
    """

    def __init__(self, root: str, trusted_group: int | str | None = None) -> None:
        self._root = root
        self._user = os.geteuid()
        self.owner, self._group = self._user, os.getegid()
        self.trusted_group = None if trusted_group is None else _group_id(trusted_group)
        self._group_writes = self.trusted_group is not None
        self._folders: set[str] = set()
        try:
            status = os.stat(root)
        except OSError as error:
            if error.errno in _PERMANENT_ERRORS:
                raise InvalidParameter(f"{root} cannot be a store: {error.strerror}") from None
            # Either the folder does not exist yet, or its disk fails. Later operations count that as a fault.
            return
        if not stat.S_ISDIR(status.st_mode):
            raise InvalidParameter(f"{root} is not a folder: pass the path of a store's folder, which need not exist yet")
        if status.st_mode & self._forbidden_bits(status):
            mode, group = stat.S_IMODE(status.st_mode), status.st_gid
            hint = ""
            if not status.st_mode & stat.S_IWOTH:
                trusted_hint = "" if self.trusted_group is None else f", and trusted_group is {self.trusted_group}"
                hint = f". Its group is {group}{trusted_hint}: trusted_group={group} trusts the members of this group to do so"
            raise InvalidParameter(
                f"{root} has mode {mode:04o}, but neither group nor others may write to a store's folder, because anyone who can write "
                f"entries controls what models read{hint}"
            )
        self._group_writes = self.trusted_group is not None and bool(status.st_mode & stat.S_IWGRP)
        if not os.access(root, os.X_OK, effective_ids=True):
            raise InvalidParameter(f"{root} cannot be a store: {os.strerror(errno.EACCES)}")
        self.owner, self._group = status.st_uid, status.st_gid

    @property
    def is_private(self) -> bool:
        """True if this user owns the folder and trusts no group, so that no other user can change its files."""
        return self.owner == self._user and self.trusted_group is None

    @property
    def may_write(self) -> bool:
        """True if this user may store entries.

        Only the owner, members of the trusted group, and root may do so. Files that root writes are given to the owner.
        """
        return self._user in (self.owner, 0) or self._group_writes

    @contextlib.contextmanager
    def open_checked(self, path: str) -> Iterator[tuple[int, os.stat_result]]:
        """Open a regular file below the root for reading, and yield its descriptor and status. Raises OSError or Untrusted."""
        try:
            descriptor = self._open(path)
        except OSError as error:
            # The path is a link or a socket.
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise NotAnEntry(path) from None
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise NotAnEntry(path)
            self._check(path, status)
            self.check_folder(os.path.dirname(path))
            yield descriptor, status
        finally:
            os.close(descriptor)

    def _open(self, path: str) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        if self.is_private:
            # Reading must not change the access time, which is when an entry expires (expiry.py). Only a file's owner can prevent that.
            with contextlib.suppress(PermissionError):
                return os.open(path, flags | getattr(os, "O_NOATIME", 0))
        return os.open(path, flags)

    def check_folder(self, folder: str) -> None:
        """Raise Untrusted if untrusted users may write to ``folder`` or to a folder between it and the root."""
        # A checked folder need not be checked again: only users who may write to its parent, which is checked too, can replace it.
        while folder != self._root and folder not in self._folders:
            status = os.stat(folder)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder")
            self._check(folder, status)
            self._folders.add(folder)
            folder = os.path.dirname(folder)

    def assign_owner(self, descriptor: int) -> None:
        """Transfer a file or folder that this user has just created to the store's owner and, if set, to the trusted group.

        Raises OSError if this is not permitted, and Untrusted if the file or folder belongs to an untrusted user.
        """
        if self.trusted_group is None and (self._user != 0 or self.owner == 0):
            return
        status = os.fstat(descriptor)
        folder = stat.S_ISDIR(status.st_mode)
        if status.st_uid != self._user or not (folder or (stat.S_ISREG(status.st_mode) and status.st_nlink == 1)):
            self._check("what was made", status)
            return
        group = self._group if self.trusted_group is None else self.trusted_group
        owner = self.owner if self._user == 0 else -1
        if status.st_gid != group or owner not in (-1, 0):
            os.fchown(descriptor, owner, group)
        if self.trusted_group is not None:
            os.fchmod(descriptor, _GROUP_FOLDER if folder else _GROUP_FILE)

    def make_folder(self, folder: str, *, durable: bool) -> None:
        """Create a folder and its missing parents. Raises OSError, or Untrusted as ``check_folder`` does."""
        parent = os.path.dirname(folder)
        if not os.path.isdir(folder):
            if not os.path.isdir(parent):
                self.make_folder(parent, durable=durable)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
                self._assign_folder_owner(folder)
            if durable:
                sync_folder(parent)
        if folder.startswith(f"{self._root}/"):
            self.check_folder(folder)

    def _assign_folder_owner(self, folder: str) -> None:
        if self.trusted_group is not None or self._user == 0 != self.owner:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self.assign_owner(descriptor)
            finally:
                os.close(descriptor)

    def _check(self, path: str, status: os.stat_result) -> None:
        # Root can write everything anyway, and only members of the group can have put a file of the group into the folder.
        member = self.trusted_group is not None and (status.st_gid == self.trusted_group or status.st_uid in (0, self._user))
        if status.st_uid != self.owner and not member:
            hint = "" if self.trusted_group is None else f", and it is not in group {self.trusted_group}"
            raise Untrusted(
                f"{path} is owned by user {status.st_uid}, but the store is owned by user {self.owner}{hint}: change its owner or remove it"
            )
        if forbidden := status.st_mode & self._forbidden_bits(status):
            classes = "go" if forbidden & stat.S_IWGRP else "o"
            raise Untrusted(
                f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, so untrusted users can write to it: revoke that with "
                f"chmod {classes}-w"
            )

    def _forbidden_bits(self, status: os.stat_result) -> int:
        """Return the mode bits that give untrusted users permission to write."""
        return stat.S_IWOTH if self.trusted_group is not None and status.st_gid == self.trusted_group else OTHERS_WRITE


def _group_id(group: int | str) -> int:
    """Return the id of a group. Raises InvalidParameter unless this process belongs to it."""
    number: Any = group
    if isinstance(group, str):
        try:
            number = grp.getgrnam(group).gr_gid
        except (KeyError, ValueError):
            raise InvalidParameter(f"trusted_group is {group!r:.80}, which is not a group on this system: pass its number") from None
    if type(number) is not int or not 0 <= number <= _MAX_GID:
        raise InvalidParameter(f"trusted_group is {describe(group)}, expected the number or the name of a group")
    if os.geteuid() != 0 and number not in (os.getegid(), *os.getgroups()):
        user = os.geteuid()
        raise InvalidParameter(f"trusted_group is {group!r:.80}, but user {user} is not a member of it: pass a group of this user")
    return number


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
    return OSError(errno.EIO, f"a file of {size} bytes was truncated to {done} bytes while it was read")


def read_beginning(descriptor: int, max_bytes: int) -> bytes:
    """Return the first ``max_bytes`` bytes of an open file, or all bytes of a smaller file."""
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
