"""Tile loader of the quaternion codec in the dense arrangement (spec/codecs/quaternion.md), with separate codeword and radius columns."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.quaternion import Quaternion
from kvpack.kernels.bitpack.f16_tiles import code_as_f16, multiply
from kvpack.kernels.bitpack.streams import Stream
from kvpack.kernels.bitpack.symbol_tiles import MAX_BITS, load_symbol_tile, symbol_steps
from kvpack.kernels.bitpack.thread_digits import RowPacking, insert_above, row_packing, symbol_pair_digits
from kvpack.kernels.bitpack.thread_rows import row_streams, stored_words_per_plane
from kvpack.kernels.bitpack.thread_tiles import TOKENS, load_rows_and_factor, read_row_factor
from kvpack.kernels.bitpack.tile_packing import MAX_DIGIT_BITS
from kvpack.kernels.tables.shared_table import look_up

from .quaternion import VALUES
from .tiles import Tiles, symbol_channels

MAX_WORDS = 8
"""Maximum number of 32-bit words per row for which the rows of two tiles fit in registers.

Rows have seven words at head dim 64, and thirteen at 128. For longer rows, more warps per program are faster, which share more copies of
the table.
"""


class QuaternionDenseConstants(NamedTuple):
    """Compile-time constants of a quaternion codec and its rows.

    A codeword is a digit of packing ``codewords``. If ``low_bits`` is not 0, that digit is the low ``low_bits`` bits of the codeword, and a
    digit of packing ``high_codewords`` is the rest.
    """

    rows: tuple[int, ...]
    codewords: RowPacking
    high_codewords: RowPacking
    radii: RowPacking
    low_bits: int
    radius_bits: int
    factor_bits: int
    codeword_bits: int
    chunks: int


def tiles(codec: Quaternion) -> Tiles | None:
    """Return the tile loader of ``codec``, or None if it has too many codewords."""
    table = codec.codebook.to(torch.float16)
    codeword_bits = (table.shape[0] - 1).bit_length()
    if codeword_bits > MAX_DIGIT_BITS:
        return None
    packings = codec.packings()
    every = tuple(packings.values())
    streams = tuple(stream for name, packing in packings.items() for stream in row_streams(name, packing))
    scale_bits = 16 if codec.norm == "fp16" else 32
    low_bits = packings["codeword_low"].bases[0].bit_length() - 1 if "codeword_low" in packings else 0
    chunks = -(-codec.dim // VALUES)
    rows = stored_words_per_plane(every)
    few_words = sum(-(-halves // 2) for halves in rows) <= MAX_WORDS
    symbols = symbol_steps(chunks)
    constants = QuaternionDenseConstants(
        rows=rows,
        codewords=row_packing(every, 0),
        high_codewords=row_packing(every, len(every) - 2),
        radii=row_packing(every, len(every) - 1),
        low_bits=low_bits,
        radius_bits=codec.radius_bits,
        factor_bits=scale_bits,
        codeword_bits=codeword_bits,
        chunks=chunks,
    )
    return Tiles(
        load_rows_and_factor,
        decode,
        factor,
        constants,
        len(symbols),
        tuple(symbol_channels(step, VALUES, value, codec.dim) for step in symbols for value in range(VALUES)),
        (*streams, Stream("scale", scale_bits, 1)),
        table,
        tokens=TOKENS,
        loads_ahead=few_words,
        many_copies=not few_words,
    )


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the components of the chunks of step ``STEP`` as four float16 tiles. A chunk is a unit quaternion times its radius code.

    Tiles are ``[warp, token, chunk]``, or transposed ``[warp, chunk, token]``.
    """
    SHARED: tl.constexpr = MODE.shared
    CODEWORD_BITS: tl.constexpr = CONSTANTS.codeword_bits
    RADIUS_BITS: tl.constexpr = CONSTANTS.radius_bits
    TOGETHER: tl.constexpr = CODEWORD_BITS + RADIUS_BITS <= MAX_BITS
    POSITION: tl.constexpr = MAX_BITS - CODEWORD_BITS if TOGETHER else 0
    if TOGETHER:
        symbols = load_symbol_tile(loaded, STEP, chunk_pair, CONSTANTS.chunks, CONSTANTS, MODE)
        radius = code_as_f16(symbols, 0, RADIUS_BITS, MODE.fast)
    else:
        symbols = load_symbol_tile(loaded, STEP, codeword_pair, CONSTANTS.chunks, CONSTANTS, MODE)
        radius = code_as_f16(load_symbol_tile(loaded, STEP, radius_pair, CONSTANTS.chunks, CONSTANTS, MODE), 0, RADIUS_BITS, MODE.fast)
    # Every codeword with this number of bits has an entry, so no limit is needed.
    result = look_up(symbols, table, POSITION, CODEWORD_BITS, 4, SHARED.offset, SHARED.copies, 1 << CODEWORD_BITS, MODE.fast)
    return (
        multiply(result[0], radius, MODE.fast),
        multiply(result[1], radius, MODE.fast),
        multiply(result[2], radius, MODE.fast),
        multiply(result[3], radius, MODE.fast),
    )


@triton.jit
def chunk_pair(words: tl.tuple, CHUNK: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return two neighboring chunks: the even-numbered chunk in the low 16 bits, and the next chunk in the high 16 bits.

    Each has the codeword in its highest bits, above the radius code.
    """
    return _codewords_at(words, CHUNK, MAX_BITS - CONSTANTS.codeword_bits, CONSTANTS, FAST) | radius_pair(words, CHUNK, CONSTANTS, FAST)


@triton.jit
def codeword_pair(words: tl.tuple, CHUNK: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the codewords of two neighboring chunks in one word: the even-numbered chunk in the low half, the next in the high half."""
    return _codewords_at(words, CHUNK, 0, CONSTANTS, FAST)


@triton.jit
def _codewords_at(words: tl.tuple, CHUNK: tl.constexpr, POSITION: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return ``codeword_pair`` with each codeword shifted left to bit ``POSITION`` of its 16 bits."""
    CODEWORDS: tl.constexpr = CONSTANTS.codewords
    HIGH_CODEWORDS: tl.constexpr = CONSTANTS.high_codewords
    both = symbol_pair_digits(words, CODEWORDS, CHUNK, CONSTANTS.chunks, FAST) << POSITION
    if CONSTANTS.low_bits:
        both = insert_above(
            symbol_pair_digits(words, HIGH_CODEWORDS, CHUNK, CONSTANTS.chunks, FAST), both, CONSTANTS.low_bits + POSITION, FAST
        )
    return both


@triton.jit
def radius_pair(words: tl.tuple, CHUNK: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the radius codes of two neighboring chunks, in the same halves as ``codeword_pair``."""
    RADII: tl.constexpr = CONSTANTS.radii
    return symbol_pair_digits(words, RADII, CHUNK, CONSTANTS.chunks, FAST)


@triton.jit
def factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the token factors, float32 ``[warp, token]``: the scales divided by the largest radius code."""
    return read_row_factor(loaded, CONSTANTS, FAST) * (1.0 / ((1 << CONSTANTS.radius_bits) - 1))
