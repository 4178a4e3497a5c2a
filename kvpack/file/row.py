"""Rows: fixed-size storage for the pages of serving engines, with a checksum that any device can compute (spec/row.md).

This module does not need PyTorch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from kvpack.formats.errors import DigestMismatch, InvalidHeader, InvalidParameter, LimitExceeded, NotKvpack, Truncated, UnsupportedVersion
from kvpack.formats.lazy import numpy

from .front import pack_header, unpack_header
from .header import Contents, layout_bytes

MAGIC = b"kvpack-row 1\n\0\0\0"
"""First bytes of a row of version 1."""
FRAME_BYTES = 128
ALIGNMENT = 64
"""Alignment, in bytes, of a row's description, of its streams and of its end."""
NAMESPACE_BYTES = KEY_BYTES = 32
NAMESPACE_AT, KEY_AT = 32, 64
"""Offsets, in bytes, of the namespace and of the key in a row."""
MULTIPLIER = 0x9E3779B97F4A7C15
"""Multiplier of the checksum. It is 5 modulo 8, so that its powers repeat only after 2^62 words."""
MAX_ROW_BYTES = 2**32 - ALIGNMENT
"""Maximum size of a row in bytes. Up to this size, the checksum detects any two flipped bits."""

_FRAME = struct.Struct("<16sQQ32s32sI28x")
_MASK = 2**64 - 1
_WORDS_AT_ONCE = 1 << 14

compiled: Callable[[memoryview, int], int | None] = lambda data, sum_: None  # noqa: E731
"""Function that adds words to a checksum in C, or returns None if it cannot. Set by ``kvpack.coding.dispatch``."""


class RowFrame(NamedTuple):
    """The fields at the beginning of a row."""

    magic: bytes
    length: int
    checksum: int
    namespace: bytes
    key: bytes
    description_bytes: int


class RowLayout(NamedTuple):
    """The layout of a row: its size, its description, and the byte range ``[begin, end)`` of each stream by tensor name."""

    nbytes: int
    description: bytes
    places: dict[str, tuple[int, int]]

    @property
    def payload(self) -> int:
        """Offset of the first stream, in bytes."""
        return _align(FRAME_BYTES + len(self.description))

    @property
    def pads(self) -> list[tuple[int, int]]:
        """Byte ranges ``[begin, end)`` of the padding after streams."""
        begins = [*(begin for begin, _ in self.places.values()), self.nbytes]
        ends = [self.payload, *(end for _, end in self.places.values())]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]


def row_layout(contents: Contents) -> RowLayout:
    """Return the layout of a row that stores a page with these contents."""
    description = pack_header(contents)
    places, end = {}, _align(FRAME_BYTES + len(description))
    for name, layout in contents.layouts.items():
        places[name] = end, end + layout_bytes(layout)
        end = _align(places[name][1])
    if end > MAX_ROW_BYTES:
        raise LimitExceeded(f"the row of a page takes {end} bytes, but at most {MAX_ROW_BYTES} are allowed: use pages of fewer tokens")
    return RowLayout(end, description, places)


def is_row_start(first_bytes: bytes) -> bool:
    """Return True if these bytes begin a row of version 1."""
    return first_bytes.startswith(MAGIC)


def row_namespace(first_bytes: bytes) -> bytes | None:
    """Return the namespace in a row's first bytes, unchecked, or None if the bytes do not begin a row of version 1."""
    return first_bytes[NAMESPACE_AT:KEY_AT] if is_row_start(first_bytes) else None


def build_front(layout: RowLayout, namespace: bytes, key: bytes) -> bytes:
    """Return the bytes of a row before its streams, with a checksum of 0.

    Raises InvalidParameter if the namespace or the key has the wrong size.
    """
    if len(namespace) != NAMESPACE_BYTES or len(key) != KEY_BYTES:
        raise InvalidParameter(f"namespace has {len(namespace)} bytes and key has {len(key)}, expected {NAMESPACE_BYTES} and {KEY_BYTES}")
    front = _FRAME.pack(MAGIC, layout.nbytes, 0, namespace, key, len(layout.description)) + layout.description
    return front + bytes(layout.payload - len(front))


def write_checksum(row: memoryview) -> None:
    """Compute the checksum of a row, and write it into the row. All other bytes must be complete."""
    row[24:32] = checksum(row).to_bytes(8, "little")


def checksum(row: memoryview) -> int:
    """Return the checksum of a whole row. The 8 bytes that store it count as zeros."""
    return _add_words(row[32:], _add_words(row[:24], 0) * MULTIPLIER * MULTIPLIER & _MASK)


