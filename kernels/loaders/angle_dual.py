"""Dual tile loader of the angle codec in the dense arrangement (spec/codecs/angle.md), for tokens whose bins are rows of four words.

Tiles contain the words of two neighboring tokens, which are contiguous. The words are replicated side by side in registers, and each copy
is shifted to a different field. Norm codes are loaded in the same column order.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
from triton import language as tl

from kvpack.formats.angle import Angle
from kvpack.kernels.bitpack.replicated_columns import ReplicatedPacking, load_columns, plane_words, step_bit, stream_step_words
from kvpack.kernels.bitpack.streams import WORD_BITS, Stream, plane_streams
from kvpack.kernels.bitpack.tile_layout import repeat_columns, second_token_offset, tile_copies
from kvpack.kernels.bitpack.tile_packing import MIN_TILE_WIDTH, has_whole_word_tiles

from .angle import VALUES, decode_pairs, direction_table, norm_affine_f16, range_factor
from .angle_dense import entry_offset_bit
from .tiles import DUAL_ROW_WORDS, Tiles, symbol_channels

INTERLEAVE = DUAL_ROW_WORDS // 2
"""Half of the words per row: columns of the two tokens alternate in groups of this size."""

MAX_SLICES = 2
"""Maximum number of slices in which a row of norm codes is loaded. With more, the same memory would be loaded too often."""


class NormSlices(NamedTuple):
    """Layout of norm codes: rows of ``width`` words, loaded as ``count`` tiles. Each tile has the same columns as the tile of bins."""

    stream: int
    width: int
    count: int


class AngleDualConstants(NamedTuple):
    """Compile-time constants of an angle codec and its tiles. ``range_index`` is the index of the ranges in the result of ``load``."""

    bins: ReplicatedPacking
    norms: NormSlices
    bin_bits: int
    norm_bits: int
    log: bool
    range_index: int
    half_range: bool
    range_stream: int


def tiles(codec: Angle, dual: int) -> Tiles | None:
    """Return the tile loader of ``codec``, or None if bins or norm codes are not bit fields, or if their rows have unsupported lengths."""
    packings = codec.packings()
    every = tuple(packings.values())
    if list(packings) != ["angle", "norm_codes"] or not all(map(has_whole_word_tiles, every)):
        return None
    bins, norms = every
    slices = norms.width // DUAL_ROW_WORDS
    if bins.width != INTERLEAVE or norms.width not in (DUAL_ROW_WORDS, MAX_SLICES * DUAL_ROW_WORDS) or norms.column_bytes != WORD_BITS // 8:
        return None
    copies = DUAL_ROW_WORDS // INTERLEAVE
    bin_bits, norm_bits = (packing.bases[0].bit_length() - 1 for packing in every)
    streams = tuple(stream for name, packing in packings.items() for stream in plane_streams(name, packing))
    half = codec.range == "fp16"
    bin_packing = ReplicatedPacking(
        0, bins.column_bytes, INTERLEAVE, 2 * INTERLEAVE, bins.fields, dual, copies=copies, fields_per_tile=copies, bits=bin_bits
    )
    constants = AngleDualConstants(
        bins=bin_packing,
        norms=NormSlices(len(bins.planes), norms.width, slices),
        bin_bits=bin_bits,
        norm_bits=norm_bits,
        log=codec.norm == "log",
        range_index=len(bins.planes) + slices,
        half_range=half,
        range_stream=len(streams),
    )
    streams = (*streams, Stream("range", 32, 1 if half else 2))
    channels = tuple(
        symbol_channels(tuple(range(begin, begin + DUAL_ROW_WORDS)), VALUES, value, codec.dim)
        for begin in range(0, bins.symbols, DUAL_ROW_WORDS)
        for value in range(VALUES)
    )
    return Tiles(
        load,
        decode,
        factor,
        constants,
        len(channels) // VALUES,
        channels,
        streams,
        direction_table(codec),
        packings=every,
        stream_widths=(INTERLEAVE, 2 * INTERLEAVE, 2 * INTERLEAVE, MIN_TILE_WIDTH),
        dual=dual,
        interleave=INTERLEAVE,
    )


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
    """Load the bins, norm codes and ranges of both tokens of each row: ``token`` ``[warp, token]``, and the second token.

    - Bins: one int16 tile of 2 ``INTERLEAVE`` columns per plane.
    - Norm codes: one int16 tile per slice, with as many columns as the replicated bins.
    - Ranges: int32 ``[warp, token, 2]``.
    """
    BINS: tl.constexpr = CONSTANTS.bins
    NORMS: tl.constexpr = CONSTANTS.norms
    WIDTH: tl.constexpr = BINS.width
    PLANES: tl.constexpr = NORMS.stream
    SLICES: tl.constexpr = NORMS.count
    WORDS: tl.constexpr = 2 - CONSTANTS.half_range
    SECOND_OFFSET: tl.constexpr = second_token_offset(BINS.dual, token.shape[1])
    loaded = ()
    column = tl.arange(0, BINS.tile_width)[None, :]
    for plane in tl.static_range(PLANES):
        own = plane_words(BINS, plane)
        words = _load_bins(pointers[plane], first, token, valid, column, WIDTH, own, SECOND_OFFSET, MASKED, MODE.transposed)
        loaded = loaded + (words,)
    column = tl.arange(0, BINS.tile_width * BINS.copies)[None, :]
    second = column // WIDTH % 2
    word = column // BINS.tile_width * WIDTH + column % WIDTH
    for number in tl.static_range(SLICES):
        place = number * (WIDTH * BINS.copies) + word
        loaded = loaded + (
            load_columns(pointers[PLANES], first, token, valid, second, place, NORMS.width, SECOND_OFFSET, False, MASKED, MODE.transposed),
        )
    second = tl.arange(0, 2)[None, :]
    for word in tl.static_range(WORDS):
        place = tl.full((1, 2), word, tl.int32)
        loaded = loaded + (
            load_columns(pointers[CONSTANTS.range_stream], first, token, valid, second, place, WORDS, SECOND_OFFSET, False, MASKED, False),
        )
    return loaded


@triton.jit
def _load_bins(
    pointer: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    column: tl.tensor,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    SECOND_OFFSET: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> tl.tensor:
    """Load one plane of the bins of both tokens as an int16 tile. A plane of bytes is repeated."""
    if SECOND_OFFSET == 1 and ROW == WIDTH and not MASKED:
        # The row of the second token follows that of the first in memory.
        words = load_columns(pointer, first, token, valid, column, column, ROW, 0, True, MASKED, TRANSPOSED)
    else:
        words = load_columns(pointer, first, token, valid, column // WIDTH, column % ROW, ROW, SECOND_OFFSET, True, MASKED, TRANSPOSED)
    return words


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return both channels of the pairs of step ``STEP`` as two float16 tiles, possibly transposed.

    The channels still lack the token factors.
    """
    SHARED: tl.constexpr = MODE.shared
    BINS: tl.constexpr = CONSTANTS.bins
    NORMS: tl.constexpr = CONSTANTS.norms
    AT: tl.constexpr = entry_offset_bit(CONSTANTS.bin_bits, SHARED, MODE.fast)
    bins = stream_step_words(loaded, column_fields, 0, BINS, STEP, AT, MODE)
    NORM: tl.constexpr = 16 * len(bins) + STEP // NORMS.count * CONSTANTS.norm_bits
    scale, center = norm_affine_f16(loaded[CONSTANTS.range_index : CONSTANTS.range_index + 2 - CONSTANTS.half_range], CONSTANTS, MODE.fast)
    scale = _spread_to_columns(scale, BINS, MODE.transposed)
    center = _spread_to_columns(center, BINS, MODE.transposed)
    planes = bins + (loaded[NORMS.stream + STEP % NORMS.count],)
    return decode_pairs(planes, (scale, center), table, step_bit(BINS, STEP, AT), NORM, CONSTANTS, MODE)


@triton.jit
def _spread_to_columns(value: tl.tensor, BINS: tl.constexpr, TRANSPOSED: tl.constexpr) -> tl.tensor:
    """Repeat ``value`` ``[warp, token, 2]``, which has a number for each of a row's two tokens, over the token's columns in a tile."""
    if TRANSPOSED:
        value = tl.permute(value, (0, 2, 1))
    return tile_copies(repeat_columns(value, BINS.width, TRANSPOSED), BINS.copies, TRANSPOSED)


@triton.jit
def factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """Return the token factors, float32 ``[warp, token, 2]`` (see ``angle.range_factor``)."""
    return (range_factor(loaded[CONSTANTS.range_index : CONSTANTS.range_index + 2 - CONSTANTS.half_range], CONSTANTS),)
