"""Tile loader of the minifloat codec (spec/codecs/minifloat.md).

Elements are converted to float16 exactly and multiplied by the scales of their blocks. The token factor is the token's scale or, for e8m0
blocks, the token's largest power of two. If all tokens share a factor, queries and sums are multiplied by it instead.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.minifloat import ELEMENTS, Minifloat
from kvpack.kernels.bitpack.bitfields import expand_planes, load_per_token, load_planes, step_position, step_words
from kvpack.kernels.bitpack.f16_tiles import multiply
from kvpack.kernels.bitpack.minifloats import (
    E2M1_EXPONENT,
    e4m3_as_f16,
    elements_as_f16,
    four_e4m3_as_f16,
    four_powers_as_f16,
    power_as_f16,
    power_as_f32,
)
from kvpack.kernels.bitpack.streams import RUN_TOKENS, Stream, plane_streams
from kvpack.kernels.bitpack.tile_layout import broadcast_columns, broadcast_tokens, repeat_columns, split_last_axis
from kvpack.kernels.bitpack.tile_packing import TilePacking, has_whole_word_tiles, tile_field_count, tile_packing
from kvpack.kernels.bitpack.token_factors import finite_factor, load_factors, read_factors

from .tiles import Tiles, step_symbols

PER_RUN, PER_TOKEN, PER_BLOCK, PER_STEP = (tl.constexpr(number) for number in range(4))
"""Kinds of scales: for all tokens, per token, per block, or per step (for blocks of keys that consist of the columns of a step).

