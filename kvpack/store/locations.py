"""Opens the backend of a ``Store`` or ``PageStore`` at a location: a folder, a URL, an object store or a list of tiers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from kvpack.formats.errors import InvalidParameter, InvalidType, MissingFile
from kvpack.identity.identity import Identity

from .backend import Backend
from .counters import Counters
from .directory import Directory
from .encryption import Cipher
from .entry_kind import EntryFormat
from .folder import may_be_store
from .memory import MemoryBackend
from .object_store import ObjectStore, is_object_store
from .objects import SCHEMES as OBJECT_STORE_SCHEMES
from .options import LocationOptions, StoreOptions, Tier
from .redaction import redacted_location
from .redis import SCHEMES as REDIS_SCHEMES
from .redis import Redis, is_redis
from .tiers import Tiers

MEMORY = "memory://"
_FILE = "file://"
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/+|[a-z0-9.-]+:[0-9]+$", re.IGNORECASE)
"""Pattern of the beginning of a URL, which has one slash if it was made a pathlib.Path, or of a host and a port."""
_TIER_LIST_OPTIONS = {"write_back"}
"""Options that only a list of tiers supports."""


def open_backend(
    location: Any, counters: Counters, entry_format: EntryFormat, options: LocationOptions, *, skip_sweep: bool = False
) -> Backend:
    """Open the backend at ``location``: a URL of a server or an object store, an object of ``obstore.store``, or a folder.

    For a list of locations and Tiers, the backend combines all tiers. With ``skip_sweep``, opening does not change the location. Raises
    InvalidParameter if an option is invalid or the location does not support it, or if the kind of URL is unknown. Also raises the
    backend's errors.
    """
    keywords = options.keywords()
    if isinstance(location, (list, tuple)):
        _check_options("a list of tiers", keywords, _TIER_LIST_OPTIONS, ": each Tier has its own")
        return _open_tiers(location, counters, entry_format, skip_sweep=skip_sweep, **keywords)
    kind = _location_kind(location)
    _check_options(kind.name, keywords, kind.options)
    if kind is FOLDER:
        location, keywords["skip_sweep"] = _folder_path(location), skip_sweep
    return kind.open(location, counters, entry_format, **keywords)


def _check_options(kind: str, options: Mapping[str, Any], supported: set[str], hint: str = "") -> None:
    """Raise InvalidParameter if ``options`` contains an option that ``kind`` does not support."""
    if unknown := set(options) - supported:
        raise InvalidParameter(f"{kind} has no option {', '.join(sorted(unknown))}{hint}")


def _open_tiers(
    locations: Sequence[Any], counters: Counters, entry_format: EntryFormat, *, skip_sweep: bool = False, write_back: bool = False
) -> Tiers:
    if not locations:
        raise InvalidParameter("the location is an empty list: pass at least one tier")
    tiers = []
    for location_or_tier in locations:
        tier = location_or_tier if isinstance(location_or_tier, Tier) else Tier(location_or_tier)
        if isinstance(tier.location, (list, tuple)):
            raise InvalidParameter("a tier cannot itself be a list of tiers: pass one location per tier")
        tier_counters = Counters(counters)
        tiers.append((open_backend(tier.location, tier_counters, entry_format, tier, skip_sweep=skip_sweep), tier_counters))
    return Tiers(tiers, counters, write_back=write_back)


def open_existing(
    location: str, counters: Counters, entry_format: EntryFormat, options: LocationOptions, *, skip_sweep: bool = False
) -> Backend:
    """Open the backend at an existing location, as ``open_backend`` does. Raises MissingFile if a folder is missing or is not a store."""
    if _location_kind(location) is FOLDER:
        path, why = os.path.expanduser(_folder_path(location)), ""
        if not os.path.lexists(path):
            why = "does not exist; a store creates its folder when it stores its first chunk"
        elif not os.path.isdir(path):
            why = "is not a folder"
        elif not may_be_store(path):
            why = "is not a store, because it has files, but none of a store's folders: check the path"
        if why:
            raise MissingFile(f"{redacted_location(location)}: {why}")
    return open_backend(location, counters, entry_format, options, skip_sweep=skip_sweep)


class LocationKind(NamedTuple):
    """A kind of location: its URL schemes, the options that its backend supports, and the function that opens the backend."""

    name: str
    options: set[str]
    schemes: tuple[str, ...]
    """URL prefixes of such locations."""
    matches: Callable[[Any], bool]
    open: Callable[..., Backend]
    """Opens the backend. The arguments are a location, counters, the format of entries and the options."""


def _open_memory(location: str, counters: Counters, entry_format: EntryFormat, **options: Any) -> Backend:
    if "max_bytes" not in options:
        raise InvalidParameter("an in-memory store exists only in its own process, and needs a budget: pass max_bytes=")
    return MemoryBackend(counters, **options)


KINDS = [
    LocationKind("a Redis server", {"max_bytes", "ttl", "timeout"}, REDIS_SCHEMES, is_redis, Redis),
    LocationKind("an object store", {"max_bytes", "ttl", "timeout", "storage_options"}, OBJECT_STORE_SCHEMES, is_object_store, ObjectStore),
    LocationKind("memory", {"max_bytes"}, (MEMORY,), lambda location: isinstance(location, str) and location == MEMORY, _open_memory),
]
"""Kinds of locations other than folders. Any other text is the path of a folder."""

FOLDER = LocationKind("a folder", {"max_bytes", "min_free", "durable", "trusted_group", "ttl"}, (_FILE,), lambda location: True, Directory)


def _location_kind(location: Any) -> LocationKind:
    """Return the kind of a location that is not a list of tiers. Raises InvalidParameter for an unknown URL scheme."""
    if isinstance(location, Tier):
        raise InvalidParameter("the location is a Tier, expected a list of tiers: pass [tier]")
    for kind in KINDS:
        if kind.matches(location):
            return kind
    if isinstance(location, (str, bytes, os.PathLike)):
        path = os.fsdecode(location)
        if not path.startswith(_FILE) and (start := _URL.match(path)):
            supported = ", ".join(scheme for kind in (*KINDS, FOLDER) for scheme in kind.schemes)
            raise InvalidParameter(
                f"the location begins with {start[0]!r}, expected one of {supported} in a str, or a folder path: for a folder of this "
                "name, write ./ before it"
            )
    return FOLDER


def _folder_path(location: Any) -> str:
    """Return the path of a folder, passed as a path or a file:// URL. Raises InvalidType or InvalidParameter."""
    if not isinstance(location, (str, bytes, os.PathLike)):
        raise InvalidType(f"the location is of type {type(location).__name__}, expected a path, a URL or a list of these")
    path = os.fsdecode(location)
    if path.startswith(_FILE):
        parts = urlsplit(path)
        if parts.netloc not in ("", "localhost"):
            raise InvalidParameter(
                f"the location {redacted_location(path)!r} names the host {parts.hostname!r}: a folder must be on this machine, as in "
                "file:///..."
            )
        path = unquote(parts.path)
    if not path or "\0" in path:
        reason = "a path cannot contain a zero byte" if path else "it is empty; the current folder is '.'"
        raise InvalidParameter(f"the location {location!r:.200} is not a valid folder path: {reason}")
    return path


