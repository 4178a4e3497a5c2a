"""Every cell of tests/support/store_matrix at a small size. The matrix must detect broken guarantees."""

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
from kvpack.store.entry_kind import EntryKind
from support.store_matrix.matrix import FAULTS, KINDS, run_cell

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("redis")

pytestmark = pytest.mark.scenario


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.getLogger("kvpack.store").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("kvpack.store").setLevel(logging.NOTSET)
    torch.set_num_threads(threads)


# Every kind and every fault, but every second pair of them: ``make store-matrix`` runs all.
CELLS = [(kind, fault) for row, kind in enumerate(KINDS) for column, fault in enumerate(FAULTS) if (row + column) % 2 == 0]


@pytest.mark.parametrize(("kind", "fault"), CELLS)
def test_guarantees_hold(kind: str, fault: str) -> None:
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


def _write_in_place(path: str, pieces: Any, **options: Any) -> int:
    return _write_slowly(path, path, pieces, **options)


def _write_with_one_name(path: str, pieces: Any, *, unfinished: str, **options: Any) -> int:
    """Write with a fault: all writers of an entry use the same name for the unfinished file."""
    return _write_slowly(path, os.path.join(unfinished, os.path.basename(path)), pieces, **options)


def _write_slowly(path: str, target: str, pieces: Any, *, complete: Any = None, **_: Any) -> int:
    with open(target, "wb", buffering=0) as file:
        for piece in pieces:
            file.write(piece)
            time.sleep(0.0005)
        if complete:
            complete(file.fileno())
    os.replace(target, path)
    return 0


def _remove(path: str, *, old: bool) -> bool:
    os.unlink(path)
    return True


def _without_tenant(self: kvpack.Identity) -> bytes:
    return hashlib.sha256(repr(dataclasses.replace(self, tenant="")).encode()).digest()


MUTANTS: dict[str, tuple[str, str, Any]] = {
    "in place": ("kill", "kvpack.store.directory.write_file", _write_in_place),
    "one name for all writers": ("kill", "kvpack.store.directory.write_file", _write_with_one_name),
    "errors are raised": ("errno", "kvpack.store.counters.Counters.fault", _raise),
    "no sync of folders": ("power loss", "kvpack.file.atomic.sync_folder", lambda folder: None),
    "exhausted memory raises an error": ("memory limit", "kvpack.store.counters.Counters.fault", _raise),
    "what is there is right": ("two users", "kvpack.store.directory.probe_kind", lambda *_: EntryKind.READABLE),
    "no locks": ("PID namespaces", "kvpack.store.eviction.remove_abandoned", _remove),
    "no tenant in the key": ("isolation", "kvpack.identity.identity.Identity.digest", property(_without_tenant)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_violated_guarantees_are_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, name, put = MUTANTS[mutant]
    monkeypatch.setattr(name, put)
    # A run of few cases may miss what depends on the moment.
    for cell in (run_cell("plain", fault, FAULTS[fault].few, seed) for seed in range(10)):
        if cell.skipped:
            pytest.skip(cell.skipped)
        if cell.problems:
            return
    pytest.fail("nothing was seen")
