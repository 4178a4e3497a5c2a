"""Encode scalar on the GPU (spec/codecs/scalar.md); ``formats/scalar.py`` is the oracle."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.tables import kept_on_device
from kvpack.kernels.bitpack.columns import launch, tile_origin

from .columns import SMALLEST_AXIS, WARPS, Plan, Term, add_digits, empty_columns, plan_of, store_columns
from .rows import (
    LARGEST_SQUARE,
    SMALLEST_SQUARE,
    all_moved,
    block_tokens,
    bounds_of,
    component,
    components,
    entry_of,
    input_of,
    level_of,
    limit_of,
    load_rows,
    log8_bounds_of,
    moved,
    norms_of,
    origin_of,
    rule_of,
    scale_of,
    store_norms,
    unbiased_factor,
    values_of,
)

if TYPE_CHECKING:
    from kvpack.formats.scalar import Scalar, ScalarPart

    from .rows import Origins

BLOCK_TOKENS = 64
BLOCK_SYMBOLS = 32


def encode(
    codec: Scalar,
    x: torch.Tensor,
    streams: dict[str, torch.Tensor],
    planes: tuple[torch.Tensor, ...],
    flag: torch.Tensor,
    origins: Origins | None = None,
) -> bool:
    """Fill ``streams``, whose code ``planes`` are given; return False, and do nothing, for codecs that the kernel does not support."""
    plan = _plan(codec, x.device)
    if plan is None:
        return False
    symbols = max(SMALLEST_AXIS, next_power_of_two(codec.dim))
    block = min(symbols, BLOCK_SYMBOLS)
    tokens = block_tokens(x, BLOCK_TOKENS)
    arguments, constants = input_of(x, origins)
    dtype = codec.scales(1, 1, 1)["norm"].dtype
    tables = [codec.magnitude_table, *([codec.high_magnitude_table] if codec.bits_high else [])]
    launch(
        _encode, x.shape[0] * x.shape[1] * -(-x.shape[2] // tokens), x.device,
        *arguments, components(codec.rotation, 1, symbols, block, x), plan.places, planes, streams["norm"],
        log8_bounds_of(codec.norm, x.device),
        tuple(bounds_of(table, x.device) for table in tables), tuple(values_of(table, x.device) for table in tables),
        _high(codec.parts, symbols, x.device) if codec.bits_high else None, flag,
        **constants, SYMBOLS=symbols, BLOCK=block, LEVELS=1 << codec.bits - 1, HIGH_LEVELS=(1 << codec.bits_high) // 2,
        SCALE=scale_of(codec.rotation), LIMIT=limit_of(dtype), RULE=rule_of(codec.norm_rule, dtype), SMALLEST=SMALLEST_SQUARE,
        LARGEST=LARGEST_SQUARE, STREAMS=plan.streams, BLOCK_TOKENS=tokens, warps=WARPS, fusion=True,
    )  # fmt: skip
    return True


@lru_cache(maxsize=64)
def _plan(codec: Scalar, device: torch.device) -> Plan | None:
    names = [name for name, _ in codec.fields]
    parts = enumerate(zip(names, codec.parts, strict=True))
    terms = {name: (Term(number, part.bits, symbols=part.channels),) for number, (name, part) in parts}
    return plan_of(codec, terms, max(SMALLEST_AXIS, next_power_of_two(codec.dim)), device)


@kept_on_device
def _high(parts: tuple[ScalarPart, ...], symbols: int) -> torch.Tensor:
    """Return 1 for those of ``symbols`` channels that have the second width, else 0, int32."""
    high = torch.zeros(symbols, dtype=torch.int32)
    high[list(parts[1].channels)] = 1
    return high


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
    log8_bounds: tl.tensor,
    bounds: tl.tuple,
    magnitudes: tl.tuple,
    high: tl.tensor,
    flag: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    OPERAND: tl.constexpr,
    SYMBOLS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    HIGH_LEVELS: tl.constexpr,
    SCALE: tl.constexpr,
    LIMIT: tl.constexpr,
    RULE: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    ALIGNED: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Encode ``BLOCK_TOKENS`` tokens of one head, ``BLOCK`` channels at a time.

    ``x`` is ``[batch, kv_head, token, dim]`` of any strides; ``token`` and ``row`` (the token's number over all heads) are
    ``[token, 1]``, and tiles are ``[token, channel]``.
    ``norms`` is ``[batch, kv_head, token]``; ``bounds`` are the ascending bounds of ``rows.level_of`` for each width, ``magnitudes``
    the tables, and ``high`` marks the channels of the second width.
    """
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    if origins is not None:
        origin = origin_of(origins, batch, ALIGNED)
        x += origin.input
        planes = all_moved(planes, origin.streams)
        norms = moved(norms, origin.streams)
        flag += origin.flag
        batch = batch * 0
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    valid = token < tokens
    row = (batch * heads + head) * tokens + token
    rows = load_rows(x, batch_stride, head_stride, token_stride, channel_stride, batch, head, token, valid, DIM, PADDED_DIM)
    norm = norms_of(rows, flag, LIMIT, SMALLEST, LARGEST)
    product = tl.zeros(norm.shape, tl.float32)
    decoded = tl.zeros(norm.shape, tl.float32)
    factor = SCALE / tl.maximum(norm, 1e-37)
    sums = empty_columns(STREAMS, BLOCK_TOKENS)
    for block in range(SYMBOLS // BLOCK):
        value = component(rows, matrix, block, BLOCK, PADDED_DIM, PARTS, OPERAND)
        magnitude = tl.abs(value) * factor
        level = level_of(magnitude, bounds[0], LEVELS)
        digits = (level + tl.where(value < 0, LEVELS, 0),)
        if RULE > 0:
            found = entry_of(level, magnitudes[0], LEVELS)
        if HIGH_LEVELS > 0:
            level = level_of(magnitude, bounds[1], HIGH_LEVELS)
            digits = (digits[0], level + tl.where(value < 0, HIGH_LEVELS, 0))
        if RULE > 0:
            channel = block * BLOCK + tl.arange(0, BLOCK)[None, :]
            if HIGH_LEVELS > 0:
                found = tl.where(tl.load(high + channel) != 0, entry_of(level, magnitudes[1], HIGH_LEVELS), found)
            found = tl.where(channel < DIM, found, 0.0)
            product += tl.sum(magnitude * found, 1)[:, None]
            decoded += tl.sum(found * found, 1)[:, None]
        sums = add_digits(sums, digits, places, block * BLOCK, BLOCK, SYMBOLS, STREAMS)
    if RULE > 0:
        norm = unbiased_factor(norm, 1.0, product, decoded, LIMIT, RULE)
    store_norms(norms, norm, row, valid, log8_bounds, LIMIT)
    store_columns(sums, planes, row, valid, STREAMS)
