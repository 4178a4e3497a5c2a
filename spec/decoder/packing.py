"""Bit packing (spec/packing.md, Bit packing)."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from .conventions import ceil_div
from .refusal import require

MAX_BASE = 65536
MAX_FIELDS = 128
MAX_COLUMN_BYTES = 16
MAX_COLUMN_VALUES = 2**53
MAX_DIM = 1024


def power_of_two_at_least(n: int) -> int:
    return 1 << (n - 1).bit_length()


def within_limits(bases: Sequence[int], fields: int) -> bool:
    if not (min(bases) >= 2 and max(bases) <= MAX_BASE and 1 <= fields <= MAX_FIELDS):
        return False
    powers = all(base == power_of_two_at_least(base) for base in bases)
    limit = 256**MAX_COLUMN_BYTES if powers else MAX_COLUMN_VALUES
    return int(math.prod(bases) ** fields) <= limit


@dataclass(frozen=True)
class Columns:
    """columns(n, [B0, B1, ...], F), with the alphabets of the digits. All numbers are within the limits."""

    symbols: int
    bases: tuple[int, ...]
    fields: int
    alphabets: tuple[int, ...]

    @property
    def width(self) -> int:
        return ceil_div(self.symbols, self.fields)

    @property
    def column_bytes(self) -> int:
        return ceil_div((math.prod(self.bases) ** self.fields - 1).bit_length(), 8)

    @property
    def plane_words(self) -> list[int]:
        """Number of words per row of every plane."""
        return [self.width] * (self.column_bytes // 2) + [ceil_div(self.width, 2)] * (self.column_bytes % 2)

    @property
    def row_bytes(self) -> int:
        return 2 * sum(self.plane_words)

    def unpack(self, planes: Sequence[Sequence[int]], where: str) -> list[list[int]]:
        """Return the values of each digit, given the words of one row of each plane."""
        rule = "packing.md, Bit packing"
        columns = []
        for c in range(self.width):
            data = b"".join(struct.pack("<H", plane[c]) for plane in planes[: self.column_bytes // 2])
            if self.column_bytes % 2:  # step 6: columns(W, 256, 2)
                half = ceil_div(self.width, 2)
                data += bytes([planes[-1][c % half] >> 8 * (c // half) & 0xFF])
            columns.append(int.from_bytes(data, "little"))
        if self.column_bytes % 2 and self.width % 2:
            require(planes[-1][-1] < 256, rule, f"{where}: the high byte of the last word is not zero")
        digits = [[0] * self.symbols for _ in self.bases]
        for c, column in enumerate(columns):
            remaining = column
            for digit, base, alphabet in zip(digits, self.bases, self.alphabets, strict=True):
                for k in range(self.fields):
                    remaining, value = divmod(remaining, base)
                    symbol = k * self.width + c
                    if symbol < self.symbols:
                        require(value < alphabet, rule, f"{where}: the digit of symbol {symbol} is {value}, expected less than {alphabet}")
                        digit[symbol] = value
                    else:
                        require(
                            value == 0,
                            rule,
                            f"{where}: field {k} of column {c} is {value}, but must be zero, because it contains no symbol",
                        )
            require(remaining == 0, rule, f"{where}: the spare bits of column {c} are not zero")
        return digits


def default_fields(symbols: int, bases: tuple[int, ...]) -> int:
    """Return the default F: "the one from 1 to n, within the limits, whose row takes the fewest bytes; among equals one ..."."""

    def order(fields: int) -> tuple[int, bool, int, int]:
        packing = Columns(symbols, bases, fields, bases)
        return packing.row_bytes, packing.column_bytes < 2, packing.column_bytes, fields

    return min((f for f in range(1, min(symbols, MAX_FIELDS) + 1) if within_limits(bases, f)), key=order)


def default_row_bytes(symbols: int, *bases: int) -> int:
    """Return the number of bytes per row of several streams with one digit each, if each has its default F."""
    return sum(Columns(symbols, (base,), default_fields(symbols, (base,)), (base,)).row_bytes for base in bases)
