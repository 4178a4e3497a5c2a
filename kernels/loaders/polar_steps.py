"""Selection of the angles in polar's tree that each step of a tile looks up, and the table of their directions.

A step decodes one tile of channel pairs. If the first level fills whole fields of a stream, a step covers all fields of some columns. The
angles of higher levels are then also in few columns, and two neighboring fields of a column form one table index.
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

MAX_PAIR_BITS = 6
"""Maximum total number of bits of two angles at which the table has entries for both."""

MAX_SCALES = 1 << 12
"""Number of scales that are tried for each level's table."""


def step_blocks(angles: int, width: int) -> int:
    """Return the number of blocks of neighboring first-level angles per step.

    The number is ``angles // width`` if such blocks are aligned with tiles, otherwise 1.
    """
    blocks = angles // width
    aligned = blocks and angles % width == 0 and F16X2_PER_TILE.value % blocks == 0
    return blocks if aligned and width % (F16X2_PER_TILE.value // blocks) == 0 else 1


@triton.constexpr_function
def step_angles(tree: tuple[int, int], step: int, level: int) -> tuple[int, ...]:
    """Return the angles of ``level`` above the channels of ``step``, in ascending order.

    ``tree`` contains the number of first-level angles, and the number of blocks per step.
    """
    angles, blocks = tree
    per_tile = F16X2_PER_TILE.value // blocks
    firsts = range(step * per_tile, angles, angles // blocks)
    return tuple(sorted({(first + number) >> (level - 1) for first in firsts for number in range(per_tile)}))


@triton.constexpr_function
def step_lookups(angles: tuple[int, ...], width: int, bits: int) -> tuple[tuple[int, int], ...]:
    """Return the table lookups of a step as pairs (angle, count), in a level of ``bits``-bit angles.

    The count is 1 for a single angle. It is 2 if the lookup covers the angle in the next field as well, which is ``width`` symbols later.
    """
    left = list(angles)
    result = []
    while left:
        angle = left.pop(0)
        together = 2 * bits <= MAX_PAIR_BITS and angle + width in left
        if together:
            left.remove(angle + width)
        result.append((angle, 2 if together else 1))
    return tuple(result)


@triton.constexpr_function
def lookup_positions(angles: tuple[int, ...], width: int, bits: int) -> tuple[int, ...]:
    """Return the position of each angle among the directions that a step looks up."""
    result = [angle + width * number for angle, count in step_lookups(angles, width, bits) for number in range(count)]
    return tuple(map(result.index, angles))


@triton.constexpr_function
def index_of(values: tuple[int, ...], value: int) -> int:
    return values.index(value)


@lru_cache(maxsize=256)
def direction_table(codec: Polar, counts: tuple[frozenset[int], ...]) -> tuple[torch.Tensor, list[tuple[int, int]], float]:
    """Return the table of cosines and sines, the first entries of single and double angles in each level, and a scale.

    The table is float16 ``[entry, 4]``. An entry is for one angle (stored twice) or for two angles (the first changes faster); ``counts``
    contains the kinds that each level needs. The cosines and sines of a level are multiplied by the scale that minimizes their rounding
    errors in float16, because with few angles the errors of all levels would add up. Decoded values must be divided by the product of these
    scales, which is returned.
    """
    angles = [
        (torch.arange(1 << codec.levels[0].bits, dtype=torch.float64, device="cpu") + 0.5) * (2 * torch.pi / (1 << codec.levels[0].bits))
    ]
    for level, stored in zip(codec.levels[1:], codec.tables[1:], strict=True):
        angles.append(torch.tensor(struct.unpack(f"<{1 << level.bits}f", stored[0]), dtype=torch.float64, device="cpu"))
    scales = 1 + torch.arange(MAX_SCALES, dtype=torch.float64, device="cpu")[:, None, None] / MAX_SCALES
    entries: list[torch.Tensor] = []
    firsts, product = [], 1.0
    for level_angles, level_counts in zip(angles, counts, strict=True):
        candidates = torch.stack([level_angles.cos(), level_angles.sin()], -1) * scales
        rounded = candidates.to(torch.float16)
        errors = ((rounded.to(torch.float64) - candidates) / candidates.abs().clamp_min(1e-3)).square().sum((1, 2))
        best = int(errors.argmin())
        pairs = rounded[best]
        product *= float(scales[best])
        entry_count = sum(map(len, entries))
        if 1 in level_counts:
            entries.append(pairs.repeat(1, 2))
        two = sum(map(len, entries))
        if 2 in level_counts:
            entries.append(torch.cat([pairs.repeat(len(pairs), 1), pairs.repeat_interleave(len(pairs), 0)], 1))
        firsts.append((entry_count, two))
    return torch.cat(entries), firsts, product
