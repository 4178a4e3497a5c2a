"""Stored numbers, and rounding to binary32 and binary16 (spec/README.md, Conventions)."""

from __future__ import annotations

import math
import struct
from typing import Any

DTYPE_BYTES = {"U8": 1, "U16": 2, "F16": 2, "BF16": 2, "F32": 4}
FORMATS = {"U8": "B", "U16": "H", "F16": "e", "F32": "f"}
MASK = 2**64 - 1


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def f32(x: float) -> float:
    """Round ``x`` to binary32, ties to even. Numbers that are too large become infinite."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def f16(x: float) -> float:
    """Round ``x`` to binary16, ties to even. Numbers that are too large become infinite."""
    try:
        return float(struct.unpack("<e", struct.pack("<e", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def numbers(data: bytes, dtype: str) -> list[Any]:
    """Return the numbers of a stored array: integers for ``U8`` and ``U16``, floats otherwise."""
    if dtype == "BF16":  # "the upper 16 bits of a binary32"
        words = struct.unpack(f"<{len(data) // 2}H", data)
        return list(struct.unpack(f"<{len(words)}f", struct.pack(f"<{len(words)}I", *(word << 16 for word in words))))
    return list(struct.unpack(f"<{len(data) // DTYPE_BYTES[dtype]}{FORMATS[dtype]}", data))


def word64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def word32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")
