"""Encode polar on the GPU (spec/codecs/polar.md); ``formats/polar.py`` is the oracle."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.octahedral_search import midpoints
from kvpack.formats.polar import angle_directions, uniform_directions
from kvpack.formats.tables import kept_on_device
from kvpack.kernels.bitpack.columns import launch, tile_origin

from .angle import LARGEST_SUM, SMALLEST_SUM, TILE_PAIRS, turns
from .columns import SMALLEST_AXIS, WARPS, Plan, Term, add_digits, empty_columns, plan_of, store_columns
from .rows import (
    MAX_PRODUCTS,
    all_moved,
    component,
    components,
    flag_unless,
    input_of,
    level_of,
    limit_of,
    load_rows,
    moved,
    origin_of,
    rule_of,
    scale_of,
    unbiased_factor,
)

if TYPE_CHECKING:
    from kvpack.formats.polar import Polar

    from .rows import Origins

MAX_ANGLES = 1 << 8
"""Angles in the table of a level above the first, at most."""


def encode(
    codec: Polar,
    x: torch.Tensor,
    streams: dict[str, torch.Tensor],
    planes: tuple[torch.Tensor, ...],
    flag: torch.Tensor,
    origins: Origins | None = None,
) -> bool:
    """Fill ``streams``, whose code ``planes`` are given; return False, and do nothing, for codecs that the kernel does not support.

    It does not take a level with an odd number of radii, the last of which has no partner, nor dims of more than one product.
    """
    plan = _plan(codec, x.device) if codec.dim <= MAX_PRODUCTS else None
    if plan is None:
        return False
    pairs = _first_tile(codec)
    tokens = TILE_PAIRS // pairs
    arguments, constants = input_of(x, origins)
    ((name, layout),) = codec.scales(1, 1, 1).items()
    launch(
        _encode, x.shape[0] * x.shape[1] * -(-x.shape[2] // tokens), x.device,
        *arguments, components(codec.rotation, 2, pairs, pairs, x), _bounds(codec.tables[1:], x.device),
        directions_of(codec.levels[0].bits, codec.tables[1:], x.device), plan.places, planes, streams[name], flag,
        **constants, PAIRS=pairs, BITS=tuple(level.bits for level in codec.levels), RADII=codec.radii, SYMBOLS=sum(_tiles(codec)),
        MOST=MAX_ANGLES, SCALE=scale_of(codec.rotation), LIMIT=limit_of(layout.dtype),
        RULE=rule_of(codec.norm_rule, layout.dtype), SMALLEST=SMALLEST_SUM, LARGEST=LARGEST_SUM, STREAMS=plan.streams,
        COMPILED=x.device.type == "cuda", BLOCK_TOKENS=tokens, warps=WARPS, fusion=True,
    )  # fmt: skip
    return True


def _first_tile(codec: Polar) -> int:
    """Pairs of channels of a token, padding included."""
    return max(SMALLEST_AXIS, next_power_of_two(codec.dim // 2))


def _tiles(codec: Polar) -> tuple[int, ...]:
    """Return the symbols of the tile of each level, padding included: half those of the level below, down to the minimum of the matrix
    units.
    """
    return tuple(max(SMALLEST_AXIS, _first_tile(codec) >> level) for level in range(len(codec.levels)))


@lru_cache(maxsize=64)
def _plan(codec: Polar, device: torch.device) -> Plan | None:
    radii, tiles = codec.dim, _tiles(codec)
    streams = iter(codec.packings())
    terms: dict[str, list[Term]] = {}
    symbols: list[int] = []
    for number, level in enumerate(codec.levels):
        if 2 * level.angles != radii:
            return None
        radii = level.angles
        if number == 0 or level.bits != codec.levels[number - 1].bits:
            name, symbols = next(streams), []
        # Where a level has fewer symbols than the shortest tile, they are apart in it (``_widened``).
        apart = tiles[number] // (_first_tile(codec) >> number)
        symbols += [sum(tiles[:number]) + symbol * apart for symbol in range(level.angles)]
        terms[name] = [Term(0, level.bits, symbols=tuple(symbols))]
    return plan_of(codec, terms, sum(tiles), device)


@kept_on_device
def _bounds(tables: tuple[tuple[bytes, ...], ...]) -> torch.Tensor:
    """The bounds between neighbors in the table of each level above the first, in turns, ``[level, MAX_ANGLES]``, then one above all."""
    bounds = torch.full((len(tables) + 1, MAX_ANGLES), 2.0, dtype=torch.float32)
    for row, (table,) in zip(bounds, tables, strict=False):
        between = midpoints(table)
        row[: len(between)] = torch.tensor(between, dtype=torch.float64) / (2 * math.pi)
    return bounds


@kept_on_device
def directions_of(bits: int, tables: tuple[tuple[bytes, ...], ...]) -> torch.Tensor:
    """(cos, sin) of the angles of every level, ``[level, MAX_ANGLES, 2]``; those of the first level are bins' centers."""
    directions = torch.zeros(len(tables) + 1, MAX_ANGLES, 2, dtype=torch.float32)
    found = [uniform_directions(1 << bits, "cpu"), *(angle_directions(table, "cpu") for (table,) in tables)]
    for row, level in zip(directions, found, strict=True):
        row[: len(level)] = level
    return directions


@triton.constexpr_function
def _width(pairs: int) -> int:
    """Return the columns of the tile of a level with this many pairs: at least the shortest axis of the matrix units."""
    return max(16, pairs)


