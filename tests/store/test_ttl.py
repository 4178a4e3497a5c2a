"""Entries that are unused for their ``ttl`` expire in folders, object stores and Redis. Those of stores without one do not."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvpack
from kvpack.cli import main
from kvpack.store import expiry, last_used, object_store
from support import redis_server
from support.store_caches import CHUNK, IDENTITY, entries, open_store, prompt, save

IDS = prompt(3)
OTHER = replace(IDENTITY, tenant="another")


def pass_by(folder: Path, seconds: int) -> None:
    """Set the last use of every entry ``seconds`` seconds back."""
    for path in entries(folder):
        status = os.stat(path)
        os.utime(path, ns=(status.st_atime_ns - seconds * 10**9, status.st_mtime_ns - seconds * 10**9))


def test_an_unused_entry_of_a_folder_expires(tmp_path: Path) -> None:
    store = open_store(tmp_path, ttl=100)
    save(store, IDS)
    pass_by(tmp_path, 90)
    assert store.load(IDS)[0] == 3 * CHUNK
    pass_by(tmp_path, 90)
    assert store.match(IDS) == 3 * CHUNK
    pass_by(tmp_path, 20)
    assert store.match(IDS) == 0
    assert store.load(IDS) == (0, None)
    # A store without ttl does not find it either, for it has an end.
    assert open_store(tmp_path).match(IDS) == 0
    assert len(entries(tmp_path)) == 3
    store.collect()
    assert entries(tmp_path) == []
    assert store.counters()["expired_entries"] == 3
    assert store.counters()["faults"] == {}


def test_expired_entries_can_be_saved_again(tmp_path: Path) -> None:
    store = open_store(tmp_path, ttl=100)
    whole = save(store, IDS)
    pass_by(tmp_path, 110)
    assert store.save(IDS, whole) == 3 * CHUNK
    assert store.match(IDS) == 3 * CHUNK
    pass_by(tmp_path, 90)
    assert store.match(IDS) == 3 * CHUNK


def test_entries_of_stores_without_ttl_are_kept(tmp_path: Path) -> None:
    other, store = open_store(tmp_path, OTHER), open_store(tmp_path, ttl=100)
    save(other, IDS)
    # Whoever reads an entry changes its access time, on most file systems.
    for path in entries(tmp_path):
        Path(path).read_bytes()
    save(store, IDS)
    pass_by(tmp_path, 10**6)
    store.collect()
    assert other.match(IDS) == 3 * CHUNK
    assert len(entries(tmp_path)) == 3
    # The last user decides.
    save(store, IDS)
    open_store(tmp_path).load(IDS)
    pass_by(tmp_path, 10**6)
    assert store.match(IDS) == 3 * CHUNK


def test_puts_remove_expired_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "_STEP_SECONDS", 60.0)
    store = open_store(tmp_path, ttl=100)
    save(store, IDS)
    pass_by(tmp_path, 110)
    # Not each of them: there is time between two passes.
    save(store, prompt(1, seed=1))
    assert len(entries(tmp_path)) == 4
    again = open_store(tmp_path, ttl=100)
    assert len(entries(tmp_path)) == 1
    assert again.counters()["expired_entries"] == 3
    # Who only looks removes nothing.
    pass_by(tmp_path, 110)
    assert main(["store", "ls", str(tmp_path)]) == 0
    assert len(entries(tmp_path)) == 1
    assert main(["store", "gc", str(tmp_path)]) == 0
    assert entries(tmp_path) == []


def test_an_expiry_pass_continues_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "_STEP_SECONDS", -1.0)
    store = open_store(tmp_path, ttl=100)
    looked: list[int] = []
    steps = store._backend._expiry
    monkeypatch.setattr(steps, "_remove_expired_in", looked.append)
    for budget in (-1.0, 60.0):
        monkeypatch.setattr(expiry, "_STEP_SECONDS", budget)
        steps._due = 0.0
        steps.step()
    assert looked == list(range(256))
    steps.step()
    assert len(looked) == 256


def test_pinned_entries_do_not_expire(tmp_path: Path) -> None:
    store = open_store(tmp_path, ttl=100)
    save(store, IDS)
    assert store.pin(IDS[: 2 * CHUNK]) == 2 * CHUNK
    pass_by(tmp_path, 110)
    store.collect()
    assert store.load(IDS)[0] == 2 * CHUNK
    assert store.unpin(IDS)
    pass_by(tmp_path, 110)
    assert store.match(IDS) == 0


def test_a_tier_may_have_its_own_ttl(tmp_path: Path) -> None:
    tiers = [kvpack.Tier(tmp_path / "first", ttl=100), kvpack.Tier(tmp_path / "second")]
    with kvpack.Store(tiers, IDENTITY, chunk=CHUNK) as store:
        save(store, IDS)
        for name in ("first", "second"):
            pass_by(tmp_path / name, 110)
        store.collect()
        assert [len(entries(tmp_path / name)) for name in ("first", "second")] == [0, 3]
        assert store.load(IDS)[0] == 3 * CHUNK


class Objects:
    """An in-memory object store with a clock that tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.location = pytest.importorskip("obstore").store.MemoryStore()
        self.seconds, real = 0, time.time_ns
        self.time_ns = lambda: real() + self.seconds * 10**9
        self.monotonic = lambda: time.monotonic() + self.seconds
        monkeypatch.setattr(object_store, "time", self)

    def open(self, identity: kvpack.Identity = IDENTITY, **options: Any) -> kvpack.Store:
        return kvpack.Store(self.location, identity, chunk=CHUNK, **options)


