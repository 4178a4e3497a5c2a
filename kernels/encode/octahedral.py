"""Encode octahedral on the GPU (spec/codecs/octahedral.md); ``formats/octahedral.py`` is the oracle.

Triplets are three tiles of coordinates, straight from the rotation. The nearest direction is the best of the four whose coordinates enclose
the triplet's, which is the result of the local searches in ``formats/octahedral_search.py``.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from kvpack.formats.octahedral import norm_extends_index

from .columns import Term
from .kernel import Quantizer, encode_rows
from .norms import Norms, begin_norms, end_norms, norms_for, with_decoded
from .rows import block_tokens, bounds_of, enclosing_levels, entry_of, level_of, values_of

if TYPE_CHECKING:
    import torch

    from kvpack.formats.octahedral import Octahedral

    from .kernel import Output

BLOCK_TOKENS = 32
BLOCK_TRIPLETS = 16

_MAX_LEVELS = 64
"""Levels per coordinate, at most: with more, formats/ searches only the nine directions around a triplet's own."""


class OctahedralConstants(NamedTuple):
    """``levels`` of a coordinate, and ``norm_levels`` of the norms of ``triplets``. The tables are the bounds and entries of both.

    ``nearest``: directions are rounded by coordinates; ``length``: norms are triplet norms instead of their projections.
    """

    norms: Norms
    triplets: int
    levels: int
    norm_levels: int
    nearest: bool
    length: bool


def encode(codec: Octahedral, x: torch.Tensor, output: Output) -> bool:
    """Fill ``output`` from ``x``. Returns False, and does nothing, for codecs that the kernel does not support."""
    levels = 1 << codec.b_dir - 1
    if codec.rounding == "full" or (codec.rounding == "local3x3" and levels > _MAX_LEVELS):
        return False
    tables = [find(table, x.device) for table in (codec.direction_table, codec.norm_table) for find in (bounds_of, values_of)]
    scalar = codec.rounding == "scalar"
    norms = norms_for(codec, tables, x.device)
    constants = OctahedralConstants(norms, codec.triplets, levels, 1 << codec.b_norm, scalar or levels == 1, scalar)
    return encode_rows(
        codec, x, output, Quantizer(_quantize, constants, begin_norms, end_norms), _terms, [output.streams["norm"]], tables,
        coordinates=3, symbols=-(-codec.triplets // BLOCK_TRIPLETS) * BLOCK_TRIPLETS, block=BLOCK_TRIPLETS,
        tokens=block_tokens(x, BLOCK_TOKENS),
    )  # fmt: skip


def _terms(codec: Octahedral) -> dict[str, list[Term]]:
    # The quantizer's digits: the direction in its quarter, the two signs, the norm.
    direction, norm = 2 * (codec.b_dir - 1), codec.b_norm
    with_index = norm_extends_index(codec.b_dir, norm)
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
    return {name: [term._replace(symbols=triplets) for term in stream] for name, stream in terms.items()}


@triton.jit
def _projection(xi: tl.tensor, eta: tl.tensor, x: tl.tensor, y: tl.tensor, z: tl.tensor) -> tl.tensor:
    """Return the scalar product of (x, y, z) and the unit direction of octahedral coordinates (OCTOPUS Eq. 6)."""
    third = 1.0 - xi - eta
    first = tl.where(third < 0, 1.0 - eta, xi)
    second = tl.where(third < 0, 1.0 - xi, eta)
    return (first * x + second * y + third * z) * tl.rsqrt(first * first + second * second + third * third)


@triton.jit
def _quantize(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, number: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the directions, signs and norms of a block of triplets."""
    LEVELS: tl.constexpr = CONSTANTS.levels
    NORM_LEVELS: tl.constexpr = CONSTANTS.norm_levels
    BLOCK: tl.constexpr = SHAPE.block
    magnitudes = block.tables[1]
    w = values[2]
    sign = tl.where(values[0] < 0, 1, 0) + tl.where(values[1] < 0, 2, 0)
    u = tl.abs(values[0])
    v = tl.abs(values[1])
    # OCTOPUS Eq. 5; for w < 0 the fold 1 - v / l equals (u + |w|) / l.
    folded = tl.maximum(-w, 0.0)
    whole = 1.0 / tl.maximum(u + v + tl.abs(w), 1e-30)
    xi = (u + folded) * whole
    eta = (v + folded) * whole
    if not CONSTANTS.nearest:
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
        column = level_of(xi, block.tables[0], LEVELS)
        line = level_of(eta, block.tables[0], LEVELS)
        index = column + line * LEVELS
        best = _projection(tl.load(magnitudes + column), tl.load(magnitudes + line), u, v, w)
        radius = best
        if CONSTANTS.length:
            radius = tl.sqrt(u * u + v * v + w * w)
    level = level_of(radius * state.factor, block.tables[2], NORM_LEVELS)
    if CONSTANTS.norms.rule > 0:
        found = entry_of(level, block.tables[3], NORM_LEVELS)
        found = tl.where(number * BLOCK + tl.arange(0, BLOCK)[None, :] < CONSTANTS.triplets, found, 0.0)
        state = with_decoded(state, best * state.factor, found)
    return (index, sign, level), state
