"""PageStore: an engine's pages by the engine's own keys, as rows, in every kind of location that a store has."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from kvpack.coding.recipes import basis_for, parse_recipe
from kvpack.formats.arguments import items
from kvpack.formats.errors import InvalidParameter, Truncated, WriteFailed
from kvpack.pages.codec import PageCodec, key_digest
from kvpack.runtime.locks import Lock
from kvpack.runtime.threads import OwnThreads

from .catalog import rows_of
from .counters import Counters
from .encryption import in_clear
from .forms import check_size
from .loading import FAULTS, refuse
from .opening import check_identity, opened
from .options import StoreOptions, check_count
from .page_keys import page_key
from .tiers import Tiers

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.coding.bases import Basis
    from kvpack.pages.buffer import PageBuffer
    from kvpack.pages.geometry import PageGeometry

    from .backend import Found
    from .identity import Identity
    from .options import StoreKeywords

_PAGES_AT_ONCE = 16
"""Pages of a call that are encoded or read before their entries are written, or decoded."""


@dataclass(frozen=True)
class Job:
    """A submitted put or get: ``results`` has for each of ``keys`` whether its page was stored or loaded, None until it is done."""

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


class PageStore:
    """Pages of ``identity``, by the engine's own keys of any bytes, shared by every process that opens ``location`` with that identity.

    Pages are encoded by ``codec``, a ``PageCodec`` of the identity's recipe and ``geometry`` with ``threads`` threads of its own.
    ``location`` and the options are those of ``Store``. ``jobs`` is how many submitted jobs run at the same time. A recipe of the codec
    klt needs its ``basis``: the identity's recipe is the ``text`` of a ``Recipe("klt-2", basis)``.

    A page that is damaged, of another identity or geometry, or not there is a miss; damage and faults of the system are counted and
    raise nothing. Raises InvalidParameter for arguments that can never work, as the basis of another model, and what ``PageCodec`` raises.
    """

    def __init__(
        self,
        location: Any,
        identity: Identity,
        geometry: PageGeometry,
        *,
        threads: int = 1,
        jobs: int = 1,
        basis: Basis | str | os.PathLike[str] | None = None,
        **options: Unpack[StoreKeywords],
    ) -> None:
        check_identity(identity)
        chosen = StoreOptions(**options)
        recipe = parse_recipe(identity.recipe)
        recipe = parse_recipe(recipe, basis_for(recipe, basis))
        if recipe.basis is not None:
            recipe.basis.check_model(identity.header_model, identity.digests)
        check_count("jobs", jobs, 1)
        self.location, self.identity = location, identity
        self.codec = PageCodec(recipe, geometry, threads=threads, namespace=identity.digest)
        self._max_entry_bytes = chosen.max_entry_bytes
        self._counters = Counters()
        self._backend, self._cipher, self._values = opened(location, identity, self._counters, chosen)
        self._jobs, self._threads = count(), OwnThreads(jobs, "kvpack-page-store")
        self._submitted: dict[int, dict[int, Job]] = {}
        self._lock, self._closed = Lock(), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the submitted jobs, end the threads, and release connections; the entries stay, and this store takes no more calls."""
        # Jobs that were submitted are done first.
        self.drain()
        self._closed = True
        self._threads.close()
        self.codec.close()
        self._backend.close()

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether there is an entry for each of ``keys``, which need not follow one another. No entry is read. Raises InvalidParameter."""
        return [self._backend.present([name]) == 1 for name in self._names(keys)]

    def put(self, keys: Sequence[bytes], pages: PageBuffer, slots: Sequence[int], *, ancestors: Sequence[bytes] = ()) -> list[bool]:
        """Store the pages in ``slots`` under ``keys``, and return for each whether it is stored now.

        ``ancestors`` are the keys of the pages before the first of ``keys``, which continue one another: an ancestor is evicted after
        its descendants. A page that is there already is kept; one that cannot be encoded is counted and left out.
        Raises what ``PageCodec.encode_into`` raises.
        """
        keys, slots = self._checked(keys, slots)
        ancestors = _keys(ancestors, "ancestors")
        slots, _ = self.codec.checked(pages, slots, None)
        with self._counters.timed("save"):
            return self._put_all(keys, pages, slots, ancestors)

    def _put_all(self, keys: Sequence[bytes], pages: PageBuffer, slots: Sequence[int], ancestors: Sequence[bytes]) -> list[bool]:
        chain = self._names([*ancestors, *keys])
        first = len(chain) - len(keys)
        stored = [self._backend.present([name]) == 1 for name in chain[first:]]
        self._counters.add("saves")
        self._counters.add("present_chunks", sum(stored))
        missing = [number for number, there in enumerate(stored) if not there]
        now = time.time_ns()
        if len(missing) < len(chain):
            self._backend.touch([name for number, name in enumerate(chain) if number < first or stored[number - first]], now)
        for begin in range(0, len(missing), _PAGES_AT_ONCE):
            part = missing[begin : begin + _PAGES_AT_ONCE]
            rows = [memoryview(bytearray(self.codec.nbytes)) for _ in part]
            outcomes = self.codec.encode_into(pages, [slots[number] for number in part], rows, keys=[keys[number] for number in part])
            for number, row, refused in zip(part, rows, outcomes, strict=True):
                if refused is not None:
                    self._counters.fault("encode", refused)
                    continue
                stored[number] = self._put(chain[: first + number + 1], row, now)
        return stored

    def get_into(self, keys: Sequence[bytes], pages: PageBuffer, slots: Sequence[int]) -> list[bool]:
        """Load the pages of ``keys`` into ``slots``, and return for each whether it was loaded; other slots are left as they were.

        Where keys continue one another, the first of them is evicted last. Raises what ``PageCodec.decode_into`` raises.
        """
        keys, slots = self._checked(keys, slots)
        slots, _ = self.codec.checked(pages, slots, None, written=True)
        names = self._names(keys)
        self._counters.add("loads")
        self._counters.add("load_tokens", len(keys) * self.codec.geometry.tokens)
        loaded, now = [False] * len(keys), time.time_ns()
        with self._counters.timed("load"):
            for begin in range(0, len(keys), _PAGES_AT_ONCE):
                self._get(range(begin, min(begin + _PAGES_AT_ONCE, len(keys))), names, keys, pages, slots, loaded, now)
            chain = [name for name, there in zip(names, loaded, strict=True) if there]
            if len(chain) > _PAGES_AT_ONCE:
                # Noted part by part, pages were used after those that they continue.
                self._backend.touch(chain, now)
        hits = sum(loaded)
        self._counters.add("hit_tokens", hits * self.codec.geometry.tokens)
        return loaded

    def touch(self, keys: Sequence[bytes], *, ancestors: Sequence[bytes] = ()) -> None:
        """Note that ``keys``, which continue one another and ``ancestors``, are in use. Raises InvalidParameter."""
        names = self._names([*_keys(ancestors, "ancestors"), *_keys(keys)])
        there = [name for name in names if self._backend.present([name]) == 1]
        if there:
            self._backend.touch(there, time.time_ns())

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove the entries of ``keys``, and return how many there were. Raises InvalidParameter."""
        return self._removed(self._names(keys))

    def clear(self) -> int:
        """Remove every page of the identity, of any geometry, and return how many there were.

        Every entry's beginning is read. Submitted jobs are waited for; what other threads and processes store meanwhile may stay.
        Raises WriteFailed where the location keeps some of the pages.
        """
        self._check_open()
        self.drain()
        names = [*rows_of(self._backend, self.codec.namespace, self._cipher, max_entry_bytes=self._max_entry_bytes)]
        removed = self._removed(names)
        kept = sum(self._backend.present([name]) for name in names)
        if kept:
            raise WriteFailed(
                f"{self.location}: {kept} of {len(names)} pages could not be removed, expected none to stay: "
                f"the store counted {self.counters()['faults']}"
            )
        return removed

    def submit_put(self, keys: Sequence[bytes], pages: PageBuffer, slots: Sequence[int], *, ancestors: Sequence[bytes] = ()) -> Job:
        """Begin ``put`` in a thread of the store: the slots must not change until the job is done. Raises InvalidParameter."""
        older = tuple(_keys(ancestors, "ancestors"))
        return self._submit("put", keys, slots, lambda keys, slots: self.put(keys, pages, slots, ancestors=older))

    def submit_get(self, keys: Sequence[bytes], pages: PageBuffer, slots: Sequence[int]) -> Job:
        """Begin ``get_into`` in a thread of the store. Raises InvalidParameter."""
        return self._submit("get", keys, slots, lambda keys, slots: self.get_into(keys, pages, slots))

    def finished(self) -> list[Job]:
        """The submitted jobs that are done and were not returned before. Waits for nothing."""
        with self._lock:
            done = [job for job in self._running.values() if job.done]
            for job in done:
                del self._running[job.number]
        return done

    def drain(self) -> None:
        """Wait until every submitted job is done: no slot is read or written after that."""
        with self._lock:
            jobs = list(self._running.values())
        for job in jobs:
            # Its error is for whoever asks for its results.
            job._future.exception()

    def counters(self) -> dict[str, Any]:
        """The counters since the store was opened, those of ``Store`` with pages as chunks."""
        return self._counters.as_dict()

    def stats(self) -> dict[str, Any]:
        """``counters``, plus the ``entries`` and ``bytes`` at the location, and the ``tiers`` of a store of several."""
        entries, size = self._backend.size()
        tiers = {"tiers": self._backend.stats()} if isinstance(self._backend, Tiers) else {}
        return {**self.counters(), "entries": entries, "bytes": size, **tiers}

    def prometheus(self) -> str:
        """``stats`` in Prometheus' text format, with the bytes of a page in the engine and as a row, which are the ratio."""
        entries, size = self._backend.size()
        gauges = {
            "entries": ("Entries at the location.", entries),
            "bytes": ("Bytes of those entries.", size),
            "page_bytes": ("Bytes of a page in the engine's memory.", self.codec.geometry.raw_bytes),
            "row_bytes": ("Bytes of a page as a row.", self.codec.nbytes),
        }
        return self._counters.prometheus(gauges, self._backend.stats() if isinstance(self._backend, Tiers) else ())

    def recent(self) -> list[tuple[str, float]]:
        """The loads and saves since the last call, as ("load" or "save", seconds): for histograms of an engine's own."""
        return self._counters.recent()

    def _removed(self, names: list[bytes]) -> int:
        removed = len(self._backend.delete(names))
        self._counters.add("deleted_entries", removed)
        return removed

    def _put(self, chain: list[bytes], row: memoryview, now: int) -> bool:
        try:
            pieces = [row] if self._cipher is None else self._cipher.encrypt(chain[-1], [row])
            check_size(f"the page of {chain[-1].hex()}", sum(map(len, pieces)), self._max_entry_bytes)
        except FAULTS as error:
            self._counters.fault("encode", error)
            return False
        return self._backend.put(chain, pieces, now)

    def _get(
        self,
        numbers: Sequence[int],
        names: list[bytes],
        keys: Sequence[bytes],
        pages: PageBuffer,
        slots: Sequence[int],
        loaded: list[bool],
        now: int,
    ) -> None:
        """Load the pages ``numbers``, from ever slower tiers where an entry is damaged."""
        beyond = dict.fromkeys(numbers, -1)
        while beyond:
            found: dict[int, Found] = {}
            rows: dict[int, Any] = {}
            for number, tier in beyond.items():
                entries = self._backend.find([names[number]], beyond=tier)
                if entries:
                    found[number] = entries[0]
                    self._open(number, names, entries[0], rows)
            outcomes: list[Any] = []
            if rows:
                chosen = [keys[number] for number in rows]
                outcomes = [*self.codec.decode_into([*rows.values()], pages, [slots[n] for n in rows], keys=chosen, values=self._values)]
            for number, refused in reversed([*zip(rows, outcomes, strict=True)]):
                if refused is None:
                    loaded[number] = True
                    self._backend.accept([names[number]], [found[number]], now - number)
                else:
                    refuse(self._backend, self._counters, names[number], found[number], refused)
            beyond = {number: entry.tier for number, entry in found.items() if not loaded[number]}

    def _open(self, number: int, names: list[bytes], entry: Found, rows: dict[int, Any]) -> None:
        """Put the row of an entry into ``rows``, or count why there is none."""
        try:
            row = in_clear(names[number], entry.data, self._cipher)
            if len(row) > self.codec.nbytes:
                raise Truncated(f"entry {names[number].hex()}: has {len(row)} bytes, a row has {self.codec.nbytes}")
            rows[number] = row
        except FAULTS as error:
            refuse(self._backend, self._counters, names[number], entry, error)

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        self._check_open()
        return [page_key(self.codec.namespace, key_digest(key), self.codec.layout.description) for key in _keys(keys)]

    def _submit(
        self,
        kind: Literal["put", "get"],
        keys: Sequence[bytes],
        slots: Sequence[int],
        work: Callable[[Sequence[bytes], Sequence[int]], list[bool]],
    ) -> Job:
        keys, slots = self._checked(keys, slots)
        self._names(keys)
        # The caller may go on to change its lists.
        given, places = tuple(bytes(key) for key in keys), tuple(slots)
        with self._lock:
            job = Job(next(self._jobs), kind, given, self._threads.pool.submit(self._counted, kind, work, given, places))
            self._running[job.number] = job
        return job

    def _counted(
        self, kind: str, work: Callable[[Sequence[bytes], Sequence[int]], list[bool]], keys: Sequence[bytes], slots: Sequence[int]
    ) -> list[bool]:
        """What ``work`` returns; what it raises is counted, as an engine may take it for misses."""
        try:
            return work(keys, slots)
        except Exception as error:
            self._counters.fault(kind, error)
            raise

    @property
    def _running(self) -> dict[int, Job]:
        """The jobs of this process: no thread of a forked child ends those of its parent."""
        return self._submitted.setdefault(os.getpid(), {})

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidParameter(f"the store at {self.location} is closed: open another PageStore")

    def _checked(self, keys: Sequence[bytes], slots: Sequence[int]) -> tuple[list[bytes], list[int]]:
        """Both as lists of the same length. Raises InvalidParameter, also for a store that is closed."""
        self._check_open()
        keys, slots = _keys(keys), items(slots, "slots", "slots, which are integers")
        if len(keys) != len(slots):
            raise InvalidParameter(f"{len(keys)} keys were given for {len(slots)} slots")
        return keys, slots


def _keys(keys: Sequence[bytes], what: str = "keys") -> list[bytes]:
    return items(keys, what, "the engine's keys, which are bytes")
