"""The backend for Redis and Valkey. Entries are strings on a server, and Lua scripts on the server evict them.

    {kvpack}:entry:<key>   an entry's bytes
    {kvpack}:used          a sorted set of keys by last use, in microseconds of the server's clock, less one for each ancestor
    {kvpack}:sizes         a hash: the size of each key's entry in bytes
    {kvpack}:bytes         the sum of the sizes
    {kvpack}:lease:<key>   the token of the worker that computes the missing chunks (leases.py)
    {kvpack}:about         a hash: which text describes each key's entry (redis_count.py)
    {kvpack}:abouts        a hash: these texts, and the number and total size of the entries that each describes
    {kvpack}:holds         a hash of pinned chains: owner, end and keys, by the last key and a digest of the owner

The braces keep all keys on one node of a cluster. Only the entries are authoritative. If the other keys are lost or inconsistent, the
entries are counted again by scanning the server's keys. Until then, a put stores an entry only if it certainly fits the budget: if the
server uses less memory than the budget, or if older entries of at least the same size can be removed in exchange.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpack.file.front import front_bytes
from kvpack.formats.errors import InvalidHeader, LimitExceeded, WriteFailed
from kvpack.formats.lazy import numpy

from .backend import BATCH_BYTES, BATCH_ENTRIES, MAX_ENTRY_BYTES, FoundEntry, NoLease, SingleTierBackend, StoredEntry, batches
from .entry_descriptions import Descriptions, entry_description, kind_description
from .entry_kind import FRONT_BYTES, UNENCRYPTED, EntryFormat, EntryKind, check_size
from .expiry import limit_ttl
from .pins import encode_pin, is_active, owner_digest, parse_pin
from .redis_client import FRONTS_BYTES, RedisClient
from .redis_count import MAX_PAGES, EntryCount, RedisDescriptions, list_pages
from .redis_replies import check_byte_strings, check_integer, make_bytes_check, parse_set_reply
from .redis_scripts import ENTRY, HOLDS, LEASE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .backend import Data, Lease, Pin, PinTerms
    from .counters import Counters
    from .redis_client import Call, Command

SCHEMES = ("redis://", "rediss://", "unix://")
_BYTES_AT_ONCE = BATCH_BYTES
"""Maximum total size of the entries in one request or reply, in bytes. A larger entry is requested separately."""
_SCRIPT_BYTES = 8 * 2**20
"""Maximum total size, in bytes, of the entries that one script call stores, unless a single entry is larger.

The call blocks all other clients.
"""
_KEYS_AT_ONCE = 1000
"""Maximum number of keys in one request."""
_PER_CALL = 100
"""Number of keys in one script call. A call takes a few milliseconds, during which it blocks all other clients."""
_FRONTS_AT_ONCE = 256
_MIN_FRONT_BYTES = 4096
_REFUSED, _STORED, _CROWDED = 0, 1, 3
"""Replies of the put script for one entry. If the entry exists, the script returns its front and size instead."""
_NO_REPLY = object()
NOTED_SECONDS = 5.0
"""Time in seconds before a put records the use of a chain again. It is shorter for a short ``ttl``.

