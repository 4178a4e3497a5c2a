"""columns(n, A, F): the packing of symbols from any alphabet into 16-bit words (spec/packing.md, Bit packing).

``symbols`` symbols go into W = ceil(symbols / fields) columns. Symbol i is field i div W of column i mod W, so field k of all columns is
one contiguous block of symbols. A column is the integer sum_k s_k * base^k, stored in the fewest bytes that hold its largest value. Bytes
2p and 2p + 1 of all columns form plane p: W little-endian 16-bit words. If the number of bytes is odd, the last W bytes are treated as
symbols of an alphabet of 256 and packed by columns(W, 256, 2).

A symbol may have several digits: the fields of digit 0 come first (lowest), then those of digit 1. A digit's base may be larger than its
alphabet (576 codewords in base 1024); the other values are invalid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import InvalidParameter, InvalidPayload
from .lazy import functional, numpy, torch
from .value_blocks import arrays_in_memory, row_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .value_blocks import Array

MAX_BASE = 1 << 16
"""Largest base of a digit."""

MAX_COLUMN_BYTES = 16
"""Maximum number of bytes of a column if every base is a power of two."""

MAX_COLUMN_VALUES = 1 << 53
"""Maximum number of values of a column if some base is not a power of two. A float64 represents each of them exactly."""

MAX_FIELDS = 8 * MAX_COLUMN_BYTES
"""Maximum number of fields of a column, reached by one-bit symbols in the widest column."""

_MAX_EXACT_FLOAT32 = 1 << 24
_WORDS_AT_ONCE = 1 << 13
"""Number of words, across rows, that one reduction combines: 16 KiB, half of a core's first-level cache."""


def is_power_of_two(value: int) -> bool:
    """Return True if ``value`` is 1, 2, 4 or another power of two."""
    return value > 0 and value & (value - 1) == 0


def factors_of_two(value: int) -> int:
    """Return the exponent of the largest power of two that divides ``value``."""
    return (value & -value).bit_length() - 1


