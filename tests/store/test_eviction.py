"""Eviction keeps the budget, and removes the least recently used entries first, leaves before ancestors.

The tests include concurrent writers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import time
import types
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvpack.runtime import threads
from kvpack.store import directory, eviction
from support import store_caches
from support.caches import unpack_all
from support.store_caches import CHUNK, UNIFORM_IDENTITY, cache, entries, entry_of, is_same_prefix, prompt, save
from support.store_stress import FORK

if TYPE_CHECKING:
    from pathlib import Path

    import kvpack


open_store = partial(store_caches.open_store, identity=UNIFORM_IDENTITY)


@pytest.fixture(autouse=True, params=["listed", "indexed"])
def _index(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an index even for few entries, as in a large folder. Small folders are otherwise listed."""
    if request.param == "listed":
        return
    real = directory.Directory.put

    def put(self: directory.Directory, *given: Any) -> bool:
        stored = real(self, *given)
        self._index.build()
        return stored

    monkeypatch.setattr(directory.Directory, "put", put)


@pytest.fixture(scope="module")
def entry_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Return the size in bytes of each entry.

    All entries have the same shape, and positions below 128 take equally many bytes.
    """
    folder = tmp_path_factory.mktemp("size")
    save(open_store(folder), prompt(3))
    (size,) = {os.stat(path).st_size for path in entries(folder)}
    return size


def total(folder: Path) -> int:
    return sum(os.stat(path).st_size for path in entries(folder))


def test_the_budget_holds_after_every_save(tmp_path: Path, entry_bytes: int) -> None:
    store = open_store(tmp_path, max_bytes=5 * entry_bytes + 10)
    for seed in range(12):
        ids = prompt(2, seed=seed)
        save(store, ids)
        assert total(tmp_path) <= 5 * entry_bytes + 10
        assert store.match(ids) == 2 * CHUNK
    counts = store.counters()
    assert counts["evicted_entries"] == 24 - 5 + 0
    assert counts["evicted_bytes"] == counts["evicted_entries"] * entry_bytes
    assert os.listdir(tmp_path / "unfinished") == []


def test_least_recently_used_entries_are_evicted_first(tmp_path: Path, entry_bytes: int) -> None:
    store = open_store(tmp_path, max_bytes=3 * entry_bytes)
    prompts = [prompt(1, seed=seed) for seed in range(5)]
    for ids in prompts[:3]:
        save(store, ids)
    store.load(prompts[0])
    save(store, prompts[3])
    assert [store.match(ids) > 0 for ids in prompts] == [True, False, True, True, False]
    store.save(prompts[2], cache(len(prompts[2]), UNIFORM_IDENTITY.recipe))
    save(store, prompts[4])
    assert [store.match(ids) > 0 for ids in prompts] == [False, False, True, True, True]


def test_leaves_are_evicted_before_their_ancestors(tmp_path: Path, entry_bytes: int) -> None:
    store = open_store(tmp_path, max_bytes=8 * entry_bytes)
    branches = [prompt(4, first=2, seed=seed) for seed in (1, 2)]
    for ids in branches:
        save(store, ids)
    store.load(branches[0])
    found = []
    for seed in range(8):
        save(store, prompt(1, seed=10 + seed))
        found.append([store.match(ids) // CHUNK for ids in branches])
    # Two free places, then the branch that was not loaded from its leaf on, then the other, and their root at the end.
    assert found == [[4, 4], [4, 4], [4, 3], [4, 2], [3, 2], [2, 2], [1, 1], [0, 0]]


def test_pins_keep_a_chain_for_all_processes(tmp_path: Path, entry_bytes: int) -> None:
    ids = prompt(2, seed=1)
    first = open_store(tmp_path, max_bytes=4 * entry_bytes)
    save(first, ids)
    assert first.pin(ids) == 2 * CHUNK
    second = open_store(tmp_path, max_bytes=4 * entry_bytes)
    for seed in range(2, 8):
        save(second, prompt(2, seed=seed))
    assert second.match(ids) == 2 * CHUNK
    assert second.unpin(ids)
    assert not first.unpin(ids)
    for seed in range(2, 4):
        save(second, prompt(2, seed=seed))
    assert second.match(ids) == 0
    assert first.pin(ids) == 0


def test_entries_that_cannot_fit_are_refused_without_loss(tmp_path: Path, entry_bytes: int) -> None:
    store = open_store(tmp_path, max_bytes=2 * entry_bytes)
    ids = prompt(2)
    save(store, ids)
    store.pin(ids)
    other = prompt(3, seed=1)
    assert store.save(other, cache(len(other), UNIFORM_IDENTITY.recipe)) == 0
    assert store.counters()["refused_chunks"] == 1
    assert store.load(ids)[0] == 2 * CHUNK
    assert os.listdir(tmp_path / "unfinished") == []
    store.unpin(ids)
    assert store.save(other, cache(len(other), UNIFORM_IDENTITY.recipe)) == 2 * CHUNK
    tiny = open_store(tmp_path / "tiny", max_bytes=entry_bytes - 1)
    assert tiny.save(ids, cache(len(ids), UNIFORM_IDENTITY.recipe)) == 0
    assert entries(tmp_path / "tiny") == []


def test_a_minimum_of_free_disk_space_is_kept(tmp_path: Path, entry_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = 6 * entry_bytes

    class Disk:
        f_frsize = 1

        @property
        def f_bavail(self) -> int:
            return capacity - sum(os.stat(os.path.join(p, n)).st_size for p, _, names in os.walk(tmp_path) for n in names if len(n) > 30)

    monkeypatch.setattr(eviction.os, "statvfs", lambda path: Disk())
    store = open_store(tmp_path, min_free=2 * entry_bytes)
    for seed in range(5):
        save(store, prompt(2, seed=seed))
        assert Disk().f_bavail >= 2 * entry_bytes
    assert store.counters()["evicted_entries"] == 6
    capacity = entry_bytes
    assert store.save(prompt(1, seed=9), cache(CHUNK + 5, UNIFORM_IDENTITY.recipe)) == 0
    assert store.counters()["refused_chunks"] == 1


def test_loaded_caches_outlive_the_eviction_of_their_files(tmp_path: Path, entry_bytes: int) -> None:
    store = open_store(tmp_path, max_bytes=4 * entry_bytes)
    ids = prompt(3)
    whole = save(store, ids)
    _, held = store.load(ids)
    before = [x.clone() for x in unpack_all(held)]
    for seed in range(1, 8):
        save(store, prompt(3, seed=seed))
    assert store.match(ids) == 0
    assert all(torch.equal(a, b) for a, b in zip(unpack_all(held), before, strict=True))
    assert is_same_prefix(held, whole)


@pytest.mark.parametrize("hours", [-24 * 365, 24 * 365])
def test_clock_jumps_break_no_rule(hours: int, tmp_path: Path, entry_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, max_bytes=6 * entry_bytes)
    branches = [prompt(3, first=1, seed=seed) for seed in (1, 2)]
    save(store, branches[0])
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + hours * 3600 * 10**9)
    save(store, branches[1])
    store.load(branches[0])
    for seed in range(6):
        save(store, prompt(1, seed=20 + seed))
        assert total(tmp_path) <= 6 * entry_bytes
        for ids in branches:
            stored = [os.path.basename(path) for path in entries(tmp_path)]
            there = [key.hex() in stored for key in store.keys(ids)]
            assert there == sorted(there, reverse=True), "an ancestor was evicted before its descendants"


def test_a_clock_that_was_ahead_does_not_keep_entries(tmp_path: Path, entry_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, max_bytes=4 * entry_bytes)
    real = time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: real() + 24 * 365 * 3600 * 10**9)
        save(store, prompt(2, seed=1))
    for seed in (2, 3):
        save(store, prompt(2, seed=seed))
    assert [store.match(prompt(2, seed=seed)) // CHUNK for seed in (1, 2, 3)] == [0, 2, 2]


def test_last_uses_decrease_along_a_chain(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    long, short = prompt(4, first=2, seed=1), prompt(3, first=2, seed=2)
    save(store, long)
    save(store, short)
    for use in (
        lambda: store.load(short),
        lambda: store.load(long[: 3 * CHUNK]),
        lambda: store.save(long, cache(len(long), UNIFORM_IDENTITY.recipe)),
    ):
        use()
        for ids in (long, short):
            times = [os.stat(entry_of(store, ids, number)).st_mtime_ns for number in range(len(ids) // CHUNK)]
            assert times == sorted(times, reverse=True)
            assert len(set(times)) == len(times)


def test_a_lost_count_is_recomputed(tmp_path: Path, entry_bytes: int) -> None:
    for damage in (None, b"", b"x" * 13, b"x" * 8 + (-1).to_bytes(8, "little", signed=True)):
        store = open_store(tmp_path, max_bytes=4 * entry_bytes)
        save(store, prompt(4, seed=1))
        usage = tmp_path / "usage"
        if damage is None:
            usage.unlink()
        else:
            usage.write_bytes(damage)
        for reader in (store, open_store(tmp_path, max_bytes=4 * entry_bytes)):
            save(reader, prompt(1, seed=2))
            save(reader, prompt(4, seed=3))
            assert total(tmp_path) <= 4 * entry_bytes


def test_unfinished_files_are_removed_once_their_lock_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    save(store, prompt(1))
    folder = tmp_path / "unfinished"
    # An older writer holds no lock, so only age tells that it is gone.
    names = {".kvpack-1-aa-locked.tmp": False, ".kvpack-1-bb-locked.tmp": True, ".kvpack-999999999-cc.tmp": True, "other": True}
    for name in names:
        (folder / name).write_bytes(b"part")
    with open(folder / ".kvpack-1-bb-locked.tmp") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        store = open_store(tmp_path)
        assert {name: (folder / name).exists() for name in names} == names
        assert store.counters()["swept_files"] == 1
        real = time.time
        with monkeypatch.context() as patch:
            patch.setattr(eviction.time, "time", lambda: real() + eviction.STALE_SECONDS + 60)
            store.collect()
        assert sorted(os.listdir(folder)) == [".kvpack-1-bb-locked.tmp", "other"]
    store.collect()
    assert os.listdir(folder) == ["other"]
    assert store.counters()["swept_files"] == 3
    assert store.counters()["faults"] == {}


def test_a_stopped_evictor_blocks_others_only_briefly(tmp_path: Path, entry_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "WAIT_SECONDS", 0.05)
    store = open_store(tmp_path, max_bytes=2 * entry_bytes)
    save(store, prompt(2))
    other = open_store(tmp_path, max_bytes=2 * entry_bytes)
    with other._backend._evictor._try_lock() as held:
        assert held
        assert store.save(prompt(1, seed=1), cache(CHUNK + 5, UNIFORM_IDENTITY.recipe)) == 0
        assert store.counters()["refused_chunks"] == 1
        assert store.load(prompt(2))[0] == 2 * CHUNK
    assert store.save(prompt(1, seed=1), cache(CHUNK + 5, UNIFORM_IDENTITY.recipe)) == CHUNK


def test_a_writer_waits_the_same_number_of_times_on_a_busy_machine(
    tmp_path: Path, entry_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, each sleep takes seconds, and so does the work for which the writer waits."""
    store, other = (open_store(tmp_path, max_bytes=2 * entry_bytes) for _ in range(2))
    save(store, prompt(2))
    now = [0.0]
    with contextlib.ExitStack() as evicting:
        assert evicting.enter_context(other._backend._evictor._try_lock())

        def sleep(seconds: float) -> None:
            now[0] += 10
            if now[0] == 70:
                evicting.close()

        busy = types.SimpleNamespace(**{**vars(time), "sleep": sleep, "monotonic": lambda: now[0]})
        monkeypatch.setattr(eviction, "time", busy)
        assert store.save(prompt(1, seed=1), cache(CHUNK + 5, UNIFORM_IDENTITY.recipe)) == CHUNK
    assert store.counters()["refused_chunks"] == 0


