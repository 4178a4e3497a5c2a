"""A Redis server whose names others change: a bad key hides no good one, and what is counted is counted again when it is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack.store import redis as redis_module
from kvpack.store.redis_scripts import ENTRY, PREFIX

from redis_server import Server, running  # isort: skip
from store_caches import CHUNK, IDENTITY, cache, prompt, same, save  # isort: skip

redis = pytest.importorskip("redis")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Harm = Callable[[Any], object]

USED, SIZES, BYTES, PINS = (PREFIX + name for name in (b"used", b"sizes", b"bytes", b"pins"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def client(shared: Server) -> Any:
    found = redis.Redis.from_url(shared.url)
    found.flushall()
    return found


def open_store(server: Server, **options: Any) -> kvpack.Store:
    return kvpack.Store(server.url, IDENTITY, **{"chunk": CHUNK, "timeout": 5, **options})


def stored_bytes(client: Any) -> tuple[int, int]:
    """Entries and their bytes, by the server's names."""
    sizes = [client.strlen(name) for name in client.scan_iter(match=ENTRY + b"*") if client.type(name) == b"string"]
    return len(sizes), sum(sizes)


HARMS: dict[str, Harm] = {
    "all is lost": lambda client: client.delete(USED, SIZES, BYTES),
    "the sum is lost": lambda client: client.delete(BYTES),
    "the sum is junk": lambda client: client.set(BYTES, "junk"),
    "the sum is negative": lambda client: client.set(BYTES, "-5"),
    "the sum is too large for a number": lambda client: client.set(BYTES, "9" * 40),
    "the sum is empty": lambda client: client.set(BYTES, ""),
    "the sum is nothing": lambda client: client.set(BYTES, "0"),
    "the sum is too small": lambda client: client.set(BYTES, "3000"),
    "the sum is too large": lambda client: client.set(BYTES, str(10**12)),
    "the sum is a list": lambda client: (client.delete(BYTES), client.lpush(BYTES, "x")),
    "the uses are lost": lambda client: client.delete(USED),
    "the uses are a string": lambda client: client.set(USED, "x"),
    "the uses are junk": lambda client: (client.delete(USED), client.zadd(USED, {"x": float("inf"), b"y" * 32: float("-inf")})),
    "the sizes are lost": lambda client: client.delete(SIZES),
    "the sizes are a string": lambda client: client.set(SIZES, "x"),
    "the sizes are junk": lambda client: [client.hset(SIZES, key, "junk") for key in client.hkeys(SIZES)],
    "the pins are a string": lambda client: client.set(PINS, "x"),
    "the pins are junk": lambda client: client.hset(PINS, "x", "y"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_the_budget_holds_whatever_becomes_of_the_count(harm: str, shared: Server, client: Any) -> None:
    save(open_store(shared), prompt(1, seed=99))
    size = stored_bytes(client)[1]
    client.flushall()
    save(open_store(shared, max_bytes=6 * size), prompt(4))
    HARMS[harm](client)
    store = open_store(shared, max_bytes=6 * size)
    stats = store.stats()
    assert isinstance(stats["entries"], int)
    assert isinstance(stats["bytes"], int)
    assert "kvpack_store_bytes" in store.prometheus()
    assert store.load(prompt(4))[0] == 4 * CHUNK
    for seed in range(1, 9):
        whole = save(store, prompt(1, seed=seed), seed=seed)
        assert same(store.load(prompt(1, seed=seed))[1], whole)
        assert stored_bytes(client)[1] <= 6 * size
    assert stored_bytes(client)[0] == 6, "the room is used"
    assert (store.stats()["entries"], store.stats()["bytes"]) == stored_bytes(client)


@pytest.mark.parametrize("harm", HARMS)
def test_a_collection_counts_afresh(harm: str, shared: Server, client: Any) -> None:
    store = open_store(shared)
    save(store, prompt(3))
    HARMS[harm](client)
    client.set(ENTRY + b"e" * 32, b"planted")
    client.set(ENTRY + b"not a key", b"planted")
    store.collect()
    assert store.counters()["faults"] == {}
    assert client.zcard(USED) == client.hlen(SIZES) == 4
    assert store.stats()["bytes"] == int(client.get(BYTES)) == stored_bytes(client)[1] - len(b"planted")
    assert [entry.used_ns >= 0 for entry in store._backend.list()] == [True] * 4


def test_a_key_of_another_type_is_a_miss_of_its_own(shared: Server, client: Any) -> None:
    store, ids = open_store(shared), prompt(4)
    whole = save(store, ids)
    for make in (
        lambda name: client.hset(name, "a", "b"),
        lambda name: client.lpush(name, "a"),
        lambda name: client.zadd(name, {"a": 1}),
        lambda name: client.set(name, b""),
        lambda name: client.set(name, bytes(100)),
    ):
        name = ENTRY + store.keys(ids)[2]
        client.delete(name)
        make(name)
        assert store.match(ids) == 2 * CHUNK
        n, found = store.load(ids)
        assert n == 2 * CHUNK
        assert same(found, whole)
        assert {entry.key for entry in store._backend.list()} >= set(store.keys(ids)[:2])
        assert store.save(ids, whole) == 4 * CHUNK, "it gives way to a good one"
        assert same(store.load(ids)[1], whole)
    assert store.counters()["faults"].keys() <= {"match ResponseError", "list ResponseError", "load NotKvpack"}


def test_an_entry_of_another_key_stays(shared: Server, client: Any) -> None:
    pytest.importorskip("cryptography")
    ids = prompt(2)
    theirs = open_store(shared, encryption={"theirs": bytes(32)})
    whole = save(theirs, ids)
    for ours in (open_store(shared, encryption={"ours": bytes(range(32))}), open_store(shared)):
        assert ours.load(ids) == (0, None)
        assert ours.save(ids, whole) == ours.match(ids) == 0
        assert ours.counters()["refused_chunks"] == 2
    assert same(theirs.load(ids)[1], whole)
    plain = open_store(shared)
    other = prompt(2, seed=3)
    save(plain, other)
    assert theirs.load(other) == (0, None)
    assert theirs.save(other, cache(len(other), seed=0)) == 2 * CHUNK, "what is not encrypted is none"
    assert theirs.load(other)[0] == 2 * CHUNK


def test_nothing_larger_than_an_entry_is_fetched(shared: Server, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ids = open_store(shared, max_entry_bytes=100_000), prompt(3)
    whole = save(store, ids)
    name = ENTRY + store.keys(ids)[1]
    client.setrange(name, 10**6, b"x")
    assert store.load(ids)[0] == store.match(ids) == CHUNK
    assert store.counters()["faults"] == {"get LimitExceeded": 1}
    assert store._backend.peek(store.keys(ids)[1]) is None
    assert store.save(ids, whole) == 3 * CHUNK
    assert same(store.load(ids)[1], whole)
    # One that grows between the question and the answer: no more is asked for than was said.
    real = redis_module.Redis._fetched

    def grown(self: Any, keys: Any, sizes: Any) -> Any:
        client.append(name, bytes(10**6))
        return real(self, keys, sizes)

    with monkeypatch.context() as patch:
        patch.setattr(redis_module.Redis, "_fetched", grown)
        assert store.load(ids)[0] == 3 * CHUNK, "the bytes that were said are the good ones"


def test_a_put_that_the_server_refuses_is_not_counted(shared: Server, client: Any) -> None:
    store, ids = open_store(shared), prompt(2)
    save(store, ids)
    before = client.zcard(USED), client.hlen(SIZES), client.get(BYTES)
    client.config_set("maxmemory", 1)
    try:
        more = prompt(2, seed=2)
        assert store.save(more, cache(len(more))) == 0
    finally:
        client.config_set("maxmemory", 0)
    assert (client.zcard(USED), client.hlen(SIZES), client.get(BYTES)) == before
    assert store.load(ids)[0] == 2 * CHUNK


def test_a_server_of_many_names_is_counted_in_turns(shared: Server, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_module, "SCAN_SECONDS", 0.0)
    monkeypatch.setattr(redis_module, "_NAMES_AT_ONCE", 10)
    store, ids = open_store(shared, max_bytes=10**6), prompt(2)
    client.mset({f"somebody's {number}": "x" for number in range(100)})
    whole = cache(len(ids))
    tries = 0
    while store.save(ids, whole) == 0:
        tries += 1
        assert tries < 50
    assert tries > 2, "each looks through a part"
    assert store.save(ids, whole) == 2 * CHUNK
    assert store.counters()["faults"] == {"count TimeoutError": tries}
    client.delete(BYTES)
    store.collect()
    assert store.stats()["entries"] == int(client.zcard(USED)) == 2


def test_two_writers_count_at_once(shared: Server, client: Any) -> None:
    """Both count a server anew between each other's puts; the sum is right in the end."""
    stores = [open_store(shared, max_bytes=10**6) for _ in range(2)]
    for seed in range(6):
        if seed % 2:
            client.delete(BYTES)
        save(stores[seed % 2], prompt(2, seed=seed))
    assert int(client.get(BYTES)) == stored_bytes(client)[1]
    assert stored_bytes(client)[0] == client.zcard(USED) == 12


def test_an_entry_that_nobody_counted_is_counted_when_it_is_met(shared: Server, client: Any) -> None:
    store, ids = open_store(shared), prompt(2)
    whole = save(store, ids)
    key = store.keys(ids)[0]
    client.zrem(USED, key)
    client.hdel(SIZES, key)
    client.decrby(BYTES, client.strlen(ENTRY + key))
    store._backend.present = lambda keys: 0
    assert store.save(ids, whole) == 2 * CHUNK
    assert (client.zcard(USED), client.hlen(SIZES)) == (2, 2)
    assert int(client.get(BYTES)) == stored_bytes(client)[1]