def next_power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least ``value``."""
    return 1 << (value - 1).bit_length()


def row_bytes(symbols: int, bases: Sequence[int], fields: int) -> int:
    """Return the number of bytes in which a row of ``symbols`` symbols is stored."""
    return Columns(symbols, tuple(bases), fields).row_bytes


def default_fields(symbols: int, bases: Sequence[int]) -> int:
    """Choose the number of fields per column that takes the fewest bytes.

    Ties go to the narrowest column of whole words. Every header stores the number, so readers do not need this function.

    Args:
        symbols: Number of symbols per row.
        bases: Base of each digit.

    Returns:
        F, the number of fields.

    Raises:
        InvalidParameter: Not even one symbol fits into a column.

    Source: spec/packing.md, Bit packing.

    >>> kvpack.formats.columns.default_fields(128, (9,))
    5
    """
    return _default_fields(symbols, tuple(bases))


@lru_cache(1 << 10)
def _default_fields(symbols: int, bases: tuple[int, ...]) -> int:
    allowed = [f for f in range(1, min(symbols, MAX_FIELDS) + 1) if _column_fits(bases, f)]
    candidates = [Columns(symbols, bases, f) for f in allowed]
    if not candidates:
        raise InvalidParameter(f"one symbol with the bases {list(bases)} does not fit in a column: use smaller bases")
    best = min(candidates, key=lambda c: (c.row_bytes, c.column_bytes < 2, c.column_bytes, c.fields))
    return best.fields


def _column_fits(bases: Sequence[int], fields: int) -> bool:
    # A header may declare any number of fields, so never compute a power for more fields than a column can have.
    if fields > MAX_FIELDS:
        return False
    values: int = math.prod(bases) ** fields
    return values <= (1 << 8 * MAX_COLUMN_BYTES if all(map(is_power_of_two, bases)) else MAX_COLUMN_VALUES)


@dataclass(frozen=True)
class Columns:
    """The packing of a row of symbols into columns of digits, stored as planes of 16-bit words.

    Attributes:
        symbols: Number of symbols per row.
        bases: Base of each digit.
        fields: Number of fields per column.
        alphabets: Number of valid values of each digit; ``bases`` by default.

    Raises:
        InvalidParameter: A number is out of range, or a column would be wider than the format allows.

    Source: spec/packing.md, Bit packing.

    >>> packing = kvpack.formats.columns.Columns(128, (9,), 5)
    >>> packing.planes
    (26,)
    >>> symbols = torch.randint(0, 9, (4, 128))
    >>> bool((packing.unpack(packing.pack([symbols]))[0] == symbols).all())
    True
    """

    symbols: int
    bases: tuple[int, ...]
    fields: int
    alphabets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.alphabets:
            object.__setattr__(self, "alphabets", self.bases)
        text = f"columns({self.symbols}, {list(self.bases)}, {self.fields})"
        if self.symbols < 1:
            raise InvalidParameter(f"{text}: the number of symbols is {self.symbols}, expected at least 1")
        if not self.bases or not all(2 <= base <= MAX_BASE for base in self.bases):
            raise InvalidParameter(f"{text}: the bases are {list(self.bases)}, expected one or more integers from 2 to {MAX_BASE}")
        if not 1 <= self.fields <= MAX_FIELDS:
            raise InvalidParameter(f"{text}: the number of fields is {self.fields}, expected 1 to {MAX_FIELDS}")
        if len(self.alphabets) != len(self.bases) or not all(1 <= a <= b for a, b in zip(self.alphabets, self.bases, strict=True)):
            raise InvalidParameter(f"{text}: the alphabet sizes are {list(self.alphabets)}, expected one per base, each from 1 to its base")
        if not _column_fits(self.bases, self.fields):
            raise InvalidParameter(
                f"{text}: the column is too wide, expected at most {MAX_COLUMN_BYTES} bytes if every base is a power of two, otherwise at "
                "most 2^53 values: use fewer fields"
            )

    @cached_property
    def width(self) -> int:
        """Number of columns (W in the specification)."""
        return -(-self.symbols // self.fields)

    @cached_property
    def place_values(self) -> tuple[tuple[int, ...], ...]:
        """Place value of each field within a column, for each digit."""
        values, weight = [], 1
        for base in self.bases:
            values.append(tuple(weight * base**k for k in range(self.fields)))
            weight *= base**self.fields
        return tuple(values)

    @cached_property
    def column_values(self) -> int:
        """Number of values that a column can have."""
        return math.prod(base**self.fields for base in self.bases)

    @cached_property
    def column_bytes(self) -> int:
        """Number of bytes per column (Q in the specification)."""
        return ((self.column_values - 1).bit_length() + 7) // 8

    @cached_property
    def planes(self) -> tuple[int, ...]:
        """Number of words per row, for each plane."""
        full = (self.width,) * (self.column_bytes // 2)
        return (*full, (self.width + 1) // 2) if self.column_bytes % 2 else full

    @cached_property
    def row_bytes(self) -> int:
        """Number of bytes in which a row of symbols is stored."""
        return 2 * sum(self.planes)

    @cached_property
    def binary(self) -> bool:
        """True if every base is a power of two, so that each field is a bitfield."""
        return all(map(is_power_of_two, self.bases))

    def used_fields(self, column: int) -> int:
        """Return the number of fields of ``column`` that contain a symbol. The other fields are zero."""
        return self._fields_before(self.symbols, column)

    def _fields_before(self, symbol: int, column: int) -> int:
        """Return the number of fields of ``column`` that contain symbols before ``symbol``."""
        return max(0, -(-(symbol - column) // self.width))

    def pack(self, digits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Pack digits into planes of words.

        Args:
            digits: One tensor per digit, ``[..., symbols]`` of any dtype, with integers below the digit's alphabet.

        Returns:
            One uint16 tensor ``[..., words]`` per plane.
        """
        words = self._words_from_columns(digits) if self.column_values <= 1 << 63 else self._words_from_bits(digits)
        if self.column_bytes % 2:
            half = (self.width + 1) // 2
            tail = functional.pad(words[-1], (0, 2 * half - self.width))
            words[-1] = tail[..., :half] | tail[..., half:] << 8
        return [word.to(torch.int16).view(torch.uint16) for word in words]

    def unpack(self, planes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Unpack planes of words into digits; inverts ``pack``.

        Args:
            planes: One uint16 tensor ``[..., words]`` per plane.

        Returns:
            One int32 tensor ``[..., symbols]`` per digit.
        """
        words = [plane.view(torch.int16).to(torch.int32) & 0xFFFF for plane in planes]
        if self.column_bytes % 2:
            words[-1] = torch.cat([words[-1] & 0xFF, words[-1] >> 8], -1)[..., : self.width]
        if not self.binary:
            column = _join_words(words)
            fields = (column[..., None, :] // self._field_weights(digit, column) % base for digit, base in enumerate(self.bases))
            return [self._join_fields(field) for field in fields]
        return [self._digit_from_bits(words, digit) for digit in range(len(self.bases))]

    def _field_weights(self, digit: int, like: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.place_values[digit], dtype=torch.int64, device=like.device)[:, None]

    def _join_fields(self, fields: torch.Tensor) -> torch.Tensor:
        return fields.flatten(-2)[..., : self.symbols].to(torch.int32)

    def _split_into_fields(self, digit: torch.Tensor) -> torch.Tensor:
        spare = self.fields * self.width - self.symbols
        padded = functional.pad(digit, (0, spare)) if spare else digit
        return padded.reshape(*digit.shape[:-1], self.fields, self.width)

    def _words_from_columns(self, digits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        dtype = torch.int32 if self.column_values <= 1 << 31 else torch.int64
        column = None
        for digit, base, places in zip(digits, self.bases, self.place_values, strict=True):
            exact = digit.dtype == torch.float32 and self.column_values <= _MAX_EXACT_FLOAT32
            part = _combine_fields(self._split_into_fields(digit if exact else digit.to(dtype)), base).to(dtype)
            column = part if column is None else torch.add(column, part, alpha=places[0])
        assert column is not None
        words = (self.column_bytes + 1) // 2
        return [column] if words == 1 else [(column >> 16 * word & 0xFFFF).to(torch.int32) for word in range(words)]

    def _words_from_bits(self, digits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        shape = (*digits[0].shape[:-1], self.width)
        words = [torch.zeros(shape, dtype=torch.int32, device=digits[0].device) for _ in range((self.column_bytes + 1) // 2)]
        for digit, places in zip(digits, self.place_values, strict=True):
            fields = self._split_into_fields(digit.to(torch.int32))
            for k, place in enumerate(places):
                word, shift = divmod(place.bit_length() - 1, 16)
                shifted = fields[..., k, :] << shift
                words[word] |= shifted & 0xFFFF
                if word + 1 < len(words):
                    words[word + 1] |= shifted >> 16
        return words

    def _digit_from_bits(self, words: list[torch.Tensor], digit: int) -> torch.Tensor:
        fields = []
        for place in self.place_values[digit]:
            word, shift = divmod(place.bit_length() - 1, 16)
            both = words[word] | words[word + 1] << 16 if word + 1 < len(words) else words[word]
            # The sign bit of an int32 is a data bit here, so the mask clears the copies of it that an arithmetic shift inserts.
            fields.append(both >> shift & self.bases[digit] - 1)
        return self._join_fields(torch.stack(fields, -2))

    def check(self, planes: Sequence[Array], where: str) -> None:
        """Reject words that no packing produces.

        Args:
            planes: One uint16 array ``[..., words]`` per plane, in memory or read in blocks.
            where: Location for messages.

        Raises:
            InvalidPayload: A digit is outside its alphabet, or a spare bit or an unused field is not zero. The message names the position.
        """
        if self.binary and self.alphabets == self.bases and not self._spare_bits:
            # Every bit of every word belongs to a symbol that may have any value.
            return
        arrays = arrays_in_memory(planes)
        if arrays is not None and self._are_valid(arrays):
            return
        for first, blocks in row_blocks(*planes):
            if not self._are_valid(blocks):
                self._check_rows(blocks, _RowPosition(where, first, planes[0].shape[:-1]))

    def word_rules(self) -> list[WordRule | None] | None:
        """Return the limits that ``check`` puts on the words of each plane, or None if some errors show only in several words together."""
        if self.binary and self.alphabets == self.bases:
            return [
                WordRule(tuple(self._spare_bits[number].tolist()), (0xFFFF,) * words) if number in self._spare_bits else None
                for number, words in enumerate(self.planes)
            ]
        if self.binary or self._column_limits is None:
            return None
        return [WordRule((0,) * self.width, tuple(self._column_limits.tolist()))]

    def _are_valid(self, planes: Sequence[numpy.ndarray[Any, Any]]) -> bool:
        """Return True if reductions over the rows prove that ``planes`` are valid. False means that each value must be checked."""
        if self.binary:
            return self.alphabets == self.bases and not self._invalid_planes(planes)
        return self._column_limits is not None and bool((reduce_rows(planes[0], numpy.maximum) <= self._column_limits).all())

    def _check_rows(self, planes: Sequence[numpy.ndarray[Any, Any]], where: _RowPosition) -> None:
        if self.binary:
            for number in self._invalid_planes(planes):
                spare = planes[number] & self._spare_bits[number]
                _check_limit(where._replace(where=f"{where.where}, plane {number}"), "spare bits of word", spare, 0)
        words = [plane.astype(numpy.uint64) for plane in planes]
        if self.column_bytes % 2:
            tail = numpy.concatenate([words[-1] & numpy.uint64(0xFF), words[-1] >> numpy.uint64(8)], -1)
            _check_limit(where, "the unused byte", tail[..., self.width :], 0, self.width)
            words[-1] = tail[..., : self.width]
        column = words[0]
        if not self.binary:
            for number, word in enumerate(words[1:], 1):
                column = column | word << numpy.uint64(16 * number)
            _check_limit(where, "column", column, self.column_values - 1)
        for base, alphabet, places in zip(self.bases, self.alphabets, self.place_values, strict=True):
            for k, place in enumerate(places):
                if self.binary:
                    value = _bits_at(words, place.bit_length() - 1) & numpy.uint64(base - 1)
                else:
                    value = column // numpy.uint64(place) % numpy.uint64(base)
                used = max(self.symbols - k * self.width, 0)
                _check_limit(where, f"symbol of field {k}", value[..., :used], alphabet - 1)
                _check_limit(where, f"unused field {k}", value[..., used:], 0, used)

    def _invalid_planes(self, planes: Sequence[numpy.ndarray[Any, Any]]) -> list[int]:
        """Return the indices of the planes in which a spare bit is set."""
        wrong = []
        for number, spare in self._spare_bits.items():
            if (reduce_rows(planes[number], numpy.bitwise_or) & spare).any():
                wrong.append(number)
        return wrong

    @cached_property
    def _spare_bits(self) -> dict[int, numpy.ndarray[Any, Any]]:
        """Mask of the spare bits of each word, by plane index. Planes without spare bits are left out."""
        spare = {number: ~numpy.array(allowed, dtype=numpy.uint16) for number, allowed in enumerate(self.symbol_bits(0))}
        return {number: bits for number, bits in spare.items() if bits.any()}

    @cached_property
    def _column_limits(self) -> numpy.ndarray[Any, Any] | None:
        """Largest value of each column, if a column is one word with one digit; otherwise None.

        Unused fields are the highest ones, so a column is valid if and only if it is below base^(used fields).
        """
        if len(self.bases) > 1 or self.alphabets != self.bases or self.column_bytes != 2:
            return None
        return numpy.array([self.bases[0] ** self.used_fields(c) - 1 for c in range(self.width)], dtype=numpy.uint16)

    def symbol_bits(self, first: int) -> list[list[int]]:
        """Return a mask for each word of each plane: the bits that belong to symbol ``first`` or to a later symbol.

        All bases must be powers of two.
        """
        digits = list(zip(self.bases, self.place_values, strict=True))
        columns = [
            sum(place * (base - 1) for base, places in digits for place in places[self._fields_before(first, c) : self.used_fields(c)])
            for c in range(self.width)
        ]
        planes = [[column >> 16 * word & 0xFFFF for column in columns] for word in range(self.column_bytes // 2)]
        if self.column_bytes % 2:
            tail = [column >> 8 * (self.column_bytes - 1) for column in columns] + [0] * (self.width % 2)
            half = len(tail) // 2
            planes.append([low | high << 8 for low, high in zip(tail[:half], tail[half:], strict=True)])
        return planes


def _join_words(words: Sequence[torch.Tensor]) -> torch.Tensor:
    column = words[0].to(torch.int64)
    for number, word in enumerate(words[1:], 1):
        column = column | word.to(torch.int64) << 16 * number
    return column


def _combine_fields(fields: torch.Tensor, base: int) -> torch.Tensor:
    """Return sum_k base^k fields[..., k, :].

    Fields are combined in pairs until one is left, so that every pass runs over long contiguous rows.
    """
    count = fields.shape[-2]
    if count == 1:
        return fields[..., 0, :]
    if count % 2:
        return torch.add(_combine_fields(fields[..., :-1, :], base), fields[..., -1, :], alpha=base ** (count - 1))
    half = count // 2
    return _combine_fields(torch.add(fields[..., :half, :], fields[..., half:, :], alpha=base**half), base)


def _bits_at(words: Sequence[numpy.ndarray[Any, Any]], position: int) -> numpy.ndarray[Any, Any]:
    """Return at least 16 bits of every column, beginning at bit ``position``. A column may be wider than any NumPy integer."""
    word, shift = divmod(position, 16)
    both = words[word] | words[word + 1] << numpy.uint64(16) if word + 1 < len(words) else words[word]
    return both >> numpy.uint64(shift)


def reduce_rows(plane: numpy.ndarray[Any, Any], combine: numpy.ufunc) -> numpy.ndarray[Any, Any]:
    """Reduce ``plane`` over all rows, word by word, with ``combine``. For speed, many rows are reduced at once."""
    rows = plane.reshape(-1, plane.shape[-1])
    at_once = max(1, _WORDS_AT_ONCE // max(1, rows.shape[1]))
    whole = len(rows) // at_once * at_once
    partial = combine.reduce(rows[:whole].reshape(-1, at_once * rows.shape[1]), axis=0, initial=0)
    combined = numpy.concatenate([partial.reshape(-1, rows.shape[1]), rows[whole:]])
    result: numpy.ndarray[Any, Any] = combine.reduce(combined, axis=0, initial=0)
    return result


class WordRule(NamedTuple):
    """Limits for the 16-bit words of a row. For each word: the bits that must be zero, and the largest allowed value."""

    spare: tuple[int, ...]
    limits: tuple[int, ...]


class _RowPosition(NamedTuple):
    """Position of a block of rows, for messages.

    The block begins at row ``first`` of the stream ``where``. ``axes`` is the shape of the stream without its last axis.
    """

    where: str
    first: int
    axes: tuple[int, ...]


def _check_limit(position: _RowPosition, name: str, values: numpy.ndarray[Any, Any], limit: int, first: int = 0) -> None:
    """Raise InvalidPayload if any of ``values`` is above ``limit``. The values begin at column ``first`` of the stream."""
    if values.size and int(values.max()) > limit:
        row, column = divmod(int(values.argmax()), values.shape[1])
        rows = [int(i) for i in numpy.unravel_index(position.first + row, position.axes)]
        raise InvalidPayload(
            f"{position.where}: {name} at {[*rows, first + column]} is {int(values[row, column])}, expected at most {limit}"
        )
