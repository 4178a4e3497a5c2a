"""Decoder of the polar codec for ``kernel`` (spec/codecs/polar.md)."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.polar import Polar
from kvpack.kernels.bitpack.columns import constant_at
from kvpack.kernels.encode.polar import MAX_ANGLES, level_directions

from .digits import CodeStream, code_streams, load_digit
from .kernel import TileDecoder, prepare_rows
from .rows import EnginePages, PackedPart, PreparedDecode, as_float32

_MAX_ANGLES = tl.constexpr(MAX_ANGLES)


class LevelLocation(NamedTuple):
    """Location of one level's angles: the index of their code stream, and the index of the level's first angle in that stream."""

    stream: int
    first: int


class PolarConstants(NamedTuple):
    """Compile-time constants of a polar codec.

    ``codes`` are the code packings, and ``levels`` are the locations of each level's angles. ``radii`` is the number of radii per token, in
    stream ``stream``.
    """

    codes: tuple[CodeStream, ...]
    levels: tuple[LevelLocation, ...]
    radii: int
    stream: int


def prepare(
    codec: Polar, packed: Sequence[PackedPart], out: torch.Tensor, rotated: bool, pages: EnginePages | None = None
) -> PreparedDecode | None:
    """Prepare the launch that decodes the polar codec, as ``decode.prepare`` does. Returns None if a level has an unpaired radius.

    Float32 values equal those of ``Polar.decode_frame`` bit for bit.
    """
    levels = _level_locations(codec)
    if levels is None:
        return None
    constants = PolarConstants(code_streams(codec), levels, codec.radii, len(codec.row_layouts) - 1)
    directions = level_directions(codec.levels[0].bits, codec.tables[1:], out.device)
    return prepare_rows(codec, packed, out, rotated, pages, TileDecoder(_decode_polar, constants), directions, min_channels=2)


def _level_locations(codec: Polar) -> tuple[LevelLocation, ...] | None:
    """Return the ``LevelLocation`` of each level, or None if some level does not pair all of its radii."""
    result, radii = [], codec.dim
    for stream, levels in enumerate(codec.stream_levels.values()):
        first = 0
        for level in levels:
            if 2 * level.angles != radii or len(level.pairs) > 1:
                return None
            result.append(LevelLocation(stream, first))
            first, radii = first + level.angles, level.angles
    return tuple(result)


@triton.jit
def _decode_polar(tile: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tensor:
    """Decode a ``RowTile`` of the polar codec to float32 ``[token, channel]``. ``table`` is ``[level, MAX_ANGLES, 2]``."""
    CODES: tl.constexpr = CONSTANTS.codes
    LEVELS: tl.constexpr = CONSTANTS.levels
    mask = (tile.token < tile.count) & (tile.channel < SHAPE.dim)
    value = as_float32(tl.load(tile.streams[CONSTANTS.stream] + (tile.token * CONSTANTS.radii + (tile.channel >> len(LEVELS))), mask, 0))
    # Multiply from the top level down, in the same order as ``formats/``.
    for level in tl.static_range(len(LEVELS) - 1, -1, -1):
        symbol = constant_at(LEVELS, level, 1) + (tile.channel >> (level + 1))
        code = load_digit(tile.streams, tile.token, symbol, mask, constant_at(CODES, constant_at(LEVELS, level, 0)), 0)
        value = value * tl.load(tile.table + ((level * _MAX_ANGLES + code) * 2 + (tile.channel >> level & 1)), mask, 0.0)
    return value
