"""A request to a server covers many entries. These tests count round trips, and do not measure time."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

import kvpack
from kvpack.store import backend as backend_module
from kvpack.store import catalog as catalog_module
from kvpack.store import object_store
from kvpack.store import redis as redis_module
from kvpack.store.backend import PinTerms, StoredEntry
from kvpack.store.catalog import read_catalog, verify
from kvpack.store.counters import Counters
from kvpack.store.entry_kind import UNENCRYPTED
from kvpack.store.locations import open_backend
from kvpack.store.memory import MemoryBackend
from kvpack.store.object_store import MAX_CONCURRENT_REQUESTS, ObjectStore
from kvpack.store.options import LocationOptions
from kvpack.store.removal import reclaim, remove
from kvpack.store.summary import summarize
from kvpack.store.transfer import export_prefix
from support.redis_server import run_server
from support.store_caches import CHUNK, IDENTITY, cache, is_same_prefix, prompt, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvpack.store.backend import Backend

redis = pytest.importorskip("redis")

PAGES = 96
GEOMETRY = kvpack.pages.PageGeometry(layers=1, heads=1, tokens=16, dim_k=32, dim_v=32)
PAGE_IDENTITY = kvpack.Identity("engine", "kv=group:b=4,g=32", weights="w")
KEYS = [b"page %d" % number for number in range(PAGES)]


class Server:
    """A server and the number of ``requests`` from clients of this process. A pipeline counts as one request."""

    def __init__(self, url: str) -> None:
        self.url, self.requests = url, 0


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with run_server(tmp_path) as real:
        found = Server(real.url)
        send = redis.connection.AbstractConnection.send_packed_command

        def counted(connection: Any, *arguments: Any, **options: Any) -> Any:
            found.requests += 1
            return send(connection, *arguments, **options)

        monkeypatch.setattr(redis.connection.AbstractConnection, "send_packed_command", counted)
        yield found


def trips(server: Server, call: Callable[[], Any]) -> tuple[int, Any]:
    server.requests = 0
    result = call()
    return server.requests, result


def pages(count: int = PAGES) -> tuple[kvpack.pages.PageBuffer, torch.Tensor]:
    values = torch.randn(count, 2, 1, 1, 16, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    return kvpack.pages.PageBuffer(GEOMETRY, values[:, 0], values[:, 1]), values


@pytest.mark.parametrize("options", [{}, {"encryption": {"a": b"k" * 32}}], ids=["plain", "encrypted"])
def test_pages_take_as_many_round_trips_as_chunks(server: Server, options: dict[str, Any]) -> None:
    given, _ = pages()
    ids = prompt(PAGES)
    with kvpack.Store(server.url, IDENTITY, chunk=CHUNK, **options) as store:
        whole = cache(len(ids))
        assert store.save(ids, whole) == len(ids) // CHUNK * CHUNK
        match, found = trips(server, lambda: store.match(ids))
        assert found == PAGES * CHUNK
        # The first one also loads a script.
        store.load(ids)
        load, (n, _) = trips(server, lambda: store.load(ids))
        assert n == PAGES * CHUNK
    with kvpack.Store(server.url, IDENTITY, chunk=CHUNK, **options) as other:
        other.match(ids[:CHUNK])
        again, stored = trips(server, lambda: other.save(ids, whole))
        assert stored == PAGES * CHUNK
        # One for each 64 fronts, or 8 whole entries, besides what is there and what is used.
        assert again <= 2 + PAGES // (8 if options else 64) + 1
        assert other.counters()["saved_chunks"] == 0
    with kvpack.PageStore(server.url, PAGE_IDENTITY, GEOMETRY, **options) as engine:
        assert engine.contains(KEYS) == [False] * PAGES
        put, results = trips(server, lambda: engine.put(KEYS, given, range(PAGES)))
        assert results == [True] * PAGES
        # Asked once, and then 64 and 32 pages; the first put also loads the script.
        assert put <= 1 + 2 + 2
        for call, limit in (
            (lambda: engine.contains(KEYS), match),
            (lambda: engine.touch(KEYS), match),
            (lambda: engine.put(KEYS, given, range(PAGES)), 2 * match),
            (lambda: engine.get_into(KEYS, given, range(PAGES)), load),
        ):
            count, results = trips(server, call)
            assert count <= limit
            assert results is None or results == [True] * PAGES
        assert engine.counters()["faults"] == {}
    assert (match, load) == (1, 3)


def test_pages_in_separate_memory_are_one_request(server: Server) -> None:
    single = [pages(1) for _ in range(40)]
    given = [buffer for buffer, _ in single]
    with kvpack.PageStore(server.url, PAGE_IDENTITY, GEOMETRY) as engine:
        # The first one also loads scripts, and counts an empty server.
        assert engine.put([b"another"], given[:1], [0]) == [True]
        count, results = trips(server, lambda: engine.put(KEYS[:40], given, [0] * 40))
        assert (count, results) == (2, [True] * 40)
        for _, values in single:
            values.zero_()
        engine.touch(KEYS)
        count, results = trips(server, lambda: engine.get_into(KEYS[:40], given, [0] * 40))
        assert (count, results) == (2, [True] * 40)
        assert all(values.any() for _, values in single)
        with pytest.raises(kvpack.errors.InvalidParameter, match="39 page buffers were passed for 40 keys"):
            engine.put(KEYS[:40], given[1:], [0] * 40)


def test_the_bytes_of_a_request_are_limited(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    given, _ = pages()
    with kvpack.PageStore(server.url, PAGE_IDENTITY, GEOMETRY) as engine:
        monkeypatch.setattr("kvpack.store.page_store.BATCH_BYTES", 10 * engine.codec.nbytes)
        monkeypatch.setattr(redis_module, "_BYTES_AT_ONCE", 10 * engine.codec.nbytes)
        engine.put(KEYS[:1], given, [0])
        count, results = trips(server, lambda: engine.put(KEYS[1:], given, range(1, PAGES)))
        assert (count, results) == (1 + 11, [True] * (PAGES - 1))
        count, results = trips(server, lambda: engine.get_into(KEYS, given, range(PAGES)))
        assert results == [True] * PAGES
        # Nine pages at a time are read and noted, then all are noted, by a script that is loaded first.
        assert count <= 2 * 11 + 1 + 1
    assert backend_module.BATCH_BYTES == 64 * 2**20


def test_uses_of_a_long_chain_are_recorded_from_its_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_module, "_KEYS_AT_ONCE", 5)
    ids = prompt(17)
    with kvpack.Store(server.url, IDENTITY, chunk=CHUNK) as store:
        save(store, ids)
        store.load(ids)
        used = {entry.key: entry.used_ns for entry in store._backend.list()}
        times = [used[key] for key in store.keys(ids)]
        assert times == sorted(times, reverse=True)
        assert store.delete(ids) == 17


def test_uses_of_a_long_chain_are_recorded_once_and_in_parts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that records the use of a whole chain blocks all other clients. Recording it with every part of a put does, too."""
    monkeypatch.setattr(redis_module, "_KEYS_AT_ONCE", 20)
    monkeypatch.setattr("kvpack.store.page_store.BATCH_ENTRIES", 8)
    given, _ = pages()

    def calls(command: str) -> int:
        return int(client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))

    with redis.Redis.from_url(server.url) as client, kvpack.PageStore(server.url, PAGE_IDENTITY, GEOMETRY) as engine:
        first = PAGES // 2
        engine.put(KEYS[:first], given, range(first))
        client.config_resetstat()
        count, results = trips(server, lambda: engine.put(KEYS[first:], given, range(first, PAGES), ancestors=KEYS[:first]))
        assert results == [True] * (PAGES - first)
        # Presence of 20 pages at a time, the ancestors' use, and the parts of the put.
        assert count == -(-first // 20) + 1 + first // 8
        assert calls("evalsha") == 2 * -(-first // 20) + first // 8
        assert calls("zadd") <= first + 2 * (PAGES - first)
        used = {entry.key: entry.used_ns for entry in engine._backend.list()}
        times = [used[key] for key in engine._entry_keys(KEYS)]
        assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("ttl", [None, 8])
def test_the_use_of_a_chain_is_recorded_again_during_a_long_put(ttl: int | None, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the beginning of a chain whose put takes longer than ``ttl`` would expire before its end."""
    now = [100.0]
    monkeypatch.setattr(redis_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with kvpack.PageStore(server.url, PAGE_IDENTITY, GEOMETRY, ttl=ttl) as engine:
        backend: Any = engine._backend
        noted: list[int] = []
        real = backend._touch_calls
        monkeypatch.setattr(backend, "_touch_calls", lambda chain: [noted.append(len(chain)), *real(chain)][1:])
        step = (redis_module.NOTED_SECONDS if ttl is None else ttl / 8) * 0.4
        for first in range(0, 24, 4):
            backend.put_all(engine._entry_keys(KEYS[:24]), {first + at: [memoryview(bytes(100))] for at in range(4)}, 0)
            now[0] += step
    # The use of the entries before the thirteenth is noted, because the last note is old by then.
    assert [count for count in noted if count] == [12]


def test_an_entry_is_used_no_later_than_its_ancestors(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on whether any process has recently used the chain, or on missing entries."""
    given, _ = pages(12)
    with kvpack.PageStore(server.url, PAGE_IDENTITY, GEOMETRY) as engine, kvpack.PageStore(server.url, PAGE_IDENTITY, GEOMETRY) as other:
        engine.put(KEYS[:4], given, range(4))
        other.put(KEYS[4:6], given, range(4, 6), ancestors=KEYS[:4])
        engine.delete(KEYS[5:6])
        monkeypatch.setattr(redis_module, "NOTED_SECONDS", 0)
        engine.put(KEYS[6:8], given, range(6, 8), ancestors=KEYS[:6])
        monkeypatch.undo()
        engine.touch(KEYS[:8])
        other.put(KEYS[5:12], given, range(5, 12), ancestors=KEYS[:5])
        used = {entry.key: entry.used_ns for entry in engine._backend.list()}
        times = [used[key] for key in engine._entry_keys(KEYS[:12])]
        assert len(times) == len(set(times)) == 12
        assert times == sorted(times, reverse=True)


def test_many_objects_are_requested_concurrently(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many requests as permitted run concurrently: each one waits until that number has started."""
    obstore = pytest.importorskip("obstore")
    given, _ = pages(32)
    place = obstore.store.MemoryStore()
    with kvpack.PageStore(place, PAGE_IDENTITY, GEOMETRY) as engine:
        assert engine.put(KEYS[:32], given, range(32)) == [True] * 32
        backend: Any = engine._backend
        for name, call in (
            ("read_prefix", lambda: engine.contains(KEYS[:32])),
            ("read_beginning", lambda: engine.get_into(KEYS[:32], given, range(32))),
            ("read", lambda: [error is None for _, error in verify(backend)]),
        ):
            real = getattr(backend._objects, name)
            barrier = threading.Barrier(MAX_CONCURRENT_REQUESTS, timeout=60)

            def together(*arguments: Any, real: Any = real, barrier: Any = barrier) -> Any:
                barrier.wait()
                return real(*arguments)

            with monkeypatch.context() as patch:
                patch.setattr(backend._objects, name, together)
                assert call() == [True] * 32


@pytest.mark.parametrize("options", [{}, {"encryption": {"a": b"k" * 32}}, {"max_bytes": 10**8}], ids=["plain", "encrypted", "limited"])
def test_pages_take_as_many_requests_to_an_object_store_as_chunks(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    obstore = pytest.importorskip("obstore")
    sent: list[str] = []

    def counted(name: str, real: Callable[..., Any], *arguments: Any, **given: Any) -> Any:
        sent.append(name)
        return real(*arguments, **given)

    for name in ("get", "head", "put", "list", "delete"):
        monkeypatch.setattr(obstore, name, partial(counted, name, getattr(obstore, name)))

    def requests(call: Callable[[], Any]) -> tuple[list[str], Any]:
        sent.clear()
        result = call()
        return sorted(sent), result

    place, ids = obstore.store.MemoryStore(), prompt(PAGES)
    given, _ = pages()
    with kvpack.Store(place, IDENTITY, chunk=CHUNK, **options) as store:
        assert store.save(ids, cache(len(ids))) == PAGES * CHUNK
        match, _ = requests(lambda: store.match(ids))
        load, (n, _) = requests(lambda: store.load(ids))
        assert n == PAGES * CHUNK
    assert match == load == ["get"] * PAGES
    with kvpack.PageStore(place, PAGE_IDENTITY, GEOMETRY, **options) as engine:
        assert engine.put(KEYS, given, range(PAGES)) == [True] * PAGES
        for call in (
            lambda: engine.contains(KEYS),
            lambda: engine.get_into(KEYS, given, range(PAGES)),
            lambda: engine.put(KEYS, given, range(PAGES)),
        ):
            assert requests(call) == (match, [True] * PAGES)
        # Uses are recorded once a minute.
        assert requests(lambda: engine.touch(KEYS)) == ([], None)


def test_a_full_object_store_is_listed_once_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    obstore = pytest.importorskip("obstore")
    given, _ = pages(32)
    with kvpack.PageStore(obstore.store.MemoryStore(), PAGE_IDENTITY, GEOMETRY) as engine:
        size = engine.codec.nbytes
        backend: Any = engine._backend
        backend._max_bytes = 20 * size
        assert engine.put(KEYS[:20], given, range(20)) == [True] * 20
        backend.pin(engine._entry_keys(KEYS[:20]), PinTerms("test", 2**40))
        listed: list[int] = []
        real = ObjectStore._list_entries
        # Records of uses are merged by luck, which lists the entries too.
        monkeypatch.setattr(object_store, "randrange", lambda end: 1)
        monkeypatch.setattr(ObjectStore, "_list_entries", lambda self: (listed.append(1), real(self))[1])
        assert engine.put(KEYS[20:32], given, range(12)) == [False] * 12
        assert len(listed) == 1
        assert engine.counters()["refused_chunks"] == 12


@pytest.mark.parametrize("location", ["folder", "Redis"])
def test_missing_chunks_of_a_prefix_are_added(location: str, server: Server, tmp_path: Path) -> None:
    place = tmp_path / "folder" if location == "folder" else server.url
    ids = prompt(9)
    for options in ({}, {"encryption": {"a": b"k" * 32}}):
        with kvpack.Store(place, IDENTITY, chunk=CHUNK, **options) as store:
            whole = save(store, ids)
            keys = store.keys(ids)
            store._backend.delete([keys[0], keys[4], keys[5]])
            assert store.match(ids) == 0
            assert store.save(ids, whole) == 9 * CHUNK
            assert is_same_prefix(store.load(ids)[1], whole)
            assert store.counters()["saved_chunks"] == 12
            store.delete(ids)


def test_an_empty_put_sends_no_request() -> None:
    assert MemoryBackend(Counters(), max_bytes=10).put_all([b"k" * 32], {}, 0) == []


@pytest.mark.scenario
def test_listing_and_removing_request_many_entries_at_once(server: Server, tmp_path: Path) -> None:
    """Commands need as many requests for 200 entries as for 100, or one more page of names."""
    asked: list[dict[str, int]] = []
    for number in (1, 2):
        backend = open_backend(server.url, Counters(), UNENCRYPTED, LocationOptions())
        with kvpack.Store(server.url, IDENTITY, chunk=CHUNK) as store:
            for turn in range(10 * number):
                save(store, prompt(10, seed=turn))
        counts = {}
        counts["catalog"], catalog = trips(server, partial(read_catalog, backend))
        assert len(catalog.entries) == 100 * number
        counts["verify"], verdicts = trips(server, lambda backend=backend: [*verify(backend)])
        assert [error for _, error in verdicts] == [None] * 100 * number
        counts["export"], _ = trips(server, partial(export_prefix, backend, catalog.prefixes()[0], tmp_path / "exported.kvpack"))
        counts["summary"], summary = trips(server, partial(summarize, backend))
        assert summary.count == 100 * number
        counts["reclaim"], _ = trips(server, partial(reclaim, backend, Counters()))
        counts["remove"], removed = trips(server, partial(remove, backend, Counters(), catalog.entries, pinned=False))
        assert removed == 100 * number
        assert backend.size() == (0, 0)
        backend.close()
        asked.append(counts)
    assert all(more <= asked[0][name] + 2 for name, more in asked[1].items())
    assert max(asked[1].values()) <= 12


def test_requests_for_fronts_are_limited_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front of a page is the whole page. Entries that are too large, or empty, are not read."""
    monkeypatch.setattr(catalog_module, "_BYTES_AT_ONCE", 1000)
    parts: list[int] = []

    class Fronts:
        def peek_many(self, keys: Any, *, front: bool) -> Any:
            assert front
            parts.append(len(keys))
            return list(keys)

    listed = [StoredEntry(bytes([number]), size, 1) for number, size in enumerate([400, 400, 400, 0, 5000, 100, 999, 1001])]
    found = list(catalog_module.read_fronts(cast("Backend", Fronts()), listed, 4000))
    assert [stored.key for stored, _ in found] == [stored.key for stored in listed]
    assert [front is not None for _, front in found] == [size not in (0, 5000) for size in [400, 400, 400, 0, 5000, 100, 999, 1001]]
    assert parts == [2, 2, 1, 1]


def test_an_entry_that_changes_during_a_read_is_a_single_miss(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry's size was requested before it changed. The entries after it are still read."""
    ids = prompt(6)
    with kvpack.Store(server.url, IDENTITY, chunk=CHUNK) as store:
        save(store, ids)
        keys = store.keys(ids)
        backend = open_backend(server.url, Counters(), UNENCRYPTED, LocationOptions())
        whole = backend.peek_many(keys)
        real = redis_module.Redis._fetch

        def changed_before(self: Any, *arguments: Any) -> Any:
            with redis.Redis.from_url(server.url) as client:
                client.set(redis_module.ENTRY + keys[2], b"short")
                client.delete(redis_module.ENTRY + keys[4])
            return real(self, *arguments)

        monkeypatch.setattr(redis_module.Redis, "_fetch", changed_before)
        found = backend.peek_many([b"nothing" * 4, *keys])
        assert [data is None for data in found] == [True, False, False, True, False, True, False]
        assert [bytes(data) for data in found if data is not None] == [bytes(whole[at]) for at in (0, 1, 3, 5)]
        backend.close()
