"""Counts the entries on a Redis server page by page, so that no call takes long and other clients are served in between.

All writers share one count. Its state is on the server: the keys counted so far, the sum of their sizes, and the cursor. Every script that
changes a counted entry also changes the sum, so the sum is exact once the last page has been counted.

Descriptions of the entries provide totals by model and recipe without reading headers:

    {kvpack}:about    a hash by key: 12 hexadecimal digits of the SHA-1 of the entry's descriptive text, a space, and the entry's size
    {kvpack}:abouts   a hash by those digits: the text, and the number and total size of the entries that it describes

Every script that puts or removes an entry updates them (redis_scripts.py). They are only a hint, because earlier versions of kvpack do not
update them. They are used only if they add up to the counts of all entries. Otherwise, they are corrected page by page.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from kvpack.runtime.threads import Lock

from .backend import StoredEntry
from .counters import Counters
from .entry_descriptions import Descriptions, parse_description
from .redis_client import RedisClient
from .redis_replies import check_integer
from .redis_scripts import KEYS

SUM_SECONDS = 600.0
"""Time in seconds after which sizes are summed again, because any user of the server may have changed the sum."""
WAIT_SECONDS = 0.05
"""Maximum time in seconds that a put spends on a count. Until the count is complete, a new entry replaces older ones (redis_scripts.py)."""
TIME_SHARE = 0.25
"""Maximum share of its time that a client spends on counting, so that a put with several requests does not wait in each of them."""
NAMES_AT_ONCE = 300
SIZES_AT_ONCE = 250
"""Number of server keys, or of sizes, in one page."""
MAX_PAGES = 2**20
"""Maximum number of pages in a scan, enough for a server with 300 million keys."""
MIN_RECOUNT_SECONDS = 60.0
"""Minimum time in seconds between two counts by puts that find no room. Another program may have changed the sum."""

_PHASES = ("sizes", "used", "names")
"""Phases of a complete count: check the entries with a size, check the entries with a last use, and add entries that have neither."""
_BEGIN = b"0"
"""Cursor before the first page, and after the last."""
_DONE, _UNSOUND = 1, -1
"""Results of the script that sums sizes: the sum is complete, or the counts on the server are inconsistent."""


class EntryCount:
    """The count of the entries on the server. Safe to use from any thread. Only one thread at a time updates the count."""

    def __init__(self, client: RedisClient, counters: Counters) -> None:
        self._client, self._counters = client, counters
        self._lock = Lock()
        self._summed: float | None = None
        self._running = False
        self._due = 0.0
        self._phase, self._cursor = 0, _BEGIN

    @property
    def is_known(self) -> bool:
        return self._summed is not None

    def advance(self) -> None:
        """Continue a count for at most ``WAIT_SECONDS``. If the sum is known but old, count only one more page."""
        with self._lock:
            if self._summed is None:
                self._step(partial(self._sum, trusted=True))
            elif self._running or time.monotonic() - self._summed > SUM_SECONDS:
                reply = self._client.call("sum", int(not self._running), SIZES_AT_ONCE, 0)
                self._running = reply == 0
                if reply == _DONE:
                    self._summed = time.monotonic()
                elif reply == _UNSOUND:
                    self._summed = None
                    self._step(self._recount)

    def refresh_sum(self) -> bool:
        """Sum the sizes again, unless this was done in the last ``MIN_RECOUNT_SECONDS``. Returns True if the new sum is complete."""
        with self._lock:
            if self._summed is None or time.monotonic() - self._summed < MIN_RECOUNT_SECONDS:
                return False
            return self._step(self._sum)

    def recount(self) -> bool:
        """Recount the entries by scanning the server's keys. Returns True if the sum of their sizes is known now.

        Returns False if the server does not answer or the time is up. Later puts then continue the count.
        """
        with self._lock:
            self._summed = None
            return self._step(self._recount)

    def collect(self) -> bool:
        """Count all entries from the beginning, without a time limit."""
        with self._lock:
            self._phase, self._cursor = 0, _BEGIN
            return self._recount(float("inf"))

    def _step(self, count: Callable[[float], bool]) -> bool:
        """Call ``count`` with a deadline, unless it is too early for another count. Returns True if the count is complete."""
        begun = time.monotonic()
        if begun < self._due:
            return False
        is_done = count(begun + WAIT_SECONDS)
        now = time.monotonic()
        self._due = 0.0 if is_done else now + (now - begun) * (1 / TIME_SHARE - 1)
        return is_done

    def _recount(self, deadline: float) -> bool:
        while self._phase < len(_PHASES):
            reply = self._client.call("count", _PHASES[self._phase], self._cursor, NAMES_AT_ONCE)
            if reply is None or reply[0] == self._cursor != _BEGIN:
                self._phase, self._cursor = 0, _BEGIN
                return False
            self._cursor, vanished = reply
            self._counters.add("vanished_entries", vanished)
            if self._cursor == _BEGIN:
                self._phase += 1
            elif time.monotonic() > deadline:
                return False
        self._phase = 0
        return self._sum(deadline, counted=True)

    def _sum(self, deadline: float, *, counted: bool = False, trusted: bool = False) -> bool:
        begin = 2 if counted else 1
        for _ in range(MAX_PAGES):
            reply = self._client.call("sum", begin, SIZES_AT_ONCE, int(trusted))
            if reply == _DONE:
                self._summed, self._running = time.monotonic(), False
                return True
            if reply == _UNSOUND and not counted:
                self._summed = None
                return self._recount(deadline)
            if reply != 0:
                return False
            begin = 0
            if time.monotonic() > deadline:
                return False
        return False


_AT_ONCE = 100
"""Number of entries in a page. A script call takes a few milliseconds, during which all other clients wait."""
_MAX_PAGES = 2**20
_ID_DIGITS = 12
_MAX_TRIES = 5
"""Maximum number of attempts to read totals, because other programs may change them in between."""


class RedisDescriptions:
    """Reads, adds and corrects descriptions of the entries on a Redis server."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    def read(self, listed: str | None) -> Descriptions | None:
        """Return the totals by description, and the entries that have no description or the description ``listed``.

        Returns None if the server's counts are invalid.
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
            # Descriptions are corrected before their sizes are used.
            if known is None or numbers != described or (missing is not None and entries == described and not are_all):
                self._client.send("list", "UNLINK", *KEYS[7:], check=check_integer)
                missing = None
            elif missing is not None or (are_all and all(text != listed for text, *_ in known)):
                return Descriptions(known, missing or [])
            else:
                missing = self._entries_to_inspect(listed)
        return None

    def _entries_to_inspect(self, listed: str | None) -> list[StoredEntry]:
        # The first pass corrects the texts of entries that no longer exist or have a different size.
        digits = "" if listed is None else hashlib.sha1(listed.encode(), usedforsecurity=False).hexdigest()[:_ID_DIGITS]
        return [
            entry for kind in ("about", "sizes") for entry in list_pages(self._client, "missing", kind, at_once=_AT_ONCE, after=[digits])
        ]

    def add(self, descriptions: Sequence[tuple[bytes, str]]) -> None:
        """Store descriptions of entries, passed as (key, text) pairs."""
        for start in range(0, len(descriptions), _AT_ONCE):
            self._client.call_each("list", [("describe", *(word for pair in descriptions[start : start + _AT_ONCE] for word in pair))])


def _parse_totals(fields: Mapping[bytes, bytes]) -> list[tuple[str, int, int]] | None:
    """Return (text, number of entries, bytes) for each description in the hash ``fields``, or None if another program has damaged it."""
    result: list[tuple[str, int, int]] = []
    try:
        for field, value in fields.items():
            if field.startswith(b"text "):
                entries, size = (int(fields[what + field.removeprefix(b"text ")]) for what in (b"entries ", b"bytes "))
                result.append((value.decode(), entries, size))
    except (KeyError, ValueError):
        return None
    return result if all(parse_description(text) is not None and entries >= 0 and size >= 0 for text, entries, size in result) else None


def list_pages(client: RedisClient, script: str, *before: str, at_once: int, after: Sequence[str] = ()) -> Iterator[StoredEntry]:
    """Scan the server's entries page by page with ``script``, and yield each entry once."""
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
