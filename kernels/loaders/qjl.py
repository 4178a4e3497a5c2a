"""qjl as tiles (spec/side-cars.md): the signs of a second rotation, 1 or -1, in addition to a codec's tiles and with their own factor.

Their columns are channels of that rotation: a query has columns for them too, and sums of values have their own.

For keys no sign is computed. A bit of a word is itself a binary16 power of two or zero. The query's column is divided by that power, and
half the sum of those columns minus the products of the bits is half the product of the signs.
"""

# Triton compiles no unpacking.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from kvpack.formats.qjl import NORM, SIGNS
from kvpack.kernels.bitpack.bitfields import expand_planes, load_planes, step_words
from kvpack.kernels.bitpack.streams import Stream, plane_streams
from kvpack.kernels.bitpack.tile_packing import TilePacking, has_whole_word_tiles, tile_field_count, tile_packing, tile_width
from kvpack.kernels.bitpack.token_factors import load_factor, read_factor

from .tiles import Tiles, step_symbols, tile_field_stride

if TYPE_CHECKING:
    from kvpack.formats.qjl import Qjl


QUERY = tl.constexpr(0.25)
"""Factor of a query's columns, at most 1, so that none overflows binary16 when it is divided by the power of a bit."""


class QjlConstants(NamedTuple):
    """Compile-time constants of the signs next to a codec's tiles.

    ``first_stream`` is the number of their first stream, and ``number`` that of their packing; ``unit`` is the estimator's factor.
    """

    packing: TilePacking
    first_stream: int
    number: int
    fields_per_tile: int
    field_stride: int
    steps: int
    norm_stream: int
    norm_bits: int
    unit: float


def with_signs(tiles: Tiles, qjl: Qjl) -> Tiles | None:
    """Extend the loader ``tiles`` of a codec with the signs of ``qjl``, whose channel i is channel dim + i.

    Returns None if their packing has no tiles.
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
        number=len(tiles.widths_of_streams) // 2,
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
    TRANSPOSED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Load the planes, int16 tiles ``[warp, token, column]`` or transposed, then the norms (``token_factors``)."""
    PACKING: tl.constexpr = CONSTANTS.packing
    own = pointers[CONSTANTS.first_stream :]
    planes = load_planes(own, first, token, valid, PACKING, MASKED, TRANSPOSED)
    return planes + load_factor(own[CONSTANTS.norm_stream], first, token, valid, CONSTANTS.norm_bits, MASKED, FAST)


@triton.constexpr_function
def _one(position: int) -> str:
    """Return PTX that makes the bit of each word at ``position`` the sign of a binary16 1."""
    return f"{{ .reg .b32 a; shl.b32 a, $1, {15 - position}; lop3.b32 $0, a, 0x80008000, 0x3C003C00, 0x6A; }}"


@triton.constexpr_function
def _shift(position: int) -> int:
    """Return the left shift of the bit at ``position``: the same for most bits, and never onto the sign bit or the lowest bits."""
    return 7 if position <= 7 else -1 if position == 15 else 0


@triton.constexpr_function
def _power(position: int) -> float:
    """Return the binary16 value of a bit moved by ``_shift``."""
    position += _shift(position)
    return 2.0 ** (position - 24) if position < 10 else 2.0 ** ((1 << position - 10) - 15)


@triton.constexpr_function
def _isolate_bit(position: int) -> str:
    """Return PTX that masks all bits of each word except the one at ``position``, moved by ``_shift``."""
    shift = _shift(position)
    moved = f"shl.b32 a, $1, {shift};" if shift > 0 else f"shr.b32 a, $1, {-shift};" if shift else "mov.b32 a, $1;"
    return f"{{ .reg .b32 a; {moved} and.b32 $0, a, {0x10001 << position + shift}; }}"


@triton.constexpr_function
def _position(step: int, fields_per_tile: int, field_stride: int) -> int:
    """Return the bit with a column's sign in each word of ``_words`` for ``step``."""
    return step % 16 if fields_per_tile == 1 else step if field_stride > 1 else 0


