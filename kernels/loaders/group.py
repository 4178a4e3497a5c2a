"""Tile loader of the group codec (spec/codecs/group.md), with one affine step per bit field.

In this file, a *scale* is a 32-bit element of the stream of scales: the float16 scale and center of one group.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
from triton import language as tl

from kvpack.formats.columns import is_power_of_two
from kvpack.formats.group import TOKEN_SCALE_DTYPES, Group
from kvpack.formats.streams import DTYPE_BYTES
from kvpack.kernels.bitpack.bitfields import expand_planes, load_per_token, load_planes, step_position, step_words
from kvpack.kernels.bitpack.f16_tiles import affine, affine_column, middle_code, split_scales
from kvpack.kernels.bitpack.streams import Stream, plane_streams
from kvpack.kernels.bitpack.tile_layout import (
    broadcast_columns,
    broadcast_tokens,
    column_tokens,
    repeat_columns,
    second_token_offset,
    split_last_axis,
    valid_columns,
)
from kvpack.kernels.bitpack.tile_packing import TilePacking, has_whole_word_tiles, tile_field_count, tile_packing
from kvpack.kernels.bitpack.token_factors import load_factors, read_factors

from .tiles import Tiles, step_symbols, tile_field_stride

MIN_TOKENS, MAX_TOKENS = 16, 64
"""Minimum and maximum number of tokens in a warp's tile. Tokens with at least ``MIN_MANY_SCALES`` scales need small tiles."""

MIN_MANY_SCALES = 32
"""Number of scales per token at which tiles get the minimum number of tokens."""

MAX_SCALES_PER_LOAD = 8
"""Maximum number of scales of one token per load, unless a step needs more."""

ALONG_TOKENS, ALONG_CHANNELS, WITHIN_FIELDS, PER_VALUE = (tl.constexpr(number) for number in range(4))
"""Kinds of scales in a tile: one per column, one per token, one per group of neighboring columns of a token, or one per value."""


class GroupConstants(NamedTuple):
    """Compile-time constants of a group codec and its tiles.

    A row of the scale stream has ``scales_per_row`` scales. ``kind`` is the kind of scales that a tile needs, and ``whole_rows`` is True if
    rows are loaded whole. A step produces one tile of ``span`` columns, which yields ``fields_per_tile`` fields of ``bits`` bits. Fields
    that are neighbors in the tile are ``field_stride`` fields apart in a row.
    """

    packing: TilePacking
    bits: int
    fields_per_tile: int
    dim: int
    size: int
    kind: int
    along_tokens: bool
    scales_per_row: int
    span: int
    scale_bits: int
    steps: int
    planes: int
    field_stride: int
    whole_rows: bool
    in_one_group: bool = False
    """True if each warp's tile is always within one token group; set by ``bind``."""