@triton.jit
def _computed_once(values: tl.tensor, COMPILED: tl.constexpr) -> tl.tensor:
    """``values``, which the compiler does not compute again for every layout that they are wanted in: each level would double that."""
    if COMPILED:
        values = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=1)
    return values


@triton.jit
def _widened(codes: tl.tensor, PAIRS: tl.constexpr) -> tl.tensor:
    """``codes`` of tokens of ``PAIRS`` pairs each as a tile, in the first of every few columns where it has more."""
    WIDTH: tl.constexpr = _width(PAIRS)
    TIMES: tl.constexpr = WIDTH // PAIRS
    if TIMES > 1:
        first = (tl.arange(0, TIMES) == 0)[None, :]
        codes = tl.where(first, codes[:, None], 0)
    return tl.reshape(codes, (codes.numel // WIDTH, WIDTH))


@triton.jit
def _projected(first: tl.tensor, second: tl.tensor, code: tl.tensor, directions: tl.tensor) -> tl.tensor:
    """The products of pairs with the directions of their codes."""
    return first * tl.load(directions + 2 * code) + second * tl.load(directions + 2 * code + 1)


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
    bounds: tl.tensor,
    directions: tl.tensor,
    places: tl.tensor,
    planes: tl.tuple,
    radii: tl.tensor,
    flag: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    OPERAND: tl.constexpr,
    PAIRS: tl.constexpr,
    BITS: tl.constexpr,
    RADII: tl.constexpr,
    SYMBOLS: tl.constexpr,
    MOST: tl.constexpr,
    SCALE: tl.constexpr,
    LIMIT: tl.constexpr,
    RULE: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    ALIGNED: tl.constexpr,
    STREAMS: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Encode ``BLOCK_TOKENS`` tokens of one head.

    ``x`` is ``[batch, kv_head, token, dim]`` of any strides; ``token`` and ``row`` (the token's number over all heads) are
    ``[token, 1]``, and tiles are ``[token, pair]``.
    Above the first level they are flat, ``[token * pair]``, until codes are put in tiles again (``_widened``). ``bounds`` is
    ``[level, MOST]``, ``directions`` ``[level, MOST, 2]`` and ``radii`` ``[batch, kv_head, token, RADII]``.
    """
    batch, head, begin = tile_origin(heads, tokens, BLOCK_TOKENS)
    if origins is not None:
        origin = origin_of(origins, batch, ALIGNED)
        x += origin.input
        planes = all_moved(planes, origin.streams)
        radii = moved(radii, origin.streams)
        flag += origin.flag
        batch = batch * 0
    token = (begin + tl.arange(0, BLOCK_TOKENS))[:, None]
    valid = token < tokens
    row = (batch * heads + head) * tokens + token
    rows = load_rows(x, batch_stride, head_stride, token_stride, channel_stride, batch, head, token, valid, DIM, PADDED_DIM)
    first = component(rows, matrix, 0, PAIRS, PADDED_DIM, PARTS, OPERAND)
    second = component(rows, matrix, 1, PAIRS, PADDED_DIM, PARTS, OPERAND)
    found = turns(first, second)
    radius = found[1] * SCALE
    total = tl.sum(radius, 1)
    flag_unless(((total > SMALLEST) & (total < LARGEST)) | (total == 0), flag)
    bins: tl.constexpr = 1 << BITS[0]
    digits = (tl.minimum((found[0] * bins).to(tl.int32), bins - 1),)
    if RULE > 0:
        # The products of the values below each radius with their direction as it decodes.
        product = _projected(first * SCALE, second * SCALE, digits[0], directions)
    sums = empty_columns(STREAMS, BLOCK_TOKENS)
    sums = add_digits(sums, digits, places, 0, PAIRS, SYMBOLS, STREAMS)
    at = PAIRS
    for level in tl.static_range(1, len(BITS)):
        pair = tl.split(tl.reshape(radius, (BLOCK_TOKENS * (PAIRS >> level), 2)))
        found = turns(pair[0], pair[1])
        radius = _computed_once(found[1], COMPILED)
        code = _computed_once(level_of(found[0], bounds + (level - 1) * MOST, 1 << BITS[level]), COMPILED)
        if RULE > 0:
            pair = tl.split(tl.reshape(product, (BLOCK_TOKENS * (PAIRS >> level), 2)))
            product = _computed_once(_projected(pair[0], pair[1], code, directions + level * 2 * MOST), COMPILED)
        digits = (_widened(code, PAIRS >> level),)
        sums = add_digits(sums, digits, places, at, _width(PAIRS >> level), SYMBOLS, STREAMS)
        at += _width(PAIRS >> level)
    radius = tl.reshape(radius, (BLOCK_TOKENS, PAIRS >> (len(BITS) - 1)))
    flag_unless(radius < LIMIT, flag)
    if RULE > 0:
        product = tl.reshape(product, (BLOCK_TOKENS, PAIRS >> (len(BITS) - 1))) / tl.where(radius > 0, radius, 1.0)
        radius = unbiased_factor(radius, 1.0, product, 1.0, LIMIT, RULE)
    number = tl.arange(0, PAIRS >> (len(BITS) - 1))[None, :]
    stored = tl.where(radius < LIMIT, radius, 0.0).to(radii.dtype.element_ty)
    tl.store(radii + row * RADII + number, stored, valid & (number < RADII))
    store_columns(sums, planes, row, valid, STREAMS)
