"""The conformance vectors of metadata: all types and limits, and bytes of other forms, which hold none."""

from __future__ import annotations

import struct

from spec.generate.invalid_vectors import RAW
from spec.generate.valid_vectors import add
from support.file_parts import edit, one_side


def add_all() -> None:
    for name, shows, data in (
        (
            "of-all-types",
            "texts, one empty, integers and numbers at their limits, and names of one to four bytes a character",
            text("empty", "")
            + number("largest", 1.7976931348623157e308)
            + number("least", 5e-324)
            + integer("max", 2**63 - 1)
            + integer("min", -(2**63))
            + number("minus zero", -0.0)
            + text("\u00fc", "\u00fc\u20ac\U0001f600")
            + integer("\u20ac", 0)
            + integer("\U0001f600", -1),
        ),
        ("at-its-limits", "a name of 255 bytes and a text of 4,096", text("n" * 255, "t" * 4096)),
        ("of-256-entries", "as many entries as there may be", b"".join(integer(f"{at:03}", at) for at in range(256))),
        ("of-no-bytes", "the feature without an entry", b""),
    ):
        valid(name, shows, data)
    first = integer("a", 1)
    for name, shows, data in (
        ("of-257-entries", "more entries than there may be", b"".join(integer(f"{at:03}", at) for at in range(257))),
        ("cut-in-a-name", "ends within a name", first + b"\x05b"),
        ("cut-after-a-name", "ends before a type", first + b"\x01b"),
        ("cut-in-an-integer", "ends within an integer", first + integer("b", 1)[:-1]),
        ("cut-in-a-length", "ends within the length of a text", first + b"\x01b\x00\x01\x00"),
        ("cut-in-a-text", "ends within a text", first + text("b", "text")[:-1]),
        ("of-a-long-text", "a text of 4,097 bytes", first + text("b", "t" * 4097)),
        ("of-a-text-of-4-gib", "a text whose length is 4,294,967,295", first + b"\x01b\x00" + b"\xff" * 4),
        ("of-another-type", "a value of type 3", first + b"\x01b\x03" + bytes(8)),
        ("of-a-name-of-no-bytes", "a name without a character", integer("", 1)),
        ("out-of-order", "names that do not ascend", integer("b", 1) + first),
        ("named-twice", "a name that occurs twice", first + first),
        ("of-a-name-not-utf-8", "a name that is a surrogate", first + b"\x03\xed\xa0\x80\x01" + bytes(8)),
        ("of-a-text-not-utf-8", "a text with a byte that UTF-8 does not have", first + b"\x01b\x00\x01\x00\x00\x00\xff"),
        ("of-an-infinity", "a number that is infinite", first + number("b", float("inf"))),
        ("of-a-nan", "a number that is none", first + number("b", float("nan"))),
    ):
        valid(f"{name}-is-none", f"{shows}: there is no metadata", data)


def valid(name: str, shows: str, data: bytes) -> None:
    add(f"metadata-{name}", shows, lambda: one_side(RAW, edit("ignorable", {"metadata": data})), "container-40")


def text(name: str, value: str) -> bytes:
    stored = value.encode()
    return _named(name, b"\x00" + len(stored).to_bytes(4, "little") + stored)


def integer(name: str, value: int) -> bytes:
    return _named(name, b"\x01" + value.to_bytes(8, "little", signed=True))


def number(name: str, value: float) -> bytes:
    return _named(name, b"\x02" + struct.pack("<d", value))


def _named(name: str, value: bytes) -> bytes:
    stored = name.encode()
    return bytes([len(stored)]) + stored + value
