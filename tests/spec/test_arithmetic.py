"""A conformance vector covers every arithmetic step of the second decoder.

These tests check a part of the steps, and ``python -m support.arithmetic_changes`` all of them.
"""

from __future__ import annotations

import zlib

import pytest

from support.arithmetic_changes import ARITHMETIC, all_changes, catching_vector, documented_changes, readings
from support.second_decoder import FOLDER

SHARE = 24
"""One in this many changes is tested."""


def test_mutations_are_found_in_every_module_that_computes() -> None:
    changes = all_changes()
    assert {change.path.relative_to(FOLDER).with_suffix("").parts[0] for change in changes} == set(ARITHMETIC)
    assert len(changes) > 1500
    assert set(documented_changes()) <= {change.name for change in changes}, "the list contains a change that no longer exists"


@pytest.mark.scenario
def test_a_share_of_the_mutations_is_caught_by_a_vector_or_listed_with_a_reason() -> None:
    chosen = [
        change for change in all_changes() if zlib.crc32(change.name.encode()) % SHARE == 0 and change.name not in documented_changes()
    ]
    survivors = [change.name for change in chosen if catching_vector(change) is None]
    assert not survivors
    assert all(reading.agrees() for reading in readings()[:50]), "a change was not reverted after it was tried"
