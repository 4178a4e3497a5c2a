"""Random mutation of bytes, arrays of numbers and text. Each mutation depends only on its input and on ``source``."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

MAX_BLOCK_BYTES = 64

_NUMERALS = tuple(b"0 1 -1 2 3 4 5 7 8 9 16 32 64 128 256 65536 18446744073709551615 99999999999999999999 0.5 1e9".split(b" "))

NUMBERS: dict[str, tuple[bytes, ...]] = {
    "U8": (b"\0", b"\1", b"\2", b"\x7f", b"\x80", b"\xff"),
    "U16": tuple(struct.pack("<H", value) for value in (0, 1, 2, 255, 256, 0x7FFF, 0x8000, 0xFF00, 0xFFFF)),
    # Zero, one, the smallest and the largest subnormal, the largest value, infinity, NaN; then the same with the sign bit.
    "F16": tuple(struct.pack("<H", value | sign) for sign in (0, 0x8000) for value in (0, 0x3C00, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7E00)),
    "BF16": tuple(struct.pack("<H", value | sign) for sign in (0, 0x8000) for value in (0, 0x3F80, 1, 0x7F, 0x80, 0x7F7F, 0x7F80, 0x7FC0)),
    "F32": tuple(
        struct.pack("<I", value | sign)
        for sign in (0, 1 << 31)
        for value in (0, 0x3F800000, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000)
    ),
}
"""Boundary values of every stored dtype."""


def mutate_bytes(data: bytes, source: random.Random, max_bytes: int = 1 << 15) -> bytes:
    """Return ``data`` after one edit: a changed bit or byte, or an overwritten, inserted, removed, copied or truncated block.

    The result has at most ``max_bytes`` bytes.
    """
    result = bytearray(data)
    at = source.randrange(len(result) + 1)
    size = 1 << source.randrange(7)
    kind = source.randrange(8) if result else 2
    if kind == 0:
        at = min(at, len(result) - 1)
        result[at] ^= 1 << source.randrange(8)
    elif kind == 1:
        at = min(at, len(result) - 1)
        result[at] = source.choice((0, 1, 0x7F, 0x80, 0xFF, source.randrange(256), (result[at] + 1) % 256, (result[at] - 1) % 256))
    elif kind == 2:
        result[at:at] = source.randbytes(size)
    elif kind == 3:
        del result[at : at + size]
    elif kind == 4:
        result[at : at + size] = source.randbytes(min(size, len(result) - at))
    elif kind == 5:
        first = source.randrange(len(result))
        result[at:at] = result[first : first + size]
    elif kind == 6:
        first = source.randrange(len(result))
        block = result[first : first + size]
        result[at : at + len(block)] = block
    else:
        del result[at:]
    return bytes(result[:max_bytes])


def mutate_numbers(data: bytes, dtype: str, source: random.Random) -> bytes:
    """Return ``data``, an array of ``dtype``, after one edit that keeps its length. Most edits replace whole numbers."""
    if not data:
        return data
    values = NUMBERS[dtype]
    size = len(values[0])
    result = bytearray(data)
    at = source.randrange(max(1, len(result) // size)) * size
    kind = source.randrange(8)
    if kind <= 1:
        result[at : at + size] = source.choice(values)
    elif kind == 2:
        result[min(at + source.randrange(size), len(result) - 1)] ^= 1 << source.randrange(8)
    elif kind == 3:
        count = source.randrange(1, MAX_BLOCK_BYTES)
        result[at : at + count] = source.randbytes(count)
    elif kind == 4:
        other = source.randrange(max(1, len(result) // size)) * size
        result[at : at + size], result[other : other + size] = result[other : other + size], result[at : at + size]
    elif kind == 5:
        return (source.choice(values) * len(data))[: len(data)]
    elif kind == 6:
        return source.randbytes(len(data))
    else:
        count = source.randrange(1, MAX_BLOCK_BYTES) * size
        result[at : at + count] = source.choice(values) * (count // size)
    return bytes(result[: len(data)].ljust(len(data), b"\0"))


def mutate_text(data: bytes, words: Sequence[bytes], source: random.Random, max_bytes: int = 1 << 12) -> bytes:
    """Return the text ``data`` after one edit.

    One of ``words`` is inserted, a number or word is replaced, a part is repeated, or any byte is changed.
    """
    kind = source.randrange(5)
    at = source.randrange(len(data) + 1)
    if kind == 0:
        return mutate_bytes(data, source, max_bytes)
    if kind == 1:
        return (data[:at] + source.choice(words) + data[at:])[:max_bytes]
    if kind == 2:
        digits = [place for place, byte in enumerate(data) if byte in b"0123456789"]
        if digits:
            at = source.choice(digits)
            return (data[:at] + source.choice(_NUMERALS) + data[at + 1 :])[:max_bytes]
    separator = source.choice((b";", b",", b":", b"=", b"\n"))
    parts = data.split(separator)
    one = source.randrange(len(parts))
    if kind == 3:
        parts[one] = source.choice(words) if source.random() < 0.7 else source.choice(parts)
    else:
        parts.insert(one, source.choice((source.choice(parts), source.choice(words))))
    return separator.join(parts)[:max_bytes]
