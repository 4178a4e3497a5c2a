"""Digits of packed rows in a tile ``[token, symbol]``, loaded in whole words wherever a row's words are adjacent.

Symbols of one field are neighbors, and so are their words: a thread loads several at once. Offsets within a tile are 32-bit.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.bitpack.columns import extract_digit

if TYPE_CHECKING:
    from kvpack.formats.base import Codec


class CodeStream(NamedTuple):
    """A code stream's packing; its planes are the streams from ``first_plane`` on.

    ``first_places`` and ``bases`` have one number per digit: the place value of its first field and its base, both as a number of bits if
    ``binary``.
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
    """Return the code streams of ``codec``, in stored order."""
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
    """Load digit ``DIGIT`` of each symbol of a code stream, int32 ``[token, symbol]``."""
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
    """Load the word of one plane that contains each symbol's column, int32, not negative.

    For a plane of bytes (``HALVES``), it is a byte; with ``BINARY`` there may be other bits above it, which no field reaches.
    """
    column = symbol % WIDTH
    HALF: tl.constexpr = (WIDTH + 1) // 2
    if HALVES and BINARY:
        # The same column of words, and plainly a run of them where it is one.
        if WIDTH % 2 == 0:
            at = symbol % HALF
        else:
            at = column % HALF
        bits = (tl.load(plane + (token * HALF + at), mask, 0).to(tl.int32) & 0xFFFF) >> column // HALF * 8
    elif HALVES:
        # Loaded as the byte that it is (``columns.load_word`` says why).
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
    """Load ``BITS`` bits of each symbol's field in columns of several words: those of the word where it begins, and of the next."""
    position = FIRST_BIT + symbol // CODE.width * BITS
    value = _load_word_of(streams, token, symbol, mask, position // 16, CODE) >> position % 16
    if 16 % BITS or FIRST_BIT % BITS:
        goes_on = mask & (position % 16 + BITS > 16)
        value |= _load_word_of(streams, token, symbol, goes_on, position // 16 + 1, CODE) << (16 - position % 16)
    return value & ((1 << BITS) - 1)


@triton.jit
def _load_word_of(
    streams: tl.tuple, token: tl.tensor, symbol: tl.tensor, mask: tl.tensor, word: tl.tensor, CODE: tl.constexpr
) -> tl.tensor:
    """Load word ``word`` ``[1, symbol]`` of each symbol's column, as ``_load_word``; the plane is chosen per symbol, not per value."""
    WIDTH: tl.constexpr = CODE.width
    HALF: tl.constexpr = (WIDTH + 1) // 2
    PLANES: tl.constexpr = (CODE.column_bytes + 1) // 2
    column = symbol % WIDTH
    address = tl.zeros(symbol.shape, tl.int64)
    row = tl.full(symbol.shape, WIDTH, tl.int32)
    shift = tl.zeros(symbol.shape, tl.int32)
    for plane in tl.static_range(PLANES):
        mine = word == plane
        if CODE.column_bytes // 2 == plane:
            row = tl.where(mine, HALF, row)
            shift = tl.where(mine, column // HALF * 8, shift)
            column = tl.where(mine, column % HALF, column)
        address = tl.where(mine, streams[CODE.first_plane + plane].to(tl.int64), address)
    pointer = (address + column * 2).to(tl.pointer_type(tl.int16))
    return (tl.load(pointer + token * row, mask & (word < PLANES), 0).to(tl.int32) & 0xFFFF) >> shift
