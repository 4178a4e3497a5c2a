"""Find unknown features of a header by walking over its msgpack without building objects (spec/container.md, Header tensor).

A header of a later version may contain anything: other types, other limits, bytes that this version considers damaged. The walk looks only
for ``format``, ``required`` and the ids of ``codecs``, and stops where the bytes end.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

_INTEGER, _STRING, _ARRAY, _MAP, _OTHER = range(5)

_OPENING = re.compile(rb"[\x81-\x8f\x91-\x9f]+")
_SHORT = re.compile(rb"[\x00-\xa0\xc0-\xc3\xe0-\xff]+")
"""Values with a one-byte head that only values follow: containers (for one pattern, of at least one entry) and plain values."""
_ADDED = bytes(2 * (byte & 15) if 0x80 <= byte < 0x90 else byte & 15 if 0x90 <= byte < 0xA0 else 0 for byte in range(256))
"""The number of values that follow a head of one byte."""

_SIZED = {
    0xC4: (_OTHER, 1), 0xC5: (_OTHER, 2), 0xC6: (_OTHER, 4),
    0xD9: (_STRING, 1), 0xDA: (_STRING, 2), 0xDB: (_STRING, 4),
    0xDC: (_ARRAY, 2), 0xDD: (_ARRAY, 4), 0xDE: (_MAP, 2), 0xDF: (_MAP, 4),
}  # fmt: skip
"""Forms with a length: their kind, and the bytes of the length."""
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
"""Extension types with a length: the bytes of the length. The type takes one byte more."""
_INTEGERS = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED = {0xCA: 4, 0xCB: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
"""Floats and extension types of a fixed length: the bytes after the first one."""


class UnknownFeatures(NamedTuple):
    """The ``format`` of a header (None if it is not an integer), its first unknown feature, and its first unknown codec."""

    format: int | None
    feature: str | None
    codec: str | None


class _Ended(Exception):
    """The bytes end within a value."""


def unknown_features(data: bytes, features: Collection[str], codecs: Collection[str]) -> UnknownFeatures:
    """Return the features and codecs of the header ``data`` that a reader with ``features`` and ``codecs`` does not know.

    The walk takes linear time.
    """
    walk = _Walk(data)
    result: dict[str, int | str | None] = {}
    try:
        kind, count = walk.value()
        for _ in range(count if kind == _MAP else 0):
            name = walk.string()
            if name in result or name not in ("format", "required", "codecs"):
                walk.skip(1)
                continue
            result[name] = None
            kind, size = walk.value()
            if name == "format" and kind == _INTEGER:
                result[name] = size
            elif name != "format" and kind == _ARRAY:
                for _ in range(size):
                    entry = walk.string() if name == "required" else walk.entry("id")
                    if result[name] is None and entry is not None and entry not in (features if name == "required" else codecs):
                        result[name] = entry
            else:
                walk.leave(kind, size)
    except _Ended:
        pass
    version, feature, codec = result.get("format"), result.get("required"), result.get("codecs")
    return UnknownFeatures(
        version if isinstance(version, int) else None,
        feature if isinstance(feature, str) else None,
        codec if isinstance(codec, str) else None,
    )


class _Walk:
    """A position in msgpack. Methods raise ``_Ended`` when the bytes end inside the value that they read."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def value(self) -> tuple[int, int]:
        """Enter the next value; return its kind and the value of an integer, the bytes of a string or the number of entries of a container.
        """
        first = self._take(1)[0]
        if first < 0x80:
            return _INTEGER, first
        if first < 0xC0:
            return (_MAP, first & 15) if first < 0x90 else (_ARRAY, first & 15) if first < 0xA0 else (_STRING, first & 31)
        if first >= 0xE0:
            return _INTEGER, first - 256
        if first in _INTEGERS:
            return _INTEGER, int.from_bytes(self._take(_INTEGERS[first]), signed=first >= 0xD0)
        if first in _SIZED:
            kind, size = _SIZED[first]
            return kind, int.from_bytes(self._take(size))
        if first in _EXTENSIONS:
            return _OTHER, int.from_bytes(self._take(_EXTENSIONS[first])) + 1
        return _OTHER, _FIXED.get(first, 0)

    def leave(self, kind: int, size: int) -> None:
        """Skip the rest of a value that was entered."""
        if kind in (_STRING, _OTHER):
            self._take(size)
        elif kind != _INTEGER:
            self.skip(size if kind == _ARRAY else 2 * size)

    def skip(self, values: int) -> None:
        """Skip ``values`` values and their contents without recursion, because the bytes could nest to any depth."""
        # Regular expressions and sums handle many bytes per step. An opening container leaves at least as many values to skip
        # as before it, and n bytes of short values end at most n values.
        while values:
            values += self._short(_OPENING, len(self._data))
            values += self._short(_SHORT, self._at + values)
            if values:
                kind, size = self.value()
                values -= 1
                if kind in (_STRING, _OTHER):
                    self._take(size)
                elif kind != _INTEGER:
                    values += size if kind == _ARRAY else 2 * size

    def _short(self, values: re.Pattern[bytes], end: int) -> int:
        """Skip the one-byte heads that follow, up to ``end``; return how many more values are left to skip."""
        match = values.match(self._data, self._at, end)
        if match is None:
            return 0
        self._at = match.end()
        return sum(match[0].translate(_ADDED)) - len(match[0])

    def string(self) -> str | None:
        """Skip the next value; return it if it is a string, otherwise None."""
        kind, size = self.value()
        if kind == _STRING:
            return self._take(size).decode("utf-8", "backslashreplace")
        self.leave(kind, size)
        return None

    def entry(self, key: str) -> str | None:
        """Skip the next value, a map; return its first value for ``key`` if that is a string, or None."""
        kind, count = self.value()
        if kind != _MAP:
            self.leave(kind, count)
            return None
        found, seen = None, False
        for _ in range(count):
            if self.string() == key and not seen:
                found, seen = self.string(), True
            else:
                self.skip(1)
        return found

    def _take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        if len(taken) < size:
            raise _Ended
        self._at += size
        return taken
