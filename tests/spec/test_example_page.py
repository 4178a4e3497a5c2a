"""spec/example.md, which explains a file byte by byte, matches that file's bytes and values."""

from __future__ import annotations

import re
import struct
from typing import Any

import msgpack
import numpy

from support.numbered_rules import SPEC

TEXT = (SPEC / "example.md").read_text(encoding="utf-8")
FILE = SPEC / re.findall(r"\]\((vectors/[^)]+\.kvpack)\)", TEXT)[0]
ROWS = re.findall(r"^\| (\d+) \| `([0-9a-f *]+)` \| (.+) \|$", TEXT, re.MULTILINE)


def row_bytes(text: str) -> bytes:
    """Return the bytes in a row of the table, which lists all of them, or one byte and a repetition count."""
    byte, _, count = text.partition(" * ")
    return bytes.fromhex(byte) * int(count or 1)


def unpacked(data: bytes) -> list[Any]:
    """Return the msgpack values in ``data``."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    return list(unpacker)


def test_rows_cover_the_file() -> None:
    at = 0
    for offset, text, _ in ROWS:
        assert int(offset) == at
        at += len(row_bytes(text))
    assert b"".join(row_bytes(text) for _, text, _ in ROWS) == FILE.read_bytes()


def test_rows_describe_their_bytes() -> None:
    seen = 0
    for _, text, meaning in ROWS:
        data = row_bytes(text)
        for quoted in re.findall(r"`(\{?,?\"[^`]+)`", meaning):
            assert quoted.encode() == data
            seen += 1
        number = re.search(r": 0x([0-9a-f]{4}), of 9 bits `([01]{9})`: channels 2, 1 and 0 have the codes (\d), (\d) and (\d)$", meaning)
        if number:
            word = int(number[1], 16)
            assert (word, f"{word:09b}") == (int.from_bytes(data, "little"), number[2])
            assert [word >> 6, word >> 3 & 7, word & 7] == [int(number[i]) for i in (3, 4, 5)]
            seen += 1
        for letter, pattern in (("e", r"scale (\S+), center (\S+)$"), ("f", r"of both heads: (\S+)$")):
            found = re.search(pattern, meaning)
            if found:
                stored = struct.unpack(f"<{len(found.groups())}{letter}", data)
                assert [f"{value:.9g}" for value in stored] == list(found.groups())
                seen += 1
        pair = re.fullmatch(r"`(\w+)`: `?(\w+)`?", meaning)
        if pair and pair[2] != "nil":
            assert [str(value) for value in unpacked(data)] == list(pair.groups())
            seen += 1
    assert seen == 10 + 4 + 4 + 2 + 19


def test_values_equal_those_of_the_vector() -> None:
    rows = re.findall(r"^\| (\d) \| (\d) \| (.+) \|$", TEXT, re.MULTILINE)
    values = [float(value) for _, _, row in rows for value in row.split()]
    expected = numpy.fromfile(FILE.with_suffix(".f32"), "<f4")
    assert numpy.array_equal(numpy.array(values, numpy.float32), expected)
