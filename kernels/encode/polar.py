"""Encode polar on the GPU (spec/codecs/polar.md); ``formats/polar.py`` is the oracle."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.octahedral_search import midpoints
from kvpack.formats.polar import angle_directions, uniform_directions
from kvpack.formats.tables import cache_per_device

from .angle import LARGEST_SUM, SMALLEST_SUM, TILE_PAIRS, turns
from .columns import SMALLEST_AXIS, Term
from .kernel import Quantizer, encode_rows
from .rows import MAX_PRODUCTS, flag_unless, level_of, limit_of, rule_of, unbiased_factor

if TYPE_CHECKING:
    from kvpack.formats.polar import Polar

    from .kernel import Output

MAX_ANGLES = 1 << 8
"""Angles in the table of a level above the first, at most."""

_MOST, _SMALLEST, _LARGEST = tl.constexpr(MAX_ANGLES), tl.constexpr(SMALLEST_SUM), tl.constexpr(LARGEST_SUM)


class PolarConstants(NamedTuple):
    """The bits of each level's angles, the radii of a token, the least radius that does not fit, and the ``rule`` of ``rows.rule_of``.

    The tables are the bounds ``[level, MAX_ANGLES]`` and ``directions_of`` the levels. ``compiled``: for a device.
    """

    bits: tuple[int, ...]
    radii: int
    limit: float
    rule: float
    compiled: bool


def encode(codec: Polar, x: torch.Tensor, output: Output) -> bool:
    """Fill ``output`` from ``x``. Returns False, and does nothing, for codecs that the kernel does not support.

    It does not support a level with an odd number of radii, the last of which has no partner, or dims that need more than one product.
    """
    radii = [codec.dim, *(level.angles for level in codec.levels)]
    if codec.dim > MAX_PRODUCTS or any(2 * half != whole for whole, half in pairwise(radii)):
        return False
    tiles = _tiles(codec)
    ((name, layout),) = codec.scales(1, 1, 1).items()
    bits = tuple(level.bits for level in codec.levels)
    constants = PolarConstants(bits, codec.radii, limit_of(layout.dtype), rule_of(codec.norm_rule, layout.dtype), x.device.type == "cuda")
    return encode_rows(
        codec, x, output, Quantizer(_quantize, constants, end=_end, above=_above, levels=len(bits)), _terms, [output.streams[name]],
        [_bounds(codec.tables[1:], x.device), directions_of(bits[0], codec.tables[1:], x.device)], coordinates=2, symbols=tiles[0],
        padding=sum(tiles[1:]), tokens=TILE_PAIRS // tiles[0],
    )  # fmt: skip


def _first_tile(codec: Polar) -> int:
    """Return the number of channel pairs per token, including padding."""
    return max(SMALLEST_AXIS, next_power_of_two(codec.dim // 2))


def _tiles(codec: Polar) -> tuple[int, ...]:
    """Return the symbols in each level's tile, including padding.

    That is half those of the level below, down to the minimum of the matrix units.
    """
    return tuple(max(SMALLEST_AXIS, _first_tile(codec) >> level) for level in range(len(codec.levels)))


def _terms(codec: Polar) -> dict[str, list[Term]]:
    tiles = _tiles(codec)
    streams = iter(codec.packings())
    terms: dict[str, list[Term]] = {}
    symbols: list[int] = []
    for number, level in enumerate(codec.levels):
        if number == 0 or level.bits != codec.levels[number - 1].bits:
            name, symbols = next(streams), []
        # Where a level has fewer symbols than the shortest tile, they are apart in it (``_widened``).
        apart = tiles[number] // (_first_tile(codec) >> number)
        symbols += [sum(tiles[:number]) + symbol * apart for symbol in range(level.angles)]
        terms[name] = [Term(0, level.bits, symbols=tuple(symbols))]
    return terms


@cache_per_device
def _bounds(tables: tuple[tuple[bytes, ...], ...]) -> torch.Tensor:
    """Return the bounds between neighbors in each level's table above the first, in turns, ``[level, MAX_ANGLES]``.

    The last one is above all angles.
    """
    bounds = torch.full((len(tables) + 1, MAX_ANGLES), 2.0, dtype=torch.float32)
    for row, (table,) in zip(bounds, tables, strict=False):
        between = midpoints(table)
        row[: len(between)] = torch.tensor(between, dtype=torch.float64) / (2 * math.pi)
    return bounds


@cache_per_device
def directions_of(bits: int, tables: tuple[tuple[bytes, ...], ...]) -> torch.Tensor:
    """Return (cos, sin) of the angles of every level, ``[level, MAX_ANGLES, 2]``; those of the first level are the bin centers."""
    directions = torch.zeros(len(tables) + 1, MAX_ANGLES, 2, dtype=torch.float32)
    result = [uniform_directions(1 << bits, "cpu"), *(angle_directions(table, "cpu") for (table,) in tables)]
    for row, level in zip(directions, result, strict=True):
        row[: len(level)] = level
    return directions


@triton.constexpr_function
def _width(pairs: int) -> int:
    """Return the columns of the tile for a level with this many pairs: at least the shortest axis of the matrix units."""
    return max(16, pairs)


@triton.jit
def _computed_once(values: tl.tensor, COMPILED: tl.constexpr) -> tl.tensor:
    """Keep the compiler from recomputing ``values`` for every layout in which they are used.

    Otherwise each level would double the work.
    """
    if COMPILED:
        values = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=1)
    return values


@triton.jit
def _widened(codes: tl.tensor, PAIRS: tl.constexpr) -> tl.tensor:
    """Reshape ``codes`` of tokens with ``PAIRS`` pairs each to a tile; codes go to the first of every few columns if it has more."""
    WIDTH: tl.constexpr = _width(PAIRS)
    TIMES: tl.constexpr = WIDTH // PAIRS
    if TIMES > 1:
        first = (tl.arange(0, TIMES) == 0)[None, :]
        codes = tl.where(first, codes[:, None], 0)
    return tl.reshape(codes, (codes.numel // WIDTH, WIDTH))


@triton.jit
def _projected(first: tl.tensor, second: tl.tensor, code: tl.tensor, directions: tl.tensor) -> tl.tensor:
    """Return the products of pairs with the directions of their codes."""
    return first * tl.load(directions + 2 * code) + second * tl.load(directions + 2 * code + 1)


class PolarState(NamedTuple):
    """The radii of a level, and the products of the values below each radius with their decoded direction (zeros if no rule needs them).

    Above the first level they are flat, ``[token * pair]``, until codes are put in tiles again (``_widened``).
    """

    radius: Any
    product: Any


@triton.jit
def _quantize(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, number: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the bins of a token's pairs of values."""
    BINS: tl.constexpr = 1 << CONSTANTS.bits[0]
    SCALE: tl.constexpr = SHAPE.scale
    found = turns(values[0], values[1])
    radius = found[1] * SCALE
    total = tl.sum(radius, 1)
    flag_unless(((total > _SMALLEST) & (total < _LARGEST)) | (total == 0), block.flag)
    code = tl.minimum((found[0] * BINS).to(tl.int32), BINS - 1)
    product = radius
    if CONSTANTS.rule > 0:
        product = _projected(values[0] * SCALE, values[1] * SCALE, code, block.tables[1])
    return (code,), PolarState(radius, product)


