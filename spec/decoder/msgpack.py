"""The msgpack profile (spec/container.md, msgpack profile)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .limits import MAX_BINARY_BYTES, MAX_DEPTH, MAX_ENTRIES, MAX_NAMES, MAX_STRING_BYTES
from .refusal import refuse, require

OTHER_TYPES = {0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
"""Number of bytes after the first byte, for types that later versions may use."""
EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
"""Number of bytes of the length, by first byte, for extension types with a length."""


@dataclass(frozen=True)
class UnknownValue:
    """A value of a type that does not occur in this version."""

    first: int
    data: bytes


class Msgpack:
    """Parser of one msgpack value. ``breach`` describes the first part that is not canonical and its position.

    A later version may write types that this one does not know, so parsing continues after a breach. Numbers and lengths that are not in
    their shortest form are breaches, so values need not be encoded again.
    """

    RULE = "container.md, msgpack profile"
    # First byte of a form, by type: (first byte, bytes of the number that follows), shortest first.
    INTEGERS = ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8))
    STRINGS = ((0xD9, 1), (0xDA, 2), (0xDB, 4))
    BINARIES = ((0xC4, 1), (0xC5, 2), (0xC6, 4))
    ARRAYS = ((0xDC, 2), (0xDD, 4))
    MAPS = ((0xDE, 2), (0xDF, 4))

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.breach = data, 0, ""

    def expect(self, holds: bool, detail: str) -> None:
        if not holds and not self.breach:
            self.breach = detail

    def take(self, count: int) -> bytes:
        require(self.at + count <= len(self.data), self.RULE, f"the header ends within the value at byte {self.at}")
        self.at += count
        return self.data[self.at - count : self.at]

    def read_number(self, first: int, forms: tuple[tuple[int, int], ...], below: int) -> int | None:
        """Return the number after ``first`` if that is one of ``forms``, otherwise None.

        ``below`` is the smallest number that has no shorter form.
        """
        for form, count in forms:
            if first == form:
                value = int.from_bytes(self.take(count), "big")
                self.expect(value >= below, f"the number at byte {self.at - count} is not in its shortest form")
                return value
            below = 256**count
        return None

    def read_value(self, depth: int = 0) -> Any:
        require(depth <= MAX_DEPTH, self.RULE, f"the value at byte {self.at} is nested too deep")
        first = self.take(1)[0]
        if first < 0x80:
            return first
        if first == 0xC0:
            return None
        if (integer := self.read_number(first, self.INTEGERS, 0x80)) is not None:
            return integer
        length = first & 0x1F if first & 0xE0 == 0xA0 else self.read_number(first, self.STRINGS, 0x20)
        if length is not None:
            require(length <= MAX_STRING_BYTES, "container.md, Limits", f"a string has {length} bytes")
            try:
                return self.take(length).decode("utf-8")
            except UnicodeDecodeError:
                refuse(self.RULE, f"the string before byte {self.at} is not UTF-8")
        length = self.read_number(first, self.BINARIES, 0)
        if length is not None:
            require(length <= MAX_BINARY_BYTES, "container.md, Limits", f"a binary value has {length} bytes")
            return self.take(length)
        length = first & 0x0F if first & 0xF0 == 0x90 else self.read_number(first, self.ARRAYS, 0x10)
        if length is not None:
            require(length <= MAX_ENTRIES, "container.md, Limits", f"an array has {length} entries")
            return [self.read_value(depth + 1) for _ in range(length)]
        length = first & 0x0F if first & 0xF0 == 0x80 else self.read_number(first, self.MAPS, 0x10)
        if length is not None:
            require(length <= MAX_NAMES, "container.md, Limits", f"a map has {length} entries")
            return self.read_map(length, depth + 1)
        self.expect(False, f"the type of first byte 0x{first:02x} does not occur")
        length = int.from_bytes(self.take(EXTENSIONS[first]), "big") + 1 if first in EXTENSIONS else OTHER_TYPES.get(first, 0)
        return UnknownValue(first, self.take(length))

    def read_map(self, length: int, depth: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for _ in range(length):
            key = self.read_value(depth)
            self.expect(isinstance(key, str), f"a key of a map is {key!r}, expected a string")
            self.expect(not isinstance(key, str) or key not in entries, f"the key {key!r} occurs twice in a map")
            entries[key if isinstance(key, str) else repr(key)] = self.read_value(depth)
        return entries
