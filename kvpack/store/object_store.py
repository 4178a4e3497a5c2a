"""The object store backend, for S3 and compatible services, Google Cloud Storage, and Azure.

    <prefix>/3/f/3f...e1    an entry, which is put only if it is missing, and never changed
    <prefix>/holds/...      a pinned chain: its owner, its end and its keys
    <prefix>/leases/...     the token of the worker that computes the missing chunks (leases.py)
    <prefix>/uses/...       the entries used, the most recent last (last_used.py)

Requests run concurrently, and pause for a while after failures.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from random import randrange
from typing import Any

from kvpack.formats.errors import InvalidHeader, LimitExceeded
from kvpack.runtime.threads import Lock, in_parallel

from .backend import Data, FoundEntry, Lease, NoLease, Pin, PinTerms, SingleTierBackend, StoredEntry
from .breaker import CircuitBreaker, RequestGuard
from .counters import Counters
from .entry_kind import UNENCRYPTED, EntryFormat, EntryKind
from .expiry import limit_ttl, pass_seconds
from .keys import KEY_BYTES
from .last_used import INTERVAL_SECONDS, LastUse, UseLog, eviction_order, merge_records, parse_last_uses, record_name
from .objects import SCHEMES, Objects
from .pins import encode_pin, is_active, owner_digest, parse_pin

MAX_CONCURRENT_REQUESTS = 16
"""Maximum number of concurrent requests."""
MAX_CONCURRENT_PUTS = 8
"""Maximum number of concurrent puts. Each needs memory for its entry."""
RECOUNT_SECONDS = 60.0
"""Time in seconds after which a writer recounts the stored bytes, because other processes write too."""
_SLACK = 16
"""Share of the budget, 1/16, that eviction frees beyond what is needed, so that most puts need not list the entries."""
_MERGE_INTERVAL = 32
"""After putting a record, a store merges all records of uses with a probability of 1 in 32."""
MAX_RECORDS_BYTES = 256 * 2**20
"""Maximum total size, in bytes, of the records of uses, or of the pins, that are read. It is enough for 8 million keys."""
_MAX_SEEN_LEASES = 4096
"""Maximum number of other workers' leases whose age is remembered."""
_EARLY_SECONDS = 0.25
_HOLDS, _USES, _LEASES = "holds/", "uses/", "leases/"


ListedObject = tuple[str, int, int]
"""The name, the size in bytes and the time of the put, in nanoseconds since 1970, of each object."""
Listing = list[ListedObject]
ListedEntries = list[tuple[bytes, int, int]]
"""The key, the size in bytes and the time of the put, in nanoseconds since 1970, of each entry."""


