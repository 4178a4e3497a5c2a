"""Tile loader of the angle codec (spec/codecs/angle.md), with two tiles per field: cosine times norm and sine times norm of each pair.

Norms are divided by a power of two near the token's largest norm, so that all fit in float16; this power is the token factor. This file
handles the direct arrangement. In the dense arrangement, bins and norm codes have their own streams (``angle_dense``, ``angle_thread``).
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.angle import Angle
from kvpack.formats.columns import next_power_of_two
from kvpack.kernels.bitpack.bitfields import expand_planes, load_per_token, load_planes, step_words
from kvpack.kernels.bitpack.f16_tiles import affine_column, binary16_bits, exp2, multiply
from kvpack.kernels.bitpack.streams import Stream, plane_streams
from kvpack.kernels.bitpack.tile_layout import broadcast_tokens
from kvpack.kernels.bitpack.tile_packing import TilePacking, has_whole_word_tiles, tile_field_count, tile_packing
from kvpack.kernels.tables.shared_table import look_up_bits

from .tiles import Tiles, step_symbols, symbol_channels

VALUES = 2
"""Number of values per symbol: the two channels of a pair."""


class AngleConstants(NamedTuple):
    """Compile-time constants of an angle codec and its tiles. ``log`` is True if norms are logarithms.

    ``range_index`` is the index of the stream of ranges, and also the index of the ranges in the result of ``load``.
    """

    packing: TilePacking
    fields_per_tile: int
    bin_bits: int
    norm_bits: int
    log: bool
    range_index: int
    half_range: bool


def tiles(codec: Angle) -> Tiles | None:
    """Return the tile loader of ``codec`` in the direct arrangement, or None if a digit is too wide."""
    packing = codec.packings()["symbol"]
    if not has_whole_word_tiles(packing):
        return None
    symbols = step_symbols(packing)
    bin_bits = packing.bases[0].bit_length() - 1
    streams = plane_streams("symbol", packing)
    half = codec.range == "fp16"
    streams = (*streams, Stream("range", 32, 1 if half else 2))
    constants = AngleConstants(
        packing=tile_packing(0, packing),
        fields_per_tile=tile_field_count(packing),
        bin_bits=bin_bits,
        norm_bits=codec.norm_bits,
        log=codec.norm == "log",
        range_index=len(streams) - 1,
        half_range=half,
    )
    channels = tuple(symbol_channels(step, VALUES, value, codec.dim) for step in symbols for value in range(VALUES))
    return Tiles(load, decode, factor, constants, len(symbols), channels, streams, direction_table(codec), packings=(packing,))


def direction_table(codec: Angle) -> torch.Tensor:
    """Return the cosine and sine of every bin, float16 ``[entry, 2]``. The number of entries is padded to a power of two."""
    entries = torch.zeros(next_power_of_two(codec.bins), VALUES, dtype=torch.float16, device="cpu")
    entries[: codec.bins] = codec.directions
    return entries


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
    """Load the planes, int16 tiles ``[warp, token, column]`` or transposed, followed by the ranges, int32 ``[warp, token]``."""
    PACKING: tl.constexpr = CONSTANTS.packing
    loaded = load_planes(pointers, first, token, valid, PACKING, MASKED, MODE.transposed)
    return loaded + load_range(pointers[CONSTANTS.range_index], first, token, valid, CONSTANTS, MASKED)


@triton.jit
def load_range(
    pointer: tl.tensor, first: tl.tensor, token: tl.tensor, valid: tl.tensor, CONSTANTS: tl.constexpr, MASKED: tl.constexpr
) -> tl.tuple:
    """Load the range (step and minimum) of each token as int32 ``[warp, token]``: one for float16 numbers, or two for float32 numbers."""
    words = ()
    for word in tl.static_range(2 - CONSTANTS.half_range):
        words = words + (load_per_token(pointer, first, token, valid, 2 - CONSTANTS.half_range, word, MASKED),)
    return words


@triton.jit
def _half_as_float32(bits: tl.tensor) -> tl.tensor:
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _range_as_float32(words: tl.tuple) -> tl.tuple:
    """Return the step and the minimum of each token's range (``words``) as float32 tensors of the same shape."""
    if len(words) == 1:
        step = _half_as_float32(words[0])
        minimum = _half_as_float32(words[0] >> 16)
    else:
        step = words[0].to(tl.float32, bitcast=True)
        minimum = words[1].to(tl.float32, bitcast=True)
    return step, minimum


