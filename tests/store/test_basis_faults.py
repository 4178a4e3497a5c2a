"""No entry ever lacks its basis, despite system faults, kills at every step, and races.

The faults occur while a store puts, evicts and collects a basis.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvpack
from support.basis_caches import BASIS, cache_with_basis, count_bases, load_basis, save, with_basis, without_basis
from support.faulty_os import CHANGES, ERRORS, STRIDE, FaultyOs, open_files
from support.store_caches import CHUNK, entries, is_same_prefix, open_store, prompt
from support.store_caches import cache as other_cache
from support.store_stress import FORK

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.scenario

PROMPTS = {seed: prompt(3, first=1, seed=seed) for seed in (1, 2)}
WHOLE = cache_with_basis(len(PROMPTS[1]))
"""The prompts share a chunk, so all of them are saved with the same values."""
SMALL = {seed: prompt(2, seed=seed) for seed in range(10, 14)}
BUDGET = len(BASIS.data) + 5 * WHOLE[:, CHUNK : 2 * CHUNK].nbytes


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as parent:
        yield Path(parent) / "store"


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    """Disable logging, because a log record would keep an error alive, and with it an open file."""
    logging.getLogger("kvpack.store").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("kvpack.store").setLevel(logging.NOTSET)


def use(folder: Path) -> None:
    """Put, read, evict, and collect a basis."""
    with with_basis(folder, max_bytes=BUDGET, durable=True, min_free=1) as store:
        for ids in PROMPTS.values():
            assert store.save(ids, WHOLE) <= 3 * CHUNK
        store.pin(PROMPTS[1][: CHUNK + 1])
    with without_basis(folder, max_bytes=BUDGET, durable=True, min_free=1) as store:
        for ids in PROMPTS.values():
            n, found = store.load(ids)
            assert found is None if n == 0 else is_same_prefix(found, WHOLE)
        store.unpin(PROMPTS[1][: CHUNK + 1])
    # Others need the room.
    with open_store(folder, max_bytes=BUDGET, durable=True, min_free=1) as other:
        for ids in SMALL.values():
            other.save(ids, other_cache(len(ids)))
    with with_basis(folder, max_bytes=BUDGET, durable=True, min_free=1) as store:
        store.save(PROMPTS[1], WHOLE)
        store.delete(PROMPTS[1])
        with contextlib.suppress(OSError):
            os.utime(_path(folder), ns=(10**18, 10**18))
        store.collect()
        store.save(PROMPTS[2], WHOLE)


def use_damaged(folder: Path) -> None:
    """Find a damaged basis by a load and by a put, and replace it."""
    with with_basis(folder, max_bytes=BUDGET, durable=True, min_free=1) as store:
        store.save(PROMPTS[1], WHOLE)
    for number in range(2):
        with contextlib.suppress(OSError):
            _path(folder).write_bytes(load_basis("other").data)
        if number:
            with without_basis(folder, max_bytes=BUDGET, durable=True, min_free=1) as store:
                assert store.load(PROMPTS[1]) == (0, None)
        with with_basis(folder, max_bytes=BUDGET, durable=True, min_free=1) as store:
            assert store.save(PROMPTS[2], WHOLE) <= 3 * CHUNK


USES = {"whole": use, "damaged": use_damaged}


def check(folder: Path, *, damaged: bool = False) -> int:
    """Check that the store works and that no entry lacks its basis, unless the basis was ``damaged`` outside the store.

    Returns the number of chunks found.
    """
    bases, dependents = count_bases(folder)
    assert bases or not dependents or damaged, f"{dependents} entries are left without their basis"
    with without_basis(folder, max_bytes=BUDGET, durable=True, min_free=1) as store:
        store.collect()
        found = 0
        for ids in PROMPTS.values():
            n, loaded = store.load(ids)
            assert loaded is None if n == 0 else is_same_prefix(loaded, WHOLE)
            found += n // CHUNK
    assert sum(os.stat(path).st_size for path in entries(folder)) <= BUDGET
    assert not os.path.isdir(folder / "unfinished") or os.listdir(folder / "unfinished") == []
    with with_basis(folder, max_bytes=BUDGET, durable=True, min_free=1) as store:
        assert store.save(PROMPTS[1], WHOLE) == 3 * CHUNK
    with without_basis(folder, max_bytes=BUDGET, durable=True, min_free=1) as store:
        assert is_same_prefix(store.load(PROMPTS[1])[1], WHOLE)
        assert store.counters()["faults"] == {}
    return found


def _path(folder: Path) -> Path:
    name = BASIS.digest.hex()
    return folder / name[0] / name[1] / name


# What else fails, and how, does not depend on the entry: test_faults.py.
FAILING = (*CHANGES, "pread", "stat")


@pytest.mark.parametrize(("operation", "what"), [(one, "whole") for one in FAILING] + [(one, "damaged") for one in FAILING[::2]])
def test_no_fault_leaves_an_entry_without_its_basis(operation: str, what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, number, tried = True, 1, 0
    while reached:
        code, sticky = ERRORS[tried % len(ERRORS)], tried % 3 == 2
        shutil.rmtree(folder, ignore_errors=True)
        fault = FaultyOs((operation,), number, code, sticky)
        before = open_files()
        with monkeypatch.context() as patch:
            fault.install(patch)
            # A folder that cannot be reached is no place for a store, which is told when it is opened.
            with contextlib.suppress(kvpack.errors.InvalidParameter):
                USES[what](folder)
        assert open_files() <= before, "a descriptor is left open"
        check(folder, damaged=what == "damaged")
        reached = fault.calls >= number
        tried += 1
        number += 1 if number < 4 else 2 * number
    assert tried > 3


def _used_until_killed(what: str, folder: Path, fault: FaultyOs) -> None:
    patch = pytest.MonkeyPatch()
    fault.install(patch)
    USES[what](folder)


@pytest.mark.parametrize("what", USES)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_any_step_leaves_no_entry_without_its_basis(moment: str, what: str, folder: Path) -> None:
    number, found = {"before": 1, "after": STRIDE // 2 + 1}[moment], []
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        child = FORK.Process(target=_used_until_killed, args=(what, folder, FaultyOs(CHANGES, number, death=moment)))
        child.start()
        child.join()
        found.append(check(folder, damaged=what == "damaged"))
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        # Each use of a basis has hundreds of steps.
        number += {"whole": 4, "damaged": 2}[what] * STRIDE
    assert len(found) > 5
    assert len(set(found)) > 2, "kills at different steps leave different stores"


def _use_at_random(folder: Path, seed: int) -> None:
    choice = random.Random(seed)
    while True:
        what, ids = choice.random(), PROMPTS[choice.choice((1, 2))]
        if what < 0.3:
            with with_basis(folder, max_bytes=BUDGET) as store:
                store.save(ids, WHOLE)
        elif what < 0.6:
            with without_basis(folder, max_bytes=BUDGET) as store:
                n, loaded = store.load(ids)
                assert loaded is None if n == 0 else is_same_prefix(loaded, WHOLE)
        elif what < 0.9:
            with open_store(folder, max_bytes=BUDGET) as other:
                ids = choice.choice([*SMALL.values()])
                other.save(ids, other_cache(len(ids)))
        else:
            with with_basis(folder, max_bytes=BUDGET) as store:
                store.delete(ids)
                store.collect()


def test_racing_and_killed_writers_leave_readable_entries(folder: Path) -> None:
    """There are more prompts than fit, in processes that are killed at random.

    All reads are correct, and the store continues to work.
    """
    choice = random.Random(0)
    children = []
    try:
        for step in range(30):
            if len(children) == 3:
                victim = children.pop(choice.randrange(3))
                assert victim.exitcode is None, "a writer ended by itself"
                victim.kill()
                victim.join()
            child = FORK.Process(target=_use_at_random, args=(folder, step))
            child.start()
            children.append(child)
            time.sleep(choice.uniform(0, 0.05))
            with without_basis(folder, max_bytes=BUDGET) as store:
                for ids in PROMPTS.values():
                    n, loaded = store.load(ids)
                    assert loaded is None if n == 0 else is_same_prefix(loaded, WHOLE)
                assert store.counters()["damaged_entries"] == 0
    finally:
        for child in children:
            child.kill()
            child.join()
    check(folder)


def test_a_loaded_basis_outlives_its_entry(folder: Path) -> None:
    with with_basis(folder) as store:
        whole = save(store, PROMPTS[1])
    with without_basis(folder) as store:
        loaded = store.load(PROMPTS[1])[1]
        os.unlink(_path(folder))
        assert is_same_prefix(loaded, whole)
        assert is_same_prefix(store.load(PROMPTS[1])[1], whole)
        # Whoever has it puts it back with what it saves.
        save(store, PROMPTS[2])
    assert count_bases(folder)[0] == 1
