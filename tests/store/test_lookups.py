"""A short run of tests/support/store_lookups.py, which must detect a key that lacks one of its fields."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

import kvpack
from kvpack.store import keys
from support import store_lookups

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.scenario


def test_nobody_finds_entries_of_another_identity(tmp_path: Path) -> None:
    report = store_lookups.run_lookups(store_lookups.folder_opener(str(tmp_path)), 4000, prompts=60)
    assert report["lookups"] == 4000
    assert (report["hits"], report["refused"], report["owners_that_found_something_else"]) == (0, 0, 0)


@pytest.mark.parametrize("field", ["tenant", "adapter", "config", "extra", "inputs"])
def test_a_field_missing_from_the_key_is_noticed(field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if field == "inputs":
        real = keys.chunk_key
        monkeypatch.setattr(keys, "chunk_key", lambda parent, ids, inputs: real(parent, ids, b""))
    else:
        digest = kvpack.Identity.digest
        without = property(lambda identity: digest.fget(dataclasses.replace(identity, **{field: ""})))
        monkeypatch.setattr(kvpack.Identity, "digest", without)
    report = store_lookups.run_lookups(store_lookups.folder_opener(str(tmp_path)), 4000, prompts=60)
    # Where the header names the field, the reader refuses what it should not have found.
    assert report["hits"] if field in ("tenant", "inputs") else report["refused"]
