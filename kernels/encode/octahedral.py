"""Encoder of the octahedral codec on the GPU (spec/codecs/octahedral.md).

Triplets are three tiles of coordinates, which the rotation computes directly. The nearest direction is the best of the four whose
coordinates enclose the triplet's, which the local searches in ``formats/octahedral_search.py`` also find.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.octahedral import Octahedral, norm_extends_index

from .columns import Term
from .kernel import Output, Quantizer, encode_rows
from .norms import NormConstants, add_decoded, begin_norms, create_norms, finish_norms
from .rows import block_tokens, enclosing_levels, find_level, look_up_entry, table_bounds, table_values

BLOCK_TOKENS = 32
BLOCK_TRIPLETS = 16

_MAX_LEVELS = 64
"""Maximum levels per coordinate. With more levels, ``formats/`` searches only nine directions, and may find a different direction."""


class OctahedralConstants(NamedTuple):
    """Compile-time constants of an octahedral codec: ``levels`` per coordinate, and ``norm_levels`` for the norms of ``triplets`` triplets.

    The tables contain the bounds and entries of both. With ``nearest``, each coordinate is rounded separately. With ``length``, the norms
    of triplets are stored, otherwise their projections onto the direction.
    """

    norms: NormConstants
    triplets: int
    levels: int
    norm_levels: int
    nearest: bool
    length: bool


def encode(codec: Octahedral, x: torch.Tensor, output: Output) -> bool:
    """Encode ``x`` into ``output``. Returns False if the codec is not supported."""
    levels = 1 << codec.b_dir - 1
    if codec.rounding == "full" or (codec.rounding == "local3x3" and levels > _MAX_LEVELS):
        return False
    tables = [find(table, x.device) for table in (codec.direction_table, codec.norm_table) for find in (table_bounds, table_values)]
    scalar = codec.rounding == "scalar"
    norms = create_norms(codec, tables, x.device)
    constants = OctahedralConstants(norms, codec.triplets, levels, 1 << codec.b_norm, scalar or levels == 1, scalar)
    return encode_rows(
        codec, x, output, Quantizer(_quantize, constants, begin_norms, finish_norms), _digit_terms, [output.streams["norm"]], tables,
        coordinates=3, symbols=-(-codec.triplets // BLOCK_TRIPLETS) * BLOCK_TRIPLETS, block=BLOCK_TRIPLETS,
        tokens=block_tokens(x, BLOCK_TOKENS),
    )  # fmt: skip


def _digit_terms(codec: Octahedral) -> dict[str, list[Term]]:
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
    # Padding symbols are not stored.
    triplets = tuple(range(codec.triplets))
    return {name: [term._replace(symbols=triplets) for term in stream] for name, stream in terms.items()}


@triton.jit
def _projection(xi: tl.tensor, eta: tl.tensor, x: tl.tensor, y: tl.tensor, z: tl.tensor) -> tl.tensor:
    """Return the dot product of (x, y, z) and the unit direction with octahedral coordinates (xi, eta) (OCTOPUS Eq. 6)."""
    third = 1.0 - xi - eta
    first = tl.where(third < 0, 1.0 - eta, xi)
    second = tl.where(third < 0, 1.0 - xi, eta)
    return (first * x + second * y + third * z) * tl.rsqrt(first * first + second * second + third * third)


@triton.jit
def _quantize(
    values: tl.tuple, block: tl.tuple, state: tl.tuple, block_index: tl.tensor, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return the direction indices, signs and norm codes of a block of triplets."""
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
    inverse_sum = 1.0 / tl.maximum(u + v + tl.abs(w), 1e-30)
    xi = (u + folded) * inverse_sum
    eta = (v + folded) * inverse_sum
    if not CONSTANTS.nearest:
        column, left, right = enclosing_levels(xi, magnitudes, LEVELS)
        row, below, above = enclosing_levels(eta, magnitudes, LEVELS)
        best = _projection(left, below, u, v, w)
        candidate = _projection(right, below, u, v, w)
        index = tl.where(candidate > best, 1, 0)
        best = tl.maximum(best, candidate)
        candidate = _projection(left, above, u, v, w)
        index = tl.where(candidate > best, LEVELS, index)
        best = tl.maximum(best, candidate)
        candidate = _projection(right, above, u, v, w)
        index = tl.where(candidate > best, LEVELS + 1, index) + column + row * LEVELS
        best = tl.maximum(best, candidate)
        radius = best
    else:
        column = find_level(xi, block.tables[0], LEVELS)
        row = find_level(eta, block.tables[0], LEVELS)
        index = column + row * LEVELS
        best = _projection(tl.load(magnitudes + column), tl.load(magnitudes + row), u, v, w)
        radius = best
        if CONSTANTS.length:
            radius = tl.sqrt(u * u + v * v + w * w)
    level = find_level(radius * state.factor, block.tables[2], NORM_LEVELS)
    if CONSTANTS.norms.rule > 0 or SHAPE.measured:
        decoded = look_up_entry(level, block.tables[3], NORM_LEVELS)
        decoded = tl.where(block_index * BLOCK + tl.arange(0, BLOCK)[None, :] < CONSTANTS.triplets, decoded, 0.0)
        state = add_decoded(state, best * state.factor, decoded)
    return (index, sign, level), state
