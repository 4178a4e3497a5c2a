"""Signs of a second rotation in attention tiles (sidecar qjl, spec/side-cars.md): 1 or -1, with their own token factor.

Columns of signs are channels of that rotation. Queries and sums of values have additional columns for them.

For keys, signs are not computed. A bit of a word is itself a power of two in float16, or zero, and the query's column is divided by that
power. Half the sum of these columns, minus their products with the bits, is half the product with the signs.
"""

# Triton compiles no unpacking.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import triton
from triton import language as tl

from kvpack.formats.qjl import NORM, SIGNS, Qjl
from kvpack.kernels.bitpack.bitfields import expand_planes, load_planes, step_words
from kvpack.kernels.bitpack.streams import Stream, plane_streams
from kvpack.kernels.bitpack.tile_packing import TilePacking, has_whole_word_tiles, tile_field_count, tile_packing, tile_width
from kvpack.kernels.bitpack.token_factors import load_factor, read_factor

from .tiles import Tiles, step_symbols, tile_field_stride

QUERY_FACTOR = tl.constexpr(0.25)
"""Factor for a query's sign columns. It keeps them from overflowing float16 when they are divided by a bit's power of two."""


class QjlConstants(NamedTuple):
    """Compile-time constants of QJL signs.

    ``first_stream`` and ``packing_index`` are the indices of the signs' first stream and of their packing. ``unit`` is the constant factor
    of the QJL estimator.
    """

    packing: TilePacking
    first_stream: int
    packing_index: int
    fields_per_tile: int
    field_stride: int
    steps: int
    norm_stream: int
    norm_bits: int
    unit: float


def with_signs(tiles: Tiles, qjl: Qjl) -> Tiles | None:
    """Return the loader ``tiles`` of a codec, extended by the signs of ``qjl``, or None if tiles do not support the packing of the signs.

    Sign i becomes channel dim + i.
    """
    packing = qjl.packing
    if not has_whole_word_tiles(packing):
        return None
    planes = plane_streams(SIGNS, packing)
    field_stride = tile_field_stride(packing, 1, packing.fields)
    symbols = step_symbols(packing, field_stride)
    norm_bits = 16 if qjl.norm == "fp16" else 32
    constants = QjlConstants(
        packing=tile_packing(0, packing),
        first_stream=len(tiles.streams),
        packing_index=len(tiles.widths_of_streams) // 2,
        fields_per_tile=tile_field_count(packing),
        field_stride=field_stride,
        steps=len(symbols),
        norm_stream=len(planes),
        norm_bits=norm_bits,
        unit=math.sqrt(math.pi / (2 * qjl.dim)),
    )
    return replace(
        tiles,
        channels=(*tiles.channels, *(tuple(qjl.dim + symbol if symbol >= 0 else -1 for symbol in step) for step in symbols)),
        streams=(*tiles.streams, *planes, Stream(NORM, norm_bits, 1)),
        packings=(*tiles.packings, packing),
        stream_widths=(*tiles.widths_of_streams, packing.width, tile_width(packing)),
        signs=constants,
        loads_ahead=False,
        keys=None,
    )


