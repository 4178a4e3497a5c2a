"""The prefix store on a real Redis server that is killed, paused and restarted while it is used."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack.formats.errors import InvalidParameter, KvpackWarning
from kvpack.store import breaker, redis_client
from kvpack.store import redis as redis_backend
from support.redis_server import Server, run_server
from support.state_caches import STATEFUL, chunk_ends, same_states, stateful
from support.store_caches import (
    CHUNK,
    IDENTITY,
    UNIFORM_IDENTITY,
    cache,
    check_death_and_return,
    check_hits_of_an_unsteady_server,
    is_same_prefix,
    prompt,
    save,
)
from support.store_stress import FORK

redis = pytest.importorskip("redis")

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with run_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    client(shared).flushall()
    return shared


def client(server: Server) -> Any:
    return redis.Redis.from_url(server.url)


def open_store(server: Server, identity: kvpack.Identity = UNIFORM_IDENTITY, **options: Any) -> kvpack.Store:
    return kvpack.Store(server.url, identity, **{"chunk": CHUNK, "timeout": 5, **options})


def entry_bytes(server: Server) -> int:
    store = open_store(server, dataclasses.replace(UNIFORM_IDENTITY, tenant="size"))
    save(store, prompt(3))
    (size,) = {len(client(server).get(name)) for name in client(server).keys("{kvpack}:entry:*")}
    client(server).flushall()
    return size


def test_states_and_windows_are_stored(server: Server) -> None:
    """States are found with one request, and evicted before the chunks that they follow."""
    whole = stateful(8 * CHUNK + 5, chunk_ends(2, 5, 7))
    ids = prompt(8)
    identity = dataclasses.replace(STATEFUL, windows=(None, 40))
    with open_store(server, identity) as store:
        assert store.save(ids, whole) == 7 * CHUNK
        size = store.stats()["bytes"]
    with open_store(server, identity) as store:
        for chunks, expected in ((8, 7), (6, 5), (3, 2), (1, 0)):
            tokens, found = store.load(ids[: chunks * CHUNK])
            assert tokens == store.match(ids[: chunks * CHUNK]) == expected * CHUNK
            if found is not None:
                assert same_states(found, tokens)
                assert found[1].skipped == max(0, expected - 2) * CHUNK
        assert store.counters()["faults"] == {}
    for _ in range(40):
        with open_store(server, identity, max_bytes=size) as store:
            store.collect()
            tokens, found = store.load(ids)
            assert found is None or same_states(found, tokens)
            size = store.stats()["bytes"] - 1
            if size < 0:
                break
    assert size == -1


@pytest.mark.parametrize("recipe", ["bf16", "octopus-3", "kivi-2"])
def test_saved_entries_are_loaded(recipe: str, server: Server) -> None:
    identity = dataclasses.replace(UNIFORM_IDENTITY, recipe=recipe)
    ids = prompt(4)
    with open_store(server, identity) as store:
        whole = save(store, ids)
        save(store, ids)
        assert store.counters()["saved_chunks"] == 4
    with open_store(server, identity) as other:
        n, found = other.load(ids)
        assert n == other.match(ids) == 4 * CHUNK
        assert is_same_prefix(found, whole)
        assert other.stats()["entries"] == 4
        names = client(server).keys("{kvpack}:entry:*")
        assert other.stats()["bytes"] == sum(len(client(server).get(name)) for name in names)
    assert open_store(server, dataclasses.replace(UNIFORM_IDENTITY, recipe=recipe, tenant="other")).match(ids) == 0


def test_the_budget_holds_and_leaves_are_evicted_first(server: Server) -> None:
    size = entry_bytes(server)
    store = open_store(server, max_bytes=8 * size)
    branches = [prompt(4, first=2, seed=seed) for seed in (1, 2)]
    for ids in branches:
        save(store, ids)
    store.load(branches[0])
    found = []
    for seed in range(8):
        save(store, prompt(1, seed=10 + seed))
        assert store.stats()["bytes"] <= 8 * size
        found.append([store.match(ids) // CHUNK for ids in branches])
    assert found == [[4, 4], [4, 4], [4, 3], [4, 2], [3, 2], [2, 2], [1, 1], [0, 0]]
    assert store.counters()["evicted_entries"] == 6
    long = prompt(12, seed=5)
    assert store.save(long, cache(len(long), UNIFORM_IDENTITY.recipe)) == store.match(long) == store.load(long)[0] == len(found) * CHUNK


def test_pins_are_respected_and_entries_that_cannot_fit_are_refused(server: Server) -> None:
    size = entry_bytes(server)
    store = open_store(server, max_bytes=3 * size)
    ids = prompt(2)
    save(store, ids)
    assert store.pin(ids) == 2 * CHUNK
    for seed in range(1, 5):
        save(store, prompt(1, seed=seed))
    assert store.load(ids)[0] == 2 * CHUNK
    other = prompt(2, seed=9)
    assert store.save(other, cache(len(other), UNIFORM_IDENTITY.recipe)) == CHUNK
    assert store.counters()["refused_chunks"] == 1
    assert store.unpin(ids)
    assert not store.unpin(ids)
    assert store.save(other, cache(len(other), UNIFORM_IDENTITY.recipe)) == 2 * CHUNK
    tiny = open_store(server, max_bytes=size - 1)
    assert tiny.save(prompt(1, seed=20), cache(CHUNK + 5, UNIFORM_IDENTITY.recipe)) == 0
    assert store.match(other) == 2 * CHUNK, "entries were evicted for one that can never fit"


def test_unused_entries_expire(server: Server) -> None:
    store = open_store(server, ttl=100)
    ids = prompt(2)
    save(store, ids)
    seconds = [client(server).ttl(name) for name in client(server).keys("{kvpack}:entry:*")]
    assert len(seconds) == 2
    assert all(90 < left <= 100 for left in seconds)
    for name in client(server).keys("{kvpack}:entry:*"):
        client(server).expire(name, 50)
    store.load(ids)
    assert all(90 < client(server).ttl(name) <= 100 for name in client(server).keys("{kvpack}:entry:*"))
    for name in client(server).keys("{kvpack}:entry:*"):
        client(server).expire(name, 0)
    assert store.load(ids) == (0, None)
    stats = store.stats()
    assert (stats["entries"], stats["bytes"], stats["vanished_entries"]) == (0, 0, 2)
    save(store, ids)
    for name in client(server).keys("{kvpack}:entry:*"):
        client(server).expire(name, 0)
    assert store.stats()["entries"] == 2, "lost entries were noticed without a lookup"
    store.collect()
    stats = store.stats()
    assert (stats["entries"], stats["bytes"], stats["vanished_entries"]) == (0, 0, 4)


@pytest.mark.parametrize(
    ("policy", "ttl", "warned"), [("allkeys-lru", None, True), ("volatile-ttl", 60, True), ("volatile-ttl", None, False)]
)
def test_a_server_with_its_own_eviction_is_named_and_lost_entries_are_counted(
    server: Server, policy: str, ttl: int | None, warned: bool
) -> None:
    redis_client = client(server)
    redis_client.config_set("maxmemory-policy", policy)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            store = open_store(server, ttl=ttl)
        assert [str(one.message) for one in told if policy in str(one.message)] == [str(one.message) for one in told]
        assert len(told) == warned
        if warned:
            assert told[0].category is KvpackWarning
            assert told[0].filename == __file__
    finally:
        redis_client.config_set("maxmemory-policy", "noeviction")
    ids = prompt(6)
    save(store, ids)
    # As a policy of the server does: entries go, and nobody is told.
    for key in store.keys(ids)[1:4]:
        redis_client.delete(b"{kvpack}:entry:" + key)
    assert store.match(ids) == CHUNK
    stats = store.stats()
    assert (stats["entries"], stats["vanished_entries"]) == (3, 3)
    assert stats["bytes"] == sum(redis_client.strlen(name) for name in redis_client.keys("{kvpack}:entry:*"))
    assert store.match(ids) == CHUNK
    assert store.counters()["vanished_entries"] == 3, "a lost entry was not counted exactly once"


def test_invalid_entries_are_not_fetched(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ids = open_store(server), prompt(3)
    whole = save(store, ids)
    name = b"{kvpack}:entry:" + store.keys(ids)[1]
    client(server).set(name, bytes(30 * 2**20))
    taken = [0]
    recv = redis_client._LimitedSocket.recv

    def counted(exchange: Any, *arguments: Any) -> bytes:
        data: bytes = recv(exchange, *arguments)
        taken[0] += len(data)
        return data

    monkeypatch.setattr(redis_client._LimitedSocket, "recv", counted)
    assert store.load(ids)[0] == CHUNK
    assert store.counters()["damaged_entries"] == 1
    assert taken[0] < 2**20
    assert store.save(ids, whole) == 3 * CHUNK
    assert is_same_prefix(store.load(ids)[1], whole)


def test_a_page_load_fetches_at_most_a_row(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit applies even to a value that begins like a row."""
    geometry = kvpack.pages.PageGeometry(layers=1, heads=1, tokens=16, dim_k=32, dim_v=32)
    values = torch.randn(4, 2, 1, 1, 16, 32).bfloat16()
    pages = kvpack.pages.PageBuffer(geometry, values[:, 0], values[:, 1])
    keys = [b"a", b"b", b"c", b"d"]
    with kvpack.PageStore(server.url, UNIFORM_IDENTITY, geometry, timeout=5) as store:
        assert store.put(keys, pages, range(4)) == [True] * 4
        client(server).append(b"{kvpack}:entry:" + store._entry_keys(keys)[2], bytes(30 * 2**20))
        taken = [0]
        recv = redis_client._LimitedSocket.recv

        def counted(exchange: Any, *arguments: Any) -> bytes:
            data: bytes = recv(exchange, *arguments)
            taken[0] += len(data)
            return data

        monkeypatch.setattr(redis_client._LimitedSocket, "recv", counted)
        assert store.get_into(keys, pages, range(4)) == [True, True, False, True]
        assert taken[0] < 2**20
        assert store.counters()["damaged_entries"] == 1
        assert store.put(keys, pages, range(4)) == [True] * 4
        assert store.get_into(keys, pages, range(4)) == [True] * 4


