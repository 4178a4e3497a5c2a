"""Pins have an owner and an end, are named by stat and undone by unpin; those of earlier versions go on to hold."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvpack.cli import main
from kvpack.formats.errors import InvalidParameter
from kvpack.store import pins
from kvpack.store.counters import Counters
from kvpack.store.directory import Directory
from support.store_caches import CHUNK, cache, entries, open_store, prompt, save

if TYPE_CHECKING:
    from pathlib import Path

IDS = prompt(2)


@pytest.fixture
def size(tmp_path: Path) -> int:
    save(open_store(tmp_path / "size"), IDS)
    return max(os.stat(path).st_size for path in entries(tmp_path / "size"))


def fill(folder: Path, size: int) -> bool:
    """Store more than fits beside the prompt, and return whether that is still there."""
    store = open_store(folder, max_bytes=4 * size)
    for seed in range(1, 7):
        store.save(prompt(2, seed=seed), cache(2 * CHUNK + 5))
    return store.match(IDS) == 2 * CHUNK


def at(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = time.time
    monkeypatch.setattr(pins, "time", type("Later", (), {"time": staticmethod(lambda: real() + seconds)}))


def test_a_pin_ends(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    at(monkeypatch, 201)
    assert not fill(tmp_path / "store", size)
    assert os.listdir(tmp_path / "store" / "holds") == []
    assert store.counters()["faults"] == {}


def test_each_owner_has_its_own(tmp_path: Path, size: int) -> None:
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


def test_a_pin_of_an_earlier_version_holds(tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "store"
    store = open_store(folder)
    save(store, IDS)
    keys = store.keys(IDS)
    (folder / "pins").mkdir(mode=0o700)
    (folder / "pins" / keys[-1].hex()).write_bytes(b"".join(keys))
    (folder / "pins" / keys[-1].hex()).chmod(0o600)
    assert fill(folder, size)
    assert main(["store", "stat", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pins"] == [{"key": keys[-1].hex(), "owner": "", "chunks": 2, "until": None}]
    assert main(["store", "unpin", str(folder), keys[-1].hex()[:10]]) == 0
    assert not fill(folder, size)


def test_what_blocks_a_store_is_named_and_undone(tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "store")
    store = open_store(folder)
    save(store, IDS)
    store.pin(IDS, owner="job 7")
    assert main(["store", "gc", folder, "--max-bytes", "0"]) == 0
    assert "2 of them are pinned, and stay: kvpack store stat names the owners" in capsys.readouterr().out
    assert main(["store", "stat", folder]) == 0
    text = capsys.readouterr().out
    key = store.keys(IDS)[-1].hex()
    assert "job 7" in text
    assert key[:16] in text
    for words, why in (([key[:16], "--owner", "job 8"], "is not pinned by job 8"), (["zz"], "is the beginning of 0 pinned keys")):
        assert main(["store", "unpin", folder, *words]) == 2
        assert why in capsys.readouterr().err
    assert main(["store", "unpin", folder, key[:16], "--owner", "job 7"]) == 0
    assert "is no longer pinned" in capsys.readouterr().out
    assert main(["store", "gc", folder, "--max-bytes", "0"]) == 0
    assert entries(folder) == []


@pytest.mark.parametrize("given", [{"owner": ""}, {"owner": "a\nb"}, {"owner": 3}, {"owner": "x" * 300}, {"seconds": 0}, {"seconds": 1.5}])
def test_owners_and_ends_that_cannot_be_are_refused(given: dict[str, Any], tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(InvalidParameter, match=next(iter(given))):
        store.pin(IDS, **given)


@pytest.mark.parametrize("data", [b"", b"junk", b"kvphold1", b"kvphold1" + bytes(10), b"kvphold1" + b"\xff" * 60])
def test_what_is_no_pin_is_a_fault_and_holds_nothing(data: bytes, tmp_path: Path, size: int) -> None:
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
