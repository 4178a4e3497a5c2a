"""qjl as tiles (spec/side-cars.md): the signs of a second rotation, 1 or -1, beside the tiles of a codec and with a factor of their own.

Their columns are channels of that rotation: a query has columns for them too, and values have sums of their own.

Of keys no sign is made: a bit of a word is itself a binary16 power of two or a zero, by which the query's column is divided, and
half the sum of those columns less the bits' products is half the product of the signs.
"""

# Triton compiles no unpacking.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from kvpack.formats.qjl import NORM, SIGNS
from kvpack.kernels.words.fields import load_planes, whole_planes, words_of_step
from kvpack.kernels.words.halves import load_factor, read_factor

from .tiles import (
    Stream,
    TilePacking,
    Tiles,
    distance,
    fields_side_by_side,
    plane_streams,
    step_symbols,
    takes_whole_words,
    tile_packing,
    tile_width,
)

if TYPE_CHECKING:
    from kvpack.formats.qjl import Qjl


QUERY = tl.constexpr(0.25)
"""What a query's columns, of at most 1, are multiplied by: none leaves binary16 when it is divided by a bit's power."""


class Constants(NamedTuple):
    """What the functions below know of the signs beside a codec's tiles.

    ``first_stream`` is the number of their first stream, and ``number`` that of their packing; ``unit`` is the estimator's factor.
    """

    packing: TilePacking
    first_stream: int
    number: int
    beside: int
    apart: int
    steps: int
    norm_stream: int
    norm_bits: int
    unit: float


def with_signs(tiles: Tiles, qjl: Qjl) -> Tiles | None:
    """The loader ``tiles`` of a codec with the signs of ``qjl``, whose channel i is channel dim + i; None where their packing has none."""
    packing = qjl.packing
    if not takes_whole_words(packing):
        return None
    planes = plane_streams(SIGNS, packing)
    apart = distance(packing, 1, packing.fields)
    symbols = step_symbols(packing, apart)
    norm_bits = 16 if qjl.norm == "fp16" else 32
    constants = Constants(
        packing=tile_packing(0, packing),
        first_stream=len(tiles.streams),
        number=len(tiles.place_columns) // 2,
        beside=fields_side_by_side(packing),
        apart=apart,
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
        places=(*tiles.place_columns, packing.width, tile_width(packing)),
        signs=constants,
        loads_ahead=False,
    )


