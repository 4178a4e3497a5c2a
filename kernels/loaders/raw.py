"""Tile loader of the raw codec (spec/codecs/raw.md), whose tiles contain the stored values."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
from typing import NamedTuple

import triton
from triton import language as tl

from kvpack.formats.raw import Raw
from kvpack.kernels.bitpack.streams import Stream
from kvpack.kernels.bitpack.tile_layout import broadcast_columns, broadcast_tokens
from kvpack.kernels.bitpack.tile_packing import MIN_TILE_WIDTH

from .tiles import Tiles

MAX_WIDTH = 32
"""Maximum number of channels per tile."""


class RawConstants(NamedTuple):
    """Compile-time constants of a raw codec: the stored dtype, and ``steps`` tiles of ``width`` channels each."""

    dim: int
    steps: int
    dtype: str
    width: int


def tiles(codec: Raw) -> Tiles:
    """Return the tile loader of ``codec``, which always exists."""
    width = math.gcd(codec.dim, MAX_WIDTH) if codec.dim % MIN_TILE_WIDTH == 0 else MAX_WIDTH
    steps = -(-codec.dim // width)
    channels = tuple(tuple(c if c < codec.dim else -1 for c in range(step * width, (step + 1) * width)) for step in range(steps))
    stream = Stream("values", 32 if codec.dtype == "fp32" else 16, codec.dim)
    return Tiles(load, decode, None, RawConstants(codec.dim, steps, codec.dtype, width), steps, channels, (stream,), dtype=codec.dtype)


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
    """Load the stored bits: one int16 or int32 tile per step, ``[warp, token, channel]`` or transposed ``[warp, channel, token]``."""
    bits = ()
    STEPS: tl.constexpr = CONSTANTS.steps
    WIDTH: tl.constexpr = CONSTANTS.width
    for step in tl.static_range(STEPS):
        bits = bits + (_load_columns(pointers[0], first, token, valid, step * WIDTH, WIDTH, CONSTANTS.dim, MASKED, MODE.transposed),)
    return bits


@triton.jit
def _load_columns(
    pointer: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    BEGIN: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> tl.tensor:
    within = broadcast_columns(tl.arange(0, WIDTH)[None, :], TRANSPOSED)
    column = within + BEGIN
    # Each step adds the same offset to its own pointer, so the compiler computes the offset once.
    address = pointer + (first * DIM + BEGIN) + (broadcast_tokens(token, TRANSPOSED) * DIM + within)
    if MASKED:
        bits = tl.load(address, broadcast_tokens(valid, TRANSPOSED) & (column < DIM), 0)
    elif BEGIN + WIDTH > DIM:
        bits = tl.load(address, column < DIM, 0)
    else:
        bits = tl.load(address)
    return bits


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the values of step ``STEP`` as one tile in the stored dtype. Without inline PTX, bf16 is converted to float32."""
    bits = loaded[STEP]
    if CONSTANTS.dtype == "bf16":
        if MODE.fast:
            # A cast would unpack the two values of each register.
            value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [bits], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            value = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif CONSTANTS.dtype == "fp16":
        value = bits.to(tl.float16, bitcast=True)
    else:
        value = bits.to(tl.float32, bitcast=True)
    return (value,)
