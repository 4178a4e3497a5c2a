"""Tile loader of the quaternion codec in the direct arrangement (spec/codecs/quaternion.md).

Each field has four tiles, one per component of its chunks.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.quaternion import Quaternion
from kvpack.kernels.bitpack.bitfields import expand_planes, load_planes, step_words
from kvpack.kernels.bitpack.f16_tiles import column_code_as_f16, multiply
from kvpack.kernels.bitpack.streams import Stream, plane_streams
from kvpack.kernels.bitpack.tile_packing import TilePacking, has_whole_word_tiles, tile_field_count, tile_packing
from kvpack.kernels.bitpack.token_factors import load_factor, read_factor
from kvpack.kernels.tables.shared_table import look_up_bits

from .tiles import Tiles, step_symbols, symbol_channels

VALUES = 4
"""Number of values per symbol: the channels of a chunk."""


class QuaternionConstants(NamedTuple):
    """Compile-time constants of a quaternion codec and its tiles, such as the number of bits per codeword and per radius code."""

    packing: TilePacking
    fields_per_tile: int
    code_bits: int
    radius_bits: int
    scale_stream: int
    scale_bits: int


def tiles(codec: Quaternion) -> Tiles | None:
    """Return the tile loader of ``codec`` in the direct arrangement, or None if a digit is too wide."""
    packing = codec.packings()["symbol"]
    if not has_whole_word_tiles(packing):
        return None
    symbols = step_symbols(packing)
    table = torch.zeros(packing.bases[0], VALUES, dtype=torch.float32, device="cpu")
    table[: packing.alphabets[0]] = codec.codebook
    streams = plane_streams("symbol", packing)
    scale_bits = 16 if codec.norm == "fp16" else 32
    constants = QuaternionConstants(
        packing=tile_packing(0, packing),
        fields_per_tile=tile_field_count(packing),
        code_bits=packing.bases[0].bit_length() - 1,
        radius_bits=codec.radius_bits,
        scale_stream=len(streams),
        scale_bits=scale_bits,
    )
    channels = tuple(symbol_channels(step, VALUES, value, codec.dim) for step in symbols for value in range(VALUES))
    return Tiles(
        load,
        decode,
        factor,
        constants,
        len(symbols),
        channels,
        (*streams, Stream("scale", scale_bits, 1)),
        table.to(torch.float16),
        packings=(packing,),
        entries=packing.alphabets[0],
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
    """Load the planes, int16 tiles ``[warp, token, column]`` or transposed, followed by the scales (``token_factors``)."""
    PACKING: tl.constexpr = CONSTANTS.packing
    planes = load_planes(pointers, first, token, valid, PACKING, MASKED, MODE.transposed)
    return planes + load_factor(pointers[CONSTANTS.scale_stream], first, token, valid, CONSTANTS.scale_bits, MASKED, MODE.fast)


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the components of the chunks of step ``STEP`` as four float16 tiles in the layout of the planes.

    A chunk is a unit quaternion times its radius code.
    """
    PACKING: tl.constexpr = CONSTANTS.packing
    FIELDS_PER_TILE: tl.constexpr = CONSTANTS.fields_per_tile
    CODE_BITS: tl.constexpr = CONSTANTS.code_bits
    RADIUS_BITS: tl.constexpr = CONSTANTS.radius_bits
    RADII: tl.constexpr = PACKING.fields * CODE_BITS
    planes = expand_planes(loaded, column_fields, 0, PACKING, MODE)
    if FIELDS_PER_TILE == 1:
        result = _decode_chunk(planes, table, STEP * CODE_BITS, RADII + STEP * RADIUS_BITS, CONSTANTS, MODE)
    else:
        index = step_words(planes, column_fields, 0, PACKING, 0, CODE_BITS, STEP, FIELDS_PER_TILE, 1, PACKING.fields, MODE)
        radius = step_words(planes, column_fields, 0, PACKING, RADII, RADIUS_BITS, STEP, FIELDS_PER_TILE, 1, PACKING.fields, MODE)
        result = _decode_chunk((index, radius), table, 0, 16, CONSTANTS, MODE)
    return result


@triton.jit
def _decode_chunk(
    planes: tl.tuple, table: tl.tensor, CODE: tl.constexpr, RADIUS: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return one chunk per column. Its codeword begins at bit ``CODE`` of the column, and its radius code at bit ``RADIUS``."""
    SHARED: tl.constexpr = MODE.shared
    result = look_up_bits(planes, table, CODE, CONSTANTS.code_bits, 4, 0, SHARED, MODE.fast)
    radius = column_code_as_f16(planes, RADIUS, CONSTANTS.radius_bits, MODE.fast)
    return (
        multiply(result[0], radius, MODE.fast),
        multiply(result[1], radius, MODE.fast),
        multiply(result[2], radius, MODE.fast),
        multiply(result[3], radius, MODE.fast),
    )


@triton.jit
def factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the token factors, float32 ``[warp, token]``: the scales divided by the largest radius code."""
    return read_factor(loaded, CONSTANTS.scale_stream, CONSTANTS.scale_bits, FAST) * (1.0 / ((1 << CONSTANTS.radius_bits) - 1))
