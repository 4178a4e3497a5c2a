"""angle as tiles of two tokens a row, dense arrangement (spec/codecs/angle.md): where a token's bins are rows of four words.

The matrix units read the words of two neighbours, one run of memory, at once. They are copied side by side in registers; the copies
show two fields, and norm codes are loaded as those two fields of both tokens lie.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.words.axes import copied, repeated, tokens_behind
from kvpack.kernels.words.common_columns import CommonPacking, bit_of_step, load_columns, words_of_plane, words_of_stream

from .angle import VALUES, factor_of_range, norm_line_halves, pair, table
from .angle_dense import bit_of_places
from .tiles import PAIRED_WIDTH, SMALLEST_WIDTH, WORD_BITS, Stream, Tiles, channels_of, plane_streams, takes_whole_words

if TYPE_CHECKING:
    from kvpack.formats.angle import Angle

RUN = PAIRED_WIDTH // 2
"""Words of a row of bins, and columns of one token side by side."""

MOST_SLICES = 2
"""Parts that a row of norm codes is loaded in, one for each two fields of bins; more of them fetch the same memory too often."""


class Slices(NamedTuple):
    """The words of norms, ``width`` a row, as ``count`` tiles that each have the columns of bins."""

    stream: int
    width: int
    count: int


class Constants(NamedTuple):
    """What the functions below know of a codec and its tiles. ``range_place`` is where a tile's range is among what ``load`` gives."""

    bins: CommonPacking
    norms: Slices
    bin_bits: int
    norm_bits: int
    log: bool
    range_place: int
    half_range: bool
    range_stream: int


def tiles(codec: Angle, paired: int) -> Tiles | None:
    """The loader of ``codec``, None where bins or norms are no bit fields, or have rows of other lengths."""
    packings = codec.packings()
    every = tuple(packings.values())
    if list(packings) != ["angle", "norm_codes"] or not all(map(takes_whole_words, every)):
        return None
    bins, norms = every
    slices = norms.width // PAIRED_WIDTH
    if bins.width != RUN or norms.width not in (PAIRED_WIDTH, MOST_SLICES * PAIRED_WIDTH) or norms.column_bytes != WORD_BITS // 8:
        return None
    beside = PAIRED_WIDTH // RUN
    bin_bits, norm_bits = (packing.bases[0].bit_length() - 1 for packing in every)
    streams = tuple(stream for name, packing in packings.items() for stream in plane_streams(name, packing))
    half = codec.range == "fp16"
    of_bins = CommonPacking(0, bins.column_bytes, RUN, 2 * RUN, bins.fields, paired, copies=beside, beside=beside, bits=bin_bits)
    constants = Constants(
        bins=of_bins,
        norms=Slices(len(bins.planes), norms.width, slices),
        bin_bits=bin_bits,
        norm_bits=norm_bits,
        log=codec.norm == "log",
        range_place=len(bins.planes) + slices,
        half_range=half,
        range_stream=len(streams),
    )
    streams = (*streams, Stream("range", 32, 1 if half else 2))
    channels = tuple(
        channels_of(tuple(range(begin, begin + PAIRED_WIDTH)), VALUES, value, codec.dim)
        for begin in range(0, bins.symbols, PAIRED_WIDTH)
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
        table(codec),
        packings=every,
        places=(RUN, 2 * RUN, 2 * RUN, SMALLEST_WIDTH),
        paired=paired,
        run=RUN,
    )


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
    """The planes of the bins, the norm codes of each two fields, and the ranges, ``[warp, token, 2]``."""
    BINS: tl.constexpr = CONSTANTS.bins
    NORMS: tl.constexpr = CONSTANTS.norms
    WIDTH: tl.constexpr = BINS.width
    PLANES: tl.constexpr = NORMS.stream
    SLICES: tl.constexpr = NORMS.count
    WORDS: tl.constexpr = 2 - CONSTANTS.half_range
    BEHIND: tl.constexpr = tokens_behind(BINS.paired, token.shape[1])
    raw = ()
    column = tl.arange(0, BINS.tile_width)[None, :]
    for plane in tl.static_range(PLANES):
        words = _load_bins(pointers[plane], first, token, valid, column, WIDTH, words_of_plane(BINS, plane), BEHIND, MASKED, TURNED)
        raw = raw + (words,)
    column = tl.arange(0, BINS.tile_width * BINS.copies)[None, :]
    second = column // WIDTH % 2
    word = column // BINS.tile_width * WIDTH + column % WIDTH
    for number in tl.static_range(SLICES):
        place = number * (WIDTH * BINS.copies) + word
        raw = raw + (load_columns(pointers[PLANES], first, token, valid, second, place, NORMS.width, BEHIND, False, MASKED, TURNED),)
    second = tl.arange(0, 2)[None, :]
    for word in tl.static_range(WORDS):
        place = tl.full((1, 2), word, tl.int32)
        raw = raw + (
            load_columns(pointers[CONSTANTS.range_stream], first, token, valid, second, place, WORDS, BEHIND, False, MASKED, False),
        )
    return raw


@triton.jit
def _load_bins(
    pointer: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    column: tl.tensor,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    BEHIND: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr,
) -> tl.tensor:
    """One plane of two tokens' bins; a plane of bytes is repeated."""
    if BEHIND == 1 and ROW == WIDTH and not MASKED:
        # The row of the second is what follows that of the first.
        words = load_columns(pointer, first, token, valid, column, column, ROW, 0, True, MASKED, TURNED)
    else:
        words = load_columns(pointer, first, token, valid, column // WIDTH, column % ROW, ROW, BEHIND, True, MASKED, TURNED)
    return words


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
    """The two coordinates of the pairs of ``STEP``, over the tokens' factors."""
    BINS: tl.constexpr = CONSTANTS.bins
    NORMS: tl.constexpr = CONSTANTS.norms
    AT: tl.constexpr = bit_of_places(CONSTANTS.bin_bits, SHARED, FAST)
    bins = words_of_stream(raw, places, 0, BINS, STEP, AT, TURNED, FAST)
    NORM: tl.constexpr = 16 * len(bins) + STEP // NORMS.count * CONSTANTS.norm_bits
    scale, centre = norm_line_halves(raw[CONSTANTS.range_place : CONSTANTS.range_place + 2 - CONSTANTS.half_range], CONSTANTS, FAST)
    scale = _of_columns(scale, BINS, TURNED)
    centre = _of_columns(centre, BINS, TURNED)
    planes = bins + (raw[NORMS.stream + STEP % NORMS.count],)
    return pair(planes, (scale, centre), table, bit_of_step(BINS, STEP, AT), NORM, CONSTANTS, SHARED, FAST)


@triton.jit
def _of_columns(value: tl.tensor, BINS: tl.constexpr, TURNED: tl.constexpr) -> tl.tensor:
    """``[warp, token, 2]`` as a tile."""
    if TURNED:
        value = tl.permute(value, (0, 2, 1))
    return copied(repeated(value, BINS.width, TURNED), BINS.copies, TURNED)


@triton.jit
def factor(raw: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """What norms are decoded over (``tiles_angle.factor``), ``[warp, token, 2]``."""
    return (factor_of_range(raw[CONSTANTS.range_place : CONSTANTS.range_place + 2 - CONSTANTS.half_range], CONSTANTS),)
