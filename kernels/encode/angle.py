"""Encode angle on the GPU (spec/codecs/angle.md); ``formats/angle.py`` is the oracle."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.kernels.bitpack.columns import launch, tile_origin

from .columns import SMALLEST_AXIS, WARPS, Plan, Term, add_digits, empty_columns, plan_of, store_columns
from .rows import (
    MAX_PRODUCTS,
    all_moved,
    component,
    components,
    flag_unless,
    input_of,
    limit_of,
    load_rows,
    moved,
    nearest_integer,
    origin_of,
    rule_of,
    scale_of,
    unbiased_factor,
)

if TYPE_CHECKING:
    from kvpack.formats.angle import Angle

    from .rows import Origins

TILE_PAIRS = 1 << 11
"""Pairs of one program, over all its tokens."""

SMALLEST_SUM = 2.0**-40
LARGEST_SUM = 2.0**60
"""Bounds between which sums of a token's norms lose nothing in float32."""

ZERO = -65504.0
OCTAVES = 8.0
"""The logarithm of a norm of zero, and how far below the largest logarithms reach; both as in formats/angle.py."""


def encode(
    codec: Angle,
    x: torch.Tensor,
    streams: dict[str, torch.Tensor],
    planes: tuple[torch.Tensor, ...],
    flag: torch.Tensor,
    origins: Origins | None = None,
) -> bool:
    """Fill ``streams``, whose code ``planes`` are given; return False, and do nothing, for codecs that the kernel does not support."""
    plan = _plan(codec, x.device) if codec.dim <= MAX_PRODUCTS else None
    if plan is None:
        return False
    symbols = _symbols(codec)
    tokens = TILE_PAIRS // symbols
    arguments, constants = input_of(x, origins)
    ((name, layout),) = codec.scales(1, 1, 1).items()
    launch(
        _encode, x.shape[0] * x.shape[1] * -(-x.shape[2] // tokens), x.device,
        *arguments, components(codec.rotation, 2, symbols, symbols, x), plan.places, planes, streams[name], flag,
        **constants, SYMBOLS=symbols, BINS=codec.bins, NORM=codec.norm, STEPS=(1 << codec.norm_bits) - 1, SCALE=scale_of(codec.rotation),
        LIMIT=limit_of(layout.dtype), RULE=rule_of(codec.norm_rule, "F32"), SMALLEST=SMALLEST_SUM, LARGEST=LARGEST_SUM,
        SMALLEST_STEP=torch.finfo(streams[name].dtype).smallest_normal,
        NO_LOGARITHM=ZERO, RANGE=OCTAVES, PI=math.pi, STREAMS=plan.streams,
        BLOCK_TOKENS=tokens, warps=WARPS, fusion=True,
    )  # fmt: skip
    return True


def _symbols(codec: Angle) -> int:
    """Pairs of a token, padding included."""
    return max(SMALLEST_AXIS, next_power_of_two(codec.dim // 2))


@lru_cache(maxsize=64)
def _plan(codec: Angle, device: torch.device) -> Plan | None:
    # The kernel's digits: the bin, and the code of the norm.
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
    return plan_of(codec, terms, _symbols(codec), device)


@triton.jit
def turns(first: tl.tensor, second: tl.tensor) -> tl.tuple:
    """The angle of (first, second) in turns, in [0, 1], and its norm; (0, 0) has both 0."""
    a = tl.abs(first)
    b = tl.abs(second)
    longer = tl.maximum(a, b)
    ratio = tl.minimum(a, b) / tl.maximum(longer, 1e-37)
    square = ratio * ratio
    # The arc tangent over 2 pi of [0, 1], an odd polynomial: the Chebyshev interpolant of degree 15, off by 1e-8 at most.
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
def _unbiased(projected: tl.tensor, decoded: tl.tensor, squares: tl.tensor, RULE: tl.constexpr) -> tl.tensor:
    """Return the factor by which norm_rule=unbiased multiplies the norms of each token, ``[token, 1]``."""
    product = tl.sum(projected * decoded, 1)[:, None]
    one = tl.zeros(product.shape, tl.float32) + 1.0
    return unbiased_factor(one, squares, product, tl.sum(decoded * decoded, 1)[:, None], float("inf"), RULE)


@triton.jit
def _encode(
    x: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    channel_stride: tl.tensor,
    heads: tl.tensor,
    tokens: tl.tensor,
    origins: tl.tensor,
    matrix: tl.tensor,
    places: tl.tensor,
    planes: tl.tuple,
    norms: tl.tensor,
    flag: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    OPERAND: tl.constexpr,
    SYMBOLS: tl.constexpr,
    BINS: tl.constexpr,
    NORM: tl.constexpr,
    STEPS: tl.constexpr,
    SCALE: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST_STEP: tl.constexpr,
    RULE: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    NO_LOGARITHM: tl.constexpr,
    RANGE: tl.constexpr,
    PI: tl.constexpr,
    ALIGNED: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Encode ``BLOCK_TOKENS`` tokens of one head.

    ``x`` is ``[batch, kv_head, token, dim]`` of any strides; ``token`` and ``row`` (the token's number over all heads) are
    ``[token, 1]``, and tiles are ``[token, pair]``.
    ``norms`` is ``[batch, kv_head, token, pair]`` for fp32 norms, else the ranges ``[batch, kv_head, token, 2]``: (step, minimum).
    """
    batch, head, begin = tile_origin(heads, tokens, BLOCK_TOKENS)
    if origins is not None:
        origin = origin_of(origins, batch, ALIGNED)
        x += origin.input
        planes = all_moved(planes, origin.streams)
        norms = moved(norms, origin.streams)
        flag += origin.flag
        batch = batch * 0
    token = (begin + tl.arange(0, BLOCK_TOKENS))[:, None]
    valid = token < tokens
    row = (batch * heads + head) * tokens + token
    rows = load_rows(x, batch_stride, head_stride, token_stride, channel_stride, batch, head, token, valid, DIM, PADDED_DIM)
    first = component(rows, matrix, 0, SYMBOLS, PADDED_DIM, PARTS, OPERAND)
    second = component(rows, matrix, 1, SYMBOLS, PADDED_DIM, PARTS, OPERAND)
    turn, norm = turns(first, second)
    norm = norm * SCALE
    bins = tl.minimum((turn * BINS).to(tl.int32), BINS - 1)
    total = tl.sum(norm, 1)
    flag_unless(((total > SMALLEST) & (total < LARGEST)) | (total == 0), flag)
    pair = tl.arange(0, SYMBOLS)[None, :]
    inside = pair < DIM // 2
    if RULE > 0:
        # Each pair's norm along the direction to which its bin decodes; what pads a row has none.
        projected = norm * tl.cos((turn * BINS - bins - 0.5) * (2 * PI / BINS))
        squares = tl.sum(norm * norm, 1)[:, None]
    if NORM == "fp32":
        if RULE > 0:
            norm = norm * _unbiased(projected, norm, squares, RULE)
        tl.store(norms + row * (DIM // 2) + pair, norm, valid & inside)
        digits = (bins,)
    else:
        if NORM == "log":
            norm = tl.where(norm > 0, tl.log2(tl.maximum(norm, 1e-37)), NO_LOGARITHM)
            norm = tl.maximum(norm, tl.max(tl.where(inside, norm, NO_LOGARITHM), 1)[:, None] - RANGE)
            norm = tl.maximum(norm, NO_LOGARITHM)
        low = tl.min(tl.where(inside, norm, float("inf")), 1)[:, None]
        high = tl.max(tl.where(inside, norm, float("-inf")), 1)[:, None]
        step = (high - low) / STEPS
        fits = (tl.abs(step) < LIMIT) & (tl.abs(low) < LIMIT)
        flag_unless(fits, flag)
        stored_step = tl.where(fits, step, 0.0).to(norms.dtype.element_ty)
        stored_low = tl.where(fits, low, 0.0).to(norms.dtype.element_ty)
        step = stored_step.to(tl.float32)
        low = stored_low.to(tl.float32)
        steps = (norm - low) * (tl.where(step > 0, 1.0, 0.0) / tl.where(step > 0, step, 1.0))
        code = nearest_integer(steps, STEPS)
        if RULE > 0:
            decoded = low + step * code.to(tl.float32)
            if NORM == "log":
                decoded = tl.exp2(decoded)
            factor = _unbiased(projected, tl.where(inside, decoded, 0.0), squares, RULE)
            if NORM == "log":
                low = low + tl.log2(factor)
            else:
                low = low * factor
                step = step * factor
            fits = (tl.abs(step) < LIMIT) & (tl.abs(low) < LIMIT)
            if NORM == "linear":
                # See formats/angle.py.
                fits = fits & ((step >= SMALLEST_STEP) | (step == 0))
            stored_step = tl.where(fits, step, stored_step.to(tl.float32)).to(norms.dtype.element_ty)
            stored_low = tl.where(fits, low, stored_low.to(tl.float32)).to(norms.dtype.element_ty)
        tl.store(norms + row * 2, stored_step, valid)
        tl.store(norms + row * 2 + 1, stored_low, valid)
        digits = (bins, code)
    sums = empty_columns(STREAMS, BLOCK_TOKENS)
    sums = add_digits(sums, digits, places, 0, SYMBOLS, SYMBOLS, STREAMS)
    store_columns(sums, planes, row, valid, STREAMS)
