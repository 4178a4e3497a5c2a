"""Digits of rows that one thread holds in words (``thread_rows``): of one symbol, or of two neighbors, 16 bits apart.

``words`` are the 32-bit words of a row, uint32 tensors ``[warp * token / 2]``, and so is every result. Two neighbors are mostly in the same
words and then share the instructions that extract them. Division by a base that is not a power of two is a multiplication by its
reciprocal, with fewer instructions the smaller the dividend's known bound.
"""

# Triton compiles no conditional expressions of tensors.
# ruff: noqa: SIM108
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from .columns import constant_at
from .thread_rows import rows_constants

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.columns import Columns


class RowPacking(NamedTuple):
    """A code stream's columns in a row of words: the number of its first word, and whether its fields are bit fields (``binary``)."""

    first_word: int
    column_bytes: int
    width: int
    base: int
    binary: bool


class BitPiece(NamedTuple):
    """Bits of a value within one word: ``bits`` of ``word`` from ``shift`` up become the value's bits from ``before`` up."""

    word: int
    shift: int
    bits: int
    before: int


class TwoDigitPiece(NamedTuple):
    """Bits of two digits in one word: shifted right by ``shift`` (left if negative) and masked, they are 16 bits apart.

    ``in_bytes``: both are in one 16-bit half, a byte each, and are moved 16 bits apart first.
    """

    word: int
    shift: int
    mask: int
    in_bytes: bool


