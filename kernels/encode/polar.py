"""Encoder of the polar codec on the GPU (spec/codecs/polar.md)."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.octahedral_search import midpoints
from kvpack.formats.polar import Polar, angle_directions, uniform_directions
from kvpack.formats.tables import cache_per_device
from kvpack.kernels.gpu import gpu

from .angle import MAX_SUM, MIN_SUM, TILE_PAIRS, angle_and_norm
from .columns import MIN_AXIS, Term
from .kernel import Output, Quantizer, encode_rows
from .rows import MAX_PRODUCTS, find_level, flag_unless, norm_limit, norm_rule_limit, store_errors, unbiased_factor

MAX_ANGLES = 1 << 8
"""Maximum number of angles in the table of a level above the first."""

_MAX_ANGLES, _MIN_SUM, _MAX_SUM = tl.constexpr(MAX_ANGLES), tl.constexpr(MIN_SUM), tl.constexpr(MAX_SUM)


class PolarConstants(NamedTuple):
    """Compile-time constants of a polar codec: the ``bits`` of each level's angles, and the number of ``radii`` per token.

    ``limit`` is the smallest radius that overflows its dtype, ``rule`` comes from ``rows.norm_rule_limit``, and ``compiled`` is False in
    Triton's interpreter. The tables are the bounds between angles, ``[level, MAX_ANGLES]``, and the result of ``level_directions``.
    """

    bits: tuple[int, ...]
    radii: int
    limit: float
    rule: float
    compiled: bool


def encode(codec: Polar, x: torch.Tensor, output: Output) -> bool:
    """Encode ``x`` into ``output``. Returns False if the codec is not supported.

    Every level must have an even number of radii, and the head dim must not exceed ``MAX_PRODUCTS``.
    """
    radii = [codec.dim, *(level.angles for level in codec.levels)]
    if codec.dim > MAX_PRODUCTS or any(2 * half != whole for whole, half in pairwise(radii)):
        return False
    tiles = _tile_symbols(codec)
    ((name, layout),) = codec.scale_layouts(1, 1, 1).items()
    bits = tuple(level.bits for level in codec.levels)
    constants = PolarConstants(
        bits, codec.radii, norm_limit(layout.dtype), norm_rule_limit(codec.norm_rule, layout.dtype), not gpu(x.device).interpreted
    )
    return encode_rows(
        codec, x, output, Quantizer(_quantize, constants, end=_store_radii, above=_quantize_level, levels=len(bits)), _digit_terms,
        [output.streams[name]],
        [_angle_bounds(codec.tables[1:], x.device), level_directions(bits[0], codec.tables[1:], x.device)],
        coordinates=2, symbols=tiles[0], padding=sum(tiles[1:]), tokens=TILE_PAIRS // tiles[0],
    )  # fmt: skip


def _padded_pairs(codec: Polar) -> int:
    return max(MIN_AXIS, next_power_of_two(codec.dim // 2))


def _tile_symbols(codec: Polar) -> tuple[int, ...]:
    """Return the number of symbols in the tile of each level, including padding.

    It is half the number of the level below, but at least ``MIN_AXIS``.
    """
    return tuple(max(MIN_AXIS, _padded_pairs(codec) >> level) for level in range(len(codec.levels)))


def _digit_terms(codec: Polar) -> dict[str, list[Term]]:
    tiles = _tile_symbols(codec)
    streams = iter(codec.packings())
    terms: dict[str, list[Term]] = {}
    symbols: list[int] = []
    for index, level in enumerate(codec.levels):
        if index == 0 or level.bits != codec.levels[index - 1].bits:
            name, symbols = next(streams), []
        # If a level has fewer symbols than the shortest tile, they are spread over it (``_widen_tile``).
        spacing = tiles[index] // (_padded_pairs(codec) >> index)
        symbols += [sum(tiles[:index]) + symbol * spacing for symbol in range(level.angles)]
        terms[name] = [Term(0, level.bits, symbols=tuple(symbols))]
    return terms


@cache_per_device
def _angle_bounds(tables: tuple[tuple[bytes, ...], ...]) -> torch.Tensor:
    """Return the bounds between neighboring angles of each level above the first, in turns: float32 ``[level, MAX_ANGLES]``.

    The last bound is greater than all angles.
    """
    bounds = torch.full((len(tables) + 1, MAX_ANGLES), 2.0, dtype=torch.float32)
    for row, (table,) in zip(bounds, tables, strict=False):
        midpoint_list = midpoints(table)
        row[: len(midpoint_list)] = torch.tensor(midpoint_list, dtype=torch.float64) / (2 * math.pi)
    return bounds


@cache_per_device
def level_directions(bits: int, tables: tuple[tuple[bytes, ...], ...]) -> torch.Tensor:
    """Return the cosine and sine of all angles of all levels, ``[level, MAX_ANGLES, 2]``. The angles of the first level are bin centers."""
    directions = torch.zeros(len(tables) + 1, MAX_ANGLES, 2, dtype=torch.float32)
    levels = [uniform_directions(1 << bits, "cpu"), *(angle_directions(table, "cpu") for (table,) in tables)]
    for row, level in zip(directions, levels, strict=True):
        row[: len(level)] = level
    return directions


@triton.constexpr_function
def _tile_width(pairs: int) -> int:
    """Return the number of columns in the tile of a level with ``pairs`` pairs per token. Matrix products need at least 16."""
    return max(16, pairs)


@triton.jit
def _prevent_recomputation(values: tl.tensor, COMPILED: tl.constexpr) -> tl.tensor:
    """Pass ``values`` through opaque PTX, so that the compiler does not recompute them for every layout in which they are used.

    Recomputation would double the work with each level.
    """
    if COMPILED:
        values = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=1)
    return values


@triton.jit
def _widen_tile(codes: tl.tensor, PAIRS: tl.constexpr) -> tl.tensor:
    """Reshape flat ``codes`` to a tile of ``PAIRS`` pairs per token. If the tile must be wider, its other columns are 0."""
    WIDTH: tl.constexpr = _tile_width(PAIRS)
    TIMES: tl.constexpr = WIDTH // PAIRS
    if TIMES > 1:
        first = (tl.arange(0, TIMES) == 0)[None, :]
        codes = tl.where(first, codes[:, None], 0)
    return tl.reshape(codes, (codes.numel // WIDTH, WIDTH))


@triton.jit
def _project_pairs(first: tl.tensor, second: tl.tensor, code: tl.tensor, directions: tl.tensor) -> tl.tensor:
    """Return the projection of each pair (``first``, ``second``) onto the direction that its ``code`` selects."""
    return first * tl.load(directions + 2 * code) + second * tl.load(directions + 2 * code + 1)


class PolarState(NamedTuple):
    """State of one level: its radii, and the projections of their values onto the directions that they decode to.

    Projections are computed only if the norm rule or the errors need them. Above the first level, fields are flat, ``[token * pair]``.
    """

    radius: Any
    product: Any


@triton.jit
def _quantize(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, block_index: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the angle bins of all channel pairs."""
    BINS: tl.constexpr = 1 << CONSTANTS.bits[0]
    SCALE: tl.constexpr = SHAPE.scale
    polar = angle_and_norm(values[0], values[1])
    radius = polar[1] * SCALE
    total = tl.sum(radius, 1)
    flag_unless(((total > _MIN_SUM) & (total < _MAX_SUM)) | (total == 0), block.flag)
    code = tl.minimum((polar[0] * BINS).to(tl.int32), BINS - 1)
    product = radius
    if CONSTANTS.rule > 0 or SHAPE.measured:
        product = _project_pairs(values[0] * SCALE, values[1] * SCALE, code, block.tables[1])
    return (code,), PolarState(radius, product)


