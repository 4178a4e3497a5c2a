"""Entries and bytes of a directory, for monitoring: folders that have not changed since they were listed are not listed again."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NamedTuple

from .folder import ENTRY_FOLDERS
from .reading import regular_files

if TYPE_CHECKING:
    from .counters import Counters
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

    def __init__(self, folder: Folder, counters: Counters) -> None:
        self._folder, self._counters = folder, counters
        self._listed: dict[str, _Listed] = {}

    def total(self) -> tuple[int, int]:
        """Entries and their bytes."""
        listed = [self._of(os.path.join(self._folder.root, name)) for name in ENTRY_FOLDERS]
        return sum(one.entries for one in listed), sum(one.size for one in listed)

    def _of(self, path: str) -> _Listed:
        now = time.time_ns()
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
        sizes = [status.st_size for name, status in regular_files(path, self._counters) if _is_key(name)]
        found = _Listed(changed, len(sizes), sum(sizes))
        if changed < now - SETTLED_NS:
            self._listed[path] = found
        return found


def _is_key(name: str) -> bool:
    try:
        bytes.fromhex(name)
    except ValueError:
        return False
    return True
