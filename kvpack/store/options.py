"""Options of stores and of their locations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from kvpack.formats.arguments import check_flag, describe
from kvpack.formats.errors import InvalidParameter

from .backend import MAX_ENTRY_BYTES
from .redaction import redacted_location

MAX_SECONDS = 10**9
"""Maximum wait in seconds, 31 years. Some systems cannot represent longer times."""
_MINIMUMS = {"max_bytes": 0, "min_free": 0, "ttl": 1}
_FLAGS = ("durable", "write_back", "check_values")
_BYTES = ("max_bytes", "min_free", "max_entry_bytes")


@dataclass(frozen=True, kw_only=True)
class LocationOptions:
    """The options of one location. None means that an option is not set. Some kinds of locations do not support all options."""

    max_bytes: int | None = None
    """Budget in bytes for the entries of all writers at the location."""
    min_free: int | None = None
    """Number of bytes to leave free on a folder's disk."""
    durable: bool | None = None
    """True to force a folder's entries to disk before a put returns."""
    trusted_group: int | str | None = None
    """Id or name of a group whose members may write to a folder."""
    ttl: int | None = None
    """Number of seconds after which an unused entry expires."""
    timeout: float | None = None
    """Maximum number of seconds per request to a server."""
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    """Settings for obstore by name. They may contain secrets."""

    def keywords(self) -> dict[str, Any]:
        """Return the location's options that are set. Raises InvalidParameter for an invalid count or timeout."""
        result = {option.name: value for option in fields(LocationOptions) if (value := getattr(self, option.name)) is not None}
        for name, minimum in _MINIMUMS.items():
            check_count(name, result.get(name, minimum), minimum)
        if self.timeout is not None:
            check_seconds("timeout", self.timeout)
        for name in _FLAGS:
            if (flag := getattr(self, name, None)) is not None:
                check_flag(flag, name)
        return result


@dataclass(frozen=True, kw_only=True)
class StoreOptions(LocationOptions):
    """The options of a ``Store`` or a ``PageStore``, including the options of its location."""

    write_back: bool | None = None
    """True to write all tiers except the first in the background."""
    encryption: Mapping[str, bytes] | None = field(default=None, repr=False)
    """AES keys by id."""
    check_values: bool | None = None
    """True to check the rules of the codecs in addition to digests on every load."""
    max_entry_bytes: int = MAX_ENTRY_BYTES
    """Maximum size of an entry in bytes."""

    def __post_init__(self) -> None:
        check_count("max_entry_bytes", self.max_entry_bytes, 1)

    def keywords(self) -> dict[str, Any]:
        """Return the location's options that are set, including ``write_back``. Raises InvalidParameter for an invalid count."""
        return super().keywords() | ({} if self.write_back is None else {"write_back": self.write_back})


class StoreKeywords(TypedDict, total=False):
    max_bytes: int | None
    min_free: int | None
    durable: bool | None
    trusted_group: int | str | None
    ttl: int | None
    timeout: float | None
    storage_options: Mapping[str, Any] | None
    write_back: bool | None
    encryption: Mapping[str, bytes] | None
    check_values: bool | None
    max_entry_bytes: int


@dataclass(frozen=True, repr=False)
class Tier(LocationOptions):
    """One location of a store with several tiers, with its own options.

    Args:
        location: Any location that ``Store`` supports, except a list. For memory, ``max_bytes`` is required.
        max_bytes, min_free, durable, trusted_group, ttl, timeout, storage_options: See ``Store``.

    >>> tiers = [kvpack.Tier("memory://", max_bytes=10**9), kvpack.Tier("store")]
    >>> with kvpack.Store(tiers, kvpack.Identity("llama", "octopus-3"), chunk=32) as store:
    ...     store.save(list(range(64)), kvpack.pack(past, "octopus-3"))
    64
    """

    location: Any

    def __repr__(self) -> str:
        """Return text that shows the location and the options that are set, without secrets."""
        options = {option.name: getattr(self, option.name) for option in fields(LocationOptions) if option.repr}
        shown = [f"{name}={value!r}" for name, value in options.items() if value is not None]
        return f"Tier({', '.join([repr(redacted_location(self.location)), *shown])})"


def check_count(name: str, value: Any, minimum: int) -> None:
    """Raise InvalidParameter unless ``value`` is an integer of at least ``minimum``."""
    if type(value) is not int or value < minimum:
        unit = " bytes, such as 10**9 for 1 GB" if name in _BYTES else ""
        raise InvalidParameter(f"{name} is {describe(value)}, expected an integer of at least {minimum}{unit}")


def check_seconds(name: str, value: Any, instead: str = "") -> None:
    """Raise InvalidParameter unless ``value`` is a valid number of seconds. ``instead`` is appended to the message."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_SECONDS:
        raise InvalidParameter(f"{name} is {describe(value)}, expected a number of seconds above 0 and at most {MAX_SECONDS:,}{instead}")
