"""Disk usage of a folder: blocks and folders count, the largest budget applies, and machines share one count."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch

import kvpack
from kvpack.cli import main
from kvpack.store import directory, disk_usage
from kvpack.store.eviction import Evictor
from support.foreign_values import IDENTITY as PAGES
from support.store_caches import CHUNK, cache, entries, is_same_prefix, open_store, prompt, save

GEOMETRY = kvpack.pages.PageGeometry(layers=1, heads=1, tokens=16, dim_k=32, dim_v=32)


def on_disk(folder: Path) -> int:
    return int(subprocess.run(["du", "-s", "-B1", folder], check=True, capture_output=True, text=True).stdout.split()[0])


@pytest.mark.scenario
def test_small_rows_take_complete_blocks(tmp_path: Path) -> None:
    pages = kvpack.pages.PageBuffer(GEOMETRY, *(torch.randn(1, 1, 1, 16, 32).bfloat16() for _ in range(2)))
    with kvpack.PageStore(tmp_path / "store", PAGES, GEOMETRY, max_bytes=1_500_000) as store:
        for number in range(700):
            assert store.put([number.to_bytes(4, "little")], pages, [0]) == [True]
            if number % 50 == 0:
                assert on_disk(tmp_path / "store") <= 1.05 * 1_500_000
        assert store.counters()["evicted_entries"] > 500
        assert store.stats()["entries"] > 50
    assert 0.7 * 1_500_000 < on_disk(tmp_path / "store") <= 1.05 * 1_500_000


def test_the_count_equals_the_disk_usage(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", max_bytes=10**8)
    for seed in range(4):
        save(store, prompt(3, seed=seed))
    assert on_disk(tmp_path / "store") <= store._backend._usage.read().total
    store.collect()
    # The lock is made by the round that counts.
    assert abs(store._backend._usage.read().total - on_disk(tmp_path / "store")) <= 4096
    assert store.delete(prompt(3)) == 3
    assert on_disk(tmp_path / "store") <= store._backend._usage.read().total


def test_a_smaller_budget_does_not_evict_entries_of_a_larger_budget(tmp_path: Path) -> None:
    large, small = (open_store(tmp_path, max_bytes=size) for size in (1_000_000, 200_000))
    ids = prompt(40)
    save(large, ids)
    assert small.save(prompt(2, seed=1), cache(2 * CHUNK + 5)) == 0
    small.collect()
    assert large.match(ids) == 40 * CHUNK
    assert small.counters()["evicted_entries"] == 0
    assert small.counters()["refused_chunks"] == 1
    assert large.counters()["faults"] == small.counters()["faults"] == {}


def test_a_store_with_a_smaller_budget_stores_while_there_is_space(tmp_path: Path) -> None:
    large, small = (open_store(tmp_path, max_bytes=size) for size in (2_000_000, 400_000))
    save(large, prompt(3))
    save(small, prompt(3, seed=1))
    assert small.counters()["evicted_entries"] == 0


def test_an_unused_budget_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = (open_store(tmp_path, max_bytes=size) for size in (1_000_000, 300_000))
    save(large, prompt(40))
    monkeypatch.setattr(disk_usage, "LIMIT_SECONDS", -1)
    save(large, prompt(1, seed=2))
    save(small, prompt(2, seed=1))
    assert small.counters()["evicted_entries"] > 10
    assert on_disk(tmp_path) <= 1.05 * 300_000


def test_gc_evicts_to_its_own_budget(tmp_path: Path) -> None:
    large = open_store(tmp_path, max_bytes=1_000_000)
    save(large, prompt(40))
    assert main(["store", "gc", str(tmp_path), "--max-bytes", "300000"]) == 0
    assert 0 < large.match(prompt(40)) < 20 * CHUNK
    assert on_disk(tmp_path) <= 1.05 * 300_000


def test_without_the_rule_a_smaller_budget_evicts_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_usage.UsageCount, "effective_budget", lambda self, budget: budget)
    with pytest.raises(AssertionError):
        test_a_smaller_budget_does_not_evict_entries_of_a_larger_budget(tmp_path)


def test_machines_that_use_one_folder_share_a_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine counts the folder once after it boots, and not again when another machine has put entries."""
    rounds: list[bytes] = []
    real = Evictor._try_round
    monkeypatch.setattr(Evictor, "_try_round", lambda self, *given: rounds.append(disk_usage.boot_id()) or real(self, *given))
    stores = [open_store(tmp_path, max_bytes=10**8) for _ in range(3)]
    for turn in range(4):
        for number, store in enumerate(stores):
            monkeypatch.setattr(disk_usage, "boot_id", lambda number=number: b"run %04d" % number)
            save(store, prompt(2, seed=10 * turn + number))
    assert rounds == [b"run %04d" % number for number in range(3)]
    # One that was started again may have lost what it wrote last.
    monkeypatch.setattr(disk_usage, "boot_id", lambda: b"run 0009")
    save(stores[0], prompt(2, seed=99))
    assert rounds[3:] == [b"run 0009"]
    assert on_disk(tmp_path) <= stores[0]._backend._usage.read().total


