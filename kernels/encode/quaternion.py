"""Encode quaternion on the GPU (spec/codecs/quaternion.md); ``formats/quaternion.py`` is the oracle.

The search covers all secondary quaternions: after rotation by the inverse of one, the nearest Hurwitz unit is a closed form.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.quaternion import secondary_quaternions
from kvpack.formats.quaternion_search import UNITS
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
    import torch

    from kvpack.formats.quaternion import Quaternion

    from .rows import Origins

TILE_CHUNKS = 1 << 10
"""Chunks of one program, over all its tokens."""

SMALLEST_RADIUS = 2.0**-40
LARGEST_RADIUS = 2.0**60
"""Bounds between which the largest radii of tokens lose nothing in float32."""


def encode(
    codec: Quaternion,
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
    tokens = TILE_CHUNKS // symbols
    arguments, constants = input_of(x, origins)
    dtype = codec.scales(1, 1, 1)["scale"].dtype
    launch(
        _encode, x.shape[0] * x.shape[1] * -(-x.shape[2] // tokens), x.device,
        *arguments, components(codec.rotation, 4, symbols, symbols, x), plan.places, planes, streams["scale"],
        secondary_quaternions(codec.seed, codec.secondary, x.device), flag, codec.secondary,
        **constants, SYMBOLS=symbols, UNITS=UNITS, STEPS=(1 << codec.radius_bits) - 1, SCALE=scale_of(codec.rotation),
        LIMIT=limit_of(dtype), RULE=rule_of(codec.norm_rule, dtype), SMALLEST=SMALLEST_RADIUS, LARGEST=LARGEST_RADIUS,
        STREAMS=plan.streams, BLOCK_TOKENS=tokens, warps=WARPS, fusion=True,
    )  # fmt: skip
    return True


def _symbols(codec: Quaternion) -> int:
    """Chunks of a token, padding included."""
    return max(SMALLEST_AXIS, next_power_of_two(-(-codec.dim // 4)))


@lru_cache(maxsize=64)
def _plan(codec: Quaternion, device: torch.device) -> Plan | None:
    # The kernel's digits: the codeword, and the code of the radius.
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
    return plan_of(codec, terms, _symbols(codec), device)


@triton.jit
def _rotated_back(
    w: tl.tensor, x: tl.tensor, y: tl.tensor, z: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor
) -> tl.tuple:
    """The Hamilton product of (w, x, y, z) with the conjugate of (a, b, c, d)."""
    return (
        w * a + x * b + y * c + z * d,
        x * a - w * b + z * c - y * d,
        y * a - z * b - w * c + x * d,
        z * a + y * b - x * c - w * d,
    )


@triton.jit
def _sign_bit(value: tl.tensor) -> tl.tensor:
    """1 if the float32 is negative, -0 included, else 0."""
    return value.to(tl.int32, bitcast=True) >> 31 & 1


@triton.jit
def _nearest_unit(w: tl.tensor, x: tl.tensor, y: tl.tensor, z: tl.tensor) -> tl.tensor:
    """The number of the nearest Hurwitz unit: 2 i + sign for axis i, 8 + one sign bit a component for a half unit."""
    best = tl.abs(w)
    number = _sign_bit(w)
    number = tl.where(tl.abs(x) > best, 2 + _sign_bit(x), number)
    best = tl.maximum(best, tl.abs(x))
    number = tl.where(tl.abs(y) > best, 4 + _sign_bit(y), number)
    best = tl.maximum(best, tl.abs(y))
    number = tl.where(tl.abs(z) > best, 6 + _sign_bit(z), number)
    best = tl.maximum(best, tl.abs(z))
    half = 0.5 * (tl.abs(w) + tl.abs(x) + tl.abs(y) + tl.abs(z))
    signs = _sign_bit(w) + (_sign_bit(x) << 1) + (_sign_bit(y) << 2) + (_sign_bit(z) << 3)
    return tl.where(half > best, 8 + signs, number)


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
    scales: tl.tensor,
    secondary: tl.tensor,
    flag: tl.tensor,
    count: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    OPERAND: tl.constexpr,
    SYMBOLS: tl.constexpr,
    UNITS: tl.constexpr,
    STEPS: tl.constexpr,
    SCALE: tl.constexpr,
    LIMIT: tl.constexpr,
    RULE: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    ALIGNED: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Encode ``BLOCK_TOKENS`` tokens of one head.

    ``x`` is ``[batch, kv_head, token, dim]`` of any strides; ``token`` and ``row`` (the token's number over all heads) are
    ``[token, 1]``, and tiles are ``[token, chunk]``.
    ``scales`` is ``[batch, kv_head, token]``, ``secondary`` ``[count, 4]``.
    """
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    if origins is not None:
        origin = origin_of(origins, batch, ALIGNED)
        x += origin.input
        planes = all_moved(planes, origin.streams)
        scales = moved(scales, origin.streams)
        flag += origin.flag
        batch = batch * 0
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    valid = token < tokens
    row = (batch * heads + head) * tokens + token
    rows = load_rows(x, batch_stride, head_stride, token_stride, channel_stride, batch, head, token, valid, DIM, PADDED_DIM)
    w = component(rows, matrix, 0, SYMBOLS, PADDED_DIM, PARTS, OPERAND)
    i = component(rows, matrix, 1, SYMBOLS, PADDED_DIM, PARTS, OPERAND)
    j = component(rows, matrix, 2, SYMBOLS, PADDED_DIM, PARTS, OPERAND)
    k = component(rows, matrix, 3, SYMBOLS, PADDED_DIM, PARTS, OPERAND)

    radius = tl.sqrt(w * w + i * i + j * j + k * k) * SCALE
    largest = tl.max(radius, 1)[:, None]
    # A NaN reaches the sum, while the maximum ignores it.
    total = tl.sum(radius, 1)[:, None]
    ok = (largest > SMALLEST) & (total < LARGEST) & (largest < LIMIT)
    if tl.min(ok.to(tl.int32)) == 0:
        peak = tl.max(tl.abs(rows.to(tl.float32)), 1)[:, None]
        flag_unless(ok | ((total == 0) & (peak == 0)), flag)
    stored = tl.where(largest < LIMIT, largest, 0.0).to(scales.dtype.element_ty)
    scale = stored.to(tl.float32)
    code = nearest_integer(radius * (tl.where(scale > 0, STEPS, 0.0) / tl.where(scale > 0, scale, 1.0)), STEPS)

    best = tl.full(radius.shape, -1.0, tl.float32)
    winner = tl.zeros(radius.shape, tl.int32)
    for s in range(count):
        a, b, c, d = _rotated_back(
            w, i, j, k, tl.load(secondary + 4 * s), tl.load(secondary + 4 * s + 1), tl.load(secondary + 4 * s + 2),
            tl.load(secondary + 4 * s + 3),
        )  # fmt: skip
        axis = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
        score = tl.maximum(axis, 0.5 * (tl.abs(a) + tl.abs(b) + tl.abs(c) + tl.abs(d)))
        winner = tl.where(score > best, s, winner)
        best = tl.maximum(best, score)
    chosen = secondary + 4 * winner
    a, b, c, d = _rotated_back(w, i, j, k, tl.load(chosen), tl.load(chosen + 1), tl.load(chosen + 2), tl.load(chosen + 3))
    codeword = winner * UNITS + _nearest_unit(a, b, c, d)

    if RULE > 0:
        # The largest product with a codeword is the projection on it; radii decode to code / STEPS of the scale.
        relative = tl.where(scale > 0, SCALE, 0.0) / tl.where(scale > 0, scale, 1.0)
        decoded = code.to(tl.float32) * (1.0 / STEPS)
        product = tl.sum(best * relative * decoded, 1)[:, None]
        squares = tl.sum((radius * (relative / SCALE)) * (radius * (relative / SCALE)), 1)[:, None]
        scale = unbiased_factor(scale, squares, product, tl.sum(decoded * decoded, 1)[:, None], LIMIT, RULE)
    tl.store(scales + row, scale.to(scales.dtype.element_ty), valid)

    sums = empty_columns(STREAMS, BLOCK_TOKENS)
    sums = add_digits(sums, (codeword, code), places, 0, SYMBOLS, SYMBOLS, STREAMS)
    store_columns(sums, planes, row, valid, STREAMS)
