"""Who may have written what a folder holds: its owner alone, who is this user or another (spec/store.md, Trust).

Folders and files of anybody else, or that group or others may write, are not used. What another user owns is read by this one,
as a copy that nobody changes between its check and its use.
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
"""What the system says of a path that cannot be a store for this user, whatever happens to its disk."""


class Untrusted(PermissionError):
    """A folder or a file that others than the store's owner may have written."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EPERM, message)


class NotAnEntry(OSError):
    """A folder, a link, a FIFO or a device where a file is expected."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, f"{path} is no regular file")


class Trust:
    """The ``owner`` of the folder ``root``: this user where there is no folder yet.

    Raises InvalidParameter when ``root`` can be no store: others may write to it, it is no folder, or it cannot be reached.
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
            # It is made with the first entry, or its disk fails, as it may at any time.
            return
        if not stat.S_ISDIR(status.st_mode):
            raise InvalidParameter(f"{root}: is no folder, a store is one")
        if status.st_mode & OTHERS_WRITE:
            raise InvalidParameter(
                f"{root}: has the mode {stat.S_IMODE(status.st_mode):04o}, expected a folder that neither group nor others may write: "
                "whoever writes an entry decides what models read"
            )
        if not os.access(root, os.X_OK, effective_ids=True):
            raise InvalidParameter(f"{root}: cannot be a store: {os.strerror(errno.EACCES)}")
        self.owner, self._group = status.st_uid, status.st_gid

    @property
    def private(self) -> bool:
        """Whether this user owns the folder, so that nobody else changes what is in it."""
        return self.owner == self._user

    @property
    def may_write(self) -> bool:
        """Whether what this user writes is its owner's: root gives it to them."""
        return self._user in (self.owner, 0)

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[tuple[int, os.stat_result]]:
        """The descriptor and the status of a regular file below the root, open for reading. Raises OSError and Untrusted."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            # A link, or a socket.
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

    def check_folder(self, folder: str) -> None:
        """Raise Untrusted unless a folder below the root, and those between, are its owner's alone. Raises OSError."""
        # Who may replace a folder that was checked is the owner of the one above.
        while folder != self._root and folder not in self._folders:
            status = os.stat(folder)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, f"{folder} is no folder")
            self._check(folder, status)
            self._folders.add(folder)
            folder = os.path.dirname(folder)

    def own(self, descriptor: int) -> None:
        """Give a file or folder that this user has just made to the store's owner. Raises Untrusted when it is of another."""
        if self._user != 0 or self.owner == 0:
            return
        status = os.fstat(descriptor)
        if status.st_uid == 0 and (stat.S_ISDIR(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink == 1)):
            os.fchown(descriptor, self.owner, self._group)
        else:
            self._check("what was made", status)

    def make_folder(self, folder: str, *, durable: bool) -> None:
        """Make a folder and those above it where they are not there. Raises OSError, and Untrusted as ``check_folder``."""
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
            raise Untrusted(f"{path} has the mode {stat.S_IMODE(status.st_mode):04o}: others than its owner may write it")
