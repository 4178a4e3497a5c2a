"""A Redis server whose keys other programs change: a bad key hides no good one, and lost counts are counted again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack.store import redis as redis_module
from kvpack.store import redis_client, redis_count
from kvpack.store.backend import PinTerms
from kvpack.store.redis_scripts import ENTRY, PREFIX
from support.redis_server import Server, run_server
from support.store_caches import CHUNK, UNIFORM_IDENTITY, cache, is_same_prefix, prompt, save

redis = pytest.importorskip("redis")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Harm = Callable[[Any], object]

USED, SIZES, BYTES, PINS = (PREFIX + name for name in (b"used", b"sizes", b"bytes", b"pins"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with run_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def client(shared: Server) -> Any:
    found = redis.Redis.from_url(shared.url)
    found.flushall()
    return found


def open_store(server: Server, **options: Any) -> kvpack.Store:
    return kvpack.Store(server.url, UNIFORM_IDENTITY, **{"chunk": CHUNK, "timeout": 5, **options})


def stored_bytes(client: Any) -> tuple[int, int]:
    """Return the number of entries and their total bytes, computed from the server's keys."""
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


@pytest.mark.scenario
@pytest.mark.parametrize("harm", HARMS)
def test_the_budget_holds_whatever_happens_to_the_count(harm: str, shared: Server, client: Any) -> None:
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
        assert is_same_prefix(store.load(prompt(1, seed=seed))[1], whole)
        assert stored_bytes(client)[1] <= 6 * size
    assert stored_bytes(client)[0] == 6, "the budget was not used up"
    assert (store.stats()["entries"], store.stats()["bytes"]) == stored_bytes(client)


@pytest.mark.parametrize("harm", HARMS)
def test_gc_recomputes_the_count(harm: str, shared: Server, client: Any) -> None:
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


def test_a_key_of_another_redis_type_is_a_single_miss(shared: Server, client: Any) -> None:
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
        assert is_same_prefix(found, whole)
        assert {entry.key for entry in store._backend.list()} >= set(store.keys(ids)[:2])
        assert store.save(ids, whole) == 4 * CHUNK, "the invalid entry was not replaced"
        assert is_same_prefix(store.load(ids)[1], whole)
    assert store.counters()["faults"].keys() <= {"match ResponseError", "list ResponseError", "load NotKvpack"}


def test_an_entry_under_another_key_is_kept(shared: Server, client: Any) -> None:
    pytest.importorskip("cryptography")
    ids = prompt(2)
    theirs = open_store(shared, encryption={"theirs": bytes(32)})
    whole = save(theirs, ids)
    for ours in (open_store(shared, encryption={"ours": bytes(range(32))}), open_store(shared)):
        assert ours.load(ids) == (0, None)
        assert ours.save(ids, whole) == ours.match(ids) == 0
        assert ours.counters()["refused_chunks"] == 2
    assert is_same_prefix(theirs.load(ids)[1], whole)
    plain = open_store(shared)
    other = prompt(2, seed=3)
    save(plain, other)
    assert theirs.load(other) == (0, None)
    assert theirs.save(other, cache(len(other), UNIFORM_IDENTITY.recipe)) == 2 * CHUNK, "unencrypted entries were not replaced"
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
    assert is_same_prefix(store.load(ids)[1], whole)
    # One that grows between the question and the answer: no more is asked for than was said.
    real = redis_module.Redis._fetch

    def grown(self: Any, keys: Any, sizes: Any) -> Any:
        client.append(name, bytes(10**6))
        return real(self, keys, sizes)

    with monkeypatch.context() as patch:
        patch.setattr(redis_module.Redis, "_fetch", grown)
        assert store.load(ids)[0] == 3 * CHUNK, "the entry with the announced bytes was not loaded"


def test_a_refused_put_is_not_counted(shared: Server, client: Any) -> None:
    store, ids = open_store(shared), prompt(2)
    save(store, ids)
    before = client.zcard(USED), client.hlen(SIZES), client.get(BYTES)
    client.config_set("maxmemory", 1)
    try:
        more = prompt(2, seed=2)
        assert store.save(more, cache(len(more), UNIFORM_IDENTITY.recipe)) == 0
    finally:
        client.config_set("maxmemory", 0)
    assert (client.zcard(USED), client.hlen(SIZES), client.get(BYTES)) == before
    assert store.load(ids)[0] == 2 * CHUNK


