"""Tile loader of the octahedral codec (spec/codecs/octahedral.md): three tiles per field, one per coordinate of its triplets.

A table contains the directions with positive signs, and signs are flipped after the lookup. If a symbol is one short digit, the table
contains whole symbols. This file handles the direct arrangement. In the dense arrangement (``octahedral_dense``), indices and signs have
their own streams.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.octahedral import Octahedral
from kvpack.formats.octahedral_search import codebook_directions
from kvpack.kernels.bitpack.bitfields import expand_planes, load_planes, step_words
from kvpack.kernels.bitpack.f16_tiles import multiply, negate_by_bit
from kvpack.kernels.bitpack.streams import Stream, plane_streams
from kvpack.kernels.bitpack.tile_packing import TilePacking, has_whole_word_tiles, tile_field_count, tile_packing
from kvpack.kernels.bitpack.token_factors import FACTOR_BITS, load_factors, read_factors
from kvpack.kernels.tables.shared_table import look_up_bits, look_up_repeated

from .tiles import Tiles, step_symbols, symbol_channels

VALUES = 3
"""Number of values per symbol: the coordinates of a triplet."""

SIGN_BITS = 2

NORM_DIGIT_BITS = (1, 2, 4, 8, 16)
"""Possible widths of index digits that norm bits fill up (spec/codecs/octahedral.md, Layout)."""


class OctahedralConstants(NamedTuple):
    """Compile-time constants of an octahedral codec and its tiles.

    A symbol begins with a direction index of ``index_bits`` bits. If the index is not the whole symbol, ``sign_bits`` bits follow; the
    highest ``norm_index_bits`` of them are the norm code.
    """

    packing: TilePacking
    fields_per_tile: int
    index_bits: int
    sign_bits: int
    norm_index_bits: int
    norm_stream: int
    norm_bits: int


def tiles(codec: Octahedral, dual: int = 0) -> Tiles | None:
    """Return the tile loader of ``codec`` in the direct arrangement, or None if a digit is too wide. For ``dual``, see ``Tiles``."""
    packing = codec.packings()["symbol"]
    if not has_whole_word_tiles(packing):
        return None
    symbols = step_symbols(packing, dual=dual)
    index_bits, *more = (base.bit_length() - 1 for base in packing.bases)
    entries = direction_table(codec, whole=not more)
    streams = plane_streams("symbol", packing)
    norm_bits = FACTOR_BITS[codec.norm]
    constants = OctahedralConstants(
        packing=tile_packing(0, packing, dual),
        fields_per_tile=tile_field_count(packing, dual),
        index_bits=index_bits,
        sign_bits=more[0] if more else 0,
        norm_index_bits=codec.b_norm if more and more[0] > SIGN_BITS else 0,
        norm_stream=len(streams),
        norm_bits=norm_bits,
    )
    channels = tuple(symbol_channels(step, VALUES, value, codec.dim) for step in symbols for value in range(VALUES))
    streams = (*streams, Stream("norm", norm_bits, 1))
    return Tiles(load, decode, factor, constants, len(symbols), channels, streams, entries, packings=(packing,), dual=dual)


def direction_table(codec: Octahedral, whole: bool) -> torch.Tensor:
    """Return the table for ``decode``, float16 ``[entry, 4]``: directions (x, y, z, 0), indexed by the first digit of a symbol.

    If this digit includes the norm code, entries are directions times norms. Otherwise, one entry per norm follows the directions. With
    ``whole``, entries are indexed by whole symbols, including signs.
    """
    norms = torch.frombuffer(bytearray(codec.norm_table), dtype=torch.float32)
    directions = torch.nn.functional.pad(codebook_directions(codec.direction_table).T, (0, 1))
    norm_in_index = 2 * (codec.b_dir - 1) + codec.b_norm in NORM_DIGIT_BITS
    if whole:
        signs = torch.tensor(
            [[1.0, 1.0, 1.0, 1.0], [-1.0, 1.0, 1.0, 1.0], [1.0, -1.0, 1.0, 1.0], [-1.0, -1.0, 1.0, 1.0]], dtype=torch.float32, device="cpu"
        )
        signs, norms = signs[:, None, :], norms[:, None, None]
        outer, inner = (signs[:, None], norms) if norm_in_index else (norms[:, None], signs)
        return (outer * inner * directions).reshape(-1, 4).to(torch.float16)
    if norm_in_index or codec.b_norm == 0:
        return (norms[:, None, None] * directions).reshape(-1, 4).to(torch.float16)
    return torch.cat([directions, norms[:, None].expand(-1, 4)]).to(torch.float16)


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
    """Load the planes, int16 tiles ``[warp, token, column]`` or transposed, followed by the norms (``token_factors``)."""
    PACKING: tl.constexpr = CONSTANTS.packing
    planes = load_planes(pointers, first, token, valid, PACKING, MASKED, MODE.transposed)
    return planes + load_factors(pointers[CONSTANTS.norm_stream], first, token, valid, CONSTANTS.norm_bits, PACKING.dual, MASKED, MODE.fast)


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the unit-vector coordinates of the triplets of step ``STEP``: three float16 tiles in the layout of the planes."""
    PACKING: tl.constexpr = CONSTANTS.packing
    FIELDS_PER_TILE: tl.constexpr = CONSTANTS.fields_per_tile
    INDEX_BITS: tl.constexpr = CONSTANTS.index_bits
    SIGN_BITS: tl.constexpr = CONSTANTS.sign_bits
    SIGNS: tl.constexpr = PACKING.fields * INDEX_BITS
    planes = expand_planes(loaded, column_fields, 0, PACKING, MODE)
    if FIELDS_PER_TILE == 1:
        result = _decode_triplet(planes, table, STEP * INDEX_BITS, SIGNS + STEP * SIGN_BITS, CONSTANTS, MODE)
    else:
        index = step_words(planes, column_fields, 0, PACKING, 0, INDEX_BITS, STEP, FIELDS_PER_TILE, 1, PACKING.fields, MODE)
        sign = index
        if SIGN_BITS:
            sign = step_words(planes, column_fields, 0, PACKING, SIGNS, SIGN_BITS, STEP, FIELDS_PER_TILE, 1, PACKING.fields, MODE)
        result = _decode_triplet((index, sign), table, 0, 16, CONSTANTS, MODE)
    return result