class ObjectStore(SingleTierBackend):
    """A backend that keeps entries in the object store at ``location``, a URL or an object of ``obstore.store``.

    ``storage_options`` are obstore's settings by name, such as endpoint, region and access_key_id. Other settings come from environment
    variables, such as AWS_ENDPOINT_URL. ``max_bytes`` is a budget for the entries' bytes, which every writer recounts each minute. ``ttl``
    is the number of seconds after which an unused entry expires. ``timeout`` is the maximum number of seconds per request. Raises the same
    errors as ``Objects``.
    """

    is_private = False

    def __init__(
        self,
        location: Any,
        counters: Counters,
        entry_format: EntryFormat = UNENCRYPTED,
        *,
        max_bytes: int | None = None,
        ttl: int | None = None,
        timeout: float = 5.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._objects = Objects(location, entry_format.max_bytes, timeout, storage_options)
        self._counters, self._form, self._max_bytes = counters, entry_format, max_bytes
        self._breaker = CircuitBreaker()
        self._guard = RequestGuard(self._breaker, counters, self._objects.errors, self._objects.refusals)
        self._ttl = limit_ttl(ttl)
        self._uses = UseLog(INTERVAL_SECONDS if ttl is None else min(INTERVAL_SECONDS, pass_seconds(ttl)))
        self._lock = Lock()
        self._expiry_lock = Lock()
        self._expired: set[bytes] = set()
        self._expiry_checked: float | None = None
        self._total = 0
        self._seen_leases: dict[bytes, tuple[bytes, float]] = {}
        self._counted: float | None = None

    def count_present(self, keys: Sequence[bytes]) -> int:
        keys = self._leading_unexpired(keys)
        with contextlib.closing(in_parallel(lambda key: self._kind(_object_name(key)), keys, MAX_CONCURRENT_REQUESTS)) as kinds:
            return next((index for index, kind in enumerate(kinds) if kind is not EntryKind.READABLE), len(keys))

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        expired = self._expired_keys()
        kinds = in_parallel(lambda key: None if key in expired else self._kind(_object_name(key)), keys, MAX_CONCURRENT_REQUESTS)
        return [kind is EntryKind.READABLE for kind in kinds]

    def get(self, keys: Sequence[bytes]) -> list[Data]:
        result: list[Data] = []
        with contextlib.closing(in_parallel(self.peek, self._leading_unexpired(keys), MAX_CONCURRENT_REQUESTS)) as entries:
            for data in entries:
                if data is None:
                    break
                result.append(data)
        return result

    def find_many(self, keys: Sequence[bytes], after_tiers: Sequence[int], max_bytes: int) -> list[FoundEntry | None]:
        expired = self._expired_keys()

        def find(request: tuple[bytes, int]) -> FoundEntry | None:
            key, tier = request
            if tier >= 0 or key in expired:
                return None
            data = self._guard.request("get", lambda: self._objects.read_beginning(_object_name(key), max_bytes), None)
            return None if data is None else FoundEntry(data, 0)

        return [*in_parallel(find, zip(keys, after_tiers, strict=True), MAX_CONCURRENT_REQUESTS)]

    def peek_many(self, keys: Sequence[bytes], *, front: bool = False) -> list[Data | None]:
        return [*in_parallel(lambda key: self.peek(key, front=front), keys, MAX_CONCURRENT_REQUESTS)]

    def peek(self, key: bytes, *, front: bool = False) -> Data | None:
        read = self._objects.read_front if front else self._objects.read
        return self._guard.request("get", lambda: read(_object_name(key)), None)

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        return self.put_all(chain, {len(chain) - 1: pieces}, now_ns)[0]

    def put_all(self, chain: Sequence[bytes], entries: Mapping[int, Sequence[memoryview]], now_ns: int) -> list[bool]:
        sizes = [sum(map(len, pieces)) for pieces in entries.values()]
        fitting = self._reserve(sizes, chain)
        self._counters.add("refused_chunks", len(sizes) - fitting)
        positions = list(entries)[:fitting]
        put = in_parallel(lambda position: self._put(chain[position], entries[position]), positions, MAX_CONCURRENT_PUTS)
        stored = [*put, *[False] * (len(sizes) - fitting)]
        if True in stored:
            last = max(position for position, success in zip(entries, stored, strict=True) if success)
            self.touch(chain[: last + 1], now_ns)
            if self._ttl is not None:
                # Entries that no record names never expire.
                self._record_uses()
                self._remove_expired()
        return stored

    def _put(self, key: bytes, pieces: Sequence[memoryview]) -> bool:
        """Put an entry whose bytes are already reserved. Returns True if a readable entry exists now."""
        name, data = _object_name(key), b"".join(pieces)
        new: bool | None = self._guard.request("put", lambda: self._objects.put_new(name, data), None)
        kind = EntryKind.READABLE
        if new is False:
            kind = self._kind(name) or EntryKind.FOREIGN
            if kind is EntryKind.JUNK:
                # No store can read this object, whichever program put it there.
                new = self._guard.request("put", lambda: self._objects.put(name, data), None)
        if new:
            self._counters.add("saved_chunks")
            self._counters.add("saved_bytes", len(data))
        else:
            self._release(len(data))
        if new is None:
            return False
        if kind is EntryKind.FOREIGN:
            self._counters.add("refused_chunks")
            return False
        return True

    def touch(self, chain: Sequence[bytes], now_ns: int) -> None:
        # Use the clock of the object store, because the clocks of its users may differ.
        self._uses.record_use(chain)
        with self._expiry_lock:
            self._expired = self._expired.difference(chain) if self._expired else self._expired
        if self._uses.is_due():
            self._record_uses()

    def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        sizes = dict(zip(keys, in_parallel(self._entry_size, keys, MAX_CONCURRENT_REQUESTS), strict=True))
        return self._remove_all([key for key in reversed(keys) if sizes[key] is not None])

    def discard(self, key: bytes, entry: FoundEntry) -> None:
        self._remove_all([key])

    def list(self) -> Iterator[StoredEntry]:
        last = self._last_uses(self._list_records())
        for key, size, put_ns in self._list_entries() or ():
            yield StoredEntry(key, size, max(put_ns, last[key].used_ns if key in last else 0))

    def size(self) -> tuple[int, int]:
        sizes = [size for _, size, _ in self._list_entries() or ()]
        return len(sizes), sum(sizes)

    def pin(self, keys: Sequence[bytes], terms: PinTerms) -> bool:
        name = _HOLDS + keys[-1].hex() + "/" + owner_digest(terms.owner).hex()
        return self._guard.request("pin", lambda: self._objects.put(name, encode_pin(keys, terms)), False)

    def unpin(self, keys: Sequence[bytes], owner: str | None = None) -> bool:
        folder = _HOLDS + keys[-1].hex() + "/"
        if owner is None:
            names = [name for name, _, _ in self._list_objects("unpin", folder) or ()]
        else:
            names = [folder + owner_digest(owner).hex()]
        return True in [self._remove_pin(name) for name in names]

    def _remove_pin(self, name: str) -> bool:
        # S3 does not report whether it removed anything.
        return self._guard.request("unpin", lambda: self._objects.size(name) is not None and self._objects.remove(name), False)

    def pins(self) -> Sequence[Pin]:
        return self._pins() or ()

    def _pins(self, *, sweep: bool = False) -> Sequence[Pin] | None:
        """Return the active pins, or None if the service does not answer. With ``sweep``, expired pins are removed."""
        result = []
        names = self._list_objects("pinned", _HOLDS)
        if names is None:
            return None
        for (name, _, _), data in zip(names, self._read_all(names), strict=True):
            try:
                pin = parse_pin(name, bytes(data)) if data else None
            except InvalidHeader as error:
                self._counters.fault("pinned", error)
                continue
            if pin is not None and is_active(pin):
                result.append(pin)
            elif pin is not None and sweep:
                self._remove(name)
        return result

    def take_lease(self, key: bytes, seconds: float) -> Lease | None:
        name, token = _LEASES + key.hex(), os.urandom(16)
        new: bool | None = self._guard.request("lease", lambda: self._objects.put_new(name, token), None)
        if new is False:
            # Workers share no clock, so a lease has ended if this store has seen the same one for long enough.
            holder = self._guard.request("lease", lambda: self._objects.read_beginning(name, len(token)), None)
            seen = self._seen_leases.get(key)
            if holder is None or seen is None or seen[0] != bytes(holder):
                if len(self._seen_leases) >= _MAX_SEEN_LEASES:
                    self._seen_leases.clear()
                self._seen_leases[key] = bytes(holder or b""), time.monotonic()
                return None
            # Take over slightly before workers that wait for the lease give up.
            if time.monotonic() - seen[1] < max(seconds / 2, seconds - _EARLY_SECONDS):
                return None
            new = self._guard.request("lease", lambda: self._objects.put(name, token), None)
        self._seen_leases.pop(key, None)
        return NoLease() if new is None else _ObjectLease(self, name, token)

    def collect(self) -> None:
        """Remove expired entries, recount the rest, evict entries above the budget, and merge the records of uses."""
        self._record_uses()
        self._remove_expired(refresh=True)
        with self._lock:
            self._evict(self._max_bytes, set())
        self._merge_records()

    def close(self) -> None:
        self._record_uses()

    def _kind(self, name: str) -> EntryKind | None:
        """Return the kind of the object ``name``, or None if it is missing or the request failed."""
        kind = self._guard.request("match", lambda: self._objects.read_prefix(name), None)
        return None if kind is None else self._form.kind(*kind)

    def _reserve(self, sizes: Sequence[int], chain: Sequence[bytes]) -> int:
        """Reserve room for entries of ``sizes`` bytes, evicting others if necessary. Returns the number of leading entries that fit."""
        fitting = next((index for index, size in enumerate(sizes) if size > self._form.max_bytes), len(sizes))
        if self._max_bytes is None:
            return fitting
        with self._lock:
            stale = self._counted is None or time.monotonic() - self._counted > RECOUNT_SECONDS
            needed = 0
            for size in sizes[:fitting]:
                if needed + size > self._max_bytes:
                    break
                needed += size
            if needed and (stale or self._total + needed > self._max_bytes):
                self._evict(self._max_bytes - needed, set(chain))
            if self._counted is None:
                return 0
            count = 0
            for size in sizes[:fitting]:
                if self._total + size > self._max_bytes:
                    break
                self._total += size
                count += 1
            return count

    def _release(self, size: int) -> None:
        with self._lock:
            self._total -= size

    def _evict(self, max_bytes: int | None, protected: set[bytes]) -> None:
        """Count the entries, and remove the least recently used ones until the rest fits into ``max_bytes``."""
        entries = self._list_entries()
        self._counted = None if entries is None else time.monotonic()
        if entries is None:
            return
        sizes = {key: size for key, size, _ in entries}
        self._total = sum(sizes.values())
        if max_bytes is None or self._total <= max_bytes:
            return
        self._record_uses()
        pins = self._pins(sweep=True)
        if pins is None:
            # Without the pins, no entry may be removed.
            return
        protected = protected.union(*(pin.chain for pin in pins))
        to_evict, left = [], self._total
        order = eviction_order([(key, put_ns) for key, _, put_ns in entries], self._last_uses(self._list_records()), time.time_ns())
        for key in order:
            if left <= max_bytes - max_bytes // _SLACK:
                break
            if key not in protected:
                to_evict.append(key)
                left -= sizes[key]
        freed = [sizes[key] for key in self._remove_all(to_evict)]
        self._total -= sum(freed)
        self._counters.add("evicted_entries", len(freed))
        self._counters.add("evicted_bytes", sum(freed))

    def _record_uses(self) -> None:
        record, name = self._uses.pop_record(), _USES + record_name(self._ttl)
        if record and self._guard.request("touch", lambda: self._objects.put(name, record), False) and not randrange(_MERGE_INTERVAL):
            self._merge_records()

    def _merge_records(self) -> None:
        """Merge records of similar age. Uses of entries that no longer exist are dropped."""
        records, entries = self._list_records(), self._list_entries()
        if len(records) < 2 or entries is None:
            return
        present = {key for key, _, _ in entries}
        protected = merge_records({key: use for key, use in self._last_uses(records).items() if key in present}, time.time_ns())

        def put_record(name: str) -> bool:
            return self._guard.request("collect", lambda: self._objects.put(_USES + name, protected[name]), False)

        if len(protected) < len(records) and all(in_parallel(put_record, protected, MAX_CONCURRENT_PUTS)):
            list(in_parallel(self._remove, [name for name, _, _ in records], MAX_CONCURRENT_REQUESTS))

    def _leading_unexpired(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return the keys before the first key whose entry has expired."""
        expired = self._expired_keys()
        return keys[: next((index for index, key in enumerate(keys) if key in expired), len(keys))]

    def _expired_keys(self, *, refresh: bool = False) -> set[bytes]:
        """Return the keys of expired entries. The result may be slightly out of date unless ``refresh`` is True.

        A store without ``ttl`` looks for expired entries only with ``refresh=True``.
        """
        with self._expiry_lock:
            late = self._expiry_checked is None or time.monotonic() - self._expiry_checked >= pass_seconds(self._ttl or 1)
            if not refresh and (self._ttl is None or not late):
                return self._expired
            # Until the new result is ready, other threads continue to use the previous one.
            self._expiry_checked = time.monotonic()
        now_ns = time.time_ns()
        expired = {key for key, use in self._last_uses(self._list_records()).items() if use.has_expired(now_ns)}
        pins = self._pins() if expired else ()
        expired = set() if pins is None else expired.difference(self._uses.unrecorded_keys(), *(pin.chain for pin in pins))
        with self._expiry_lock:
            self._expired = expired
        return expired

    def _remove_expired(self, *, refresh: bool = False) -> None:
        expired = self._expired_keys(refresh=refresh)
        if expired:
            self._counters.add("expired_entries", len(self.delete(sorted(expired))))
            with self._expiry_lock:
                self._expired = self._expired - expired

    def _list_records(self) -> Listing:
        return self._list_objects("list", _USES) or []

    def _last_uses(self, listed: Listing) -> dict[bytes, LastUse]:
        records = zip(listed, self._read_all(listed), strict=True)
        return parse_last_uses([(used_ns, name, bytes(record)) for (name, _, used_ns), record in records if record])

    def _list_entries(self) -> ListedEntries | None:
        result: ListedEntries = []
        for names in in_parallel(lambda first: self._list_objects("list", f"{first}/"), "0123456789abcdef", MAX_CONCURRENT_REQUESTS):
            if names is None:
                return None
            for name, size, put_ns in names:
                with contextlib.suppress(ValueError):
                    key = bytes.fromhex(name.rpartition("/")[2])
                    if len(key) == KEY_BYTES and _object_name(key) == name:
                        result.append((key, size, put_ns))
        return result

    def _list_objects(self, operation: str, prefix: str) -> Listing | None:
        return self._guard.request(operation, lambda: self._objects.list_objects(prefix), None)

    def _entry_size(self, key: bytes) -> int | None:
        return self._guard.request("match", lambda: self._objects.size(_object_name(key)), None)

    def _read_all(self, listed: Listing) -> Sequence[Data]:
        """Return the bytes of each listed record.

        They are empty if the service does not answer, or if all records together are too large. The smallest records are read first, so
        that another writer's huge record cannot hide a pin.
        """
        empty: Data = b""
        room = MAX_RECORDS_BYTES
        fitting = set()
        for name, size, _ in sorted(listed, key=lambda record: record[1]):
            room -= size
            if room < 0:
                break
            fitting.add(name)
        names = [name if name in fitting else None for name, _, _ in listed]
        if room < 0:
            self._counters.fault("list", LimitExceeded(f"{len(listed)} records take more than {MAX_RECORDS_BYTES} bytes"))

        def read(name: str | None) -> Data:
            if name is None:
                return empty
            return self._guard.request("get", lambda: self._objects.read(name, MAX_RECORDS_BYTES), None) or empty

        return [*in_parallel(read, names, MAX_CONCURRENT_REQUESTS)]

    def _remove_all(self, keys: Sequence[bytes]) -> set[bytes]:
        removed = in_parallel(self._remove, map(_object_name, keys), MAX_CONCURRENT_REQUESTS)
        return {key for key, success in zip(keys, removed, strict=True) if success}

    def _remove(self, name: str) -> bool:
        return self._guard.request("delete", lambda: self._objects.remove(name), False)


class _ObjectLease:
    """A lease in an object store: an object that contains the holder's random token."""

    def __init__(self, store: ObjectStore, name: str, token: bytes) -> None:
        self._store, self._name, self._token = store, name, token

    def release(self) -> None:
        objects, guard = self._store._objects, self._store._guard
        token = guard.request("lease", lambda: objects.read_beginning(self._name, len(self._token)), None)
        if token is not None and bytes(token) == self._token:
            guard.request("lease", lambda: objects.remove(self._name), False)


def is_object_store(location: Any) -> bool:
    """Return True if ``location`` is the URL of an object store or an obstore object."""
    if isinstance(location, str):
        return location.startswith(SCHEMES)
    return type(location).__module__.partition(".")[0] in ("obstore", "_obstore")


def _object_name(key: bytes) -> str:
    """Return the name of an entry's object, which equals the path of the entry's file in a folder."""
    name = key.hex()
    return f"{name[0]}/{name[1]}/{name}"
