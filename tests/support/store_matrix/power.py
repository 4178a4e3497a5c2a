"""Lose power: a folder is in any state that a crash may leave (see power_loss.py), or a Redis server's log is cut anywhere."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvpack.store import breaker
from support.power_loss import Disk, RecordingOs
from support.store_matrix.cells import Cell
from support.store_matrix.kinds import BUDGET, Place
from support.store_matrix.oracle import prepare
from support.store_matrix.uses import PINNED_PROMPTS, check_intact, perform_each_operation, save_and_pin

if TYPE_CHECKING:
    from support.redis_server import Server


def check_power_loss(place: Place, cell: Cell, count: int, seed: int = 0) -> None:
    """Lose power ``count`` times at random steps of a store, both with and without entries that are synced to disk."""
    prepare()
    choice = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breaker, "PAUSE_SECONDS", 0.02)
        for durable in (True, False):
            _crash_repeatedly(
                replace(place, root=place.root / f"durable-{durable}", durable=durable, budget=BUDGET), cell, count // 2, choice
            )


def _crash_repeatedly(place: Place, cell: Cell, count: int, choice: random.Random) -> None:
    os.mkdir(place.root, 0o700)
    system = RecordingOs(str(place.root))
    if place.server is not None:
        place.client().flushall()
        place.server.keep_log()
    with pytest.MonkeyPatch.context() as patch:
        system.install(patch)
        save_and_pin(place)
        promised = len(system.steps)
        perform_each_operation(place)
    log = place.server.log() if place.server is not None else b""
    cell.counts["steps"] += len(system.steps)
    for number in range(count):
        stop = choice.randint(0, len(system.steps))
        # The minimum that may survive, all names with the fewest bytes, and random states in between.
        way = choice.choice(("least", "names", "any"))
        crashed = replace(place, root=place.root.with_name("crashed"))
        shutil.rmtree(crashed.root, ignore_errors=True)
        disk = Disk(system.root, system.steps[:stop])
        disk.crash(str(crashed.root), choice if way == "any" else None, names_survive=way == "names")
        if crashed.server is not None:
            _crash_server(crashed.server, log, choice)
        # A server may lose anything, so it guarantees nothing.
        kept = PINNED_PROMPTS if place.durable and place.folders and stop >= promised else ()
        with cell.recording_problems(
            f"power lost after {stop} of {len(system.steps)} steps, {way}, durable={place.durable}, crash {number}"
        ):
            cell.counts["chunks_left"] += check_intact(crashed, kept, damage_allowed=not place.durable, read=(0, 1, 4, 5))
            cell.counts["kept"] += len(kept)
        cell.report_done(of=2 * count)
    if place.server is not None:
        place.server.drop_log()


def _crash_server(server: Server, log: bytes, choice: random.Random) -> None:
    server.kill()
    server.set_log(log[: choice.randint(0, len(log))])
    server.start()
