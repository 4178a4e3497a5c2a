"""PageStore: an engine's pages, stored under the engine's own keys in any location that a ``Store`` supports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, count, groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, Unpack

from kvpack.coding.recipes import Recipe
from kvpack.formats.arguments import as_list
from kvpack.formats.errors import InvalidParameter, Truncated, WriteFailed
from kvpack.pages.buffer import PageBuffer
from kvpack.pages.codec import PageCodec, key_digest
from kvpack.runtime.threads import Lock, WorkerThreads

from .backend import BATCH_BYTES, BATCH_ENTRIES, FoundEntry
from .catalog import row_keys
from .counters import Counters, with_labels
from .encryption import decrypt_entry
from .entry_kind import MAX_ID_BYTES, check_size, encrypted_bytes
from .keys import page_key
from .loading import FAULTS, reject_entry
from .locations import check_identity, open_for_identity
from .options import StoreKeywords, StoreOptions, check_count
from .redaction import redacted_location
from .tiers import Tiers, prometheus_text

if TYPE_CHECKING:

    from kvpack.identity.identity import Identity
    from kvpack.pages.geometry import PageGeometry


    Pages = PageBuffer | Sequence[PageBuffer]

_MAX_PAGES_PER_REQUEST = 1024
"""Maximum number of pages in one request, even if they are small."""


@dataclass(frozen=True)
class Job:
    """A submitted put or get. When it is done, ``results`` contains a bool for each of ``keys``: True if the page was stored or loaded."""

    number: int
    kind: Literal["put", "get"]
    keys: tuple[bytes, ...]
    _future: Future[list[bool]] = field(repr=False)

    @property
    def done(self) -> bool:
        return self._future.done()

    @property
    def results(self) -> list[bool] | None:
        return self._future.result() if self._future.done() else None


class BufferSlot(NamedTuple):
    """A slot in an engine's memory. It contains one page."""

    pages: PageBuffer
    slot: int


