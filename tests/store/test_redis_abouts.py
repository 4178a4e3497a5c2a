"""Totals by model and recipe on Redis: every put and eviction updates them, and they are corrected after other changes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack.store import redis_count
from kvpack.store.counters import Counters
from kvpack.store.encryption import Cipher
from kvpack.store.redis import Redis
from kvpack.store.redis_scripts import ENTRY, PREFIX
from kvpack.store.summary import summarize
from support.redis_server import Server, run_server
from support.store_caches import CHUNK, IDENTITY, KEYS, UNIFORM_IDENTITY, prompt, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

redis = pytest.importorskip("redis")

ABOUT, ABOUTS, SIZES, USED, BYTES = (PREFIX + name for name in (b"about", b"abouts", b"sizes", b"used", b"bytes"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with run_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def client(shared: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(redis_count, "_AT_ONCE", 4)
    found = redis.Redis.from_url(shared.url)
    found.flushall()
    return found


def open_store(server: Server, identity: kvpack.Identity = UNIFORM_IDENTITY, **options: Any) -> kvpack.Store:
    return kvpack.Store(server.url, identity, **{"chunk": CHUNK, "timeout": 5, **options})


def entries_by_model(server: Server, read: list[bytes] | None = None) -> dict[str, int]:
    """Return the number of entries of each model. The keys of entries whose headers are read are appended to ``read``."""
    backend = Redis(server.url, Counters(), timeout=5)
    real = backend.peek_many

    def peek_many(keys: Any, **options: Any) -> Any:
        if read is not None:
            read.extend(keys)
        return real(keys, **options)

    backend.peek_many = peek_many  # type: ignore[method-assign]
    summary = summarize(backend)
    assert summary.count == backend.size()[0]
    assert sum(count["bytes"] for *_, count in summary.identities()) == backend.size()[1]
    return {model["name"]: counts["entries"] for model, _, counts in summary.identities()}


def test_totals_follow_puts_evictions_and_deletions(shared: Server, client: Any) -> None:
    other = replace(UNIFORM_IDENTITY, model="other")
    with open_store(shared) as store, open_store(shared, other) as neighbor:
        save(store, prompt(3))
        save(neighbor, prompt(2))
        size = store.stats()["bytes"]
        read: list[bytes] = []
        assert entries_by_model(shared, read) == {"model": 3, "other": 2}
        store.delete(prompt(1))
        assert entries_by_model(shared, read) == {"model": 2, "other": 2}
        with open_store(shared, max_bytes=size) as tight:
            save(tight, prompt(5, seed=1))
        found = entries_by_model(shared, read)
        assert found["model"] >= 5
        assert sum(found.values()) == client.hlen(SIZES)
        assert read == []


HARMS: dict[str, Callable[[Any], object]] = {
    "an earlier version has put all": lambda client: client.delete(ABOUT, ABOUTS),
    "texts are lost": lambda client: client.delete(ABOUTS),
    "descriptions are lost": lambda client: client.delete(ABOUT),
    "totals are junk": lambda client: client.hset(ABOUTS, mapping=dict.fromkeys(client.hkeys(ABOUTS), b"junk")),
    "descriptions are junk": lambda client: client.hset(ABOUT, mapping=dict.fromkeys(client.hkeys(ABOUT), b"junk")),
    "descriptions are of another type": lambda client: (client.delete(ABOUT), client.set(ABOUT, "x")),
    "an entry is gone": lambda client: _forget(client, client.hkeys(SIZES)[0]),
    "entries expired": lambda client: client.delete(*[ENTRY + key for key in client.hkeys(SIZES)[:2]]),
    "an entry that is not described": lambda client: client.hdel(ABOUT, client.hkeys(SIZES)[0]),
}


def _forget(client: Any, key: bytes) -> None:
    """Remove an entry as an earlier version does."""
    client.incrby(BYTES, -client.strlen(ENTRY + key))
    client.delete(ENTRY + key)
    client.zrem(USED, key)
    client.hdel(SIZES, key)


@pytest.mark.parametrize("harm", HARMS)
def test_totals_are_correct_whatever_happens_to_them(harm: str, shared: Server, client: Any) -> None:
    with open_store(shared) as store:
        save(store, prompt(9))
        HARMS[harm](client)
        store.match(prompt(9))
        store.collect()
        there = sum(1 for _ in client.scan_iter(match=ENTRY + b"*"))
        assert entries_by_model(shared) == {"model": there}
        # A writer goes on, and later totals need no headers.
        save(store, prompt(9, seed=1))
        read: list[bytes] = []
        assert entries_by_model(shared, read) == {"model": there + 9}
        assert read == [] or "junk" in harm or "lost" in harm
        with open_store(shared, max_bytes=store.stats()["bytes"] // 3) as tight:
            tight.collect()
        assert entries_by_model(shared) == {"model": client.hlen(SIZES)}


def test_encrypted_entries_are_not_described(shared: Server, client: Any) -> None:
    with open_store(shared, IDENTITY, encryption=KEYS) as store:
        save(store, prompt(3))
    backend = Redis(shared.url, Counters(), timeout=5)
    assert (client.hlen(ABOUT), summarize(backend).undecryptable) == (0, 3)
    summary = summarize(backend, cipher=Cipher(KEYS, IDENTITY.tenant))
    assert [counts["entries"] for *_, counts in summary.identities()] == [3]


def test_gc_reads_no_headers_of_described_entries(shared: Server, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    real = Redis.peek_many
    monkeypatch.setattr(Redis, "peek_many", lambda self, keys, **options: read.extend(keys) or real(self, keys, **options))
    with open_store(shared) as store:
        save(store, prompt(5))
        store.collect()
        assert read == []
        client.set(ENTRY + b"n" * 32, b"kvpack" + bytes(100))
        store.collect()
        store.collect()
        assert set(read) == {b"n" * 32}