With ``PER_STEP``, scales multiply the products of queries and keys.
"""

MIN_HALF_EXPONENT = -24
"""Exponent of the smallest positive float16 number, a power of two."""


class MinifloatConstants(NamedTuple):
    """Compile-time constants of a minifloat codec and its tiles.

    A token has ``blocks`` blocks of ``size`` channels with 8-bit scales. The scales are loaded as ``words`` words of four, or one by one if
    ``words`` is 0. If ``in_order``, a tile is one field of all columns, and it covers ``parts`` whole blocks or a part of one block.
    Otherwise, each value loads its own scale. If ``global_scale``, block scales are e4m3, and all tokens share an additional scale;
    otherwise, block scales are e8m0. ``scale_bits`` is the width of a token's scale.
    """

    packing: TilePacking
    element: str
    bits: int
    fields_per_tile: int
    dim: int
    kind: int
    scale_bits: int
    size: int
    blocks: int
    words: int
    in_order: bool
    parts: int
    global_scale: bool
    steps: int
    planes: int


def tiles(codec: Minifloat) -> Tiles | None:
    """Return the tile loader of ``codec``, or None if a field spans more than one word."""
    packing = codec.packings()["codes"]
    if not has_whole_word_tiles(packing):
        return None
    planes = plane_streams("codes", packing)
    symbols = step_symbols(packing)
    in_blocks = codec.granularity == "block"
    size, blocks = (codec.block_size, codec.blocks_per_token) if in_blocks else (0, 0)
    words = blocks // 4 if blocks % 4 == 0 else 0
    fields_per_tile = tile_field_count(packing)
    whole = fields_per_tile == 1 and packing.width == len(symbols[0]) and len(symbols) * packing.width == codec.dim
    in_order = bool(size) and whole and packing.column_bytes % 2 == 0 and (packing.width % size == 0 or size % packing.width == 0)
    parts = max(1, packing.width // size) if in_order else 1
    streams: tuple[Stream, ...] = planes
    if in_blocks:
        streams = (*streams, Stream("block_scales", 32, words) if words else Stream("block_scales", 8, blocks))
    if codec.run_scale is not None:
        streams = (*streams, Stream(codec.run_scale, 32, 1, RUN_TOKENS))
    scale_bits = {"fp16": 16, "fp32": 32}.get(codec.scale_dtype, 0)
    if codec.granularity == "token":
        streams = (*streams, Stream("scale", scale_bits, 1))
    kind = PER_BLOCK if in_blocks else PER_TOKEN if codec.granularity == "token" else PER_RUN
    constants = MinifloatConstants(
        packing=tile_packing(0, packing),
        element=codec.element,
        bits=codec.format.bits,
        fields_per_tile=fields_per_tile,
        dim=codec.dim,
        kind=kind.value,
        scale_bits=scale_bits,
        size=size,
        blocks=blocks,
        words=words,
        in_order=in_order,
        parts=parts,
        global_scale=codec.run_scale == "global_scale",
        steps=len(symbols),
        planes=len(planes),
    )
    run_product = None if codec.run_scale is None else scale_by_run
    result = Tiles(load, decode, factor, constants, len(symbols), symbols, streams, packings=(packing,), run_product=run_product)
    if not (in_order and packing.width == size and codec.scale_dtype == "e8m0"):
        return result
    keys = replace(result, constants=constants._replace(kind=PER_STEP.value), step_factor=step_factor, run_product=scale_elements)
    return replace(result, keys=keys)


def is_exact(codec: Minifloat, streams: Mapping[str, torch.Tensor]) -> bool:
    """Return True if float16 tiles can represent all values of ``streams``, divided by each token's largest power of two."""
    if codec.scale_dtype != "e8m0" or not streams["block_scales"].numel():
        return True
    scales = streams["block_scales"].to(torch.int16)
    smallest = ELEMENTS[codec.element].value(1)
    # Powers of two are normal numbers, and their products with elements are at worst subnormal.
    most = min(14 + (E2M1_EXPONENT.value if codec.element == "e2m1" else 0), round(math.log2(smallest)) - MIN_HALF_EXPONENT)
    largest = scales.amax(-1)
    if bool((largest - scales.amin(-1) <= most).all()):
        return True
    # Blocks of zeros have the smallest power of two, but lose no precision.
    blocks, size = codec.blocks_per_token, codec.block_size
    magnitudes = codec.digits(streams)[0] & (1 << codec.format.bits - 1) - 1
    padded = torch.nn.functional.pad(magnitudes, (0, blocks * size - codec.dim))
    filled = padded.reshape(*padded.shape[:-1], blocks, size).amax(-1) > 0
    return bool((largest - scales.masked_fill(~filled, 255).amin(-1) <= most).all())


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
    - The token scale (``token_factors``) or the run scale, float32 ``[warp, 1]``, if any.
    - The block scales, int32 ``[warp, token]``: words of four scales, or single scales. If each value loads its own, one tile per step.
    """
    PACKING: tl.constexpr = CONSTANTS.packing
    PLANES: tl.constexpr = CONSTANTS.planes
    KIND: tl.constexpr = CONSTANTS.kind
    loaded = load_planes(pointers, first, token, valid, PACKING, MASKED, MODE.transposed)
    if KIND == PER_TOKEN:
        loaded = loaded + load_factors(pointers[PLANES], first, token, valid, CONSTANTS.scale_bits, 0, MASKED, MODE.fast)
    elif KIND == PER_RUN:
        loaded = loaded + (_load_run_scale(pointers[PLANES], token),)
    else:
        if CONSTANTS.global_scale:
            loaded = loaded + (_load_run_scale(pointers[PLANES + 1], token),)
        loaded = loaded + _load_block_scales(pointers[PLANES], first, token, valid, CONSTANTS, MASKED)
        if not CONSTANTS.in_order:
            STEPS: tl.constexpr = CONSTANTS.steps
            for step in tl.static_range(STEPS):
                loaded = loaded + (_load_scale_per_value(pointers[PLANES], first, token, valid, CONSTANTS, step, MASKED, MODE.transposed),)
    return loaded


@triton.jit
def _load_run_scale(pointer: tl.tensor, token: tl.tensor) -> tl.tensor:
    return tl.load(pointer + tl.zeros((token.shape[0], 1), tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _load_block_scales(
    scales: tl.tensor, first: tl.tensor, token: tl.tensor, valid: tl.tensor, CONSTANTS: tl.constexpr, MASKED: tl.constexpr
) -> tl.tuple:
    """Load the tokens' block scales, int32 ``[warp, token]`` each: four scales with the first in the lowest byte, or a single scale."""
    WORDS: tl.constexpr = CONSTANTS.words
    BLOCKS: tl.constexpr = CONSTANTS.blocks
    loaded = ()
    if WORDS > 0 and WORDS & (WORDS - 1) == 0:
        # A load instruction costs the same for any number of bytes.
        address = scales + first * WORDS + (token[:, :, None] * WORDS + tl.arange(0, WORDS)[None, None, :])
        if MASKED:
            row = tl.load(address, valid[:, :, None], 0)
        else:
            row = tl.load(address)
        loaded = split_last_axis(row)
    elif WORDS > 0:
        for word in tl.static_range(WORDS):
            loaded = loaded + (load_per_token(scales, first, token, valid, WORDS, word, MASKED),)
    else:
        for block in tl.static_range(BLOCKS):
            byte = load_per_token(scales, first, token, valid, BLOCKS, block, MASKED)
            loaded = loaded + (byte.to(tl.int32) & 0xFF,)
    return loaded


