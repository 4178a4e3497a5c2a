"""What is new in a header, found by a walk over its msgpack that builds no objects (spec/container.md, Header tensor).

A header of a later version may hold anything: other types, other limits, bytes that this version calls damage. The walk looks
only for ``format``, ``required`` and the ids of ``codecs``, and goes as far as the bytes do.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

_INTEGER, _STRING, _ARRAY, _MAP, _OTHER = range(5)

_OPENING = re.compile(rb"[\x81-\x8f\x91-\x9f]+")
_SHORT = re.compile(rb"[\x00-\xa0\xc0-\xc3\xe0-\xff]+")
"""Containers of at least one entry whose head is one byte, and all values whose head is one byte and has nothing but values after it."""
_ADDED = bytes(2 * (byte & 15) if 0x80 <= byte < 0x90 else byte & 15 if 0x90 <= byte < 0xA0 else 0 for byte in range(256))
"""The values that follow a head of one byte."""

_SIZED = {
    0xC4: (_OTHER, 1), 0xC5: (_OTHER, 2), 0xC6: (_OTHER, 4),
    0xD9: (_STRING, 1), 0xDA: (_STRING, 2), 0xDB: (_STRING, 4),
    0xDC: (_ARRAY, 2), 0xDD: (_ARRAY, 4), 0xDE: (_MAP, 2), 0xDF: (_MAP, 4),
}  # fmt: skip
"""Forms with a length: what they are, and the bytes of the length."""
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
"""Extension types with a length: its bytes. The type takes another byte."""
_INTEGERS = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED = {0xCA: 4, 0xCB: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
"""Floats and extension types of a fixed length: the bytes after the first one."""


class News(NamedTuple):
    """The ``format`` of a header (None: it has none that is an integer), its first unknown feature, and its first unknown codec."""

    format: int | None
    feature: str | None
    codec: str | None


class _Ended(Exception):
    """The bytes end within a value."""


def news(data: bytes, features: Collection[str], codecs: Collection[str]) -> News:
    """What of the header ``data`` a reader that knows these ``features`` and ``codecs`` does not know. Takes time linear in its bytes."""
    walk = _Walk(data)
    found: dict[str, int | str | None] = {}
    try:
        kind, count = walk.value()
        for _ in range(count if kind == _MAP else 0):
            name = walk.string()
            if name in found or name not in ("format", "required", "codecs"):
                walk.skip(1)
                continue
            found[name] = None
            kind, size = walk.value()
            if name == "format" and kind == _INTEGER:
                found[name] = size
            elif name != "format" and kind == _ARRAY:
                for _ in range(size):
                    entry = walk.string() if name == "required" else walk.entry("id")
                    if found[name] is None and entry is not None and entry not in (features if name == "required" else codecs):
                        found[name] = entry
            else:
                walk.leave(kind, size)
    except _Ended:
        pass
    version, feature, codec = found.get("format"), found.get("required"), found.get("codecs")
    return News(
        version if isinstance(version, int) else None,
        feature if isinstance(feature, str) else None,
        codec if isinstance(codec, str) else None,
    )


class _Walk:
    """A place in msgpack. Raises ``_Ended`` where the bytes end within what is asked for."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def value(self) -> tuple[int, int]:
        """Enter the next value: its kind, and an integer's value, a string's bytes or a container's entries."""
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
        """Skip what is left of a value that was entered."""
        if kind in (_STRING, _OTHER):
            self._take(size)
        elif kind != _INTEGER:
            self.skip(size if kind == _ARRAY else 2 * size)

    def skip(self, values: int) -> None:
        """Skip so many values, with all that is in them: without recursion, which the bytes could make as deep as they like."""
        # Regular expressions and sums take many bytes a step. An opening container leaves at least as many values as before it;
        # of short values, so many bytes end at most so many.
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
        """Skip the heads of one byte that follow, up to ``end``: how many more values are now to be skipped."""
        found = values.match(self._data, self._at, end)
        if found is None:
            return 0
        self._at = found.end()
        return sum(found[0].translate(_ADDED)) - len(found[0])

    def string(self) -> str | None:
        """The next value where it is a string of any bytes, else None; it is skipped."""
        kind, size = self.value()
        if kind == _STRING:
            return self._take(size).decode("utf-8", "backslashreplace")
        self.leave(kind, size)
        return None

    def entry(self, key: str) -> str | None:
        """The string that the next value, a map, has for ``key``, else None; the map is skipped."""
        kind, count = self.value()
        if kind != _MAP:
            self.leave(kind, count)
            return None
        found = None
        for _ in range(count):
            if self.string() == key and found is None:
                found = self.string()
            else:
                self.skip(1)
        return found

    def _take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        if len(taken) < size:
            raise _Ended
        self._at += size
        return taken
