"""Search for new features and codecs, which are reported before errors (spec/container.md, Header tensor)."""

from __future__ import annotations

from collections.abc import Sequence

from .codecs import CODECS
from .features import REQUIRED_FEATURES
from .limits import FORMAT
from .msgpack import EXTENSIONS, OTHER_TYPES
from .refusal import require

NUMBERS = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
"""Number of bytes after the first byte, for integer types."""
SIZED = {
    **{0xD9: ("string", 1), 0xDA: ("string", 2), 0xDB: ("string", 4), 0xC4: ("other", 1), 0xC5: ("other", 2), 0xC6: ("other", 4)},
    **{0xDC: ("array", 2), 0xDD: ("array", 4), 0xDE: ("map", 2), 0xDF: ("map", 4)},
}
"""Type and number of bytes of the length, by first byte, for types with a length."""


class UnexpectedEnd(Exception):
    """Error for bytes that end within a value."""


class Walker:
    """Reader of msgpack from any version, which inspects or skips values without building them."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise UnexpectedEnd
        self.at += count
        return self.data[self.at - count : self.at]

    def read_head(self) -> tuple[str, int]:
        """Return the type of the next value, with its number, its length in bytes, or its number of entries."""
        first = self.take(1)[0]
        if first < 0x80:
            return "integer", first
        for mask, form, kind in ((0xF0, 0x80, "map"), (0xF0, 0x90, "array"), (0xE0, 0xA0, "string")):
            if first & mask == form:
                return kind, first & ~mask & 0xFF
        if first in NUMBERS:
            return "integer", int.from_bytes(self.take(NUMBERS[first]), "big", signed=first >= 0xD0)
        if first in SIZED:
            kind, count = SIZED[first]
            return kind, int.from_bytes(self.take(count), "big")
        if first in EXTENSIONS:
            return "other", int.from_bytes(self.take(EXTENSIONS[first]), "big") + 1
        return "other", OTHER_TYPES.get(first, 0) if first < 0xE0 else 0

    def skip_rest(self, kind: str, count: int) -> None:
        """Skip the rest of a value whose head has been read."""
        values = {"array": count, "map": 2 * count}.get(kind, 0)
        self.take(count if kind in ("string", "other") else 0)
        while values:
            kind, count = self.read_head()
            values += {"array": count, "map": 2 * count}.get(kind, 0) - 1
            self.take(count if kind in ("string", "other") else 0)

    def read_string(self) -> bytes | None:
        """Return the next value if it is a string, otherwise None."""
        kind, count = self.read_head()
        if kind == "string":
            return self.take(count)
        self.skip_rest(kind, count)
        return None

    def read_codec_id(self) -> bytes | None:
        """Return the id in the next value if that is the map of a codec, otherwise None."""
        kind, count = self.read_head()
        if kind != "map":
            self.skip_rest(kind, count)
            return None
        ids = []
        for _ in range(count):
            if self.read_string() == b"id":
                ids.append(self.read_string())
            else:
                self.skip_rest(*self.read_head())
        return ids[0] if ids else None


def refuse_newer(data: bytes, more_codecs: Sequence[str] = ()) -> None:
    """Check container.md, Order of reports: "A reader MUST report what is new before what is wrong"."""
    walk, version = Walker(data), FORMAT
    unknown: dict[bytes, list[bytes]] = {}
    known: dict[bytes, set[bytes]] = {b"required": REQUIRED_FEATURES, b"codecs": {name.encode() for name in (*CODECS, *more_codecs)}}
    try:
        kind, count = walk.read_head()
        seen: set[bytes] = set()
        for _ in range(count if kind == "map" else 0):
            key = walk.read_string()
            kind, entries = walk.read_head()
            if key == b"format" and key not in seen and kind == "integer":
                version = entries
            elif key in known and key not in seen and kind == "array":
                unknown[key] = []
                for _ in range(entries):
                    name = walk.read_string() if key == b"required" else walk.read_codec_id()
                    if name is not None and name not in known[key]:
                        unknown[key].append(name)
            else:
                walk.skip_rest(kind, entries)
            seen.add(key or b"")
    except UnexpectedEnd:
        pass
    require(version <= FORMAT, "container.md, Fields", f"format is {version}, expected at most {FORMAT}")
    require(not unknown.get(b"required"), "container.md, Header tensor", f"unknown required features {unknown.get(b'required')}")
    require(not unknown.get(b"codecs"), "container.md, Fields", f"unknown codecs {unknown.get(b'codecs')}")
