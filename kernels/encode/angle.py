"""Encoder of the angle codec on the GPU (spec/codecs/angle.md)."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.angle import Angle
from kvpack.formats.columns import next_power_of_two

from .columns import MIN_AXIS, Term
from .kernel import Output, Quantizer, encode_rows
from .rows import MAX_PRODUCTS, flag_unless, nearest_integer, norm_limit, norm_rule_limit, store_errors, unbiased_factor

TILE_PAIRS = 1 << 11
"""Number of channel pairs per program, over all its tokens."""

MIN_SUM = 2.0**-40
MAX_SUM = 2.0**60
"""Largest sum of a token's pair norms for which float32 is accurate (``MIN_SUM`` is the smallest). ``formats/`` encodes other tokens."""

ZERO = -65504.0
OCTAVES = 8.0
"""Logarithm used for a norm of zero, and maximum distance of logarithms from the token's largest, as in ``formats/angle.py``."""

_MIN_SUM, _MAX_SUM, _ZERO, _OCTAVES, _PI = (tl.constexpr(value) for value in (MIN_SUM, MAX_SUM, ZERO, OCTAVES, math.pi))


class AngleConstants(NamedTuple):
    """Compile-time constants of an angle codec: the number of angle ``bins``, the ``norm`` format, and the largest norm code (``steps``).

    ``limit`` is the smallest number that a stored range cannot represent, and ``smallest_step`` is the smallest normal step. ``rule`` comes
    from ``rows.norm_rule_limit``.
    """

    bins: int
    norm: str
    steps: int
    limit: float
    smallest_step: float
    rule: float


