"""Decode packed rows of polar to values in one pass (spec/codecs/polar.md); ``formats/polar.py`` is the oracle."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.bitpack.columns import constant_at
from kvpack.kernels.encode.polar import MAX_ANGLES, directions_of

from .digits import CodeStream, code_streams, load_digit
from .kernel import Decoder, prepare_rows
from .rows import as_float32

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvpack.formats.polar import Polar

    from .rows import Packed, Pages, Prepared

_MOST = tl.constexpr(MAX_ANGLES)


class LevelSymbols(NamedTuple):
    """Angles of one level: the number of their code stream, and the index of the first one in it."""

    stream: int
    first: int


class PolarConstants(NamedTuple):
    """The packings of codes, the angles of each level, the radii of a token, and the number of their stream."""

    codes: tuple[CodeStream, ...]
    levels: tuple[LevelSymbols, ...]
    radii: int
    stream: int


def prepare(codec: Polar, packed: Sequence[Packed], out: torch.Tensor, rotated: bool, pages: Pages | None = None) -> Prepared | None:
    """Run ``prepare_rows`` for polar; None for a level with an unequal pair or an odd number of radii.

    In float32 the values equal those of ``Polar.decode_frame``, bit for bit.
    """
    levels = _levels(codec)
    if levels is None:
        return None
    constants = PolarConstants(code_streams(codec), levels, codec.radii, len(codec.row_layouts) - 1)
    directions = directions_of(codec.levels[0].bits, codec.tables[1:], out.device)
    return prepare_rows(codec, packed, out, rotated, pages, Decoder(_values, constants), directions, least_channels=2)


def _levels(codec: Polar) -> tuple[LevelSymbols, ...] | None:
    """Return the levels, or None if some level does not pair all radii equally."""
    result, radii = [], codec.dim
    for number, run in enumerate(codec.stream_levels.values()):
        first = 0
        for level in run:
            if 2 * level.angles != radii or len(level.pairs) > 1:
                return None
            result.append(LevelSymbols(number, first))
            first, radii = first + level.angles, level.angles
    return tuple(result)


@triton.jit
def _values(tile: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tensor:
    """Return radii times their directions; ``table`` is ``[level, MAX_ANGLES, 2]``."""
    CODES: tl.constexpr = CONSTANTS.codes
    LEVELS: tl.constexpr = CONSTANTS.levels
    mask = (tile.token < tile.count) & (tile.channel < SHAPE.dim)
    value = as_float32(tl.load(tile.streams[CONSTANTS.stream] + (tile.token * CONSTANTS.radii + (tile.channel >> len(LEVELS))), mask, 0))
    # From the radii down, as formats/ multiplies.
    for level in tl.static_range(len(LEVELS) - 1, -1, -1):
        symbol = constant_at(LEVELS, level, 1) + (tile.channel >> (level + 1))
        code = load_digit(tile.streams, tile.token, symbol, mask, constant_at(CODES, constant_at(LEVELS, level, 0)), 0)
        value = value * tl.load(tile.table + ((level * _MOST + code) * 2 + (tile.channel >> level & 1)), mask, 0.0)
    return value