class PageStore:
    """A store of a serving engine's pages under the engine's own keys. Processes that open it with the same identity share it.

    Pages that are missing, damaged, or of another identity or geometry are misses. Damage and system faults are counted, not raised.

    Args:
        location: Any location that ``Store`` supports.
        identity: Everything that the values depend on, except the keys. A recipe with the codec klt needs its basis:
            ``Identity.of_engine(folder, Recipe("klt-2", basis), ...)``.
        geometry: Layers, heads, tokens, dims and dtype of a page.
        threads: Number of threads that encode and decode.
        jobs: Maximum number of puts, and of gets, that run at the same time.
        **options: See ``Store``.

    Raises:
        InvalidParameter: An argument is invalid, such as a basis for another model.

    >>> geometry = kvpack.pages.PageGeometry(layers=1, heads=2, tokens=64, dim_k=64, dim_v=64)
    >>> identity = kvpack.Identity("llama", "octopus-4", weights="revision-1")
    >>> with kvpack.PageStore("pages", identity, geometry) as store:
    ...     store.contains([b"key"])
    [False]
    """

    def __init__(
        self,
        location: Any,
        identity: Identity,
        geometry: PageGeometry,
        *,
        threads: int = 1,
        jobs: int = 1,
        **options: Unpack[StoreKeywords],
    ) -> None:
        check_identity(identity)
        store_options = StoreOptions(**options)
        recipe = Recipe(identity.recipe, identity.basis)
        if recipe.basis is not None:
            recipe.basis.check_model(identity.header_model, identity.digests)
        check_count("jobs", jobs, 1)
        self.location, self.identity = location, identity
        self.codec = PageCodec(recipe, geometry, threads=threads, namespace=identity.digest)
        self._max_entry_bytes = store_options.max_entry_bytes
        self._counters = Counters()
        self._backend, self._cipher, self._check_values = open_for_identity(location, identity, self._counters, store_options)
        # Loads have threads of their own, because an engine waits for loads but not for puts.
        self._jobs, self._threads = count(), {kind: WorkerThreads(jobs, f"kvpack-page-store-{kind}") for kind in ("put", "get")}
        self._submitted: dict[int, dict[int, Job]] = {}
        self._lock, self._closed = Lock(), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for submitted jobs, end the threads, and release connections. Entries are kept. The store cannot be used afterward."""
        # Submitted jobs are finished first.
        self.drain()
        self._closed = True
        for threads in self._threads.values():
            threads.close()
        self.codec.close()
        self._backend.close()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return a bool for each of ``keys``: True if it has an entry. No entry is read, and the keys need not form a chain.

        Raises InvalidParameter if the store is closed.
        """
        return self._backend.contains_many(self._entry_keys(keys))

    def put(self, keys: Sequence[bytes], pages: Pages, slots: Sequence[int], *, ancestors: Sequence[bytes] = ()) -> list[bool]:
        """Store the pages in ``slots`` under ``keys``. Returns a bool for each page: True if it is stored now.

        ``pages`` is an engine's memory, or a list with the memory of each page. Pages continue one another, and an ancestor is evicted
        after its descendants. ``ancestors`` are the keys of the pages before the first of ``keys``. Existing pages are kept. A page that
        cannot be encoded is counted and skipped. The put ends at the first page that does not fit. Pages are encoded in memory and sent to
        a server in batches of up to 64 pages and 64 MiB, or of one larger page. Raises the same errors as ``PageCodec.encode_into``.
        """
        return self.put_new(keys, pages, slots, ancestors=ancestors)[0]

    def put_new(
        self, keys: Sequence[bytes], pages: Pages, slots: Sequence[int], *, ancestors: Sequence[bytes] = ()
    ) -> tuple[list[bool], list[bool]]:
        """Store pages as ``put`` does. Returns two lists with a bool for each page: True if it is stored now, and True if it is new."""
        keys, slots = self._check_keys_and_slots(keys, slots)
        ancestors = _as_key_list(ancestors, "ancestors")
        buffer_slots = self._buffer_slots(pages, slots, len(keys))
        with self._counters.time_operation("save"):
            return self._put_all(keys, buffer_slots, ancestors)

    def _put_all(
        self, keys: Sequence[bytes], buffer_slots: Sequence[BufferSlot], ancestors: Sequence[bytes]
    ) -> tuple[list[bool], list[bool]]:
        chain = self._entry_keys([*ancestors, *keys])
        first = len(chain) - len(keys)
        present = self._backend.contains_many(chain[first:])
        self._counters.add("saves")
        self._counters.add("present_chunks", sum(present))
        missing = [index for index, ok in enumerate(present) if not ok]
        stored, now = [*present], time.time_ns()
        if used := [*chain[:first], *compress(chain[first:], present)]:
            self._backend.touch(used, now)
        at_once = self._pages_per_batch(BATCH_ENTRIES)
        for begin in range(0, len(missing), at_once):
            numbers = missing[begin : begin + at_once]
            rows = self._encode(numbers, keys, buffer_slots, chain[first:])
            results = self._backend.put_all(chain, {first + index: row for index, row in rows.items()}, now) if rows else []
            for index, ok in zip(rows, results, strict=True):
                stored[index] = ok
            if results and not results[-1]:
                break
        return stored, [ok and not before for ok, before in zip(stored, present, strict=True)]

    def _encode(
        self, indices: Sequence[int], keys: Sequence[bytes], buffer_slots: Sequence[BufferSlot], names: Sequence[bytes]
    ) -> dict[int, list[memoryview]]:
        """Encode the pages with these ``indices``. Returns the byte buffers of their entries by index.

        Pages that cannot be encoded are left out and counted.
        """
        rows = {index: memoryview(bytearray(self.codec.nbytes)) for index in indices}
        result: dict[int, list[memoryview]] = {}
        for pages, group in _group_by_memory(indices, buffer_slots):
            slots, chosen_keys = [buffer_slots[index].slot for index in group], [keys[index] for index in group]
            outcomes = self.codec.encode_into(pages, slots, [rows[index] for index in group], keys=chosen_keys)
            for index, refused in zip(group, outcomes, strict=True):
                try:
                    if refused is not None:
                        raise refused
                    pieces = [rows[index]] if self._cipher is None else self._cipher.encrypt(names[index], [rows[index]])
                    check_size(f"the page of {names[index].hex()}", sum(map(len, pieces)), self._max_entry_bytes)
                    result[index] = pieces
                except FAULTS as error:
                    self._counters.fault("encode", error)
        return result

    def get_into(self, keys: Sequence[bytes], pages: Pages, slots: Sequence[int]) -> list[bool]:
        """Load the pages of ``keys`` into ``slots``. Returns a bool for each page: True if it was loaded. All other slots are unchanged.

        For ``pages``, see ``put``. If pages continue one another, the first one is evicted last. At most 64 MiB of rows are in memory at a
        time. Raises the same errors as ``PageCodec.decode_into``.
        """
        keys, slots = self._check_keys_and_slots(keys, slots)
        buffer_slots = self._buffer_slots(pages, slots, len(keys), written=True)
        names = self._entry_keys(keys)
        self._counters.add("loads")
        self._counters.add("load_tokens", len(keys) * self.codec.geometry.tokens)
        loaded, now = [False] * len(keys), time.time_ns()
        at_once = self._pages_per_batch(_MAX_PAGES_PER_REQUEST)
        with self._counters.time_operation("load"):
            for begin in range(0, len(keys), at_once):
                self._load_pages(range(begin, min(begin + at_once, len(keys))), names, keys, buffer_slots, loaded, now)
            chain = [name for name, ok in zip(names, loaded, strict=True) if ok]
            if len(keys) > at_once and chain:
                # Uses were recorded batch by batch, so that pages seem older than the pages that continue them.
                self._backend.touch(chain, now)
        hits = sum(loaded)
        self._counters.add("hit_tokens", hits * self.codec.geometry.tokens)
        self._counters.add("hit_chunks", hits)
        return loaded

    def touch(self, keys: Sequence[bytes], *, ancestors: Sequence[bytes] = ()) -> None:
        """Record a use of the pages ``keys``, which continue the pages ``ancestors``. Raises InvalidParameter if the store is closed."""
        names = self._entry_keys([*_as_key_list(ancestors, "ancestors"), *_as_key_list(keys)])
        if names:
            self._backend.touch(names, time.time_ns())

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove the entries of ``keys``. Returns how many were removed. Raises InvalidParameter if the store is closed."""
        return self._delete(self._entry_keys(keys))

    def clear(self) -> int:
        """Remove every page of this identity, whatever its geometry. Returns how many were removed.

        Waits for submitted jobs, and reads the beginning of every entry. Pages that other threads and processes store meanwhile may remain.
        Raises WriteFailed if some pages could not be removed.
        """
        self._check_open()
        self.drain()
        names = [*row_keys(self._backend, self.codec.namespace, self._cipher, max_entry_bytes=self._max_entry_bytes)]
        removed = self._delete(names)
        remaining = sum(self._backend.contains_many(names))
        if remaining:
            raise WriteFailed(
                f"{redacted_location(self.location)}: {remaining} of {len(names)} pages could not be removed. Faults of this store so far: "
                f"{self.counters()['faults']}"
            )
        return removed

    def submit_put(self, keys: Sequence[bytes], pages: Pages, slots: Sequence[int], *, ancestors: Sequence[bytes] = ()) -> Job:
        """Start ``put`` in one of the store's threads. The slots must not change until the job is done. Raises InvalidParameter if the
        store is closed.
        """
        ancestor_keys = tuple(_as_key_list(ancestors, "ancestors"))
        return self._submit("put", keys, slots, lambda keys, slots: self.put(keys, pages, slots, ancestors=ancestor_keys))

    def submit_get(self, keys: Sequence[bytes], pages: Pages, slots: Sequence[int]) -> Job:
        """Start ``get_into`` in a thread that runs only loads, so that puts do not delay it. Raises InvalidParameter if the store is
        closed.
        """
        return self._submit("get", keys, slots, lambda keys, slots: self.get_into(keys, pages, slots))

    def finished(self) -> list[Job]:
        """Return the submitted jobs that have finished since the last call. Does not wait."""
        with self._lock:
            done = [job for job in self._unfinished_jobs.values() if job.done]
            for job in done:
                del self._unfinished_jobs[job.number]
        return done

    def drain(self) -> None:
        """Wait until every submitted job is done. Afterward, the store does not access any slots."""
        with self._lock:
            jobs = list(self._unfinished_jobs.values())
        for job in jobs:
            # Errors are raised later, by ``Job.results``.
            job._future.exception()

    def counters(self) -> dict[str, Any]:
        """Return the counters since the store was opened. They have the same names as in ``Store``, but count pages instead of chunks."""
        return self._counters.as_dict()

    def stats(self) -> dict[str, Any]:
        """Return ``counters``, plus the ``entries`` and ``bytes`` at the location. With tiers, ``tiers`` contains each tier's stats."""
        entries, size = self._backend.size()
        tiers = {"tiers": self._backend.stats()} if isinstance(self._backend, Tiers) else {}
        return {**self.counters(), "entries": entries, "bytes": size, **tiers}

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """Return ``stats`` in Prometheus' text format, plus the size of a page in the engine's memory and as a row.

        Every metric has ``labels``, which default to the identity's model.
        """
        entries, size = self._backend.size()
        gauges = {
            "entries": ("Number of entries in the store.", entries),
            "bytes": ("Total size in bytes of the entries in the store.", size),
            "page_bytes": ("Bytes of a page in the engine's memory.", self.codec.geometry.raw_bytes),
            "row_bytes": ("Bytes of a page as a row.", self.codec.nbytes),
        }
        text = prometheus_text(self._counters, self._backend, gauges)
        return with_labels(text, {"model": self.identity.model} if labels is None else labels)

    def pop_recent(self) -> list[tuple[str, float]]:
        """Return ("load" or "save", seconds) for each operation since the last call. Serving engines use this for their own histograms."""
        return self._counters.pop_recent()

    def _delete(self, names: list[bytes]) -> int:
        removed = len(self._backend.delete(names))
        self._counters.add("deleted_entries", removed)
        return removed

    def _load_pages(
        self,
        indices: Sequence[int],
        names: list[bytes],
        keys: Sequence[bytes],
        buffer_slots: Sequence[BufferSlot],
        loaded: list[bool],
        now: int,
    ) -> None:
        """Load the pages with these ``indices``. If an entry is damaged, try the next slower tier that has it."""
        after_tier = dict.fromkeys(indices, -1)
        valid: dict[int, FoundEntry] = {}
        while after_tier:
            entries = self._backend.find_many([names[index] for index in after_tier], [*after_tier.values()], self._max_page_bytes)
            result = {index: entry for index, entry in zip(after_tier, entries, strict=True) if entry is not None}
            rows: dict[int, Any] = {}
            for index, entry in result.items():
                self._decrypt_row(index, names, entry, rows)
            for pages, group in _group_by_memory([*rows], buffer_slots):
                slots, chosen_keys = [buffer_slots[index].slot for index in group], [keys[index] for index in group]
                outcomes = self.codec.decode_into([rows[n] for n in group], pages, slots, keys=chosen_keys, check_values=self._check_values)
                for index, refused in zip(group, outcomes, strict=True):
                    if refused is None:
                        loaded[index] = True
                        valid[index] = result[index]
                    else:
                        reject_entry(self._backend, self._counters, names[index], result[index], refused)
            after_tier = {index: entry.tier for index, entry in result.items() if not loaded[index]}
        if valid:
            whole = sorted(valid)
            self._backend.accept([names[index] for index in whole], [valid[index] for index in whole], now)

    def _decrypt_row(self, index: int, names: list[bytes], entry: FoundEntry, rows: dict[int, Any]) -> None:
        """Decrypt the entry of page ``index``, and store its row in ``rows``. Errors are counted."""
        try:
            row = decrypt_entry(names[index], entry.data, self._cipher)
            if len(row) > self.codec.nbytes:
                raise Truncated(f"entry {names[index].hex()} has {len(row)} bytes, expected at most {self.codec.nbytes} for a row")
            rows[index] = row
        except FAULTS as error:
            reject_entry(self._backend, self._counters, names[index], entry, error)

    @property
    def _max_page_bytes(self) -> int:
        size = self.codec.nbytes if self._cipher is None else encrypted_bytes(bytes(MAX_ID_BYTES), self.codec.nbytes)
        return min(size, self._max_entry_bytes)

    def _pages_per_batch(self, max_pages: int) -> int:
        """Return the number of pages, at most ``max_pages``, whose rows may be in memory at the same time."""
        return max(1, min(max_pages, BATCH_BYTES // (self._max_page_bytes + 1)))

    def _buffer_slots(self, pages: Pages, slots: Sequence[int], count: int, *, written: bool = False) -> list[BufferSlot]:
        """Return the memory and the slot of each page.

        Raises InvalidParameter unless there are ``count`` pages. Also raises the errors of ``PageCodec.validate_arguments``.
        """
        if not isinstance(pages, PageBuffer) and isinstance(pages, Sequence):
            if len(pages) != count:
                raise InvalidParameter(f"{len(pages)} page buffers were passed for {count} keys, expected one buffer per key")
            result = [
                BufferSlot(memory, self.codec.validate_arguments(memory, [slot], None, written=written)[0][0])
                for memory, slot in zip(pages, slots, strict=True)
            ]
            # Two buffers may view the same memory.
            if written and len({memory.sides["k"][0][slot].data_ptr() for memory, slot in result}) < count:
                raise InvalidParameter("two pages were requested for one slot, but a slot holds one page: pass each slot once")
            return result
        return [BufferSlot(pages, slot) for slot in self.codec.validate_arguments(pages, slots, None, written=written)[0]]

    def _entry_keys(self, keys: Sequence[bytes]) -> list[bytes]:
        self._check_open()
        return [page_key(self.codec.namespace, key_digest(key), self.codec.layout.description) for key in _as_key_list(keys)]

    def _submit(
        self,
        kind: Literal["put", "get"],
        keys: Sequence[bytes],
        slots: Sequence[int],
        run: Callable[[Sequence[bytes], Sequence[int]], list[bool]],
    ) -> Job:
        keys, slots = self._check_keys_and_slots(keys, slots)
        self._entry_keys(keys)
        # Copies, because the caller may change its lists.
        key_bytes, places = tuple(bytes(key) for key in keys), tuple(slots)
        with self._lock:
            future = self._threads[kind].submit(partial(self._run_counted, kind, run, key_bytes, places))
            job = Job(next(self._jobs), kind, key_bytes, future)
            self._unfinished_jobs[job.number] = job
        return job

    def _run_counted(
        self, kind: str, run: Callable[[Sequence[bytes], Sequence[int]], list[bool]], keys: Sequence[bytes], slots: Sequence[int]
    ) -> list[bool]:
        """Call ``run`` and return its result. An error is counted before it is raised, because an engine may treat it as a miss."""
        try:
            return run(keys, slots)
        except Exception as error:
            self._counters.fault(kind, error)
            raise

    @property
    def _unfinished_jobs(self) -> dict[int, Job]:
        """This process's unfinished jobs. A forked child must not wait for its parent's jobs."""
        return self._submitted.setdefault(os.getpid(), {})

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidParameter(f"the store at {redacted_location(self.location)} is closed: open another PageStore")

    def _check_keys_and_slots(self, keys: Sequence[bytes], slots: Sequence[int]) -> tuple[list[bytes], list[int]]:
        """Return ``keys`` and ``slots`` as lists. Raises InvalidParameter if their lengths differ or the store is closed."""
        self._check_open()
        keys, slots = _as_key_list(keys), as_list(slots, "slots", "slots, which are integers")
        if len(keys) != len(slots):
            raise InvalidParameter(f"{len(keys)} keys were passed for {len(slots)} slots, expected one slot per key")
        return keys, slots


def _as_key_list(keys: Sequence[bytes], description: str = "keys") -> list[bytes]:
    return as_list(keys, description, "the engine's keys, which are bytes")


def _group_by_memory(indices: Sequence[int], buffer_slots: Sequence[BufferSlot]) -> Iterator[tuple[PageBuffer, list[int]]]:
    """Group pages by memory. Yields each memory with the indices of consecutive pages in it."""
    for _, group in groupby(indices, lambda index: id(buffer_slots[index].pages)):
        same = [*group]
        yield buffer_slots[same[0]].pages, same