@triton.jit
def load_signs(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    CONSTANTS: tl.constexpr,
    MASKED: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tuple:
    """Load the planes of signs, int16 tiles ``[warp, token, column]`` or transposed, followed by the norms (``token_factors``)."""
    PACKING: tl.constexpr = CONSTANTS.packing
    own = pointers[CONSTANTS.first_stream :]
    planes = load_planes(own, first, token, valid, PACKING, MASKED, MODE.transposed)
    return planes + load_factor(own[CONSTANTS.norm_stream], first, token, valid, CONSTANTS.norm_bits, MASKED, MODE.fast)


@triton.constexpr_function
def _sign_ptx(position: int) -> str:
    """Return PTX that turns the bit at ``position`` of each 16-bit half into the sign of the float16 number 1."""
    return f"{{ .reg .b32 a; shl.b32 a, $1, {15 - position}; lop3.b32 $0, a, 0x80008000, 0x3C003C00, 0x6A; }}"


@triton.constexpr_function
def _bit_shift(position: int) -> int:
    """Return the left shift that keeps the bit at ``position`` away from the sign bit and the lowest bits of a float16 number.

    Most bits have the same shift.
    """
    return 7 if position <= 7 else -1 if position == 15 else 0


@triton.constexpr_function
def _bit_value(position: int) -> float:
    """Return the value of the bit at ``position``, read as a float16 number after ``_bit_shift``."""
    position += _bit_shift(position)
    return 2.0 ** (position - 24) if position < 10 else 2.0 ** ((1 << position - 10) - 15)


@triton.constexpr_function
def _isolate_bit_ptx(position: int) -> str:
    """Return PTX that moves the bit at ``position`` of each word by ``_bit_shift`` and clears all other bits."""
    shift = _bit_shift(position)
    moved = f"shl.b32 a, $1, {shift};" if shift > 0 else f"shr.b32 a, $1, {-shift};" if shift else "mov.b32 a, $1;"
    return f"{{ .reg .b32 a; {moved} and.b32 $0, a, {0x10001 << position + shift}; }}"


@triton.constexpr_function
def _sign_position(step: int, fields_per_tile: int, field_stride: int) -> int:
    """Return the bit that is the column's sign in ``step``, in the words that ``_sign_words`` returns."""
    return step % 16 if fields_per_tile == 1 else step if field_stride > 1 else 0


@triton.jit
def _sign_words(loaded: tl.tuple, column_fields: tl.tuple, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr) -> tl.tensor:
    PACKING: tl.constexpr = CONSTANTS.packing
    PACKING_INDEX: tl.constexpr = CONSTANTS.packing_index
    FIELDS_PER_TILE: tl.constexpr = CONSTANTS.fields_per_tile
    FIELD_STRIDE: tl.constexpr = CONSTANTS.field_stride
    planes = expand_planes(loaded, column_fields, PACKING_INDEX, PACKING, MODE)
    if FIELDS_PER_TILE == 1:
        word = planes[STEP // 16]
    else:
        word = step_words(planes, column_fields, PACKING_INDEX, PACKING, 0, 1, STEP, FIELDS_PER_TILE, FIELD_STRIDE, PACKING.fields, MODE)
    return word


@triton.jit
def decode_signs(loaded: tl.tuple, column_fields: tl.tuple, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr) -> tl.tuple:
    """Return the signs of step ``STEP`` for values as one float16 tile ``[warp, column, token]``: -1 for set bits, 1 for clear bits."""
    BIT: tl.constexpr = _sign_position(STEP, CONSTANTS.fields_per_tile, CONSTANTS.field_stride)
    word = _sign_words(loaded, column_fields, STEP, CONSTANTS, MODE)
    if MODE.fast:
        value = tl.inline_asm_elementwise(_sign_ptx(BIT), "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2)
    else:
        value = tl.where((word >> BIT) & 1 == 1, -1.0, 1.0).to(tl.float16)
    return (value,)


@triton.jit
def decode_bits(loaded: tl.tuple, column_fields: tl.tuple, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr) -> tl.tuple:
    """Return the bits of step ``STEP`` for keys as one float16 tile ``[warp, token, column]``: a power of two for set bits, else 0."""
    BIT: tl.constexpr = _sign_position(STEP, CONSTANTS.fields_per_tile, CONSTANTS.field_stride)
    word = _sign_words(loaded, column_fields, STEP, CONSTANTS, MODE)
    if MODE.fast:
        value = tl.inline_asm_elementwise(_isolate_bit_ptx(BIT), "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2)
    else:
        value = tl.where((word >> BIT) & 1 == 1, _bit_value(BIT), 0.0).to(tl.float16)
    return (value,)


@triton.jit
def scale_sign_queries(q: tl.tuple, CONSTANTS: tl.constexpr, SETS: tl.constexpr) -> tl.tuple:
    """Scale the sign columns of a query's tiles ``[warp, column, row]`` for ``decode_bits``. Returns all tiles.

    Sign columns are the last tiles in each of ``SETS`` sets.
    """
    tiles = ()
    EACH: tl.constexpr = len(q) // SETS
    FIRST: tl.constexpr = EACH - CONSTANTS.steps
    for number in tl.static_range(len(q)):
        tile = q[number]
        if number % EACH >= FIRST:
            tile = _scale_tile(tile, number % EACH - FIRST, CONSTANTS)
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def _scale_tile(tile: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr) -> tl.tensor:
    POWER: tl.constexpr = _bit_value(_sign_position(STEP, CONSTANTS.fields_per_tile, CONSTANTS.field_stride))
    return (tile.to(tl.float32) * (-QUERY_FACTOR / POWER)).to(tl.float16)


@triton.jit
def half_sum(q: tl.tuple, CONSTANTS: tl.constexpr, SETS: tl.constexpr) -> tl.tensor:
    """Return half the sum of a query's sign columns, times ``QUERY_FACTOR``: ``[warp, 1, row]``.

    ``q`` comes from ``scale_sign_queries``.
    """
    EACH: tl.constexpr = len(q) // SETS
    # Sum over columns once for all tiles together, because the threads of a program wait for each other in every such sum.
    columns = _half_tile_sum(q[EACH - CONSTANTS.steps], 0, CONSTANTS)
    for number in tl.static_range(EACH - CONSTANTS.steps + 1, len(q)):
        if number % EACH >= EACH - CONSTANTS.steps:
            columns += _half_tile_sum(q[number], number % EACH - (EACH - CONSTANTS.steps), CONSTANTS)
    return tl.sum(columns, 1)[:, None, :]


@triton.jit
def _half_tile_sum(tile: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr) -> tl.tensor:
    POWER: tl.constexpr = _bit_value(_sign_position(STEP, CONSTANTS.fields_per_tile, CONSTANTS.field_stride))
    return tile.to(tl.float32) * (-0.5 * POWER)


@triton.jit
def bit_factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    return read_factor(loaded, CONSTANTS.norm_stream, CONSTANTS.norm_bits, FAST) * (CONSTANTS.unit * (2 / QUERY_FACTOR))


@triton.jit
def sign_norm_factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the stored norm times sqrt(pi / (2 dim)) (OCTOPUS Sec. 3.6)."""
    return read_factor(loaded, CONSTANTS.norm_stream, CONSTANTS.norm_bits, FAST) * CONSTANTS.unit
