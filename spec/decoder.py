"""A second decoder of kvpack 1, written from the text of this folder alone, in Python's standard library.

It shares no code with the library and follows the pages section by section, so that a question about the text has an
answer that runs. It is slow and keeps whole files in memory. ``python spec/decoder.py FILE`` describes a file.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, localcontext
from functools import cache
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, NoReturn


class Refused(Exception):
    """A file breaks a rule of the text: ``rule`` names the page and the section, ``detail`` says where and how."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


def refuse(rule: str, detail: str) -> NoReturn:
    raise Refused(rule, detail)


def require(holds: bool, rule: str, detail: str) -> None:
    if not holds:
        refuse(rule, detail)


# README.md, Conventions ----------------------------------------------------------------------------------------------

DTYPE_BYTES = {"U8": 1, "U16": 2, "F16": 2, "BF16": 2, "F32": 4}
FORMATS = {"U8": "B", "U16": "H", "F16": "e", "F32": "f"}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def f32(x: float) -> float:
    """``x`` correctly rounded to binary32.

    Python computes in binary64, whose 53 bits are more than 2 * 24 + 1: rounding the sum, product or quotient of two
    binary32 numbers once more gives what binary32 arithmetic gives.
    """
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def f16(x: float) -> float:
    """``x`` correctly rounded to binary16."""
    try:
        return float(struct.unpack("<e", struct.pack("<e", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def numbers(data: bytes, dtype: str) -> list[Any]:
    """The numbers of a stored array: integers for ``U8`` and ``U16``, floats otherwise."""
    if dtype == "BF16":  # "the upper 16 bits of a binary32"
        words = struct.unpack(f"<{len(data) // 2}H", data)
        return list(struct.unpack(f"<{len(words)}f", struct.pack(f"<{len(words)}I", *(word << 16 for word in words))))
    return list(struct.unpack(f"<{len(data) // DTYPE_BYTES[dtype]}{FORMATS[dtype]}", data))


# README.md, Bit packing ----------------------------------------------------------------------------------------------

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
    """columns(n, [B0, B1, ...], F), with the alphabets of the digits; the numbers are within the limits."""

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
        """The words per row of every plane."""
        return [self.width] * (self.column_bytes // 2) + [ceil_div(self.width, 2)] * (self.column_bytes % 2)

    @property
    def row_bytes(self) -> int:
        return 2 * sum(self.plane_words)

    def unpack(self, planes: Sequence[Sequence[int]], where: str) -> list[list[int]]:
        """For each digit its ``symbols`` values, from the words of one row of each plane."""
        rule = "README.md, Bit packing"
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
            rest = column
            for digit, base, alphabet in zip(digits, self.bases, self.alphabets, strict=True):
                for k in range(self.fields):
                    rest, value = divmod(rest, base)
                    symbol = k * self.width + c
                    if symbol < self.symbols:
                        require(value < alphabet, rule, f"{where}: digit {value} of symbol {symbol} is not below {alphabet}")
                        digit[symbol] = value
                    else:
                        require(value == 0, rule, f"{where}: field {k} of column {c} has no symbol and is {value}")
            require(rest == 0, rule, f"{where}: column {c} has bits above its largest value")
        return digits


def default_fields(symbols: int, bases: tuple[int, ...]) -> int:
    """Default F: "the one from 1 to n, within the limits, whose row takes the fewest bytes; among equals one ..."."""

    def order(fields: int) -> tuple[int, bool, int, int]:
        packing = Columns(symbols, bases, fields, bases)
        return packing.row_bytes, packing.column_bytes < 2, packing.column_bytes, fields

    return min((f for f in range(1, min(symbols, MAX_FIELDS) + 1) if within_limits(bases, f)), key=order)


def default_row_bytes(symbols: int, *bases: int) -> int:
    """The bytes per row of several streams of one digit each, each at its default F."""
    return sum(Columns(symbols, (base,), default_fields(symbols, (base,)), (base,)).row_bytes for base in bases)


# README.md, Generator ------------------------------------------------------------------------------------------------

MASK = 2**64 - 1


def words(seed: int) -> Iterator[int]:
    """SplitMix64."""
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        yield z ^ z >> 31


def signs(seed: int, count: int) -> list[int]:
    source = words(seed)
    bits = [word >> i & 1 for word in (next(source) for _ in range(ceil_div(count, 64))) for i in range(64)]
    return [-1 if bit else 1 for bit in bits[:count]]


def unit_quaternions(seed: int, count: int) -> list[tuple[float, float, float, float]]:
    source = words(seed)

    def symmetric_value() -> float:
        return ((next(source) >> 11) - 2**52) / 2**52

    def point_of_the_disc() -> tuple[float, float, float]:
        while True:
            x, y = symmetric_value(), symmetric_value()
            q = x * x + y * y
            if 0 < q < 1:
                return x, y, q

    quaternions = []
    for _ in range(count):
        a, b, q1 = point_of_the_disc()
        c, d, q2 = point_of_the_disc()
        t = math.sqrt((1 - q1) / q2)
        quaternions.append((a, b, c * t, d * t))
    return quaternions


# README.md, Rotation -------------------------------------------------------------------------------------------------

ROTATION_KINDS = ("none", "hadamard", "signed-hadamard")


def factors(dim: int) -> tuple[int, int] | None:
    """(2^k, m) with dim = 2^k * m and m of 1, 12, 20 and 28; None where there is no such pair."""
    for m in (1, 12, 20, 28):
        if dim % m == 0 and dim // m == power_of_two_at_least(dim // m):
            return dim // m, m
    return None


def paley(m: int) -> list[list[int]]:
    if m == 1:
        return [[1]]
    r = 13 if m == 28 else m - 1
    squares = {a * a % r for a in range(1, r)}

    def chi(a: int) -> int:
        return 0 if a % r == 0 else 1 if a % r in squares else -1

    if m == 28:  # Paley's second construction
        c = [[0] + [1] * r] + [[1] + [chi(i - j) for j in range(r)] for i in range(r)]

        def block(entry: int) -> list[list[int]]:
            return [[entry, entry], [entry, -entry]] if entry else [[1, -1], [-1, -1]]

        return [[block(entry)[a][b] for entry in row for b in range(2)] for row in c for a in range(2)]
    return [[1] * m] + [[-1] + [1 if i == j else chi(i - j) for j in range(r)] for i in range(r)]


@cache
def hadamard_columns(dim: int) -> list[list[int]]:
    found = factors(dim)
    assert found is not None, "codecs and side-cars have been checked"
    order, m = found
    p = paley(m)

    def entry(row: int, column: int) -> int:
        sylvester = -1 if (row // m & column // m).bit_count() % 2 else 1
        return sylvester * p[row % m][column % m]

    return [[entry(row, column) for row in range(dim)] for column in range(order * m)]


@cache
def cached_signs(seed: int, count: int) -> list[int]:
    return signs(seed, count)


def rotate_back(kind: str, seed: int, u: list[float]) -> list[float]:
    """x_j = (s_j / sqrt(dim)) * sum over i of H_ij * u_i, in binary64, then rounded to binary32."""
    if kind == "none":
        return u
    s = cached_signs(seed, len(u)) if kind == "signed-hadamard" else [1] * len(u)
    factor = 1 / math.sqrt(len(u))
    return [f32(sign * factor * sum(map(mul, column, u))) for sign, column in zip(s, hadamard_columns(len(u)), strict=True)]


def rotated_tolerance(u: list[float], tolerance: list[float], of_head: float = 0.0) -> list[float]:
    """README.md, Conformance: the tolerances before it as a Euclidean norm of the head, plus that of the rotation.

    ``of_head`` is a part that is itself a Euclidean norm of the head.
    """
    return [math.hypot(*tolerance) + of_head + 2.0**-18 * math.hypot(*u) + 2.0**-126] * len(u)


# container.md, Limits ------------------------------------------------------------------------------------------------

FORMAT = 1
MAX_FILE_BYTES = 1_152_921_504_606_846_975
MAX_JSON_BYTES = 16_777_216
MAX_HEADER_BYTES = 8_388_608
MAX_CODECS = 4_096
MAX_LAYERS = 4_096
MAX_ENTRIES = 131_072
MAX_BATCH = 65_536
MAX_HEADS = 65_536
MAX_TOKENS = 1_099_511_627_775
MAX_NAMES = 256
MAX_STRING_BYTES = 4_096
MAX_BINARY_BYTES = 65_536
MAX_WINDOW_BYTES = 8_388_608
MAX_RATIO = 256
MAX_DEPTH = 100
"""No value of this version nests deeper than five; one of a later version is read as far as this."""


# container.md, msgpack profile ---------------------------------------------------------------------------------------


OTHER_TYPES = {0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
"""Types that do not occur in this version, but may in later ones: the bytes after the first one."""
EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
"""Those with a length: its bytes."""


@dataclass(frozen=True)
class Other:
    """A value of a type that does not occur in this version."""

    first: int
    data: bytes


class Msgpack:
    """One value in msgpack; ``breach`` says what in it is not canonical, first of all, and where.

    A later version may write what this one does not know, so the rest is read all the same. Forms that are not the shortest are
    breaches, so nothing need be written again.
    """

    RULE = "container.md, msgpack profile"
    # First byte of a form, by type: (first byte, bytes of the number that follows), shortest first.
    INTEGERS = ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8))
    STRINGS = ((0xD9, 1), (0xDA, 2), (0xDB, 4))
    BINARIES = ((0xC4, 1), (0xC5, 2), (0xC6, 4))
    ARRAYS = ((0xDC, 2), (0xDD, 4))
    MAPS = ((0xDE, 2), (0xDF, 4))

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.breach = data, 0, ""

    def expect(self, holds: bool, detail: str) -> None:
        if not holds and not self.breach:
            self.breach = detail

    def take(self, count: int) -> bytes:
        require(self.at + count <= len(self.data), self.RULE, f"the header ends within the value at byte {self.at}")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, first: int, forms: tuple[tuple[int, int], ...], below: int) -> int | None:
        """The number after ``first`` when that is one of ``forms``; ``below`` is the least that no fixed form holds."""
        for form, count in forms:
            if first == form:
                value = int.from_bytes(self.take(count), "big")
                self.expect(value >= below, f"the number at byte {self.at - count} is not in its shortest form")
                return value
            below = 256**count
        return None

    def value(self, depth: int = 0) -> Any:
        require(depth <= MAX_DEPTH, self.RULE, f"the value at byte {self.at} is nested too deep")
        first = self.take(1)[0]
        if first < 0x80:
            return first
        if first == 0xC0:
            return None
        if (integer := self.number(first, self.INTEGERS, 0x80)) is not None:
            return integer
        length = first & 0x1F if first & 0xE0 == 0xA0 else self.number(first, self.STRINGS, 0x20)
        if length is not None:
            require(length <= MAX_STRING_BYTES, "container.md, Limits", f"a string has {length} bytes")
            try:
                return self.take(length).decode("utf-8")
            except UnicodeDecodeError:
                refuse(self.RULE, f"the string before byte {self.at} is not UTF-8")
        length = self.number(first, self.BINARIES, 0)
        if length is not None:
            require(length <= MAX_BINARY_BYTES, "container.md, Limits", f"a binary value has {length} bytes")
            return self.take(length)
        length = first & 0x0F if first & 0xF0 == 0x90 else self.number(first, self.ARRAYS, 0x10)
        if length is not None:
            require(length <= MAX_ENTRIES, "container.md, Limits", f"an array has {length} entries")
            return [self.value(depth + 1) for _ in range(length)]
        length = first & 0x0F if first & 0xF0 == 0x80 else self.number(first, self.MAPS, 0x10)
        if length is not None:
            require(length <= MAX_NAMES, "container.md, Limits", f"a map has {length} entries")
            return self.map(length, depth + 1)
        self.expect(False, f"the type of first byte 0x{first:02x} does not occur")
        length = int.from_bytes(self.take(EXTENSIONS[first]), "big") + 1 if first in EXTENSIONS else OTHER_TYPES.get(first, 0)
        return Other(first, self.take(length))

    def map(self, length: int, depth: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for _ in range(length):
            key = self.value(depth)
            self.expect(isinstance(key, str), f"a key of a map is {key!r}, not a string")
            self.expect(not isinstance(key, str) or key not in entries, f"the key {key!r} occurs twice in a map")
            entries[key if isinstance(key, str) else repr(key)] = self.value(depth)
        return entries


def parse_msgpack(data: bytes, more_codecs: Sequence[str] = ()) -> dict[str, Any]:
    """The header; one that is not canonical is refused, as a newer version's where it says so. ``more_codecs`` are those of rows."""
    refuse_news(data, more_codecs)
    parser = Msgpack(data)
    top = parser.value()
    require(isinstance(top, dict), parser.RULE, "the header is not a map")
    parser.expect(parser.at == len(data), f"{len(data) - parser.at} bytes follow the map")
    if parser.breach:
        refuse(parser.RULE, parser.breach)
    return dict(top)


NUMBERS = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
"""Integers of any form, by their first byte: the bytes after it."""
SIZED = {
    **{0xD9: ("string", 1), 0xDA: ("string", 2), 0xDB: ("string", 4), 0xC4: ("other", 1), 0xC5: ("other", 2), 0xC6: ("other", 4)},
    **{0xDC: ("array", 2), 0xDD: ("array", 4), 0xDE: ("map", 2), 0xDF: ("map", 4)},
}
"""Values with a length: what they are, and the bytes of the length."""


class End(Exception):
    """The bytes end within a value."""


class Walk:
    """A place in msgpack of any version, whose values are skipped or looked at, never built."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise End
        self.at += count
        return self.data[self.at - count : self.at]

    def head(self) -> tuple[str, int]:
        """What the next value is, and its number, its bytes or its entries."""
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

    def pass_by(self, kind: str, count: int) -> None:
        """Leave out the rest of a value whose head was taken."""
        values = {"array": count, "map": 2 * count}.get(kind, 0)
        self.take(count if kind in ("string", "other") else 0)
        while values:
            kind, count = self.head()
            values += {"array": count, "map": 2 * count}.get(kind, 0) - 1
            self.take(count if kind in ("string", "other") else 0)

    def string(self) -> bytes | None:
        """The next value where it is a string, else None."""
        kind, count = self.head()
        if kind == "string":
            return self.take(count)
        self.pass_by(kind, count)
        return None

    def id(self) -> bytes | None:
        """The id of the next value where it is the map of a codec, else None."""
        kind, count = self.head()
        if kind != "map":
            self.pass_by(kind, count)
            return None
        ids = []
        for _ in range(count):
            if self.string() == b"id":
                ids.append(self.string())
            else:
                self.pass_by(*self.head())
        return ids[0] if ids else None


def refuse_news(data: bytes, more_codecs: Sequence[str] = ()) -> None:
    """container.md, Header tensor: "What is new is told before what is wrong"."""
    walk, version = Walk(data), FORMAT
    unknown: dict[bytes, list[bytes]] = {}
    known: dict[bytes, set[bytes]] = {b"required": REQUIRED_FEATURES, b"codecs": {name.encode() for name in (*CODECS, *more_codecs)}}
    try:
        kind, count = walk.head()
        seen: set[bytes] = set()
        for _ in range(count if kind == "map" else 0):
            key = walk.string()
            kind, entries = walk.head()
            if key == b"format" and key not in seen and kind == "integer":
                version = entries
            elif key in known and key not in seen and kind == "array":
                unknown[key] = []
                for _ in range(entries):
                    name = walk.string() if key == b"required" else walk.id()
                    if name is not None and name not in known[key]:
                        unknown[key].append(name)
            else:
                walk.pass_by(kind, entries)
            seen.add(key or b"")
    except End:
        pass
    require(version <= FORMAT, "container.md, Fields", f"format is {version}, known is {FORMAT}")
    require(not unknown.get(b"required"), "container.md, Header tensor", f"unknown required features {unknown.get(b'required')}")
    require(not unknown.get(b"codecs"), "container.md, Fields", f"unknown codecs {unknown.get(b'codecs')}")


# container.md, Digests: "XXH3-128 with seed 0 ... in canonical form: 16 bytes, most significant first" ---------------

PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_MX1, PRIME_MX2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
STRIPE, LANES = 64, 8
STRIPES_PER_BLOCK = (len(SECRET) - STRIPE) // 8


def word64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def word32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def swap_bytes(x: int, count: int) -> int:
    return int.from_bytes(x.to_bytes(count, "little"), "big")


def fold(a: int, b: int) -> int:
    """The two halves of the 128-bit product, xored."""
    product = a * b
    return product & MASK ^ product >> 64


def avalanche(x: int) -> int:
    x = (x ^ x >> 37) * PRIME_MX1 & MASK
    return x ^ x >> 32


def avalanche_short(x: int) -> int:
    x = (x ^ x >> 33) * PRIME64_2 & MASK
    x = (x ^ x >> 29) * PRIME64_3 & MASK
    return x ^ x >> 32


def xxh3_128(data: bytes) -> bytes:
    """XXH3-128 of ``data`` with seed 0, in canonical form."""
    size = len(data)
    if size > 240:
        low, high = _xxh3_long(data)
    elif size > 16:
        low, high = _xxh3_middle(data)
    elif size > 8:
        low, high = _xxh3_9_to_16(data)
    elif size > 3:
        low, high = _xxh3_4_to_8(data)
    elif size > 0:
        low, high = _xxh3_1_to_3(data)
    else:
        low = avalanche_short(word64(SECRET, 64) ^ word64(SECRET, 72))
        high = avalanche_short(word64(SECRET, 80) ^ word64(SECRET, 88))
    return high.to_bytes(8, "big") + low.to_bytes(8, "big")


def _xxh3_1_to_3(data: bytes) -> tuple[int, int]:
    size = len(data)
    combined = data[-1] | size << 8 | data[0] << 16 | data[size // 2] << 24
    swapped = swap_bytes(combined, 4)
    turned = (swapped << 13 | swapped >> 19) & 0xFFFFFFFF
    low = word32(SECRET, 0) ^ word32(SECRET, 4) ^ combined
    high = word32(SECRET, 8) ^ word32(SECRET, 12) ^ turned
    return avalanche_short(low), avalanche_short(high)


def _xxh3_4_to_8(data: bytes) -> tuple[int, int]:
    size = len(data)
    value = word64(SECRET, 16) ^ word64(SECRET, 24) ^ (word32(data, 0) | word32(data, size - 4) << 32)
    product = value * (PRIME64_1 + (size << 2))
    low, high = product & MASK, product >> 64 & MASK
    high = high + (low << 1) & MASK
    low ^= high >> 3
    low = (low ^ low >> 35) * PRIME_MX2 & MASK
    return low ^ low >> 28, avalanche(high)


def _xxh3_9_to_16(data: bytes) -> tuple[int, int]:
    size = len(data)
    first, last = word64(data, 0), word64(data, size - 8)
    product = (word64(SECRET, 32) ^ word64(SECRET, 40) ^ first ^ last) * PRIME64_1
    other = word64(SECRET, 48) ^ word64(SECRET, 56) ^ last
    low = (product & MASK) + (size - 1 << 54) & MASK
    high = (product >> 64) + other + (other & 0xFFFFFFFF) * (PRIME32_2 - 1) & MASK
    low ^= swap_bytes(high, 8)
    product = (high << 64 | low) * PRIME64_2
    return avalanche(product & MASK), avalanche(product >> 64 & MASK)


def _xxh3_middle(data: bytes) -> tuple[int, int]:
    size = len(data)
    low, high = size * PRIME64_1 & MASK, 0

    def mix(at: int, secret: int) -> int:
        return fold(word64(data, at) ^ word64(SECRET, secret), word64(data, at + 8) ^ word64(SECRET, secret + 8))

    def mix_two(at: int, other: int, secret: int) -> None:
        nonlocal low, high
        low = (low + mix(at, secret) & MASK) ^ (word64(data, other) + word64(data, other + 8) & MASK)
        high = (high + mix(other, secret + 16) & MASK) ^ (word64(data, at) + word64(data, at + 8) & MASK)

    if size <= 128:
        for i in reversed(range((size - 1) // 32 + 1)):
            mix_two(16 * i, size - 16 * i - 16, 32 * i)
    else:
        for i in range(4):
            mix_two(32 * i, 32 * i + 16, 32 * i)
        low, high = avalanche(low), avalanche(high)
        for i in range(4, size // 32):
            mix_two(32 * i, 32 * i + 16, 32 * (i - 4) + 3)
        mix_two(size - 16, size - 32, 103)
    ended = avalanche(low * PRIME64_1 + high * PRIME64_4 + size * PRIME64_2 & MASK)
    return avalanche(low + high & MASK), -ended & MASK


def _xxh3_long(data: bytes) -> tuple[int, int]:
    size = len(data)
    sums = [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1]

    def accumulate(at: int, secret: int) -> None:
        stripe = struct.unpack_from("<8Q", data, at)
        keys = struct.unpack_from("<8Q", SECRET, secret)
        for i in range(LANES):
            value = stripe[i] ^ keys[i]
            sums[i ^ 1] = sums[i ^ 1] + stripe[i] & MASK
            sums[i] = sums[i] + (value & 0xFFFFFFFF) * (value >> 32) & MASK

    # All full stripes but the last bytes; a block of stripes ends in a scramble, unless it is the last one.
    for n in range((size - 1) // STRIPE):
        place = n % STRIPES_PER_BLOCK
        if n and place == 0:
            _scramble(sums)
        accumulate(STRIPE * n, 8 * place)
    if (size - 1) // STRIPE % STRIPES_PER_BLOCK == 0:
        _scramble(sums)
    accumulate(size - STRIPE, len(SECRET) - 71)

    def merge(start: int, secret: int) -> int:
        keys = struct.unpack_from("<8Q", SECRET, secret)
        folds = (fold(sums[i] ^ keys[i], sums[i + 1] ^ keys[i + 1]) for i in range(0, LANES, 2))
        return avalanche(start + sum(folds) & MASK)

    return merge(size * PRIME64_1 & MASK, 11), merge(~(size * PRIME64_2) & MASK, len(SECRET) - 75)


def _scramble(sums: list[int]) -> None:
    keys = struct.unpack_from("<8Q", SECRET, len(SECRET) - STRIPE)
    for i in range(LANES):
        sums[i] = (sums[i] ^ sums[i] >> 47 ^ keys[i]) * PRIME32_1 & MASK


# codecs/: what every codec's page defines ----------------------------------------------------------------------------


@dataclass(frozen=True)
class NumberStream:
    """An array of scales, norms or raw values: ``[batch, heads or 1, rows, *sizes]``.

    It has one row for ``tokens`` tokens, or ``per`` "run", or per "entry" in an array of ``[1, 1, entry, *sizes]``.
    """

    name: str
    dtype: str
    sizes: tuple[int, ...]
    tokens: int = 1
    per_head: bool = True
    any_bits: bool = False
    per: str = "tokens"
    logarithms: bool = False


@dataclass(frozen=True)
class SideCar:
    """What a side-car adds to a codec: its streams, those of codes before the others."""

    codes: Mapping[str, Columns]
    numbers: Sequence[NumberStream]
    seed: int = 0
    block: int = 0
    bits: int = 0
    basis: tuple[bytes, int, str] | None = None
    """The digest and the layer of the basis that a reader must be given, and which frames of it."""


Digits = Mapping[str, list[list[int]]]
"""Of one token: for each code stream its digits, each a list with one integer a symbol."""
Numbers = Mapping[str, list[float]]
"""Of one token: for each number stream its row."""


@dataclass(frozen=True)
class Codec:
    """A codec with its parameters.

    ``decode`` takes a token of one head to the coded frame; ``tolerance`` gives how far from the exact value every value
    there may be, by the codec's page; ``check`` refuses what the page says beyond digits and numbers that are not finite.
    """

    id: str
    dim: int
    token_group: int
    codes: Mapping[str, Columns]
    numbers: Sequence[NumberStream]
    decode: Callable[[Digits, Numbers], list[float]]
    tolerance: Callable[[Digits, Numbers], list[float]]
    check: Callable[[str, Digits, Numbers], None] = lambda where, digits, numbers: None
    rotation_kind: str = "none"
    rotation_seed: int = 0
    side_cars: Mapping[str, SideCar] = field(default_factory=dict)
    coded: Callable[[Any, str], dict[str, list[list[list[int]]]]] = lambda side, prefix: {}
    """The rows of digits that other streams of a side code together, as those of code streams."""
    basis: tuple[bytes, int, str] | None = None
    """The digest, the layer and the side of the basis that a reader must be given."""
    feature: str = ""
    """The required feature that stands for a parameter."""
    scope: str = ""
    """That of the frames of the basis, for a codec that needs these and not its rows."""
    heads: int = 0
    """The only number of heads of sides; 0 for any."""
    check_sizes: Callable[[Any, str], None] = lambda side, prefix: None
    """Refuses of a side, before anything is decoded, what needs no basis."""

    @property
    def streams(self) -> dict[str, Columns | NumberStream]:
        """All streams in order: those of the codec, then those of its side-cars."""
        made: dict[str, Columns | NumberStream] = {}
        parts: list[Codec | SideCar] = [self, *self.side_cars.values()]
        for part in parts:
            made |= {**part.codes, **{stream.name: stream for stream in part.numbers}}
        return made


HALF_OR_SINGLE = {"fp16": "F16", "fp32": "F32"}
TOKEN_NORMS = {**HALF_OR_SINGLE, "log8": "U8"}
LOG_NORMS = "log-norms"


def norm_stream(norm: str) -> NumberStream:
    return NumberStream("norm", TOKEN_NORMS[norm], (), logarithms=norm == "log8")


def feature_of_norm(norm: str) -> str:
    return LOG_NORMS if norm == "log8" else ""


def norm_of_byte(c: int) -> float:
    """README.md, Norms of 8 bits."""
    octave, part = divmod(c - 1, 16)
    return math.ldexp(f32(2.0 ** (part / 16)), octave - 7) if c else 0.0


RAW_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def take_parameters(entry: Mapping[str, Any], ranges: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> list[Any]:
    """The parameters in the page's order, each within its range: a range of integers, the values allowed, or a type.

    A seed may be any integer: those of the msgpack profile are from 0 to 2^64 - 1.

    Those of ``optional``, which come last, are None where they are left out.
    """
    rule = f"codecs/{entry['id']}.md, Parameters and ranges"
    optional = {} if optional is None else optional
    expected = ["id", *ranges, *(name for name in optional if name in entry)]
    require(list(entry) == expected, rule, f"the keys are {list(entry)}, not {expected}")
    for name, allowed in [*ranges.items(), *((name, optional[name]) for name in optional if name in entry)]:
        value = entry[name]
        if isinstance(allowed, type):
            require(isinstance(value, allowed), rule, f"{name} is {value!r}")
        else:  # a list, for what may not be a key of a map
            require(value in (allowed if isinstance(allowed, range) else list(allowed)), rule, f"{name} is {value!r}")
    return [*(entry[name] for name in ranges), *(entry.get(name) for name in optional)]


def check_rotation(kind: str, dim: int) -> None:
    require(kind == "none" or factors(dim) is not None, "README.md, Rotation", f"{kind} has no head dim {dim}")


def packings(
    codec_id: str, fields: Mapping[str, Any], symbols: int, streams: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
) -> dict[str, Columns]:
    """The packing of every code stream, from its bases and alphabets and the F of the header."""
    rule = f"codecs/{codec_id}.md, Parameters and ranges"
    require(list(fields) == list(streams), rule, f"fields names {list(fields)}, not {list(streams)}")
    made = {}
    for name, (bases, alphabets) in streams.items():
        count = fields[name]
        require(isinstance(count, int), rule, f"fields of {name} is {count!r}")
        require(within_limits(bases, count), "README.md, Bit packing", f"{name} with bases {bases} has {count} fields a column")
        made[name] = Columns(symbols, bases, count, alphabets)
    return made


def one_digit(base: int, alphabet: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (base,), (alphabet or base,)


# codecs/klt.md, basis.md ---------------------------------------------------------------------------------------------

KLT_PARAMETERS = "codecs/klt.md, Parameters and ranges"
BASIS = "basis"
BALANCED = "balanced"
RUN_COLUMNS, SHORT_COLUMNS = 16, 8
TABLE_VALUES = 510


def basis_rows(dim: int) -> int:
    """N(dim)."""
    return 2 + dim + ceil_div(TABLE_VALUES * ceil_div(dim, RUN_COLUMNS), dim)


def klt(entry: Mapping[str, Any]) -> Codec:
    rule = KLT_PARAMETERS
    dim, digest, layer, side, rows, widths, gain, fields = take_parameters(
        entry,
        {
            "dim": range(1, MAX_DIM + 1),
            "basis": bytes,
            "layer": range(4096),
            "side": ("k", "v"),
            "rows": ("basis", *HALF_OR_SINGLE),
            "widths": bytes,
            "gain": ("none", "fp16"),
            "fields": dict,
        },
    )
    require(len(digest) == 32, rule, f"basis has {len(digest)} bytes")
    of_heads, short = list(fields) == ["codes"], ceil_div(dim, SHORT_COLUMNS)
    right = len(widths) > 0 and len(widths) % short == 0 if of_heads else len(widths) == ceil_div(dim, RUN_COLUMNS)
    require(right, rule, f"widths has {len(widths)} bytes")
    require(max(widths) <= 8 and any(widths), rule, f"widths is {widths.hex()}")
    if of_heads:
        require(fields["codes"] == SHORT_COLUMNS, rule, f"fields of codes is {fields['codes']!r}")
    columns: dict[str, list[int]] = {} if of_heads else {f"codes_{width}": [] for width in sorted({*widths} - {0})}
    for j in range(0 if of_heads else dim):
        if widths[j // RUN_COLUMNS]:
            columns[f"codes_{widths[j // RUN_COLUMNS]}"].append(j)
    require(of_heads or list(fields) == list(columns), rule, f"fields names {list(fields)}, not {list(columns)}")
    codes: dict[str, Columns] = {}
    for name, own in columns.items():
        codes |= packings("klt", {name: fields[name]}, len(own), {name: one_digit(2 ** int(name[-1]))})
    # The columns of each short run of each head, and its bytes in a row.
    runs = [range(8 * s, min(8 * s + 8, dim)) for s in range(short)] * (len(widths) // short) if of_heads else []
    sizes = [ceil_div(len(run) * width, 8) for run, width in zip(runs, widths, strict=True)] if of_heads else []

    def check_bits(side: Any, prefix: str) -> None:
        of: dict[str, list[Any]] = side.numbers
        for at in range(0, len(of["codes"]), sum(sizes)):
            for run, width, size in zip(runs, widths, sizes, strict=True):
                own = int.from_bytes(bytes(of["codes"][at : at + size]), "little")
                require(own >> len(run) * width == 0, "codecs/klt.md, Layout", f"{prefix}codes: bits of no column at byte {at}")
                at += size

    def codes_of_heads(side: Any, prefix: str) -> dict[str, list[list[list[int]]]]:
        """For each token of a head the code and the width of each column."""
        of: dict[str, list[Any]] = side.numbers
        rows: list[list[list[int]]] = [[[], []] for _ in range(side.batch * side.heads * side.packed)]
        for token in range(side.batch * side.packed):
            at, (b, t) = token * sum(sizes), divmod(token, side.packed)
            for number, (run, width, size) in enumerate(zip(runs, widths, sizes, strict=True)):
                own = int.from_bytes(bytes(of["codes"][at : at + size]), "little")
                found = rows[(b * side.heads + number // short) * side.packed + t]
                found[0] += [own >> j * width & 2**width - 1 for j in range(len(run))]
                found[1] += [width] * len(run)
                at += size
        return {"codes": rows}

    def coded(digits: Digits, row: Numbers) -> tuple[list[float], list[float]]:
        """m and v."""
        mean = [256.0 * value for value in row["rows"][:dim]]
        tables = row["rows"][dim * (2 + dim) :]
        v = [0.0] * dim
        all_codes = [(j, int(name[-1]), s) for name, own in columns.items() for j, s in zip(own, digits[name][0], strict=True)]
        if of_heads:
            all_codes = [(j, width, s) for j, (s, width) in enumerate(zip(*digits["codes"], strict=True)) if width]
        for j, width, s in all_codes:
            v[j] = tables[TABLE_VALUES * (j // RUN_COLUMNS) + 2**width - 2 + s]
            if gain == "fp16":
                v[j] *= row["gain"][0]
        return mean, v

    def decode(digits: Digits, row: Numbers) -> list[float]:
        mean, v = coded(digits, row)
        matrix = [row["rows"][dim * (1 + j) : dim * (2 + j)] for j in range(dim)]
        return [f32(math.fsum((m + value) * d[c] for m, value, d in zip(mean, v, matrix, strict=True))) for c in range(dim)]

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        mean, v = coded(digits, row)
        matrix = [row["rows"][dim * (1 + j) : dim * (2 + j)] for j in range(dim)]
        sums = (sum((abs(m) + abs(value)) * abs(d[c]) for m, value, d in zip(mean, v, matrix, strict=True)) for c in range(dim))
        return [2.0**-18 * one + 2.0**-126 for one in sums]

    numbers_ = [NumberStream("codes", "U8", (sum(sizes),), per_head=False)] if of_heads else []
    numbers_ += [NumberStream("gain", "F16", ())] if gain == "fp16" else []
    if rows != "basis":
        numbers_.append(NumberStream("rows", HALF_OR_SINGLE[rows], (basis_rows(dim), dim), per="run"))
    found = Codec("klt", dim, 1, codes, numbers_, decode, tolerance, basis=(digest, layer, side) if rows == "basis" else None)
    if of_heads:
        found = replace(found, heads=len(widths) // short, coded=codes_of_heads, check_sizes=check_bits)
    return found


def check_basis(file: File) -> None:
    """basis.md, File, but for the values."""
    rule = "basis.md, File"
    for number, layer in enumerate(file.layers):
        for name, side in layer.items():
            if side is not None:
                what = f"{number}.{name}"
                dtypes = [stream.dtype for stream in side.codec.streams.values() if isinstance(stream, NumberStream)]
                require(side.codec.id == "raw" and dtypes[0] in ("F16", "F32"), rule, f"{what}: codec {side.codec.id} {dtypes}")
                require(side.batch == 1 and side.tail == 0, rule, f"{what}: batch {side.batch}, tail {side.tail}")
                require(side.packed >= basis_rows(side.codec.dim), rule, f"{what}: {side.packed} rows")


def basis_named(digest: bytes, bases: Mapping[bytes, bytes], rule: str, prefix: str) -> File:
    """The basis with a digest among ``bases``, files by digest."""
    require(digest in bases, rule, f"{prefix}*: MissingBasis: the basis {digest.hex()} was not given")
    assert hashlib.sha256(bases[digest]).digest() == digest
    found = read(bases[digest])
    require(BASIS in found.required, "basis.md, File", f"{prefix}*: {digest.hex()} is a cache and no basis")
    return found


def balanced_for(side: Side, prefix: str, bases: Mapping[bytes, bytes]) -> list[dict[str, list[float]]]:
    """side-cars.md, Balanced keys: the matrix of each head."""
    rule = f"{SIDE_CARS}, Layout"
    named = side.codec.side_cars["balanced"].basis
    assert named is not None
    digest, layer, frame = named
    found = basis_named(digest, bases, rule, prefix)
    name = f"{layer}.state.k.{frame}"
    tensors = {tensor.name: tensor for tensor in found.tensors}
    require(name in tensors, rule, f"{prefix}*: the basis has no {name}")
    heads, dim = side.heads, side.codec.dim
    require(tensors[name].shape == (1, heads, dim, dim), rule, f"{prefix}*: {name} has the shape {tensors[name].shape}")
    matrices = numbers(found.states[name], tensors[name].dtype)
    return [{"balanced": matrices[h * dim * dim : (h + 1) * dim * dim]} for h in range(heads)]


def given_for(side: Side, prefix: str, bases: Mapping[bytes, bytes]) -> list[dict[str, list[float]]]:
    """For each head of a side that needs a basis, what it takes from ``bases``, files by digest: its rows, or its frame."""
    rule = f"codecs/{side.codec.id}.md, Parameters and ranges"
    assert side.codec.basis is not None
    digest, layer, name = side.codec.basis
    found = basis_named(digest, bases, rule, prefix)
    require(layer < len(found.layers) and found.layers[layer][name] is not None, rule, f"{prefix}*: the basis has no {layer}.{name}")
    basis = found.layers[layer][name]
    assert basis is not None
    same = (basis.heads, basis.codec.dim) == (side.heads, side.codec.dim)
    require(same, rule, f"{prefix}*: the basis has {basis.heads} heads of {basis.codec.dim} channels")
    if side.codec.scope:
        return frames_for(side, prefix, found)
    size = basis.packed * basis.codec.dim
    return [{"rows": basis.values[h * size : (h + 1) * size]} for h in range(basis.heads)]


# codecs/transform.md; basis.md, Frames and Rotary positions -----------------------------------------------------------

FRAMES = "basis.md, Frames"
ROPE = ("rope.halves", "rope.neighbours")
TABLES = ("table.frequencies", "table.values")
KEYS = ("k.balanced", "k.centered", "k.queries", "k.mean")


def check_frames(file: File, states: Mapping[str, Tensor]) -> None:
    """basis.md, Frames, but for the values; ``states`` by the names of their tensors."""
    framed = False
    for number, layer in enumerate(file.layers):
        for name, side in layer.items():
            frames, scales = (states.get(f"{number}.state.{name}.{what}") for what in ("frames", "scales"))
            if frames is None and scales is None:
                continue
            if frames is None or scales is None or side is None:
                refuse(FRAMES, f"{number}.{name} has not all of rows, frames and scales")
            framed, dim = True, side.codec.dim
            shapes: dict[tuple[int, ...], tuple[int, ...]] = {
                (1, f, 1 + n, n): (1, f, n) for f, n in ((side.heads, dim), (1, side.heads * dim))
            }
            require(frames.dtype in ("F16", "F32") and frames.shape in shapes, FRAMES, f"{frames.name} is {frames.dtype} {frames.shape}")
            require((scales.dtype, scales.shape) == ("U8", shapes[frames.shape]), FRAMES, f"{scales.name} is {scales.dtype} {scales.shape}")
        key_dim = check_keys(states, number, layer["k"])
        turned = [states[f"{number}.state.{name}"] for name in ROPE if f"{number}.state.{name}" in states]
        require(len(turned) <= 1, FRAMES, f"layer {number} pairs channels in two ways")
        for rope in turned:
            dim = layer["k"].codec.dim if layer["k"] else key_dim
            right = rope.dtype == "F32" and len(rope.shape) == 2 and 2 * rope.shape[1] <= dim
            require(right, FRAMES, f"{rope.name} is {rope.dtype} {rope.shape}, for a head dim of {dim}")
    frequencies, values = (states.get(f"0.state.{name}") for name in TABLES)
    if not framed and frequencies is None and values is None:
        return
    if frequencies is None or values is None:
        refuse(FRAMES, "layer 0 has not both table.frequencies and table.values")
    shape = frequencies.shape
    right = frequencies.dtype == "U16" and len(shape) == 3 and shape[1] <= 64 and shape[2] in range(4, 257, 2)
    require(right, FRAMES, f"{frequencies.name} is {frequencies.dtype} {shape}")
    right = (values.dtype, values.shape) == ("F16", (1, shape[1], shape[2] - 1))
    require(right, FRAMES, f"{values.name} is {values.dtype} {values.shape}")


def check_keys(states: Mapping[str, Tensor], number: int, side: Side | None) -> int:
    """basis.md, Balanced frames, but for the values. The head dim of the keys, 0 without any."""
    rule = "basis.md, Balanced frames"
    found = {name: states[f"{number}.state.{name}"] for name in KEYS if f"{number}.state.{name}" in states}
    if not found:
        return 0
    first = next((found[name] for name in KEYS[:2] if name in found), None)
    if first is None:
        refuse(rule, f"layer {number} has neither k.balanced nor k.centered")
    heads, n = (side.heads, side.codec.dim) if side else (first.shape[1], first.shape[3]) if len(first.shape) == 4 else (0, 0)
    require(n <= 1024, rule, f"{first.name} has the shape {first.shape}")
    for name, state in found.items():
        dtypes, shape = (("F16", "F32") if name in KEYS[:2] else ("F32",)), ((1, heads, n) if name == "k.mean" else (1, heads, n, n))
        require(state.dtype in dtypes and state.shape == shape, rule, f"{state.name} is {state.dtype} {state.shape}")
    return n


def check_frame_values(file: File) -> None:
    tensors = {tensor.name: tensor for tensor in file.tensors}
    for name, content in file.states.items():
        kind = name.split(".", 2)[2]
        if kind not in ("k.frames", "v.frames", *KEYS, *ROPE) and name not in [f"0.state.{table}" for table in TABLES]:
            continue
        found = numbers(content, tensors[name].dtype)
        if kind == TABLES[0]:
            alphabet = tensors[name].shape[2]
            for first in range(0, len(found), alphabet):
                check_frequencies(f"{name}, table {first // alphabet}", found[first : first + alphabet])
        else:
            rule = "basis.md, Balanced frames" if kind in KEYS else FRAMES
            require(all(map(math.isfinite, found)), rule, f"{name} has a value that is not finite")
            require(kind not in ROPE or all(0 <= one <= 2 for one in found), FRAMES, f"{name} has a frequency outside of 0 to 2")


def frames_for(side: Side, prefix: str, basis: File) -> list[dict[str, list[float]]]:
    """For each head its rows of the frame, one value for each channel, then the scales of the frame's columns, the tables and RoPE."""
    rule = "codecs/transform.md, Parameters and ranges"
    assert side.codec.basis is not None
    _, layer, name = side.codec.basis
    tensors = {tensor.name: tensor for tensor in basis.tensors}

    def state(number: int, kind: str) -> list[float]:
        return numbers(basis.states[f"{number}.state.{kind}"], tensors[f"{number}.state.{kind}"].dtype)

    require(f"{layer}.state.{name}.frames" in tensors, rule, f"{prefix}*: the basis has no frames of {layer}.{name}")
    _, count, _, n = tensors[f"{layer}.state.{name}.frames"].shape
    heads, dim = side.heads, side.codec.dim
    fits = (count, n) == ((heads, dim) if side.codec.scope == "head" else (1, heads * dim))
    require(fits, rule, f"{prefix}*: the basis has {count} frames of {n} columns, and the scope is {side.codec.scope}")
    _, _, alphabet = tensors[f"0.state.{TABLES[0]}"].shape
    shared = {TABLES[0]: state(0, TABLES[0]), TABLES[1]: state(0, TABLES[1]), "alphabet": [float(alphabet)]}
    if name == "k":
        shared |= {kind: state(layer, kind) for kind in ROPE if f"{layer}.state.{kind}" in tensors}
    all_rows, scales = state(layer, f"{name}.frames"), state(layer, f"{name}.scales")
    given = []
    for h in range(heads):
        frame, first = (h, 0) if count == heads else (0, h * dim)
        rows = all_rows[frame * (1 + n) * n : (frame + 1) * (1 + n) * n]
        own = [value for row in range(1 + n) for value in rows[row * n + first : row * n + first + dim]]
        given.append({"frame": own, "scales": scales[frame * n : (frame + 1) * n], **shared})
    return given


def transform(entry: Mapping[str, Any]) -> Codec:
    page = "codecs/transform.md"
    dim, digest, layer, of_side, scope, step, chunk = take_parameters(
        entry,
        {
            "dim": range(1, MAX_DIM + 1),
            "basis": bytes,
            "layer": range(4096),
            "side": ("k", "v"),
            "scope": ("head", "layer"),
            "step": range(256),
            "chunk": (16, 32, 64, 128, 256),
        },
    )
    require(len(digest) == 32, f"{page}, Parameters and ranges", f"basis has {len(digest)} bytes")
    require(chunk * dim <= 65536, f"{page}, Parameters and ranges", f"{chunk} tokens of {dim} channels make {chunk * dim} symbols")
    positions = [NumberStream("positions", "U16", (2,), chunk, per_head=False)] if of_side == "k" else []
    streams = [
        *positions,
        NumberStream("tokens", "U16", (), chunk, per_head=False),
        NumberStream("columns", "U16", (), chunk),
        NumberStream("states", "U16", (2 * RANS_LANES,), chunk),
        NumberStream("word_counts", "U16", (2,), chunk),
        NumberStream("words", "U16", (), per="entry"),
    ]

    def words_of_chunks(side: Side) -> list[int]:
        halves: list[Any] = side.numbers["word_counts"]
        return [low + 65536 * high for low, high in zip(halves[::2], halves[1::2], strict=True)]

    def groups_of(side: Side) -> list[int]:
        return [min(chunk, run - first) for run in side.runs for first in range(0, run, chunk)]

    def check_sizes(side: Side, prefix: str) -> None:
        total, rule, groups = sum(words_of_chunks(side)), f"{page}, Layout", groups_of(side)
        require(total == side.entries["words"], rule, f"{prefix}word_counts sum to {total}, not {side.entries['words']}")
        for row, found in enumerate(side.numbers["tokens"]):
            require(found == groups[row % len(groups)], rule, f"{prefix}tokens are {found}, not {groups[row % len(groups)]}")
        for found in side.numbers["columns"]:
            require(found <= dim, rule, f"{prefix}columns are {found} of {dim}")
        of: dict[str, list[Any]] = side.numbers
        first_states_of(f"{prefix}states", of["states"])

    def coded(side: Side, prefix: str) -> dict[str, list[list[list[int]]]]:
        """Decode, steps 1 and 2: for each token of a head its number in its group, and table, symbol and level of each column."""
        of: dict[str, list[Any]] = side.numbers
        counts, groups = words_of_chunks(side), groups_of(side)
        heads, taken, token = side.heads, 0, 0
        rows: list[list[list[int]]] = [[] for _ in range(side.batch * heads * side.packed)]
        for group, tokens in enumerate(groups):
            for b in range(side.batch):
                # For each token, by column of block h.
                blocks: list[list[list[list[int]]]] = []
                for h in range(heads):
                    row = (b * heads + h) * len(groups) + group
                    own = side.given[h]
                    scales = own["scales"] if scope == "head" else own["scales"][h::heads]
                    alphabet = int(own["alphabet"][0])
                    last = len(own[TABLES[0]]) // alphabet - 1
                    numbers_ = [min(max((step - int(s)) // 4, 0), last) for s in scales]
                    tables = [[int(f) for f in own[TABLES[0]][number * alphabet :][:alphabet]] for number in numbers_]
                    own_words = of["words"][taken : taken + counts[row]]
                    taken += len(own_words)
                    first_states = of["states"][row * 64 : row * 64 + 64]
                    where = f"{prefix}chunk {group} of head {b * heads + h}"
                    by_column = block_levels(where, tables[: of["columns"][row]], first_states, own_words, tokens)
                    by_column += [[(-1, 0)] * tokens] * (dim - len(by_column))
                    blocks.append([[[n, *by_column[c][t]] for c, n in enumerate(numbers_)] for t in range(tokens)])
                for h in range(heads):
                    for t in range(tokens):
                        columns = blocks[h][t] if scope == "head" else [blocks[j % heads][t][j // heads] for j in range(heads * dim)]
                        rows[(b * heads + h) * side.packed + token + t] = [[t], *columns]
            token += tokens
        return {"columns": rows}

    def parts(digits: Digits, row: Numbers) -> tuple[list[float], list[float]]:
        """u, and the tolerance of each of its channels."""
        alphabet, values, frame = int(row["alphabet"][0]), row[TABLES[1]], row["frame"]
        delta = 2.0 ** (-step / 16)
        u, tau = [[frame[c]] for c in range(dim)], [abs(frame[c]) for c in range(dim)]
        for j, (table, symbol, level) in enumerate(digits["columns"][1:]):
            if symbol >= 0:
                v = delta * (level if symbol == 0 else values[table * (alphabet - 1) + symbol - 1])
                for c in range(dim):
                    product = v * frame[(1 + j) * dim + c]
                    u[c].append(product)
                    tau[c] += abs(product)
        return [math.fsum(terms) for terms in u], [2.0**-18 * one + 2.0**-126 for one in tau]

    def pairs(digits: Digits, row: Numbers) -> list[tuple[int, int, float]]:
        """The channels that are turned together, and by which angle."""
        halves, neighbours = (row.get(name, []) for name in ROPE)
        if not halves and not neighbours:
            return []
        low, high = row["positions"]
        position = low + 65536 * high + digits["columns"][0][0]
        if halves:
            return [(i, i + len(halves), position * f) for i, f in enumerate(halves)]
        return [(2 * i, 2 * i + 1, position * f) for i, f in enumerate(neighbours)]

    def decode(digits: Digits, row: Numbers) -> list[float]:
        x, _ = parts(digits, row)
        for a, b, theta in pairs(digits, row):
            x[a], x[b] = x[a] * math.cos(theta) - x[b] * math.sin(theta), x[b] * math.cos(theta) + x[a] * math.sin(theta)
        return [f32(one) for one in x]

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        u, tau = parts(digits, row)
        for a, b, _ in pairs(digits, row):
            tau[a] = tau[b] = tau[a] + tau[b] + 2.0**-18 * (abs(u[a]) + abs(u[b]))
        return tau

    basis = digest, layer, of_side
    return Codec("transform", dim, chunk, {}, streams, decode, tolerance, coded=coded, basis=basis, scope=scope, check_sizes=check_sizes)


def block_levels(
    where: str, tables: Sequence[Sequence[int]], first_states: Sequence[int], chunk_words: Sequence[int], tokens: int
) -> list[list[tuple[int, int]]]:
    """For each column that has symbols, and each token, the symbol and, after an escape, the level."""
    symbols, taken = any_symbols(where, [table for table in tables for _ in range(tokens)], first_states, chunk_words)
    escapes = iter(range(taken, len(chunk_words), 2))
    needed = taken + 2 * symbols.count(0)
    require(needed == len(chunk_words), "codecs/transform.md, Decode", f"{where} takes {needed} of its {len(chunk_words)} words")
    found = []
    for symbol in symbols:
        at = next(escapes) if symbol == 0 else 0
        level = chunk_words[at] + 65536 * chunk_words[at + 1] if symbol == 0 else 0
        found.append((symbol, level - 2**32 if level >= 2**31 else level))
    return [found[first : first + tokens] for first in range(0, len(found), tokens)]


# codecs/raw.md -------------------------------------------------------------------------------------------------------


def raw(entry: Mapping[str, Any]) -> Codec:
    dim, dtype = take_parameters(entry, {"dim": range(1, MAX_DIM + 1), "dtype": RAW_DTYPES})
    values = NumberStream("values", RAW_DTYPES[dtype], (dim,), any_bits=True)
    return Codec("raw", dim, 1, {}, [values], lambda _, row: row["values"], lambda _, row: [0.0] * dim)


# rans.md -------------------------------------------------------------------------------------------------------------

RANS_LANES = 32
RANS_TOTAL = 4096
MIN_STATE = 65536


def check_frequencies(where: str, table: Sequence[int]) -> None:
    require(sum(table) == RANS_TOTAL, "rans.md, Tables", f"{where}: the frequencies sum to {sum(table)}")


def chunk_symbols(where: str, table: Sequence[int], first_states: Sequence[int], chunk_words: Sequence[int], n: int) -> list[int]:
    """Decode: the ``n`` symbols of a chunk whose symbols all have one table."""
    symbols, taken = any_symbols(where, [table] * n, first_states, chunk_words)
    require(taken == len(chunk_words), "rans.md, Decode", f"{where} takes {taken} of its {len(chunk_words)} words")
    return symbols


@cache
def slots(table: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The sums below every symbol of a table, and the symbol of every slot."""
    return list(accumulate(table, initial=0)), [s for s, frequency in enumerate(table) for _ in range(frequency)]


def first_states_of(where: str, halves: Sequence[int]) -> list[int]:
    """Chunks: the first states of lanes from their low and high halves."""
    states = [low + 65536 * high for low, high in zip(halves[::2], halves[1::2], strict=True)]
    least = min(states, default=MIN_STATE)
    require(least >= MIN_STATE, "rans.md, Chunks", f"{where}: a first state is {least}")
    return states


def any_symbols(
    where: str, tables: Sequence[Sequence[int]], first_states: Sequence[int], chunk_words: Sequence[int]
) -> tuple[list[int], int]:
    """Decode: the symbols of a chunk, each by its own table, and the number of words that they take."""
    states = first_states_of(where, first_states)
    symbols, taken = [], 0
    for i, table in enumerate(tables):
        below, symbol_of = slots(tuple(table))
        x = states[i % RANS_LANES]
        slot = x % RANS_TOTAL
        s = symbol_of[slot]
        x = table[s] * (x // RANS_TOTAL) + slot - below[s]
        if x < MIN_STATE:
            require(taken < len(chunk_words), "rans.md, Decode", f"{where} needs more than its {len(chunk_words)} words")
            x = x * 65536 + chunk_words[taken]
            taken += 1
        states[i % RANS_LANES] = x
        symbols.append(s)
    require(max(states) == MIN_STATE, "rans.md, Decode", f"{where} ends in the state {max(states)}")
    return symbols, taken


# codecs/lossless.md --------------------------------------------------------------------------------------------------

FIELDS_OF_HALVES = {"bf16": (8, 7), "fp16": (5, 10)}
"""Bits of the exponent field and of the fraction field."""


def lossless(entry: Mapping[str, Any]) -> Codec:
    page = "codecs/lossless.md"
    dim, dtype, chunk, fields = take_parameters(
        entry, {"dim": range(1, MAX_DIM + 1), "dtype": FIELDS_OF_HALVES, "chunk": (16, 32, 64, 128, 256), "fields": dict}
    )
    require(chunk * dim <= 65536, f"{page}, Parameters and ranges", f"{chunk} tokens of {dim} channels make {chunk * dim} symbols")
    e_bits, m_bits = FIELDS_OF_HALVES[dtype]
    codes = packings("lossless", fields, dim, {"signed_fractions": one_digit(2 ** (m_bits + 1))})
    streams = [
        NumberStream("frequencies", "U16", (2**e_bits,), per="run"),
        NumberStream("states", "U16", (2 * RANS_LANES,), chunk),
        NumberStream("word_counts", "U16", (), chunk),
        NumberStream("words", "U16", (), per="entry"),
    ]

    def coded(side: Side, prefix: str) -> dict[str, list[list[list[int]]]]:
        """Decode, step 1: the exponent fields, as digits of every token."""
        numbers_of: dict[str, list[Any]] = side.numbers
        counts, words_of_all = numbers_of["word_counts"], numbers_of["words"]
        total = sum(counts)
        require(total == side.entries["words"], f"{page}, Layout", f"{prefix}word_counts sum to {total}, not {side.entries['words']}")
        groups = [(run, min(chunk, tokens - first)) for run, tokens in enumerate(side.runs) for first in range(0, tokens, chunk)]
        rows: list[list[list[int]]] = [[] for _ in range(side.batch * side.heads * side.packed if side.packed else 0)]
        taken = token = 0
        for group, (run, tokens) in enumerate(groups):
            for head in range(side.batch * side.heads):
                where = f"{prefix}chunk {group} of head {head}"
                row, size = head * len(groups) + group, 2**e_bits
                table = numbers_of["frequencies"][(head * len(side.runs) + run) * size :][:size]
                check_frequencies(where, table)
                own = words_of_all[taken : taken + counts[row]]
                symbols = chunk_symbols(where, table, numbers_of["states"][row * 64 : row * 64 + 64], own, tokens * dim)
                taken += counts[row]
                for t in range(tokens):
                    rows[head * side.packed + token + t] = [symbols[t * dim : (t + 1) * dim]]
            token += tokens
        return {"exponents": rows}

    def decode(digits: Digits, row: Numbers) -> list[float]:
        values = zip(digits["exponents"][0], digits["signed_fractions"][0], strict=True)
        bits = [(c >> m_bits) << 15 | e << m_bits | c % 2**m_bits for e, c in values]
        return numbers(struct.pack(f"<{dim}H", *bits), RAW_DTYPES[dtype])

    return Codec("lossless", dim, chunk, codes, streams, decode, lambda *_: [0.0] * dim, coded=coded)


# codecs/group.md -----------------------------------------------------------------------------------------------------


PER_HEAD = "-per-head"
SCALE_PER_HEAD = "token-scale-per-head"


def group(entry: Mapping[str, Any]) -> Codec:
    dim, bits, axis, size, rotation_kind, seed, token_scale, fields, scale_dtype = take_parameters(
        entry,
        {
            "dim": range(1, MAX_DIM + 1),
            "bits": range(1, 9),
            "axis": ("token", "channel"),
            "size": (4, 8, 16, 32, 64, 128),
            "rotation_kind": ROTATION_KINDS,
            "seed": int,
            "token_scale": ("none", *HALF_OR_SINGLE, *(name + PER_HEAD for name in HALF_OR_SINGLE)),
            "fields": dict,
        },
        optional={"scale_dtype": ("u8",)},
    )
    check_rotation(rotation_kind, dim)
    codes = packings("group", fields, dim, {"codes": one_digit(2**bits)})
    by_token = axis == "token"
    dtype = "U8" if scale_dtype else "F16"
    streams = [NumberStream("scales", dtype, (dim, 2) if by_token else (ceil_div(dim, size), 2), size if by_token else 1)]
    if scale_dtype:
        streams.append(NumberStream("scale_range", "F16", (4,), per="run"))
    if token_scale != "none":
        dtype = HALF_OR_SINGLE[token_scale.removesuffix(PER_HEAD)]
        streams.append(NumberStream("token_scale", dtype, (), per_head=token_scale.endswith(PER_HEAD)))

    def decode(digits: Digits, row: Numbers) -> list[float]:
        m = (2**bits - 1) / 2
        u = []
        for j, c in enumerate(digits["codes"][0]):
            at = j if by_token else j // size
            scale, centre = row["scales"][2 * at : 2 * at + 2]
            if scale_dtype:
                scale, centre = of_8_bits(row, 0, scale), of_8_bits(row, 1, centre)
            value = f32((c - m) * scale + centre)
            u.append(value if token_scale == "none" else f32(value * row["token_scale"][0]))
        return u

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        return [0.0] * dim

    def check(where: str, digits: Digits, row: Numbers) -> None:
        for member in (0, 1) if scale_dtype else ():
            for k in (0, 255):
                finite = math.isfinite(of_8_bits(row, member, k))
                require(finite, "codecs/group.md, Decode", f"{where}: scale_range gives an infinite number for {k}")

    token_group = size if by_token else 1
    feature = SCALE_PER_HEAD if token_scale.endswith(PER_HEAD) else ""
    return Codec("group", dim, token_group, codes, streams, decode, tolerance, check, rotation_kind, seed, feature=feature)


def of_8_bits(row: Numbers, member: int, k: float) -> float:
    """Scales of 8 bits: the scale (``member`` 0) or the centre (1) that the integer ``k`` stands for."""
    step, minimum = row["scale_range"][2 * member : 2 * member + 2]
    r = f32(minimum + step * k)
    return f16(f32(r * abs(r)))


# codecs/minifloat.md -------------------------------------------------------------------------------------------------

ELEMENTS = {"e4m3": (8, 4, 3, 7), "e5m2": (8, 5, 2, 15), "e2m1": (4, 2, 1, 1)}
"""Bits, bits of the exponent and of the fraction, and bias."""
NOT_FINITE = {"e4m3": range(0x7F, 0x80), "e5m2": range(0x7C, 0x80), "e2m1": range(0)}
"""Codes without their sign that are NaN or infinity."""


def element(name: str, c: int) -> float:
    """Decode, step 2; with a finite code."""
    bits, _, fraction_bits, bias = ELEMENTS[name]
    g, rest = divmod(c, 2 ** (bits - 1))
    e, f = divmod(rest, 2**fraction_bits)
    value = math.ldexp(2**fraction_bits + f, e - bias - fraction_bits) if e else math.ldexp(f, 1 - bias - fraction_bits)
    return -value if g else value


def minifloat(entry: Mapping[str, Any]) -> Codec:
    page = "codecs/minifloat.md"
    in_blocks = {"e8m0": 32, "e4m3": 16}
    of_blocks = entry.get("granularity") == "block"
    dim, name, granularity, scale_dtype, fields = take_parameters(
        entry,
        {
            "dim": range(1, MAX_DIM + 1),
            "element": ELEMENTS,
            "granularity": ("tensor", "head", "token", "block"),
            "scale_dtype": in_blocks if of_blocks else HALF_OR_SINGLE,
            "fields": dict,
        },
    )
    require(scale_dtype != "e4m3" or name == "e2m1", f"{page}, Parameters and ranges", f"scale_dtype is e4m3 and element {name}")
    bits = ELEMENTS[name][0]
    codes = packings("minifloat", fields, dim, {"codes": one_digit(2**bits)})
    size = in_blocks[scale_dtype] if of_blocks else dim
    if of_blocks:
        streams = [NumberStream("block_scales", "U8", (ceil_div(dim, size),))]
        if scale_dtype == "e4m3":
            streams.append(NumberStream("global_scale", "F32", (), per_head=False, per="run"))
    else:
        per = "tokens" if granularity == "token" else "run"
        streams = [NumberStream("scale", HALF_OR_SINGLE[scale_dtype], (), per_head=granularity != "tensor", per=per)]

    def decode(digits: Digits, row: Numbers) -> list[float]:
        values = []
        for j, c in enumerate(digits["codes"][0]):
            v = element(name, c)
            if not of_blocks:
                values.append(f32(v * row["scale"][0]))
                continue
            k = int(row["block_scales"][j // size])
            values.append(f32(v * 2.0 ** (k - 127)) if scale_dtype == "e8m0" else f32(v * element("e4m3", k) * row["global_scale"][0]))
        return values

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        return [0.0] * dim

    def check(where: str, digits: Digits, row: Numbers) -> None:
        special = f"{page}, Special values"
        for j, c in enumerate(digits["codes"][0]):
            require(c % 2 ** (bits - 1) not in NOT_FINITE[name], special, f"{where}: the element {c:#04x} of channel {j} is not finite")
        for number in row["block_scales"] if of_blocks else ():
            limit = 0xFE if scale_dtype == "e8m0" else 0x7E
            require(number <= limit, special, f"{where}: a {scale_dtype} of block_scales is {int(number):#04x}")

    return Codec("minifloat", dim, 1, codes, streams, decode, tolerance, check)


# codecs/octahedral.md ------------------------------------------------------------------------------------------------


def ascending_table(rule: str, name: str, data: bytes, length: int, highest: float) -> list[float]:
    require(len(data) == 4 * length, rule, f"{name} has {len(data)} bytes, not {4 * length}")
    values: list[float] = numbers(data, "F32")
    require(all(0 <= value <= highest for value in values), rule, f"a value of {name} is not in [0, {highest}]")
    require(all(a < b for a, b in pairwise(values)), rule, f"{name} does not ascend strictly")
    return values


def octahedral(entry: Mapping[str, Any]) -> Codec:
    rule = "codecs/octahedral.md, Parameters and ranges"
    dim, b_dir, b_norm, arrangement, norm, rotation_kind, seed, direction_bytes, norm_bytes, fields = take_parameters(
        entry,
        {
            "dim": range(4, MAX_DIM + 1),
            "b_dir": range(1, 9),
            "b_norm": range(9),
            "arrangement": ("dense", "direct"),
            "norm": TOKEN_NORMS,
            "rotation_kind": ROTATION_KINDS,
            "seed": int,
            "direction_table": bytes,
            "norm_table": bytes,
            "fields": dict,
        },
    )
    check_rotation(rotation_kind, dim)
    levels = 2 ** (b_dir - 1)
    direction_table = ascending_table(rule, "direction_table", direction_bytes, levels, 1.0)
    norm_table = ascending_table(rule, "norm_table", norm_bytes, 2**b_norm, 1.0)
    triplets = ceil_div(dim, 3)

    with_index = 2 * (b_dir - 1) + b_norm in (1, 2, 4, 8, 16)
    index_bits = 2 * (b_dir - 1) + (b_norm if with_index else 0)
    sign_bits = 2 + (0 if with_index else b_norm)
    merged = index_bits + sign_bits <= 8 or index_bits == 0
    streams: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    if arrangement == "dense":
        streams = {"index": one_digit(2**index_bits)} if index_bits else {}
        streams["sign"] = one_digit(2**sign_bits)
        symbols = triplets
    else:
        bases: tuple[int, ...] = (2 ** (index_bits + sign_bits),) if merged else (2**index_bits, 2**sign_bits)
        streams = {"symbol": (bases, bases)}
        symbols = ceil_div(triplets, 24) * 24

    def index_and_sign(digits: Digits) -> tuple[list[int], list[int]]:
        if arrangement == "dense":
            return digits["index"][0] if index_bits else [0] * triplets, digits["sign"][0]
        if merged:
            symbol = digits["symbol"][0]
            return [s % 2**index_bits for s in symbol], [s >> index_bits for s in symbol]
        return digits["symbol"][0], digits["symbol"][1]

    def check(where: str, digits: Digits, row: Numbers) -> None:
        for digit in digits.get("symbol", []):
            require(not any(digit[triplets:]), "codecs/octahedral.md, Layout", f"{where}: a triplet beyond the last is not zero")

    def decode(digits: Digits, row: Numbers) -> list[float]:
        u: list[float] = []
        for index, sign in list(zip(*index_and_sign(digits), strict=True))[:triplets]:
            magnitudes, n = (index % levels**2, index // levels**2) if with_index else (index, sign // 4)
            direction = _octahedral_direction(direction_table[magnitudes % levels], direction_table[magnitudes // levels], sign)
            u += [f32(f32(part * norm_table[n]) * row["norm"][0]) for part in direction]
        return u[:dim]

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        return [2.0**-20 * abs(row["norm"][0]) + 2.0**-126] * dim

    codes = packings("octahedral", fields, symbols, streams)
    norms = norm_stream(norm)
    return Codec("octahedral", dim, 1, codes, [norms], decode, tolerance, check, rotation_kind, seed, feature=feature_of_norm(norm))


def _octahedral_direction(xi: float, eta: float, sign: int) -> tuple[float, float, float]:
    """Steps 1 to 4 of Decode."""
    z = (1 - xi) - eta
    x, y = (xi, eta) if z >= 0 else (1 - eta, 1 - xi)
    length = math.sqrt(x * x + y * y + z * z)
    x, y, z = f32(x / length), f32(y / length), f32(z / length)
    return -x if sign & 1 else x, -y if sign & 2 else y, z


# codecs/quaternion.md ------------------------------------------------------------------------------------------------

UNITS = [
    tuple((1.0 if p % 2 == 0 else -1.0) if part == p // 2 else 0.0 for part in range(4))
    if p < 8
    else tuple(-0.5 if p - 8 >> part & 1 else 0.5 for part in range(4))
    for p in range(24)
]


def odd_part(n: int) -> tuple[int, int]:
    """(k, m) with n = 2^k * m and m odd."""
    k = (n & -n).bit_length() - 1
    return k, n >> k


@cache
def secondary_quaternions(seed: int, count: int) -> list[tuple[float, ...]]:
    return [tuple(map(f32, quaternion)) for quaternion in unit_quaternions(seed, count)]


def hamilton_product(left: Sequence[float], right: Sequence[float]) -> list[float]:
    a, b, c, d = left
    w, x, y, z = right
    product = (
        a * w - b * x - c * y - d * z,
        a * x + b * w + c * z - d * y,
        a * y - b * z + c * w + d * x,
        a * z + b * y - c * x + d * w,
    )
    return [f32(part) for part in product]


def quaternion(entry: Mapping[str, Any]) -> Codec:
    dim, secondary, radius_bits, arrangement, norm, rotation_kind, seed, rotation_seed, fields = take_parameters(
        entry,
        {
            "dim": range(1, MAX_DIM + 1),
            "secondary": range(1, 4097),
            "radius_bits": range(1, 9),
            "arrangement": ("dense", "direct"),
            "norm": HALF_OR_SINGLE,
            "rotation_kind": ROTATION_KINDS,
            "seed": int,
            "rotation_seed": int,
            "fields": dict,
        },
    )
    if arrangement == "direct":
        require(secondary <= 2730, "codecs/quaternion.md, Parameters and ranges", f"secondary is {secondary}, but direct")
    check_rotation(rotation_kind, dim)
    chunks = ceil_div(dim, 4)
    codewords = 24 * secondary
    k, m = odd_part(codewords)
    split = codewords > MAX_BASE or default_row_bytes(chunks, 2**k, m) < default_row_bytes(chunks, codewords)
    streams: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    if arrangement == "direct":
        streams = {"symbol": ((power_of_two_at_least(codewords), 2**radius_bits), (codewords, 2**radius_bits))}
    else:
        streams = {"codeword_low": one_digit(2**k), "codeword_high": one_digit(m)} if split else {"codeword": one_digit(codewords)}
        streams["radius"] = one_digit(2**radius_bits)

    def codes_of(digits: Digits) -> tuple[list[int], list[int]]:
        if arrangement == "direct":
            return digits["symbol"][0], digits["symbol"][1]
        if split:
            pairs = zip(digits["codeword_high"][0], digits["codeword_low"][0], strict=True)
            return [high * 2**k + low for high, low in pairs], digits["radius"][0]
        return digits["codeword"][0], digits["radius"][0]

    def decode(digits: Digits, row: Numbers) -> list[float]:
        u: list[float] = []
        unit_radius = f32(row["scale"][0] / (2**radius_bits - 1))
        for g, c in zip(*codes_of(digits), strict=True):
            r = f32(c * unit_radius)
            u += [f32(r * part) for part in hamilton_product(UNITS[g % 24], secondary_quaternions(seed, secondary)[g // 24])]
        return u[:dim]

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        return [2.0**-22 * abs(value) + 2.0**-118 for value in decode(digits, row)]

    scales = NumberStream("scale", HALF_OR_SINGLE[norm], ())
    codes = packings("quaternion", fields, chunks, streams)
    return Codec("quaternion", dim, 1, codes, [scales], decode, tolerance, rotation_kind=rotation_kind, rotation_seed=rotation_seed)


# codecs/angle.md -----------------------------------------------------------------------------------------------------

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


def nearest_f32(x: Decimal) -> float:
    """``x`` correctly rounded to binary32, not by way of binary64; what is below 10^-40 is a zero."""
    guess = f32(float(x))
    if abs(x) < Decimal("1e-40"):
        return 0.0
    (bits,) = struct.unpack("<I", struct.pack("<f", guess))
    near = struct.unpack("<3f", struct.pack("<3I", bits - 1, bits, bits + 1))
    return float(min(near, key=lambda y: abs(Decimal(y) - x)))


def cosine_and_sine(theta: Decimal) -> tuple[float, float]:
    """Both of an angle in [0, 2 pi), correctly rounded to binary32, from their power series to 50 digits."""
    with localcontext() as context:
        context.prec = 60
        sums, term, n = [Decimal(0), Decimal(0)], Decimal(1), 0
        while abs(term) > Decimal("1e-50"):
            sums[n % 2] += term if n % 4 < 2 else -term
            n += 1
            term = term * theta / n
        return nearest_f32(sums[0]), nearest_f32(sums[1])


@cache
def bin_direction(k: int, bins: int) -> tuple[float, float]:
    """(cos, sin) of 2 pi (k + 1/2) / bins."""
    with localcontext() as context:
        context.prec = 60
        theta = PI * (2 * k + 1) / bins
    return cosine_and_sine(theta)


def angle(entry: Mapping[str, Any]) -> Codec:
    rule = "codecs/angle.md, Parameters and ranges"
    dim, bins, norm, norm_bits, arrangement, range_dtype, rotation_kind, seed, fields = take_parameters(
        entry,
        {
            "dim": range(2, MAX_DIM + 1, 2),
            "bins": range(2, MAX_BASE + 1),
            "norm": ("fp32", "linear", "log"),
            "norm_bits": range(9),
            "arrangement": ("dense", "direct"),
            "range": HALF_OR_SINGLE,
            "rotation_kind": ROTATION_KINDS,
            "seed": int,
            "fields": dict,
        },
    )
    coded = norm != "fp32"
    require((norm_bits > 0) == coded, rule, f"norm_bits is {norm_bits} with norm {norm}")
    require(coded or (arrangement, range_dtype) == ("dense", "fp16"), rule, f"{arrangement} and range {range_dtype} with fp32 norms")
    check_rotation(rotation_kind, dim)
    pairs = dim // 2
    k, m = odd_part(bins)
    rounded = power_of_two_at_least(bins)
    choices = [(default_row_bytes(pairs, rounded), "rounded")]
    if k > 0 and m > 1:
        choices.append((default_row_bytes(pairs, 2**k, m), "split"))
    choices.append((default_row_bytes(pairs, bins), "exact"))
    base = min(choices, key=lambda choice: choice[0])[1]
    streams: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    if arrangement == "direct":
        streams = {"symbol": ((rounded, 2**norm_bits), (bins, 2**norm_bits))}
    else:
        if base == "split":
            streams = {"angle_low": one_digit(2**k), "angle_high": one_digit(m)}
        else:
            streams = {"angle": one_digit(rounded if base == "rounded" else bins, bins)}
        if coded:
            streams["norm_codes"] = one_digit(2**norm_bits)
    stored = NumberStream("range", HALF_OR_SINGLE[range_dtype], (2,)) if coded else NumberStream("norm", "F32", (pairs,))

    def bins_of(digits: Digits) -> list[int]:
        if arrangement == "direct":
            return digits["symbol"][0]
        if base == "split":
            return [high * 2**k + low for high, low in zip(digits["angle_high"][0], digits["angle_low"][0], strict=True)]
        return digits["angle"][0]

    def norm_codes(digits: Digits) -> list[int]:
        return digits["symbol"][1] if arrangement == "direct" else digits["norm_codes"][0]

    def norms_of(digits: Digits, row: Numbers) -> list[float]:
        if not coded:
            return row["norm"]
        step, minimum = row["range"]
        sums = [f32(minimum + f32(step * c)) for c in norm_codes(digits)]
        return sums if norm == "linear" else [f32(2.0**e) if e < 128 else math.inf for e in sums]

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        if not coded:
            return [2.0**-22 * abs(r) + 2.0**-118 for r in row["norm"] for _ in range(2)]
        step, minimum = row["range"]
        products = [abs(step) * c for c in norm_codes(digits)]
        if norm == "linear":
            return [2.0**-21 * (abs(minimum) + product) + 2.0**-118 for product in products for _ in range(2)]
        relative = [2.0**-17 + 2.0**-24 * product for product in products]
        return [share * r + 2.0**-118 for share, r in zip(relative, norms_of(digits, row), strict=True) for _ in range(2)]

    def decode(digits: Digits, row: Numbers) -> list[float]:
        points = zip(norms_of(digits, row), bins_of(digits), strict=True)
        return [f32(r * part) for r, number in points for part in bin_direction(number, bins)]

    codes = packings("angle", fields, pairs, streams)
    return Codec("angle", dim, 1, codes, [stored], decode, tolerance, rotation_kind=rotation_kind, rotation_seed=seed)


# codecs/scalar.md ----------------------------------------------------------------------------------------------------


def scalar(entry: Mapping[str, Any]) -> Codec:
    rule = "codecs/scalar.md, Parameters and ranges"
    dim, bits, bits_high, high_channels, norm, rotation_kind, seed, table_bytes, high_table_bytes, fields = take_parameters(
        entry,
        {
            "dim": range(2, MAX_DIM + 1),
            "bits": range(1, 9),
            "bits_high": range(9),
            "high_channels": bytes,
            "norm": TOKEN_NORMS,
            "rotation_kind": ROTATION_KINDS,
            "seed": int,
            "magnitude_table": bytes,
            "high_magnitude_table": bytes,
            "fields": dict,
        },
    )
    check_rotation(rotation_kind, dim)
    require(bits_high == 0 or bits_high > bits, rule, f"bits_high is {bits_high} with {bits} bits")
    flags = int.from_bytes(high_channels, "little")
    require(len(high_channels) == (ceil_div(dim, 8) if bits_high else 0), rule, f"high_channels has {len(high_channels)} bytes")
    require(flags >> dim == 0, rule, "high_channels sets a bit beyond the channels")
    high = [bool(flags >> c & 1) for c in range(dim)]
    require(bits_high == 0 or 0 < sum(high) < dim, rule, f"high_channels sets {sum(high)} of {dim} channels")
    tables = [
        ascending_table(rule, "magnitude_table", table_bytes, 2 ** (bits - 1), 1.0),
        ascending_table(rule, "high_magnitude_table", high_table_bytes, 2 ** (bits_high - 1) if bits_high else 0, 1.0),
    ]
    codes = packings("scalar", {"codes": fields.get("codes")}, dim - sum(high), {"codes": one_digit(2**bits)})
    if bits_high:
        codes |= packings("scalar", {"codes_high": fields.get("codes_high")}, sum(high), {"codes_high": one_digit(2**bits_high)})
    require(list(fields) == list(codes), rule, f"fields names {list(fields)}, not {list(codes)}")

    def decode(digits: Digits, row: Numbers) -> list[float]:
        u = []
        places = [0, 0]
        for of_high in high:
            s = digits["codes_high" if of_high else "codes"][0][places[of_high]]
            places[of_high] += 1
            negative, level = divmod(s, len(tables[of_high]))
            magnitude = tables[of_high][level]
            u.append(f32((-magnitude if negative else magnitude) * row["norm"][0]))
        return u

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        return [2.0**-20 * abs(row["norm"][0]) + 2.0**-126] * dim

    stored, feature = norm_stream(norm), feature_of_norm(norm)
    return Codec("scalar", dim, 1, codes, [stored], decode, tolerance, rotation_kind=rotation_kind, rotation_seed=seed, feature=feature)


# codecs/trellis.md ---------------------------------------------------------------------------------------------------


def trellis(entry: Mapping[str, Any]) -> Codec:
    rule = "codecs/trellis.md, Parameters and ranges"
    dim, bits, state_bits, norm, rotation_kind, seed, table_bytes = take_parameters(
        entry,
        {
            "dim": range(1, MAX_DIM + 1),
            "bits": range(1, 5),
            "state_bits": (8, 10),
            "norm": TOKEN_NORMS,
            "rotation_kind": ROTATION_KINDS,
            "seed": int,
            "table": bytes,
        },
    )
    check_rotation(rotation_kind, dim)
    length = dim * bits
    require(length % 16 == 0, rule, f"{dim} channels of {bits} bits are {length} bits, no multiple of 16")
    require(len(table_bytes) == 2 << state_bits, rule, f"table has {len(table_bytes)} bytes, not {2 << state_bits}")
    table = numbers(table_bytes, "F16")
    require(all(-1 <= value <= 1 for value in table), rule, "a value of table is not in [-1, 1]")
    codes = {"codes": Columns(length // 16, (65536,), 1, (65536,))}

    def decode(digits: Digits, row: Numbers) -> list[float]:
        string = sum(word << 16 * place for place, word in enumerate(digits["codes"][0]))
        # Twice in a row, no window crosses the end.
        string |= string << length
        windows = [string >> (bits * (c + 1) - state_bits) % length & (1 << state_bits) - 1 for c in range(dim)]
        return [f32(table[window] * row["norm"][0]) for window in windows]

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        return [2.0**-20 * abs(row["norm"][0]) + 2.0**-126] * dim

    stored, feature = norm_stream(norm), feature_of_norm(norm)
    return Codec("trellis", dim, 1, codes, [stored], decode, tolerance, rotation_kind=rotation_kind, rotation_seed=seed, feature=feature)


# codecs/polar.md -----------------------------------------------------------------------------------------------------


@cache
def angle_direction(psi: float) -> tuple[float, float]:
    return cosine_and_sine(Decimal(psi))


def polar(entry: Mapping[str, Any]) -> Codec:
    rule = "codecs/polar.md, Parameters and ranges"
    dim, dotted, norm, rotation_kind, seed, table_bytes, fields = take_parameters(
        entry,
        {
            "dim": range(2, MAX_DIM + 1, 2),
            "bits": str,
            "norm": HALF_OR_SINGLE,
            "rotation_kind": ROTATION_KINDS,
            "seed": int,
            "angle_table": bytes,
            "fields": dict,
        },
    )
    require(re.fullmatch(r"[1-8](\.[1-8])*", dotted) is not None, rule, f"bits is {dotted!r}")
    bits = [0, *map(int, dotted.split("."))]
    levels = len(bits) - 1
    require(2 ** (levels - 1) < dim, rule, f"bits has {levels} levels for {dim} channels")
    check_rotation(rotation_kind, dim)
    radii = [ceil_div(dim, 2**level) for level in range(levels + 1)]
    pairs = [0] + [radii[level - 1] // 2 for level in range(1, levels + 1)]

    def unequal(level: int) -> bool:
        """Whether the last pair of ``level`` has a second radius of fewer channels than the first."""
        of_equal_pairs: int = pairs[level] << level
        return bool(of_equal_pairs > dim)

    # Tables: per level, the directions of equal pairs and those of the unequal one.
    directions: list[tuple[list[tuple[float, float]], list[tuple[float, float]]]] = [([], [])]
    directions.append(([bin_direction(code, 2 ** bits[1]) for code in range(2 ** bits[1])], []))
    at = 0
    for level in range(2, levels + 1):
        tables = []
        for present in (pairs[level] > unequal(level), unequal(level)):
            size = 4 * 2 ** bits[level] if present else 0
            psi = ascending_table("codecs/polar.md, Layout", "angle_table", table_bytes[at : at + size], size // 4, math.pi / 2)
            tables.append([angle_direction(value) for value in psi])
            at += size
        directions.append((tables[0], tables[1]))
    require(at == len(table_bytes), "codecs/polar.md, Layout", f"angle_table has {len(table_bytes)} bytes, not {at}")

    # Streams: consecutive levels of equal bits share one.
    first_level: dict[str, list[int]] = {}
    for level in range(1, levels + 1):
        if bits[level] != bits[level - 1]:
            name = f"angles{level}"
            first_level[name] = []
        first_level[name].append(level)
    codes: dict[str, Columns] = {}
    require(list(fields) == list(first_level), rule, f"fields names {list(fields)}, not {list(first_level)}")
    for name, members in first_level.items():
        symbols = sum(pairs[level] for level in members)
        codes |= packings("polar", {name: fields[name]}, symbols, {name: one_digit(2 ** bits[members[0]])})

    def decode(digits: Digits, row: Numbers) -> list[float]:
        by_level: dict[int, list[int]] = {}
        for name, members in first_level.items():
            rest = digits[name][0]
            for level in members:
                by_level[level], rest = rest[: pairs[level]], rest[pairs[level] :]
        rho = row["radius"]
        for level in range(levels, 0, -1):
            below: list[float] = []
            for i, code in enumerate(by_level[level]):
                odd = unequal(level) and i == pairs[level] - 1
                c, s = directions[level][odd][code]
                below += [f32(rho[i] * c), f32(rho[i] * s)]
            rho = below + rho[pairs[level] :]
        return rho

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        return [2.0**-19 * abs(row["radius"][channel // 2**levels]) + 2.0**-118 for channel in range(dim)]

    stored = NumberStream("radius", HALF_OR_SINGLE[norm], (radii[levels],))
    return Codec("polar", dim, 1, codes, [stored], decode, tolerance, rotation_kind=rotation_kind, rotation_seed=seed)


CODECS: dict[str, Callable[[Mapping[str, Any]], Codec]] = {
    "raw": raw,
    "group": group,
    "lossless": lossless,
    "klt": klt,
    "minifloat": minifloat,
    "octahedral": octahedral,
    "quaternion": quaternion,
    "angle": angle,
    "scalar": scalar,
    "polar": polar,
    "transform": transform,
    "trellis": trellis,
}


# side-cars.md --------------------------------------------------------------------------------------------------------

SIDE_CARS = "side-cars.md"
SIDE_CAR_KEYS = (
    "balanced",
    "channel_scale",
    "channel_order",
    "block_rotation",
    "key_mean",
    "outliers",
    "qjl",
    "raw_tokens",
    "raw_positions",
)
POSITION_WORDS = 4


def take_choice(value: Any, allowed: Mapping[str, str], what: str) -> str:
    require(value in list(allowed), SIDE_CARS, f"{what} is {value!r}")
    return allowed[value]


def take_flags(value: Mapping[str, Any], symbols: int, what: str) -> Columns:
    fields = value["fields"]
    require(isinstance(fields, int), SIDE_CARS, f"{what}: fields is {fields!r}")
    require(within_limits((2,), fields), "README.md, Bit packing", f"{what} has {fields} fields a column")
    return Columns(symbols, (2,), fields, (2,))


def take_side_cars(entry: Mapping[str, Any], codec: Codec) -> dict[str, SideCar]:
    """The side-cars that the map of a codec names, each within its ranges."""
    names = [name for name in SIDE_CAR_KEYS if name in entry]
    require(list(entry)[len(entry) - len(names) :] == names, SIDE_CARS, f"the keys of {codec.id} are in the order {list(entry)}")
    require(not names or codec.id != "raw", SIDE_CARS, f"raw has the side-cars {names}")
    require(not names or codec.id != "lossless", "codecs/lossless.md, Parameters and ranges", f"lossless has the side-cars {names}")
    for codec_id in ("klt", "transform"):
        taken = codec.id != codec_id or names in ([], ["raw_positions"])
        require(taken, f"codecs/{codec_id}.md, Parameters and ranges", f"{codec_id} has the side-cars {names}")
    return {name: take_side_car(name, entry[name], codec) for name in names}


def take_side_car(name: str, value: Any, codec: Codec) -> SideCar:
    dim = codec.dim
    if name == "balanced":
        right = isinstance(value, dict) and list(value) == ["basis", "layer", "frame"]
        require(right and isinstance(value["basis"], bytes) and len(value["basis"]) == 32, SIDE_CARS, f"balanced is {value!r}")
        right = isinstance(value["layer"], int) and value["layer"] in range(4096) and value["frame"] in ("balanced", "centered")
        require(right, SIDE_CARS, f"balanced is {value!r}")
        return SideCar({}, [], basis=(value["basis"], value["layer"], value["frame"]))
    if name == "channel_scale":
        return SideCar({}, [NumberStream(name, take_choice(value, HALF_OR_SINGLE, name), (dim,), per="run")])
    if name == "channel_order":
        dtype = take_choice(value, {"u8": "U8", "u16": "U16"}, name)
        require(dtype == "U16" or dim <= 256, SIDE_CARS, f"channel_order in 8 bits with head dim {dim}")
        return SideCar({}, [NumberStream(name, dtype, (dim,), per="run")])
    if name == "block_rotation":
        require(isinstance(value, int) and value >= 2 and dim % value == 0, SIDE_CARS, f"block_rotation is {value!r} with head dim {dim}")
        require(factors(value) is not None, "README.md, Rotation", f"block_rotation has no blocks of {value}")
        return SideCar({}, [], block=value)
    if name == "raw_tokens":
        dtype = take_choice(value, RAW_DTYPES, name)
        flags = NumberStream("raw_token_flags", "U8", (), per_head=False)
        return SideCar({}, [flags, NumberStream(name, dtype, (), any_bits=True, per="entry")])
    if name == "raw_positions":
        values = NumberStream("raw_values", take_choice(value, RAW_DTYPES, name), (), any_bits=True, per="entry")
        return SideCar({}, [NumberStream(name, "U16", (POSITION_WORDS,), per="entry"), values])
    keys = {"key_mean": ["tokens", "bits"], "outliers": ["fields"], "qjl": ["seed", "norm", "fields"]}[name]
    if not isinstance(value, dict) or list(value) != keys:
        refuse(SIDE_CARS, f"{name} is {value!r}, not a map of {keys}")
    if name == "key_mean":
        tokens, bits = value["tokens"], value["bits"]
        require(tokens in [2**power for power in range(3, 11)], SIDE_CARS, f"key_mean has tokens {tokens!r}")
        require(bits in (4, 8), SIDE_CARS, f"key_mean has bits {bits!r}")
        require(bits == 8 or dim % 2 == 0, SIDE_CARS, f"key_mean of 4 bits with head dim {dim}")
        require(codec.token_group == 1, SIDE_CARS, f"key_mean of {codec.id}, which has the token group {codec.token_group}")
        means = NumberStream(name, "U8", (dim * bits // 8,), tokens)
        return SideCar({}, [means, NumberStream("key_mean_scale", "F16", (), tokens)], bits=bits)
    if name == "outliers":
        require(dim % 4 == 0, SIDE_CARS, f"outliers with head dim {dim}")
        codes = {"outlier_flags": take_flags(value, dim // 4, name)}
        return SideCar(codes, [NumberStream(name, "F16", (4,), per="entry")])
    require(isinstance(value["seed"], int), SIDE_CARS, f"the seed of qjl is {value['seed']!r}")
    norm = take_choice(value["norm"], HALF_OR_SINGLE, "the norm of qjl")
    require(factors(dim) is not None, "README.md, Rotation", f"qjl has no head dim {dim}")
    return SideCar({"qjl_signs": take_flags(value, dim, name)}, [NumberStream("qjl_norm", norm, ())], value["seed"])


def entry_places(flags: Mapping[tuple[int, ...], int]) -> dict[tuple[int, ...], int]:
    """The entry of each flag that is 1; keys of ``flags`` begin with token, sequence, and then what else the entries follow."""
    return {place: number for number, place in enumerate(sorted(place for place, flag in flags.items() if flag))}


def check_special_values(name: str, stream: NumberStream, values: Sequence[float]) -> None:
    """Special values, of codecs and side-cars."""
    finite = stream.any_bits or all(map(math.isfinite, values))
    require(finite, "README.md, Conformance", f"{name} holds a number that is not finite")
    if stream.name == "channel_scale":
        require(all(value > 0 for value in values), f"{SIDE_CARS}, Special values", f"{name} holds a scale that is not above 0")
    if stream.name == "channel_order":
        dim = stream.sizes[0]
        for row in range(0, len(values), dim):
            once = sorted(values[row : row + dim]) == list(range(dim))
            require(once, f"{SIDE_CARS}, Special values", f"{name} row {row // dim} does not name every channel once")
    if stream.name == "raw_token_flags":
        require(all(value < 2 for value in values), f"{SIDE_CARS}, Special values", f"{name} holds a flag that is neither 0 nor 1")


def page_vector(codec: Codec, row: Numbers) -> list[float]:
    """Step 3 of Decode: what the channels of u gain."""
    bits, (scale,) = codec.side_cars["key_mean"].bits, row["key_mean_scale"]
    codes = [int(code) for code in row["key_mean"]]
    if bits == 4:
        codes = [code % 16 for code in codes] + [code // 16 for code in codes]
    return [(code - 2 ** (bits - 1)) * scale for code in codes]


def signs_of_residual(seed: int, digit: Sequence[int]) -> list[float]:
    """R'ᵀ s of step 4 of Decode."""
    return rotate_back("signed-hadamard", seed, [-1.0 if bit else 1.0 for bit in digit])


# container.md, Fields ------------------------------------------------------------------------------------------------

HEADER_KEYS = ["format", "required", "ignorable", "model", "recipe", "start", "codecs", "layers", "tensors"]
SIDE_KEYS = ["codec", "batch", "heads", "runs", "tail", "tail_dtype", "window"]


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    filter: str = "none"
    stored_bytes: int = 0
    digest: bytes = b""

    @property
    def bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass
class Side:
    """One side of a layer, and what ``read`` makes of its tensors.

    ``digits`` holds the rows of every code stream, ``numbers`` every other stream; ``values`` are ``shape`` in C order, in the
    original frame, and ``tolerances`` say how far from each another reader's value may be.
    """

    codec: Codec
    batch: int
    heads: int
    runs: list[int]
    tail: int
    tail_dtype: str
    window: int
    entries: Mapping[str, int] = field(default_factory=dict)
    digits: dict[str, list[list[list[int]]]] = field(default_factory=dict)
    numbers: dict[str, list[float]] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)
    tolerances: list[float] = field(default_factory=list)
    given: list[dict[str, list[float]]] = field(default_factory=list)
    """Of a side that needs a basis: what each head takes from it."""

    @property
    def packed(self) -> int:
        return sum(self.runs)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.packed + self.tail, self.codec.dim

    def rows(self, stream: NumberStream) -> int:
        """container.md, Runs and tail: a stream with one row for every g tokens starts a fresh row at each run."""
        if stream.per == "entry":
            return self.entries[stream.name]
        return len(self.runs) if stream.per == "run" else sum(ceil_div(run, stream.tokens) for run in self.runs)

    def sizes(self, stream: NumberStream) -> tuple[int, ...]:
        """The sizes of a row; an entry of raw tokens has those of all heads."""
        return (self.heads, self.codec.dim) if stream.name in ("raw_tokens", "raw_values") else stream.sizes

    def tensors(self, prefix: str) -> list[Tensor]:
        """The tensors that container.md and the codec's page give, in order, without what only the header says."""
        made = []
        for name, stream in self.codec.streams.items():
            if isinstance(stream, Columns):
                for plane, width in enumerate(stream.plane_words):
                    made.append(Tensor(f"{prefix}{name}.{plane}", "U16", (self.batch, self.heads, self.packed, width)))
            else:
                batch, heads = (1, 1) if stream.per == "entry" else (self.batch, self.heads if stream.per_head else 1)
                made.append(Tensor(prefix + name, stream.dtype, (batch, heads, self.rows(stream), *self.sizes(stream))))
        if self.tail:
            made.append(Tensor(f"{prefix}tail", RAW_DTYPES[self.tail_dtype], (self.batch, self.heads, self.tail, self.codec.dim)))
        return made


@dataclass
class File:
    """What a file holds."""

    required: list[str]
    ignorable: dict[str, bytes]
    model: dict[str, str]
    recipe: str
    start: int
    starts: list[int]
    codecs: list[Codec]
    layers: list[dict[str, Side | None]]
    tensors: list[Tensor]
    states: dict[str, bytes] = field(default_factory=dict)
    """The bytes of every state, by the name of its tensor."""
    hidden: list[tuple[int, int, int]] = field(default_factory=list)
    """Sequence, first position and end of every stretch of hidden tokens."""
    offsets: list[int] | None = None
    """The position offset of every sequence."""

    @property
    def metadata(self) -> dict[str, str | int | float]:
        return take_metadata(self.ignorable.get("metadata", b""))


FIELDS = "container.md, Fields"
POSITIONS = "container.md, Layer positions"
LAYER_POSITIONS = "layer-positions"
STATES = "container.md, Layer states"
LAYER_STATE = "layer-state"
RECORD = 96
HIDDEN = "container.md, Hidden tokens"
HIDDEN_TOKENS = "hidden-tokens"
HIDDEN_RECORD = 20
OFFSETS = "container.md, Position offsets"
POSITION_OFFSETS = "position-offsets"
CHECKSUMS = "zstd-checksum"
SIDE_CAR_FEATURES = {"balanced": BALANCED, "key_mean": "key-mean", "raw_positions": "raw-positions"}
CODEC_FEATURES = (*SIDE_CAR_FEATURES.values(), SCALE_PER_HEAD, LOG_NORMS)
REQUIRED_FEATURES = {name.encode() for name in (BASIS, HIDDEN_TOKENS, LAYER_POSITIONS, LAYER_STATE, POSITION_OFFSETS, *CODEC_FEATURES)}
LIMITS = "container.md, Limits"


def take_keys(value: Any, keys: list[str], what: str) -> list[Any]:
    found = list(value) if isinstance(value, dict) else type(value).__name__
    require(found == keys, FIELDS, f"{what} has the keys {found}, not {keys}")
    return list(value.values())


def require_integer(value: object, low: int, high: int, what: str) -> None:
    """An integer of the range in Fields, within its limit."""
    if not isinstance(value, int) or value < low:
        refuse(FIELDS, f"{what} is {value!r}")
    require(value <= high, LIMITS, f"{what} is {value}")


def take_names(value: Any, of: type, what: str) -> dict[str, Any]:
    require(isinstance(value, dict) and all(isinstance(entry, of) for entry in value.values()), FIELDS, f"{what} has another type")
    require(list(value) == sorted(value), Msgpack.RULE, f"the keys of {what} do not ascend")
    return dict(value)


def take_header(
    header: dict[str, Any], known: Mapping[str, Callable[[Mapping[str, Any]], Codec]] | None = None, *, without_tensors: bool = False
) -> File:
    """container.md, Fields; what is new in the header was told before. ``known`` are the codecs, ``without_tensors`` those of a page."""
    require(header.get("format") == FORMAT, FIELDS, f"format is {header.get('format')!r}")
    required: Any = header.get("required")
    require(isinstance(required, list) and all(isinstance(name, str) for name in required), FIELDS, "required is no array of strings")
    _, _, ignorable, model, recipe, start, codecs, layers, tensors = take_keys(header, HEADER_KEYS, "the header")
    ignorable, model = take_names(ignorable, bytes, "ignorable"), take_names(model, str, "model")
    require(isinstance(recipe, str), FIELDS, "recipe is no string")
    require_integer(start, 0, MAX_TOKENS, "start")
    require(isinstance(codecs, list) and isinstance(layers, list), FIELDS, "codecs or layers is no array")
    require(len(codecs) <= MAX_CODECS, LIMITS, f"{len(codecs)} codecs")
    require(len(layers) <= MAX_LAYERS, LIMITS, f"{len(layers)} layers")
    made = [take_codec(entry, f"codec {number}", CODECS if known is None else known) for number, entry in enumerate(codecs)]
    file = File(required, ignorable, model, recipe, start, [], made, [], [])
    for number, layer in enumerate(layers):
        sides = take_keys(layer, ["k", "v"], f"layer {number}")
        k, v = (None if side is None else take_side(side, made, f"layer {number}") for side in sides)
        if k and v:
            require((k.batch, k.shape[2]) == (v.batch, v.shape[2]), FIELDS, f"layer {number}: k and v differ in batch or tokens")
        require(v is None or "key_mean" not in v.codec.side_cars, SIDE_CARS, f"layer {number}: v has key_mean")
        file.layers.append({"k": k, "v": v})
    require(required == sorted(set(required)), "container.md, Header tensor", f"required is {required}, not in order or not each once")
    used = {codec.feature for codec in made}
    used |= {feature for name, feature in SIDE_CAR_FEATURES.items() if any(name in codec.side_cars for codec in made)}
    for feature in CODEC_FEATURES:
        require((feature in used) == (feature in required), "container.md, Header tensor", f"{feature} is either in required or in codecs")
    file.starts = take_starts(file, LAYER_POSITIONS in required)
    if BASIS in required:
        check_basis(file)
    states = take_states(file, LAYER_STATE in required)
    file.hidden = take_hidden(file, HIDDEN_TOKENS in required, [tensor.shape[0] for _, tensor in states])
    file.offsets = take_offsets(file, states, POSITION_OFFSETS in required)
    if BASIS in required:
        check_frames(file, {tensor.name: tensor for _, tensor in states})
    if without_tensors:
        return file
    expected = []
    for number, layer in enumerate(file.layers):
        expected += [tensor for name, side in layer.items() if side for tensor in side.tensors(f"{number}.{name}.")]
        expected += [tensor for of_layer, tensor in states if of_layer == number]
    require(isinstance(tensors, list) and len(tensors) == len(expected), FIELDS, f"tensors has not {len(expected)} entries")
    file.tensors = [take_tensor(entry, tensor) for entry, tensor in zip(tensors, expected, strict=True)]
    return file


def take_starts(file: File, named: bool) -> list[int]:
    """container.md, Layer positions: the start of every layer."""
    require(named == (LAYER_POSITIONS in file.ignorable), POSITIONS, f"{LAYER_POSITIONS} is not both in required and in ignorable")
    if not named:
        return [file.start] * len(file.layers)
    data = file.ignorable[LAYER_POSITIONS]
    require(len(data) == 8 * len(file.layers), POSITIONS, f"{len(data)} bytes for {len(file.layers)} layers")
    starts = [word64(data, at) for at in range(0, len(data), 8)]
    for number, (start, layer) in enumerate(zip(starts, file.layers, strict=True)):
        require(start >= file.start, POSITIONS, f"layer {number} starts at {start}, the file at {file.start}")
        require(start <= MAX_TOKENS, LIMITS, f"layer {number} starts at {start}")
        require(start == file.start or any(layer.values()), POSITIONS, f"layer {number} has no side, and starts at {start}")
    require(starts != [file.start] * len(starts), POSITIONS, f"every layer starts at {file.start}")
    return starts


def take_offsets(file: File, states: list[tuple[int, Tensor]], named: bool) -> list[int] | None:
    """container.md, Position offsets: the offset of every sequence."""
    require(named == (POSITION_OFFSETS in file.ignorable), OFFSETS, f"{POSITION_OFFSETS} is not both in required and in ignorable")
    if not named:
        return None
    data = file.ignorable[POSITION_OFFSETS]
    require(len(data) > 0 and len(data) % 8 == 0, OFFSETS, f"{len(data)} bytes")
    offsets = [int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, len(data), 8)]
    sides = [(start, side) for start, layer in zip(file.starts, file.layers, strict=True) for side in layer.values() if side]
    batches = {side.batch for _, side in sides} | {tensor.shape[0] for _, tensor in states}
    require(batches <= {len(offsets)}, OFFSETS, f"offsets of {len(offsets)} sequences, and batches of {sorted(batches)}")
    stop = max((start + side.shape[2] for start, side in sides), default=file.start)
    for offset in offsets:
        require(stop + offset >= 0, OFFSETS, f"the position after token {stop} is {stop + offset}")
        require(stop + offset <= MAX_TOKENS, LIMITS, f"the position after token {stop} is {stop + offset}")
    return offsets


def take_states(file: File, named: bool) -> list[tuple[int, Tensor]]:
    """container.md, Layer states: the layer and the tensor of every state."""
    require(named == (LAYER_STATE in file.ignorable), STATES, f"{LAYER_STATE} is not both in required and in ignorable")
    if not named:
        return []
    data = file.ignorable[LAYER_STATE]
    require(len(data) > 0 and len(data) % RECORD == 0, STATES, f"{len(data)} bytes")
    states: list[tuple[int, Tensor]] = []
    last = (-1, b"")
    for at in range(0, len(data), RECORD):
        layer, dtype, count = int.from_bytes(data[at : at + 2], "little"), data[at + 2], data[at + 3]
        sizes = [word64(data, at + 4 + 8 * place) for place in range(8)]
        name = data[at + 68 : at + RECORD].rstrip(b"\0")
        require(dtype < len(DTYPE_BYTES) and count <= 8, STATES, f"a state of dtype {dtype} with {count} sizes")
        require(all(sizes[: max(1, count)]) and not any(sizes[count:]), STATES, f"a state has the sizes {sizes}, of which {count} count")
        require(re.fullmatch(rb"[a-z][a-z0-9_.]*", name) is not None, STATES, f"a state is named {name!r}")
        require(sizes[0] <= MAX_BATCH and max(sizes) <= MAX_TOKENS, LIMITS, f"a state has the sizes {sizes}")
        require(layer < len(file.layers), STATES, f"a state of layer {layer}")
        require((layer, name) > last, STATES, f"the state {name!r} of layer {layer} follows {last}")
        before = [tensor.shape[0] for number, tensor in states if number == layer]
        batches = {sizes[0], *before, *(side.batch for side in file.layers[layer].values() if side)}
        require(len(batches) == 1, STATES, f"layer {layer} has different numbers of sequences")
        last = layer, name
        states.append((layer, Tensor(f"{layer}.state.{name.decode()}", list(DTYPE_BYTES)[dtype], tuple(sizes[:count]))))
    return states


def take_hidden(file: File, named: bool, sequences: list[int]) -> list[tuple[int, int, int]]:
    """container.md, Hidden tokens: every stretch of them; ``sequences`` are those of the states."""
    require(named == (HIDDEN_TOKENS in file.ignorable), HIDDEN, f"{HIDDEN_TOKENS} is not both in required and in ignorable")
    if not named:
        return []
    data = file.ignorable[HIDDEN_TOKENS]
    require(len(data) > 0 and len(data) % HIDDEN_RECORD == 0, HIDDEN, f"{len(data)} bytes")
    sides = [(start, side) for start, layer in zip(file.starts, file.layers, strict=True) for side in layer.values() if side]
    batch = min([*sequences, *(side.batch for _, side in sides)], default=0)
    end = max((start + side.shape[2] for start, side in sides), default=file.start)
    stretches: list[tuple[int, int, int]] = []
    for at in range(0, len(data), HIDDEN_RECORD):
        row, first, stop = int.from_bytes(data[at : at + 4], "little"), word64(data, at + 4), word64(data, at + 12)
        require(row < batch, HIDDEN, f"sequence {row} of {batch}")
        require(file.start <= first < stop <= end, HIDDEN, f"the stretch {first} to {stop} of a file of {file.start} to {end}")
        last = stretches[-1] if stretches else (-1, 0, 0)
        require(row > last[0] or (row == last[0] and first > last[2]), HIDDEN, f"{(row, first, stop)} after {last}")
        stretches.append((row, first, stop))
    return stretches


def take_metadata(data: bytes) -> dict[str, str | int | float]:
    """container.md, Metadata; none for bytes of another form."""
    found: dict[str, str | int | float] = {}
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
            found[name.decode()], last = value, name
        except UnicodeDecodeError:
            return {}
        if isinstance(value, float) and not math.isfinite(value):
            return {}
    return found if len(found) <= MAX_NAMES else {}


def take_codec(entry: Any, what: str, known: Mapping[str, Callable[[Mapping[str, Any]], Codec]]) -> Codec:
    require(isinstance(entry, dict) and isinstance(entry.get("id"), str), FIELDS, f"{what} has no id")
    codec = known[entry["id"]]({key: value for key, value in entry.items() if key not in SIDE_CAR_KEYS})
    side_cars = take_side_cars(entry, codec)
    page = entry["key_mean"]["tokens"] if "key_mean" in side_cars else codec.token_group
    return replace(codec, side_cars=side_cars, token_group=page)


def take_side(value: Any, codecs: list[Codec], what: str) -> Side:
    entries = value.get("entries") if isinstance(value, dict) else None
    own = {key: value[key] for key in value if key != "entries"} if isinstance(value, dict) else value
    number, batch, heads, runs, tail, tail_dtype, window = take_keys(own, SIDE_KEYS, f"a side of {what}")
    require(isinstance(number, int) and number < len(codecs), FIELDS, f"{what}: there is no codec {number!r}")
    codec = codecs[number]
    require_integer(batch, 1, MAX_BATCH, f"{what}: batch")
    require_integer(heads, 1, MAX_HEADS, f"{what}: heads")
    require(codec.heads in (0, heads), KLT_PARAMETERS, f"{what}: heads is {heads}, and there are widths of {codec.heads}")
    require(isinstance(runs, list), FIELDS, f"{what}: runs is {runs!r}")
    for run in runs:
        require(isinstance(run, int) and run >= 1, FIELDS, f"{what}: a run is {run!r}")
    require(isinstance(tail, int), FIELDS, f"{what}: tail is {tail!r}")
    require(sum(runs) + tail <= MAX_TOKENS, LIMITS, f"{what}: {sum(runs) + tail} tokens")
    require(isinstance(tail_dtype, str) and tail_dtype in RAW_DTYPES, FIELDS, f"{what}: tail_dtype is {tail_dtype!r}")
    require_integer(window, 0, MAX_TOKENS, f"{what}: window")
    require(window % codec.token_group == 0, FIELDS, f"{what}: window {window} is no multiple of the token group {codec.token_group}")
    rows_of_runs = any(isinstance(stream, NumberStream) and stream.per == "run" for stream in codec.streams.values())
    whole = codec.token_group > 1 or rows_of_runs or len(runs) <= 1
    require(whole, "container.md, Runs and tail", f"{what}: {len(runs)} runs of token group 1")
    of_entries = [name for name, stream in codec.streams.items() if isinstance(stream, NumberStream) and stream.per == "entry"]
    if of_entries:
        require(list(value) == [*SIDE_KEYS, "entries"], FIELDS, f"a side of {what} has the keys {list(value)}, the last not entries")
    else:
        require("entries" not in value, FIELDS, f"{what}: entries is {entries!r}, and no stream has a row per entry")
    return Side(codec, batch, heads, runs, tail, tail_dtype, window, take_entries(entries, of_entries, what))


def take_entries(value: Any, names: list[str], what: str) -> dict[str, int]:
    """The rows of the streams ``names``, which have a row per entry."""
    if not names:
        return {}
    if not isinstance(value, dict) or list(value) != names:
        refuse(FIELDS, f"{what}: entries is {value!r}, not of {names}")
    for name, count in value.items():
        require_integer(count, 0, MAX_TOKENS, f"{what}: entries of {name}")
    return value


def take_tensor(entry: Any, expected: Tensor) -> Tensor:
    require(isinstance(entry, list) and len(entry) == 6, FIELDS, f"the entry of tensor {expected.name} has not six places")
    name, dtype, shape, filter_, stored_bytes, digest = entry
    same = (name, dtype, shape) == (expected.name, expected.dtype, list(expected.shape))
    require(same, FIELDS, f"tensor {expected.name} is listed as {name!r} {dtype!r} {shape!r}")
    require(filter_ in ("none", "zstd"), FIELDS, f"the filter of {name} is {filter_!r}")
    require(isinstance(stored_bytes, int), FIELDS, f"stored_bytes of {name} is {stored_bytes!r}")
    require(isinstance(digest, bytes) and len(digest) == 16, FIELDS, f"the digest of {name} has not 16 bytes")
    if filter_ == "none":
        require(stored_bytes == expected.bytes, FIELDS, f"{name} takes {stored_bytes} bytes, not {expected.bytes}")
    else:
        require(expected.bytes <= MAX_RATIO * stored_bytes, LIMITS, f"{name} decodes to {expected.bytes} bytes from {stored_bytes}")
    return Tensor(name, dtype, expected.shape, filter_, stored_bytes, digest)


# container.md, JSON header -------------------------------------------------------------------------------------------

JSON_START = b'{"__metadata__":{"format":"kvpack","kvpack":"'
JSON_HEADER = re.compile(
    re.escape(JSON_START.decode()) + r'1 ([0-9a-f]{32})"\},'
    r'"kvpack\.header":\{"dtype":"U8","shape":\[([1-9][0-9]{0,6})\],"data_offsets":\[0,\2\]\}'
)
ALIGNMENT = 64
BLOCK = 4096


@dataclass(frozen=True)
class Place:
    """Where a tensor or pad lies in the data section; ``tensor`` is None for a pad."""

    begin: int
    end: int
    tensor: Tensor | None


def places(header_bytes: int, tensors: Sequence[Tensor]) -> list[Place]:
    """container.md, Tensors and alignment."""
    made, at = [], header_bytes
    for tensor in tensors:
        if at % ALIGNMENT:
            made.append(Place(at, ceil_div(at, ALIGNMENT) * ALIGNMENT, None))
            at = made[-1].end
        made.append(Place(at, at + tensor.stored_bytes, tensor))
        at += tensor.stored_bytes
    return made


def json_header(header: bytes, tensors: Sequence[Tensor]) -> bytes:
    """The JSON header, a function of the tensor ``kvpack.header`` and of what it lists."""
    parts = [JSON_START.decode() + f'{FORMAT} {xxh3_128(header).hex()}"}}']

    def entry(name: str, dtype: str, shape: Sequence[int], begin: int, end: int) -> str:
        return f',"{name}":{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":[{begin},{end}]}}'

    parts.append(entry("kvpack.header", "U8", [len(header)], 0, len(header)))
    pads = 0
    for place in places(len(header), tensors):
        size = place.end - place.begin
        if place.tensor is None:
            parts.append(entry(f"kvpack.pad.{pads}", "U8", [size], place.begin, place.end))
            pads += 1
        elif place.tensor.filter == "none":
            parts.append(entry(place.tensor.name, place.tensor.dtype, place.tensor.shape, place.begin, place.end))
        else:
            parts.append(entry(place.tensor.name, "U8", [size], place.begin, place.end))
    text = "".join(parts).encode("ascii") + b"}"
    return text + b" " * (-(8 + len(text)) % BLOCK)


# container.md, zstd: RFC 8878, Sec. 3.1.1 ----------------------------------------------------------------------------


def check_frame(name: str, frame: bytes, content: int, checksums: bool) -> None:
    """One frame with a content size, without a dictionary, its window within the limit, nothing before or after it.

    With ``checksums`` it has one.
    """
    rule = "container.md, zstd"

    def take(at: int, count: int) -> int:
        require(at + count <= len(frame), rule, f"{name}: the frame is cut off")
        return int.from_bytes(frame[at : at + count], "little")

    require(take(0, 4) == 0xFD2FB528, rule, f"{name}: no Zstandard frame")
    descriptor = take(4, 1)
    single_segment, checksum = descriptor >> 5 & 1, descriptor >> 2 & 1
    require(descriptor & 0x08 == 0, rule, f"{name}: the reserved bit of the frame is set")
    require(checksum == 1 or not checksums, rule, f"{name}: the frame has no content checksum")
    at, window = 5, None
    if not single_segment:
        exponent, mantissa = take(at, 1) >> 3, take(at, 1) & 7
        window = (1 << 10 + exponent) * (8 + mantissa) // 8
        at += 1
    dictionary_bytes = (0, 1, 2, 4)[descriptor & 3]
    require(take(at, dictionary_bytes) == 0, rule, f"{name}: the frame needs a dictionary")
    at += dictionary_bytes
    size_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
    require(size_bytes > 0, rule, f"{name}: the frame has no content size")
    size = take(at, size_bytes) + (256 if size_bytes == 2 else 0)
    at += size_bytes
    require(size == content, rule, f"{name}: the content has {size} bytes, not {content}")
    window = size if window is None else window
    require(window <= MAX_WINDOW_BYTES, rule, f"{name}: the window has {window} bytes")
    last = 0
    while not last:
        block = take(at, 3)
        last, kind, size = block & 1, block >> 1 & 3, block >> 3
        require(kind < 3, rule, f"{name}: a block of the reserved type")
        at += 3 + (1 if kind == 1 else size)
    require(at + 4 * checksum == len(frame), rule, f"{name}: the frame does not end where the tensor ends")


# container.md, Reading -----------------------------------------------------------------------------------------------

Decompress = Callable[[bytes, int], bytes]
"""Takes a Zstandard frame and the size of its content, and gives the content."""


def read(data: bytes, decompress: Decompress | None = None, bases: Sequence[bytes] = ()) -> File:
    """Check a whole file and decode it, in the order of container.md, Reading; raises ``Refused``.

    ``bases`` are the files of bases that the caller has.
    """
    rule = "container.md, JSON header"
    major = re.match(re.escape(JSON_START) + rb'([1-9][0-9]{0,8})[ "]', data[8 : 8 + len(JSON_START) + 10])
    if major is None:
        refuse(rule, "this is no kvpack file, or there is no major number")
    require(int(major[1]) <= FORMAT, rule, f"a newer version wrote this file: its format is {int(major[1])}, known is {FORMAT}")

    rule = "container.md, File"
    length = int.from_bytes(data[:8], "little")
    require(length <= MAX_JSON_BYTES, LIMITS, f"the JSON header has {length} bytes")
    require((8 + length) % BLOCK == 0, rule, f"8 + {length} is no multiple of {BLOCK}")
    require(8 + length <= len(data), rule, f"the JSON header has {length} bytes, and the file {len(data)}")

    json, section = data[8 : 8 + length], memoryview(data)[8 + length :]
    matched = JSON_HEADER.match(json.decode("latin-1"))
    require(matched is not None, "container.md, JSON header", "it does not begin with the metadata and kvpack.header")
    assert matched is not None
    header_bytes = int(matched[2])
    require(header_bytes <= MAX_HEADER_BYTES, LIMITS, f"kvpack.header has {header_bytes} bytes")
    require(header_bytes <= len(section), rule, "the file ends within kvpack.header")
    header = bytes(section[:header_bytes])
    require(xxh3_128(header).hex() == matched[1], "container.md, Digests", "kvpack.header has another digest")

    file = take_header(parse_msgpack(header))

    require(json == json_header(header, file.tensors), "container.md, JSON header", "its bytes do not follow from kvpack.header")
    laid = places(header_bytes, file.tensors)
    end = laid[-1].end if laid else header_bytes
    require(8 + length + end <= MAX_FILE_BYTES, LIMITS, f"the file has {8 + length + end} bytes")
    require(len(section) == end, rule, f"the data section has {len(section)} bytes, and its tensors {end}")

    contents: dict[str, bytes] = {}
    for place in laid:
        stored = bytes(section[place.begin : place.end])
        if place.tensor is None:
            require(not any(stored), "container.md, Tensors and alignment", f"the pad at {place.begin} is not zero")
        else:
            contents[place.tensor.name] = take_content(place.tensor, stored, decompress, CHECKSUMS in file.ignorable)
    given = by_digest(bases)
    for number_, layer in enumerate(file.layers):
        for name, side in layer.items():
            if side is not None:
                decode_side(side, f"{number_}.{name}.", contents, given)
                if BASIS in file.required:
                    finite = all(map(math.isfinite, side.values))
                    require(finite, "basis.md, File", f"{number_}.{name}: a value is not finite")
    file.states = {name: content for name, content in contents.items() if name.split(".")[1] == "state"}
    if BASIS in file.required:
        check_frame_values(file)
    return file


def by_digest(bases: Sequence[bytes]) -> dict[bytes, bytes]:
    """Files of bases by the digests that name them."""
    return {hashlib.sha256(basis).digest(): basis for basis in bases}


def take_content(tensor: Tensor, stored: bytes, decompress: Decompress | None, checksums: bool) -> bytes:
    require(xxh3_128(stored) == tensor.digest, "container.md, Digests", f"{tensor.name} has another digest")
    if tensor.filter == "none":
        return stored
    check_frame(tensor.name, stored, tensor.bytes, checksums)
    if decompress is None:
        refuse("container.md, zstd", f"{tensor.name}: no decompressor was given, and the standard library of Python 3.11 has none")
    content = decompress(stored, tensor.bytes)
    require(len(content) == tensor.bytes, "container.md, zstd", f"{tensor.name}: {len(content)} bytes came out, not {tensor.bytes}")
    return content


def decode_side(side: Side, prefix: str, contents: Mapping[str, bytes], bases: Mapping[bytes, bytes]) -> None:
    """Step 9 of Reading: the rules of the codec, then its values; all tokens of a head, the packed ones before the tail."""
    codec = side.codec
    for name, stream in codec.streams.items():
        if isinstance(stream, Columns):
            side.digits[name] = code_rows(side, prefix + name, stream, contents)
        else:
            side.numbers[name] = numbers(contents[prefix + name], stream.dtype)
            if stream.logarithms:
                side.numbers[name] = [norm_of_byte(int(c)) for c in side.numbers[name]]
            check_special_values(prefix + name, stream, side.numbers[name])
    codec.check_sizes(side, prefix)
    side.given = given_for(side, prefix, bases) if codec.basis else []
    places = {name: entry_places(flags) for name, flags in flags_of(side).items()}
    for name, found in places.items():
        rule = f"{SIDE_CARS}, Layout"
        require(len(found) == side.entries[name], rule, f"{prefix}{name} has {side.entries[name]} entries for {len(found)} flags")
    if "balanced" in codec.side_cars:
        side.given = balanced_for(side, prefix, bases)
    if "raw_positions" in codec.side_cars:
        places["raw_positions"] = position_places(side, prefix)
    all_digits = side.digits | codec.coded(side, prefix)
    tail: list[float] = numbers(contents[f"{prefix}tail"], RAW_DTYPES[side.tail_dtype]) if side.tail else []
    if side.shape[2] == 0:
        return
    tokens = [(number, token) for number, run in enumerate(side.runs) for token in range(run)]
    of_tokens = [stream for stream in codec.streams.values() if isinstance(stream, NumberStream) and stream.per != "entry"]
    first_rows = {stream.name: list(accumulate((ceil_div(run, stream.tokens) for run in side.runs), initial=0)) for stream in of_tokens}
    for b in range(side.batch):
        for h in range(side.heads):
            head = b * side.heads + h
            for t, (run, token) in enumerate(tokens):
                digits = {name: rows[head * len(tokens) + t] for name, rows in all_digits.items()}
                row = {}
                for stream in of_tokens:
                    first = first_rows[stream.name]
                    number = run if stream.per == "run" else first[run] + token // stream.tokens
                    rows = len(side.runs) if stream.per == "run" else first[-1]
                    row[stream.name] = number_row(side, stream, number + (head if stream.per_head else b) * rows)
                if side.given:
                    row |= side.given[h]
                codec.check(f"{prefix}* batch {b}, head {h}, token {t}", digits, row)
                x, tolerance = decode_token(side, places, (t, b, h), digits, row)
                side.values += x
                side.tolerances += tolerance
            size = side.tail * codec.dim
            side.values += tail[head * size : (head + 1) * size]
            side.tolerances += [0.0] * size


def code_rows(side: Side, name: str, packing: Columns, contents: Mapping[str, bytes]) -> list[list[list[int]]]:
    """The digits of every row of a code stream."""
    widths = packing.plane_words
    planes = [numbers(contents[f"{name}.{plane}"], "U16") for plane in range(len(widths))]
    return [
        packing.unpack([plane[row * w : (row + 1) * w] for plane, w in zip(planes, widths, strict=True)], f"{name} row {row}")
        for row in range(side.batch * side.heads * side.packed if side.packed else 0)
    ]


def flags_of(side: Side) -> dict[str, dict[tuple[int, ...], int]]:
    """side-cars.md, Layout: for each stream with a row per entry, the flags by token, sequence, and head and chunk."""
    made: dict[str, dict[tuple[int, ...], int]] = {}
    if "outliers" in side.codec.side_cars:
        rows = enumerate(side.digits["outlier_flags"])
        per_head = ((*divmod(row, side.packed), flag) for row, (flag,) in rows)
        made["outliers"] = {(t, *divmod(head, side.heads), c): one for head, t, flag in per_head for c, one in enumerate(flag)}
    if "raw_tokens" in side.codec.side_cars:
        flags: list[Any] = side.numbers["raw_token_flags"]
        made["raw_tokens"] = {(row % side.packed, row // side.packed): flag for row, flag in enumerate(flags)}
    return made


def position_places(side: Side, prefix: str) -> dict[tuple[int, ...], int]:
    """side-cars.md, Layout: the entry of each raw token by token and sequence."""
    count, rule = side.entries["raw_positions"], f"{SIDE_CARS}, Layout"
    has = side.entries["raw_values"]
    require(has == count, rule, f"{prefix}raw_values has {has} entries for {count} positions")
    found: dict[tuple[int, ...], int] = {}
    words = [[int(word) for word in side.numbers["raw_positions"][4 * entry : 4 * entry + 4]] for entry in range(count)]
    last: tuple[int, ...] = (-1, 0)
    for entry, (low, middle, high, b) in enumerate(words):
        t = low + 2**16 * middle + 2**32 * high - 1
        what = f"{prefix}raw_positions: entry {entry} is token {t} of sequence {b}"
        if t < 0:
            require(b == 0, rule, f"{what}, and unused")
            continue
        require(len(found) == entry, rule, f"{what}, behind one that is unused")
        require(t < side.packed and b < side.batch, rule, f"{what}, of {side.packed} and {side.batch}")
        require((t, b) > last, rule, f"{what}, behind {last}")
        last = t, b
        found[last] = entry
    size = side.heads * side.codec.dim
    unused = side.numbers["raw_values"][len(found) * size :]
    zero = not any(unused) and all(math.copysign(1.0, one) > 0 for one in unused)
    require(zero, rule, f"{prefix}raw_values: an unused entry is not zero")
    return found


def decode_token(
    side: Side, places: Mapping[str, Mapping[tuple[int, ...], int]], place: tuple[int, int, int], digits: Digits, row: Numbers
) -> tuple[list[float], list[float]]:
    """side-cars.md, Decode: the values of the token, sequence and head of ``place``, and their tolerances."""
    codec, (t, b, h) = side.codec, place
    for name, values in (("raw_positions", "raw_values"), ("raw_tokens", "raw_tokens")):
        if (t, b) in places.get(name, {}):
            at = (places[name][t, b] * side.heads + h) * codec.dim
            return side.numbers[values][at : at + codec.dim], [0.0] * codec.dim
    u, tolerance = list(codec.decode(digits, row)), list(codec.tolerance(digits, row))
    of_head = 0.0
    for c in range(codec.dim // 4 if "outliers" in places else 0):
        if (*place, c) in places["outliers"]:
            entry = 4 * places["outliers"][*place, c]
            u[4 * c : 4 * c + 4] = side.numbers["outliers"][entry : entry + 4]
            tolerance[4 * c : 4 * c + 4] = [0.0] * 4
    if "key_mean" in codec.side_cars:
        u = [f32(one + part) for one, part in zip(u, page_vector(codec, row), strict=True)]
        tolerance = [before + 2.0**-23 * abs(one) + 2.0**-126 for before, one in zip(tolerance, u, strict=True)]
    if "qjl" in codec.side_cars:
        (norm,) = row["qjl_norm"]
        gamma = norm * math.sqrt(math.pi / (2 * codec.dim))
        residual = signs_of_residual(codec.side_cars["qjl"].seed, digits["qjl_signs"][0])
        u = [f32(one + gamma * sign) for one, sign in zip(u, residual, strict=True)]
        tolerance = [before + 2.0**-23 * abs(one) + 2.0**-126 for before, one in zip(tolerance, u, strict=True)]
        of_head = 2.0**-18 * abs(norm)
    x = rotate_back(codec.rotation_kind, codec.rotation_seed, u)
    if codec.rotation_kind != "none":
        tolerance, of_head = rotated_tolerance(u, tolerance, of_head), 0.0
    if "block_rotation" in codec.side_cars:
        size = codec.side_cars["block_rotation"].block
        blocks = [slice(first, first + size) for first in range(0, codec.dim, size)]
        tolerance = [one for block in blocks for one in rotated_tolerance(x[block], tolerance[block], of_head)]
        x, of_head = [one for block in blocks for one in rotate_back("hadamard", 0, x[block])], 0.0
    tolerance = [one + of_head for one in tolerance]
    if "channel_order" in codec.side_cars:
        placed = sorted(zip(row["channel_order"], x, tolerance, strict=True))
        x, tolerance = [one for _, one, _ in placed], [one for _, _, one in placed]
    if "channel_scale" in codec.side_cars:
        scales = row["channel_scale"]
        x = [f32(one * scale) for one, scale in zip(x, scales, strict=True)]
        products = zip(tolerance, scales, x, strict=True)
        tolerance = [scale * before + 2.0**-23 * abs(one) + 2.0**-126 if before else 0.0 for before, scale, one in products]
    if "balanced" in codec.side_cars:
        columns = [row["balanced"][c :: codec.dim] for c in range(codec.dim)]
        sums = [sum(abs(one * d) for one, d in zip(x, column, strict=True)) for column in columns]
        before = [sum(one * abs(d) for one, d in zip(tolerance, column, strict=True)) for column in columns]
        tolerance = [own + 2.0**-18 * size + 2.0**-126 for own, size in zip(before, sums, strict=True)]
        x = [f32(math.fsum(one * d for one, d in zip(x, column, strict=True))) for column in columns]
    return x, tolerance


def number_row(side: Side, stream: NumberStream, row: int) -> list[float]:
    """The numbers of ``stream`` in row ``row`` of all."""
    size = math.prod(stream.sizes)
    return side.numbers[stream.name][row * size : (row + 1) * size]


# row.md --------------------------------------------------------------------------------------------------------------

ROW_MAGIC = b"kvpack-row 1\n\0\0\0"
FRAME_BYTES = 128
MAX_ROW_BYTES = 2**32 - 64
MULTIPLIER = 0x9E3779B97F4A7C15
PAGE_DTYPE = "page-dtype"
PAGE_DTYPES = (b"bf16", b"fp16", b"fp32", b"fp8_e4m3", b"fp8_e5m2", b"u8")
ROW = "row.md, Layout"


@dataclass
class Row:
    """A row: the fields of its frame, and its page as a file that holds nothing else."""

    namespace: bytes
    key: bytes
    page: File


def opaque(entry: Mapping[str, Any]) -> Codec:
    require(list(entry) == ["id", "dim"], "row.md, Decode", f"the keys of opaque are {list(entry)}")
    dim = entry["dim"]
    require(isinstance(dim, int) and 1 <= dim <= MAX_DIM, "row.md, Decode", f"dim is {dim!r}")
    values = NumberStream("bytes", "U8", (dim,), any_bits=True)
    return Codec("opaque", dim, 1, {}, [values], lambda _, row: row["bytes"], lambda _, row: [0.0] * dim)


def checksum(row: bytes) -> int:
    sum_ = 0
    for at in range(0, len(row), 4):
        sum_ = (sum_ * MULTIPLIER + (0 if 24 <= at < 32 else word32(row, at))) % 2**64
    return sum_


def read_row(data: bytes, bases: Sequence[bytes] = ()) -> Row:
    """Check a whole row and decode its page; what follows the row in ``data`` is not looked at. Raises ``Refused``.

    ``bases`` are the files of bases that the caller has.
    """
    require(data[:16] == ROW_MAGIC, ROW, "this is no row of version 1")
    length, stored = word64(data, 16), word64(data, 24)
    most = min(len(data), MAX_ROW_BYTES)
    require(FRAME_BYTES <= length <= most, ROW, f"the length is {length}, of at most {most} bytes")
    data = data[:length]
    require(checksum(data) == stored, "row.md, Checksum", f"the checksum is {stored:#x}")
    size = word32(data, 96)
    begin = ceil_div(FRAME_BYTES + size, ALIGNMENT) * ALIGNMENT
    require(begin <= length, ROW, f"the description has {size} bytes")
    require(not any(data[100:FRAME_BYTES]) and not any(data[FRAME_BYTES + size : begin]), ROW, "padding is not zero")
    file = take_page(parse_msgpack(data[FRAME_BYTES : FRAME_BYTES + size], ["opaque"]))
    contents = {}
    for number, layer in enumerate(file.layers):
        for name, side in layer.items():
            for tensor in side.tensors(f"{number}.{name}.") if side else ():
                end = begin + ceil_div(tensor.bytes, ALIGNMENT) * ALIGNMENT
                contents[tensor.name] = data[begin : begin + tensor.bytes]
                require(not any(data[begin + tensor.bytes : end]), ROW, f"the padding of {tensor.name} is not zero")
                begin = end
    require(begin == length, ROW, f"the streams end at {begin}, and the row at {length}")
    for number, layer in enumerate(file.layers):
        for name, side in layer.items():
            if side is not None:
                decode_side(side, f"{number}.{name}.", contents, by_digest(bases))
    return Row(data[32:64], data[64:96], file)


def take_page(header: dict[str, Any]) -> File:
    """The description of a page: the map of a header, with the restrictions of row.md."""
    required = header.get("required")
    named = header.get("tensors") == [] and isinstance(required, list) and all(name in CODEC_FEATURES for name in required)
    require(named, ROW, "the description names tensors or features")
    file = take_header(header, {**CODECS, "opaque": opaque}, without_tensors=True)
    require(file.start == 0 and not file.model and list(file.ignorable) == [PAGE_DTYPE], ROW, "the description has other fields")
    dtype = file.ignorable[PAGE_DTYPE]
    require(dtype in PAGE_DTYPES, ROW, f"the dtype is {dtype!r}")
    sides = [side for layer in file.layers for side in layer.values() if side]
    require(all(layer["k"] for layer in file.layers), ROW, "a layer has no k")
    require(len(sides) in (len(file.layers), 2 * len(file.layers)), ROW, "some layers have no v")
    require(len({(side.heads, *side.runs) for side in sides}) == 1, ROW, "sides differ in heads or tokens")
    for side in sides:
        others = set(side.entries) - {"raw_positions", "raw_values"}
        plain = (side.batch, len(side.runs), side.tail, side.window, len(others)) == (1, 1, 0, 0, 0)
        require(plain, ROW, "a side has sequences, runs, a tail, a window or entries")
        require(dtype != b"u8" or side.codec.id == "opaque", "row.md, Other dtypes", f"bytes are stored by {side.codec.id}")
    return file


def main(arguments: Sequence[str]) -> int:
    """Print layers, codecs, shapes and the first values of the file that is named."""
    if len(arguments) != 1:
        print("usage: python spec/decoder.py FILE", file=sys.stderr)
        return 2
    try:
        with open(arguments[0], "rb") as source:
            file = read(source.read())
    except (OSError, Refused) as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 1
    print(f"{len(file.layers)} layers from position {file.start}, recipe {file.recipe!r}, model {file.model}")
    for number, layer in enumerate(file.layers):
        for name, side in layer.items():
            if side is None:
                print(f"{number}.{name}  absent")
            else:
                first = " ".join(f"{value:.9g}" for value in side.values[:6])
                place = f"from position {file.starts[number]}  " if file.starts[number] != file.start else ""
                print(f"{number}.{name}  {side.codec.id}  {'x'.join(map(str, side.shape))}  {place}{first}")
    for name, content in file.states.items():
        print(f"{name}  {len(content)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
