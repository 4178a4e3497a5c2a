"""Which angles of polar's tree a step of a tile looks up, and the table that it looks them up in.

A step is as many pairs of channels as a tile has. Where the first level fills whole fields of a stream, they are those of some columns in
all these fields: what lies above them is then in few columns as well, and two neighbouring fields of a column are one index.
"""

# Triton has no types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton

from kvpack.kernels.words.row_tiles import PAIRS_OF_A_TILE

if TYPE_CHECKING:
    from kvpack.formats.polar import Polar

MOST_BITS_TOGETHER = 6
"""Of two angles of a level for which the table has an entry."""

SCALES = 1 << 12
"""That are tried for the table of a level."""


def blocks_of_step(angles: int, width: int) -> int:
    """Blocks of neighbouring ones of the first level's ``angles`` in a step: one a field of ``width`` columns, or one."""
    blocks = angles // width
    aligned = blocks and angles % width == 0 and PAIRS_OF_A_TILE.value % blocks == 0
    return blocks if aligned and width % (PAIRS_OF_A_TILE.value // blocks) == 0 else 1


@triton.constexpr_function
def angles_of_step(tree: tuple[int, int], step: int, level: int) -> tuple[int, ...]:
    """The angles of ``level`` with channels in ``step``, ascending; ``tree`` are the angles of the first level and the blocks of a step."""
    angles, blocks = tree
    each = PAIRS_OF_A_TILE.value // blocks
    firsts = range(step * each, angles, angles // blocks)
    return tuple(sorted({(first + number) >> (level - 1) for first in firsts for number in range(each)}))


@triton.constexpr_function
def lookups_of(angles: tuple[int, ...], width: int, bits: int) -> tuple[tuple[int, int], ...]:
    """The lookups of a step in a level of ``bits``: an angle, alone (1) or with that of the next field, ``width`` behind it (2)."""
    left = list(angles)
    found = []
    while left:
        angle = left.pop(0)
        together = 2 * bits <= MOST_BITS_TOGETHER and angle + width in left
        if together:
            left.remove(angle + width)
        found.append((angle, 2 if together else 1))
    return tuple(found)


@triton.constexpr_function
def places_of(angles: tuple[int, ...], width: int, bits: int) -> tuple[int, ...]:
    """Where each angle of a step is among what its lookups give."""
    found = [angle + width * number for angle, count in lookups_of(angles, width, bits) for number in range(count)]
    return tuple(map(found.index, angles))


@triton.constexpr_function
def place_in(numbers: tuple[int, ...], number: int) -> int:
    """Where ``number`` is among ``numbers``."""
    return numbers.index(number)


@lru_cache(maxsize=256)
def table(codec: Polar, counts: tuple[frozenset[int], ...]) -> tuple[torch.Tensor, list[tuple[int, int]], float]:
    """Cosines and sines, binary16 ``[entry, 4]``, of levels of which as many angles as ``counts`` says have an entry.

    Level by level the angles, each twice, and two angles, the first one changing faster. Then where those and these begin, and what the
    products of all levels are to be divided by: cosines and sines of a level are multiplied by what leaves them nearest to binary16,
    for the errors of few angles would add up over the levels.
    """
    angles = [(torch.arange(1 << codec.levels[0].bits, dtype=torch.float64) + 0.5) * (2 * torch.pi / (1 << codec.levels[0].bits))]
    for level, stored in zip(codec.levels[1:], codec.tables[1:], strict=True):
        angles.append(torch.tensor(struct.unpack(f"<{1 << level.bits}f", stored[0]), dtype=torch.float64))
    scales = 1 + torch.arange(SCALES, dtype=torch.float64)[:, None, None] / SCALES
    entries: list[torch.Tensor] = []
    firsts, product = [], 1.0
    for of_level, of_counts in zip(angles, counts, strict=True):
        candidates = torch.stack([of_level.cos(), of_level.sin()], -1) * scales
        rounded = candidates.to(torch.float16)
        errors = ((rounded.to(torch.float64) - candidates) / candidates.abs().clamp_min(1e-3)).square().sum((1, 2))
        best = int(errors.argmin())
        pairs = rounded[best]
        product *= float(scales[best])
        one = sum(map(len, entries))
        if 1 in of_counts:
            entries.append(pairs.repeat(1, 2))
        two = sum(map(len, entries))
        if 2 in of_counts:
            entries.append(torch.cat([pairs.repeat(len(pairs), 1), pairs.repeat_interleave(len(pairs), 0)], 1))
        firsts.append((one, two))
    return torch.cat(entries), firsts, product
