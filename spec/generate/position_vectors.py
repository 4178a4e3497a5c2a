"""The conformance vectors of layers whose positions differ from the range of their file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec.generate.invalid_vectors import GROUP, RAW, add
from spec.generate.valid_vectors import add as add_valid
from support.file_parts import changed, drop, edit, file_of, random_side

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.cache.side import Side
    from support.parts import Parts

FEATURE = "layer-positions"
DATA = f"ignorable.{FEATURE}"


def add_all() -> None:
    sides = [(random_side(GROUP, seed=str(number)), random_side(RAW, seed=str(number))) for number in range(2)]
    alone, empty = (random_side(GROUP), None), (random_side(GROUP, (), 0), None)
    for name, shows, layers, skipped in (
        ("all-layers", "all layers have dropped their oldest tokens", sides, (5, 5)),
        ("some-layers", "of four layers two have dropped tokens, and one has no sides", [*sides, (None, None), alone], (0, 1, 0, 4)),
        ("a-layer-without-tokens", "a layer has dropped all its tokens", [alone, empty], (0, 3)),
        ("the-largest-start", "a layer starts at the largest position", [alone, alone], (0, 2**40 - 4)),
    ):
        add_valid(f"layer-positions-of-{name}", shows, lambda of=layers, by=skipped: file_of(*of, skipped=by), "container-36")
    add_invalid(alone)


def add_invalid(side: tuple[Side | None, Side | None]) -> None:
    def broken(name: str, rule: str, shows: str, *changes: Callable[[Parts], Any], error: str = "InvalidHeader") -> None:
        """A file of three layers, the second without sides and the third with tokens dropped, after ``changes``."""
        make = lambda: changed(file_of(side, (None, None), side, skipped=(0, 0, 5)), *changes)  # noqa: E731
        add(f"layer-positions-{name}", rule, error, shows, make)

    broken("named-twice", "container-34", "a required feature is named twice", edit("required", [FEATURE, FEATURE]))
    broken("without-data", "container-35", "the feature is named, and has no data", drop(DATA))
    broken("without-the-name", "container-35", "the feature has data, and is not named", edit("required", []))
    for name, starts, shows in (
        ("of-two-layers", (3, 3), "starts for two of three layers"),
        ("of-four-layers", (3, 3, 8, 8), "starts for four layers, and there are three"),
        ("of-no-layers", (), "no starts, and there are three layers"),
    ):
        broken(name, "container-36", shows, edit(DATA, words(*starts)))
    broken("of-23-bytes", "container-36", "the last start has seven bytes", edit(DATA, words(3, 3, 8)[:-1]))
    broken("before-the-range", "container-37", "a layer starts before the file does", edit(DATA, words(2, 3, 8)))

    shows = "a layer without sides starts elsewhere"
    broken("of-a-layer-without-sides", "container-38", shows, edit(DATA, words(3, 8, 8)))
    broken("for-nothing", "container-39", "every layer starts where the file does", edit(DATA, words(3, 3, 3)))
    for name, start in (("limit-of-a-layers-start", 2**40), ("limit-of-a-layers-start-of-64-bits", 2**64 - 1)):
        broken(name, "container-29", f"a layer starts at {start}", edit(DATA, words(3, 3, start)), error="LimitExceeded")
    shows = "no layers, and data of no bytes"
    add("layer-positions-of-nothing", "container-39", "InvalidHeader", shows, without_layers)


def without_layers() -> bytes:
    return changed(file_of(), edit("required", [FEATURE]), edit("ignorable", {FEATURE: b""}))


def words(*numbers: int) -> bytes:
    """The numbers as the data of the feature."""
    return b"".join(number.to_bytes(8, "little") for number in numbers)
