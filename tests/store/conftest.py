"""Fixtures for tests with both unencrypted and encrypted entries."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpack.store import disk_usage
from support import disk_of_bytes
from support.store_caches import entry_of, open_store, prompt, save


@pytest.fixture
def plain_entry(tmp_path: Path) -> bytes:
    """An entry that is not encrypted, of the second chunk of the first prompt."""
    store, ids = open_store(tmp_path / "plain"), prompt(3)
    save(store, ids)
    return Path(entry_of(store, ids, 1)).read_bytes()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a process that has locked the byte count may not run for more than the second after which a put is left out."""
    monkeypatch.setattr(disk_usage, "WAIT_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def _disk_of_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk without blocks, whose folders take nothing, so that a budget says how many entries fit; test_disk.py has a real one."""
    if not request.module.__name__.endswith(("test_disk", "test_endurance")):
        disk_of_bytes.install(monkeypatch)
