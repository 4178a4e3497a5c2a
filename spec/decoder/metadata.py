"""Metadata (spec/container.md, Metadata)."""

from __future__ import annotations

import math
import struct

from .limits import MAX_NAMES, MAX_STRING_BYTES


def take_metadata(data: bytes) -> dict[str, str | int | float]:
    """Return the metadata (container.md, Metadata). It is empty if the bytes do not have the format of the page."""
    result: dict[str, str | int | float] = {}
    at, last = 0, b""
    while at < len(data):
        end = at + 1 + data[at]
        name, kind = data[at + 1 : end], data[end : end + 1]
        size = int.from_bytes(data[end + 1 : end + 5], "little") if kind == b"\0" else 8
        begin = end + (5 if kind == b"\0" else 1)
        at = begin + size
        if name <= last or kind not in (b"\0", b"\1", b"\2") or at > len(data) or (kind == b"\0" and size > MAX_STRING_BYTES):
            return {}
        value: str | int | float
        try:
            if kind == b"\0":
                value = data[begin:at].decode()
            elif kind == b"\1":
                value = int.from_bytes(data[begin:at], "little", signed=True)
            else:
                (value,) = struct.unpack("<d", data[begin:at])
            result[name.decode()], last = value, name
        except UnicodeDecodeError:
            return {}
        if isinstance(value, float) and not math.isfinite(value):
            return {}
    return result if len(result) <= MAX_NAMES else {}
