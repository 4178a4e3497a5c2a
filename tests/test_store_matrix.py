"""Every cell of tests/store_matrix at a small size, and proof that its promises can be seen to break."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack.store.forms import Kind

from store_matrix.matrix import FAULTS, KINDS, run_cell  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("redis")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.getLogger("kvpack.store").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("kvpack.store").setLevel(logging.NOTSET)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_promises_hold(kind: str, fault: str) -> None:
    count = FAULTS[fault].cases_of_test(kind)
    # Each kind another choice of cases: together they have most.
    cell = run_cell(kind, fault, count, seed=list(KINDS).index(kind))
    if cell.skipped:
        pytest.skip(cell.skipped)
    assert cell.problems == []
    assert cell.counts["cases"] >= count
    assert cell.found > 0


def _raise(self: Any, operation: str, error: BaseException) -> None:
    raise error


def _write_in_place(path: str, pieces: Any, *, complete: Any = None, **_: Any) -> int:
    with open(path, "wb", buffering=0) as file:
        for piece in pieces:
            file.write(piece)
            time.sleep(0.0005)
        if complete:
            complete(file.fileno())
    return 0


def _remove(path: str, *, old: bool) -> bool:
    os.unlink(path)
    return True


def _without_tenant(self: kvpack.Identity) -> bytes:
    return hashlib.sha256(repr(dataclasses.replace(self, tenant="")).encode()).digest()


MUTANTS: dict[str, tuple[str, str, Any]] = {
    "kill": ("in place", "kvpack.store.directory.write_file", _write_in_place),
    "errno": ("raises", "kvpack.store.counters.Counters.fault", _raise),
    "power loss": ("no sync of folders", "kvpack.atomic.sync_folder", lambda folder: None),
    "memory limit": ("raises", "kvpack.store.counters.Counters.fault", _raise),
    "two users": ("what is there is right", "kvpack.store.directory.kind_of", lambda *_: Kind.READABLE),
    "PID namespaces": ("no locks", "kvpack.store.eviction.sweep", _remove),
    "isolation": ("no tenant in the key", "kvpack.store.identity.Identity.digest", property(_without_tenant)),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_the_promises_are_seen_to_break(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, name, mutant = MUTANTS[fault]
    monkeypatch.setattr(name, mutant)
    # A run of few cases may miss what depends on the moment.
    for cell in (run_cell("plain", fault, FAULTS[fault].few, seed) for seed in range(5)):
        if cell.skipped:
            pytest.skip(cell.skipped)
        if cell.problems:
            return
    pytest.fail("nothing was seen")
