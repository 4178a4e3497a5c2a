"""Tile loader of the angle codec in the dense arrangement (spec/codecs/angle.md), with bins and norm codes as bit fields of two streams."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
from triton import language as tl

from kvpack.formats.angle import Angle
from kvpack.kernels.bitpack.replicated_columns import (
    ReplicatedPacking,
    common_tile_width,
    load_stream,
    replicated_packings,
    step_bit,
    step_symbols,
    stream_step_words,
    stream_widths,
)
from kvpack.kernels.bitpack.streams import Stream, plane_streams
from kvpack.kernels.tables.shared_tables import SharedTable

from .angle import VALUES, decode_pairs, direction_table, factor, load_norm_affine, load_range
from .tiles import Tiles, symbol_channels


class AngleDenseConstants(NamedTuple):
    """Compile-time constants of an angle codec and its tiles. ``log`` is True if norms are logarithms.

    ``range_index`` is the index of the stream of ranges, and also the index of the ranges in the result of ``load``.
    """

    bins: ReplicatedPacking
    norms: ReplicatedPacking
    bin_bits: int
    norm_bits: int
    log: bool
    range_index: int
    half_range: bool


def tiles(codec: Angle) -> Tiles | None:
    """Return the tile loader of ``codec``, or None if bins or norm codes are not bit fields, or if their widths do not fit one tile."""
    packings = codec.packings()
    every = tuple(packings.values())
    columns = common_tile_width(every) if list(packings) == ["angle", "norm_codes"] else None
    if columns is None:
        return None
    streams = tuple(stream for name, packing in packings.items() for stream in plane_streams(name, packing))
    stream_packings = replicated_packings(every, columns)
    half = codec.range == "fp16"
    bin_bits, norm_bits = (packing.bases[0].bit_length() - 1 for packing in every)
    constants = AngleDenseConstants(
        bins=stream_packings[0],
        norms=stream_packings[1],
        bin_bits=bin_bits,
        norm_bits=norm_bits,
        log=codec.norm == "log",
        range_index=len(streams),
        half_range=half,
    )
    streams = (*streams, Stream("range", 32, 1 if half else 2))
    steps = step_symbols(every, columns)
    channels = tuple(symbol_channels(step, VALUES, value, codec.dim) for step in steps for value in range(VALUES))
    widths = stream_widths(stream_packings, columns)
    return Tiles(
        load, decode, factor, constants, len(steps), channels, streams, direction_table(codec), packings=every, stream_widths=widths
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
    """Load the planes of bins and of norm codes (``replicated_columns.load_stream``), followed by the ranges, int32 ``[warp, token]``."""
    BINS: tl.constexpr = CONSTANTS.bins
    NORMS: tl.constexpr = CONSTANTS.norms
    loaded = load_stream(pointers, first, token, valid, BINS, MASKED, MODE.transposed)
    loaded = loaded + load_stream(pointers, first, token, valid, NORMS, MASKED, MODE.transposed)
    return loaded + load_range(pointers[CONSTANTS.range_index], first, token, valid, CONSTANTS, MASKED)


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return both channels of the pairs of step ``STEP`` as two float16 tiles in the layout of the planes.

    The channels still lack the token factor.
    """
    SHARED: tl.constexpr = MODE.shared
    BINS: tl.constexpr = CONSTANTS.bins
    NORMS: tl.constexpr = CONSTANTS.norms
    # In a shared table, an index that already has its bits at the byte offset needs no shift.
    AT: tl.constexpr = entry_offset_bit(CONSTANTS.bin_bits, SHARED, MODE.fast)
    bins = stream_step_words(loaded, column_fields, 0, BINS, STEP, AT, MODE)
    norms = stream_step_words(loaded, column_fields, 1, NORMS, STEP, 0, MODE)
    NORM: tl.constexpr = 16 * len(bins) + step_bit(NORMS, STEP, 0)
    return decode_pairs(bins + norms, load_norm_affine(loaded, CONSTANTS, MODE), table, step_bit(BINS, STEP, AT), NORM, CONSTANTS, MODE)


@triton.constexpr_function
def entry_offset_bit(bits: int, shared: SharedTable, fast: bool) -> int:
    """Return the bit position where an index must begin so that it can be used as a byte offset in a shared table without a shift.

    The index has ``bits`` bits, and the table has several copies of each entry. Returns 0 if the index does not fit at that bit.
    """
    at = (2 * VALUES * shared[1]).bit_length() - 1 if fast and shared[1] else 0
    return at if at + bits <= 16 else 0
