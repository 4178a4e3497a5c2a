"""Where a store is: what holds its entries, by the location that its user names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvpack.formats.errors import MissingFile

from .directory import Directory

if TYPE_CHECKING:
    from .backend import Backend
    from .counters import Counters


def open_backend(location: str | os.PathLike[str], counters: Counters, **options: Any) -> Backend:
    """The backend at ``location``: a folder. ``options`` are those of the backend. Raises InvalidParameter."""
    return Directory(location, counters, **options)


def open_existing(location: str, counters: Counters, **options: Any) -> Backend:
    """The backend at a location that is there already. Raises MissingFile for a folder that is not."""
    if not os.path.isdir(os.path.expanduser(location)):
        raise MissingFile(f"{location}: is no folder")
    return open_backend(location, counters, **options)
