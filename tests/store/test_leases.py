"""Cold prefixes are computed once: a second worker waits for the first, but only for a limited time if the first is dead.

With a lease of None, no worker waits.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack.formats.errors import InvalidParameter
from kvpack.store.backend import NoLease
from support.redis_server import run_server as redis_running
from support.s3_server import run_server as s3_running
from support.store_caches import CHUNK, IDENTITY, cache, is_same_prefix, prompt, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONGEST = cache(CHUNK * 5 + 5)


@pytest.fixture(params=["folder", "Redis", "object store", "S3", "tiers"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., kvpack.Store]]:
    """Return a function that opens a store, for one location of each kind."""

    def at(place: Any, **fixed: Any) -> Callable[..., kvpack.Store]:
        return lambda **options: kvpack.Store(place, IDENTITY, **{"chunk": CHUNK, **fixed, **options})

    match request.param:
        case "folder":
            yield at(tmp_path / "store")
        case "Redis":
            pytest.importorskip("redis")
            with redis_running(tmp_path) as server:
                yield at(server.url, timeout=5)
        case "object store":
            yield at(pytest.importorskip("obstore").store.MemoryStore())
        case "S3":
            pytest.importorskip("obstore")
            with s3_running() as server:
                yield at(server.url, storage_options=server.options)
        case _:
            yield at([kvpack.Tier("memory://", max_bytes=10**7), tmp_path / "slow"])


def when_refused(store: kvpack.Store, then: Callable[[], object]) -> None:
    """Call ``then`` whenever another holder has the lease that ``store`` requests."""
    take = store._backend.take_lease

    def tell(key: bytes, seconds: float) -> Any:
        lease = take(key, seconds)
        if lease is None:
            then()
        return lease

    store._backend.take_lease = tell  # type: ignore[method-assign]


def worker(
    store: kvpack.Store,
    ids: list[int],
    whole: kvpack.Cache,
    computed: list[int],
    loaded: Callable[[], object],
    compute: Callable[[], object],
) -> kvpack.Cache:
    """Process a prompt as a server does and return its cache."""
    n, found = store.load(ids)
    loaded()
    if n < len(ids) // CHUNK * CHUNK:
        compute()
        computed.append(n)
        store.save(ids, whole)
        return whole
    assert found is not None
    return found


def two_workers(opened: Callable[..., kvpack.Store], lease: float | None, ids: list[int]) -> tuple[list[int], list[kvpack.Store]]:
    """Run two workers of which the first computes until the second waits for it or computes too."""
    # Prompts share their first chunks, and so their values.
    whole, computed = LONGEST[:, : len(ids)], []
    stores = [opened(lease=lease) for _ in range(2)]
    begun, asked = threading.Event(), threading.Event()
    when_refused(stores[1], asked.set)
    first = threading.Thread(target=worker, args=(stores[0], ids, whole, computed, begun.set, lambda: asked.wait(60)))
    first.start()
    assert begun.wait(60)
    found = worker(stores[1], ids, whole, computed, asked.set, lambda: None)
    first.join()
    assert is_same_prefix(found, whole)
    return computed, stores


def test_the_second_process_waits_for_the_first(opened: Callable[..., kvpack.Store]) -> None:
    computed, stores = two_workers(opened, 30.0, prompt(3))
    assert computed == [0]
    assert [store.counters()["lease_waits"] for store in stores] == [0, 1]
    assert all(store.counters()["faults"] == {} for store in stores)
    # The rest of a longer prompt has a lease of its own.
    computed, stores = two_workers(opened, 30.0, prompt(5))
    assert computed == [3 * CHUNK]


def test_a_miss_without_a_lease_waits_for_nobody(opened: Callable[..., kvpack.Store]) -> None:
    computed, stores = two_workers(opened, None, prompt(3))
    assert computed == [0, 0]
    assert [store.counters()["lease_waits"] for store in stores] == [0, 0]


def test_a_process_that_never_saves_delays_others_only_by_the_lease(opened: Callable[..., kvpack.Store]) -> None:
    ids = prompt(3)
    idle, other = opened(lease=2.0), opened(lease=2.0)
    taken = time.monotonic()
    assert idle.load(ids) == (0, None)
    # It may ask again itself.
    assert idle.load(ids) == (0, None)
    assert idle.counters()["lease_waits"] == 0
    begun = time.monotonic()
    assert other.load(ids) == (0, None)
    # An object store counts whole seconds.
    assert time.monotonic() - taken > 0.9
    # On a busy machine the lease may have ended before.
    assert other.counters()["lease_waits"] == 1 or begun - taken > 0.9
    whole = save(other, ids)
    assert is_same_prefix(idle.load(ids)[1], whole)


def test_a_closed_store_delays_nobody(opened: Callable[..., kvpack.Store]) -> None:
    ids = prompt(2)
    with opened(lease=60.0) as idle:
        assert idle.load(ids) == (0, None)
        assert idle.load(prompt(2, seed=1)) == (0, None)
    begun = time.monotonic()
    with opened(lease=60.0) as other:
        assert other.load(ids) == (0, None)
        assert other.load(prompt(2, seed=1)) == (0, None)
    assert time.monotonic() - begun < 30


def _hold(place: Path, ids: list[int], ready: Any) -> None:
    torch.set_num_threads(1)
    store = kvpack.Store(place, IDENTITY, chunk=CHUNK, lease=600.0)
    ready.put(store.load(ids)[0])
    time.sleep(600)


def test_a_dead_process_releases_its_folder_lease_at_once(tmp_path: Path) -> None:
    ids = prompt(2)
    context = multiprocessing.get_context("fork")
    ready = context.Queue()
    child = context.Process(target=_hold, args=(tmp_path / "store", ids, ready), daemon=True)
    child.start()
    assert ready.get(timeout=60) == 0
    store = kvpack.Store(tmp_path / "store", IDENTITY, chunk=CHUNK, lease=600.0)
    when_refused(store, lambda: os.kill(child.pid, signal.SIGKILL))
    assert store.load(ids) == (0, None)
    assert store.counters()["lease_waits"] == 1
    whole = save(store, ids)
    assert is_same_prefix(store.load(ids)[1], whole)
    child.join()
    assert [*(tmp_path / "store" / "unfinished").iterdir()] == []


def test_leases_of_others_are_left_alone(tmp_path: Path) -> None:
    """A worker releases its lease after it has expired and another worker holds it."""
    pytest.importorskip("redis")
    with redis_running(tmp_path) as server:
        stores = [kvpack.Store(server.url, IDENTITY, chunk=CHUNK, timeout=5) for _ in range(2)]
        key = b"k" * 32
        late = stores[0]._backend.take_lease(key, 0.05)
        time.sleep(0.1)
        held = stores[1]._backend.take_lease(key, 60.0)
        assert late is not None
        assert held is not None
        late.release()
        assert stores[0]._backend.take_lease(key, 60.0) is None
        held.release()
        assert stores[0]._backend.take_lease(key, 60.0) is not None


def test_no_fault_makes_anyone_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")
    dead = kvpack.Store("redis://127.0.0.1:1", IDENTITY, chunk=CHUNK, lease=600.0)
    assert dead.load(prompt(1)) == (0, None)
    assert type(dead._backend.take_lease(b"k" * 32, 1.0)) is NoLease
    folder = kvpack.Store(tmp_path, IDENTITY, chunk=CHUNK, lease=600.0)
    monkeypatch.setattr("kvpack.store.directory.take_file_lease", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    assert folder.load(prompt(1)) == (0, None)
    assert folder.counters()["faults"] == {"lease ENOSPC": 1}


@pytest.mark.parametrize("lease", [0, -1.0, float("nan"), float("inf"), True, "5"])
def test_invalid_times_are_refused(lease: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"lease is .*, expected a number of seconds above 0 and at most 1,000,000,000, or None not"):
        kvpack.Store(tmp_path, IDENTITY, chunk=CHUNK, lease=lease)
