"""The files of a directory backend: their paths, listing and removal.

<root>/3/f/3f...e1       an entry, named by the hexadecimal digits of its key
<root>/unfinished/       files being written, locked by their writers
<root>/holds/            one file per pinned chain and owner: the chain's keys, and when the pin ends
<root>/usage, lock       the count of disk_usage.py, and the evictors' lock
<root>/index.db          the index of index.py
"""

from __future__ import annotations

import os
import re
import stat
from functools import cached_property
from typing import TYPE_CHECKING

from kvpack.file.atomic import TEMPORARY_PREFIX, is_local_path

from .trust import Trust, regular_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .counters import Counters

MIN_BLOCK = 4096
"""Minimum block size in bytes, the block size of nearly every file system. A non-empty file counts as at least this size."""
_MAX_BLOCK = 65_536
"""Maximum block size in bytes. A larger block size is ignored: network mounts report the size of their requests instead."""


def block_bytes(path: str) -> int:
    """Return the block size of the file system that contains ``path``, which need not exist.

    On a network file system, the result is always ``MIN_BLOCK``, so that all machines that share a folder agree.
    """
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    try:
        return min(max(os.statvfs(path).f_frsize, MIN_BLOCK), _MAX_BLOCK) if is_local_path(path) else MIN_BLOCK
    except OSError:
        return MIN_BLOCK


def allocated_bytes(*paths: str) -> int:
    """Return the disk space, in bytes, allocated to files and folders. Missing files count as 0."""
    total = 0
    for path in paths:
        try:
            total += 512 * os.lstat(path).st_blocks
        except OSError:
            continue
    return total


ENTRY_FOLDERS = [f"{first:x}/{second:x}" for first in range(16) for second in range(16)]
UNFINISHED = "unfinished"
INDEX_FILES = ("index.db", "index.db-shm", "index.db-wal")
"""The index's files (index.py)."""
OTHER_FILES = ("usage", "lock", *INDEX_FILES)
"""The store's files that are not entries."""
_ENTRY_NAME = re.compile("[0-9a-f]{64}")


def may_be_store(root: str) -> bool:
    """Return False if the folder ``root`` contains other files, but no folder of a store. Files must not be added to such a folder."""
    try:
        names = os.listdir(root)
    except OSError:
        return True
    return not names or UNFINISHED in names or any(os.path.isdir(f"{root}/{folder}") for folder in ENTRY_FOLDERS)


class Folder:
    """The folder ``root`` of a directory backend. With ``durable``, newly created folders are synced to disk.

    Raises InvalidParameter if the folder cannot be a store (see ``Trust``).
    """

    def __init__(self, root: str | os.PathLike[str], counters: Counters, *, durable: bool, trusted_group: int | str | None = None) -> None:
        self.root = os.path.abspath(os.path.expanduser(os.fsdecode(root)))
        self.durable = durable
        self.trust = Trust(self.root, trusted_group)
        self.unfinished_folder = os.path.join(self.root, UNFINISHED)
        self.holds_folder = os.path.join(self.root, "holds")
        self._counters = counters

    @cached_property
    def block(self) -> int:
        """Block size in bytes. File sizes are rounded up to a multiple of it."""
        return block_bytes(self.root)

    def cost(self, size: int) -> int:
        """Return the disk space, in bytes, that a file of ``size`` bytes uses."""
        return -(-size // self.block) * self.block

    def overhead(self) -> int:
        """Return the disk space, in bytes, used by folders and by files other than entries."""
        top_folders = [f"{self.root}/{first:x}" for first in range(16)]
        extra = [f"{self.root}/{name}" for name in OTHER_FILES]
        return allocated_bytes(self.root, self.unfinished_folder, self.holds_folder, *top_folders, *self.entry_folders, *extra)

    @cached_property
    def entry_folders(self) -> list[str]:
        return [f"{self.root}/{folder}" for folder in ENTRY_FOLDERS]

    def missing_folder_bytes(self, path: str) -> int:
        """Return the disk space, in bytes, of the folders that must be created for an entry at ``path``."""
        leaf = os.path.dirname(path)
        missing = sum(not os.path.isdir(folder) for folder in (self.root, self.unfinished_folder, os.path.dirname(leaf), leaf))
        if not missing:
            return 0
        parent = self.root
        while not os.path.isdir(parent):
            parent = os.path.dirname(parent)
        return missing * min(allocated_bytes(parent), self.block)

    def path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self.root}/{name[0]}/{name[1]}/{name}"

    def remove(self, path: str) -> int | None:
        """Unlink an entry, and return its size in bytes.

        Returns None if there is no such entry. A failure also returns None, and counts as a fault.
        """
        try:
            status = os.stat(path, follow_symlinks=False)
            os.unlink(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._counters.fault("delete", error)
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else 0

    def scan(self) -> Iterator[tuple[bytes, os.stat_result]]:
        for folder in ENTRY_FOLDERS:
            yield from self.entries(folder)

    def entries(self, folder: str) -> Iterator[tuple[bytes, os.stat_result]]:
        """Yield (key, status) for every entry in ``folder``, one of ``ENTRY_FOLDERS``. Other files are ignored."""
        for name, status in regular_files(os.path.join(self.root, folder), self._counters):
            if _ENTRY_NAME.fullmatch(name) and folder == f"{name[0]}/{name[1]}":
                yield bytes.fromhex(name), status

    def entries_starting_with(self, first_byte: int) -> Iterator[tuple[bytes, os.stat_result]]:
        """Yield (key, status) for every entry whose key begins with this byte."""
        return self.entries(ENTRY_FOLDERS[first_byte])

    def keys_starting_with(self, first_byte: int) -> list[bytes]:
        """Return the keys of all entries whose key begins with this byte."""
        try:
            with os.scandir(self.entry_folders[first_byte]) as listing:
                names = [entry.name for entry in listing if entry.is_file(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        return [bytes.fromhex(name) for name in names if _ENTRY_NAME.fullmatch(name) and int(name[:2], 16) == first_byte]

    def unfinished(self) -> Iterator[tuple[str, os.stat_result]]:
        for folder in (self.unfinished_folder, self.holds_folder):
            for name, status in regular_files(folder, self._counters):
                if name.startswith(TEMPORARY_PREFIX):
                    yield os.path.join(folder, name), status

    def make_folders(self, *folders: str) -> None:
        """Create ``folders`` and the folder of unfinished files, unless they exist. Raises OSError or Untrusted."""
        for folder in (self.unfinished_folder, *folders):
            self.trust.make_folder(folder, durable=self.durable)