def test_the_count_remembers_a_few_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, max_bytes=10**8)
    sizes = set()
    for number in range(40):
        monkeypatch.setattr(disk_usage, "boot_id", lambda number=number: b"run %04d" % number)
        save(store, prompt(1, seed=number))
        sizes.add(os.stat(tmp_path / "usage").st_size)
    assert max(sizes) == 64 + 32 * 8
    assert store._backend._usage.read().boots[0] == b"run 0039"


def test_a_copy_keeps_the_order_of_ancestors(tmp_path: Path) -> None:
    """``cp -r`` sets the times of entries to the time of the copy."""
    store = open_store(tmp_path / "a", max_bytes=10**8)
    branches = [prompt(8, first=3, seed=seed) for seed in range(6)]
    for ids in branches:
        save(store, ids)
    subprocess.run(["cp", "-r", tmp_path / "a", tmp_path / "b"], check=True)
    copied = sorted((tmp_path / "b").glob("?/?/*"))
    for number, path in enumerate(copied):
        # A copy in the order of names, as some tools make it, slow enough for the clock.
        os.utime(path, ns=(10**18 + number, 10**18 + number))
    half = on_disk(tmp_path / "b") * 2 // 3
    assert main(["store", "gc", str(tmp_path / "b"), "--max-bytes", str(half)]) == 0
    left = len(list((tmp_path / "b").glob("?/?/*")))
    assert 5 < left < len(copied)
    copy = open_store(tmp_path / "b")
    found = {key for ids in branches for key in copy.keys(ids)[: copy.match(ids) // CHUNK]}
    assert len(found) == left, "a remaining entry was not found"


def test_a_copy_that_is_not_noticed_loses_the_order_of_ancestors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_usage.DiskUsage, "is_copy", lambda self: False)
    with pytest.raises(AssertionError, match="a remaining entry was not found"):
        test_a_copy_keeps_the_order_of_ancestors(tmp_path)


def test_entries_on_disk_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads overlap. A missing entry ends the prefix, and an unreadable one is counted once."""
    ids = prompt(8)
    map_file, pairs = directory.map_file, threading.Barrier(2)

    def mapped(descriptor: int, size: int) -> memoryview:
        pairs.wait(60)
        return map_file(descriptor, size)

    with open_store(tmp_path) as store:
        whole = save(store, ids)
        monkeypatch.setattr(directory, "is_cold", lambda *range_: True)
        with monkeypatch.context() as patch:
            patch.setattr(directory, "map_file", mapped)
            tokens, found = store.load(ids)
        assert tokens == 8 * CHUNK
        assert is_same_prefix(found, whole)

        key = store.keys(ids)[5]
        entry = next(path for path in entries(tmp_path) if path.endswith(key.hex()))
        for change, faults in ((os.unlink, {}), (os.mkdir, {"get EINVAL": 1})):
            change(entry)
            # What a lookup has seen a moment before.
            monkeypatch.setattr(store._backend, "count_present", len)
            tokens, found = store.load(ids)
            assert tokens == 5 * CHUNK
            assert is_same_prefix(found, whole)
            assert store.counters()["faults"] == faults