class OpenedBackend(NamedTuple):
    """An open backend with its cipher (None if entries are not encrypted).

    With ``check_values``, every load must check values against the codecs' rules in addition to digests.
    """

    backend: Backend
    cipher: Cipher | None
    check_values: bool


def open_for_identity(
    location: Any, identity: Identity, counters: Counters, options: StoreOptions, *, skip_sweep: bool = False
) -> OpenedBackend:
    """Open ``location`` for entries of ``identity``. With ``skip_sweep``, opening does not change the location.

    If the option ``check_values`` is not set, values are checked only if other users may write unencrypted entries. Raises
    InvalidParameter, and the backend's errors.
    """
    cipher = None if options.encryption is None else Cipher(options.encryption, identity.tenant)
    form = EntryFormat(options.max_entry_bytes, None if cipher is None else cipher.key_ids)
    backend = open_backend(location, counters, form, options, skip_sweep=skip_sweep)
    trusted = backend.is_private or cipher is not None
    return OpenedBackend(backend, cipher, not trusted if options.check_values is None else options.check_values)


def check_identity(identity: Any) -> None:
    if not isinstance(identity, Identity):
        raise InvalidType(f"identity is a {type(identity).__name__}, expected a kvpack.Identity, such as kvpack.Identity.of(model, recipe)")
