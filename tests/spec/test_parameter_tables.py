"""The parameter tables in spec/codecs/ match the declarations in formats/: names, order, types, and values."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kvpack.formats import CODECS

SPEC = Path(__file__).parents[2] / "spec" / "codecs"
TYPES = {"int": "integer", "str": "string", "bytes": "bytes", "Fields": "map"}


def rows_of(codec_id: str) -> list[tuple[str, str, str]]:
    """Return the name, the type and the permitted values of every parameter on a codec's page, as text."""
    page = (SPEC / f"{codec_id}.md").read_text(encoding="utf-8")
    table = re.search(r"^\| parameter \| type \| range \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert table is not None
    cells = [line.strip("| ").split(" | ", 2) for line in table[1].splitlines()]
    return [(name.strip("`"), type_name, text) for name, type_name, text in cells]


def range_in(text: str) -> tuple[int, int] | None:
    """Return the smallest and the largest integer that a text names, or None if they depend on other parameters."""
    match = re.match(r"(\d+) to (\d+)( - 1|\^64 - 1)?(?:; (\d+) when)?", text)
    if match is None:
        return None
    high = 2**64 - 1 if match[3] == "^64 - 1" else int(match[2])
    return min(int(match[1]), int(match[4] or match[1])), high


@pytest.mark.parametrize("codec_id", CODECS)
def test_the_table_lists_stored_parameters_in_order(codec_id: str) -> None:
    stored = [one for one in dataclasses.fields(CODECS[codec_id]) if one.metadata.get("stored", True)]  # type: ignore[arg-type]
    assert [(name, type_name) for name, type_name, _ in rows_of(codec_id)] == [(one.name, TYPES[str(one.type)]) for one in stored]


@pytest.mark.parametrize("codec_id", CODECS)
def test_the_table_lists_declared_values(codec_id: str) -> None:
    declared = {one.name: one.metadata for one in dataclasses.fields(CODECS[codec_id])}  # type: ignore[arg-type]
    compared = 0
    for name, type_name, text in rows_of(codec_id):
        values = declared[name]
        if "range" in values:
            assert range_in(text) == values["range"], (name, text)
        elif "known" in values:
            # Every word in the first clause is a value, and every value is a word somewhere in the cell.
            word = r"\d+" if type_name == "integer" else r"(?<=`)[^` ,]+(?=`)"
            known = {*map(str, values["known"])}
            assert {*re.findall(word, re.split("[;:]", text)[0])} <= known <= {*re.findall(word, text)}, (name, text)
        else:
            # What is neither an integer nor one of a few texts, or depends on another parameter, is checked by the codec itself.
            assert type_name in {"bytes", "map"} or (codec_id, name) in {("polar", "bits"), ("scalar", "bits_high")}, name
            continue
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1 to 8", (1, 8)), ("0 to 2^64 - 1", (0, 2**64 - 1)), ("1 to 8; 0 when `norm` is `fp32`", (0, 8)), ("`bits` + 1 to 8", None)],
)
def test_ranges_are_read(text: str, expected: tuple[int, int] | None) -> None:
    assert range_in(text) == expected
