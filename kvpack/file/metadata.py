"""The ignorable feature ``metadata``: strings and numbers that kvpack stores but does not interpret (spec/container.md)."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from kvpack.formats.errors import InvalidParameter, InvalidType, LimitExceeded

from .limits import MAX_BINARY_BYTES, MAX_NAMES, MAX_STRING_BYTES

FEATURE = "metadata"
CHAT = "chat."
"""Prefix of the names under which ``kvpack.integrations.transformers.Chat`` stores its messages."""
CHAT_MESSAGES = f"{CHAT}messages"
"""Name under which a chat stores its number of messages."""
MAX_NAME_BYTES = 255
"""Maximum size of a name in UTF-8 bytes."""
TEXT, INTEGER, NUMBER = range(3)

Value = str | int | float


def to_bytes(metadata: Any) -> bytes:
    """Return the feature's data for ``metadata``, a dict of strings, 64-bit integers and finite floats by name.

    Raises InvalidParameter for any other type or value, and LimitExceeded for too many entries or for names or strings that are too long.
    """
    if not isinstance(metadata, Mapping):
        raise InvalidType(f"metadata is a {type(metadata).__name__}, expected a dict such as {{'title': 'a manual', 'version': 3}}")
    for name in metadata:
        if not isinstance(name, str) or not name:
            raise InvalidParameter(f"a name in metadata is {name!r:.80}, expected a nonempty string")
    _check_limit("metadata", len(metadata), "entries", MAX_NAMES)
    parts = []
    # Sorting by code points is the same as sorting by UTF-8 bytes.
    for name in sorted(metadata):
        key = _utf8("a name in metadata", name, MAX_NAME_BYTES)
        parts.append(bytes([len(key)]) + key + _encode_value(f"metadata[{name!r:.80}]", metadata[name]))
    data = b"".join(parts)
    _check_limit("metadata, as stored,", len(data), "bytes", MAX_BINARY_BYTES)
    return data


def from_bytes(data: bytes) -> dict[str, Value]:
    """Return the dict stored in the feature's data. Any other bytes result in an empty dict."""
    try:
        result = dict(_entries(data))
        return result if to_bytes(result) == data else {}
    except (ValueError, LookupError, struct.error, InvalidParameter, LimitExceeded):
        return {}


def _entries(data: bytes) -> Iterator[tuple[str, Value]]:
    offset = 0
    while offset < len(data):
        name, kind = data[offset + 1 : offset + 1 + data[offset]].decode(), data[offset + 1 + data[offset]]
        offset += 2 + data[offset]
        if kind == TEXT:
            (size,) = struct.unpack_from("<I", data, offset)
            yield name, data[offset + 4 : offset + 4 + size].decode()
            offset += 4 + size
        else:
            yield name, struct.unpack_from({INTEGER: "<q", NUMBER: "<d"}[kind], data, offset)[0]
            offset += 8


def _encode_value(where: str, value: Any) -> bytes:
    if isinstance(value, str):
        text = _utf8(where, value, MAX_STRING_BYTES)
        return bytes([TEXT]) + struct.pack("<I", len(text)) + text
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**63:
            raise InvalidParameter(f"{where} is out of range for a signed 64-bit integer: store it as text")
        return bytes([INTEGER]) + struct.pack("<q", value)
    if isinstance(value, float) and math.isfinite(value):
        return bytes([NUMBER]) + struct.pack("<d", value)
    raise InvalidParameter(f"{where} is {value!r:.80}, expected a string, an integer or a finite float")


def _utf8(where: str, text: str, limit: int) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise InvalidParameter(f"{where} is {text!r:.80}, which UTF-8 cannot encode") from None
    _check_limit(where, len(data), "bytes", limit)
    return data


def _check_limit(where: str, size: int, name: str, limit: int) -> None:
    if size > limit:
        raise LimitExceeded(f"{where} has {size} {name}, but the maximum is {limit}")
