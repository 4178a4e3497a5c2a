"""Inject errors: the n-th call of each system operation by a store fails with an errno, once or permanently."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
from typing import TYPE_CHECKING

import pytest

import kvpack
from kvpack.store import breaker
from support.faulty_os import OPERATIONS, OTHER_OPERATIONS, SOCKET_OPERATIONS, FaultyOs
from support.store_matrix.cells import Cell
from support.store_matrix.kinds import BUDGET, Place
from support.store_matrix.oracle import IDENTITIES, BrokenGuarantee, check, packed_prompt, prepare, prompt
from support.store_matrix.uses import PINNED_PROMPTS, check_intact, check_usable, perform_each_operation, save_and_pin

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ERRORS = (
    *(errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR),
    *(errno.ESTALE, errno.EPERM),
)
SOCKET_ERRORS = (errno.ECONNRESET, errno.ECONNREFUSED, errno.EPIPE, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE, errno.EINTR)
OTHER_FILES = (*PINNED_PROMPTS, (0, 2), (1, 3))
"""Prompts that are saved without pins and without a budget, which must not be evicted."""


def check_system_errors(place: Place, cell: Cell, count: int, seed: int = 0) -> None:
    """Try ``count`` cases of (operation, call, errno, once or permanently), with and without a budget."""
    prepare()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breaker, "PAUSE_SECONDS", 0.0)
        without = FaultyOs(tuple(_operations(place)), 10**9)
        _run(place, cell, without, BUDGET)
        cell.counts["operations"] = len(without.counts)
        cases = _cases(without.counts, random.Random(seed))
        for case in itertools.islice(cases, count):
            operation, number, code, sticky, budget = case
            fault = FaultyOs((operation,), number, code, sticky)
            what = f"{operation} {number} {errno.errorcode[code]}{' and all later' if sticky else ''}{'' if budget else ', no budget'}"
            with cell.recording_problems(what):
                cell.counts["faults_met"] += _run(place, cell, fault, budget) >= number
            cell.report_done(of=count)


def _operations(place: Place) -> Sequence[str]:
    folder = (*OPERATIONS, *OTHER_OPERATIONS) if place.folders else ()
    return (*folder, *(SOCKET_OPERATIONS if place.has_server else ()))


def _cases(calls: Mapping[str, int], choice: random.Random) -> list[tuple[str, int, int, bool, int | None]]:
    """Return all cases in a random order that alternates between operations."""
    by_operation = []
    for operation, most in calls.items():
        codes = SOCKET_ERRORS if operation in SOCKET_OPERATIONS else ERRORS
        cases = list(itertools.product([operation], range(1, most + 1), codes, (False, True), (BUDGET, None)))
        choice.shuffle(cases)
        by_operation.append(cases)
    choice.shuffle(by_operation)
    return [case for row in itertools.zip_longest(*by_operation) for case in row if case is not None]


def _run(place: Place, cell: Cell, fault: FaultyOs, budget: int | None) -> int:
    """Use a store with a fault and check it afterwards. Return how often the fault's operations were called."""
    place.clear()
    place.budget, place.durable = budget, True
    save_and_pin(place)
    kept = PINNED_PROMPTS
    if budget is None:
        kept = OTHER_FILES
        for who, number in OTHER_FILES:
            with place.open(who) as store:
                store.save(prompt(number), packed_prompt(who, number))
    before = open_files()
    lasting = [place.open(who) for who in range(len(IDENTITIES))]
    try:
        with pytest.MonkeyPatch.context() as patch:
            fault.install(patch)
            for who, store in enumerate(lasting[:2]):
                check(store, who, 0)
                store.save(prompt(7), packed_prompt(who, 7))
                cell.counts["chunks_found"] += check(store, who, 7)
            # Opening a store may raise.
            with contextlib.suppress(kvpack.KvpackError):
                cell.counts["chunks_found"] += perform_each_operation(place)
        for who, store in enumerate(lasting[:2]):
            check_usable(store, who, 4)
    finally:
        for store in lasting:
            store.close()
    if after := open_files() - before:
        raise BrokenGuarantee(f"the store left file descriptors open: {after}")
    check_intact(place, kept, read=(0, 1, 4, 7))
    return fault.calls


def open_files() -> set[str]:
    """Return the open files of this process, except sockets, which close when a client is garbage-collected."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:"):
                found.add(f"{name} {target}")
    return found
