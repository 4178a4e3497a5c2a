"""angle as tiles, dense arrangement (spec/codecs/angle.md): bins and norm codes are bit fields whose columns are brought together."""

# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.words.common_columns import (
    CommonPacking,
    bit_of_step,
    columns_together,
    load_stream,
    places_of,
    steps_together,
    stream_constants,
    words_of_stream,
)

from .angle import VALUES, factor, line_of_tokens, load_range, pair, table
from .tiles import SharedTable, Stream, Tiles, channels_of, plane_streams

if TYPE_CHECKING:
    from kvpack.formats.angle import Angle


class Constants(NamedTuple):
    """What the functions below know of a codec and its tiles: bits of a bin and of a norm, and how norms are spaced.

    The range is stream ``range_place``, and at that place of what ``load`` gives.
    """

    bins: CommonPacking
    norms: CommonPacking
    bin_bits: int
    norm_bits: int
    log: bool
    range_place: int
    half_range: bool


def tiles(codec: Angle) -> Tiles | None:
    """The loader of ``codec``, None where bins or norms are no bit fields, or where their columns do not go together."""
    packings = codec.packings()
    every = tuple(packings.values())
    columns = columns_together(every) if list(packings) == ["angle", "norm_codes"] else None
    if columns is None:
        return None
    streams = tuple(stream for name, packing in packings.items() for stream in plane_streams(name, packing))
    of_streams = stream_constants(every, columns)
    half = codec.range == "fp16"
    bin_bits, norm_bits = (packing.bases[0].bit_length() - 1 for packing in every)
    constants = Constants(
        bins=of_streams[0],
        norms=of_streams[1],
        bin_bits=bin_bits,
        norm_bits=norm_bits,
        log=codec.norm == "log",
        range_place=len(streams),
        half_range=half,
    )
    streams = (*streams, Stream("range", 32, 1 if half else 2))
    steps = steps_together(every, columns)
    channels = tuple(channels_of(step, VALUES, value, codec.dim) for step in steps for value in range(VALUES))
    places = places_of(of_streams, columns)
    return Tiles(load, decode, factor, constants, len(steps), channels, streams, table(codec), packings=every, places=places)


@triton.jit
def load(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    CONSTANTS: tl.constexpr,
    MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The planes of the bins, of the norm codes, and the ranges."""
    BINS: tl.constexpr = CONSTANTS.bins
    NORMS: tl.constexpr = CONSTANTS.norms
    raw = load_stream(pointers, first, token, valid, BINS, MASKED, TURNED)
    raw = raw + load_stream(pointers, first, token, valid, NORMS, MASKED, TURNED)
    return raw + load_range(pointers[CONSTANTS.range_place], first, token, valid, CONSTANTS, MASKED)


@triton.jit
def decode(
    raw: tl.tuple,
    places: tl.tuple,
    table: tl.tensor,
    STEP: tl.constexpr,
    CONSTANTS: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The two coordinates of the pairs of ``STEP``, over the token's factor."""
    BINS: tl.constexpr = CONSTANTS.bins
    NORMS: tl.constexpr = CONSTANTS.norms
    # Where the table is shared, an index that begins at its bit of a place in bytes is not shifted.
    AT: tl.constexpr = bit_of_places(CONSTANTS.bin_bits, SHARED, FAST)
    bins = words_of_stream(raw, places, 0, BINS, STEP, AT, TURNED, FAST)
    norms = words_of_stream(raw, places, 1, NORMS, STEP, 0, TURNED, FAST)
    NORM: tl.constexpr = 16 * len(bins) + bit_of_step(NORMS, STEP, 0)
    return pair(
        bins + norms, line_of_tokens(raw, CONSTANTS, TURNED, FAST), table, bit_of_step(BINS, STEP, AT), NORM, CONSTANTS, SHARED, FAST
    )


@triton.constexpr_function
def bit_of_places(bits: int, shared: SharedTable, fast: bool) -> int:
    """The bit of a word from which an index of ``bits`` counts whole entries, all copies of them, in bytes; 0 where it is too high."""
    at = (2 * VALUES * shared[1]).bit_length() - 1 if fast and shared[1] else 0
    return at if at + bits <= 16 else 0
