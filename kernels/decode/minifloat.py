"""Decoder of the minifloat codec for ``kernel`` (spec/codecs/minifloat.md)."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.minifloat import Minifloat
from kvpack.kernels.bitpack.minifloats import E2M1_EXPONENT, e4m3_as_f16, elements_as_f16

from .digits import CodeStream, code_streams, load_digit
from .kernel import TileDecoder, prepare_rows
from .rows import EnginePages, PackedPart, PreparedDecode, as_float32, load_per_token


class MinifloatConstants(NamedTuple):
    """Compile-time constants of a minifloat codec. The format of elements is ``element``; ``code`` is the stream of codes.

    ``scale`` and ``global_scale`` are stream indices; -1 means that there is no such stream. A scale covers ``size`` channels. If ``size``
    is 0, it covers a token (``per_token``) or all tokens.
    """

    code: CodeStream
    element: str
    scale: int
    global_scale: int
    size: int
    per_token: bool


def prepare(
    codec: Minifloat, packed: Sequence[PackedPart], out: torch.Tensor, rotated: bool, pages: EnginePages | None = None
) -> PreparedDecode | None:
    """Prepare the launch that decodes the minifloat codec, as ``decode.prepare`` does. The codec has no rotation.

    Float32 values equal those of ``Minifloat.decode_frame`` bit for bit.
    """
    names = list(codec.row_layouts)
    in_blocks = codec.granularity == "block"
    constants = MinifloatConstants(
        code_streams(codec)[0], codec.element, names.index("block_scales" if in_blocks else "scale"),
        len(names) - 1 if codec.run_scale == "global_scale" else -1, codec.block_size if in_blocks else 0, codec.granularity == "token",
    )  # fmt: skip
    return prepare_rows(codec, packed, out, False, pages, TileDecoder(_decode_minifloat, constants))


@triton.jit
def _exp2(exponent: tl.tensor) -> tl.tensor:
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _decode_minifloat(tile: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tensor:
    """Decode a ``RowTile`` of the minifloat codec to float32 ``[token, channel]``."""
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
            # The element times its block scale is exact: it has at most six significant bits.
            value = value * e4m3_as_f16(scales).to(tl.float32) * as_float32(tl.load(tile.streams[CONSTANTS.global_scale]))
        else:
            # Multiply by two normal powers of two, because the smallest scale is subnormal and might be flushed to zero.
            half_exponent = scales >> 1
            value = value * _exp2(half_exponent - 63) * _exp2(scales - half_exponent - 64)
    return value
