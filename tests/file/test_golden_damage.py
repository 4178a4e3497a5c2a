"""Tests with damaged golden files, at evenly spaced bits and lengths. ``python -m support.golden_damage`` tests all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.golden_damage import FILES, accepted_flips, accepted_lengths, cache_fronts, is_refused, moved_tensors, zeroed_blocks

if TYPE_CHECKING:
    from pathlib import Path

SHARE = 251
"""One in this many bits and lengths is tested. The number is prime, so that all positions within bytes and words occur."""


def test_there_are_forty_files() -> None:
    assert len(FILES) >= 40


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_flipped_bits_and_truncations_are_refused(path: Path) -> None:
    data, first = path.read_bytes(), FILES.index(path)
    assert not is_refused(data)
    with cache_fronts():
        assert accepted_flips(data, range(first, 8 * len(data), SHARE)) == []
        assert accepted_lengths(data, range(first, len(data), SHARE)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_zeroed_blocks_and_moved_tensors_are_refused(path: Path) -> None:
    data = path.read_bytes()
    with cache_fronts():
        for damaged in (*zeroed_blocks(data), *moved_tensors(data)):
            assert is_refused(damaged)


def test_some_files_have_swappable_tensors() -> None:
    assert sum(any(True for _ in moved_tensors(path.read_bytes())) for path in FILES) >= 10
