"""Fixtures for tests with unencrypted and with encrypted entries."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpack.store import disk_usage
from support import byte_sized_disk
from support.store_caches import entry_of, open_store, prompt, save


@pytest.fixture
def plain_entry(tmp_path: Path) -> bytes:
    """Return the unencrypted entry of the first prompt's second chunk."""
    store, ids = open_store(tmp_path / "plain"), prompt(3)
    save(store, ids)
    return Path(entry_of(store, ids, 1)).read_bytes()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make puts wait longer, because a process that has locked the byte count may stall for seconds on a busy machine."""
    monkeypatch.setattr(disk_usage, "WAIT_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def _disk_of_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate a disk on which files take exactly their size and folders take nothing, so that budgets count entries.

    See test_disk.py for budgets on real disks.
    """
    if not request.module.__name__.endswith(("test_disk", "test_endurance")):
        byte_sized_disk.install(monkeypatch)
