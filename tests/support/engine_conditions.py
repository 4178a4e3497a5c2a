"""Test an engine's adapter while its folder is in an adverse condition. Conditions are a read-only or full disk, other evicting processes,
a clock that was set back, and files of killed processes.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import time
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvpack import Identity, PageStore
from kvpack.file.atomic import TEMPORARY_PREFIX
from kvpack.pages import PageBuffer, PageGeometry
from kvpack.store import page_store
from support import byte_sized_disk
from support.faulty_os import FaultyOs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import pytest

CHANGING_CALLS = ("mkdir", "unlink", "replace", "rename", "utime", "ftruncate", "pwrite", "writev")


class Engine(Protocol):
    """An adapter that is driven by its engine's own calls. Chunks 0 to 3 have different values."""

    def store(self, chunks: Sequence[int]) -> list[bool]: ...

    def found(self, chunks: Sequence[int]) -> list[bool]: ...

    def load(self, chunks: Sequence[int]) -> list[bool]:
        """Load chunks and return, for each of them, whether it was loaded.

        Fails if a chunk has wrong values, or if slots of other chunks change.
        """

    def counters(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class ReadOnlyOs(FaultyOs):
    """The module ``os`` on a file system that is mounted read-only, to which not even root can write."""

    def faulty(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(*args, **kwargs)

        return refuse if name in (*CHANGING_CALLS, "open") else real


def read_only(opened: Callable[..., Engine], folder: Path, patch: pytest.MonkeyPatch) -> None:
    engine = opened()
    assert engine.store([0]) == [True]
    engine.close()
    for kept in (folder, folder / "none yet"):
        with patch.context() as mounted:
            ReadOnlyOs((), 0).install(mounted)
            engine = opened(kept, max_bytes=10**8)
            there = [kept == folder, False]
            assert engine.found([0, 1]) == engine.load([0, 1]) == there
            assert engine.store([0, 1]) == there
            assert engine.load([0, 1]) == there
            assert "put EROFS" in engine.counters()["faults"]
            engine.close()
    engine = opened()
    assert engine.store([1]) == [True]
    assert engine.load([0, 1]) == [True, True]
    engine.close()


def full_disk(opened: Callable[..., Engine], folder: Path, patch: pytest.MonkeyPatch) -> None:
    engine = opened()
    assert engine.store([0]) == [True]
    with patch.context() as full:
        FaultyOs(("writev",), 1, errno.ENOSPC, sticky=True).install(full)
        assert engine.store([0, 1, 2]) == [True, False, False]
        assert engine.load([0, 1]) == [True, False]
        assert set(engine.counters()["faults"]) == {"put ENOSPC"}
    assert not list(folder.rglob("*.tmp"))
    engine.close()
    # These chunks were missing when they were looked up before.
    engine = opened()
    assert engine.store([1, 2]) == [True, True]
    assert engine.load([0, 1, 2]) == [True] * 3
    engine.close()


def clock_set_back(opened: Callable[..., Engine], folder: Path, patch: pytest.MonkeyPatch) -> None:
    byte_sized_disk.install(patch)
    size = _entry_bytes(opened, folder)
    engine = opened(folder / "other", max_bytes=2 * size + size // 2)
    assert engine.store([0, 1]) == [True, True]
    for hours in (0.5, 1, 48):
        with patch.context() as earlier:
            earlier.setattr(
                page_store.time, "time_ns", lambda hours=hours: time.clock_gettime_ns(time.CLOCK_REALTIME) - int(hours * 3600) * 10**9
            )
            for chunk in (2, 3):
                # A chunk that was just stored is evicted only to make room for the next one.
                assert engine.store([chunk]) == [True]
                assert engine.found([chunk]) == engine.load([chunk]) == [True]
    assert _bytes_of(folder / "other") <= 2 * size + size // 2
    assert engine.counters()["faults"] == {}
    assert engine.store([0]) == [True]
    assert engine.load([0]) == [True]
    engine.close()


def concurrent_eviction(opened: Callable[..., Engine], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Store and load while another process, which has filled the folder, stores too and evicts."""
    byte_sized_disk.install(patch)
    size = _entry_bytes(opened, folder)
    budget = 6 * size
    fork = multiprocessing.get_context("fork")
    allowed, done = fork.Semaphore(20), fork.Semaphore(0)
    other = fork.Process(target=_fill, args=(folder / "other", budget, size, allowed, done), daemon=True)
    other.start()
    engine = opened(folder / "other", max_bytes=budget)
    _acquire(done, 20)
    for _ in range(10):
        for _ in range(6):
            allowed.release()
        engine.store(range(4))
        engine.load(range(4))
        _acquire(done, 6)
        # Now the other process waits, so that nothing is evicted.
        assert engine.store(range(4)) == engine.load(range(4)) == [True] * 4
    other.terminate()
    other.join()
    assert _bytes_of(folder / "other") <= budget
    assert engine.counters()["damaged_entries"] == 0
    assert engine.counters()["faults"] == {}
    engine.close()


def killed_writers(opened: Callable[..., Engine], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Check folders that killed processes have left: with half an entry, with a complete but unnamed one, or at any moment."""
    for operation, death in (("ftruncate", "after"), ("writev", "after"), ("replace", "before"), ("replace", "after")):
        kept = folder / f"{operation} {death}"
        process = multiprocessing.get_context("fork").Process(target=_store_and_die, args=(opened, kept, patch, operation, death))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        named = (operation, death) == ("replace", "after")
        assert len([*kept.rglob(f"{TEMPORARY_PREFIX}*")]) == (not named)
        engine = opened(kept, max_bytes=10**8)
        assert engine.found([0, 1]) == engine.load([0, 1]) == [named, False]
        assert engine.store([0, 1]) == [True, True]
        assert engine.load([0, 1]) == [True, True]
        assert engine.counters()["faults"] == {}
        assert engine.counters()["damaged_entries"] == 0
        engine.close()
        assert not [*kept.rglob(f"{TEMPORARY_PREFIX}*")]


def _store_and_die(opened: Callable[..., Engine], folder: Path, patch: pytest.MonkeyPatch, operation: str, death: str) -> None:
    engine = opened(folder, max_bytes=10**8)
    FaultyOs((operation,), 1, death=death).install(patch)
    engine.store([0])


def _entry_bytes(opened: Callable[..., Engine], folder: Path) -> int:
    """Return the size in bytes of one chunk's entry."""
    engine = opened(folder / "measured")
    assert engine.store([0]) == [True]
    engine.close()
    return _bytes_of(folder / "measured")


def _bytes_of(folder: Path) -> int:
    """Return the total size in bytes of all entries. Their folders are named by their first two digits."""
    found = 0
    for path in folder.glob("?/?/*"):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


def _acquire(semaphore: Any, times: int) -> None:
    for _ in range(times):
        assert semaphore.acquire(timeout=60)


def _fill(folder: Path, budget: int, size: int, allowed: Any, done: Any) -> None:
    """Store pages of about ``size`` bytes for another engine until ``done``, whenever ``allowed`` is set."""
    geometry = PageGeometry(1, 1, max(1, size // 256), 64, 64)
    values = torch.zeros(1, 1, geometry.tokens, 64, dtype=torch.bfloat16, device="cpu")
    pages = PageBuffer(geometry, [values], [values])
    with PageStore(folder, Identity("other", "raw"), geometry, max_bytes=budget) as store:
        for number in count():
            allowed.acquire()
            store.put([number.to_bytes(8, "little")], pages, [0])
            done.release()


CONDITIONS = (read_only, full_disk, clock_set_back, concurrent_eviction, killed_writers)
"""Functions that put an adapter into each condition.

Their arguments are ``opened(folder, **options)``, which opens an adapter, the default folder, and a monkeypatch.
"""
