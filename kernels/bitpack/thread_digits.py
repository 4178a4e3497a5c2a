"""Extraction of digits from rows in one thread's registers (``thread_rows``), for one symbol or two neighbors, 16 bits apart.

``words`` are the 32-bit words of a row, uint32 tensors ``[warp * token / 2]``; results have the same type. Usually the same words contain
two neighbors, so that the same instructions extract both. Division by a base that is not a power of two is a multiplication by its
reciprocal, which takes fewer instructions if the dividend's upper bound is small.
"""

# Triton compiles no conditional expressions of tensors.
# ruff: noqa: SIM108
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
from triton import language as tl

from kvpack.formats.columns import Columns

from .columns import constant_at
from .thread_rows import stored_words_per_plane


class RowPacking(NamedTuple):
    """Layout of one code stream's columns in a row of words.

    ``first_word`` is the index of the stream's first word in the row. ``binary`` is True if fields are bit fields.
    """

    first_word: int
    column_bytes: int
    width: int
    base: int
    binary: bool


class BitPiece(NamedTuple):
    """The part of a value that is stored in one word.

    ``bits`` bits of word ``word``, beginning at bit ``shift``, are the bits of the value from bit ``value_bit`` on.
    """

    word: int
    shift: int
    bits: int
    value_bit: int


class PairPiece(NamedTuple):
    """The part of two digits that is stored in one word.

    Shifting word ``word`` right by ``shift`` (left if negative) and applying ``mask`` moves both parts to their final bits, 16 bits apart.
    If ``in_bytes``, the digits are the two bytes of a half-word, which must first be moved 16 bits apart.
    """

    word: int
    shift: int
    mask: int
    in_bytes: bool