@triton.jit
def _decode_triplet(
    planes: tl.tuple, table: tl.tensor, INDEX: tl.constexpr, SIGNS: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return one triplet per column. Its index begins at bit ``INDEX`` of the column, and its signs at bit ``SIGNS``."""
    SHARED: tl.constexpr = MODE.shared
    INDEX_BITS: tl.constexpr = CONSTANTS.index_bits
    NORM_BITS: tl.constexpr = CONSTANTS.norm_index_bits
    result = look_up_bits(planes, table, INDEX, INDEX_BITS, 4, 0, SHARED, MODE.fast)
    x, y, z = result[0], result[1], result[2]
    if CONSTANTS.sign_bits:
        x = negate_by_bit(x, planes[SIGNS // 16], SIGNS % 16, MODE.fast)
        y = negate_by_bit(y, planes[(SIGNS + 1) // 16], (SIGNS + 1) % 16, MODE.fast)
        if NORM_BITS:
            norm = look_up_repeated(planes, table, SIGNS + 2, NORM_BITS, 1 << INDEX_BITS, SHARED, MODE.fast)
            x, y, z = multiply(x, norm, MODE.fast), multiply(y, norm, MODE.fast), multiply(z, norm, MODE.fast)
    return (x, y, z)


@triton.jit
def factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the norms, float32 ``[warp, token]``. For dual tiles, returns a pair of such tensors."""
    PACKING: tl.constexpr = CONSTANTS.packing
    return read_factors(loaded, CONSTANTS.norm_stream, CONSTANTS.norm_bits, PACKING.dual, FAST)
