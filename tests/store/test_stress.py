"""A short run of tests/support/store_stress.py, and arbitrary sequences of operations compared with a dict."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvpack
from kvpack.store import loading
from kvpack.store import store as store_module
from support import store_stress
from support.store_caches import CHUNK, cache, entry_of, is_same_prefix, open_store, prompt

pytestmark = pytest.mark.scenario

CLOCKED: Any = (loading, store_module)
"""Modules that record when an entry was used."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_stress, "LAYERS", (1, 8))
    monkeypatch.setattr(store_stress, "PROMPTS", 24)
    monkeypatch.setattr(store_stress, "BUDGET", 1_000_000)


def test_every_read_is_correct_with_many_processes_and_threads(tmp_path: Path) -> None:
    report = store_stress.run_operations(str(tmp_path / "store"), 3, 2, 300)
    assert report["operations"] == 300
    assert report["processes_that_failed"] == report["threads_that_failed"] == report["refused"] == 0
    assert report["most_bytes"] <= report["budget"]
    assert report["bytes"] <= report["budget"]


def test_wrong_bytes_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = store_stress.packed_prompt

    def with_the_next_prompt_of_the_family(number: int, model: int) -> kvpack.Cache:
        return real(number if number % 8 else number + 8, model)

    monkeypatch.setattr(store_stress, "packed_prompt", with_the_next_prompt_of_the_family)
    report = store_stress.run_operations(str(tmp_path / "store"), 1, 1, 400)
    assert report["threads_that_failed"] == 1


class StoreMachine(RuleBasedStateMachine):
    """Compares a store with a dict of chunks, despite damage, loss, process restarts, and clock jumps."""

    prompts = st.sampled_from([(seed, chunks) for seed in range(3) for chunks in range(4)])

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.stores = [open_store(self.folder), open_store(self.folder)]
        self.there: set[bytes] = set()
        self.clock = 0

    def teardown(self) -> None:
        for module in CLOCKED:
            module.time = time
        shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)

    def chain(self, ids: list[int]) -> list[bytes]:
        return self.stores[0].keys(ids)

    def expected(self, ids: list[int]) -> int:
        keys = self.chain(ids)
        return next((number for number, key in enumerate(keys) if key not in self.there), len(keys))

    @rule(store=st.integers(0, 1), what=prompts)
    def save(self, store: int, what: tuple[int, int]) -> None:
        ids = prompt(what[1], first=1, seed=what[0])
        assert self.stores[store].save(ids, WHOLE[what]) == what[1] * CHUNK
        self.there.update(self.chain(ids))

    @rule(store=st.integers(0, 1), what=prompts)
    def load(self, store: int, what: tuple[int, int]) -> None:
        ids = prompt(what[1], first=1, seed=what[0])
        n, found = self.stores[store].load(ids)
        assert n == self.expected(ids) * CHUNK
        assert found is None if n == 0 else is_same_prefix(found, WHOLE[what])

    @rule(store=st.integers(0, 1), what=prompts, start=st.integers(0, 2))
    def delete(self, store: int, what: tuple[int, int], start: int) -> None:
        ids = prompt(what[1], first=1, seed=what[0])
        gone = set(self.chain(ids)[start:])
        assert self.stores[store].delete(ids, start=start * CHUNK) == len(gone & self.there)
        self.there -= gone

    @rule(what=prompts, number=st.integers(0, 3), at=st.integers(0, 8000))
    def damage(self, what: tuple[int, int], number: int, at: int) -> None:
        ids = prompt(what[1], first=1, seed=what[0])
        if number >= self.expected(ids):
            return
        path = entry_of(self.stores[0], ids, number)
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 16]))
        assert self.stores[1].load(ids)[0] == number * CHUNK
        self.there.discard(self.chain(ids)[number])

    @rule(what=prompts, number=st.integers(0, 3))
    def lose(self, what: tuple[int, int], number: int) -> None:
        ids = prompt(what[1], first=1, seed=what[0])
        if number < self.expected(ids):
            os.unlink(entry_of(self.stores[0], ids, number))
            self.there.discard(self.chain(ids)[number])

    @rule(store=st.integers(0, 1))
    def reopen(self, store: int) -> None:
        self.stores[store].close()
        self.stores[store] = open_store(self.folder)

    @rule(store=st.integers(0, 1))
    def collect(self, store: int) -> None:
        self.stores[store].collect()

    @rule(what=prompts)
    def pin_and_evict_the_rest(self, what: tuple[int, int]) -> None:
        ids = prompt(what[1], first=1, seed=what[0])
        count = self.stores[0].pin(ids) // CHUNK
        assert count == self.expected(ids)
        open_store(self.folder, max_bytes=0).collect()
        self.there = set(self.chain(ids)[:count])
        assert self.stores[1].unpin(ids) == (count > 0)

    @rule(hours=st.integers(-10_000, 10_000))
    def jump(self, hours: int) -> None:
        offset = hours * 3600 * 10**9

        class Clock:
            time_ns = staticmethod(lambda: max(1, time.time_ns() + offset))

        for module in CLOCKED:
            module.time = Clock

    @invariant()
    def the_same_is_there(self) -> None:
        if hasattr(self, "folder"):
            assert self.stores[0].stats()["entries"] == len(self.there)


LONGEST = cache(CHUNK * 4 + 5)
WHOLE = {(seed, chunks): LONGEST[:, : CHUNK * chunks + 5] for seed in range(3) for chunks in range(4)}
"""The prompts share a chunk, so their caches have the same values."""

TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