def _add_words(data: memoryview, sum_: int) -> int:
    result = compiled(data, sum_)
    if result is not None:
        return result
    words = numpy.frombuffer(data, "<u4")
    for first in range(0, len(words), _WORDS_AT_ONCE):
        part = words[first : first + _WORDS_AT_ONCE]
        weights = powers()[_WORDS_AT_ONCE - len(part) :]
        added = int(numpy.dot(part.astype(numpy.uint64), weights))
        sum_ = (sum_ * pow(MULTIPLIER, len(part), 2**64) + added) & _MASK
    return sum_


@cache
def powers() -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint64]]:
    """Return the weights of ``_WORDS_AT_ONCE`` words: descending powers of the multiplier, ending with 1."""
    weights = numpy.ones(_WORDS_AT_ONCE, numpy.uint64)
    weights[1:] = MULTIPLIER
    with numpy.errstate(over="ignore"):
        return numpy.multiply.accumulate(weights)[::-1].copy()


def read_frame(data: memoryview, where: str) -> RowFrame:
    """Return the frame at the beginning of ``data``, after checking its magic and length.

    Raises NotKvpack, UnsupportedVersion, InvalidHeader or Truncated.
    """
    if len(data) < FRAME_BYTES:
        raise Truncated(f"{where} has {len(data)} bytes, expected at least {FRAME_BYTES} for the frame of a row")
    frame = RowFrame(*_FRAME.unpack_from(data))
    if frame.magic != MAGIC:
        if frame.magic.startswith(b"kvpack-row "):
            raise UnsupportedVersion(
                f"{where} is a row of a different version, {frame.magic!r}, but this version of kvpack reads version 1"
            )
        raise NotKvpack(f"{where} is not the row of a page: it begins with {frame.magic!r}")
    if frame.length % ALIGNMENT or frame.length < FRAME_BYTES:
        raise InvalidHeader(f"{where}: its length is {frame.length}, expected a multiple of {ALIGNMENT} of at least {FRAME_BYTES}")
    if frame.length > len(data):
        raise Truncated(f"{where} has {len(data)} bytes, but the row needs {frame.length}")
    return frame


def check_row(data: memoryview, where: str) -> RowFrame:
    """Check the frame and the checksum of the row at the beginning of ``data``. Returns the frame.

    Raises NotKvpack, UnsupportedVersion, Truncated, InvalidHeader or DigestMismatch.
    """
    frame = read_frame(data, where)
    actual = checksum(data[: frame.length])
    if actual != frame.checksum:
        raise DigestMismatch(f"{where}: its {frame.length} bytes have checksum {actual:016x}, expected {frame.checksum:016x}")
    return frame


def check_row_matches(row: memoryview, frame: RowFrame, layout: RowLayout, namespace: bytes, key: bytes | None, where: str) -> None:
    """Raise InvalidHeader if a row differs from the expected layout, namespace or key. The row's checksum must already have been checked.

    The message describes the first difference. If ``key`` is None, any key is accepted.
    """
    description = bytes(row[FRAME_BYTES : FRAME_BYTES + frame.description_bytes])
    if description != layout.description:
        raise InvalidHeader(f"{where} is the row of a different page: {_description_difference(description, layout.description)}")
    if frame.length != layout.nbytes:
        raise InvalidHeader(f"{where}: its length is {frame.length}, expected {layout.nbytes}")
    pads = [(100, FRAME_BYTES), (FRAME_BYTES + len(layout.description), layout.payload), *layout.pads]
    if any(any(row[begin:end]) for begin, end in pads):
        raise InvalidHeader(f"{where}: its padding is not zero")
    if frame.namespace != namespace:
        raise InvalidHeader(f"{where} has the namespace {frame.namespace.hex()}, expected {namespace.hex()}")
    if key is not None and frame.key != key:
        raise InvalidHeader(f"{where} has the key {frame.key.hex()}, expected {key.hex()}")


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _description_difference(data: bytes, expected: bytes) -> str:
    """Describe the first difference between two packed descriptions, for messages."""
    try:
        found = unpack_header(data)
    except (InvalidHeader, LimitExceeded) as error:
        return str(error)
    return _difference("", found, unpack_header(expected)) or f"its description has {len(data)} bytes, expected {len(expected)}"


def _difference(where: str, actual: Any, expected: Any) -> str:
    """Describe the first difference between two unpacked values, for messages. Returns an empty string if they are equal."""
    if type(actual) is type(expected) is dict and [*actual] == [*expected]:
        parts = [(f"{where}.{name}".lstrip("."), actual[name], expected[name]) for name in expected]
    elif type(actual) is type(expected) is list and len(actual) == len(expected):
        parts = [(f"{where}[{number}]", *both) for number, both in enumerate(zip(actual, expected, strict=True))]
    elif type(actual) is type(expected) is list:
        return f"{where} has length {len(actual)}, expected {len(expected)}"
    else:
        return "" if actual == expected else f"{where or 'the description'} is {actual!r:.200}, expected {expected!r:.200}"
    return next((text for part in parts if (text := _difference(*part))), "")