@triton.jit
def _load_scale_per_value(
    scales: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    CONSTANTS: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> tl.tensor:
    """Load the block scale of each value in the tile of step ``STEP``, as int32."""
    PACKING: tl.constexpr = CONSTANTS.packing
    BLOCKS: tl.constexpr = CONSTANTS.blocks
    column = tl.arange(0, PACKING.tile_width)
    channel = ((STEP * CONSTANTS.fields_per_tile + column // PACKING.width) * PACKING.width + column % PACKING.width)[None, :]
    bytes_of = scales.to(tl.pointer_type(tl.int8))
    address = (
        bytes_of
        + first * BLOCKS
        + (broadcast_tokens(token, TRANSPOSED) * BLOCKS + broadcast_columns(channel, TRANSPOSED) // CONSTANTS.size)
    )
    mask = broadcast_columns(channel < CONSTANTS.dim, TRANSPOSED)
    if MASKED:
        mask = mask & broadcast_tokens(valid, TRANSPOSED)
    return tl.load(address, mask, 0).to(tl.int32) & 0xFF


@triton.jit
def _block_scale(loaded: tl.tuple, AT: tl.constexpr, BLOCK: tl.constexpr, CONSTANTS: tl.constexpr) -> tl.tensor:
    """Return the scale of block ``BLOCK``, int32 ``[warp, token]``. The scales begin at index ``AT`` of ``loaded``."""
    if CONSTANTS.words > 0:
        scale = (loaded[AT + BLOCK // 4] >> (8 * (BLOCK % 4))) & 0xFF
    else:
        scale = loaded[AT + BLOCK]
    return scale


@triton.jit
def _largest_scale(loaded: tl.tuple, AT: tl.constexpr, CONSTANTS: tl.constexpr) -> tl.tensor:
    BLOCKS: tl.constexpr = CONSTANTS.blocks
    largest = _block_scale(loaded, AT, 0, CONSTANTS)
    for block in tl.static_range(1, BLOCKS):
        largest = tl.maximum(largest, _block_scale(loaded, AT, block, CONSTANTS))
    return largest


@triton.jit
def _block_factor(loaded: tl.tuple, BLOCK: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the factor for the elements of block ``BLOCK``, float16 ``[warp, token]``.

    For e4m3, it is the block scale. For e8m0, it is the block scale divided by the token's largest block scale. It also includes the factor
    2^E2M1_EXPONENT that e2m1 elements lack.
    """
    AT: tl.constexpr = CONSTANTS.planes + CONSTANTS.global_scale
    ELEMENT: tl.constexpr = CONSTANTS.element
    if CONSTANTS.global_scale and CONSTANTS.words > 0:
        result = four_e4m3_as_f16(loaded[AT + BLOCK // 4], FAST)[BLOCK % 4]
    elif CONSTANTS.global_scale:
        result = e4m3_as_f16(loaded[AT + BLOCK])
    elif CONSTANTS.words == 1:
        result = four_powers_as_f16(loaded[AT], _element_exponent(ELEMENT), FAST)[BLOCK]
    else:
        result = power_as_f16(
            _block_scale(loaded, AT, BLOCK, CONSTANTS) - _largest_scale(loaded, AT, CONSTANTS) + _element_exponent(ELEMENT)
        )
    return result


@triton.jit
def _tile_factors(loaded: tl.tuple, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr) -> tl.tensor:
    """Return the factors (``_block_factor``) for the elements of step ``STEP`` as a float16 tensor that broadcasts to a tile."""
    AT: tl.constexpr = CONSTANTS.planes + CONSTANTS.global_scale
    PACKING: tl.constexpr = CONSTANTS.packing
    ELEMENT: tl.constexpr = CONSTANTS.element
    PARTS: tl.constexpr = CONSTANTS.parts
    BLOCK: tl.constexpr = STEP * PACKING.width // CONSTANTS.size
    if not CONSTANTS.in_order:
        scales = loaded[AT + (CONSTANTS.words if CONSTANTS.words > 0 else CONSTANTS.blocks) + STEP]
        if CONSTANTS.global_scale:
            result = e4m3_as_f16(scales)
        else:
            largest = broadcast_tokens(_largest_scale(loaded, AT, CONSTANTS), MODE.transposed)
            result = power_as_f16(scales - largest + _element_exponent(ELEMENT))
    elif PARTS == 1:
        result = broadcast_tokens(_block_factor(loaded, BLOCK, CONSTANTS, MODE.fast), MODE.transposed)
    else:
        # Rows are loaded whole, and a tile needs the factors of several blocks. Select them along the middle axis for keys too: Triton
        # then keeps them in the registers of the matrix operand, and words need no extra pass through shared memory.
        part = tl.arange(0, PARTS)[None, :, None]
        result = _block_factor(loaded, BLOCK, CONSTANTS, MODE.fast)[:, None, :]
        for number in tl.static_range(1, PARTS):
            result = tl.where(part == number, _block_factor(loaded, BLOCK + number, CONSTANTS, MODE.fast)[:, None, :], result)
        if not MODE.transposed:
            result = tl.trans(result, 0, 2, 1)
        result = repeat_columns(result, CONSTANTS.size, MODE.transposed)
    return result


@triton.constexpr_function
def _element_exponent(element: str) -> int:
    """Return e such that decoded tile elements of this format must be multiplied by 2^e."""
    return E2M1_EXPONENT.value if element == "e2m1" else 0


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the elements of step ``STEP`` times the part of their scales that is not in ``factor``.

    The result is one float16 tile, ``[warp, token, column]`` or transposed.
    """
    PACKING: tl.constexpr = CONSTANTS.packing
    BITS: tl.constexpr = CONSTANTS.bits
    ELEMENT: tl.constexpr = CONSTANTS.element
    FIELDS_PER_TILE: tl.constexpr = CONSTANTS.fields_per_tile
    if FIELDS_PER_TILE == 1:
        planes = expand_planes(loaded, column_fields, 0, PACKING, MODE)
        value = elements_as_f16(planes[STEP * BITS // 16], STEP * BITS % 16, ELEMENT, MODE.fast)
    else:
        planes = expand_planes(loaded, column_fields, 0, PACKING, MODE)
        words = step_words(planes, column_fields, 0, PACKING, 0, BITS, STEP, FIELDS_PER_TILE, 1, PACKING.fields, MODE)
        value = elements_as_f16(words, step_position(STEP, BITS, 1), ELEMENT, MODE.fast)
    if CONSTANTS.kind == PER_BLOCK:
        value = multiply(value, _tile_factors(loaded, STEP, CONSTANTS, MODE), MODE.fast)
    return (value,)


@triton.jit
def factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the token factors: float32 ``[warp, token]``, or ``[warp, 1]`` if all tokens share one."""
    AT: tl.constexpr = CONSTANTS.planes
    ELEMENT: tl.constexpr = CONSTANTS.element
    EXPONENT: tl.constexpr = _element_exponent(ELEMENT)
    if CONSTANTS.kind == PER_BLOCK and not CONSTANTS.global_scale:
        result = power_as_f32(_largest_scale(loaded, AT, CONSTANTS))
    elif CONSTANTS.kind == PER_TOKEN:
        result = finite_factor(read_factors(loaded, AT, CONSTANTS.scale_bits, 0, FAST) * 2.0**EXPONENT)
    else:
        result = finite_factor(loaded[AT] * 2.0**EXPONENT)
    return result


@triton.jit
def step_factor(loaded: tl.tuple, STEP: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the scale of the block that step ``STEP`` covers, float32 ``[warp, token]``."""
    return power_as_f32(_block_scale(loaded, CONSTANTS.planes, STEP, CONSTANTS))


@triton.jit
def scale_elements(x: tl.tensor, pointers: tl.tuple, CONSTANTS: tl.constexpr) -> tl.tensor:
    """Multiply float32 ``x`` by 2^``_element_exponent``, the factor that elements in tiles lack."""
    ELEMENT: tl.constexpr = CONSTANTS.element
    EXPONENT: tl.constexpr = _element_exponent(ELEMENT)
    return x * 2.0**EXPONENT


@triton.jit
def scale_by_run(x: tl.tensor, pointers: tl.tuple, CONSTANTS: tl.constexpr) -> tl.tensor:
    """Multiply float32 ``x`` as ``scale_elements`` does, then by the run scale, which may be large."""
    ELEMENT: tl.constexpr = CONSTANTS.element
    EXPONENT: tl.constexpr = _element_exponent(ELEMENT)
    scale = tl.load(pointers[CONSTANTS.planes + CONSTANTS.global_scale]).to(tl.float32, bitcast=True)
    return x * 2.0**EXPONENT * scale