def tiles(codec: Group, dual: int = 0) -> Tiles | None:
    """Return the tile loader of ``codec``, or None if a code is not a bit field in at most two words. For ``dual``, see ``Tiles``."""
    packing = codec.packings()["codes"]
    if not has_whole_word_tiles(packing):
        return None
    planes = plane_streams("codes", packing)
    along_tokens = codec.axis == "token"
    scales_per_row = codec.dim if along_tokens else -(-codec.dim // codec.size)
    # Neighboring fields may share a scale.
    field_stride = tile_field_stride(packing, codec.bits, packing.fields, dual) if along_tokens or scales_per_row == 1 else 1
    symbols = step_symbols(packing, field_stride, dual=dual)
    span = packing.width * tile_field_count(packing, dual)
    one_a_token = not along_tokens and (codec.size % span == 0 or scales_per_row == 1)
    if along_tokens:
        kind = ALONG_TOKENS.value
    elif one_a_token:
        kind = ALONG_CHANNELS.value
    else:
        kind = WITHIN_FIELDS.value if span % codec.size == 0 else PER_VALUE.value
    # Load whole rows if their number of scales allows it, because small loads cost as much as large ones.
    in_order = kind == ALONG_CHANNELS.value or (kind != PER_VALUE.value and field_stride == 1 and len(symbols) * span == codec.dim)
    whole_rows = not dual and in_order and is_power_of_two(scales_per_row)
    streams = (*planes, Stream("scales", 32, scales_per_row, codec.size if along_tokens else 1))
    scale_bits = 0 if codec.token_scale == "none" else 8 * DTYPE_BYTES[TOKEN_SCALE_DTYPES[codec.token_scale]]
    if scale_bits:
        streams = (*streams, Stream("token_scale", scale_bits, 1))
    max_tokens = MAX_TOKENS
    if kind == WITHIN_FIELDS.value and scales_per_row >= MIN_MANY_SCALES:
        max_tokens = MIN_TOKENS
    elif kind > ALONG_CHANNELS.value or (along_tokens and codec.size % MAX_TOKENS):
        max_tokens = Tiles.max_tokens_per_tile
    constants = GroupConstants(
        packing=tile_packing(0, packing, dual),
        bits=codec.bits,
        fields_per_tile=tile_field_count(packing, dual),
        dim=codec.dim,
        size=codec.size,
        kind=kind,
        along_tokens=along_tokens,
        scales_per_row=scales_per_row,
        span=span,
        scale_bits=scale_bits,
        steps=len(symbols),
        planes=len(planes),
        field_stride=field_stride,
        whole_rows=whole_rows,
    )
    return Tiles(
        load,
        decode,
        factor if scale_bits else None,
        constants,
        len(symbols),
        symbols,
        streams,
        whole_groups=codec.size if along_tokens else 1,
        max_tokens_per_tile=max_tokens,
        packings=(packing,),
        dual=dual,
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
    """Load the rows of ``token`` ``[warp, token]``. Rows are counted from row ``first``.

    - One int16 tile per plane, ``[warp, token, column]`` or transposed ``[warp, column, token]``.
    - One int32 tile of scales per step. Along tokens, it is ``[warp, column]`` if all tokens of a warp are in one token group. Along
      channels, it is ``[warp, token]``, or ``[warp, token, scale]`` within fields. If each value has its own scale, it is like a plane.
    - The token scale (``token_factors``), if any.
    """
    PACKING: tl.constexpr = CONSTANTS.packing
    DIM: tl.constexpr = CONSTANTS.dim
    SIZE: tl.constexpr = CONSTANTS.size
    KIND: tl.constexpr = CONSTANTS.kind
    SCALES: tl.constexpr = CONSTANTS.scales_per_row
    SPAN: tl.constexpr = CONSTANTS.span
    STEPS: tl.constexpr = CONSTANTS.steps
    PLANES: tl.constexpr = CONSTANTS.planes
    PAD: tl.constexpr = PACKING.tile_width
    DUAL: tl.constexpr = PACKING.dual
    SECOND_OFFSET: tl.constexpr = second_token_offset(DUAL, token.shape[1])
    scales = pointers[PLANES]
    loaded = load_planes(pointers, first, token, valid, PACKING, MASKED, MODE.transposed)
    # The first of the columns that share a scale and center.
    SHARING: tl.constexpr = SIZE if KIND == WITHIN_FIELDS else 1
    column = tl.arange(0, PAD // SHARING) * SHARING
    second = column[None, :] // (PAD // 2)
    if DUAL:
        column = column % PACKING.width
    IN_ONE_GROUP: tl.constexpr = CONSTANTS.in_one_group
    WHOLE_ROWS: tl.constexpr = CONSTANTS.whole_rows and (KIND > ALONG_TOKENS or IN_ONE_GROUP)
    if WHOLE_ROWS:
        loaded = loaded + _load_scale_rows(scales, first, token, valid, CONSTANTS, MASKED, MODE.transposed)
    for step in tl.static_range(0 if WHOLE_ROWS else STEPS):
        channel = _step_channel(step, column, SPAN, PACKING.width, CONSTANTS.field_stride)
        if KIND == ALONG_TOKENS and IN_ONE_GROUP:
            # All tokens of a warp share the scales of its first token.
            row = tl.min(token, 1)[:, None]
            if DUAL:
                row = row + second * SECOND_OFFSET
            row = (first + row) // SIZE
            mask = (channel < DIM)[None, :]
            if MASKED:
                if DUAL:
                    mask = mask & tl.where(second == 0, _warps_with_tokens(valid[0]), _warps_with_tokens(valid[1]))
                else:
                    mask = mask & _warps_with_tokens(valid)
            loaded = loaded + (tl.load(scales + row * SCALES + channel[None, :], mask, 0),)
        elif KIND == ALONG_CHANNELS and DUAL:
            both = tl.arange(0, 2)[None, :]
            address = scales + first * SCALES + (column_tokens(token, both, SECOND_OFFSET, MODE.transposed) * SCALES + step * SPAN // SIZE)
            if MASKED:
                loaded = loaded + (tl.load(address, valid_columns(valid, both, SECOND_OFFSET, MODE.transposed), 0),)
            else:
                loaded = loaded + (tl.load(address),)
        elif KIND == ALONG_CHANNELS:
            loaded = loaded + (load_per_token(scales, first, token, valid, SCALES, step * SPAN // SIZE, MASKED),)
        else:
            row = first + column_tokens(token, second, SECOND_OFFSET, MODE.transposed)
            at = broadcast_columns(channel[None, :], MODE.transposed)
            if KIND == ALONG_TOKENS:
                row = row // SIZE
            else:
                at = at // SIZE
            mask = broadcast_columns((channel < DIM)[None, :], MODE.transposed)
            if MASKED:
                mask = mask & valid_columns(valid, second, SECOND_OFFSET, MODE.transposed)
            loaded = loaded + (tl.load(scales + row * SCALES + at, mask, 0),)
    if CONSTANTS.scale_bits:
        loaded = loaded + load_factors(pointers[PLANES + 1], first, token, valid, CONSTANTS.scale_bits, DUAL, MASKED, MODE.fast)
    return loaded


@triton.constexpr_function
def _scales_per_load(scales: int, scales_per_step: int) -> int:
    """Return the number of scales that one load reads. It is small enough to limit the shared-memory bank conflicts of eight tokens."""
    return min(scales, max(scales_per_step, MAX_SCALES_PER_LOAD))


@triton.jit
def _load_scale_rows(
    scales: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    CONSTANTS: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> tl.tuple:
    """Load whole rows of scales, and return the scales of each step.

    Scales are ``[warp, column]`` if all tokens of a warp share a row. Otherwise, they are ``[warp, token]`` or ``[warp, token, scale]``,
    possibly transposed to ``[warp, scale, token]``.
    """
    SIZE: tl.constexpr = CONSTANTS.size
    SCALES: tl.constexpr = CONSTANTS.scales_per_row
    STEPS: tl.constexpr = CONSTANTS.steps
    result = ()
    if CONSTANTS.along_tokens:
        # All tokens of a warp share the scales of its first token.
        address = scales + ((first + tl.min(token, 1)[:, None]) // SIZE * SCALES + tl.arange(0, SCALES)[None, :])
        if MASKED:
            row = tl.load(address, _warps_with_tokens(valid), 0)
        else:
            row = tl.load(address)
        result = split_last_axis(tl.trans(tl.reshape(row, (row.shape[0], STEPS, SCALES // STEPS)), 0, 2, 1))
    else:
        # Scales per step, each shared by several columns.
        SCALES_PER_STEP: tl.constexpr = SCALES // STEPS if CONSTANTS.kind == WITHIN_FIELDS else 1
        COUNT: tl.constexpr = _scales_per_load(SCALES, SCALES_PER_STEP)
        parts = ()
        for number in tl.static_range(SCALES // COUNT):
            address = scales + first * SCALES + (token[:, :, None] * SCALES + (number * COUNT + tl.arange(0, COUNT))[None, None, :])
            if MASKED:
                row = tl.load(address, valid[:, :, None], 0)
            else:
                row = tl.load(address)
            if CONSTANTS.kind == WITHIN_FIELDS:
                row = tl.reshape(row, (row.shape[0], row.shape[1], COUNT // SCALES_PER_STEP, SCALES_PER_STEP))
                if TRANSPOSED:
                    row = tl.trans(row, 0, 3, 1, 2)
                else:
                    row = tl.trans(row, 0, 1, 3, 2)
            parts = parts + split_last_axis(row)
        for step in tl.static_range(STEPS):
            result = result + (parts[step if CONSTANTS.kind == WITHIN_FIELDS else step * CONSTANTS.span // SIZE],)
    return result


@triton.jit
def _warps_with_tokens(valid: tl.tensor) -> tl.tensor:
    return (tl.max(valid.to(tl.int32), 1) > 0)[:, None]


@triton.jit
def _step_channel(step: tl.constexpr, column: tl.tensor, SPAN: tl.constexpr, WIDTH: tl.constexpr, FIELD_STRIDE: tl.constexpr) -> tl.tensor:
    """Return the channel that each column contains in a step (see ``tiles.step_symbols``)."""
    if FIELD_STRIDE > 1:
        channel = (step + column // WIDTH * FIELD_STRIDE) * WIDTH + column % WIDTH
    else:
        channel = step * SPAN + column
    return channel


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the values (code - middle) * scale + center of step ``STEP`` as one float16 tile, possibly transposed."""
    PACKING: tl.constexpr = CONSTANTS.packing
    BITS: tl.constexpr = CONSTANTS.bits
    FIELDS_PER_TILE: tl.constexpr = CONSTANTS.fields_per_tile
    KIND: tl.constexpr = CONSTANTS.kind
    PLANES: tl.constexpr = CONSTANTS.planes
    planes = expand_planes(loaded, column_fields, 0, PACKING, MODE)
    scale_center = loaded[PLANES + STEP]
    scale, center = split_scales(scale_center, MODE.fast)
    if KIND == WITHIN_FIELDS or (KIND == ALONG_CHANNELS and PACKING.dual):
        COPIES: tl.constexpr = CONSTANTS.size if KIND == WITHIN_FIELDS else PACKING.width
        scale = repeat_columns(scale, COPIES, MODE.transposed)
        center = repeat_columns(center, COPIES, MODE.transposed)
    elif KIND == ALONG_CHANNELS:
        scale = broadcast_tokens(scale, MODE.transposed)
        center = broadcast_tokens(center, MODE.transposed)
    elif len(scale_center.shape) == 2:
        scale = broadcast_columns(scale, MODE.transposed)
        center = broadcast_columns(center, MODE.transposed)
    if FIELDS_PER_TILE == 1:
        value = affine_column(planes, scale, center, STEP * BITS, BITS, middle_code(BITS), MODE.fast)
    else:
        STRIDE: tl.constexpr = CONSTANTS.field_stride
        words = step_words(planes, column_fields, 0, PACKING, 0, BITS, STEP, FIELDS_PER_TILE, STRIDE, PACKING.fields, MODE)
        value = affine(words, scale, center, step_position(STEP, BITS, STRIDE), BITS, middle_code(BITS), MODE.fast)
    return (value,)


@triton.jit
def factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the token scales, float32 ``[warp, token]``."""
    PACKING: tl.constexpr = CONSTANTS.packing
    return read_factors(loaded, CONSTANTS.planes + CONSTANTS.steps, CONSTANTS.scale_bits, PACKING.dual, FAST)
