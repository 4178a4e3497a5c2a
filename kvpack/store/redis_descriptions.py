"""Descriptions of the entries on a Redis server, which provide their totals by model and recipe without reading headers.

    {kvpack}:about    a hash by key: 12 hexadecimal digits of the SHA-1 of the entry's descriptive text, a space, and the entry's size
    {kvpack}:abouts   a hash by those digits: the text, and the number and total size of the entries that it describes

Every script that puts or removes an entry changes them (redis_scripts.py). They are only a hint, because earlier versions of kvpack do not
change them. They are used only if they add up to the counts of all entries. Otherwise, they are corrected page by page.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

from .backend import StoredEntry
from .entry_descriptions import Descriptions, parse_text
from .redis_replies import integer
from .redis_scripts import KEYS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .redis_client import Client

_AT_ONCE = 100
"""Number of entries in a page. A script call takes a few milliseconds, during which all other clients wait."""
_MAX_PAGES = 2**20
_ID_DIGITS = 12
_MAX_TRIES = 5
"""Maximum number of attempts to read totals, because other programs may change them in between."""


class RedisDescriptions:
    """The descriptions of the entries on the server of ``client``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def read(self, also: str | None) -> Descriptions | None:
        """Return the totals by description, and the entries that have no description or the description ``also``.

        Returns None if the server has no valid counts.
        """
        missing: list[StoredEntry] | None = None
        for _ in range(_MAX_TRIES):
            reply = self._client.call("totals")
            if reply is None:
                return None
            entries, described, size, fields = reply
            known = _parse_totals(fields)
            numbers, sizes = sum(count for _, count, _ in known or ()), sum(total for *_, total in known or ())
            are_all = entries == numbers and size == sizes
            # Descriptions are corrected before their sizes are relied on.
            if known is None or numbers != described or (missing is not None and entries == described and not are_all):
                self._client.send("list", "UNLINK", *KEYS[8:], check=integer)
                missing = None
            elif missing is not None or (are_all and all(text != also for text, *_ in known)):
                return Descriptions(known, missing or [])
            else:
                missing = self._missing(also)
        return None

    def _missing(self, also: str | None) -> list[StoredEntry]:
        # The first pass corrects the texts of entries that are gone or have another size.
        digits = "" if also is None else hashlib.sha1(also.encode(), usedforsecurity=False).hexdigest()[:_ID_DIGITS]
        return [
            entry for kind in ("about", "sizes") for entry in list_pages(self._client, "missing", kind, at_once=_AT_ONCE, after=[digits])
        ]

    def add(self, texts: Sequence[tuple[bytes, str]]) -> None:
        """Store descriptions of entries. ``texts`` contains (key, text) pairs."""
        for start in range(0, len(texts), _AT_ONCE):
            self._client.call_each("list", [("describe", *(word for pair in texts[start : start + _AT_ONCE] for word in pair))])


def _parse_totals(fields: Mapping[bytes, bytes]) -> list[tuple[str, int, int]] | None:
    """Return (text, number of entries, bytes) for each description in the hash ``fields``. Returns None if another program has damaged it.
    """
    result: list[tuple[str, int, int]] = []
    try:
        for field, value in fields.items():
            if field.startswith(b"text "):
                entries, size = (int(fields[what + field.removeprefix(b"text ")]) for what in (b"entries ", b"bytes "))
                result.append((value.decode(), entries, size))
    except (KeyError, ValueError):
        return None
    return result if all(parse_text(text) is not None and entries >= 0 and size >= 0 for text, entries, size in result) else None


def list_pages(client: Client, script: str, *before: str, at_once: int, after: Sequence[str] = ()) -> Iterator[StoredEntry]:
    """Scan the server's entries with ``script``, page by page, and yield each entry once."""
    listed: set[bytes] = set()
    cursor = b"0"
    for _ in range(_MAX_PAGES):
        (reply,) = client.call_each("list", [(script, *before, cursor, at_once, *after)]) or [None]
        if reply is None or reply[0] == cursor != b"0":
            return
        cursor, entries = reply
        for key, size, used in struct.iter_unpack("<32sQQ", entries):
            # A scan may return a name twice.
            if key not in listed:
                listed.add(key)
                yield StoredEntry(key, size, used * 1000)
        if cursor == b"0":
            return