def test_a_large_entry_is_fetched_in_parts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_backend, "_BYTES_AT_ONCE", 1000)
    store, ids = open_store(server), prompt(3)
    whole = save(store, ids)
    assert is_same_prefix(store.load(ids)[1], whole)
    assert is_same_prefix(open_store(server).load(ids)[1], whole)


def test_delete_removes_the_tokens_after_a_position(server: Server) -> None:
    store = open_store(server)
    ids = prompt(4)
    save(store, ids)
    assert store.delete(ids, start=2 * CHUNK) == 2
    assert store.match(ids) == 2 * CHUNK
    assert store.delete(ids) == 2
    assert (store.stats()["entries"], store.stats()["bytes"]) == (0, 0)
    assert store.delete([]) == 0


def test_replies_invented_by_the_server_are_misses_and_entries_are_replaced(server: Server) -> None:
    store = open_store(server)
    ids = prompt(3)
    whole = save(store, ids)
    name = b"{kvpack}:entry:" + store.keys(ids)[1]
    good = client(server).get(name)
    for bad in (good[:-1], good + b"x", good[:6000] + b"\0\1\2" + good[6003:], b"x", client(server).get(name[:-32] + store.keys(ids)[0])):
        client(server).set(name, bad)
        n, found = store.load(ids)
        assert n == CHUNK
        assert is_same_prefix(found, whole)
        assert store.save(ids, whole) == 3 * CHUNK
    assert store.counters()["damaged_entries"] == 5
    client(server).delete(name)
    client(server).hset(name, "a", "b")
    assert store.load(ids)[0] == store.match(ids) == CHUNK, "the chunks before it were not found"
    assert set(store.counters()["faults"]) >= {"match ResponseError"}
    assert store.save(ids, whole) == 3 * CHUNK, "the invalid entry was not replaced"
    assert is_same_prefix(store.load(ids)[1], whole)


