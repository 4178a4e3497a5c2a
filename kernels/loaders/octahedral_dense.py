"""Tile loader of the octahedral codec in the dense arrangement (spec/codecs/octahedral.md), with indices and signs in separate columns."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.bitpack.f16x2 import multiply_f16x2, negate_f16x2
from kvpack.kernels.bitpack.streams import Stream
from kvpack.kernels.bitpack.thread_digits import RowPacking, column_bits, row_packing, symbol_digit
from kvpack.kernels.bitpack.thread_rows import row_streams, stored_words_per_plane
from kvpack.kernels.bitpack.thread_tiles import TOKENS, assign_tiles, decode_rows, load_rows_and_factor, pair_values, read_row_factor
from kvpack.kernels.bitpack.tile_packing import MAX_DIGIT_BITS
from kvpack.kernels.bitpack.token_factors import FACTOR_BITS
from kvpack.kernels.tables.register_table import MAX_BITS, byte_table, select_four
from kvpack.kernels.tables.thread_lookups import look_up_repeated, look_up_words, lookup_unit

from . import octahedral_keys
from .octahedral import VALUES, direction_table
from .tiles import Tiles

if TYPE_CHECKING:
    from kvpack.formats.octahedral import Octahedral

SIGN_BITS = tl.constexpr(2)

MAX_TRIPLET_BITS = 8
"""Maximum number of bits of an index and its signs together, for a table of whole triplets."""


class OctahedralDenseConstants(NamedTuple):
    """Compile-time constants of an octahedral codec and its rows.

    If ``whole``, a table entry is a whole symbol. ``norms`` is the table of triplet norms in registers (``register_table``), indexed by
    codes of ``norm_index_bits`` bits, or None if norms are looked up elsewhere. ``registers`` comes from ``thread_tiles.assign_tiles``.
    """

    rows: tuple[int, ...]
    indices: RowPacking
    signs: RowPacking
    index_bits: int
    whole: bool
    norm_index_bits: int
    factor_bits: int
    registers: tuple[int, ...]
    norms: tuple[int, ...] | None


def tiles(codec: Octahedral) -> Tiles | None:
    """Return the tile loader of ``codec``, or None if a digit is too wide."""
    packings = codec.packings()
    if "index" not in packings:
        return None
    index_bits, sign_bits = (packings[name].bases[0].bit_length() - 1 for name in ("index", "sign"))
    if index_bits > MAX_DIGIT_BITS:
        return None
    whole = index_bits + sign_bits <= MAX_TRIPLET_BITS
    both = tuple(packings.values())
    rows = stored_words_per_plane(both)
    streams = tuple(stream for name, packing in packings.items() for stream in row_streams(name, packing))
    norm_bits = FACTOR_BITS[codec.norm]
    registers, channels = assign_tiles(pair_values(codec.triplets, VALUES, codec.dim), VALUES)
    table = direction_table(codec, whole)
    few_norms = not whole and SIGN_BITS.value < sign_bits <= SIGN_BITS.value + MAX_BITS
    norms = byte_table(table[1 << index_bits :, 0]) if few_norms else None
    constants = OctahedralDenseConstants(
        rows=rows,
        indices=row_packing(both, 0),
        signs=row_packing(both, 1),
        index_bits=index_bits,
        whole=whole,
        norm_index_bits=sign_bits - SIGN_BITS.value,
        factor_bits=norm_bits,
        registers=registers,
        norms=norms,
    )
    result = Tiles(
        load_rows_and_factor,
        decode,
        read_row_factor,
        constants,
        len(channels),
        channels,
        (*streams, Stream("norm", norm_bits, 1)),
        table,
        entries=0 if norms is None else 1 << index_bits,
        tokens=TOKENS,
    )
    return result if whole else replace(result, keys=octahedral_keys.tiles(codec, result))


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the unit-vector coordinates of the triplets of step ``STEP``: one float16 tile, possibly transposed."""
    REGISTERS: tl.constexpr = CONSTANTS.registers
    return (decode_rows(loaded, table, REGISTERS, STEP, decode_triplet, CONSTANTS, MODE),)


@triton.jit
def decode_triplet(words: tl.tuple, table: tl.tensor, TRIPLET: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr) -> tl.tuple:
    """Return triplet ``TRIPLET`` as two f16x2: (x, y) and (z, 0)."""
    SHARED: tl.constexpr = MODE.shared
    INDICES: tl.constexpr = CONSTANTS.indices
    SIGNS: tl.constexpr = CONSTANTS.signs
    INDEX_BITS: tl.constexpr = CONSTANTS.index_bits
    WHOLE: tl.constexpr = CONSTANTS.whole
    NORM_BITS: tl.constexpr = CONSTANTS.norm_index_bits
    NORMS: tl.constexpr = CONSTANTS.norms
    UNIT: tl.constexpr = lookup_unit(4, SHARED, MODE.fast)
    index = symbol_digit(words, INDICES, TRIPLET, MODE.fast) * UNIT
    if WHOLE:
        index = index | (symbol_digit(words, SIGNS, TRIPLET, MODE.fast) * (UNIT << INDEX_BITS))
    result = look_up_words(index, table, 2, 4, 0, SHARED, MODE.fast)
    xy, z = result[0], result[1]
    if not WHOLE:
        COLUMN: tl.constexpr = TRIPLET % SIGNS.width
        POSITION: tl.constexpr = TRIPLET // SIGNS.width * (SIGN_BITS + NORM_BITS)
        xy = negate_f16x2(xy, words, SIGNS, COLUMN, POSITION, MODE.fast)
        if NORM_BITS:
            if MODE.fast and NORMS is not None:
                norm = select_four(words, SIGNS, TRIPLET // 4 * 4, SIGN_BITS, NORM_BITS, SIGN_BITS + NORM_BITS, NORMS)[TRIPLET % 4]
            else:
                level = column_bits(words, SIGNS, COLUMN, POSITION + SIGN_BITS, NORM_BITS) * UNIT
                norm = look_up_repeated(level, table, 1 << INDEX_BITS, SHARED, MODE.fast)
            xy = multiply_f16x2(xy, norm, MODE.fast)
            z = multiply_f16x2(z, norm, MODE.fast)
    return xy, z