def count_slowly(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make counting so slow that many puts happen meanwhile."""
    monkeypatch.setattr(redis_count, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(redis_count, "TIME_SHARE", 1)
    monkeypatch.setattr(redis_count, "NAMES_AT_ONCE", 10)
    client.mset({f"somebody's {number}": "x" for number in range(200)})


def test_a_server_with_many_keys_is_counted_in_steps(shared: Server, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile, entries are stored if the server's memory statistics show that there is room."""
    count_slowly(client, monkeypatch)
    store = open_store(shared, max_bytes=10**10)
    for seed in range(50):
        save(store, prompt(2, seed=seed), seed=seed)
        if store._backend._count.is_known:
            break
    assert 2 < seed < 49
    assert store.counters()["evicted_entries"] == 0
    assert store.counters()["faults"] == {}
    assert int(client.get(BYTES)) == stored_bytes(client)[1]
    assert client.zcard(USED) == client.hlen(SIZES) == stored_bytes(client)[0] == 2 * (seed + 1)


def test_a_put_in_several_requests_is_counted_once(shared: Server, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    count_slowly(client, monkeypatch)
    monkeypatch.setattr(redis_count, "TIME_SHARE", 1e-6)
    store = open_store(shared, max_bytes=10**10)
    save(store, prompt(1))
    asked: list[str] = []
    real = redis_client.RedisClient.call

    def listed(self: Any, script: str, *arguments: Any, **options: Any) -> Any:
        asked.append(script)
        return real(self, script, *arguments, **options)

    monkeypatch.setattr(redis_client.RedisClient, "call", listed)
    for seed in range(1, 9):
        save(store, prompt(1, seed=seed), seed=seed)
    assert asked == [], "the count was repeated too soon"
    assert not store._backend._count.is_known
    store.collect()
    assert store._backend._count.is_known
    assert int(client.get(BYTES)) == stored_bytes(client)[1]


@pytest.mark.parametrize("harm", ["all is lost", "the sum is lost", "the uses are lost", "the sizes are lost", "the sum is junk"])
def test_entries_are_accessible_during_counting(harm: str, shared: Server, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget holds without a known sum, no put waits for it, and no pinned entry is evicted."""
    save(open_store(shared), prompt(1, seed=99))
    size = stored_bytes(client)[1]
    client.flushall()
    most = 20 * size
    store = open_store(shared, max_bytes=most)
    for seed in range(20):
        save(store, prompt(1, seed=seed), seed=seed)
    assert store.pin(prompt(1, seed=0))
    store.load(prompt(1, seed=1))
    count_slowly(client, monkeypatch)
    HARMS[harm](client)
    stored = 0
    for seed in range(100, 300):
        ids = prompt(1, seed=seed)
        stored += store.save(ids, cache(len(ids), UNIFORM_IDENTITY.recipe)) > 0
        assert stored_bytes(client)[1] <= most
        assert store.match(prompt(1, seed=0)) == CHUNK
        if store._backend._count.is_known:
            break
    puts = seed - 99
    assert puts < 199
    assert store.counters()["faults"] == {}
    # Without the uses, it is unknown at first which entries there are.
    assert puts > 1 if "use" in harm or "all" in harm else stored == puts > 1, (stored, puts)
    assert stored > 0
    assert int(client.get(BYTES)) == stored_bytes(client)[1]
    assert stored_bytes(client)[0] == 20, "the budget was not used up"


def test_an_entry_larger_than_a_page_of_others_evicts_none(shared: Server, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(client, 300)
    count_slowly(client, monkeypatch)
    client.set(BYTES, "junk")
    before = stored_bytes(client)
    backend = open_store(shared, max_bytes=before[1] + 1)._backend
    assert not backend.put([b"l" * 32], [memoryview(b"kvpack" + bytes(64 * 210))], 0)
    assert stored_bytes(client) == before
    assert backend._counters.as_dict()["refused_chunks"] == 1
    assert backend.put([b"s" * 32], [memoryview(b"kvpack" + bytes(64 * 100))], 0)
    assert stored_bytes(client)[1] <= before[1]
    assert client.zcard(USED) == stored_bytes(client)[0] == 300 - 101 + 1
    assert backend._counters.as_dict()["evicted_entries"] == 101


def test_two_writers_count_concurrently(shared: Server, client: Any) -> None:
    """Both writers take turns counting a server again, and the final sum is correct."""
    stores = [open_store(shared, max_bytes=10**6) for _ in range(2)]
    for seed in range(6):
        if seed % 2:
            client.delete(BYTES)
        save(stores[seed % 2], prompt(2, seed=seed))
    assert int(client.get(BYTES)) == stored_bytes(client)[1]
    assert stored_bytes(client)[0] == client.zcard(USED) == 12


def test_an_uncounted_entry_is_counted_when_it_is_found(shared: Server, client: Any) -> None:
    store, ids = open_store(shared), prompt(2)
    whole = save(store, ids)
    key = store.keys(ids)[0]
    client.zrem(USED, key)
    client.hdel(SIZES, key)
    client.decrby(BYTES, client.strlen(ENTRY + key))
    store._backend.count_present = lambda keys: 0
    assert store.save(ids, whole) == 2 * CHUNK
    assert (client.zcard(USED), client.hlen(SIZES)) == (2, 2)
    assert int(client.get(BYTES)) == stored_bytes(client)[1]


def fill(client: Any, count: int) -> None:
    """Create ``count`` counted entries of 64 bytes without a put, last used long ago."""
    keys = [number.to_bytes(32, "big") for number in range(count)]
    client.mset({ENTRY + key: b"kvpack" + bytes(58) for key in keys})
    client.zadd(USED, {key: 10**15 + number for number, key in enumerate(keys)})
    client.hset(SIZES, mapping=dict.fromkeys(keys, 64))
    client.incrby(BYTES, 64 * count)


@pytest.fixture
def in_pages(client: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put a few entries into every page, because small hashes and sets are stored as one list."""
    before = {name: client.config_get(name)[name] for name in ("hash-max-listpack-entries", "zset-max-listpack-entries")}
    for name in before:
        client.config_set(name, 0)
    monkeypatch.setattr(redis_count, "WAIT_SECONDS", 600.0)
    monkeypatch.setattr(redis_count, "SIZES_AT_ONCE", 8)
    monkeypatch.setattr(redis_count, "NAMES_AT_ONCE", 8)
    yield
    for name, value in before.items():
        client.config_set(name, value)


@pytest.mark.scenario
@pytest.mark.usefixtures("in_pages")
@pytest.mark.parametrize("begin", ["first put", "collection"])
def test_counts_stay_correct_if_others_change_keys(begin: str, shared: Server, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is correct at the end of every page, counts nothing twice, and the bytes never exceed the budget."""
    other, kept = open_store(shared), prompt(3)
    save(other, kept)
    fill(client, 200)
    client.set(BYTES, 100_000)
    most = stored_bytes(client)[1] + 100_000
    other = open_store(shared, max_bytes=most)
    other._backend._count._summed = time.monotonic()
    real, pages = redis_client.RedisClient.call, [0]

    def changing(self: Any, script: str, *arguments: Any, **options: Any) -> Any:
        answer = real(self, script, *arguments, **options)
        if script in ("sum", "count") and self is not other._backend._client:
            pages[0] += 1
            if pages[0] % 2:
                save(other, prompt(1, seed=100 + pages[0]))
            else:
                other.delete(prompt(1, seed=99 + pages[0]))
            other._backend.delete([(pages[0] * 7 % 200).to_bytes(32, "big")])
            other.load(kept)
            assert stored_bytes(client)[1] <= most
        return answer

    monkeypatch.setattr(redis_client.RedisClient, "call", changing)
    store = open_store(shared, max_bytes=most)
    if begin == "first put":
        save(store, prompt(1, seed=50))
    else:
        store._backend.collect()
    assert pages[0] > 15, "there were pages"
    assert int(client.get(BYTES)) == stored_bytes(client)[1]
    assert client.zcard(USED) == client.hlen(SIZES) == stored_bytes(client)[0]
    assert not client.exists(PREFIX + b"counted", PREFIX + b"counting")
    assert store.counters()["faults"] == {}


@pytest.mark.usefixtures("in_pages")
def test_later_counts_continue_with_puts(shared: Server, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(client, 100)
    store = open_store(shared, max_bytes=10**6)
    save(store, prompt(1))
    client.incrby(BYTES, 5000)
    monkeypatch.setattr(redis_count, "SUM_SECONDS", 0.0)
    asked: list[str] = []
    real = redis_client.RedisClient.call

    def listed(self: Any, script: str, *arguments: Any, **options: Any) -> Any:
        asked.append(script)
        return real(self, script, *arguments, **options)

    monkeypatch.setattr(redis_client.RedisClient, "call", listed)
    for number in range(1, 40):
        asked.clear()
        save(store, prompt(1, seed=number))
        assert asked.count("sum") <= 1, "a put waited for more than one page"
        if int(client.get(BYTES)) == stored_bytes(client)[1]:
            break
    assert 5 < number < 39


@pytest.mark.usefixtures("in_pages")
def test_a_program_that_ignores_the_count_is_noticed(shared: Server, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older kvpack counts its own puts, and does not know counts in pages."""
    fill(client, 60)
    real, pages = redis_client.RedisClient.call, [0]

    def changing(self: Any, script: str, *arguments: Any, **options: Any) -> Any:
        answer = real(self, script, *arguments, **options)
        pages[0] += script == "sum"
        if script == "sum" and pages[0] < 6:
            key = (1000 + pages[0]).to_bytes(32, "big")
            with client.pipeline() as together:
                together.set(ENTRY + key, bytes(500)).hset(SIZES, key, 500).zadd(USED, {key: 1}).incrby(BYTES, 500).execute()
        return answer

    monkeypatch.setattr(redis_client.RedisClient, "call", changing)
    store = open_store(shared, max_bytes=10**6)
    store._backend._count.advance()
    assert store._backend._count.is_known
    assert int(client.get(BYTES)) == stored_bytes(client)[1]


def test_eviction_works_page_by_page(shared: Server, client: Any) -> None:
    """More than a page is evicted for one entry. The oldest entries are pinned and therefore skipped."""
    fill(client, 2000)
    store, ids = open_store(shared, max_bytes=10**6), prompt(2)
    save(store, ids)
    size = stored_bytes(client)[1] - 2000 * 64
    pinned = [number.to_bytes(32, "big") for number in range(700)]
    store._backend.pin(pinned, PinTerms("test", 2**40))
    tight = open_store(shared, max_bytes=size + 750 * 64)
    whole = save(tight, prompt(2, seed=3))
    assert is_same_prefix(tight.load(prompt(2, seed=3))[1], whole)
    assert stored_bytes(client)[1] <= size + 750 * 64
    assert all(client.exists(ENTRY + key) for key in pinned)
    assert tight.counters()["evicted_entries"] > 1200
    assert int(client.get(BYTES)) == stored_bytes(client)[1]
    # All that is left is pinned or in use.
    refused = open_store(shared, max_bytes=700 * 64 + 10)
    assert refused.save(prompt(1, seed=5), cache(CHUNK + 5, UNIFORM_IDENTITY.recipe)) == 0
    assert refused.counters()["refused_chunks"] == 1


@pytest.mark.usefixtures("in_pages")
def test_a_total_changed_only_by_kvpack_is_not_recomputed(shared: Server, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that starts while others run does not wait for a count, unless another program has changed the keys."""
    fill(client, 100)
    most = 10**6
    save(open_store(shared, max_bytes=most), prompt(1))
    asked: list[str] = []
    real = redis_client.RedisClient.call

    def listed(self: Any, script: str, *arguments: Any, **options: Any) -> Any:
        asked.append(script)
        return real(self, script, *arguments, **options)

    monkeypatch.setattr(redis_client.RedisClient, "call", listed)
    for seed in range(1, 4):
        asked.clear()
        store = open_store(shared, max_bytes=most)
        save(store, prompt(1, seed=seed))
        store.delete(prompt(1, seed=seed - 1))
        assert asked.count("sum") == 1
        assert int(client.get(BYTES)) == stored_bytes(client)[1]
    client.incrby(BYTES, 7)
    asked.clear()
    save(open_store(shared, max_bytes=most), prompt(1, seed=9))
    assert asked.count("sum") > 5
    assert int(client.get(BYTES)) == stored_bytes(client)[1]
