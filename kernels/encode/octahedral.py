"""Encode octahedral on the GPU (spec/codecs/octahedral.md); ``formats/octahedral.py`` is the oracle.

Triplets are three tiles of coordinates, straight from the rotation. The nearest direction is the best of the four whose coordinates
enclose the triplet's: that is what the local searches of ``formats/octahedral_search.py`` find.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import triton
from triton import language as tl

from kvpack.formats.octahedral import norm_with_index
from kvpack.kernels.bitpack.columns import launch, tile_origin

from .columns import WARPS, Plan, Term, add_digits, empty_columns, plan_of, store_columns
from .rows import (
    LARGEST_SQUARE,
    SMALLEST_SQUARE,
    all_moved,
    block_tokens,
    bounds_of,
    component,
    components,
    enclosing_levels,
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
    import torch

    from kvpack.formats.octahedral import Octahedral

    from .rows import Origins

BLOCK_TOKENS = 32
BLOCK_TRIPLETS = 16

_MAX_LEVELS = 64
"""Levels per coordinate, at most: with more, formats/ searches only the nine directions around a triplet's own."""


def encode(
    codec: Octahedral,
    x: torch.Tensor,
    streams: dict[str, torch.Tensor],
    planes: tuple[torch.Tensor, ...],
    flag: torch.Tensor,
    origins: Origins | None = None,
) -> bool:
    """Fill ``streams``, whose code ``planes`` are given; return False, and do nothing, for codecs that the kernel does not support."""
    levels = 1 << codec.b_dir - 1
    if codec.rounding == "full" or (codec.rounding == "local3x3" and levels > _MAX_LEVELS):
        return False
    plan = _plan(codec, x.device)
    if plan is None:
        return False
    nearest = codec.rounding == "scalar" or levels == 1
    tokens = block_tokens(x, BLOCK_TOKENS)
    arguments, constants = input_of(x, origins)
    dtype = codec.scales(1, 1, 1)["norm"].dtype
    launch(
        _encode, x.shape[0] * x.shape[1] * -(-x.shape[2] // tokens), x.device,
        *arguments, components(codec.rotation, 3, _symbols(codec), BLOCK_TRIPLETS, x), plan.places, planes, streams["norm"],
        log8_bounds_of(codec.norm, x.device),
        bounds_of(codec.direction_table, x.device), values_of(codec.direction_table, x.device), bounds_of(codec.norm_table, x.device),
        values_of(codec.norm_table, x.device), flag,
        **constants, TRIPLETS=codec.triplets, SYMBOLS=_symbols(codec), BLOCK=BLOCK_TRIPLETS, LEVELS=levels, NORM_LEVELS=1 << codec.b_norm,
        NEAREST=nearest, LENGTH=codec.rounding == "scalar", SCALE=scale_of(codec.rotation), LIMIT=limit_of(dtype),
        RULE=rule_of(codec.norm_rule, dtype), SMALLEST=SMALLEST_SQUARE, LARGEST=LARGEST_SQUARE, STREAMS=plan.streams,
        BLOCK_TOKENS=tokens, warps=WARPS, fusion=True,
    )  # fmt: skip
    return True


def _symbols(codec: Octahedral) -> int:
    """Triplets of a token in whole blocks."""
    return -(-codec.triplets // BLOCK_TRIPLETS) * BLOCK_TRIPLETS


@lru_cache(maxsize=64)
def _plan(codec: Octahedral, device: torch.device) -> Plan | None:
    # The kernel's digits: the direction in its quarter, the two signs, the norm.
    direction, norm = 2 * (codec.b_dir - 1), codec.b_norm
    with_index = norm_with_index(codec.b_dir, norm)
    index = [Term(0, direction)] if direction else []
    sign = [Term(1, 2)]
    if norm:
        (index if with_index else sign).append(Term(2, norm, weight=1 << (direction if with_index else 2)))
    if codec.arrangement == "dense":
        terms = {"index": index, "sign": sign}
    elif len(codec.packings()["symbol"].bases) == 1:
        index_bits = direction + (norm if with_index else 0)
        terms = {"symbol": [*index, *(term._replace(weight=term.weight << index_bits) for term in sign)]}
    else:
        terms = {"symbol": [*index, *(term._replace(digit=1) for term in sign)]}
    # What pads the symbols of a row has no place.
    triplets = tuple(range(codec.triplets))
    placed = {name: [term._replace(symbols=triplets) for term in stream] for name, stream in terms.items()}
    return plan_of(codec, placed, _symbols(codec), device)


@triton.jit
def _projection(xi: tl.tensor, eta: tl.tensor, x: tl.tensor, y: tl.tensor, z: tl.tensor) -> tl.tensor:
    """The scalar product of (x, y, z) and the unit direction of octahedral coordinates (OCTOPUS Eq. 6)."""
    third = 1.0 - xi - eta
    first = tl.where(third < 0, 1.0 - eta, xi)
    second = tl.where(third < 0, 1.0 - xi, eta)
    return (first * x + second * y + third * z) * tl.rsqrt(first * first + second * second + third * third)


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
    bounds: tl.tensor,
    magnitudes: tl.tensor,
    norm_bounds: tl.tensor,
    radii: tl.tensor,
    flag: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    OPERAND: tl.constexpr,
    TRIPLETS: tl.constexpr,
    SYMBOLS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    NORM_LEVELS: tl.constexpr,
    NEAREST: tl.constexpr,
    LENGTH: tl.constexpr,
    SCALE: tl.constexpr,
    LIMIT: tl.constexpr,
    RULE: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    ALIGNED: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Encode ``BLOCK_TOKENS`` tokens of one head, ``BLOCK`` triplets at a time.

    ``x`` is ``[batch, kv_head, token, dim]`` of any strides; ``token`` and ``row`` (the token's number over all heads) are
    ``[token, 1]``, and tiles are ``[token, triplet]``.
    ``norms`` is ``[batch, kv_head, token]``; ``bounds`` and ``norm_bounds`` are ascending bounds, ``magnitudes`` and ``radii``
    the tables between them.
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
        u = component(rows, matrix, 3 * block, BLOCK, PADDED_DIM, PARTS, OPERAND)
        v = component(rows, matrix, 3 * block + 1, BLOCK, PADDED_DIM, PARTS, OPERAND)
        w = component(rows, matrix, 3 * block + 2, BLOCK, PADDED_DIM, PARTS, OPERAND)
        sign = tl.where(u < 0, 1, 0) + tl.where(v < 0, 2, 0)
        u = tl.abs(u)
        v = tl.abs(v)
        # OCTOPUS Eq. 5; for w < 0 the fold 1 - v / l equals (u + |w|) / l.
        folded = tl.maximum(-w, 0.0)
        whole = 1.0 / tl.maximum(u + v + tl.abs(w), 1e-30)
        xi = (u + folded) * whole
        eta = (v + folded) * whole
        if not NEAREST:
            column, left, right = enclosing_levels(xi, magnitudes, LEVELS)
            line, below, above = enclosing_levels(eta, magnitudes, LEVELS)
            best = _projection(left, below, u, v, w)
            other = _projection(right, below, u, v, w)
            index = tl.where(other > best, 1, 0)
            best = tl.maximum(best, other)
            other = _projection(left, above, u, v, w)
            index = tl.where(other > best, LEVELS, index)
            best = tl.maximum(best, other)
            other = _projection(right, above, u, v, w)
            index = tl.where(other > best, LEVELS + 1, index) + column + line * LEVELS
            best = tl.maximum(best, other)
            radius = best
        else:
            column = level_of(xi, bounds, LEVELS)
            line = level_of(eta, bounds, LEVELS)
            index = column + line * LEVELS
            best = _projection(tl.load(magnitudes + column), tl.load(magnitudes + line), u, v, w)
            radius = best
            if LENGTH:
                radius = tl.sqrt(u * u + v * v + w * w)
        level = level_of(radius * factor, norm_bounds, NORM_LEVELS)
        if RULE > 0:
            found = entry_of(level, radii, NORM_LEVELS)
            found = tl.where(block * BLOCK + tl.arange(0, BLOCK)[None, :] < TRIPLETS, found, 0.0)
            product += tl.sum(best * factor * found, 1)[:, None]
            decoded += tl.sum(found * found, 1)[:, None]
        digits = (index, sign, level)
        sums = add_digits(sums, digits, places, block * BLOCK, BLOCK, SYMBOLS, STREAMS)
    if RULE > 0:
        norm = unbiased_factor(norm, 1.0, product, decoded, LIMIT, RULE)
    store_norms(norms, norm, row, valid, log8_bounds, LIMIT)
    store_columns(sums, planes, row, valid, STREAMS)
