"""Encoder of the quaternion codec on the GPU (spec/codecs/quaternion.md).

The search tries all secondary quaternions: after a rotation by the inverse of one, the nearest Hurwitz unit has a closed form.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.quaternion import Quaternion, secondary_quaternions
from kvpack.formats.quaternion_search import UNITS

from .columns import MIN_AXIS, Term
from .kernel import Output, Quantizer, encode_rows
from .rows import MAX_PRODUCTS, flag_unless, nearest_integer, norm_limit, norm_rule_limit, store_errors, unbiased_factor

TILE_CHUNKS = 1 << 10
"""Number of chunks of four channels per program, over all its tokens."""

MIN_RADIUS = 2.0**-40
MAX_RADIUS = 2.0**60
"""Largest radius for which float32 is accurate (``MIN_RADIUS`` is the smallest). ``formats/`` encodes other tokens."""

_UNITS, _MIN_RADIUS, _MAX_RADIUS = tl.constexpr(UNITS), tl.constexpr(MIN_RADIUS), tl.constexpr(MAX_RADIUS)


class QuaternionConstants(NamedTuple):
    """Compile-time constants of a quaternion codec.

    ``steps`` is the largest radius code, and ``limit`` is the smallest scale that is too large for the stored dtype. ``rule`` comes from
    ``rows.norm_rule_limit``. The other fields are the table of secondary quaternions, ``[count, 4]``, and ``count``.
    """

    steps: int
    limit: float
    rule: float


def encode(codec: Quaternion, x: torch.Tensor, output: Output) -> bool:
    """Encode ``x`` into ``output``. Returns False if the codec is not supported."""
    if codec.dim > MAX_PRODUCTS:
        return False
    symbols = max(MIN_AXIS, next_power_of_two(-(-codec.dim // 4)))
    dtype = codec.scale_layouts(1, 1, 1)["scale"].dtype
    constants = QuaternionConstants((1 << codec.radius_bits) - 1, norm_limit(dtype), norm_rule_limit(codec.norm_rule, dtype))
    return encode_rows(
        codec, x, output, Quantizer(_quantize, constants), _digit_terms, [output.streams["scale"]],
        [secondary_quaternions(codec.seed, codec.secondary, x.device), codec.secondary],
        coordinates=4, symbols=symbols, tokens=TILE_CHUNKS // symbols,
    )  # fmt: skip


def _digit_terms(codec: Quaternion) -> dict[str, list[Term]]:
    # The quantizer's digits: the codeword, and the code of the radius.
    packings = codec.packings()
    whole = (UNITS * codec.secondary - 1).bit_length()
    terms = {"radius": [Term(1, codec.radius_bits)]}
    if "symbol" in packings:
        terms["symbol"] = [Term(0, whole), Term(1, codec.radius_bits, digit=1)]
    elif "codeword" in packings:
        terms["codeword"] = [Term(0, whole)]
    else:
        low = packings["codeword_low"].bases[0].bit_length() - 1
        terms |= {"codeword_low": [Term(0, low)], "codeword_high": [Term(0, whole - low, shift=low)]}
    return terms


@triton.jit
def _rotate_by_conjugate(
    w: tl.tensor, x: tl.tensor, y: tl.tensor, z: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor
) -> tl.tuple:
    """Return the Hamilton product of (w, x, y, z) and the conjugate of (a, b, c, d)."""
    return (
        w * a + x * b + y * c + z * d,
        x * a - w * b + z * c - y * d,
        y * a - z * b - w * c + x * d,
        z * a + y * b - x * c - w * d,
    )


@triton.jit
def _sign_bit(value: tl.tensor) -> tl.tensor:
    return value.to(tl.int32, bitcast=True) >> 31 & 1


@triton.jit
def _nearest_unit(w: tl.tensor, x: tl.tensor, y: tl.tensor, z: tl.tensor) -> tl.tensor:
    """Return the index of the nearest Hurwitz unit, as ``formats/quaternion_search.py`` numbers them."""
    best = tl.abs(w)
    index = _sign_bit(w)
    index = tl.where(tl.abs(x) > best, 2 + _sign_bit(x), index)
    best = tl.maximum(best, tl.abs(x))
    index = tl.where(tl.abs(y) > best, 4 + _sign_bit(y), index)
    best = tl.maximum(best, tl.abs(y))
    index = tl.where(tl.abs(z) > best, 6 + _sign_bit(z), index)
    best = tl.maximum(best, tl.abs(z))
    half = 0.5 * (tl.abs(w) + tl.abs(x) + tl.abs(y) + tl.abs(z))
    signs = _sign_bit(w) + (_sign_bit(x) << 1) + (_sign_bit(y) << 2) + (_sign_bit(z) << 3)
    return tl.where(half > best, 8 + signs, index)


@triton.jit
def _quantize(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, block_index: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the codeword and the radius code of each chunk of the tokens. Also stores the scales of the tokens."""
    STEPS: tl.constexpr = CONSTANTS.steps
    LIMIT: tl.constexpr = CONSTANTS.limit
    RULE: tl.constexpr = CONSTANTS.rule
    SCALE: tl.constexpr = SHAPE.scale
    w, i, j, k = values
    secondary = block.tables[0]
    scales = block.stored[0]
    radius = tl.sqrt(w * w + i * i + j * j + k * k) * SCALE
    largest = tl.max(radius, 1)[:, None]
    # The sum propagates NaN, but the maximum ignores it.
    total = tl.sum(radius, 1)[:, None]
    in_range = (largest > _MIN_RADIUS) & (total < _MAX_RADIUS) & (largest < LIMIT)
    if tl.min(in_range.to(tl.int32)) == 0:
        max_magnitude = tl.max(tl.abs(block.rows.to(tl.float32)), 1)[:, None]
        flag_unless(in_range | ((total == 0) & (max_magnitude == 0)), block.flag)
    stored = tl.where(largest < LIMIT, largest, 0.0).to(scales.dtype.element_ty)
    scale = stored.to(tl.float32)
    code = nearest_integer(radius * (tl.where(scale > 0, STEPS, 0.0) / tl.where(scale > 0, scale, 1.0)), STEPS)

    best = tl.full(radius.shape, -1.0, tl.float32)
    winner = tl.zeros(radius.shape, tl.int32)
    for s in range(block.tables[1]):
        a, b, c, d = _rotate_by_conjugate(
            w, i, j, k, tl.load(secondary + 4 * s), tl.load(secondary + 4 * s + 1), tl.load(secondary + 4 * s + 2),
            tl.load(secondary + 4 * s + 3),
        )  # fmt: skip
        axis = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
        score = tl.maximum(axis, 0.5 * (tl.abs(a) + tl.abs(b) + tl.abs(c) + tl.abs(d)))
        winner = tl.where(score > best, s, winner)
        best = tl.maximum(best, score)
    chosen = secondary + 4 * winner
    a, b, c, d = _rotate_by_conjugate(w, i, j, k, tl.load(chosen), tl.load(chosen + 1), tl.load(chosen + 2), tl.load(chosen + 3))
    codeword = winner * _UNITS + _nearest_unit(a, b, c, d)

    if RULE > 0 or SHAPE.measured:
        # The largest product with a codeword is the projection onto it; radii decode to code / STEPS times the scale.
        relative = tl.where(scale > 0, SCALE, 0.0) / tl.where(scale > 0, scale, 1.0)
        decoded = code.to(tl.float32) * (1.0 / STEPS)
        product = tl.sum(best * relative * decoded, 1)[:, None]
        squares = tl.sum((radius * (relative / SCALE)) * (radius * (relative / SCALE)), 1)[:, None]
        sum_of_squares = tl.sum(decoded * decoded, 1)[:, None]
        factor = scale
        if RULE > 0:
            factor = unbiased_factor(scale, squares, product, sum_of_squares, LIMIT, RULE)
        store_errors(block, factor / tl.where(scale > 0, scale, 1.0), squares, product, sum_of_squares, SHAPE)
        scale = factor
    tl.store(scales + block.row, scale.to(scales.dtype.element_ty), block.valid)
    return (codeword, code), state
