"""Limit memory: a process runs out of address space at any point, or a server is full."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvpack.formats.errors import KvpackWarning
from kvpack.store import breaker
from support.store_matrix.cells import Cell, fork, read_notes
from support.store_matrix.kinds import BUDGET, Place
from support.store_matrix.oracle import (
    CHUNK,
    BrokenGuarantee,
    check,
    chunks,
    compare,
    expected_chunks,
    packed_prompt,
    prepare,
    prompt,
    require,
    set_layers,
)
from support.store_matrix.uses import PINNED_PROMPTS, check_intact, save_and_pin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.store_matrix.cells import Note

LAYERS = 12
"""Number of layers for which an entry (40 kB) needs its own memory allocation from the system."""
STEP_BYTES = 150_000
OTHERS = (8, 9, 11, 14)
"""Prompts of the first identity that are saved while memory is limited."""
STEPS = 32
"""Number of memory limits, from the memory already in use up to room for everything."""
_SERVER_STEP_BYTES = 30_000
_LIBC = ctypes.CDLL(None)
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
_LARGE = 16_384


def check_memory_limits(place: Place, cell: Cell, count: int, seed: int = 0) -> None:
    """Use a store with ``count`` memory limits in turn. No entry that was saved before may be lost."""
    place.budget = None
    notes = str(place.root / "notes")
    process = fork(lambda note: _use_under_limits(place, count, note), notes)
    _, status = os.waitpid(process, 0)
    read_notes(notes, cell)
    if code := os.waitstatus_to_exitcode(status):
        cell.problem(f"the process under memory limits exited with code {code}")
    cell.report_done(count)
    if place.has_server:
        _use_full_server(place, cell, count)


def _use_under_limits(place: Place, count: int, note: Note) -> None:
    # A thread that cannot start for lack of memory prints a message, and the caller does its work.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # Serve larger allocations from the system, and return them to it, so that the limit applies to them.
    _LIBC.mallopt(_M_MMAP_THRESHOLD, _LARGE)
    _LIBC.mallopt(_M_TRIM_THRESHOLD, _LARGE)
    set_layers(LAYERS)
    for who, number in (*PINNED_PROMPTS, *((0, other) for other in OTHERS)):
        expected_chunks(who, number)
    save_and_pin(place)
    # Import lazily imported modules now, because without memory Python itself would raise ImportError.
    _use(place, 0, None)
    for number in range(count):
        kept, saved = _use(place, number, STEP_BYTES * (number * STEPS // max(1, count - 1)))
        note("hits", sum(kept))
        note("misses", 3 - sum(kept))
        note("saved", saved)
        for who, kept_number in PINNED_PROMPTS:
            with place.open(who) as store:
                require(store, ((who, kept_number),), who, f"loading under memory limit {number}")


def _use(place: Place, number: int, room: int | None) -> tuple[list[bool], int]:
    """Save and load with ``room`` bytes more address space than is in use.

    Returns which of ``KEPT`` were found, and the number of saved chunks.
    """
    other = OTHERS[number % len(OTHERS)]
    whole, loaded = packed_prompt(0, other), []
    stores = [place.open(who) for who in range(3)]
    try:
        with _limit_allocations(room):
            for who, kept in PINNED_PROMPTS:
                loaded.append((who, kept, *stores[who].load(prompt(kept))))
            saved = stores[0].save(prompt(other), whole)
            stores[0].match(prompt(other))
            stores[0].collect()
        hits = [compare(*answer) > 0 for answer in loaded]
        found = check(stores[0], 0, other)
        if found < saved // CHUNK:
            raise BrokenGuarantee(
                f"save reported {saved // CHUNK} chunks when memory was short, but only {found} of {chunks(other)} are found"
            )
        stores[0].delete(prompt(other), start=CHUNK * 2)
    finally:
        for store in stores:
            store.close()
    return hits, saved // CHUNK


@contextlib.contextmanager
def _limit_allocations(room: int | None) -> Iterator[None]:
    """Limit large allocations in the block to ``room`` bytes in total, or not at all if it is None."""
    if room is None:
        yield
        return
    ballast = []
    with open("/proc/self/statm") as file:
        used = os.sysconf("SC_PAGE_SIZE") * int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
    try:
        # Use up free heap memory first.
        for size in (16 * _LARGE, 4 * _LARGE, _LARGE):
            with contextlib.suppress(MemoryError):
                while True:
                    ballast.append(bytearray(size))
        resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _use_full_server(place: Place, cell: Cell, count: int) -> None:
    """Use a server that refuses entries that do not fit, or evicts arbitrary keys, even those of the store's bookkeeping."""
    prepare()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breaker, "PAUSE_SECONDS", 0.0)
        for policy in ("noeviction", "allkeys-random"):
            full = replace(place, budget=BUDGET)
            full.clear()
            client = full.client()
            save_and_pin(full)
            for number in range(max(1, count // 4)):
                used = client.info("memory")["used_memory"]
                client.config_set("maxmemory-policy", policy)
                client.config_set("maxmemory", used + _SERVER_STEP_BYTES * (number % 4) - 20_000)
                with cell.recording_problems(f"using a full server with policy {policy}, step {number}"), _expect_eviction_warning(policy):
                    _fill(full)
                client.config_set("maxmemory", 0)
                client.config_set("maxmemory-policy", "noeviction")
                with cell.recording_problems(f"checking a full server with policy {policy} after step {number}"):
                    kept = PINNED_PROMPTS if policy == "noeviction" or full.survives_server else ()
                    cell.counts["chunks_left"] += check_intact(full, kept, read=(0, 1, 4))
                cell.report_done()


def _expect_eviction_warning(policy: str) -> contextlib.AbstractContextManager[Any]:
    """Expect the warning about a server that evicts arbitrary keys."""
    if policy == "noeviction":
        return contextlib.nullcontext()
    return pytest.warns(KvpackWarning, match=f"the Redis server has maxmemory-policy {policy}: it removes entries by itself")


def _fill(place: Place) -> None:
    for who in (0, 1):
        with place.open(who) as store:
            for number in range(8):
                saved = store.save(prompt(number), packed_prompt(who, number))
                if not 0 <= saved <= chunks(number) * CHUNK:
                    raise BrokenGuarantee(f"save reports {saved} tokens, although the server rejected them")
                check(store, who, number)
            store.collect()
            store.stats()
