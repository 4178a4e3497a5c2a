"""octahedral as tiles, dense arrangement (spec/codecs/octahedral.md): indices and signs in columns of their own."""

# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from triton import language as tl

from .pairs import look_up_repeated, look_up_words, pair_negated, pair_product, unit
from .register_table import MOST_BITS, select_of_four, table_of_bytes
from .row_digits import bits_of_column, digit, row_packing
from .row_tiles import TOKENS, decode_rows, factor_beside_rows, load_rows_and_factor, pairs_of, tiles_of
from .rows import row_streams, rows_constants
from .tiles import WIDEST_DIGIT, Stream, Tiles
from .tiles_octahedral import VALUES, table

if TYPE_CHECKING:
    from kvpack.formats.octahedral import Octahedral

SIGN_BITS = tl.constexpr(2)
MOST_BITS_OF_ONE_INDEX = 8
"""Of an index and its signs together, for a table of whole triplets."""


def tiles(codec: Octahedral) -> Tiles | None:
    """The loader of ``codec``, None where a digit is too wide."""
    packings = codec.packings()
    if "index" not in packings:
        return None
    index_bits, sign_bits = (packings[name].bases[0].bit_length() - 1 for name in ("index", "sign"))
    if index_bits > WIDEST_DIGIT:
        return None
    whole = index_bits + sign_bits <= MOST_BITS_OF_ONE_INDEX
    both = tuple(packings.values())
    rows = rows_constants(both)
    streams = tuple(stream for name, packing in packings.items() for stream in row_streams(name, packing))
    norm_bits = 16 if codec.norm == "fp16" else 32
    pairs, channels = tiles_of(pairs_of(codec.triplets, VALUES, codec.dim), VALUES)
    found = table(codec, whole)
    few_norms = not whole and SIGN_BITS.value < sign_bits <= SIGN_BITS.value + MOST_BITS
    norms = table_of_bytes(found[1 << index_bits :, 0]) if few_norms else None
    constants = (
        rows, row_packing(both, 0), row_packing(both, 1), index_bits, int(whole), sign_bits - SIGN_BITS.value, norm_bits, pairs,
        norms,
    )  # fmt: skip
    return Tiles(
        load_rows_and_factor,
        decode,
        factor_beside_rows,
        constants,
        len(channels),
        channels,
        (*streams, Stream("norm", norm_bits, 1)),
        found,
        entries=0 if norms is None else 1 << index_bits,
        tokens=TOKENS,
    )


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
    """The coordinates of the triplets of ``STEP``, within a unit vector."""
    PAIRS: tl.constexpr = C[7]
    return (decode_rows(raw, table, PAIRS, STEP, coordinates, C, SHARED, TURNED, FAST),)


@triton.jit
def coordinates(
    words: tl.tuple, table: tl.tensor, TRIPLET: tl.constexpr, C: tl.constexpr, SHARED: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """The pairs (x, y) and (z, 0) of one triplet."""
    INDICES: tl.constexpr = C[1]
    SIGNS: tl.constexpr = C[2]
    INDEX_BITS: tl.constexpr = C[3]
    WHOLE: tl.constexpr = C[4]
    NORM_BITS: tl.constexpr = C[5]
    NORMS: tl.constexpr = C[8]
    UNIT: tl.constexpr = unit(4, SHARED, FAST)
    index = digit(words, INDICES, TRIPLET, FAST) * UNIT
    if WHOLE:
        index = index | (digit(words, SIGNS, TRIPLET, FAST) * (UNIT << INDEX_BITS))
    found = look_up_words(index, table, 2, 4, 0, SHARED, FAST)
    xy, z = found[0], found[1]
    if not WHOLE:
        COLUMN: tl.constexpr = TRIPLET % SIGNS[2]
        POSITION: tl.constexpr = TRIPLET // SIGNS[2] * (SIGN_BITS + NORM_BITS)
        xy = pair_negated(xy, words, SIGNS, COLUMN, POSITION, FAST)
        if NORM_BITS:
            if FAST and NORMS is not None:
                norm = select_of_four(words, SIGNS, TRIPLET // 4 * 4, SIGN_BITS, NORM_BITS, SIGN_BITS + NORM_BITS, NORMS)[TRIPLET % 4]
            else:
                level = bits_of_column(words, SIGNS, COLUMN, POSITION + SIGN_BITS, NORM_BITS) * UNIT
                norm = look_up_repeated(level, table, 1 << INDEX_BITS, SHARED, FAST)
            xy = pair_product(xy, norm, FAST)
            z = pair_product(z, norm, FAST)
    return xy, z
