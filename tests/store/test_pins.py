"""Pins have an owner and an expiration time in all locations. ``stat`` lists them, and ``unpin`` removes them."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack.cli import main
from kvpack.formats.errors import InvalidParameter
from kvpack.store import pins
from kvpack.store.backend import PinTerms
from kvpack.store.counters import Counters
from kvpack.store.directory import Directory
from kvpack.store.pins import encode_pin, owner_digest
from support import redis_server, s3_server
from support.store_caches import CHUNK, IDENTITY, cache, entries, open_store, prompt, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

IDS = prompt(2)


@pytest.fixture
def size(tmp_path: Path) -> int:
    save(open_store(tmp_path / "size"), IDS)
    return max(os.stat(path).st_size for path in entries(tmp_path / "size"))


def fill(folder: Path, size: int) -> bool:
    """Store more than fits besides the prompt. Return True if the prompt is still stored."""
    store = open_store(folder, max_bytes=4 * size)
    for seed in range(1, 7):
        store.save(prompt(2, seed=seed), cache(2 * CHUNK + 5))
    return store.match(IDS) == 2 * CHUNK


def at(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = time.time
    monkeypatch.setattr(pins, "time", type("Later", (), {"time": staticmethod(lambda: real() + seconds)}))


def test_a_pin_expires(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "store", max_bytes=4 * size)
    save(store, IDS)
    assert store.pin(IDS, owner="job 7", seconds=100) == 2 * CHUNK
    assert fill(tmp_path / "store", size)
    with monkeypatch.context() as early:
        at(early, 90)
        assert fill(tmp_path / "store", size)
        # Its owner makes it last.
        assert store.pin(IDS, owner="job 7", seconds=200) == 2 * CHUNK
        assert len(os.listdir(tmp_path / "store" / "holds")) == 1
    at(monkeypatch, 291)
    assert not fill(tmp_path / "store", size)
    assert os.listdir(tmp_path / "store" / "holds") == []
    assert store.counters()["faults"] == {}


def test_each_owner_has_a_separate_pin(tmp_path: Path, size: int) -> None:
    store = open_store(tmp_path / "store")
    save(store, IDS)
    for owner in ("a", "b", None):
        store.pin(IDS, owner=owner)
    assert not store.unpin(IDS, owner="c")
    assert store.unpin(IDS, owner="a")
    assert fill(tmp_path / "store", size)
    assert store.unpin(IDS)
    assert not store.unpin(IDS)
    assert not fill(tmp_path / "store", size)


def test_the_end_of_a_chain_is_not_pinned_without_its_beginning(tmp_path: Path) -> None:
    """Such an end cannot be found, so its pin would only waste space. Pins of other chains stay."""
    store, ids, other = open_store(tmp_path), prompt(4), prompt(2, seed=3)
    save(store, ids)
    save(store, other)
    assert store.pin(ids, owner="a") == 4 * CHUNK
    assert store.pin(ids[:CHUNK], owner="b") == CHUNK
    assert store.pin(other, owner="c") == 2 * CHUNK
    assert store.delete(ids[: 3 * CHUNK], start=CHUNK) == 2
    assert {pin.owner for pin in store._backend.pins()} == {"b", "c"}
    assert store.delete(ids[:CHUNK]) == 1
    assert {pin.owner for pin in store._backend.pins()} == {"c"}
    assert store.clear() == 2
    assert not store._backend.pins()


def test_the_pin_that_blocks_a_store_is_named_and_can_be_removed(tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "store")
    store = open_store(folder)
    save(store, IDS)
    store.pin(IDS, owner="job 7")
    assert main(["store", "gc", folder, "--max-bytes", "0"]) == 0
    assert "2 of them are pinned: kvpack store stat lists the owners" in capsys.readouterr().out
    assert main(["store", "stat", folder]) == 0
    text = capsys.readouterr().out
    key = store.keys(IDS)[-1].hex()
    assert "job 7" in text
    assert key[:16] in text
    for words, why in (([key[:16], "--owner", "job 8"], "is not pinned by job 8"), (["zz"], "no pinned key starts with 'zz'")):
        assert main(["store", "unpin", folder, *words]) == 2
        assert why in capsys.readouterr().err
    assert main(["store", "unpin", folder, key[:16], "--owner", "job 7"]) == 0
    assert "is no longer pinned" in capsys.readouterr().out
    assert main(["store", "gc", folder, "--max-bytes", "0"]) == 0
    assert entries(folder) == []


@pytest.mark.parametrize("given", [{"owner": ""}, {"owner": "a\nb"}, {"owner": 3}, {"owner": "x" * 300}, {"seconds": 0}, {"seconds": 1.5}])
def test_invalid_owners_and_ends_are_refused(given: dict[str, Any], tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(InvalidParameter, match=next(iter(given))):
        store.pin(IDS, **given)


@pytest.mark.parametrize("data", [b"", b"junk", b"kvphold1", b"kvphold1" + bytes(10), b"kvphold1" + b"\xff" * 60])
def test_an_invalid_pin_is_a_fault_and_keeps_nothing(data: bytes, tmp_path: Path, size: int) -> None:
    folder = tmp_path / "store"
    store = open_store(folder)
    save(store, IDS)
    (folder / "holds").mkdir(mode=0o700)
    path = folder / "holds" / f"{store.keys(IDS)[-1].hex()}-{'0' * 16}"
    path.write_bytes(data)
    path.chmod(0o600)
    assert not fill(folder, size)
    counters = Counters()
    assert Directory(folder, counters).pins() == []
    assert counters.as_dict()["faults"] == {"pinned InvalidHeader": 1}


class Remote:
    """A kind of server: how tests open it, and how another program stores bytes there."""

    def __init__(self, url: str, put: Callable[[bytes, str, bytes], Any]) -> None:
        self.url, self.put = url, put

    def open(self, **options: Any) -> kvpack.Store:
        return kvpack.Store(self.url, IDENTITY, chunk=CHUNK, timeout=5, **options)

    def save(self) -> kvpack.Store:
        """Save the prompt, record its use, and return the store."""
        with self.open() as store:
            save(store, IDS)
        return self.open()

    def fill(self) -> bool:
        """Store more than fits besides the prompt. Return True if the prompt is still stored."""
        with self.open() as store:
            size = max(stored.size for stored in store._backend.list())
        with self.open(max_bytes=4 * size) as store:
            for seed in range(1, 7):
                store.save(prompt(2, seed=seed), cache(2 * CHUNK + 5))
            assert not {name: count for name, count in store.counters()["faults"].items() if name != "pinned InvalidHeader"}
            return store.match(IDS) == 2 * CHUNK


@pytest.fixture(scope="module")
def s3() -> Iterator[s3_server.Server]:
    with s3_server.run_server() as server:
        yield server


@pytest.fixture(params=["redis", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    if request.param == "redis":
        redis = pytest.importorskip("redis")
        with redis_server.run_server(tmp_path) as server, redis.Redis.from_url(server.url) as client:
            yield Remote(
                server.url,
                lambda key, owner, data: client.hset("{kvpack}:holds", key + owner_digest(owner), data),
            )
        return
    obstore = pytest.importorskip("obstore")
    server = request.getfixturevalue("s3")
    for name, variable in s3_server.VARIABLES.items():
        monkeypatch.setenv(variable, server.options[name])
    url = f"{server.url}/{tmp_path.name}"
    objects = obstore.store.from_url(url, config=server.options, client_options={"allow_http": True})
    yield Remote(
        url,
        lambda key, owner, data: obstore.put(objects, f"holds/{key.hex()}/{owner_digest(owner).hex()}", data),
    )


def test_pins_on_a_server_have_owners_and_ends(remote: Remote, capsys: pytest.CaptureFixture[str]) -> None:
    store = remote.save()
    keys = store.keys(IDS)
    assert store.pin(IDS, owner="job 7", seconds=100) == 2 * CHUNK
    assert store.pin(IDS, owner="job 8", seconds=100) == 2 * CHUNK
    assert main(["store", "stat", remote.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pinned"] == 2
    assert sorted(pin["owner"] for pin in found["pins"]) == ["job 7", "job 8"]
    assert {pin["key"] for pin in found["pins"]} == {keys[-1].hex()}
    assert all(abs(pin["until"] - time.time() - 100) < 60 for pin in found["pins"])
    assert not store.unpin(IDS, owner="job 9")
    assert store.unpin(IDS, owner="job 7")
    assert remote.fill()
    assert main(["store", "unpin", remote.url, keys[-1].hex()[:12], "--owner", "job 8"]) == 0
    assert store.pin(IDS[:CHUNK]) == CHUNK
    assert store.delete(IDS) == 2
    assert not store._backend.pins()
    assert not store.unpin(IDS)
    assert store.counters()["faults"] == {}


def test_pins_on_a_server_expire_and_invalid_ones_keep_nothing(remote: Remote) -> None:
    store = remote.save()
    keys = store.keys(IDS)
    remote.put(keys[-1], "late", encode_pin(keys, PinTerms("late", int(time.time()) - 5)))
    for number, junk in enumerate((b"", b"kvphold1", b"kvphold1" + bytes(10), b"kvphold1" + b"\xff" * 60, b"x" * 100)):
        remote.put(keys[-1], f"junk {number}", junk)
    assert not store._backend.pins()
    assert not remote.fill()
    store = remote.save()
    remote.put(keys[-1], "soon", encode_pin(keys, PinTerms("soon", int(time.time()) + 1000)))
    assert remote.fill()
    assert [pin.owner for pin in store._backend.pins()] == ["soon"]
    assert set(store.counters()["faults"]) == {"pinned InvalidHeader"}
