"""Where a store is: what holds its entries, by the location that its user names."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from kvpack.formats.errors import InvalidParameter, MissingFile

from .directory import Directory
from .object_store import ObjectStore, is_object_store
from .objects import SCHEMES as OBJECT_STORE_SCHEMES
from .redis import SCHEMES as REDIS_SCHEMES
from .redis import Redis, is_redis

if TYPE_CHECKING:
    from .backend import Backend
    from .counters import Counters

SCHEMES = (*REDIS_SCHEMES, *OBJECT_STORE_SCHEMES)
"""How the URL of a server or an object store begins."""
_FILE = "file://"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
OPTIONS = {
    "a folder": {"max_bytes", "min_free", "durable"},
    "a Redis server": {"max_bytes", "ttl", "timeout"},
    "an object store": {"max_bytes", "timeout", "storage_options"},
}
"""The options of each kind of location."""


def open_backend(location: Any, counters: Counters, **options: Any) -> Backend:
    """The backend at ``location``: a URL of a server or an object store, an object of ``obstore.store``, else a folder.

    ``options`` are those of the backend; one that is None is as if it were not given. Raises InvalidParameter for one that
    the backend does not have, for a URL of no kind that is known, and what the backend raises.
    """
    kind = _kind(location)
    given = {name: value for name, value in options.items() if value is not None}
    unknown = set(given) - OPTIONS[kind]
    if unknown:
        raise InvalidParameter(f"{kind} has no option {', '.join(sorted(unknown))}")
    if kind == "a Redis server":
        return Redis(location, counters, **given)
    if kind == "an object store":
        return ObjectStore(location, counters, **given)
    return Directory(_folder(location), counters, **given)


def open_existing(location: str, counters: Counters, **options: Any) -> Backend:
    """The backend at a location that is there already. Raises MissingFile for a folder that is not."""
    if _kind(location) == "a folder" and not os.path.isdir(os.path.expanduser(_folder(location))):
        raise MissingFile(f"{location}: is no folder")
    return open_backend(location, counters, **options)


def _kind(location: Any) -> str:
    if is_redis(location):
        return "a Redis server"
    if is_object_store(location):
        return "an object store"
    if isinstance(location, str) and not location.startswith(_FILE) and (scheme := _URL.match(location)):
        raise InvalidParameter(f"the location has the scheme {scheme[0]!r}, known are {', '.join(SCHEMES)}, and paths of folders")
    return "a folder"


def _folder(location: Any) -> Any:
    """The path of a folder that may be named by a URL."""
    if not isinstance(location, str) or not location.startswith(_FILE):
        return location
    parts = urlsplit(location)
    if parts.netloc not in ("", "localhost"):
        raise InvalidParameter(f"the location {location!r} names the host {parts.netloc!r}: a folder is one of this machine, file:///...")
    return unquote(parts.path)
