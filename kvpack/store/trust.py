"""Checks that only a folder's owner, this user or another, can have written its files (spec/store.md, Trust).

Folders and files of any other user, or writable by group or others, are not used. Files of an owner who is another user
are read as copies, which cannot change between their check and their use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from kvpack.file.atomic import sync_folder
from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Iterator

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_NEVER = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""The errors for a path that can never be a store for this user, whatever the state of its disk."""


class Untrusted(PermissionError):
    """A folder or a file that users other than the store's owner may have written."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EPERM, message)


class NotAnEntry(OSError):
    """A folder, a link, a FIFO or a device where a file is expected."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, f"{path} is no regular file")


class Trust:
    """The ``owner`` of the folder ``root``: this user if there is not a folder yet.

    Raises InvalidParameter if ``root`` cannot be a store: others may write to it, it is not a folder, or it cannot be reached.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._user = os.geteuid()
        self.owner, self._group = self._user, os.getegid()
        self._folders: set[str] = set()
        try:
            status = os.stat(root)
        except OSError as error:
            if error.errno in _NEVER:
                raise InvalidParameter(f"{root}: cannot be a store: {error.strerror}") from None
            # The folder is made with the first entry, or its disk fails, as it may at any time.
            return
        if not stat.S_ISDIR(status.st_mode):
            raise InvalidParameter(f"{root}: is not a folder, expected the folder of a store")
        if status.st_mode & OTHERS_WRITE:
            raise InvalidParameter(
                f"{root}: has the mode {stat.S_IMODE(status.st_mode):04o}, expected a folder that neither group nor others may write: "
                "anyone who can write entries decides what models read"
            )
        if not os.access(root, os.X_OK, effective_ids=True):
            raise InvalidParameter(f"{root}: cannot be a store: {os.strerror(errno.EACCES)}")
        self.owner, self._group = status.st_uid, status.st_gid

    @property
    def private(self) -> bool:
        """Whether this user owns the folder, so that nobody else changes its files."""
        return self.owner == self._user

    @property
    def may_write(self) -> bool:
        """Whether files that this user writes belong to the folder's owner: root gives them away."""
        return self._user in (self.owner, 0)

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[tuple[int, os.stat_result]]:
        """The descriptor and the status of a regular file below the root, open for reading. Raises OSError and Untrusted."""
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
        if self.private:
            # The access time is when an entry expires (expiry.py). Only the file's owner may keep it as it is.
            with contextlib.suppress(PermissionError):
                return os.open(path, flags | getattr(os, "O_NOATIME", 0))
        return os.open(path, flags)

    def check_folder(self, folder: str) -> None:
        """Raise Untrusted unless a folder below the root, and every folder between, is writable by its owner alone. Raises OSError."""
        # A checked folder can be replaced only by the owner of the folder above it.
        while folder != self._root and folder not in self._folders:
            status = os.stat(folder)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder")
            self._check(folder, status)
            self._folders.add(folder)
            folder = os.path.dirname(folder)

    def own(self, descriptor: int) -> None:
        """Give a file or folder that this user has just made to the store's owner. Raises Untrusted if it belongs to another user."""
        if self._user != 0 or self.owner == 0:
            return
        status = os.fstat(descriptor)
        if status.st_uid == 0 and (stat.S_ISDIR(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink == 1)):
            os.fchown(descriptor, self.owner, self._group)
        else:
            self._check("what was made", status)

    def make_folder(self, folder: str, *, durable: bool) -> None:
        """Make a folder and those above it if they are missing. Raises OSError, and Untrusted as ``check_folder``."""
        parent = os.path.dirname(folder)
        if not os.path.isdir(folder):
            if not os.path.isdir(parent):
                self.make_folder(parent, durable=durable)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
                self._own_folder(folder)
            if durable:
                sync_folder(parent)
        if folder.startswith(f"{self._root}/"):
            self.check_folder(folder)

    def _own_folder(self, folder: str) -> None:
        if self._user == 0 != self.owner:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self.own(descriptor)
            finally:
                os.close(descriptor)

    def _check(self, path: str, status: os.stat_result) -> None:
        if status.st_uid != self.owner:
            raise Untrusted(f"{path} is owned by user {status.st_uid}, the store by user {self.owner}")
        if status.st_mode & OTHERS_WRITE:
            raise Untrusted(f"{path} has the mode {stat.S_IMODE(status.st_mode):04o}: users other than its owner may write it")