@triton.jit
def _words(
    loaded: tl.tuple, column_fields: tl.tuple, STEP: tl.constexpr, CONSTANTS: tl.constexpr, TRANSPOSED: tl.constexpr, FAST: tl.constexpr
) -> tl.tensor:
    PACKING: tl.constexpr = CONSTANTS.packing
    NUMBER: tl.constexpr = CONSTANTS.number
    FIELDS_PER_TILE: tl.constexpr = CONSTANTS.fields_per_tile
    FIELD_STRIDE: tl.constexpr = CONSTANTS.field_stride
    planes = expand_planes(loaded, column_fields, NUMBER, PACKING, TRANSPOSED, FAST)
    if FIELDS_PER_TILE == 1:
        word = planes[STEP // 16]
    else:
        word = step_words(
            planes, column_fields, NUMBER, PACKING, 0, 1, STEP, FIELDS_PER_TILE, FIELD_STRIDE, PACKING.fields, TRANSPOSED, FAST
        )
    return word


@triton.jit
def decode_signs(loaded: tl.tuple, column_fields: tl.tuple, STEP: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """Return, for values, one binary16 tile ``[warp, column, token]``: -1 if a bit of the fields of ``STEP`` is 1, and 1 if it is 0."""
    BIT: tl.constexpr = _position(STEP, CONSTANTS.fields_per_tile, CONSTANTS.field_stride)
    word = _words(loaded, column_fields, STEP, CONSTANTS, True, FAST)
    if FAST:
        value = tl.inline_asm_elementwise(_one(BIT), "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2)
    else:
        value = tl.where((word >> BIT) & 1 == 1, -1.0, 1.0).to(tl.float16)
    return (value,)


@triton.jit
def decode_bits(loaded: tl.tuple, column_fields: tl.tuple, STEP: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """Return, for keys, one binary16 tile ``[warp, token, column]``: a power of two where a bit of the fields of ``STEP`` is 1, else 0."""
    BIT: tl.constexpr = _position(STEP, CONSTANTS.fields_per_tile, CONSTANTS.field_stride)
    word = _words(loaded, column_fields, STEP, CONSTANTS, False, FAST)
    if FAST:
        value = tl.inline_asm_elementwise(_isolate_bit(BIT), "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2)
    else:
        value = tl.where((word >> BIT) & 1 == 1, _power(BIT), 0.0).to(tl.float16)
    return (value,)


@triton.jit
def queries_of_bits(q: tl.tuple, CONSTANTS: tl.constexpr, SETS: tl.constexpr) -> tl.tuple:
    """Return a query's tiles, ``[warp, column, row]``, with those of signs, the last in each of ``SETS`` sets, scaled for ``decode_bits``.
    """
    tiles = ()
    EACH: tl.constexpr = len(q) // SETS
    FIRST: tl.constexpr = EACH - CONSTANTS.steps
    for number in tl.static_range(len(q)):
        tile = q[number]
        if number % EACH >= FIRST:
            tile = _scaled(tile, number % EACH - FIRST, CONSTANTS)
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def _scaled(tile: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr) -> tl.tensor:
    POWER: tl.constexpr = _power(_position(STEP, CONSTANTS.fields_per_tile, CONSTANTS.field_stride))
    return (tile.to(tl.float32) * (-QUERY / POWER)).to(tl.float16)


@triton.jit
def half_sum(q: tl.tuple, CONSTANTS: tl.constexpr, SETS: tl.constexpr) -> tl.tensor:
    """Return half the sum of the sign columns, times ``QUERY``, given the output of ``queries_of_bits``: ``[warp, 1, row]``."""
    EACH: tl.constexpr = len(q) // SETS
    # One sum over columns for all tiles together, because the threads wait for each other in every such sum.
    columns = _half_of_tile(q[EACH - CONSTANTS.steps], 0, CONSTANTS)
    for number in tl.static_range(EACH - CONSTANTS.steps + 1, len(q)):
        if number % EACH >= EACH - CONSTANTS.steps:
            columns += _half_of_tile(q[number], number % EACH - (EACH - CONSTANTS.steps), CONSTANTS)
    return tl.sum(columns, 1)[:, None, :]


@triton.jit
def _half_of_tile(tile: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr) -> tl.tensor:
    POWER: tl.constexpr = _power(_position(STEP, CONSTANTS.fields_per_tile, CONSTANTS.field_stride))
    return tile.to(tl.float32) * (-0.5 * POWER)


@triton.jit
def factor_of_bits(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return ``factor_of_signs`` for half the signs' products times ``QUERY``."""
    return read_factor(loaded, CONSTANTS.norm_stream, CONSTANTS.norm_bits, FAST) * (CONSTANTS.unit * (2 / QUERY))


@triton.jit
def factor_of_signs(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the norm times sqrt(pi / (2 dim)) (OCTOPUS Sec. 3.6)."""
    return read_factor(loaded, CONSTANTS.norm_stream, CONSTANTS.norm_bits, FAST) * CONSTANTS.unit