def _save_in_child(store: kvpack.Store, results: Any) -> None:
    ids = prompt(2, seed=7)
    results.put((store.load(prompt(2))[0], store.save(ids, cache(len(ids), UNIFORM_IDENTITY.recipe)), store.load(ids)[0]))


def test_a_store_works_in_a_forked_process(tmp_path: Path, entry_bytes: int) -> None:
    store = open_store(tmp_path, max_bytes=4 * entry_bytes)
    save(store, prompt(2))
    results = FORK.Queue()
    # As another thread of the parent would leave them at that moment.
    with store._counters._lock:
        child = FORK.Process(target=_save_in_child, args=(store, results), daemon=True)
        child.start()
    assert results.get(timeout=600) == (2 * CHUNK, 2 * CHUNK, 2 * CHUNK)
    child.join()
    assert store.match(prompt(2, seed=7)) == 2 * CHUNK
    save(store, prompt(3, seed=8))
    assert total(tmp_path) <= 4 * entry_bytes


@pytest.mark.parametrize("mutant", ["truncates", "newest first", "no budget", "believes every clock", "keeps locks over a fork"])
def test_violations_of_these_rules_are_noticed(mutant: str, tmp_path: Path, entry_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that breaks one of the most important rules fails the test of that rule."""
    if mutant == "truncates":
        # In place of unlink: a mapped file that is cut short ends the process that reads it, so only its size is looked at.
        monkeypatch.setattr(directory.os, "unlink", lambda path: os.truncate(path, 0))
        store = open_store(tmp_path, max_bytes=2 * entry_bytes)
        save(store, prompt(2))
        path = entry_of(store, prompt(2), 1)
        with open(path, "rb") as held:
            save(store, prompt(1, seed=1))
            assert os.fstat(held.fileno()).st_size == 0
        return
    if mutant == "keeps locks over a fork":
        store = open_store(tmp_path)
        save(store, prompt(2))
        monkeypatch.setattr(threads, "_ALL", set())
        results = FORK.Queue()
        with store._counters._lock:
            child = FORK.Process(target=_save_in_child, args=(store, results), daemon=True)
            child.start()
        with pytest.raises(queue.Empty):
            results.get(timeout=1)
        child.kill()
        child.join()
        return
    if mutant == "believes every clock":
        monkeypatch.setattr(eviction, "FUTURE_NS", 10**20)
        with pytest.raises(AssertionError):
            test_a_clock_that_was_ahead_does_not_keep_entries(tmp_path, entry_bytes, monkeypatch)
        return
    if mutant == "newest first":
        monkeypatch.setattr(eviction, "sorted", lambda entries: sorted(entries, reverse=True), raising=False)
        order = eviction.least_recently_used
        monkeypatch.setattr(eviction, "least_recently_used", lambda *given: (one for one in [*order(*given)][::-1]))
        failing: Any = test_least_recently_used_entries_are_evicted_first
    else:
        monkeypatch.setattr(eviction.Evictor, "_fits", lambda self, total, size: True)
        failing = test_the_budget_holds_after_every_save
    with pytest.raises(AssertionError):
        failing(tmp_path, entry_bytes)
