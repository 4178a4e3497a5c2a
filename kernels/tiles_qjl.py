"""qjl as tiles (spec/side-cars.md): the signs of a second rotation, 1 or -1, beside the tiles of a codec and with a factor of their own.

Their columns are channels of that rotation: a query has columns for them too, and values have sums of their own.
"""

# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import triton
from triton import language as tl

from kvpack.formats.qjl import NORM, SIGNS

from .fields import load_planes, position_of_step, whole_planes, words_of_step
from .halves import load_factor, read_factor
from .tiles import (
    Stream,
    Tiles,
    distance,
    fields_side_by_side,
    packing_constants,
    plane_streams,
    step_symbols,
    takes_whole_words,
    tile_width,
)

if TYPE_CHECKING:
    from kvpack.formats.qjl import Qjl


def with_signs(tiles: Tiles, qjl: Qjl) -> Tiles | None:
    """The loader ``tiles`` of a codec with the signs of ``qjl``, whose channel i is channel dim + i; None where their packing has none."""
    packing = qjl.packing
    if not takes_whole_words(packing):
        return None
    planes = plane_streams(SIGNS, packing)
    apart = distance(packing, 1, packing.fields)
    symbols = step_symbols(packing, apart)
    norm_bits = 16 if qjl.norm == "fp16" else 32
    constants = (
        packing_constants(0, packing), len(tiles.streams), len(tiles.place_columns) // 2, fields_side_by_side(packing), apart, len(symbols),
        len(planes), norm_bits, math.sqrt(math.pi / (2 * qjl.dim)),
    )  # fmt: skip
    return replace(
        tiles,
        channels=(*tiles.channels, *(tuple(qjl.dim + symbol if symbol >= 0 else -1 for symbol in step) for step in symbols)),
        streams=(*tiles.streams, *planes, Stream(NORM, norm_bits, 1)),
        packings=(*tiles.packings, packing),
        places=(*tiles.place_columns, packing.width, tile_width(packing)),
        signs=constants,
    )


@triton.jit
def load_signs(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    C: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The planes, then the norms."""
    PACKING: tl.constexpr = C[0]
    own = pointers[C[1] :]
    planes = load_planes(own, first, token, valid, PACKING, MASKED, TURNED)
    return planes + load_factor(own[C[6]], first, token, valid, C[7], MASKED, FAST)


@triton.constexpr_function
def _one(position: int) -> str:
    """The bit of each word at ``position`` becomes the sign of a binary16 1."""
    return f"{{ .reg .b32 a; shl.b32 a, $1, {15 - position}; lop3.b32 $0, a, 0x80008000, 0x3C003C00, 0x6A; }}"


@triton.jit
def decode_signs(
    raw: tl.tuple, places: tl.tuple, STEP: tl.constexpr, C: tl.constexpr, TURNED: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """-1 where a digit of the fields of ``STEP`` is 1, and 1 where it is 0."""
    PACKING: tl.constexpr = C[0]
    NUMBER: tl.constexpr = C[2]
    BESIDE: tl.constexpr = C[3]
    APART: tl.constexpr = C[4]
    BIT: tl.constexpr = STEP % 16 if BESIDE == 1 else position_of_step(STEP, 1, APART)
    planes = whole_planes(raw, places, NUMBER, PACKING, TURNED, FAST)
    if BESIDE == 1:
        word = planes[STEP // 16]
    else:
        word = words_of_step(planes, places, NUMBER, PACKING, 0, 1, STEP, BESIDE, APART, PACKING[4], TURNED, FAST)
    if FAST:
        value = tl.inline_asm_elementwise(_one(BIT), "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2)
    else:
        value = tl.where((word >> BIT) & 1 == 1, -1.0, 1.0).to(tl.float16)
    return (value,)


@triton.jit
def factor_of_signs(raw: tl.tuple, C: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The norm times sqrt(pi / (2 dim)) (OCTOPUS Sec. 3.6)."""
    return read_factor(raw, C[6], C[7], FAST) * C[8]