@triton.jit
def _divisor_exponent(words: tl.tuple, LARGEST: tl.constexpr) -> tl.tensor:
    """Return the exponent field of each token's norm divisor, a power of two, for linear ranges.

    For float16 ranges, divided norms are below 2^11. For float32 ranges, the power exceeds all norms except the very largest.
    """
    if len(words) == 1:
        high = tl.maximum(words[0] & 0x7C00, ((words[0] >> 16) & 0x7C00) - (8 << 10))
        exponent = (tl.minimum(high, 29 << 10) >> 10) + 112
    else:
        step, minimum = _range_as_float32(words)
        largest = tl.maximum(tl.abs(minimum), tl.abs(minimum + step * LARGEST))
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) + 1
        exponent = tl.minimum(tl.maximum(exponent, 27), 253)
    return exponent


@triton.jit
def factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the token factors, float32 ``[warp, token]`` (see ``range_factor``)."""
    return range_factor(loaded[CONSTANTS.range_index : CONSTANTS.range_index + 2 - CONSTANTS.half_range], CONSTANTS)


@triton.jit
def range_factor(words: tl.tuple, CONSTANTS: tl.constexpr) -> tl.tensor:
    """Return the token factors: the divisor of each token's norms. ``words`` are the tokens' ranges.

    It is a power of two or, if norms are logarithms, the largest norm that the range can represent.
    """
    LARGEST: tl.constexpr = (1 << CONSTANTS.norm_bits) - 1
    if CONSTANTS.log:
        step, minimum = _range_as_float32(words)
        value = tl.exp2(minimum + tl.maximum(step * LARGEST, 0.0))
    else:
        value = (_divisor_exponent(words, LARGEST) << 23).to(tl.float32, bitcast=True)
    return value


@triton.constexpr_function
def middle_norm_code(bits: int) -> int:
    """Return the code that is subtracted from norm codes of ``bits`` bits: half the number of codes."""
    return 1 << (bits - 1)


@triton.jit
def norm_affine(words: tl.tuple, CONSTANTS: tl.constexpr) -> tl.tuple:
    """Return the scale and center of norms (or of their logarithms) divided by the token factor, both float32.

    A norm is (code - ``middle_norm_code``) * scale + center. ``words`` are the tokens' ranges.
    """
    step, minimum = _range_as_float32(words)
    MIDDLE: tl.constexpr = middle_norm_code(CONSTANTS.norm_bits)
    LARGEST: tl.constexpr = (1 << CONSTANTS.norm_bits) - 1
    if CONSTANTS.log:
        scale = step
        center = step * MIDDLE - tl.maximum(step * LARGEST, 0.0)
    else:
        inverse = ((254 - _divisor_exponent(words, LARGEST)) << 23).to(tl.float32, bitcast=True)
        scale = step * inverse
        center = (minimum + step * MIDDLE) * inverse
    return scale, center


@triton.constexpr_function
def _norm_affine_ptx(bits: int) -> str:
    """Return PTX that computes ``norm_affine`` for two float16 ranges.

    It compares exponents in place, without shifting them down, because exponent fields have the same order as float16 numbers.
    """
    middle = binary16_bits(middle_norm_code(bits))
    return f"""{{ .reg .b32 step, minimum, high, low, bound;
        prmt.b32 step, $2, $3, 0x5410; prmt.b32 minimum, $2, $3, 0x7632;
        and.b32 high, step, 0x7C007C00; and.b32 low, minimum, 0x7C007C00;
        mov.b32 bound, {(8 << 10) * 0x10001}; max.f16x2 low, low, bound; sub.u32 low, low, bound; max.f16x2 high, high, low;
        mov.b32 bound, {(29 << 10) * 0x10001}; min.f16x2 high, high, bound; sub.u32 high, {(30 << 10) * 0x10001}, high;
        mul.rn.f16x2 $0, step, high; mul.rn.f16x2 low, minimum, high;
        mov.b32 high, {middle * 0x10001}; fma.rn.f16x2 $1, $0, high, low; }}"""


@triton.jit
def norm_affine_f16(words: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """Return the result of ``norm_affine`` in float16."""
    if FAST and CONSTANTS.log == 0 and len(words) == 1:
        scale, center = tl.inline_asm_elementwise(
            _norm_affine_ptx(CONSTANTS.norm_bits), "=&r,=&r,r,r", [words[0]], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        scale, center = norm_affine(words, CONSTANTS)
        scale = scale.to(tl.float16)
        center = center.to(tl.float16)
    return scale, center


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return both channels of the pairs of step ``STEP`` as two float16 tiles in the layout of the planes.

    The channels still lack the token factor.
    """
    PACKING: tl.constexpr = CONSTANTS.packing
    FIELDS_PER_TILE: tl.constexpr = CONSTANTS.fields_per_tile
    planes = expand_planes(loaded, column_fields, 0, PACKING, MODE)
    BIN_BITS: tl.constexpr = CONSTANTS.bin_bits
    NORM_BITS: tl.constexpr = CONSTANTS.norm_bits
    NORMS: tl.constexpr = PACKING.fields * BIN_BITS
    scale_and_center = load_norm_affine(loaded, CONSTANTS, MODE)
    if FIELDS_PER_TILE == 1:
        result = decode_pairs(planes, scale_and_center, table, STEP * BIN_BITS, NORMS + STEP * NORM_BITS, CONSTANTS, MODE)
    else:
        index = step_words(planes, column_fields, 0, PACKING, 0, BIN_BITS, STEP, FIELDS_PER_TILE, 1, PACKING.fields, MODE)
        norm = step_words(planes, column_fields, 0, PACKING, NORMS, NORM_BITS, STEP, FIELDS_PER_TILE, 1, PACKING.fields, MODE)
        result = decode_pairs((index, norm), scale_and_center, table, 0, 16, CONSTANTS, MODE)
    return result