@triton.jit
def _quantize_level(block: tl.tuple, state: tl.tuple, LEVEL: tl.constexpr, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tuple:
    """Return the angle codes of level ``LEVEL``, which is above the first."""
    PAIRS: tl.constexpr = SHAPE.block >> LEVEL
    ANGLES: tl.constexpr = 1 << CONSTANTS.bits[LEVEL]
    COMPILED: tl.constexpr = CONSTANTS.compiled
    TOKENS: tl.constexpr = SHAPE.tokens
    pair = tl.split(tl.reshape(state.radius, (TOKENS * PAIRS, 2)))
    polar = angle_and_norm(pair[0], pair[1])
    radius = _prevent_recomputation(polar[1], COMPILED)
    code = _prevent_recomputation(find_level(polar[0], block.tables[0] + (LEVEL - 1) * _MAX_ANGLES, ANGLES), COMPILED)
    product = radius
    if CONSTANTS.rule > 0 or SHAPE.measured:
        pair = tl.split(tl.reshape(state.product, (TOKENS * PAIRS, 2)))
        product = _prevent_recomputation(_project_pairs(pair[0], pair[1], code, block.tables[1] + LEVEL * 2 * _MAX_ANGLES), COMPILED)
    return (_widen_tile(code, PAIRS),), PolarState(radius, product)


@triton.jit
def _store_radii(block: tl.tuple, state: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> None:
    """Store the radii of the last level. If the codec requests it, apply the norm_rule=unbiased correction."""
    LEVELS: tl.constexpr = len(CONSTANTS.bits)
    TOKENS: tl.constexpr = SHAPE.tokens
    WIDTH: tl.constexpr = SHAPE.block >> (LEVELS - 1)
    RADII: tl.constexpr = CONSTANTS.radii
    LIMIT: tl.constexpr = CONSTANTS.limit
    RULE: tl.constexpr = CONSTANTS.rule
    radius = tl.reshape(state.radius, (TOKENS, WIDTH))
    flag_unless(radius < LIMIT, block.flag)
    index = tl.arange(0, WIDTH)[None, :]
    if RULE > 0 or SHAPE.measured:
        length = radius
        product = tl.reshape(state.product, (TOKENS, WIDTH)) / tl.where(radius > 0, radius, 1.0)
        if RULE > 0:
            radius = unbiased_factor(length, 1.0, product, 1.0, LIMIT, RULE)
        squares = tl.sum(length * length, 1)[:, None]
        store_errors(block, 1.0, squares, tl.sum(length * product * radius, 1)[:, None], tl.sum(radius * radius, 1)[:, None], SHAPE)
    radii = block.stored[0]
    stored = tl.where(radius < LIMIT, radius, 0.0).to(radii.dtype.element_ty)
    tl.store(radii + block.row * RADII + index, stored, block.valid & (index < RADII))