@triton.jit
def _above(block: tl.tuple, state: tl.tuple, LEVEL: tl.constexpr, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tuple:
    """Return the codes of a level's pairs of radii."""
    PAIRS: tl.constexpr = SHAPE.block >> LEVEL
    ANGLES: tl.constexpr = 1 << CONSTANTS.bits[LEVEL]
    COMPILED: tl.constexpr = CONSTANTS.compiled
    TOKENS: tl.constexpr = SHAPE.tokens
    pair = tl.split(tl.reshape(state.radius, (TOKENS * PAIRS, 2)))
    found = turns(pair[0], pair[1])
    radius = _computed_once(found[1], COMPILED)
    code = _computed_once(level_of(found[0], block.tables[0] + (LEVEL - 1) * _MOST, ANGLES), COMPILED)
    product = radius
    if CONSTANTS.rule > 0:
        pair = tl.split(tl.reshape(state.product, (TOKENS * PAIRS, 2)))
        product = _computed_once(_projected(pair[0], pair[1], code, block.tables[1] + LEVEL * 2 * _MOST), COMPILED)
    return (_widened(code, PAIRS),), PolarState(radius, product)


@triton.jit
def _end(block: tl.tuple, state: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> None:
    """Store the radii of the last level."""
    LEVELS: tl.constexpr = len(CONSTANTS.bits)
    TOKENS: tl.constexpr = SHAPE.tokens
    WIDTH: tl.constexpr = SHAPE.block >> (LEVELS - 1)
    RADII: tl.constexpr = CONSTANTS.radii
    LIMIT: tl.constexpr = CONSTANTS.limit
    RULE: tl.constexpr = CONSTANTS.rule
    radius = tl.reshape(state.radius, (TOKENS, WIDTH))
    flag_unless(radius < LIMIT, block.flag)
    if RULE > 0:
        product = tl.reshape(state.product, (TOKENS, WIDTH)) / tl.where(radius > 0, radius, 1.0)
        radius = unbiased_factor(radius, 1.0, product, 1.0, LIMIT, RULE)
    number = tl.arange(0, WIDTH)[None, :]
    radii = block.stored[0]
    stored = tl.where(radius < LIMIT, radius, 0.0).to(radii.dtype.element_ty)
    tl.store(radii + block.row * RADII + number, stored, block.valid & (number < RADII))
