"""Where a store is: what holds its entries, by the location that its user names."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from kvpack.formats.errors import InvalidParameter, MissingFile

from .counters import Counters
from .directory import Directory
from .forms import Form
from .memory import Memory
from .object_store import ObjectStore, is_object_store
from .objects import SCHEMES as OBJECT_STORE_SCHEMES
from .redis import SCHEMES as REDIS_SCHEMES
from .redis import Redis, is_redis
from .tiers import Tiers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .backend import Backend

SCHEMES = (*REDIS_SCHEMES, *OBJECT_STORE_SCHEMES)
"""How the URL of a server or an object store begins."""
MEMORY = "memory://"
_FILE = "file://"
_EACH = ": each Tier has its own"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
OPTIONS = {
    "a folder": {"max_bytes", "min_free", "durable"},
    "memory": {"max_bytes"},
    "a Redis server": {"max_bytes", "ttl", "timeout"},
    "an object store": {"max_bytes", "timeout", "storage_options"},
    "a list of tiers": {"write_back"},
}
"""The options of each kind of location."""
_LEAST = {"max_bytes": 0, "min_free": 0, "ttl": 1}


@dataclass(frozen=True)
class Tier:
    """One location of a store that has several, with options of its own; they are those of ``Store``."""

    location: Any
    max_bytes: int | None = None
    min_free: int | None = None
    durable: bool | None = None
    ttl: int | None = None
    timeout: float | None = None
    storage_options: Mapping[str, Any] | None = None


def open_backend(location: Any, counters: Counters, form: Form, *, looking: bool = False, **options: Any) -> Backend:
    """The backend at ``location``: a URL of a server or an object store, an object of ``obstore.store``, else a folder.

    A list of locations and Tiers is one backend of all. ``form`` is what entries look like; ``options`` are those of the backend, and
    one that is None is as if it were not given. With ``looking`` opening it changes nothing there. Raises InvalidParameter for an
    option that the backend does not have, or that makes no sense, for a URL of no kind that is known, and what the backend raises.
    """
    kind = _kind(location)
    given = {name: value for name, value in options.items() if value is not None}
    unknown = set(given) - OPTIONS[kind]
    if unknown:
        raise InvalidParameter(f"{kind} has no option {', '.join(sorted(unknown))}{_EACH if kind == 'a list of tiers' else ''}")
    for name, least in _LEAST.items():
        check_count(name, given.get(name, least), least)
    if kind == "a list of tiers":
        return _open_tiers(location, counters, form, looking=looking, **given)
    if kind == "memory":
        if "max_bytes" not in given:
            raise InvalidParameter("memory needs max_bytes: nothing else bounds it")
        return Memory(counters, **given)
    if kind == "a Redis server":
        return Redis(location, counters, form, **given)
    if kind == "an object store":
        return ObjectStore(location, counters, form, **given)
    return Directory(_folder(location), counters, form, looking=looking, **given)


def check_count(name: str, value: Any, least: int) -> None:
    """Raise InvalidParameter unless ``value`` is an integer of at least ``least``."""
    if type(value) is not int or value < least:
        raise InvalidParameter(f"{name} is {value!r}, allowed are integers from {least}")


def _open_tiers(locations: Sequence[Any], counters: Counters, form: Form, *, looking: bool = False, write_back: bool = False) -> Tiers:
    if not locations:
        raise InvalidParameter("the location is an empty list, expected at least one tier")
    tiers = []
    for place in locations:
        tier = place if isinstance(place, Tier) else Tier(place)
        if isinstance(tier.location, (list, tuple)):
            raise InvalidParameter("a tier is a list of tiers, expected one location")
        own = Counters(counters)
        options = {field.name: getattr(tier, field.name) for field in dataclasses.fields(tier) if field.name != "location"}
        tiers.append((open_backend(tier.location, own, form, looking=looking, **options), own))
    return Tiers(tiers, counters, write_back=write_back)


def open_existing(location: str, counters: Counters, form: Form, *, looking: bool = False, **options: Any) -> Backend:
    """The backend at a location that is there already, as ``open_backend`` opens it. Raises MissingFile for a folder that is not."""
    if _kind(location) == "a folder" and not os.path.isdir(os.path.expanduser(_folder(location))):
        raise MissingFile(f"{location}: is no folder")
    return open_backend(location, counters, form, looking=looking, **options)


def _kind(location: Any) -> str:
    if isinstance(location, (list, tuple)):
        return "a list of tiers"
    if isinstance(location, Tier):
        raise InvalidParameter("the location is a Tier, expected a list of them")
    if location == MEMORY:
        return "memory"
    if is_redis(location):
        return "a Redis server"
    if is_object_store(location):
        return "an object store"
    if isinstance(location, str) and not location.startswith(_FILE) and (scheme := _URL.match(location)):
        raise InvalidParameter(f"the location has the scheme {scheme[0]!r}, known are {', '.join(SCHEMES)}, {MEMORY}, and paths of folders")
    return "a folder"


def _folder(location: Any) -> str:
    """The path of a folder, which may be named by a URL."""
    if not isinstance(location, (str, bytes, os.PathLike)):
        raise InvalidParameter(f"the location is of type {type(location).__name__}, expected a path, a URL or a list of these")
    path = os.fsdecode(location)
    if path.startswith(_FILE):
        parts = urlsplit(path)
        if parts.netloc not in ("", "localhost"):
            raise InvalidParameter(f"the location {path!r} names the host {parts.netloc!r}: a folder is one of this machine, file:///...")
        path = unquote(parts.path)
    if not path or "\0" in path:
        why = "a path holds no zero byte" if path else "it is empty; the current folder is '.'"
        raise InvalidParameter(f"the location {location!r} is no path of a folder: {why}")
    return path
