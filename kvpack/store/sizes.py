"""Entries and bytes of a directory, for monitoring: folders that have not changed since they were listed are not listed again."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NamedTuple

from .folder import ENTRY_FOLDERS

if TYPE_CHECKING:
    from .folder import Folder

SETTLED_NS = 3 * 10**9
"""A folder that changed less than this before it was listed may change again within one tick of its clock, at worst 2 s."""


class _Listed(NamedTuple):
    """A folder's time of modification before it was listed, its entries and their bytes."""

    changed_ns: int
    entries: int
    size: int


class Sizes:
    """Counts the entries of ``folder``. An entry is made and removed by changing its folder, and is never written again."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._listed: dict[str, _Listed] = {}

    def total(self) -> tuple[int, int]:
        """Entries and their bytes."""
        listed = [self._of(folder) for folder in ENTRY_FOLDERS]
        return sum(one.entries for one in listed), sum(one.size for one in listed)

    def _of(self, folder: str) -> _Listed:
        now, path = time.time_ns(), os.path.join(self._folder.root, folder)
        try:
            changed = os.stat(path).st_mtime_ns
        except FileNotFoundError:
            return _Listed(now, 0, 0)
        except OSError:
            # Listing it counts the fault.
            changed = now
        known = self._listed.get(path)
        if known is not None and known.changed_ns == changed:
            return known
        sizes = [status.st_size for _, status in self._folder.entries(folder)]
        found = _Listed(changed, len(sizes), sum(sizes))
        if changed < now - SETTLED_NS:
            self._listed[path] = found
        return found