def row_packing(packings: Sequence[Columns], number: int) -> RowPacking:
    """Return the packing of stream ``number`` in a row that contains all ``packings``."""
    first_word = sum((halves + 1) // 2 for halves in rows_constants(packings[:number]))
    packing = packings[number]
    return RowPacking(first_word, packing.column_bytes, packing.width, packing.bases[0], packing.binary)


@triton.constexpr_function
def pieces_at(first: int, column_bytes: int, width: int, column: int, position: int, bits: int) -> tuple[BitPiece, ...]:
    """Return the pieces of ``bits`` bits of a column from ``position`` up."""
    pieces = []
    done = 0
    while done < bits:
        plane, at = divmod(position + done, 16)
        half, room = column, 16
        if plane == column_bytes // 2:
            byte, half = divmod(column, (width + 1) // 2)
            at, room = at + 8 * byte, 8 + 8 * byte
        count = min(bits - done, room - at)
        pieces.append(BitPiece(first + plane * ((width + 1) // 2) + half // 2, 16 * (half % 2) + at, count, done))
        done += count
    return tuple(pieces)


@triton.constexpr_function
def pieces_of_bits(packing: RowPacking, column: int, position: int, bits: int) -> tuple[BitPiece, ...]:
    """Run ``pieces_at`` for the columns of ``packing``, whose field names Triton 3.6 would drop if it were passed on."""
    return tuple(BitPiece(*piece) for piece in pieces_at(packing.first_word, packing.column_bytes, packing.width, column, position, bits))


@triton.constexpr_function
def _bits_of_base(base: int) -> int:
    return base.bit_length() - 1


@triton.jit
def bits_of_column(words: tl.tuple, PACKING: tl.constexpr, COLUMN: tl.constexpr, POSITION: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Return ``BITS`` bits (at most 32) of a column from ``POSITION`` up, uint32."""
    PIECES: tl.constexpr = pieces_of_bits(PACKING, COLUMN, POSITION, BITS)
    value = _piece(words, constant_at(PIECES, 0))
    for number in tl.static_range(1, len(PIECES)):
        value = value | _piece(words, constant_at(PIECES, number))
    return value


@triton.jit
def _piece(words: tl.tuple, PIECE: tl.constexpr) -> tl.tensor:
    value = (words[PIECE.word] >> PIECE.shift) & ((1 << PIECE.bits) - 1)
    if PIECE.before > 0:
        value = value << PIECE.before
    return value


@triton.constexpr_function
def most_fields(packing: RowPacking) -> int:
    """Return the maximum number of fields in a column of this many bytes."""
    fields = 1
    while packing.base ** (fields + 1) <= 1 << 8 * packing.column_bytes:
        fields += 1
    return fields


@triton.constexpr_function
def _reciprocal(divisor: int, below: int) -> int:
    """Return m such that the upper 32 bits of n * m are n // ``divisor`` for all n less than ``below``; 0 if there is none."""
    value = -(-(1 << 32) // divisor)
    return value if divisor > 1 and below * (value * divisor - (1 << 32)) < 1 << 32 else 0


@triton.jit
def _quotient(value: tl.tensor, DIVISOR: tl.constexpr, BELOW: tl.constexpr) -> tl.tensor:
    """Divide ``value``, uint32 less than ``BELOW``, by a constant, rounding down."""
    RECIPROCAL: tl.constexpr = _reciprocal(DIVISOR, BELOW)
    if RECIPROCAL > 0:
        value = tl.umulhi(value, tl.full(value.shape, RECIPROCAL, tl.uint32))
    elif DIVISOR > 1:
        value = value // DIVISOR
    return value


@triton.jit
def _digit_of(value: tl.tensor, BASE: tl.constexpr, FIELD: tl.constexpr, FIELDS: tl.constexpr) -> tl.tensor:
    """Return digit ``FIELD`` of ``value``, a uint32 with ``FIELDS`` digits."""
    BELOW: tl.constexpr = BASE**FIELDS
    result = _quotient(value, BASE**FIELD, BELOW)
    if FIELD + 1 < FIELDS:
        # Neighboring fields share a division.
        result = result - _quotient(value, BASE ** (FIELD + 1), BELOW) * BASE
    return result


@triton.jit
def digit(words: tl.tuple, PACKING: tl.constexpr, SYMBOL: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the digit of one symbol, uint32, below its base."""
    COLUMN: tl.constexpr = SYMBOL % PACKING.width
    FIELD: tl.constexpr = SYMBOL // PACKING.width
    BASE: tl.constexpr = PACKING.base
    BITS: tl.constexpr = 8 * PACKING.column_bytes
    FIELDS: tl.constexpr = most_fields(PACKING)
    if PACKING.binary:
        DIGIT_BITS: tl.constexpr = _bits_of_base(BASE)
        value = bits_of_column(words, PACKING, COLUMN, FIELD * DIGIT_BITS, DIGIT_BITS)
    elif first_of_upper(PACKING) > 0:
        # Two numbers of 32 bits: dividing one of 64 takes several times as long.
        MIDDLE: tl.constexpr = first_of_upper(PACKING)
        SHIFT: tl.constexpr = MIDDLE * _twos(BASE)
        low = low_of_column(words, PACKING, COLUMN, FAST)
        upper = (low >> SHIFT) | (bits_of_column(words, PACKING, COLUMN, 32, BITS - 32) << (32 - SHIFT))
        upper = _quotient(upper, BASE**MIDDLE >> SHIFT, 1 << BITS - SHIFT)
        if FIELD >= MIDDLE:
            # A column that no writer makes has digits that are too large, in its highest field.
            value = _digit_of(tl.minimum(upper, BASE ** (FIELDS - MIDDLE) - 1), BASE, FIELD - MIDDLE, FIELDS - MIDDLE)
        else:
            value = _digit_of(low - upper * BASE**MIDDLE, BASE, FIELD, MIDDLE)
    elif BITS <= 32:
        value = tl.minimum(bits_of_column(words, PACKING, COLUMN, 0, BITS), BASE**FIELDS - 1)
        value = _digit_of(value, BASE, FIELD, FIELDS)
    else:
        column = bits_of_column(words, PACKING, COLUMN, 0, 32).to(tl.uint64)
        column = column | (bits_of_column(words, PACKING, COLUMN, 32, BITS - 32).to(tl.uint64) << 32)
        # Neighboring fields share a division.
        value = (column // BASE**FIELD - column // BASE ** (FIELD + 1) * BASE).to(tl.uint32)
    return value


@triton.jit
def low_of_column(words: tl.tuple, PACKING: tl.constexpr, COLUMN: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the low 32 bits of a column that has at least as many."""
    PIECES: tl.constexpr = pieces_of_bits(PACKING, COLUMN, 0, 32)
    if FAST and len(PIECES) == 2:
        SELECT: tl.constexpr = (0x7600 if PIECES[1][1] else 0x5400) + (0x32 if PIECES[0][1] else 0x10)
        value = tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, $2, {SELECT};", "=r,r,r", [words[PIECES[0][0]], words[PIECES[1][0]]], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        value = bits_of_column(words, PACKING, COLUMN, 0, 32)
    return value


@triton.constexpr_function
def _twos(base: int) -> int:
    """Return the exponent of 2 in ``base``."""
    return (base & -base).bit_length() - 1


@triton.constexpr_function
def first_of_upper(packing: RowPacking) -> int:
    """Return the fewest fields that leave at most 32 bits above them in a wide column, without factors of two; 0 if there are none."""
    column_bytes, base = packing.column_bytes, packing.base
    twos = _twos(base)
    if column_bytes <= 4 or not twos:
        return 0
    first = -(-(8 * column_bytes - 32) // twos)
    return first if base**first < 1 << 32 else 0


@triton.constexpr_function
def _pieces_of_two(packing: RowPacking, symbol: int) -> tuple[TwoDigitPiece, ...]:
    """Return the pieces of a symbol and the next one together; empty if they are not in the same words."""
    column, bits = symbol % packing.width, packing.base.bit_length() - 1
    position = symbol // packing.width * bits
    if not packing.binary or column + 1 == packing.width:
        return ()
    pieces = []
    columns = packing.first_word, packing.column_bytes, packing.width
    for low, high in zip(pieces_at(*columns, column, position, bits), pieces_at(*columns, column + 1, position, bits), strict=True):
        word, at, count, before = low
        if high[0] != word or high[1] - at not in (8, 16) or (high[1] - at == 8 and at >= 8):
            return ()
        pieces.append(TwoDigitPiece(word, at - before, ((1 << count) - 1 << before) * 0x10001, high[1] - at == 8))
    return tuple(pieces)


@triton.jit
def above(high: tl.tensor, low: tl.tensor, BIT: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return ``low`` with ``high`` inserted from ``BIT`` up, where ``low`` has no bits."""
    if FAST:
        # The compiler makes two instructions of it.
        value = tl.inline_asm_elementwise(
            f"mad.lo.u32 $0, $1, {1 << BIT}, $2;", "=r,r,r", [high, low], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        value = (high << BIT) | low
    return value


@triton.jit
def _bytes_apart(word: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Return the low two bytes of a word, moved 16 bits apart."""
    if FAST:
        value = tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x4140;", "=r,r", [word], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        value = (word & 0xFF) | ((word & 0xFF00) << 8)
    return value


@triton.jit
def two_digits(words: tl.tuple, PACKING: tl.constexpr, SYMBOL: tl.constexpr, SYMBOLS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the digits of an even symbol (low 16 bits) and of the next one (high 16 bits); their columns mostly share words."""
    EVEN: tl.constexpr = SYMBOL // 2 * 2
    ODD: tl.constexpr = EVEN + (EVEN + 1 < SYMBOLS)
    PIECES: tl.constexpr = _pieces_of_two(PACKING, EVEN)
    if len(PIECES) > 0:
        value = _piece_of_two(words, constant_at(PIECES, 0), FAST)
        for number in tl.static_range(1, len(PIECES)):
            value = value | _piece_of_two(words, constant_at(PIECES, number), FAST)
    else:
        value = above(digit(words, PACKING, ODD, FAST), digit(words, PACKING, EVEN, FAST), 16, FAST)
    return value


@triton.jit
def _piece_of_two(words: tl.tuple, PIECE: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    word = words[PIECE.word]
    if PIECE.in_bytes:
        word = _bytes_apart(word, FAST)
    if PIECE.shift >= 0:
        word = word >> PIECE.shift
    else:
        word = word << -PIECE.shift
    return word & PIECE.mask
