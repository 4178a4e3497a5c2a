"""The files of a directory of entries: their paths, listing and removal.

<root>/3/f/3f...e1       an entry, named by the hexadecimal digits of its key
<root>/unfinished/       files being written, locked by their writers
<root>/pins/             one file per pinned chain: its keys
<root>/usage, lock       the counts of usage.py, and the evictor's lock
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING

from kvpack.file.atomic import TEMPORARY_PREFIX

from .reading import regular_files
from .trust import Trust

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .counters import Counters

ENTRY_FOLDERS = [f"{first:x}/{second:x}" for first in range(16) for second in range(16)]
UNFINISHED = "unfinished"
_ENTRY_NAME = re.compile("[0-9a-f]{64}")


class Folder:
    """The files below ``root``. ``durable`` forces new folders to the disk. Raises InvalidParameter as ``Trust`` does."""

    def __init__(self, root: str | os.PathLike[str], counters: Counters, *, durable: bool) -> None:
        self.root = os.path.abspath(os.path.expanduser(os.fsdecode(root)))
        self.durable = durable
        self.trust = Trust(self.root)
        self.unfinished_folder = os.path.join(self.root, UNFINISHED)
        self.pins_folder = os.path.join(self.root, "pins")
        self._counters = counters

    def path(self, key: bytes) -> str:
        """The path of the entry ``key``."""
        name = key.hex()
        return f"{self.root}/{name[0]}/{name[1]}/{name}"

    def remove(self, path: str) -> int | None:
        """Unlink an entry and return its size in bytes, or None."""
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
        """(key, status) of every entry."""
        for folder in ENTRY_FOLDERS:
            yield from self.entries(folder)

    def entries(self, folder: str) -> Iterator[tuple[bytes, os.stat_result]]:
        """(key, status) of every entry in one of ``ENTRY_FOLDERS``. Files that ``path`` gives no key are not entries, and are let be."""
        for name, status in regular_files(os.path.join(self.root, folder), self._counters):
            if _ENTRY_NAME.fullmatch(name) and folder == f"{name[0]}/{name[1]}":
                yield bytes.fromhex(name), status

    def unfinished(self) -> Iterator[tuple[str, os.stat_result]]:
        """(path, status) of every unfinished file."""
        for folder in (self.unfinished_folder, self.pins_folder):
            for name, status in regular_files(folder, self._counters):
                if name.startswith(TEMPORARY_PREFIX):
                    yield os.path.join(folder, name), status

    def make_folders(self, *folders: str) -> None:
        """Create ``folders`` and the folder of unfinished files if missing. Raises OSError and Untrusted."""
        for folder in (self.unfinished_folder, *folders):
            self.trust.make_folder(folder, durable=self.durable)
