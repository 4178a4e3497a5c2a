"""Select the angles of polar's tree that each step of a tile looks up, and the table that it uses.

A step decodes as many pairs of channels as a tile has. If the first level fills whole fields of a stream, a step takes some columns in all
their fields: the angles above them are then in few columns as well, and two neighboring fields of a column form one index.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton

from kvpack.kernels.bitpack.thread_tiles import F16X2_PER_TILE

if TYPE_CHECKING:
    from kvpack.formats.polar import Polar

MAX_BITS_TOGETHER = 6
"""Bits of two angles of a level together, at most, for the table to have entries of both."""

SCALES = 1 << 12
"""Scales that are tried for the table of each level."""


def blocks_of_step(angles: int, width: int) -> int:
    """Return the number of blocks of neighboring first-level angles in a step: one per field of ``width`` columns, or one."""
    blocks = angles // width
    aligned = blocks and angles % width == 0 and F16X2_PER_TILE.value % blocks == 0
    return blocks if aligned and width % (F16X2_PER_TILE.value // blocks) == 0 else 1


@triton.constexpr_function
def angles_of_step(tree: tuple[int, int], step: int, level: int) -> tuple[int, ...]:
    """Return the angles of ``level`` with channels in ``step``, ascending.

    ``tree`` contains the angles of the first level and the blocks of a step.
    """
    angles, blocks = tree
    per_tile = F16X2_PER_TILE.value // blocks
    firsts = range(step * per_tile, angles, angles // blocks)
    return tuple(sorted({(first + number) >> (level - 1) for first in firsts for number in range(per_tile)}))


@triton.constexpr_function
def lookups_of(angles: tuple[int, ...], width: int, bits: int) -> tuple[tuple[int, int], ...]:
    """Return a step's lookups in a level of ``bits``, as (angle, count).

    The count is 1 for one angle, and 2 for an angle and that of the next field, ``width`` further on.
    """
    left = list(angles)
    result = []
    while left:
        angle = left.pop(0)
        together = 2 * bits <= MAX_BITS_TOGETHER and angle + width in left
        if together:
            left.remove(angle + width)
        result.append((angle, 2 if together else 1))
    return tuple(result)


@triton.constexpr_function
def places_of(angles: tuple[int, ...], width: int, bits: int) -> tuple[int, ...]:
    """Return the position of each angle of a step in the results of its lookups."""
    result = [angle + width * number for angle, count in lookups_of(angles, width, bits) for number in range(count)]
    return tuple(map(result.index, angles))


@triton.constexpr_function
def place_in(numbers: tuple[int, ...], number: int) -> int:
    """Return the index of ``number`` in ``numbers``."""
    return numbers.index(number)


@lru_cache(maxsize=256)
def table(codec: Polar, counts: tuple[frozenset[int], ...]) -> tuple[torch.Tensor, list[tuple[int, int]], float]:
    """Return cosines and sines, binary16 ``[entry, 4]``, each level's first entries of single and double angles, and the product of scales.

    Each level has entries for one angle (stored twice) and for two angles (the first changes faster), as listed in ``counts``. The cosines
    and sines of a level are multiplied by the scale that leaves them nearest to binary16, because the errors of a few angles would add up
    over the levels. Decoded values are divided by the product of these scales.
    """
    angles = [
        (torch.arange(1 << codec.levels[0].bits, dtype=torch.float64, device="cpu") + 0.5) * (2 * torch.pi / (1 << codec.levels[0].bits))
    ]
    for level, stored in zip(codec.levels[1:], codec.tables[1:], strict=True):
        angles.append(torch.tensor(struct.unpack(f"<{1 << level.bits}f", stored[0]), dtype=torch.float64, device="cpu"))
    scales = 1 + torch.arange(SCALES, dtype=torch.float64, device="cpu")[:, None, None] / SCALES
    entries: list[torch.Tensor] = []
    firsts, product = [], 1.0
    for of_level, of_counts in zip(angles, counts, strict=True):
        candidates = torch.stack([of_level.cos(), of_level.sin()], -1) * scales
        rounded = candidates.to(torch.float16)
        errors = ((rounded.to(torch.float64) - candidates) / candidates.abs().clamp_min(1e-3)).square().sum((1, 2))
        best = int(errors.argmin())
        pairs = rounded[best]
        product *= float(scales[best])
        entry_count = sum(map(len, entries))
        if 1 in of_counts:
            entries.append(pairs.repeat(1, 2))
        two = sum(map(len, entries))
        if 2 in of_counts:
            entries.append(torch.cat([pairs.repeat(len(pairs), 1), pairs.repeat_interleave(len(pairs), 0)], 1))
        firsts.append((entry_count, two))
    return torch.cat(entries), firsts, product
