"""The conformance vectors of tokens that no query may attend to."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from spec.generate.invalid_vectors import GROUP, add
from spec.generate.valid_vectors import add as add_valid
from support.file_parts import changed, drop, edit, file_of, random_side

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.parts import Parts

FEATURE = "hidden-tokens"
DATA = f"ignorable.{FEATURE}"


def add_all() -> None:
    start, tokens = 3, random_side(GROUP, batch=2).tokens
    stop = start + tokens
    for name, shows, records in (
        ("of-one-sequence", "the first token of the second sequence is hidden", [(1, start, start + 1)]),
        ("of-each-sequence", "each sequence hides other tokens", [(0, start, start + 2), (1, stop - 1, stop)]),
        ("in-two-stretches", "a sequence hides its first and its last token", [(0, start, start + 1), (0, stop - 1, stop)]),
        ("of-all-tokens", "a sequence hides all its tokens", [(1, start, stop)]),
    ):
        add_valid(f"hidden-tokens-{name}", shows, lambda of=records: file_with(words(*of)), "container-53")

    def broken(name: str, rule: str, shows: str, *changes: Callable[[Parts], Any]) -> None:
        make = lambda: changed(file_with(words((0, start, start + 1), (1, start, start + 2))), *changes)  # noqa: E731
        add(f"hidden-tokens-{name}", rule, "InvalidHeader", shows, make)

    def of(name: str, rule: str, shows: str, *records: tuple[int, int, int]) -> None:
        broken(name, rule, shows, edit(DATA, words(*records)))

    broken("without-data", "container-49", "the feature is named, and has no entry", drop(DATA))
    broken("without-the-name", "container-49", "the feature has an entry, and is not named", edit("required", []))
    broken("of-none", "container-50", "no record", edit(DATA, b""))
    broken("of-39-bytes", "container-50", "the last record lacks a byte", edit(DATA, words((0, start, stop), (1, start, stop))[:-1]))
    of("of-a-third-sequence", "container-51", "a sequence that the file does not have", (2, start, stop))
    of("of-a-sequence-of-32-bits", "container-51", "the largest number of a sequence", (2**32 - 1, start, stop))
    shows = "no layer has sides, so there is no sequence"
    add("hidden-tokens-of-nothing", "container-51", "InvalidHeader", shows, lambda: named(file_of((None, None)), words((0, 0, 0))))
    of("before-the-range", "container-52", "a stretch begins before the file does", (0, start - 1, start + 1))
    of("after-the-range", "container-52", "a stretch ends after the file does", (0, start, stop + 1))
    of("of-no-token", "container-52", "a stretch without tokens", (0, start + 1, start + 1))
    of("turned", "container-52", "a stretch that ends before it begins", (0, start + 2, start + 1))
    of("of-64-bits", "container-52", "the largest position", (0, start, 2**64 - 1))
    of("sequences-out-of-order", "container-53", "sequences that do not ascend", (1, start, start + 1), (0, start, start + 1))
    of("out-of-order", "container-53", "stretches that do not ascend", (0, stop - 1, stop), (0, start, start + 1))
    of("next-to-each-other", "container-53", "two stretches without a token between them", (0, start, start + 1), (0, start + 1, start + 2))
    of("twice", "container-53", "a stretch that occurs twice", (0, start, start + 1), (0, start, start + 1))


def file_with(data: bytes) -> bytes:
    """A file of two sequences from position 3 on with ``data`` of the feature."""
    return named(file_of((random_side(GROUP, batch=2), None)), data)


def named(file: bytes, data: bytes) -> bytes:
    return changed(file, edit("required", [FEATURE]), edit("ignorable", {FEATURE: data}))


def words(*records: tuple[int, int, int]) -> bytes:
    """Sequences with their first positions and ends as the data of the feature."""
    return b"".join(struct.pack("<IQQ", *record) for record in records)
