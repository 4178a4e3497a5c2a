"""angle as tiles (spec/codecs/angle.md): two tiles a field, the cosines and the sines of its pairs times their norms.

Norms are decoded over a power of two near the token's largest, which is its factor, so that none leaves binary16. This is the
direct arrangement; the dense one has bins and norms in columns of their own (tiles_angle_dense).
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.kernels.tables.shared_table import look_up_bits
from kvpack.kernels.words.axes import of_tokens
from kvpack.kernels.words.fields import load_per_token, load_planes, whole_planes, words_of_step
from kvpack.kernels.words.halves import affine_bits, binary16_bits, power_of_two, product

from .tiles import (
    Stream,
    TilePacking,
    Tiles,
    channels_of,
    fields_side_by_side,
    plane_streams,
    step_symbols,
    takes_whole_words,
    tile_packing,
)

if TYPE_CHECKING:
    from kvpack.formats.angle import Angle

VALUES = 2


class Constants(NamedTuple):
    """What the functions below know of a codec and its tiles: bits of a bin and of a norm, and how norms are spaced.

    The range is stream ``range_place``, and at that place of what ``load`` gives.
    """

    packing: TilePacking
    beside: int
    bin_bits: int
    norm_bits: int
    log: bool
    range_place: int
    half_range: bool


def tiles(codec: Angle) -> Tiles | None:
    """The loader of ``codec`` in the direct arrangement, None where a digit is too wide."""
    packing = codec.packings()["symbol"]
    if not takes_whole_words(packing):
        return None
    symbols = step_symbols(packing)
    bin_bits = packing.bases[0].bit_length() - 1
    streams = plane_streams("symbol", packing)
    half = codec.range == "fp16"
    streams = (*streams, Stream("range", 32, 1 if half else 2))
    constants = Constants(
        packing=tile_packing(0, packing),
        beside=fields_side_by_side(packing),
        bin_bits=bin_bits,
        norm_bits=codec.norm_bits,
        log=codec.norm == "log",
        range_place=len(streams) - 1,
        half_range=half,
    )
    channels = tuple(channels_of(step, VALUES, value, codec.dim) for step in symbols for value in range(VALUES))
    return Tiles(load, decode, factor, constants, len(symbols), channels, streams, table(codec), packings=(packing,))


def table(codec: Angle) -> torch.Tensor:
    """Cosine and sine of every bin, up to a power of two of them."""
    entries = torch.zeros(next_power_of_two(codec.bins), VALUES, dtype=torch.float16)
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
    WHOLE: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The planes, then the ranges."""
    PACKING: tl.constexpr = CONSTANTS.packing
    raw = load_planes(pointers, first, token, valid, PACKING, MASKED, TURNED)
    return raw + load_range(pointers[CONSTANTS.range_place], first, token, valid, CONSTANTS, MASKED)


@triton.jit
def load_range(
    pointer: tl.tensor, first: tl.tensor, token: tl.tensor, valid: tl.tensor, CONSTANTS: tl.constexpr, MASKED: tl.constexpr
) -> tl.tuple:
    """The range of each token, a pair of binary16 in one word or two words."""
    words = ()
    for word in tl.static_range(2 - CONSTANTS.half_range):
        words = words + (load_per_token(pointer, first, token, valid, 2 - CONSTANTS.half_range, word, MASKED),)
    return words


@triton.jit
def _half(bits: tl.tensor) -> tl.tensor:
    """The low 16 bits as a binary16, widened to float32."""
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _range(words: tl.tuple) -> tl.tuple:
    """(step, minimum) of each token, float32."""
    if len(words) == 1:
        step = _half(words[0])
        minimum = _half(words[0] >> 16)
    else:
        step = words[0].to(tl.float32, bitcast=True)
        minimum = words[1].to(tl.float32, bitcast=True)
    return step, minimum


@triton.jit
def _exponent(words: tl.tuple, LARGEST: tl.constexpr) -> tl.tensor:
    """The exponent field of the binary32 power of two that a linear range is decoded over.

    That of binary16 is at most the largest step's or 1/256 of the largest minimum's, so that norms over it are below 2^11. That
    of binary32 is above all norms in size, but the largest binary32s.
    """
    if len(words) == 1:
        high = tl.maximum(words[0] & 0x7C00, ((words[0] >> 16) & 0x7C00) - (8 << 10))
        exponent = (tl.minimum(high, 29 << 10) >> 10) + 112
    else:
        step, minimum = _range(words)
        largest = tl.maximum(tl.abs(minimum), tl.abs(minimum + step * LARGEST))
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) + 1
        exponent = tl.minimum(tl.maximum(exponent, 27), 253)
    return exponent