@triton.jit
def load_norm_affine(loaded: tl.tuple, CONSTANTS: tl.constexpr, MODE: tl.constexpr) -> tl.tuple:
    """Return ``norm_affine`` of the ranges in ``loaded``: the scale and the center as float16 tensors that broadcast to a tile."""
    scale, center = norm_affine_f16(loaded[CONSTANTS.range_index : CONSTANTS.range_index + 2 - CONSTANTS.half_range], CONSTANTS, MODE.fast)
    return broadcast_tokens(scale, MODE.transposed), broadcast_tokens(center, MODE.transposed)


@triton.jit
def decode_pairs(
    planes: tl.tuple,
    scale_and_center: tl.tuple,
    table: tl.tensor,
    BIN: tl.constexpr,
    NORM: tl.constexpr,
    CONSTANTS: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tuple:
    """Return both channels of one pair per column.

    The pair's bin begins at bit ``BIN`` of the column, and its norm code at bit ``NORM``.
    """
    SHARED: tl.constexpr = MODE.shared
    result = look_up_bits(planes, table, BIN, CONSTANTS.bin_bits, 2, 0, SHARED, MODE.fast)
    NORM_BITS: tl.constexpr = CONSTANTS.norm_bits
    norm = affine_column(planes, scale_and_center[0], scale_and_center[1], NORM, NORM_BITS, middle_norm_code(NORM_BITS), MODE.fast)
    if CONSTANTS.log:
        norm = exp2(norm, MODE.fast)
    return (multiply(result[0], norm, MODE.fast), multiply(result[1], norm, MODE.fast))
