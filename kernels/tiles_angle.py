"""angle as tiles (spec/codecs/angle.md): two tiles a field, the cosines and the sines of its pairs times their norms.

Norms are decoded over the token's largest, which joins its factor, so that none leaves binary16. This is the direct arrangement;
the dense one has bins and norms in columns of their own (tiles_angle_dense).
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two

from .axes import of_tokens
from .fields import load_per_token, load_planes, whole_planes, words_of_step
from .halves import affine_bits, power_of_two, product
from .shared_table import look_up_bits
from .tiles import Stream, Tiles, channels_of, fields_side_by_side, packing_constants, plane_streams, step_symbols, takes_whole_words

if TYPE_CHECKING:
    from kvpack.formats.angle import Angle

VALUES = 2


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
    constants = (
        packing_constants(0, packing), fields_side_by_side(packing), bin_bits, codec.norm_bits, int(codec.norm == "log"),
        len(streams) - 1, int(half),
    )  # fmt: skip
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
    C: tl.constexpr,
    MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The planes, then the ranges: a pair of binary16 in one word, or two words."""
    PACKING: tl.constexpr = C[0]
    raw = load_planes(pointers, first, token, valid, PACKING, MASKED, TURNED)
    if C[6]:
        raw = raw + (load_per_token(pointers[C[5]], first, token, valid, 1, 0, MASKED),)
    else:
        raw = raw + (load_per_token(pointers[C[5]], first, token, valid, 2, 0, MASKED),)
        raw = raw + (load_per_token(pointers[C[5]], first, token, valid, 2, 1, MASKED),)
    return raw


@triton.jit
def half(bits: tl.tensor) -> tl.tensor:
    """The low 16 bits as a binary16, widened to float32."""
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _range(raw: tl.tuple, C: tl.constexpr) -> tl.tuple:
    """(step, minimum) of each token, float32."""
    if C[6]:
        pair = raw[C[5]]
        step = half(pair)
        minimum = half(pair >> 16)
    else:
        step = raw[C[5]].to(tl.float32, bitcast=True)
        minimum = raw[C[5] + 1].to(tl.float32, bitcast=True)
    return step, minimum


@triton.jit
def _power_above(step: tl.tensor, minimum: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """The exponent field of a binary32 power of two that is above all norms of a linear range in size, but the largest binary32s."""
    largest = tl.maximum(tl.abs(minimum), tl.abs(minimum + step * LARGEST))
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) + 1
    return tl.minimum(tl.maximum(exponent, 27), 253)


@triton.jit
def factor(raw: tl.tuple, C: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """A power of two above a token's norms, or their largest possible one."""
    step, minimum = _range(raw, C)
    LARGEST: tl.constexpr = (1 << C[3]) - 1
    if C[4]:
        value = tl.exp2(minimum + tl.maximum(step * LARGEST, 0.0))
    else:
        value = (_power_above(step, minimum, LARGEST) << 23).to(tl.float32, bitcast=True)
    return value


@triton.jit
def norm_line(step: tl.tensor, minimum: tl.tensor, C: tl.constexpr) -> tl.tuple:
    """(scale, centre) of a norm, or its logarithm, over the token's factor: (code - middle code) * scale + centre, float32."""
    MIDDLE: tl.constexpr = 1 << (C[3] - 1)
    LARGEST: tl.constexpr = (1 << C[3]) - 1
    if C[4]:
        scale = step
        centre = step * MIDDLE - tl.maximum(step * LARGEST, 0.0)
    else:
        inverse = ((254 - _power_above(step, minimum, LARGEST)) << 23).to(tl.float32, bitcast=True)
        scale = step * inverse
        centre = (minimum + step * MIDDLE) * inverse
    return scale, centre


@triton.jit
def decode(
    raw: tl.tuple,
    places: tl.tuple,
    table: tl.tensor,
    STEP: tl.constexpr,
    C: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The two coordinates of the pairs of ``STEP``, over the token's factor."""
    PACKING: tl.constexpr = C[0]
    BESIDE: tl.constexpr = C[1]
    planes = whole_planes(raw, places, 0, PACKING, TURNED, FAST)
    step, minimum = _range(raw, C)
    scale, centre = norm_line(step, minimum, C)
    scale = of_tokens(scale.to(tl.float16), TURNED)
    centre = of_tokens(centre.to(tl.float16), TURNED)
    BIN_BITS: tl.constexpr = C[2]
    NORM_BITS: tl.constexpr = C[3]
    NORMS: tl.constexpr = PACKING[4] * BIN_BITS
    if BESIDE == 1:
        found = _pair(planes, table, scale, centre, STEP * BIN_BITS, NORMS + STEP * NORM_BITS, C, SHARED, FAST)
    else:
        index = words_of_step(planes, places, 0, PACKING, 0, BIN_BITS, STEP, BESIDE, 1, PACKING[4], TURNED, FAST)
        norm = words_of_step(planes, places, 0, PACKING, NORMS, NORM_BITS, STEP, BESIDE, 1, PACKING[4], TURNED, FAST)
        found = _pair((index, norm), table, scale, centre, 0, 16, C, SHARED, FAST)
    return found


@triton.jit
def _pair(
    planes: tl.tuple,
    table: tl.tensor,
    scale: tl.tensor,
    centre: tl.tensor,
    BIN: tl.constexpr,
    NORM: tl.constexpr,
    C: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The pairs whose bin begins at bit ``BIN`` of each column, and their norm code at bit ``NORM``."""
    found = look_up_bits(planes, table, BIN, C[2], 2, 0, SHARED, FAST)
    norm = affine_bits(planes, scale, centre, NORM, C[3], FAST)
    if C[4]:
        norm = power_of_two(norm, FAST)
    return (product(found[0], norm, FAST), product(found[1], norm, FAST))
