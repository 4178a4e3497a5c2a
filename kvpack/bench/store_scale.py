"""kvpack bench store --location: measure the cost of a store with many entries, which stay at the location.

Entries are chunks of 16 tokens of one layer with one head, in prefixes of 100 chunks. A location with fewer entries than requested is
filled first. The measurements then store more entries, with the location's current size as the budget.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import xxhash

import kvpack
from kvpack.file.front import DIGEST_SLICE
from kvpack.formats.errors import InvalidParameter
from kvpack.identity.identity import Identity
from kvpack.output import print_table
from kvpack.store import Store
from kvpack.store.cache_checks import check_groups
from kvpack.store.counters import Counters
from kvpack.store.directory import Directory
from kvpack.store.entries import to_pieces
from kvpack.store.entry_kind import UNENCRYPTED
from kvpack.store.folder import Folder
from kvpack.store.keys import ID_BYTES, KEY_BYTES, chunk_links, token_bytes
from kvpack.store.locations import open_backend
from kvpack.store.options import LocationOptions
from kvpack.store.redaction import redacted_location

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpack.coding.encoding import Progress

CHUNK, CHUNKS, DIM = 16, 100, 32
RECIPE = "bf16"
"""Default recipe. Most others encode at least 32 tokens together."""
ENTRIES = 10_000
LOOKUPS = 20
"""Number of prefixes that are matched and loaded."""
SAVES = 60
"""Number of saves of 10 chunks per process, in a store that is at its size budget."""
PROCESSES = 8
FILL_PROCESSES = 2
"""Number of processes that fill a folder."""
ROWS = ("match", "load", "stats", "save", "processes", "collect", "stat", "ls", "verify", "gc")
COMMANDS = ("stat", "ls", "verify", "gc")
TARGETS = {
    "match 100 chunks": (5.0, "ms"),
    "stats": (50.0, "ms"),
    "kvpack store stat": (2000.0, "ms"),
    f"CPU time of a save with {PROCESSES} processes, relative to one": (1.25, "x"),
    f"chunks not stored with {PROCESSES} processes": (0.0, "chunks"),
}


def run(
    location: str,
    entries: int,
    recipe: str = RECIPE,
    rows: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fill ``location`` up to ``entries`` entries, measure ``rows`` there, and return a report as JSON values.

    By default, all rows are measured. ``progress`` counts new entries. Raises InvalidParameter if ``entries`` is too few for two prefixes,
    if a row is unknown or not supported at the location, or if the recipe cannot encode chunks of this size.
    """
    if entries < 2 * CHUNKS:
        raise InvalidParameter(f"--entries is {entries}, expected an integer of at least {2 * CHUNKS}")
    if unknown := set(rows or ()) - set(ROWS):
        raise InvalidParameter(f"--row is {sorted(unknown)[0]!r}, expected one of {', '.join(ROWS)}")
    _check_recipe(recipe)
    scale = _ScaleBenchmark(location, recipe)
    report: dict[str, Any] = {"location": redacted_location(location), "recipe": recipe, "entries": entries, "rows": {}}
    report["put"] = scale.fill(entries, progress)
    for name in rows or ROWS:
        report["rows"] |= scale.command(name) if name in COMMANDS else getattr(scale, name)()
    return report


def _check_recipe(recipe: str) -> None:
    identity = Identity("bench", recipe)
    try:
        check_groups(identity, CHUNK)
    except InvalidParameter:
        raise InvalidParameter(
            f"--recipe is {recipe!r}, which cannot encode a chunk of {CHUNK} tokens: use {RECIPE}, fp8 or another recipe that encodes "
            "each token separately"
        ) from None


class _EntryTemplate:
    """A chunk whose values are stored under every key, because it would take half an hour to encode a million chunks."""

    def __init__(self, chunk: kvpack.Cache) -> None:
        key, parent, ids = (bytes([value]) * size for value, size in ((1, KEY_BYTES), (2, KEY_BYTES), (3, CHUNK * ID_BYTES)))
        text, header, *payload = to_pieces(chunk, key, parent, ids)
        self._text, self._header, self._payload = bytes(text), bytes(header), b"".join(payload)
        self._key_at, self._ids_at = self._header.index(key + parent), self._header.index(ids)

    def pieces(self, key: bytes, parent: bytes, ids: bytes) -> list[memoryview]:
        text, header = bytearray(self._text), bytearray(self._header)
        header[self._key_at : self._key_at + 2 * KEY_BYTES] = key + parent
        header[self._ids_at : self._ids_at + len(ids)] = ids
        text[DIGEST_SLICE] = xxhash.xxh3_128_hexdigest(header).encode()
        return [memoryview(text), memoryview(header), memoryview(self._payload)]