def encode(codec: Angle, x: torch.Tensor, output: Output) -> bool:
    """Encode ``x`` into ``output``. Returns False if the codec is not supported."""
    if codec.dim > MAX_PRODUCTS:
        return False
    symbols = max(MIN_AXIS, next_power_of_two(codec.dim // 2))
    ((name, layout),) = codec.scale_layouts(1, 1, 1).items()
    stored = output.streams[name]
    constants = AngleConstants(
        codec.bins, codec.norm, (1 << codec.norm_bits) - 1, norm_limit(layout.dtype), torch.finfo(stored.dtype).smallest_normal,
        norm_rule_limit(codec.norm_rule, "F32"),
    )  # fmt: skip
    return encode_rows(
        codec,
        x,
        output,
        Quantizer(_quantize, constants),
        _digit_terms,
        [stored],
        coordinates=2,
        symbols=symbols,
        tokens=TILE_PAIRS // symbols,
    )


def _digit_terms(codec: Angle) -> dict[str, list[Term]]:
    # The quantizer's digits: the bin, and the code of the norm.
    packings = codec.packings()
    whole = (codec.bins - 1).bit_length()
    terms = {"norm_codes": [Term(1, codec.norm_bits)]}
    if "symbol" in packings:
        terms["symbol"] = [Term(0, whole), Term(1, codec.norm_bits, digit=1)]
    elif "angle" in packings:
        terms["angle"] = [Term(0, whole)]
    else:
        low = packings["angle_low"].bases[0].bit_length() - 1
        terms |= {"angle_low": [Term(0, low)], "angle_high": [Term(0, whole - low, shift=low)]}
    return terms


@triton.jit
def angle_and_norm(first: tl.tensor, second: tl.tensor) -> tl.tuple:
    """Return the angle of (``first``, ``second``) in turns, from 0 to 1, and the norm. Both are 0 for the zero vector."""
    a = tl.abs(first)
    b = tl.abs(second)
    longer = tl.maximum(a, b)
    ratio = tl.minimum(a, b) / tl.maximum(longer, 1e-37)
    square = ratio * ratio
    # atan(x) / (2 pi) on [0, 1] as an odd polynomial: the Chebyshev interpolant of degree 15, with an error of at most 1e-8.
    turn = -0.000725713434 * square + 0.00378478708
    turn = turn * square - 0.00936304601
    turn = turn * square + 0.0157067872
    turn = turn * square - 0.0222869285
    turn = turn * square + 0.0317784067
    turn = turn * square - 0.0530492275
    turn = turn * square + 0.159154924
    turn = turn * ratio
    turn = tl.where(b > a, 0.25 - turn, turn)
    turn = tl.where(first < 0, 0.5 - turn, turn)
    turn = tl.where(second < 0, 1.0 - turn, turn)
    return turn, longer * tl.sqrt(1.0 + square)


@triton.jit
def _norm_factor(
    block: tl.tuple, projected: tl.tensor, decoded: tl.tensor, squares: tl.tensor, RULE: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tensor:
    """Return the factor ``[token, 1]`` by which norm_rule multiplies the norms of each token. Also stores the errors of the tokens."""
    product = tl.sum(projected * decoded, 1)[:, None]
    sum_of_squares = tl.sum(decoded * decoded, 1)[:, None]
    factor = tl.zeros(product.shape, tl.float32) + 1.0
    if RULE > 0:
        factor = unbiased_factor(factor, squares, product, sum_of_squares, float("inf"), RULE)
    store_errors(block, factor, squares, product, sum_of_squares, SHAPE)
    return factor


@triton.jit
def _quantize(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, block_index: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the bin of each pair and, unless norms are float32, the code of its norm. Also stores the ranges or the float32 norms."""
    SYMBOLS: tl.constexpr = SHAPE.symbols
    DIM: tl.constexpr = SHAPE.dim
    BINS: tl.constexpr = CONSTANTS.bins
    NORM: tl.constexpr = CONSTANTS.norm
    STEPS: tl.constexpr = CONSTANTS.steps
    LIMIT: tl.constexpr = CONSTANTS.limit
    RULE: tl.constexpr = CONSTANTS.rule
    norms = block.stored[0]
    row = block.row
    valid = block.valid
    turn, norm = angle_and_norm(values[0], values[1])
    norm = norm * SHAPE.scale
    bins = tl.minimum((turn * BINS).to(tl.int32), BINS - 1)
    total = tl.sum(norm, 1)
    flag_unless(((total > _MIN_SUM) & (total < _MAX_SUM)) | (total == 0), block.flag)
    pair = tl.arange(0, SYMBOLS)[None, :]
    is_pair = pair < DIM // 2
    if RULE > 0 or SHAPE.measured:
        # Project each pair onto the direction to which its bin decodes; padding has norm 0.
        projected = norm * tl.cos((turn * BINS - bins - 0.5) * (2 * _PI / BINS))
        squares = tl.sum(norm * norm, 1)[:, None]
    if NORM == "fp32":
        if RULE > 0 or SHAPE.measured:
            norm = norm * _norm_factor(block, projected, norm, squares, RULE, SHAPE)
        tl.store(norms + row * (DIM // 2) + pair, norm, valid & is_pair)
        digits = (bins,)
    else:
        if NORM == "log":
            norm = tl.where(norm > 0, tl.log2(tl.maximum(norm, 1e-37)), _ZERO)
            norm = tl.maximum(norm, tl.max(tl.where(is_pair, norm, _ZERO), 1)[:, None] - _OCTAVES)
            norm = tl.maximum(norm, _ZERO)
        low = tl.min(tl.where(is_pair, norm, float("inf")), 1)[:, None]
        high = tl.max(tl.where(is_pair, norm, float("-inf")), 1)[:, None]
        step = (high - low) / STEPS
        fits = (tl.abs(step) < LIMIT) & (tl.abs(low) < LIMIT)
        flag_unless(fits, block.flag)
        stored_step = tl.where(fits, step, 0.0).to(norms.dtype.element_ty)
        stored_low = tl.where(fits, low, 0.0).to(norms.dtype.element_ty)
        step = stored_step.to(tl.float32)
        low = stored_low.to(tl.float32)
        steps = (norm - low) * (tl.where(step > 0, 1.0, 0.0) / tl.where(step > 0, step, 1.0))
        code = nearest_integer(steps, STEPS)
        if RULE > 0 or SHAPE.measured:
            decoded = low + step * code.to(tl.float32)
            if NORM == "log":
                decoded = tl.exp2(decoded)
            factor = _norm_factor(block, projected, tl.where(is_pair, decoded, 0.0), squares, RULE, SHAPE)
            if NORM == "log":
                low = low + tl.log2(factor)
            else:
                low = low * factor
                step = step * factor
            fits = (tl.abs(step) < LIMIT) & (tl.abs(low) < LIMIT)
            if NORM == "linear":
                # A subnormal step would lose too much precision, as in ``formats/angle.py``.
                fits = fits & ((step >= CONSTANTS.smallest_step) | (step == 0))
            stored_step = tl.where(fits, step, stored_step.to(tl.float32)).to(norms.dtype.element_ty)
            stored_low = tl.where(fits, low, stored_low.to(tl.float32)).to(norms.dtype.element_ty)
        tl.store(norms + row * 2, stored_step, valid)
        tl.store(norms + row * 2 + 1, stored_low, valid)
        digits = (bins, code)
    return digits, state
