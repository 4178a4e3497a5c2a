"""Counting the entries of a directory: folders that have not changed are not listed again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvpack.store import folder
from support.store_caches import entries, open_store, prompt, save


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which every listed folder is appended."""
    found: list[str] = []
    original = folder.regular_files
    monkeypatch.setattr(folder, "regular_files", lambda path, counters: found.append(path) or original(path, counters))
    return found


def settle(root: Path) -> None:
    """Set the modification times of all folders to long ago."""
    for first, _, _ in os.walk(root):
        os.utime(first, ns=(10**18, 10**18))


def test_only_changed_subfolders_are_listed(tmp_path: Path, listed: list[str]) -> None:
    store = open_store(tmp_path)
    save(store, prompt(3))
    settle(tmp_path)
    paths = [Path(path) for path in entries(tmp_path)]
    expected = len(paths), sum(path.stat().st_size for path in paths)
    assert (store.stats()["entries"], store.stats()["bytes"]) == expected
    listed.clear()
    assert (store.stats()["entries"], store.stats()["bytes"]) == expected
    assert not listed
    removed = paths[0].stat().st_size
    paths[0].unlink()
    listed.clear()
    assert (store.stats()["entries"], store.stats()["bytes"]) == (expected[0] - 1, expected[1] - removed)
    assert str(paths[0].parent) in listed


def test_a_recently_changed_folder_is_listed_again(tmp_path: Path, listed: list[str]) -> None:
    """The folder might change twice within one clock tick."""
    store = open_store(tmp_path)
    save(store, prompt(1))
    (path,) = map(Path, entries(tmp_path))
    for _ in range(2):
        listed.clear()
        assert store.stats()["entries"] == 1
        assert str(path.parent) in listed
