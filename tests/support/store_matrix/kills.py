"""Kill processes that save, load, evict and collect at random moments by SIGKILL, and kill the server, too."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from kvpack.store import breaker
from support.store_matrix.cells import Cell, fork, read_notes
from support.store_matrix.kinds import Place
from support.store_matrix.oracle import IDENTITIES, PROMPTS, check, prepare, require
from support.store_matrix.uses import PINNED_PROMPTS, check_intact, perform_random_operation, save_and_pin

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.store_matrix.cells import Note

WRITERS = 3
MAX_LIFE_SECONDS = 0.03
"""Longest time between two kills in seconds."""
READS_PER_KILL = 3
"""Number of verified reads after each kill."""
KILLS_PER_CHECK = 50
"""Number of kills after which all writers end and the whole store is checked."""
KILLS_PER_SERVER_KILL = 20
_SERVER_FAULTS = ("ConnectionError", "TimeoutError", "CircuitOpen", "ECONN", "EPIPE")


def check_kills(place: Place, cell: Cell, count: int, seed: int = 0) -> None:
    """Kill ``count`` writers, one at a time, and check all guarantees during and after the kills."""
    prepare()
    with pytest.MonkeyPatch.context() as patch:
        # Retry soon after the server is back.
        patch.setattr(breaker, "PAUSE_SECONDS", 0.02)
        save_and_pin(place)
        choice, left = random.Random(seed), count
        while left:
            now = min(left, KILLS_PER_CHECK)
            _kill_once(place, cell, now, choice)
            with cell.recording_problems("checking the store after all kills"):
                cell.counts["chunks_left"] += check_intact(place)
            left -= now
            cell.report_done(now, of=count)


def _kill_once(place: Place, cell: Cell, count: int, choice: random.Random) -> None:
    notes = str(place.root / "notes")
    stores = [place.open(who) for who in range(len(IDENTITIES))]
    running: list[int] = []

    def start() -> int:
        seed = choice.getrandbits(32)
        return fork(lambda note: _use_until_killed(place, random.Random(seed), note), notes)

    try:
        running += (start() for _ in range(WRITERS))
        for number in range(count):
            time.sleep(choice.uniform(0, MAX_LIFE_SECONDS))
            victim = choice.randrange(WRITERS)
            os.kill(running[victim], signal.SIGKILL)
            _, status = os.waitpid(running[victim], 0)
            if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
                cell.problem(f"a writer exited before it was killed, with code {os.waitstatus_to_exitcode(status)}")
            running[victim] = start()
            if place.has_server and number % KILLS_PER_SERVER_KILL == KILLS_PER_SERVER_KILL - 1:
                _kill_server(place, cell)
            for _ in range(READS_PER_KILL):
                who, read = choice.randrange(len(stores)), choice.randrange(PROMPTS)
                with cell.recording_problems("reading after a kill"):
                    cell.counts["reads"] += 1
                    cell.counts["hits"] += check(stores[who], who, read) > 0
            with cell.recording_problems("reading the pinned prompts"):
                who, _ = choice.choice(PINNED_PROMPTS)
                require(stores[who], PINNED_PROMPTS, who, "while writers are killed")
            size = place.max_stored_bytes()
            cell.counts["most_bytes"] = max(cell.counts["most_bytes"], size)
            if place.budget is not None and size > place.budget:
                cell.problem(f"the store contained {size} bytes at one moment, but the budget is {place.budget}")
        for who, store in enumerate(stores):
            _check_counters(store.counters(), who, place, cell.problem)
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        for store in stores:
            store.close()
        read_notes(notes, cell)


def _kill_server(place: Place, cell: Cell) -> None:
    assert place.server is not None
    place.server.kill()
    place.server.start()
    cell.counts["server_kills"] += 1
    time.sleep(0.03)
    if not place.survives_server:
        with cell.recording_problems("reading after a restart of the server"):
            save_and_pin(place)


def _use_until_killed(place: Place, choice: random.Random, note: Note) -> None:
    stores = [place.open(who) for who in range(len(IDENTITIES))]
    loaded: list[object] = []
    seen: set[str] = set()

    def problem(text: str) -> None:
        if text not in seen:
            seen.add(text)
            note(f"problem: {text}", 1)

    while True:
        found, _ = perform_random_operation(place, stores, choice, loaded)
        if found:
            note("hits", 1)
        for who, store in enumerate(stores):
            _check_counters(store.counters(), who, place, problem)


def _check_counters(counts: dict[str, object], who: int, place: Place, problem: Callable[[str], None]) -> None:
    """Check that killed processes neither damage entries on a sound disk nor cause refusals. A killed server only stops responding."""
    if counts["damaged_entries"]:
        problem(f"the store of identity {who} found {counts['damaged_entries']} damaged entries; its faults are {counts['faults']}")
    faults = counts["faults"]
    assert isinstance(faults, dict)
    for fault in faults:
        if not (place.has_server and any(known in fault for known in _SERVER_FAULTS)):
            problem(f"the store of identity {who} counted the unexpected fault {fault!r}")
