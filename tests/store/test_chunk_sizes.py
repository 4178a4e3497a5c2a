"""Two chunk sizes at one location: neither finds the other's entries, and a warning mentions the other size."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from support.redis_server import run_server
from support.store_caches import CHUNK, open_store, prompt, save

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("ask", ["load", "match"])
@pytest.mark.parametrize("place", ["folder", "Redis"])
def test_entries_in_chunks_of_another_size_are_named(ask: str, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.ExitStack() as stack:
        location: Any = tmp_path / "store"
        if place == "Redis":
            pytest.importorskip("redis")
            # A server without passwords accepts any.
            location = stack.enter_context(run_server(tmp_path)).url.replace("//", "//default:secret@")
        ids = prompt(4)
        save(open_store(location), ids)
        other = open_store(location, chunk=2 * CHUNK)
        for _ in range(3):
            assert getattr(other, ask)(ids) == ((0, None) if ask == "load" else 0)
        assert other.counters()["other_chunks"] == 1
        (said,) = (record.getMessage() for record in caplog.records if "chunks of" in record.getMessage())
        assert f"in chunks of {2 * CHUNK}, but entries in chunks of {CHUNK} exist: open the store with chunk={CHUNK}" in said
        assert "secret" not in said
        # Nothing is said of other tokens, nor where something is found.
        assert open_store(location).load(prompt(4, seed=7)) == (0, None)
        assert open_store(location).counters()["other_chunks"] == 0
        strangers = open_store(location, chunk=2 * CHUNK)
        assert getattr(strangers, ask)(prompt(4, seed=7)) == ((0, None) if ask == "load" else 0)
        assert strangers.counters()["other_chunks"] == 0
