"""Where a store is: what holds its entries, by the location that its user names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvpack.formats.errors import InvalidParameter, MissingFile

from .directory import Directory
from .redis import Redis, is_redis

if TYPE_CHECKING:
    from .backend import Backend
    from .counters import Counters

ANYWHERE = {"max_bytes"}
"""Options that every backend takes."""
OF_DIRECTORIES = {"min_free", "durable"}
OF_SERVERS = {"ttl", "timeout"}


def open_backend(location: str | os.PathLike[str], counters: Counters, **options: Any) -> Backend:
    """The backend at ``location``: a server for a URL (redis://, rediss://, unix://), else a folder.

    ``options`` are those of the backend; one that is None is as if it were not given. Raises InvalidParameter for one that
    the backend does not have, and what the backend raises.
    """
    given = {name: value for name, value in options.items() if value is not None}
    server = is_redis(location)
    unknown = set(given) - ANYWHERE - (OF_SERVERS if server else OF_DIRECTORIES)
    if unknown:
        raise InvalidParameter(f"{'a server' if server else 'a folder'} has no option {', '.join(sorted(unknown))}")
    return Redis(str(location), counters, **given) if server else Directory(location, counters, **given)


def open_existing(location: str, counters: Counters, **options: Any) -> Backend:
    """The backend at a location that is there already. Raises MissingFile for a folder that is not."""
    if not is_redis(location) and not os.path.isdir(os.path.expanduser(location)):
        raise MissingFile(f"{location}: is no folder")
    return open_backend(location, counters, **options)