def row_packing(packings: Sequence[Columns], index: int) -> RowPacking:
    """Return the ``RowPacking`` of stream ``index``, in a row that contains the columns of all ``packings``."""
    first_word = sum((halves + 1) // 2 for halves in stored_words_per_plane(packings[:index]))
    packing = packings[index]
    return RowPacking(first_word, packing.column_bytes, packing.width, packing.bases[0], packing.binary)


@triton.constexpr_function
def bit_pieces(first: int, column_bytes: int, width: int, column: int, position: int, bits: int) -> tuple[BitPiece, ...]:
    """Return the pieces that make up ``bits`` bits of column ``column``, beginning at bit ``position``.

    ``first`` is the index of the stream's first word.
    """
    pieces = []
    done = 0
    while done < bits:
        plane, shift = divmod(position + done, 16)
        word, limit = column, 16
        if plane == column_bytes // 2:
            byte, word = divmod(column, (width + 1) // 2)
            shift, limit = shift + 8 * byte, 8 + 8 * byte
        count = min(bits - done, limit - shift)
        pieces.append(BitPiece(first + plane * ((width + 1) // 2) + word // 2, 16 * (word % 2) + shift, count, done))
        done += count
    return tuple(pieces)


@triton.constexpr_function
def column_pieces(packing: RowPacking, column: int, position: int, bits: int) -> tuple[BitPiece, ...]:
    """Return ``bit_pieces`` for a column of ``packing``.

    This function unpacks the fields of ``packing``, because Triton 3.6 drops their names.
    """
    return tuple(BitPiece(*piece) for piece in bit_pieces(packing.first_word, packing.column_bytes, packing.width, column, position, bits))


@triton.constexpr_function
def _base_bits(base: int) -> int:
    return base.bit_length() - 1


@triton.jit
def column_bits(words: tl.tuple, PACKING: tl.constexpr, COLUMN: tl.constexpr, POSITION: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Return ``BITS`` bits (at most 32) of column ``COLUMN``, beginning at bit ``POSITION``, as uint32."""
    PIECES: tl.constexpr = column_pieces(PACKING, COLUMN, POSITION, BITS)
    value = _read_piece(words, constant_at(PIECES, 0))
    for index in tl.static_range(1, len(PIECES)):
        value = value | _read_piece(words, constant_at(PIECES, index))
    return value


@triton.jit
def _read_piece(words: tl.tuple, PIECE: tl.constexpr) -> tl.tensor:
    value = (words[PIECE.word] >> PIECE.shift) & ((1 << PIECE.bits) - 1)
    if PIECE.value_bit > 0:
        value = value << PIECE.value_bit
    return value


@triton.constexpr_function
def max_fields(packing: RowPacking) -> int:
    """Return the number of fields that fit in a column of ``packing``."""
    fields = 1
    while packing.base ** (fields + 1) <= 1 << 8 * packing.column_bytes:
        fields += 1
    return fields


@triton.constexpr_function
def _reciprocal(divisor: int, below: int) -> int:
    """Return m such that (x * m) >> 32 equals x // ``divisor`` for all x less than ``below``, or 0 if there is no such m."""
    value = -(-(1 << 32) // divisor)
    return value if divisor > 1 and below * (value * divisor - (1 << 32)) < 1 << 32 else 0


@triton.jit
def _quotient(value: tl.tensor, DIVISOR: tl.constexpr, BELOW: tl.constexpr) -> tl.tensor:
    """Return ``value // DIVISOR`` for uint32 values less than ``BELOW``."""
    RECIPROCAL: tl.constexpr = _reciprocal(DIVISOR, BELOW)
    if RECIPROCAL > 0:
        value = tl.umulhi(value, tl.full(value.shape, RECIPROCAL, tl.uint32))
    elif DIVISOR > 1:
        value = value // DIVISOR
    return value


@triton.jit
def _extract_field_digit(value: tl.tensor, BASE: tl.constexpr, FIELD: tl.constexpr, FIELDS: tl.constexpr) -> tl.tensor:
    """Return the digit in field ``FIELD`` of ``value``, a uint32 with ``FIELDS`` fields of base ``BASE``."""
    BELOW: tl.constexpr = BASE**FIELDS
    result = _quotient(value, BASE**FIELD, BELOW)
    if FIELD + 1 < FIELDS:
        # Neighboring fields share this division.
        result = result - _quotient(value, BASE ** (FIELD + 1), BELOW) * BASE
    return result


@triton.jit
def symbol_digit(words: tl.tuple, PACKING: tl.constexpr, SYMBOL: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the digit of symbol ``SYMBOL`` as uint32. It is always less than the base."""
    COLUMN: tl.constexpr = SYMBOL % PACKING.width
    FIELD: tl.constexpr = SYMBOL // PACKING.width
    BASE: tl.constexpr = PACKING.base
    BITS: tl.constexpr = 8 * PACKING.column_bytes
    FIELDS: tl.constexpr = max_fields(PACKING)
    if PACKING.binary:
        DIGIT_BITS: tl.constexpr = _base_bits(BASE)
        value = column_bits(words, PACKING, COLUMN, FIELD * DIGIT_BITS, DIGIT_BITS)
    elif first_upper_field(PACKING) > 0:
        # Split the column into two 32-bit numbers, because a 64-bit division takes several times as long.
        MIDDLE: tl.constexpr = first_upper_field(PACKING)
        SHIFT: tl.constexpr = MIDDLE * _exponent_of_two(BASE)
        low = column_low_word(words, PACKING, COLUMN, FAST)
        upper = (low >> SHIFT) | (column_bits(words, PACKING, COLUMN, 32, BITS - 32) << (32 - SHIFT))
        upper = _quotient(upper, BASE**MIDDLE >> SHIFT, 1 << BITS - SHIFT)
        if FIELD >= MIDDLE:
            # In a column that no writer produces, the highest digit may be too large.
            value = _extract_field_digit(tl.minimum(upper, BASE ** (FIELDS - MIDDLE) - 1), BASE, FIELD - MIDDLE, FIELDS - MIDDLE)
        else:
            value = _extract_field_digit(low - upper * BASE**MIDDLE, BASE, FIELD, MIDDLE)
    elif BITS <= 32:
        value = tl.minimum(column_bits(words, PACKING, COLUMN, 0, BITS), BASE**FIELDS - 1)
        value = _extract_field_digit(value, BASE, FIELD, FIELDS)
    else:
        column = column_bits(words, PACKING, COLUMN, 0, 32).to(tl.uint64)
        column = column | (column_bits(words, PACKING, COLUMN, 32, BITS - 32).to(tl.uint64) << 32)
        # Neighboring fields share a division.
        value = (column // BASE**FIELD - column // BASE ** (FIELD + 1) * BASE).to(tl.uint32)
    return value


@triton.jit
def column_low_word(words: tl.tuple, PACKING: tl.constexpr, COLUMN: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the lowest 32 bits of a column that has at least 32 bits."""
    PIECES: tl.constexpr = column_pieces(PACKING, COLUMN, 0, 32)
    if FAST and len(PIECES) == 2:
        SELECT: tl.constexpr = (0x7600 if PIECES[1][1] else 0x5400) + (0x32 if PIECES[0][1] else 0x10)
        value = tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, $2, {SELECT};", "=r,r,r", [words[PIECES[0][0]], words[PIECES[1][0]]], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        value = column_bits(words, PACKING, COLUMN, 0, 32)
    return value


@triton.constexpr_function
def _exponent_of_two(base: int) -> int:
    return (base & -base).bit_length() - 1


@triton.constexpr_function
def first_upper_field(packing: RowPacking) -> int:
    """Return the field at which ``symbol_digit`` splits a column of more than 4 bytes into two 32-bit numbers, or 0 if it cannot.

    It is the first field from which the upper part, without the base's factors of two, fits in 32 bits.
    """
    column_bytes, base = packing.column_bytes, packing.base
    twos = _exponent_of_two(base)
    if column_bytes <= 4 or not twos:
        return 0
    first = -(-(8 * column_bytes - 32) // twos)
    return first if base**first < 1 << 32 else 0


@triton.constexpr_function
def _symbol_pair_pieces(packing: RowPacking, symbol: int) -> tuple[PairPiece, ...]:
    """Return the pieces of ``symbol`` and the next symbol together, or an empty tuple if no word contains both."""
    column, bits = symbol % packing.width, packing.base.bit_length() - 1
    position = symbol // packing.width * bits
    if not packing.binary or column + 1 == packing.width:
        return ()
    pieces = []
    columns = packing.first_word, packing.column_bytes, packing.width
    for low, high in zip(bit_pieces(*columns, column, position, bits), bit_pieces(*columns, column + 1, position, bits), strict=True):
        word, shift, count, value_bit = low
        if high[0] != word or high[1] - shift not in (8, 16) or (high[1] - shift == 8 and shift >= 8):
            return ()
        pieces.append(PairPiece(word, shift - value_bit, ((1 << count) - 1 << value_bit) * 0x10001, high[1] - shift == 8))
    return tuple(pieces)


@triton.jit
def insert_above(high: tl.tensor, low: tl.tensor, BIT: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return ``low | high << BIT``. ``low`` must be less than 2^``BIT``."""
    if FAST:
        # The compiler would emit two instructions.
        value = tl.inline_asm_elementwise(
            f"mad.lo.u32 $0, $1, {1 << BIT}, $2;", "=r,r,r", [high, low], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        value = (high << BIT) | low
    return value


@triton.jit
def _spread_bytes(word: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    if FAST:
        value = tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x4140;", "=r,r", [word], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        value = (word & 0xFF) | ((word & 0xFF00) << 8)
    return value


@triton.jit
def symbol_pair_digits(
    words: tl.tuple, PACKING: tl.constexpr, SYMBOL: tl.constexpr, SYMBOLS: tl.constexpr, FAST: tl.constexpr
) -> tl.tensor:
    """Return the digits of two neighboring symbols.

    The digit of the even-numbered symbol is in the low 16 bits, the next one in the high 16. ``SYMBOL`` is either of the two symbols. If
    the even-numbered symbol is the last one, its digit is repeated.
    """
    EVEN: tl.constexpr = SYMBOL // 2 * 2
    ODD: tl.constexpr = EVEN + (EVEN + 1 < SYMBOLS)
    PIECES: tl.constexpr = _symbol_pair_pieces(PACKING, EVEN)
    if len(PIECES) > 0:
        value = _extract_pair_bits(words, constant_at(PIECES, 0), FAST)
        for index in tl.static_range(1, len(PIECES)):
            value = value | _extract_pair_bits(words, constant_at(PIECES, index), FAST)
    else:
        value = insert_above(symbol_digit(words, PACKING, ODD, FAST), symbol_digit(words, PACKING, EVEN, FAST), 16, FAST)
    return value


@triton.jit
def _extract_pair_bits(words: tl.tuple, PIECE: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the bits of ``PIECE`` at their positions in the result of ``symbol_pair_digits``."""
    word = words[PIECE.word]
    if PIECE.in_bytes:
        word = _spread_bytes(word, FAST)
    if PIECE.shift >= 0:
        word = word >> PIECE.shift
    else:
        word = word << -PIECE.shift
    return word & PIECE.mask