This applies to a chain whose use has been recorded up to the entry before the new ones.
"""
_MAX_TRIES = 8
"""Maximum number of times that a put makes room. Other writers may use the room first."""
_SPARE_BYTES = 2**20
"""Maximum size of a reply without its entries, in bytes."""


class _NewEntry(NamedTuple):
    """The bytes of an entry to put, and its description, which may be empty."""

    data: bytes
    text: str


class Redis(SingleTierBackend):
    """A backend that keeps entries on the server at ``url`` (redis://, rediss:// or unix://).

    ``max_bytes`` is a hard budget for the entries' bytes. ``ttl`` is the number of seconds after which an unused entry expires. ``timeout``
    is the maximum number of seconds per request, plus one second for each MiB of the reply. Raises InvalidParameter if the URL is invalid
    or the server does not speak the Redis protocol. Raises MissingPackage if the redis package is not installed.
    """

    is_private = False

    def __init__(
        self,
        url: str,
        counters: Counters,
        entry_format: EntryFormat = UNENCRYPTED,
        *,
        max_bytes: int | None = None,
        ttl: int | None = None,
        timeout: float = 1.0,
    ) -> None:
        self._counters, self._max_bytes, self._ttl = counters, max_bytes, limit_ttl(ttl)
        self._form = dataclasses.replace(entry_format, max_bytes=min(entry_format.max_bytes, MAX_ENTRY_BYTES))
        self._client = RedisClient(url, counters, timeout, self._form.max_bytes + _BYTES_AT_ONCE + _SPARE_BYTES, uses_ttl=ttl is not None)
        self._count = EntryCount(self._client, counters)
        self._abouts = RedisDescriptions(self._client)
        self._front_bytes = FRONTS_BYTES
        """Number of bytes that requests for fronts fetch first: the size of the longest front in the last request."""
        self._noted = b"", -math.inf
        """The last key of a chain whose use was recorded, and the time when the use of the chain's first entry was recorded."""

    def count_present(self, keys: Sequence[bytes]) -> int:
        return next((index for index, is_present in enumerate(self.contains_many(keys)) if not is_present), len(keys))

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        return [self._form.kind(front, size) is EntryKind.READABLE for size, front in self._sizes_and_fronts(keys)]

    def get(self, keys: Sequence[bytes]) -> list[Data]:
        # Sizes and first bytes are fetched first, so that values that are too large, or are not entries, are not fetched.
        sizes = []
        for key, (size, front) in zip(keys, self._sizes_and_fronts(keys), strict=True):
            if not self._is_fetchable(key, size):
                break
            junk = self._form.kind(front, size) is EntryKind.JUNK
            sizes.append(min(size, FRONT_BYTES) if junk else size)
            if junk:
                break
        result: list[Data] = []
        for group in batches(enumerate(sizes), len(sizes), _BYTES_AT_ONCE):
            result += self._fetch([keys[at] for at in group], [sizes[at] for at in group])
            if len(result) <= group[-1]:
                break
        return result

    def find_many(self, keys: Sequence[bytes], after_tiers: Sequence[int], max_bytes: int) -> list[FoundEntry | None]:
        result: list[FoundEntry | None] = [None] * len(keys)
        requested = [index for index, tier in enumerate(after_tiers) if tier < 0]
        at_once = min(_KEYS_AT_ONCE, max(1, _BYTES_AT_ONCE // (max_bytes + 1)))
        for part in _split_into_batches(requested, at_once):
            values = self._client.send_all(
                "get", [(make_bytes_check(max_bytes + 1), "GETRANGE", ENTRY + keys[index], 0, max_bytes) for index in part]
            )
            for index, value in zip(part, values, strict=False):
                result[index] = FoundEntry(value, 0) if value else None
        return result

    def peek(self, key: bytes, *, front: bool = False) -> Data | None:
        return self.peek_many([key], front=front)[0]

    def peek_many(self, keys: Sequence[bytes], *, front: bool = False) -> list[Data | None]:
        if front:
            return self._read_fronts(keys)
        result: list[Data | None] = [None] * len(keys)
        for part in _split_into_batches(range(len(keys)), _KEYS_AT_ONCE):
            sizes = self._client.send_all("get", [(check_integer, "STRLEN", ENTRY + keys[index]) for index in part])
            present = {index: size for index, size in zip(part, sizes, strict=False) if self._is_fetchable(keys[index], size or 0)}
            for group in batches(present.items(), _KEYS_AT_ONCE, _BYTES_AT_ONCE):
                while group:
                    results = self._fetch([keys[index] for index in group], [present[index] for index in group])
                    for index, entry in zip(group, results, strict=False):
                        result[index] = entry
                    # The next entry has changed since, or the server did not answer.
                    group = group[len(results) + 1 :]
        return result

    def _read_fronts(self, keys: Sequence[bytes]) -> list[Data | None]:
        result: list[Data | None] = []
        for part in _split_into_batches(keys, _FRONTS_AT_ONCE):
            count = self._front_bytes
            looked = self._sizes_and_fronts(part, count)
            ends = [
                min(size, front_bytes(front) or size) if self._is_fetchable(key, size) and len(front) == min(size, count) else 0
                for key, (size, front) in zip(part, looked, strict=True)
            ]
            long_fronts = [index for index, end in enumerate(ends) if end > count]
            remainders: list[bytes | None] = []
            for group in batches([(n, ends[n] - count) for n in long_fronts], len(part), _BYTES_AT_ONCE):
                commands = [(make_bytes_check(ends[n]), "GETRANGE", ENTRY + part[n], count, ends[n] - 1) for n in group]
                replies = self._client.send_all("get", commands)
                remainders += replies or [None] * len(group)
            parts = {index: [looked[index][1]] for index, end in enumerate(ends) if 0 < end <= count}
            parts |= {index: [looked[index][1], remainder or b""] for index, remainder in zip(long_fronts, remainders, strict=True)}
            result += [_pad_with_zeros(parts.get(index, ()), looked[index][0], ends[index]) for index in range(len(part))]
            self._front_bytes = min(max(_MIN_FRONT_BYTES, *ends), FRONTS_BYTES)
        return result

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        return self.put_all(chain, {len(chain) - 1: pieces}, now_ns)[0]

    def put_all(self, chain: Sequence[bytes], entries: Mapping[int, Sequence[memoryview]], now_ns: int) -> list[bool]:
        stored: dict[int, bool] = {}
        if self._max_bytes is not None:
            self._count.advance()
        sizes = [(position, sum(map(len, pieces))) for position, pieces in entries.items()]
        for positions in batches(sizes, BATCH_ENTRIES, BATCH_BYTES):
            new = {position: _NewEntry(b"".join(entries[position]), entry_description(entries[position]) or "") for position in positions}
            stored |= self._put(chain, new)
            if not all(stored.values()):
                break
        return [stored.get(position, False) for position in entries]

    def touch(self, chain: Sequence[bytes], now_ns: int) -> None:
        replies = self._client.call_each("touch", self._touch_calls(chain))
        if replies and None not in replies:
            self._noted = chain[-1], time.monotonic()

    def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        # The end of a chain goes first, because a descendant cannot be found without its ancestors.
        calls = [("delete", b"".join(part)) for part in reversed([*_split_into_batches(keys, _PER_CALL)])]
        return {key for removed in self._client.call_each("delete", calls) for key in removed or ()}

    def discard(self, key: bytes, entry: FoundEntry) -> None:
        self.delete([key])

    def list(self) -> Iterator[StoredEntry]:
        return list_pages(self._client, "list", at_once=_PER_CALL)

    def size(self) -> tuple[int, int]:
        reply = self._client.call("size")
        if reply is not None and reply[0] == -1:
            sizes = [entry.size for entry in self.list()]
            return len(sizes), sum(sizes)
        return (0, 0) if reply is None else (reply[0], reply[1])

    def read_descriptions(self, listed_kind: str | None = None) -> Descriptions | None:
        """Return entry counts and total sizes grouped by description, or None after a fault.

        The result also lists, one by one, the entries that have no description or whose description is of kind ``listed_kind``.
        """
        return self._abouts.read(None if listed_kind is None else kind_description(listed_kind))

    def set_descriptions(self, descriptions: Sequence[tuple[bytes, str]]) -> None:
        """Store descriptions of entries, passed as (key, text) pairs."""
        self._abouts.add(descriptions)

    def pin(self, keys: Sequence[bytes], terms: PinTerms) -> bool:
        field = keys[-1] + owner_digest(terms.owner)
        return self._client.call("pin", field, encode_pin(keys, terms), b"".join(keys), terms.until) is not None

    def unpin(self, keys: Sequence[bytes], owner: str | None = None) -> bool:
        if owner is not None:
            return bool(self._client.send("unpin", "HDEL", HOLDS, keys[-1] + owner_digest(owner), check=check_integer, default=0))
        fields = self._client.send("unpin", "HKEYS", HOLDS, check=check_byte_strings, default=())
        result = [field for field in fields if field.startswith(keys[-1])]
        return bool(result and self._client.send("unpin", "HDEL", HOLDS, *result, check=check_integer, default=0))

    def pins(self) -> Sequence[Pin]:
        result = []
        for hold in self._client.send("pinned", "HVALS", HOLDS, check=check_byte_strings, default=()):
            try:
                result.append(parse_pin("on the server", hold))
            except InvalidHeader as error:
                self._counters.fault("pinned", error)
        return [pin for pin in result if is_active(pin)]

    def take_lease(self, key: bytes, seconds: float) -> Lease | None:
        token = os.urandom(16)
        milliseconds = max(1, int(1000 * seconds))
        reply = self._client.send("lease", "SET", LEASE + key, token, "NX", "PX", milliseconds, check=parse_set_reply, default=_NO_REPLY)
        return NoLease() if reply is _NO_REPLY else _RedisLease(self._client, key, token) if reply else None

    def collect(self) -> None:
        """Recount the entries by scanning the server's keys, and evict entries until the rest fits the budget."""
        if self._count.collect() and self._max_bytes is not None:
            self._make_room((), ())

    def close(self) -> None:
        self._client.close()

    def _put(self, chain: Sequence[bytes], entries: Mapping[int, _NewEntry]) -> dict[int, bool]:
        """Store the entries of one request, keyed by their position in ``chain``. Returns True for each entry that is stored now."""
        results_by_position = {position: False for position, entry in entries.items() if len(entry.data) > self._form.max_bytes}
        self._counters.add("refused_chunks", len(results_by_position))
        replaced: set[int] = set()
        full, is_counted = False, self._max_bytes is None or self._count.is_known
        for _ in range(_MAX_TRIES):
            pending = [position for position in entries if position not in results_by_position]
            if not pending:
                break
            groups = self._group_for_script(pending, entries, replaced)
            replies, noted = self._send(chain, groups, entries, replaced, is_counted)
            results: dict[int, Any] = {}
            for group, reply in zip(groups, replies, strict=False):
                results |= zip(group, reply[3] if reply and reply != [-1] else (), strict=False)
            refused = []
            for position, result in results.items():
                outcome = self._interpret_reply(position, result, replaced)
                if outcome is not None:
                    results_by_position[position] = outcome
                refused += [position] if outcome is False else []
                if result == _STORED:
                    self._noted = chain[position], noted
                    self._counters.add("saved_chunks")
                    self._counters.add("saved_bytes", len(entries[position].data))
            crowded = _REFUSED in results.values() and self._max_bytes is not None
            if crowded and self._count.refresh_sum():
                # The sum of the sizes has been corrected, so the entries may fit now.
                for position in refused:
                    del results_by_position[position]
                continue
            self._counters.add("refused_chunks", len(refused))
            if not replies or None in replies:
                break
            if [-1] in replies:
                is_counted = self._count.recount()
            if _CROWDED in results.values() and (
                full or not self._make_room(chain, [len(entries[n].data) for n in pending if n not in results_by_position])
            ):
                # No more entries can be evicted, so only entries that fit now can be stored.
                if full:
                    self._counters.add("refused_chunks", len(pending) - sum(position in results_by_position for position in pending))
                    break
                full = True
        return {position: results_by_position.get(position, False) for position in entries}

    def _interpret_reply(self, position: int, result: Any, replaced: set[int]) -> bool | None:
        """Return True if the entry at ``position`` is stored, False if it was rejected, and None if the put must be repeated.

        If the put must replace an existing entry, the position is added to ``replaced``.
        """
        if not isinstance(result, tuple):
            return {_REFUSED: False, _STORED: True}.get(result)
        kind = self._form.kind(*result)
        if kind is EntryKind.JUNK and position not in replaced:
            replaced.add(position)
            return None
        return kind is EntryKind.READABLE

    def _group_for_script(self, positions: Sequence[int], entries: Mapping[int, _NewEntry], replaced: set[int]) -> Sequence[Sequence[int]]:
        """Split positions into groups, each stored by one short script call and all new or all replaced. Calls block all other clients."""
        sizes = [(position, len(entries[position].data)) for position in positions]
        return [
            [*same]
            for batch in batches(sizes, BATCH_ENTRIES, _SCRIPT_BYTES)
            for _, same in groupby(batch, lambda position: position in replaced)
        ]

    def _touch_calls(self, chain: Sequence[bytes]) -> Sequence[Call]:
        """Return the script calls that record a use of ``chain``. Each call is short."""
        # The server's clock is used, because clients' clocks may differ. The end of a long chain comes first, because its beginning must be
        # newer.
        starts = range(0, len(chain), _KEYS_AT_ONCE)
        return [("touch", b"".join(chain[start : start + _KEYS_AT_ONCE]), _limit_argument(self._ttl), start) for start in reversed(starts)]

    def _send(
        self,
        chain: Sequence[bytes],
        groups: Sequence[Sequence[int]],
        entries: Mapping[int, _NewEntry],
        replaced: set[int],
        is_counted: bool,
    ) -> tuple[Sequence[Any], float]:
        """Send the entries of ``groups``. Returns the replies, and the time of the last recorded use of the preceding entries."""
        # The script gives an entry a use no later than its predecessor's, so the predecessor's use is recorded first.
        before = groups[0][0]
        key, noted = self._noted
        now = time.monotonic()
        recent_seconds = NOTED_SECONDS if self._ttl is None else min(NOTED_SECONDS, self._ttl / 8)
        is_recent = before and chain[before - 1] == key and now - noted < recent_seconds
        touches = [] if is_recent else self._touch_calls(chain[:before])
        settings = (FRONT_BYTES, int(not is_counted))
        puts = [self._put_call(chain, group, entries, int(group[0] in replaced), *settings) for group in groups]
        results = self._client.call_each("put", [*touches, *puts])
        replies = results[len(touches) :]
        if not is_recent:
            noted = -math.inf if None in results[: len(touches)] else now
        for reply in replies:
            if reply is not None and reply != [-1]:
                self._count_evictions(reply[0], reply[1])
                if reply[2]:
                    self._counters.fault("put", WriteFailed(f"the server refused an entry: {reply[2]!r:.200}"))
        return replies, noted

    def _put_call(self, chain: Sequence[bytes], group: Sequence[int], entries: Mapping[int, _NewEntry], *settings: int) -> Call:
        added = [argument for position in group for argument in (position + 1, entries[position].text, entries[position].data)]
        return ("put", b"".join(chain[: group[-1] + 1]), _limit_argument(self._max_bytes), _limit_argument(self._ttl), *settings, *added)

    def _make_room(self, chain: Sequence[bytes], sizes: Sequence[int]) -> bool:
        """Evict entries until entries of ``sizes`` bytes fit. Returns True on success.

        If the budget is too small for all of them, there is room only for the first ones.
        """
        assert self._max_bytes is not None
        needed = 0
        for size in sizes:
            if needed + size > self._max_bytes:
                break
            needed += size
        kept, first = b"".join(chain), 0
        for _ in range(MAX_PAGES):
            reply = self._client.call("room", self._max_bytes - needed, kept, first)
            if reply is None:
                return False
            state, evicted, freed, first = reply
            self._count_evictions(evicted, freed)
            if state != _CROWDED:
                return bool(state == _STORED)
        return False

    def _count_evictions(self, entries: int, freed: int) -> None:
        self._counters.add("evicted_entries", entries)
        self._counters.add("evicted_bytes", freed)

    def _is_fetchable(self, key: bytes, size: int) -> bool:
        """Return True if an entry exists and may be fetched. ``size`` is its size in bytes, or 0 if it does not exist."""
        try:
            check_size(f"entry {key.hex()}", size, self._form.max_bytes)
        except LimitExceeded as error:
            self._counters.fault("get", error)
            return False
        return size > 0

    def _sizes_and_fronts(self, keys: Sequence[bytes], count: int = FRONT_BYTES) -> Sequence[tuple[int, bytes]]:
        """Return, for each of ``keys``, the size of its entry and the entry's first ``count`` bytes.

        If the key is missing or not a string, or the server did not reply, the size is 0, and there are no bytes.
        """
        result: list[tuple[int, bytes]] = []
        for part in _split_into_batches(keys, _KEYS_AT_ONCE):
            calls = [("fronts", b"".join(some), count) for some in _split_into_batches(part, _PER_CALL)]
            replies = self._client.call_each("match", calls)
            if not replies or None in replies or sum(map(len, replies)) != 2 * len(part) + len(calls):
                break
            for vanished, *found in replies:
                self._counters.add("vanished_entries", vanished)
                for size, front in zip(found[::2], found[1::2], strict=True):
                    if isinstance(front, Exception):
                        self._counters.fault("match", front)
                    result.append((size, b"" if isinstance(front, Exception) else front))
        return [*result, *[(0, b"")] * (len(keys) - len(result))]

    def _fetch(self, keys: Sequence[bytes], sizes: Sequence[int]) -> Sequence[bytearray]:
        """Return the bytes of entries with the expected ``sizes``, up to the first entry of a different size. No more bytes than these are
        fetched.
        """
        ranges = [
            (index, begin, min(begin + _BYTES_AT_ONCE, size))
            for index, size in enumerate(sizes)
            for begin in range(0, size, _BYTES_AT_ONCE)
        ]
        result: list[bytearray] = []
        for group in batches([(at, stop - begin) for at, (_, begin, stop) in enumerate(ranges)], _KEYS_AT_ONCE, _BYTES_AT_ONCE):
            requests = [ranges[at] for at in group]
            commands: list[Command] = [
                (make_bytes_check(stop - begin), "GETRANGE", ENTRY + keys[index], begin, stop - 1) for index, begin, stop in requests
            ]
            values = self._client.send_all("get", commands)
            for (index, begin, stop), value in zip(requests, values, strict=False):
                if value is None or len(value) != stop - begin:
                    return result[:index]
                if not begin:
                    result.append(bytearray(value))
                else:
                    result[index] += value
            if len(values) < len(requests):
                return result[: requests[len(values)][0]]
        return result


class _RedisLease:
    """A lease on Redis: a key that contains the holder's random token and expires on its own."""

    def __init__(self, client: RedisClient, key: bytes, token: bytes) -> None:
        self._client, self._key, self._token = client, key, token

    def release(self) -> None:
        self._client.call("release", self._key, self._token)


def is_redis(location: str | os.PathLike[str]) -> bool:
    return isinstance(location, str) and location.startswith(SCHEMES)


def _limit_argument(limit: int | None) -> int | str:
    """Return ``limit`` as a script argument. None becomes an empty string."""
    return "" if limit is None else limit


def _split_into_batches(items: Sequence[Any], count: int) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(items), count):
        yield items[begin : begin + count]


def _pad_with_zeros(parts: Sequence[bytes], size: int, end: int) -> Data | None:
    """Join ``parts`` and append zeros up to ``size`` bytes. Returns None if ``parts`` contain fewer than ``end`` bytes in total.

    The zeros use no memory until they are read.
    """
    if not end or sum(map(len, parts)) < end:
        return None
    entry = numpy.zeros(size, numpy.uint8).data
    at = 0
    for part in parts:
        entry[at : at + len(part)] = part
        at += len(part)
    return entry
