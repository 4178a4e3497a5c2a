"""A store after a power loss at any moment: entries that were flushed to disk exist, and no existing entry is wrong."""

from __future__ import annotations

import glob
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack.file import atomic
from kvpack.store import directory, trust
from support.power_loss import Disk, RecordingOs
from support.store_caches import CHUNK, cache, entries, is_same_prefix, open_store, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.scenario

PROMPTS = [prompt(3, first=1, seed=seed) for seed in (1, 2)]
WHOLE = cache(len(PROMPTS[0]))
"""The prompts share a chunk, so they are saved with the same values."""
SIZE = 8320
EVERY = int(os.environ.get("KVPACK_CRASH_STRIDE", "5"))
"""Interval between the moments of power loss that are tried. A value of 1 tries all moments."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as parent:
        yield Path(parent)


def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch, *, durable: bool) -> tuple[RecordingOs, list[tuple[int, set[bytes]]]]:
    """Return the steps of a store with eviction, and the keys that must exist after each step.

    These were saved before the step and must not be evicted.
    """
    system = RecordingOs(str(folder / "store"))
    promised = [(0, set[bytes]())]
    os.mkdir(folder / "store", 0o700)
    with monkeypatch.context() as patch:
        system.install(patch)
        store = open_store(folder / "store", durable=durable, max_bytes=20 * SIZE)
        for ids in PROMPTS:
            assert store.save(ids, WHOLE) == 3 * CHUNK
            promised.append((len(system.steps), promised[-1][1] | set(store.keys(ids))))
        store.pin(PROMPTS[0])
        small = open_store(folder / "store", durable=durable, max_bytes=3 * SIZE)
        # Evicts the second prompt's own chunks, from here on.
        promised.append((len(system.steps), set(store.keys(PROMPTS[0]))))
        small.collect()
        store.delete(PROMPTS[0], start=2 * CHUNK)
    return system, promised


def crashes(folder: Path, monkeypatch: pytest.MonkeyPatch, *, durable: bool) -> tuple[int, int]:
    """Simulate a power loss at many moments in several ways, and check the store.

    Returns the numbers of crashes and of refused entries.
    """
    system, promised = recorded(folder, monkeypatch, durable=durable)
    deletion = next(at for at, step in enumerate(system.steps) if step.operation == "unlink" and "pins" not in step.path)
    count = refused = 0
    target = str(folder / "crashed")
    moments = list(range(0, len(system.steps) + 1, EVERY))
    # In any order: where a promise breaks, it often breaks at moments that follow one another.
    random.Random(0).shuffle(moments)
    for stop in moments:
        disk = Disk(system.root, system.steps[:stop])
        for way in range(5):
            shutil.rmtree(target, ignore_errors=True)
            disk.crash(target, random.Random(stop * 10 + way) if way > 1 else None, names_survive=way in (1, 2))
            store = open_store(target, max_bytes=20 * SIZE)
            present = {bytes.fromhex(os.path.basename(path)) for path in entries(target)}
            if durable and stop <= deletion:
                due = max((keys for at, keys in promised if at <= stop), key=len)
                assert due <= present, f"power lost after {stop} steps: an entry that was saved is gone"
            for ids in PROMPTS:
                n, found = store.load(ids)
                assert found is None if n == 0 else is_same_prefix(found, WHOLE)
                if durable and stop <= deletion:
                    assert n >= CHUNK * sum(key in due for key in store.keys(ids)), f"power lost after {stop} steps: a saved entry is bad"
            refused += store.counters()["damaged_entries"]
            assert refused == 0 or not durable, f"power lost after {stop} steps: a name leads to bytes that are not safe"
            store.collect()
            assert not glob.glob(f"{target}/unfinished/.*")
            for ids in PROMPTS:
                assert store.save(ids, WHOLE) == 3 * CHUNK
                assert is_same_prefix(store.load(ids)[1], WHOLE)
            count += 1
    return count, refused


def test_synced_entries_survive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, refused = crashes(folder, monkeypatch, durable=True)
    assert count > 50
    assert refused == 0


def test_unsynced_entries_are_complete_or_misses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, refused = crashes(folder, monkeypatch, durable=False)
    assert count > 40
    assert refused > 0, "no entry kept its name without its bytes, so digests were not tested"


@pytest.mark.parametrize("mutant", ["no sync of files", "no sync of folders", "no sync of new folders", "sync after rename", "no digests"])
def test_violations_of_these_rules_are_noticed(mutant: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def synced_late(path: str, pieces: Any, *, durable: bool = False, **options: Any) -> int:
        total = real(path, pieces, **options)
        if durable:
            descriptor = atomic.os.open(path, os.O_RDONLY)
            atomic.os.fsync(descriptor)
            os.close(descriptor)
            atomic.sync_folder(os.path.dirname(path))
        return total

    real, durable = directory.write_file, mutant != "no digests"
    if mutant == "no sync of files":
        monkeypatch.setattr(RecordingOs, "fsync", lambda self, fd: os.path.isdir(self._paths[fd]) and self._record("sync", self._paths[fd]))
    elif mutant == "no sync of folders":
        monkeypatch.setattr(atomic, "sync_folder", lambda folder: None)
    elif mutant == "no sync of new folders":
        monkeypatch.setattr(trust, "sync_folder", lambda folder: None)
    elif mutant == "sync after rename":
        monkeypatch.setattr(directory, "write_file", synced_late)
    else:
        monkeypatch.setattr("kvpack.store.entries.check_payload_digest", lambda *_: None)
        monkeypatch.setattr("kvpack.file.front.check_digest", lambda *_: None)
        monkeypatch.setattr("kvpack.file.container.check_digest", lambda *_: None)
    monkeypatch.setattr(sys.modules[__name__], "EVERY", 1)
    with pytest.raises((AssertionError, kvpack.KvpackError)):
        crashes(folder, monkeypatch, durable=durable)
