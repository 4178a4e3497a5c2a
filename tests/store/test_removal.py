"""All entries of a model, a recipe or a tenant are removed, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING

import pytest

import kvpack
from kvpack.cli import main
from kvpack.coding.recipes import Recipe
from kvpack.store.directory import Directory
from kvpack.store.entries import to_pieces
from kvpack.store.keys import token_bytes
from support.store_caches import CHUNK, IDENTITY, KEYS, cache, entries, open_store, prompt, save

if TYPE_CHECKING:
    from pathlib import Path

OTHERS = {
    "other": dataclasses.replace(IDENTITY, model="other"),
    "recipe": dataclasses.replace(IDENTITY, recipe="kivi-4"),
    "tenant": dataclasses.replace(IDENTITY, tenant="somebody"),
    "nobody": dataclasses.replace(IDENTITY, tenant=""),
    "ours": IDENTITY,
}


@pytest.fixture
def stores(tmp_path: Path) -> dict[str, kvpack.Store]:
    found = {name: open_store(tmp_path / "store", identity) for name, identity in OTHERS.items()}
    for store in found.values():
        save(store, prompt(3))
    return found


def left(stores: dict[str, kvpack.Store]) -> set[str]:
    """Return the stores that have their whole prefix. All others must have none of theirs."""
    matched = {name: store.match(prompt(3)) for name, store in stores.items()}
    assert set(matched.values()) <= {0, 3 * CHUNK}
    return {name for name, tokens in matched.items() if tokens}


def rm(stores: dict[str, kvpack.Store], *words: str) -> int:
    return main(["store", "rm", str(stores["ours"].location), *words])


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (["--model", "other"], {"other"}),
        (["--recipe", "kivi-4"], {"recipe"}),
        (["--tenant", "somebody"], {"tenant"}),
        (["--tenant", IDENTITY.tenant], {"other", "recipe", "ours"}),
        (["--tenant", IDENTITY.tenant, "--model", "model", "--recipe", IDENTITY.recipe], {"ours"}),
        (["--model", "nothing"], set()),
        (["--older-than", "1h"], set()),
        (["--model", "other", "--dry-run"], set()),
    ],
)
def test_rm_removes_entries(words: list[str], gone: set[str], stores: dict[str, kvpack.Store], capsys: pytest.CaptureFixture[str]) -> None:
    assert rm(stores, *words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert left(stores) == set(OTHERS) - gone
    assert report["removed"] == 3 * len(gone)
    assert report["entries"] == len(entries(stores["ours"].location)) == 15 - 3 * len(gone)


def test_rm_removes_entries_by_age(stores: dict[str, kvpack.Store], capsys: pytest.CaptureFixture[str]) -> None:
    used = time.time() - 3 * 86_400
    for key in stores["other"].keys(prompt(3)):
        (path,) = (path for path in entries(stores["other"].location) if path.endswith(key.hex()))
        os.utime(path, (used, used))
    assert rm(stores, "--older-than", "2d") == 0
    assert left(stores) == set(OTHERS) - {"other"}
    assert "3 entries removed" in capsys.readouterr().out


def test_pinned_entries_are_kept(stores: dict[str, kvpack.Store], capsys: pytest.CaptureFixture[str]) -> None:
    stores["other"].pin(prompt(3))
    assert rm(stores, "--model", "other") == 0
    assert "0 entries removed, 3 pinned" in capsys.readouterr().out
    assert left(stores) == set(OTHERS)


def test_rm_without_a_selection_is_refused(stores: dict[str, kvpack.Store], capsys: pytest.CaptureFixture[str]) -> None:
    assert rm(stores) == 2
    assert "pass at least one of --model, --recipe, --older-than and --tenant" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        rm(stores, "--older-than", "soon")
    assert "such as 90s, 30m, 12h or 7d" in capsys.readouterr().err
    assert left(stores) == set(OTHERS)


def test_clear_removes_the_entries_of_one_identity(stores: dict[str, kvpack.Store]) -> None:
    branch = prompt(4, first=3, seed=4)
    save(stores["ours"], branch)
    stores["ours"].pin(prompt(3))
    count = len(set(stores["ours"].keys(prompt(3))) | set(stores["ours"].keys(branch)))
    assert stores["ours"].clear() == count
    assert stores["ours"].match(branch) == 0
    assert left(stores) == set(OTHERS) - {"ours"}
    assert stores["ours"].clear() == 0
    assert stores["ours"].save(prompt(3), cache(3 * CHUNK + 5)) == 3 * CHUNK


def test_encrypted_entries_need_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(tmp_path / "store", encryption=KEYS)
    save(store, prompt(2))
    assert main(["store", "rm", str(tmp_path / "store"), "--model", "model"]) == 0
    assert "2 encrypted entries could not be read: pass --key-file" in capsys.readouterr().out
    assert open_store(tmp_path / "store", encryption={"k": bytes(32)}).clear() == 0
    assert store.clear() == 2


def test_a_recipe_named_by_an_older_entry_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, ids = open_store(tmp_path / "store"), prompt(1)
    (key,) = store.keys(ids)
    chunk = dataclasses.replace(cache(len(ids))[:, :CHUNK], model=IDENTITY.header_model, recipe="kivi-2")
    assert store._backend.put([key], to_pieces(chunk, key, IDENTITY.root, token_bytes(ids[:CHUNK])), time.time_ns())
    for recipe, count in (("kivi-4", 0), (Recipe.from_recorded("kivi-2").canonical, 1)):
        capsys.readouterr()
        assert main(["store", "rm", str(tmp_path / "store"), "--recipe", recipe, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["removed"] == count


def test_each_pin_is_removed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing the pin of each entry separately could take one request per entry."""
    store = open_store(tmp_path / "store")
    save(store, prompt(9))
    for chunks in (3, 9):
        store.pin(prompt(chunks))
    undone: list[bytes] = []
    real = Directory.unpin
    monkeypatch.setattr(Directory, "unpin", lambda self, keys, owner=None: (undone.append(keys[-1]), real(self, keys, owner))[1])
    keys = store.keys(prompt(9))
    assert store.clear() == 9
    assert set(undone) == {keys[2], keys[8]}
    assert len(undone) == 2
    assert store._backend.pins() == []