@triton.jit
def factor(raw: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """``factor_of_range`` of each token."""
    return factor_of_range(raw[CONSTANTS.range_place : CONSTANTS.range_place + 2 - CONSTANTS.half_range], CONSTANTS)


@triton.jit
def factor_of_range(words: tl.tuple, CONSTANTS: tl.constexpr) -> tl.tensor:
    """What norms are decoded over: a power of two, or the largest possible one; ``words`` are the range."""
    LARGEST: tl.constexpr = (1 << CONSTANTS.norm_bits) - 1
    if CONSTANTS.log:
        step, minimum = _range(words)
        value = tl.exp2(minimum + tl.maximum(step * LARGEST, 0.0))
    else:
        value = (_exponent(words, LARGEST) << 23).to(tl.float32, bitcast=True)
    return value


@triton.constexpr_function
def middle_norm(bits: int) -> int:
    """The code that is taken off norms of ``bits`` bits: the whole one above the middle."""
    return 1 << (bits - 1)


@triton.jit
def norm_line(words: tl.tuple, CONSTANTS: tl.constexpr) -> tl.tuple:
    """(scale, centre) of a norm, or its logarithm, over the token's factor: (code - ``middle_norm``) * scale + centre, float32.

    ``words`` are the token's range.
    """
    step, minimum = _range(words)
    MIDDLE: tl.constexpr = middle_norm(CONSTANTS.norm_bits)
    LARGEST: tl.constexpr = (1 << CONSTANTS.norm_bits) - 1
    if CONSTANTS.log:
        scale = step
        centre = step * MIDDLE - tl.maximum(step * LARGEST, 0.0)
    else:
        inverse = ((254 - _exponent(words, LARGEST)) << 23).to(tl.float32, bitcast=True)
        scale = step * inverse
        centre = (minimum + step * MIDDLE) * inverse
    return scale, centre


@triton.constexpr_function
def _line(bits: int) -> str:
    """``norm_line`` of two ranges of binary16: exponents are found as ``_exponent`` does, in place, where they compare as binary16 do."""
    middle = binary16_bits(middle_norm(bits))
    return f"""{{ .reg .b32 step, minimum, high, low, bound;
        prmt.b32 step, $2, $3, 0x5410; prmt.b32 minimum, $2, $3, 0x7632;
        and.b32 high, step, 0x7C007C00; and.b32 low, minimum, 0x7C007C00;
        mov.b32 bound, {(8 << 10) * 0x10001}; max.f16x2 low, low, bound; sub.u32 low, low, bound; max.f16x2 high, high, low;
        mov.b32 bound, {(29 << 10) * 0x10001}; min.f16x2 high, high, bound; sub.u32 high, {(30 << 10) * 0x10001}, high;
        mul.rn.f16x2 $0, step, high; mul.rn.f16x2 low, minimum, high;
        mov.b32 high, {middle * 0x10001}; fma.rn.f16x2 $1, $0, high, low; }}"""


@triton.jit
def norm_line_halves(words: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """``norm_line`` in binary16."""
    if FAST and CONSTANTS.log == 0 and len(words) == 1:
        scale, centre = tl.inline_asm_elementwise(
            _line(CONSTANTS.norm_bits), "=&r,=&r,r,r", [words[0]], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        scale, centre = norm_line(words, CONSTANTS)
        scale = scale.to(tl.float16)
        centre = centre.to(tl.float16)
    return scale, centre


@triton.jit
def decode(
    raw: tl.tuple,
    places: tl.tuple,
    table: tl.tensor,
    STEP: tl.constexpr,
    CONSTANTS: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The two coordinates of the pairs of ``STEP``, over the token's factor."""
    PACKING: tl.constexpr = CONSTANTS.packing
    BESIDE: tl.constexpr = CONSTANTS.beside
    planes = whole_planes(raw, places, 0, PACKING, TURNED, FAST)
    BIN_BITS: tl.constexpr = CONSTANTS.bin_bits
    NORM_BITS: tl.constexpr = CONSTANTS.norm_bits
    NORMS: tl.constexpr = PACKING.fields * BIN_BITS
    line = line_of_tokens(raw, CONSTANTS, TURNED, FAST)
    if BESIDE == 1:
        found = pair(planes, line, table, STEP * BIN_BITS, NORMS + STEP * NORM_BITS, CONSTANTS, SHARED, FAST)
    else:
        index = words_of_step(planes, places, 0, PACKING, 0, BIN_BITS, STEP, BESIDE, 1, PACKING.fields, TURNED, FAST)
        norm = words_of_step(planes, places, 0, PACKING, NORMS, NORM_BITS, STEP, BESIDE, 1, PACKING.fields, TURNED, FAST)
        found = pair((index, norm), line, table, 0, 16, CONSTANTS, SHARED, FAST)
    return found


@triton.jit
def line_of_tokens(raw: tl.tuple, CONSTANTS: tl.constexpr, TURNED: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """``norm_line`` of the ranges in ``raw``, binary16 that broadcast to a tile."""
    scale, centre = norm_line_halves(raw[CONSTANTS.range_place : CONSTANTS.range_place + 2 - CONSTANTS.half_range], CONSTANTS, FAST)
    return of_tokens(scale, TURNED), of_tokens(centre, TURNED)


@triton.jit
def pair(
    planes: tl.tuple,
    line: tl.tuple,
    table: tl.tensor,
    BIN: tl.constexpr,
    NORM: tl.constexpr,
    CONSTANTS: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The pairs whose bin begins at bit ``BIN`` of each column, and their norm code at bit ``NORM``; ``line`` is ``norm_line``."""
    found = look_up_bits(planes, table, BIN, CONSTANTS.bin_bits, 2, 0, SHARED, FAST)
    norm = affine_bits(planes, line[0], line[1], NORM, CONSTANTS.norm_bits, middle_norm(CONSTANTS.norm_bits), FAST)
    if CONSTANTS.log:
        norm = power_of_two(norm, FAST)
    return (product(found[0], norm, FAST), product(found[1], norm, FAST))
