"""Decode packed rows of minifloat to values in one pass (spec/codecs/minifloat.md); ``formats/minifloat.py`` is the oracle."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.kernels.bitpack.minifloats import E2M1_EXPONENT, e4m3_as_f16, elements_as_f16

from .digits import CodeStream, code_streams, load_digit
from .kernel import Decoder, prepare_rows
from .rows import as_float32, load_per_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.minifloat import Minifloat

    from .rows import Packed, Pages, Prepared


class MinifloatConstants(NamedTuple):
    """The packing of codes, their ``element``, and the stream numbers of the scales and of the run scale, -1 for none.

    ``size`` is the number of channels of a block, or 0 if scales belong to a token (``per_token``) or a run.
    """

    code: CodeStream
    element: str
    scale: int
    global_scale: int
    size: int
    per_token: bool


def prepare(codec: Minifloat, packed: Sequence[Packed], out: torch.Tensor, rotated: bool, pages: Pages | None = None) -> Prepared | None:
    """Run ``prepare_rows`` for minifloat, whose values are not rotated.

    In float32 the values equal those of ``Minifloat.decode_frame``, bit for bit.
    """
    names = list(codec.row_layouts)
    in_blocks = codec.granularity == "block"
    constants = MinifloatConstants(
        code_streams(codec)[0], codec.element, names.index("block_scales" if in_blocks else "scale"),
        len(names) - 1 if codec.run_scale == "global_scale" else -1, codec.block if in_blocks else 0, codec.granularity == "token",
    )  # fmt: skip
    return prepare_rows(codec, packed, out, False, pages, Decoder(_values, constants))


@triton.jit
def _power(exponent: tl.tensor) -> tl.tensor:
    """Return 2 to the power of ``exponent``, int32 from -126 to 127, as float32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _values(tile: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tensor:
    """Return elements times their scales."""
    CODE: tl.constexpr = CONSTANTS.code
    ELEMENT: tl.constexpr = CONSTANTS.element
    SIZE: tl.constexpr = CONSTANTS.size
    DIM: tl.constexpr = SHAPE.dim
    TOKENS: tl.constexpr = SHAPE.tokens
    mask = (tile.token < tile.count) & (tile.channel < DIM)
    code = load_digit(tile.streams, tile.token, tile.channel, mask, CODE, 0)
    value = elements_as_f16(code, 0, ELEMENT, False).to(tl.float32)
    if ELEMENT == "e2m1":
        value = value * 2.0**E2M1_EXPONENT
    if SIZE == 0 and CONSTANTS.per_token:
        value = value * load_per_token(tile.streams[CONSTANTS.scale], tile.count, TOKENS, 1, 0)
    elif SIZE == 0:
        value = value * as_float32(tl.load(tile.streams[CONSTANTS.scale]))
    else:
        BLOCKS: tl.constexpr = (DIM + SIZE - 1) // SIZE
        scales = tl.load(tile.streams[CONSTANTS.scale] + (tile.token * BLOCKS + tile.channel // SIZE), mask, 0).to(tl.int32) & 0xFF
        if CONSTANTS.global_scale >= 0:
            # The product of both has at most six significant bits.
            value = value * e4m3_as_f16(scales).to(tl.float32) * as_float32(tl.load(tile.streams[CONSTANTS.global_scale]))
        else:
            # Two normal numbers: the smallest of their products is subnormal, and would be none as a factor.
            half = scales >> 1
            value = value * _power(half - 63) * _power(scales - half - 64)
    return value
