"""The conformance vectors of position offsets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from spec.generate.invalid_vectors import GROUP, RAW, add
from spec.generate.valid_vectors import add as add_valid
from support.file_parts import changed, drop, edit, file_of, random_side

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.parts import Parts

FEATURE = "position-offsets"
DATA = f"ignorable.{FEATURE}"
START = 3
LARGEST = 2**40 - 1
"""MAX_TOKENS."""


def add_all() -> None:
    one = random_side(GROUP, seed="one"), random_side(RAW, seed="one")
    two = random_side(GROUP, batch=2), None
    assert one[0] is not None
    stop = START + one[0].tokens
    states = [{"conv.0": torch.ones(2, 3)}]
    for name, shows, layers, options in (
        ("after-an-image", "text goes on at an earlier position", [one], {"offsets": (-3,)}),
        ("of-two-sequences", "two sequences, whose offsets differ", [two, (None, None)], {"offsets": (-2, 4)}),
        ("after-dropped-tokens", "the range ends where the longest layer does", [one, one], {"skipped": (0, 2), "offsets": (-stop - 2,)}),
        ("of-zero", "text goes on where the range ends", [one], {"offsets": (0,)}),
        ("of-the-largest-position", "the next token is at the largest position", [one], {"offsets": (LARGEST - stop,)}),
        ("of-states-alone", "no layer has sides, and two sequences have states", [(None, None)], {"states": states, "offsets": (-3, 0)}),
        ("of-no-layers", "no layer says how many sequences there are", [], {"offsets": (1, 2, 3)}),
    ):
        add_valid(f"position-offsets-{name}", shows, lambda of=layers, by=options: file_of(*of, **by), "container-57")
    add_invalid(one, two, stop)


def add_invalid(one: Any, two: Any, stop: int) -> None:
    def broken(name: str, rule: str, shows: str, *changes: Callable[[Parts], Any], error: str = "InvalidHeader") -> None:
        """A file of one sequence after ``changes``."""
        add(f"position-offsets-{name}", rule, error, shows, lambda: changed(file_of(one, offsets=(-3,)), *changes))

    broken("without-data", "container-56", "the feature is named, and has no data", drop(DATA))
    broken("without-the-name", "container-56", "the feature has data, and is not named", edit("required", []))
    broken("of-no-bytes", "container-57", "the feature has data of no bytes", edit(DATA, b""))
    broken("of-seven-bytes", "container-57", "the offset has seven bytes", edit(DATA, words(-3)[:-1]))
    broken("of-nine-bytes", "container-57", "a byte follows the offset", edit(DATA, words(-3) + b"\0"))
    broken("of-another-sequence", "container-58", "offsets of two sequences, and a layer has one", edit(DATA, words(-3, -3)))
    broken("before-position-0", "container-59", "the next token is at position -1", edit(DATA, words(-stop - 1)))
    for name, offset in (("limit-of-a-position", LARGEST - stop + 1), ("limit-of-a-position-of-64-bits", 2**63 - 1)):
        broken(name, "container-29", f"the next token is at position {stop + offset}", edit(DATA, words(offset)), error="LimitExceeded")
    states = [{}, {"conv.0": torch.ones(1, 3)}]
    for name, shows, layers, kept in (
        ("of-a-second-layer", "the second layer has two sequences, and there is one offset", (one, two), ()),
        ("of-a-state", "offsets of two sequences, and a state has one", ((None, None), (None, None)), states),
    ):
        data = words(-3) if not kept else words(-3, -3)
        change = edit(DATA, data), edit("required", sorted([FEATURE, *(["layer-state"] if kept else [])]))
        made = lambda of=layers, by=kept, to=change: changed(file_of(*of, states=by), *to)  # noqa: E731
        add(f"position-offsets-{name}", "container-58", "InvalidHeader", shows, made)


def words(*offsets: int) -> bytes:
    """The offsets as the data of the feature."""
    return b"".join(offset.to_bytes(8, "little", signed=True) for offset in offsets)
