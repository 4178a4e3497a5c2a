"""Scans a header's msgpack for unknown features, without building objects (spec/container.md, Header tensor).

A newer header may contain anything: other types, other limits, or bytes that this version considers damaged. The scan looks only for
``format``, ``required`` and the ids of ``codecs``, and stops at the end of the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

_INTEGER, _STRING, _ARRAY, _MAP, _OTHER = range(5)

_OPENING = re.compile(rb"[\x81-\x8f\x91-\x9f]+")
_SHORT = re.compile(rb"[\x00-\xa0\xc0-\xc3\xe0-\xff]+")
"""Patterns of one-byte values: the first bytes of containers with at least one entry, and all other values."""
_CONTAINED_VALUES = bytes(2 * (byte & 15) if 0x80 <= byte < 0x90 else byte & 15 if 0x90 <= byte < 0xA0 else 0 for byte in range(256))
"""Number of values in the container that begins with each byte, or 0 for bytes that do not begin a container."""

_SIZED = {
    0xC4: (_OTHER, 1), 0xC5: (_OTHER, 2), 0xC6: (_OTHER, 4),
    0xD9: (_STRING, 1), 0xDA: (_STRING, 2), 0xDB: (_STRING, 4),
    0xDC: (_ARRAY, 2), 0xDD: (_ARRAY, 4), 0xDE: (_MAP, 2), 0xDF: (_MAP, 4),
}  # fmt: skip
"""The kind of a value and its number of length bytes, by first byte, for values that store a length."""
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
"""Number of length bytes of extension values, by first byte. One more byte contains the type."""
_INTEGERS = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED = {0xCA: 4, 0xCB: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
"""Number of bytes after the first byte, for floats and fixed-length extension values."""


class UnknownFeatures(NamedTuple):
    """The format version of a header, its first unknown feature, and its first unknown codec.

    Each is None if there is none. The version is also None if it is not an integer.
    """

    format: int | None
    feature: str | None
    codec: str | None


class _EndOfBytes(Exception):
    """Raised if the bytes end in the middle of a value."""


def unknown_features(data: bytes, features: Collection[str], codecs: Collection[str]) -> UnknownFeatures:
    """Return the format version of a header, and its first feature and codec that are not in ``features`` and ``codecs``.

    The scan takes linear time.
    """
    scanner = _Scanner(data)
    result: dict[str, int | str | None] = {}
    try:
        kind, count = scanner.read_value()
        for _ in range(count if kind == _MAP else 0):
            name = scanner.read_string()
            if name in result or name not in ("format", "required", "codecs"):
                scanner.skip(1)
                continue
            result[name] = None
            kind, size = scanner.read_value()
            if name == "format" and kind == _INTEGER:
                result[name] = size
            elif name != "format" and kind == _ARRAY:
                for _ in range(size):
                    entry = scanner.read_string() if name == "required" else scanner.read_entry("id")
                    if result[name] is None and entry is not None and entry not in (features if name == "required" else codecs):
                        result[name] = entry
            else:
                scanner.skip_contents(kind, size)
    except _EndOfBytes:
        pass
    version, feature, codec = result.get("format"), result.get("required"), result.get("codecs")
    return UnknownFeatures(
        version if isinstance(version, int) else None,
        feature if isinstance(feature, str) else None,
        codec if isinstance(codec, str) else None,
    )


class _Scanner:
    """A position in msgpack bytes. Methods raise ``_EndOfBytes`` if the bytes end in the middle of a value."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read_value(self) -> tuple[int, int]:
        """Read the start of the next value. Returns its kind and a number.

        The number is an integer's value, a container's number of entries, or the size in bytes of a string or any other value.
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

    def skip_contents(self, kind: int, size: int) -> None:
        """Skip the rest of a value. ``kind`` and ``size`` come from ``read_value``."""
        if kind in (_STRING, _OTHER):
            self._take(size)
        elif kind != _INTEGER:
            self.skip(size if kind == _ARRAY else 2 * size)

    def skip(self, values: int) -> None:
        """Skip ``values`` values with their contents. This does not recurse, because values may be nested to any depth."""
        # Regular expressions match many bytes per step. A container's first byte leaves at least as many values to skip as before, and n
        # bytes of one-byte values complete at most n values.
        while values:
            values += self._skip_short(_OPENING, len(self._data))
            values += self._skip_short(_SHORT, self._at + values)
            if values:
                kind, size = self.read_value()
                values -= 1
                if kind in (_STRING, _OTHER):
                    self._take(size)
                elif kind != _INTEGER:
                    values += size if kind == _ARRAY else 2 * size

    def _skip_short(self, values: re.Pattern[bytes], end: int) -> int:
        """Skip one-byte values that match a pattern, up to ``end``.

        Returns the change in the number of values left to skip.
        """
        match = values.match(self._data, self._at, end)
        if match is None:
            return 0
        self._at = match.end()
        return sum(match[0].translate(_CONTAINED_VALUES)) - len(match[0])

    def read_string(self) -> str | None:
        """Read the next value. Returns it if it is a string, or None otherwise."""
        kind, size = self.read_value()
        if kind == _STRING:
            return self._take(size).decode("utf-8", "backslashreplace")
        self.skip_contents(kind, size)
        return None

    def read_entry(self, key: str) -> str | None:
        """Read the next value, a map. Returns the value of its first entry ``key`` if that is a string, or None otherwise."""
        kind, count = self.read_value()
        if kind != _MAP:
            self.skip_contents(kind, count)
            return None
        result, seen = None, False
        for _ in range(count):
            if self.read_string() == key and not seen:
                result, seen = self.read_string(), True
            else:
                self.skip(1)
        return result

    def _take(self, size: int) -> bytes:
        data = self._data[self._at : self._at + size]
        if len(data) < size:
            raise _EndOfBytes
        self._at += size
        return data