def test_an_unused_entry_of_an_object_store_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = Objects(monkeypatch)
    store, other = objects.open(ttl=100), objects.open(OTHER)
    whole = save(store, IDS)
    save(other, IDS)
    other.close()
    objects.seconds = 90
    assert store.match(IDS) == 3 * CHUNK
    objects.seconds = 120
    assert store.match(IDS) == 0
    assert store.load(IDS) == (0, None)
    assert store.stats()["entries"] == 6
    # It can be saved again before it is removed.
    assert store.save(IDS, whole) == 3 * CHUNK
    assert store.match(IDS) == 3 * CHUNK
    objects.seconds = 10**6
    store.collect()
    assert store.stats()["entries"] == 3
    assert store.counters()["expired_entries"] == 3
    assert other.match(IDS) == 3 * CHUNK
    assert store.counters()["faults"] == other.counters()["faults"] == {}


def test_pinned_entries_of_an_object_store_do_not_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = Objects(monkeypatch)
    store = objects.open(ttl=100)
    save(store, IDS)
    assert store.pin(IDS[:CHUNK]) == CHUNK
    objects.seconds = 120
    store.collect()
    assert objects.open(ttl=100).match(IDS) == CHUNK


def test_puts_to_an_object_store_remove_expired_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = Objects(monkeypatch)
    store = objects.open(ttl=100)
    save(store, IDS)
    objects.seconds = 120
    save(store, prompt(1, seed=1))
    assert store.stats()["entries"] == 1


def test_merged_records_keep_times_and_ends() -> None:
    now, keys = 10**18, [bytes([number]) * 32 for number in range(6)]
    ages = [10**7, 10**6, 10**6 - 5, 100, 30, 0]
    aged = enumerate(zip(keys, ages, strict=True))
    last = {key: last_used.LastUse(now - age * 10**9, 60 if number % 2 else None) for number, (key, age) in aged}
    records = last_used.merge_records(last, now)
    assert all(name.endswith("-merged") for name in records)
    # Put now, by the store's clock; those of about one age and of one ttl are together.
    found = last_used.parse_last_uses([(now, f"uses/{name}", record) for name, record in records.items()])
    assert len(records) < len(keys) + 1
    assert [*found] == keys
    for key, use in found.items():
        assert use.ttl == last[key].ttl
        assert 0 <= use.used_ns - last[key].used_ns <= (now - last[key].used_ns) // 4
    # A time to come is that of a clock that was wrong.
    (name,) = last_used.merge_records({keys[0]: last_used.LastUse(now + 10**15, None)}, now)
    assert last_used.parse_last_uses([(now, name, keys[0])])[keys[0]].used_ns == now


@pytest.mark.parametrize("name", ["x", "1-ttl5", f"{1:020d}-{'0' * 16}-ttl99999999999", f"{1:020d}-{'0' * 16}-merged-ttl5"])
def test_records_without_an_end_are_recognized_by_name(name: str) -> None:
    assert last_used.parse_last_uses([(5, f"uses/{name}", bytes(32))]) == {bytes(32): last_used.LastUse(5, None)}


def test_pinned_entries_on_redis_do_not_expire(tmp_path: Path) -> None:
    redis = pytest.importorskip("redis")
    with redis_server.run_server(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        store = kvpack.Store(server.url, IDENTITY, chunk=CHUNK, timeout=5, ttl=100)
        whole = save(store, IDS)

        def left() -> list[int]:
            return [client.ttl(b"{kvpack}:entry:" + key) for key in store.keys(IDS)]

        assert store.pin(IDS[: 2 * CHUNK], seconds=5000) == 2 * CHUNK
        for use in (lambda: None, lambda: store.load(IDS), lambda: store.save(IDS, whole)):
            use()
            first, second, third = left()
            assert min(first, second) > 4000
            assert third <= 100
        assert store.unpin(IDS)
        store.load(IDS)
        assert all(90 < seconds <= 100 for seconds in left())
        # The last user decides.
        kvpack.Store(server.url, IDENTITY, chunk=CHUNK, timeout=5).load(IDS)
        assert left() == [-1, -1, -1]
        assert store.counters()["faults"] == {}


def test_seconds_beyond_the_range_of_a_server_do_not_expire(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    with redis_server.run_server(tmp_path) as server:
        store = open_store(server.url, ttl=2**63)
        save(store, IDS)
        assert store.load(IDS)[0] == 3 * CHUNK
        assert store.counters()["faults"] == {}
