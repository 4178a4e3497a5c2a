"""angle as tiles of two tokens a row, dense arrangement (spec/codecs/angle.md): where a token's bins are rows of four words.

The matrix units read the words of two neighbours, one run of memory, at once. They are copied side by side in registers; the copies
show two fields, and norm codes are loaded as those two fields of both tokens lie.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from triton import language as tl

from .axes import copied, repeated, tokens_behind
from .common_columns import bit_of_step, load_columns, words_of_plane, words_of_stream
from .tiles import PAIRED_WIDTH, SMALLEST_WIDTH, WORD_BITS, Stream, Tiles, channels_of, plane_streams, takes_whole_words
from .tiles_angle import VALUES, factor_of_range, norm_line_halves, pair, table
from .tiles_angle_dense import bit_of_places

if TYPE_CHECKING:
    from kvpack.formats.angle import Angle

RUN = PAIRED_WIDTH // 2
"""Words of a row of bins, and columns of one token side by side."""

MOST_SLICES = 2
"""Parts that a row of norm codes is loaded in, one for each two fields of bins; more of them fetch the same memory too often."""


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
    of_bins = (0, bins.column_bytes, RUN, 2 * RUN, bins.fields, paired, beside, beside, bin_bits)
    constants = (
        of_bins, (len(bins.planes), norms.width, slices), bin_bits, norm_bits, int(codec.norm == "log"), len(bins.planes) + slices,
        int(half), len(streams),
    )  # fmt: skip
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
    C: tl.constexpr,
    MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The planes of the bins, the norm codes of each two fields, and the ranges, ``[warp, token, 2]``."""
    BINS: tl.constexpr = C[0]
    NORMS: tl.constexpr = C[1]
    WIDTH: tl.constexpr = BINS[2]
    PLANES: tl.constexpr = NORMS[0]
    SLICES: tl.constexpr = NORMS[2]
    WORDS: tl.constexpr = 2 - C[6]
    BEHIND: tl.constexpr = tokens_behind(BINS[5], token.shape[1])
    raw = ()
    column = tl.arange(0, BINS[3])[None, :]
    for plane in tl.static_range(PLANES):
        words = _load_bins(pointers[plane], first, token, valid, column, WIDTH, words_of_plane(BINS, plane), BEHIND, MASKED, TURNED)
        raw = raw + (words,)
    column = tl.arange(0, BINS[3] * BINS[6])[None, :]
    second = column // WIDTH % 2
    word = column // BINS[3] * WIDTH + column % WIDTH
    for number in tl.static_range(SLICES):
        place = number * (WIDTH * BINS[6]) + word
        raw = raw + (load_columns(pointers[PLANES], first, token, valid, second, place, NORMS[1], BEHIND, False, MASKED, TURNED),)
    second = tl.arange(0, 2)[None, :]
    for word in tl.static_range(WORDS):
        place = tl.full((1, 2), word, tl.int32)
        raw = raw + (load_columns(pointers[C[7]], first, token, valid, second, place, WORDS, BEHIND, False, MASKED, False),)
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
    C: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The two coordinates of the pairs of ``STEP``, over the tokens' factors."""
    BINS: tl.constexpr = C[0]
    NORMS: tl.constexpr = C[1]
    AT: tl.constexpr = bit_of_places(C[2], SHARED, FAST)
    bins = words_of_stream(raw, places, 0, BINS, STEP, AT, TURNED, FAST)
    NORM: tl.constexpr = 16 * len(bins) + STEP // NORMS[2] * C[3]
    scale, centre = norm_line_halves(raw[C[5] : C[5] + 2 - C[6]], C, FAST)
    scale = _of_columns(scale, BINS, TURNED)
    centre = _of_columns(centre, BINS, TURNED)
    planes = bins + (raw[NORMS[0] + STEP % NORMS[2]],)
    return pair(planes, (scale, centre), table, bit_of_step(BINS, STEP, AT), NORM, C, SHARED, FAST)


@triton.jit
def _of_columns(value: tl.tensor, BINS: tl.constexpr, TURNED: tl.constexpr) -> tl.tensor:
    """``[warp, token, 2]`` as a tile."""
    if TURNED:
        value = tl.permute(value, (0, 2, 1))
    return copied(repeated(value, BINS[2], TURNED), BINS[6], TURNED)


@triton.jit
def factor(raw: tl.tuple, C: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """What norms are decoded over (``tiles_angle.factor``), ``[warp, token, 2]``."""
    return (factor_of_range(raw[C[5] : C[5] + 2 - C[6]], C),)