class _ScaleBenchmark:
    def __init__(self, location: str, recipe: str) -> None:
        self._location, self._identity = location, Identity("bench", recipe, weights="scale")
        x = torch.randn(1, 1, CHUNK, DIM, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        self._one = kvpack.pack([(x, x)], recipe)
        self._ten = kvpack.concat([self._chunk(number) for number in range(10)])
        self._new = 10**9 + time.time_ns() % 10**9

    def fill(self, entries: int, progress: Progress | None) -> int:
        """Add entries until the location contains ``entries``. Returns the number of added entries."""
        backend = open_backend(self._location, Counters(), UNENCRYPTED, LocationOptions())
        existing, put = backend.size()[0], 0
        identity: dict[str, Any] = {"model": self._identity.header_model, "recipe": self._identity.recipe}
        like = [_EntryTemplate(replace(self._chunk(number), **identity)) for number in range(CHUNKS)]
        numbers = range(existing // CHUNKS, -(-entries // CHUNKS))
        # Add the first prefix through the backend, which counts the folder.
        for number in numbers[:1] if isinstance(backend, Directory) else numbers:
            prefix = dict(self._entries(like, number))
            put += sum(backend.put_all([*prefix], dict(enumerate(prefix.values())), time.time_ns()))
            if progress:
                progress(put, entries - existing)
        if isinstance(backend, Directory):
            put += self._write_files(like, numbers[1:], progress)
            backend.collect()
        backend.close()
        return put

    def _entries(self, template: Sequence[_EntryTemplate], prefix_index: int) -> Iterator[tuple[bytes, list[memoryview]]]:
        links = chunk_links(self._identity.digest, token_bytes(_prefix_ids(prefix_index)), CHUNK, [b""] * CHUNKS)
        for at, (key, parent, ids, _) in enumerate(links):
            yield key, template[at].pieces(key, parent, ids)

    def _write_files(self, template: Sequence[_EntryTemplate], prefix_indices: range, progress: Progress | None) -> int:
        """Write the entries of prefixes to a folder that no other process uses, without updating the folder's count. Returns the number of
        entries.
        """
        folder = Folder(self._location, Counters(), durable=False)
        folder.make_folders(*folder.entry_folders)
        context = multiprocessing.get_context("fork")
        results = context.Queue()

        def write(first: int) -> None:
            for number in prefix_indices[first::FILL_PROCESSES]:
                used = time.time_ns()
                for at, (key, pieces) in enumerate(self._entries(template, number)):
                    descriptor = os.open(folder.path(key), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                    os.writev(descriptor, pieces)
                    os.utime(descriptor, ns=(used - at, used - at))
                    os.close(descriptor)
                results.put(CHUNKS)

        workers = [context.Process(target=write, args=(first,)) for first in range(FILL_PROCESSES)]
        for worker in workers:
            worker.start()
        for done in range(len(prefix_indices)):
            results.get()
            if progress:
                progress((done + 1) * CHUNKS, len(prefix_indices) * CHUNKS)
        for worker in workers:
            worker.join()
        return len(prefix_indices) * CHUNKS

    def match(self) -> dict[str, float]:
        """Look up prefixes of 10 and of 100 chunks, each once. Returns milliseconds by name."""
        with self._store() as store:
            return {f"match {count} chunks": self._time_lookups(store.match, count) for count in (10, 100)}

    def load(self) -> dict[str, float]:
        with self._store() as store:
            return {f"load {count} chunks": self._time_lookups(lambda ids: store.load(ids)[0], count) for count in (10, 100)}

    def stats(self) -> dict[str, float]:
        with self._store() as store:
            return {
                "first call of stats": _milliseconds(store.stats),
                "stats": statistics.median(_milliseconds(store.stats) for _ in range(5)),
            }

    def save(self) -> dict[str, float]:
        """Save 10 chunks to a store that has reached its size budget. Returns milliseconds by name."""
        taken, _ = self._time_saves(0)
        return {"save 10 chunks at the budget, median": statistics.median(taken), "save 10 chunks at the budget, maximum": max(taken)}

    def processes(self) -> dict[str, float]:
        """Measure the CPU time of a save to a store at its size budget, with one process and with several. The last result is the ratio of
        the two.
        """
        (one, _), (many, refused) = (self._save_cpu_time(count) for count in (1, PROCESSES))
        several = f"with {PROCESSES} processes"
        return {
            "CPU time of saving 10 chunks at the budget": one,
            f"CPU time of a save {several}, relative to one": many / one,
            f"chunks not stored {several}": refused,
        }

    def collect(self) -> dict[str, float]:
        with self._store() as store:
            return {"collect": _milliseconds(store.collect)}

    def command(self, name: str) -> dict[str, float]:
        """Time a kvpack command in its own process, as an operator runs it."""
        words = [sys.executable, "-m", "kvpack", "store", name, self._location]
        begun = time.perf_counter()
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return {f"kvpack store {name}": 1000 * (time.perf_counter() - begun)}

    def _store(self, **options: Any) -> Store:
        return Store(self._location, self._identity, chunk=CHUNK, **options)

    def _chunk(self, prefix_index: int) -> kvpack.Cache:
        return replace(self._one, start=CHUNK * prefix_index)

    def _time_lookups(self, lookup: Callable[[Any], int], count: int) -> float:
        prompts = [_prefix_ids(number)[: CHUNK * count] for number in range(LOOKUPS)]
        taken = [_milliseconds(partial(lookup, ids)) for ids in prompts if lookup(ids) == len(ids)]
        if not taken:
            raise InvalidParameter(
                f"{redacted_location(self._location)} contains no prefix of {count} chunks of {self._identity.recipe!r}: use an empty "
                "location, or the recipe that it was filled with"
            )
        return statistics.median(taken)

    def _budget(self) -> int:
        """Return the size of the location or, if it is larger, the budget in effect there. With a smaller budget, nothing would be evicted.
        """
        with closing(open_backend(self._location, Counters(), UNENCRYPTED, LocationOptions())) as backend:
            return backend.largest_budget() if isinstance(backend, Directory) else backend.size()[1]

    def _time_saves(self, worker: int, budget: int | None = None) -> tuple[list[float], int]:
        """Return the milliseconds of each save, and the number of chunks that were not stored (and took no time)."""
        taken = []
        with self._store(max_bytes=self._budget() if budget is None else budget) as store:
            for turn in range(SAVES):
                ids = _prefix_ids(self._new + worker * 10**6 + turn)[: 10 * CHUNK]
                taken.append(_milliseconds(partial(store.save, ids, self._ten)))
            refused = store.counters()["refused_chunks"]
        self._new += SAVES
        return taken, refused

    def _save_cpu_time(self, processes: int) -> tuple[float, int]:
        """Return the CPU time of a save in milliseconds, and the number of chunks that were not stored."""
        context = multiprocessing.get_context("fork")
        results, budget = context.Queue(), self._budget()

        def run_worker(worker: int) -> None:
            torch.set_num_threads(1)
            before = resource.getrusage(resource.RUSAGE_SELF)
            _, refused = self._time_saves(worker, budget)
            after = resource.getrusage(resource.RUSAGE_SELF)
            results.put(((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / SAVES, refused))

        workers = [context.Process(target=run_worker, args=(number,)) for number in range(processes)]
        for worker in workers:
            worker.start()
        result: list[tuple[float, int]] = [results.get() for _ in workers]
        for worker in workers:
            worker.join()
        self._new += SAVES * processes
        cpus, refused = zip(*result, strict=True)
        return 1000 * sum(cpus) / processes, sum(refused)


def _prefix_ids(prefix_index: int) -> list[int]:
    return [prefix_index % 2**31, prefix_index // 2**31, *range(CHUNK * CHUNKS - 2)]


def _milliseconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - begun)


def show(report: dict[str, Any]) -> None:
    rows = []
    for name, value in report["rows"].items():
        target, unit = TARGETS.get(name, (None, "ms"))
        met = "" if target is None else "met" if value <= target else "missed"
        rows.append([name, f"{value:,.2f} {unit}", "" if target is None else f"at most {target:g} {unit}", met])
    title = f"{report['entries']:,} entries of {CHUNK} tokens, {report['put']:,} of them put now"
    print_table(title, ["what", "measured", "target", ""], rows)
