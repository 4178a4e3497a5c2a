"""Tile loader of the angle codec with one row per thread (spec/codecs/angle.md).

It supports dense bins in one or two streams, and all norm codes.
"""

# Triton compiles no conditional expressions of tensors.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
from triton import language as tl

from kvpack.formats.angle import Angle
from kvpack.kernels.bitpack.f16x2 import affine_f16x2, broadcast_f16x2, exp2_f16x2, join_halves, multiply_f16x2
from kvpack.kernels.bitpack.thread_digits import RowPacking, row_packing, symbol_digit, symbol_pair_digits
from kvpack.kernels.bitpack.thread_rows import load_rows, row_streams, stored_words_per_plane, word_stream, words_per_token
from kvpack.kernels.bitpack.thread_tiles import TOKENS, assign_tiles, decode_rows, pair_values
from kvpack.kernels.bitpack.tile_packing import MAX_DIGIT_BITS
from kvpack.kernels.tables.thread_lookups import look_up_words, lookup_unit

from .angle import VALUES, direction_table, factor, load_range, norm_affine
from .tiles import Tiles


class AngleThreadConstants(NamedTuple):
    """Compile-time constants of an angle codec and its rows. ``range_index`` is the index of the ranges in the result of ``load``."""

    rows: tuple[int, ...]
    bins: RowPacking
    high_bins: RowPacking
    norm_bits: int
    log: bool
    range_index: int
    half_range: bool
    norms: RowPacking
    low_bits: int
    registers: tuple[int, ...]
    symbols: int


def tiles(codec: Angle) -> Tiles | None:
    """Return the tile loader of ``codec``, or None if there are too many bins, or if norms are stored as float32."""
    if codec.norm == "fp32" or codec.bins > 1 << MAX_DIGIT_BITS:
        return None
    packings = codec.packings()
    every = tuple(packings.values())
    half_range = codec.range == "fp16"
    rows = (*stored_words_per_plane(every), 2 if half_range else 4)
    streams = (
        *(stream for name, packing in packings.items() for stream in row_streams(name, packing)),
        word_stream("range", rows[-1]),
    )
    low_bits = packings["angle_low"].bases[0].bit_length() - 1 if "angle_low" in packings else 0
    registers, channels = assign_tiles(pair_values(codec.dim // VALUES, VALUES, codec.dim), VALUES)
    constants = AngleThreadConstants(
        rows=rows,
        bins=row_packing(every, 0),
        high_bins=row_packing(every, len(every) - 2),
        norm_bits=codec.norm_bits,
        log=codec.norm == "log",
        range_index=2 * words_per_token(rows),
        half_range=half_range,
        norms=row_packing(every, len(every) - 1),
        low_bits=low_bits,
        registers=registers,
        symbols=codec.dim // VALUES,
    )
    return Tiles(load, decode, factor, constants, len(channels), channels, streams, direction_table(codec), tokens=TOKENS)


@triton.jit
def load(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    CONSTANTS: tl.constexpr,
    MASKED: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tuple:
    """Load the rows of bins, norm codes and ranges (``thread_rows.load_rows``), and load the ranges again for ``factor``.

    The ranges for ``factor`` are int32 ``[warp, token]``.
    """
    ROWS: tl.constexpr = CONSTANTS.rows
    RANGE: tl.constexpr = len(ROWS) - 1
    loaded = load_rows(pointers, first, token, valid, ROWS, MASKED, MODE.fast)
    return loaded + load_range(pointers[RANGE], first, token, valid, CONSTANTS, MASKED)


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return both channels of the pairs of step ``STEP`` as one float16 tile, possibly transposed.

    The channels still lack the token factor.
    """
    REGISTERS: tl.constexpr = CONSTANTS.registers
    return (decode_rows(loaded, table, REGISTERS, STEP, decode_pair, CONSTANTS, MODE),)


@triton.jit
def decode_pair(words: tl.tuple, table: tl.tensor, SYMBOL: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr) -> tl.tuple:
    """Return the two channels of pair ``SYMBOL`` as one f16x2. They still lack the token factor."""
    SHARED: tl.constexpr = MODE.shared
    BINS: tl.constexpr = CONSTANTS.bins
    HIGH_BINS: tl.constexpr = CONSTANTS.high_bins
    NORMS: tl.constexpr = CONSTANTS.norms
    UNIT: tl.constexpr = lookup_unit(2, SHARED, MODE.fast)
    LAST: tl.constexpr = CONSTANTS.range_index // 2
    place = symbol_digit(words, BINS, SYMBOL, MODE.fast) * UNIT
    if CONSTANTS.low_bits:
        place = place + symbol_digit(words, HIGH_BINS, SYMBOL, MODE.fast) * (UNIT << CONSTANTS.low_bits)
    if CONSTANTS.half_range:
        line = norm_affine((words[LAST - 1].to(tl.int32, bitcast=True),), CONSTANTS)
    else:
        line = norm_affine((words[LAST - 2], words[LAST - 1]), CONSTANTS)
    norms = affine_f16x2(
        symbol_pair_digits(words, NORMS, SYMBOL, CONSTANTS.symbols, MODE.fast),
        broadcast_f16x2(line[0]),
        broadcast_f16x2(line[1]),
        CONSTANTS.norm_bits,
        MODE.fast,
    )
    if CONSTANTS.log:
        norms = exp2_f16x2(norms, MODE.fast)
    norm = join_halves(norms, norms, SYMBOL % 2, SYMBOL % 2, MODE.fast)
    return (multiply_f16x2(look_up_words(place, table, 1, 2, 0, SHARED, MODE.fast)[0], norm, MODE.fast),)
