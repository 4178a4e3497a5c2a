"""Loading of digits from packed rows into tiles ``[token, symbol]``.

Neighboring symbols are in neighboring words, so that a thread loads several words at once. Offsets within a tile are 32-bit.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton
from triton import language as tl

from kvpack.formats.base import Codec
from kvpack.kernels.bitpack.columns import extract_digit


class CodeStream(NamedTuple):
    """Packing of one code stream. Its planes are consecutive streams, beginning with stream ``first_plane``.

    ``first_places`` and ``bases`` contain one number for each digit: the place value of its first field, and its base. With ``binary``,
    they contain the base-2 logarithms of these numbers.
    """

    first_plane: int
    first_places: tuple[int, ...]
    bases: tuple[int, ...]
    binary: bool
    fields: int
    width: int
    column_bytes: int


@lru_cache(maxsize=64)
def code_streams(codec: Codec) -> tuple[CodeStream, ...]:
    streams, planes = [], 0
    for packing in codec.packings().values():
        first, bases = tuple(places[0] for places in packing.place_values), packing.bases
        if packing.binary:
            first, bases = (tuple(value.bit_length() - 1 for value in values) for values in (first, bases))
        streams.append(CodeStream(planes, first, bases, packing.binary, packing.fields, packing.width, packing.column_bytes))
        planes += len(packing.planes)
    return tuple(streams)


@triton.jit
def load_digit(
    streams: tl.tuple, token: tl.tensor, symbol: tl.tensor, mask: tl.tensor, CODE: tl.constexpr, DIGIT: tl.constexpr
) -> tl.tensor:
    """Load digit ``DIGIT`` of each symbol of the code stream ``CODE``, as int32 ``[token, symbol]``."""
    first: tl.constexpr = CODE.first_places[DIGIT]
    base: tl.constexpr = CODE.bases[DIGIT]
    WIDTH: tl.constexpr = CODE.width
    BYTES: tl.constexpr = CODE.column_bytes
    if BYTES <= 4:
        columns = _load_word(streams[CODE.first_plane], token, symbol, mask, WIDTH, BYTES == 1, CODE.binary).to(tl.uint32)
        if BYTES > 2:
            columns |= _load_word(streams[CODE.first_plane + 1], token, symbol, mask, WIDTH, BYTES == 3, CODE.binary).to(tl.uint32) << 16
        if CODE.binary:
            value = (columns >> (first + symbol // WIDTH * base).to(tl.uint32)).to(tl.int32, bitcast=True) & ((1 << base) - 1)
        else:
            value = extract_digit(columns, symbol // WIDTH, first, base, CODE.fields)
    elif CODE.binary:
        value = _load_bits(streams, token, symbol, mask, CODE, first, base)
    else:
        wide = tl.zeros(mask.shape, tl.uint64)
        for plane in tl.static_range((BYTES + 1) // 2):
            word = _load_word(streams[CODE.first_plane + plane], token, symbol, mask, WIDTH, plane == BYTES // 2, False)
            wide |= word.to(tl.uint64) << (16 * plane)
        value = extract_digit(wide, symbol // WIDTH, first, base, CODE.fields)
    return value


@triton.jit
def _load_word(
    plane: tl.tensor,
    token: tl.tensor,
    symbol: tl.tensor,
    mask: tl.tensor,
    WIDTH: tl.constexpr,
    HALVES: tl.constexpr,
    BINARY: tl.constexpr,
) -> tl.tensor:
    """Load the word of one plane that contains each symbol's column, as nonnegative int32.

    From a plane of bytes (``HALVES``), load a byte instead. With ``BINARY``, bits above the column's fields are undefined.
    """
    column = symbol % WIDTH
    HALF: tl.constexpr = (WIDTH + 1) // 2
    if HALVES and BINARY:
        # Both expressions are equal, but the first shows the compiler that words are adjacent.
        if WIDTH % 2 == 0:
            word_column = symbol % HALF
        else:
            word_column = column % HALF
        bits = (tl.load(plane + (token * HALF + word_column), mask, 0).to(tl.int32) & 0xFFFF) >> column // HALF * 8
    elif HALVES:
        # Load a byte, not its word (``columns.load_word`` explains why).
        byte = (plane + (token * HALF + column % HALF)).to(tl.pointer_type(tl.uint8)) + column // HALF
        bits = tl.load(byte, mask, 0).to(tl.int32)
    else:
        bits = tl.load(plane + (token * WIDTH + column), mask, 0).to(tl.int32) & 0xFFFF
    return bits


@triton.jit
def _load_bits(
    streams: tl.tuple,
    token: tl.tensor,
    symbol: tl.tensor,
    mask: tl.tensor,
    CODE: tl.constexpr,
    FIRST_BIT: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """Load ``BITS`` bits of each symbol's field, for columns of more than 4 bytes.

    The bits come from the word in which the field begins and from the next word.
    """
    position = FIRST_BIT + symbol // CODE.width * BITS
    value = _load_symbol_word(streams, token, symbol, mask, position // 16, CODE) >> position % 16
    if 16 % BITS or FIRST_BIT % BITS:
        continues = mask & (position % 16 + BITS > 16)
        value |= _load_symbol_word(streams, token, symbol, continues, position // 16 + 1, CODE) << (16 - position % 16)
    return value & ((1 << BITS) - 1)


@triton.jit
def _load_symbol_word(
    streams: tl.tuple, token: tl.tensor, symbol: tl.tensor, mask: tl.tensor, word: tl.tensor, CODE: tl.constexpr
) -> tl.tensor:
    """Load word ``word`` ``[1, symbol]`` of each symbol's column, as ``_load_word`` does. The words may be in different planes."""
    WIDTH: tl.constexpr = CODE.width
    HALF: tl.constexpr = (WIDTH + 1) // 2
    PLANES: tl.constexpr = (CODE.column_bytes + 1) // 2
    column = symbol % WIDTH
    address = tl.zeros(symbol.shape, tl.int64)
    row = tl.full(symbol.shape, WIDTH, tl.int32)
    shift = tl.zeros(symbol.shape, tl.int32)
    for plane in tl.static_range(PLANES):
        in_plane = word == plane
        if CODE.column_bytes // 2 == plane:
            row = tl.where(in_plane, HALF, row)
            shift = tl.where(in_plane, column // HALF * 8, shift)
            column = tl.where(in_plane, column % HALF, column)
        address = tl.where(in_plane, streams[CODE.first_plane + plane].to(tl.int64), address)
    pointer = (address + column * 2).to(tl.pointer_type(tl.int16))
    return (tl.load(pointer + token * row, mask & (word < PLANES), 0).to(tl.int32) & 0xFFFF) >> shift