@triton.jit
def load_signs(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    CONSTANTS: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The planes, then the norms."""
    PACKING: tl.constexpr = CONSTANTS.packing
    own = pointers[CONSTANTS.first_stream :]
    planes = load_planes(own, first, token, valid, PACKING, MASKED, TURNED)
    return planes + load_factor(own[CONSTANTS.norm_stream], first, token, valid, CONSTANTS.norm_bits, MASKED, FAST)


@triton.constexpr_function
def _one(position: int) -> str:
    """The bit of each word at ``position`` becomes the sign of a binary16 1."""
    return f"{{ .reg .b32 a; shl.b32 a, $1, {15 - position}; lop3.b32 $0, a, 0x80008000, 0x3C003C00, 0x6A; }}"


@triton.constexpr_function
def _shift(position: int) -> int:
    """How far up the bit at ``position`` is moved: as far as most others, and to neither a sign's nor the least bits."""
    return 7 if position <= 7 else -1 if position == 15 else 0


@triton.constexpr_function
def _power(position: int) -> float:
    """The binary16 that a bit moved by ``_shift`` is."""
    position += _shift(position)
    return 2.0 ** (position - 24) if position < 10 else 2.0 ** ((1 << position - 10) - 15)


@triton.constexpr_function
def _alone(position: int) -> str:
    """The bit of each word at ``position``, moved by ``_shift``, and no other."""
    shift = _shift(position)
    moved = f"shl.b32 a, $1, {shift};" if shift > 0 else f"shr.b32 a, $1, {-shift};" if shift else "mov.b32 a, $1;"
    return f"{{ .reg .b32 a; {moved} and.b32 $0, a, {0x10001 << position + shift}; }}"


@triton.constexpr_function
def _position(step: int, beside: int, apart: int) -> int:
    """The bit of each word that ``_words`` gives for ``step`` that is a column's sign."""
    return step % 16 if beside == 1 else step if apart > 1 else 0


@triton.jit
def _words(
    raw: tl.tuple, places: tl.tuple, STEP: tl.constexpr, CONSTANTS: tl.constexpr, TURNED: tl.constexpr, FAST: tl.constexpr
) -> tl.tensor:
    PACKING: tl.constexpr = CONSTANTS.packing
    NUMBER: tl.constexpr = CONSTANTS.number
    BESIDE: tl.constexpr = CONSTANTS.beside
    APART: tl.constexpr = CONSTANTS.apart
    planes = whole_planes(raw, places, NUMBER, PACKING, TURNED, FAST)
    if BESIDE == 1:
        word = planes[STEP // 16]
    else:
        word = words_of_step(planes, places, NUMBER, PACKING, 0, 1, STEP, BESIDE, APART, PACKING.fields, TURNED, FAST)
    return word


@triton.jit
def decode_signs(raw: tl.tuple, places: tl.tuple, STEP: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """Of values, turned: -1 where a digit of the fields of ``STEP`` is 1, and 1 where it is 0."""
    BIT: tl.constexpr = _position(STEP, CONSTANTS.beside, CONSTANTS.apart)
    word = _words(raw, places, STEP, CONSTANTS, True, FAST)
    if FAST:
        value = tl.inline_asm_elementwise(_one(BIT), "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2)
    else:
        value = tl.where((word >> BIT) & 1 == 1, -1.0, 1.0).to(tl.float16)
    return (value,)


@triton.jit
def decode_bits(raw: tl.tuple, places: tl.tuple, STEP: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """Of keys: a power of two where a digit of the fields of ``STEP`` is 1, and 0 where it is 0."""
    BIT: tl.constexpr = _position(STEP, CONSTANTS.beside, CONSTANTS.apart)
    word = _words(raw, places, STEP, CONSTANTS, False, FAST)
    if FAST:
        value = tl.inline_asm_elementwise(_alone(BIT), "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2)
    else:
        value = tl.where((word >> BIT) & 1 == 1, _power(BIT), 0.0).to(tl.float16)
    return (value,)


@triton.jit
def queries_of_bits(q: tl.tuple, CONSTANTS: tl.constexpr, SETS: tl.constexpr) -> tl.tuple:
    """The tiles of a query, each of ``SETS`` of them ending in those of signs: these for ``decode_bits``."""
    tiles = q
    if CONSTANTS is not None:
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
    POWER: tl.constexpr = _power(_position(STEP, CONSTANTS.beside, CONSTANTS.apart))
    return (tile.to(tl.float32) * (-QUERY / POWER)).to(tl.float16)


@triton.jit
def half_sum(q: tl.tuple, CONSTANTS: tl.constexpr, SETS: tl.constexpr) -> tl.tensor:
    """Half the sum of the columns for signs, times ``QUERY``, of what ``queries_of_bits`` gave: ``[warp, 1, row]``."""
    EACH: tl.constexpr = len(q) // SETS
    # One sum over columns, of all tiles together: each would have the warps wait for each other.
    columns = _half_of_tile(q[EACH - CONSTANTS.steps], 0, CONSTANTS)
    for number in tl.static_range(EACH - CONSTANTS.steps + 1, len(q)):
        if number % EACH >= EACH - CONSTANTS.steps:
            columns += _half_of_tile(q[number], number % EACH - (EACH - CONSTANTS.steps), CONSTANTS)
    return tl.sum(columns, 1)[:, None, :]


@triton.jit
def _half_of_tile(tile: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr) -> tl.tensor:
    POWER: tl.constexpr = _power(_position(STEP, CONSTANTS.beside, CONSTANTS.apart))
    return tile.to(tl.float32) * (-0.5 * POWER)


@triton.jit
def factor_of_bits(raw: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """``factor_of_signs`` for half their products times ``QUERY``."""
    return read_factor(raw, CONSTANTS.norm_stream, CONSTANTS.norm_bits, FAST) * (CONSTANTS.unit * (2 / QUERY))


@triton.jit
def factor_of_signs(raw: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The norm times sqrt(pi / (2 dim)) (OCTOPUS Sec. 3.6)."""
    return read_factor(raw, CONSTANTS.norm_stream, CONSTANTS.norm_bits, FAST) * CONSTANTS.unit
