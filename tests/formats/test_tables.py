"""Tests of the library's cache for tables that headers request."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from kvpack.formats import angle, group, octahedral, polar, quaternion, scalar, tables
from kvpack.formats.rotation import Rotation

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tables._lock:
        tables._cached.clear()
        tables._cached_bytes = 0
    yield
    assert tables._cached_bytes == sum(table.nbytes for table in tables._cached.values())


def kept_bytes() -> int:
    return sum(table.nbytes for table in tables._cached.values())


def test_tables_are_cached_within_a_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header may contain any seed, and every seed has its own matrix."""
    monkeypatch.setattr(tables, "MAX_CACHED_BYTES", 2**20)
    x = torch.zeros(1, 1, 1, 128)
    for seed in range(40):
        Rotation("signed-hadamard", 128, seed).inverse(x)
        assert kept_bytes() <= 2**20
    assert kept_bytes() == 2**20


def test_the_least_recently_used_table_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    @tables.cache_per_device
    def numbers(count: int) -> torch.Tensor:
        made.append(count)
        return torch.arange(count)

    monkeypatch.setattr(tables, "MAX_CACHED_BYTES", 8 * 25)
    first = numbers(10, "cpu")
    assert numbers(9, torch.device("cpu")).tolist() == list(range(9))
    assert numbers(10, "cpu") is first
    numbers(8, "cpu")
    assert numbers(10, "cpu") is first, "the first table, which was used last, was evicted"
    numbers(9, "cpu")
    assert made == [10, 9, 8, 9]
    assert len(numbers(1000, "cpu")) == 1000, "a table above the limit was not built"
    assert kept_bytes() == 0


def test_threads_share_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_CACHED_BYTES", 4000)

    @tables.cache_per_device
    def numbers(count: int) -> torch.Tensor:
        return torch.arange(count)

    wrong: list[int] = []

    def look_up(start: int) -> None:
        wrong.extend(n for n in range(start, start + 300) if len(numbers(n % 90, "cpu")) != n % 90)

    threads = [threading.Thread(target=look_up, args=(17 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert kept_bytes() <= 4000


@pytest.mark.parametrize("module", [angle, group, octahedral, polar, quaternion, scalar], ids=lambda module: module.__name__.split(".")[-1])
def test_cached_header_packings_are_limited(module: object) -> None:
    assert module._packings.cache_info().maxsize == tables.MAX_CACHED_TABLES  # type: ignore[attr-defined]