def test_a_server_may_restart(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    check_death_and_return(server, lambda: open_store(server), monkeypatch)


def test_a_hanging_server_costs_only_two_timeouts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(3)
    whole = save(open_store(server), ids)
    store = open_store(server, timeout=0.2)
    monkeypatch.setattr(breaker, "PAUSE_SECONDS", 3600)
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        for _ in range(50):
            assert store.load(ids) == (0, None)
        # Two waits of 0.2 s without an answer, then the server is left alone.
        assert store.counters()["faults"] == {"match CircuitOpen": 48, "match TimeoutError": 2}
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert is_same_prefix(open_store(server).load(ids)[1], whole)


def test_a_garbage_collected_store_closes_its_connections(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(redis.Redis, "__del__", lambda client: None)
    close = redis.Redis.close
    monkeypatch.setattr(redis.Redis, "close", lambda client: (closed.append(client), close(client)))
    store = open_store(server)
    save(store, prompt(2))
    store.itself = store
    del store
    gc.collect()
    assert len(closed) == 1


def _load_in_child(store: kvpack.Store, results: Any) -> None:
    # The parent's threads of torch are not in the fork.
    torch.set_num_threads(1)
    ids = prompt(2, seed=3)
    results.put((store.load(prompt(2))[0], store.save(ids, cache(len(ids), UNIFORM_IDENTITY.recipe)), store.load(ids)[0]))


def test_a_store_works_in_a_forked_process(server: Server) -> None:
    store = open_store(server)
    save(store, prompt(2))
    results = FORK.Queue()
    child = FORK.Process(target=_load_in_child, args=(store, results), daemon=True)
    child.start()
    assert results.get(timeout=600) == (2 * CHUNK,) * 3
    child.join()
    assert store.match(prompt(2, seed=3)) == 2 * CHUNK


@pytest.mark.scenario
def test_every_hit_is_correct_while_the_server_is_killed_paused_and_started(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "PAUSE_SECONDS", 0.02)
    size = entry_bytes(server)
    check_hits_of_an_unsteady_server(server, lambda: open_store(server, IDENTITY, max_bytes=10 * size, timeout=0.5), steps=6, seconds=0.3)


def test_invalid_options_are_refused(server: Server) -> None:
    with pytest.raises(InvalidParameter, match="a Redis server has no option durable"):
        open_store(server, durable=True)
    with pytest.raises(InvalidParameter, match="ttl is 0"):
        open_store(server, ttl=0)
    with pytest.raises(InvalidParameter, match="not the URL of a Redis server"):
        kvpack.Store("redis://host:port/", UNIFORM_IDENTITY)


def test_a_url_that_the_server_refuses_is_named_when_opening(server: Server) -> None:
    address = server.url.removeprefix("redis://").removesuffix("/0")
    for url, why in ((f"redis://nobody:wrong@{address}", "password"), (f"redis://{address}/99", "DB index is out of range")):
        with pytest.raises(InvalidParameter, match=f"refuses the user, the password or the database of .*: .*{why}.*; check the URL"):
            kvpack.Store(url, UNIFORM_IDENTITY)
    assert save(open_store(server), prompt(1)).tokens == CHUNK + 5
