"""What tests of entries that are not encrypted, beside others that are, share."""

from __future__ import annotations

from pathlib import Path

import pytest

from store_caches import entry_of, open_store, prompt, save  # isort: skip


@pytest.fixture
def plain_entry(tmp_path: Path) -> bytes:
    """An entry that is not encrypted, of the second chunk of the first prompt."""
    store, ids = open_store(tmp_path / "plain"), prompt(3)
    save(store, ids)
    return Path(entry_of(store, ids, 1)).read_bytes()
