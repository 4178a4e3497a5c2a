"""Tile loader of the polar codec (spec/codecs/polar.md). Each thread decodes one token, by multiplying directions down the tree of radii.

Products are float16, so they leave out the top radius. A single top radius is the token factor; several are divided by a power of two near
the largest radius. ``step_angles`` and ``step_lookups`` select the angles that a step looks up.

A step decodes one tile of channel pairs. If the first level fills whole fields of a stream, a step covers all fields of some columns. The
angles of higher levels are then also in few columns, and two neighboring fields of a column form one table index. A table entry is two
f16x2: one value twice, or the values of two neighboring fields.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.polar import Polar
from kvpack.kernels.bitpack.bitfields import load_per_token
from kvpack.kernels.bitpack.f16x2 import multiply_f16x2, scale_f16x2
from kvpack.kernels.bitpack.streams import Stream
from kvpack.kernels.bitpack.thread_digits import RowPacking, column_bits, column_pieces, row_packing
from kvpack.kernels.bitpack.thread_rows import load_row, load_rows, row_streams, stored_words_per_plane, word_stream, words_per_token
from kvpack.kernels.bitpack.thread_tiles import F16X2_PER_TILE, TOKENS, assemble_tile
from kvpack.kernels.bitpack.token_factors import load_factor, read_factor
from kvpack.kernels.tables.table_assembly import field_lookup_ptx, register_constraints
from kvpack.kernels.tables.thread_lookups import look_up_words, lookup_unit

from .tiles import Tiles

MAX_PAIR_BITS = 6
"""Maximum total number of bits of two angles at which the table has entries for both."""

MAX_SCALES = 1 << 12
"""Number of scales that are tried for each level's table."""


def step_blocks(angles: int, width: int) -> int:
    """Return the number of blocks of neighboring first-level angles that a step decodes.

    It is ``angles // width`` if such blocks are aligned with tiles, otherwise 1.
    """
    blocks = angles // width
    aligned = blocks and angles % width == 0 and F16X2_PER_TILE.value % blocks == 0
    return blocks if aligned and width % (F16X2_PER_TILE.value // blocks) == 0 else 1


@triton.constexpr_function
def step_angles(tree: tuple[int, int], step: int, level: int) -> tuple[int, ...]:
    """Return the indices of those angles of ``level`` that the channels of ``step`` depend on, in ascending order.

    ``tree`` is (number of first-level angles, number of blocks per step).
    """
    angles, blocks = tree
    per_tile = F16X2_PER_TILE.value // blocks
    firsts = range(step * per_tile, angles, angles // blocks)
    return tuple(sorted({(first + number) >> (level - 1) for first in firsts for number in range(per_tile)}))


@triton.constexpr_function
def step_lookups(angles: tuple[int, ...], width: int, bits: int) -> tuple[tuple[int, int], ...]:
    """Return the table lookups of a step for a level of ``bits``-bit angles, as pairs (angle, count).

    The count is 1 for a single angle. It is 2 if the lookup also covers the angle in the next field, ``width`` symbols later.
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
    result = [angle + width * number for angle, count in step_lookups(angles, width, bits) for number in range(count)]
    return tuple(map(result.index, angles))


@triton.constexpr_function
def tuple_index(values: tuple[int, ...], value: int) -> int:
    return values.index(value)


@lru_cache(maxsize=256)
def direction_table(codec: Polar, angles_per_entry: tuple[frozenset[int], ...]) -> tuple[torch.Tensor, list[tuple[int, int]], float]:
    """Return the table of cosines and sines, the first entries of single and double angles in each level, and a scale.

    The table is float16 ``[entry, 4]``. An entry is for one angle (stored twice) or for two angles (the first changes faster);
    ``angles_per_entry`` contains 1, 2 or both for each level. In float16, the rounding errors of all levels would add up. Each level's
    cosines and sines are therefore multiplied by the factor that minimizes their errors. The scale is the product of these factors: divide
    decoded values by it.
    """
    angles = [
        (torch.arange(1 << codec.levels[0].bits, dtype=torch.float64, device="cpu") + 0.5) * (2 * torch.pi / (1 << codec.levels[0].bits))
    ]
    for level, stored in zip(codec.levels[1:], codec.tables[1:], strict=True):
        angles.append(torch.tensor(struct.unpack(f"<{1 << level.bits}f", stored[0]), dtype=torch.float64, device="cpu"))
    scales = 1 + torch.arange(MAX_SCALES, dtype=torch.float64, device="cpu")[:, None, None] / MAX_SCALES
    entries: list[torch.Tensor] = []
    firsts, product = [], 1.0
    for level_angles, level_counts in zip(angles, angles_per_entry, strict=True):
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


MAX_DIM = 128
"""Maximum head dim. Kernels for larger head dims take minutes to compile."""


class Level(NamedTuple):
    """One level of the tree. Its angles are consecutive symbols of ``packing``, beginning with ``first_symbol``.

    In the lookup table, the directions of single angles begin at entry ``first_single_entry``, and the entries for two neighboring fields
    at entry ``first_pair_entry``.
    """

    packing: RowPacking
    first_symbol: int
    bits: int
    first_single_entry: int
    first_pair_entry: int


class PolarConstants(NamedTuple):
    """Compile-time constants of a polar codec and its rows. If a token has several radii, they begin at word ``first_radius`` of its row.

    ``tree`` is an argument of ``step_angles``. A token factor is the radius times ``unit``.
    """

    rows: tuple[int, ...]
    radii: int
    radius_bits: int
    radius_stream: int
    first_radius: int
    tree: tuple[int, int]
    unit: float
    levels: tuple[Level, ...]


def tiles(codec: Polar) -> Tiles | None:
    """Return the tile loader of ``codec``, or None if it is not supported.

    Every level must pair all of its radii, several radii must not be float32, and the head dim must not be too large.
    """
    levels = codec.levels
    steps, rest = divmod(codec.dim, 2 * F16X2_PER_TILE.value)
    if rest or codec.dim > MAX_DIM or codec.dim % (1 << len(levels)) or (codec.radii > 1 and (codec.norm == "fp32" or codec.radii % 2)):
        return None
    packings = codec.packings()
    every = tuple(packings.values())
    streams = tuple(stream for name, packing in packings.items() for stream in row_streams(name, packing))
    rows = stored_words_per_plane(every)
    radius_bits = 16 if codec.norm == "fp16" else 32
    if codec.radii > 1:
        rows = (*rows, codec.radii)
        streams = (*streams, word_stream("radius", codec.radii))
    else:
        streams = (*streams, Stream("radius", radius_bits, 1))
    tree = (levels[0].angles, step_blocks(levels[0].angles, every[0].width))
    level_parts, counts = [], []
    for number, run in enumerate(codec.stream_levels.values()):
        before = accumulate((level.angles for level in run), initial=0)
        for angles, level in zip(before, run, strict=False):
            level_parts.append((row_packing(every, number), angles, level.bits))
            angles_by_step = (step_angles(tree, step, len(level_parts)) for step in range(steps))
            lookups = (lookup for angles in angles_by_step for lookup in step_lookups(angles, every[number].width, level.bits))
            counts.append(frozenset(count for _, count in lookups))
    entries, firsts, product = direction_table(codec, tuple(counts))
    constants = PolarConstants(
        rows=rows,
        radii=codec.radii,
        radius_bits=radius_bits,
        radius_stream=len(streams) - 1,
        first_radius=words_per_token(stored_words_per_plane(every)),
        tree=tree,
        unit=1 / product,
        levels=tuple(Level(*parts, *first) for parts, first in zip(level_parts, firsts, strict=True)),
    )
    channels = tuple(tuple(2 * angle + value for angle in step_angles(tree, step, 1) for value in range(2)) for step in range(steps))
    padded = torch.zeros(next_power_of_two(len(entries)), entries.shape[1], dtype=entries.dtype, device=entries.device)
    padded[: len(entries)] = entries
    return Tiles(load, decode, factor, constants, steps, channels, streams, padded, len(entries), TOKENS)


@triton.jit
def load(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    CONSTANTS: tl.constexpr,
    MASKED: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tuple:
    """Load the rows (``thread_rows.load_rows``), which include several radii, followed by the tokens' radii for ``factor``.

    The radii are int32 ``[warp, token]``, or uint32 words with two radii each.
    """
    ROWS: tl.constexpr = CONSTANTS.rows
    RADII: tl.constexpr = CONSTANTS.radii
    loaded = load_rows(pointers, first, token, valid, ROWS, MASKED, MODE.fast)
    if RADII > 1:
        like = load_per_token(pointers[CONSTANTS.radius_stream], first, token, valid, RADII // 2, 0, MASKED)
        loaded = loaded + load_row(pointers[CONSTANTS.radius_stream], first, token, valid, like, RADII, MASKED, MODE.fast)
    else:
        loaded = loaded + load_factor(pointers[CONSTANTS.radius_stream], first, token, valid, CONSTANTS.radius_bits, MASKED, MODE.fast)
    return loaded


@triton.jit
def _largest_exponent(words: tl.tuple, FAST: tl.constexpr) -> tl.tensor:
    """Return the largest exponent field of the f16x2 ``words``, as int32. The result is at most 29."""
    largest = words[0].to(tl.int32, bitcast=True) & 0x7FFF7FFF
    for number in tl.static_range(1, len(words)):
        largest = _elementwise_max(largest, words[number].to(tl.int32, bitcast=True) & 0x7FFF7FFF, FAST)
    return tl.minimum(_elementwise_max(largest, largest >> 16, FAST) >> 10 & 31, 29)


@triton.jit
def _elementwise_max(first: tl.tensor, second: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Return the larger of two 15-bit numbers, in each half. Nonnegative float16 numbers have the same order as their bit patterns."""
    if FAST:
        value = tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1)
    else:
        value = tl.maximum(first & 0xFFFF, second & 0xFFFF) | tl.maximum(first >> 16, second >> 16) << 16
    return value


@triton.jit
def factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the token factors, float32 ``[warp, token]``, divided by the scale of the table.

    The factor is the token's only radius, or a power of two near its largest radius.
    """
    ROWS: tl.constexpr = CONSTANTS.rows
    ROW: tl.constexpr = words_per_token(ROWS)
    if CONSTANTS.radii > 1:
        value = ((_largest_exponent(loaded[2 * ROW :], FAST) + 112) << 23).to(tl.float32, bitcast=True)
    else:
        value = read_factor(loaded, 2 * ROW, CONSTANTS.radius_bits, FAST)
    return value * CONSTANTS.unit


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the channels of step ``STEP`` as one float16 tile, ``[warp, token, column]`` or transposed.

    The channels still lack the token factor.
    """
    ROWS: tl.constexpr = CONSTANTS.rows
    ROW: tl.constexpr = words_per_token(ROWS)
    WARPS: tl.constexpr = loaded[2 * ROW].shape[0]
    first = _decode_pairs(loaded[:ROW], table, STEP, CONSTANTS, MODE)
    second = _decode_pairs(loaded[ROW : 2 * ROW], table, STEP, CONSTANTS, MODE)
    return (assemble_tile(first, second, WARPS, MODE),)


@triton.jit
def _decode_pairs(words: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr) -> tl.tuple:
    """Return the channel pairs of step ``STEP``, one f16x2 each, uint32 ``[warp * token / 2]``."""
    LEVELS: tl.constexpr = len(CONSTANTS.levels)
    pairs = ()
    if CONSTANTS.radii > 1:
        pairs = _step_radii(words, STEP, CONSTANTS, MODE.fast)
    for above in tl.static_range(LEVELS):
        pairs = _descend_level(words, table, pairs, STEP, LEVELS - above, CONSTANTS, MODE)
    return pairs


@triton.jit
def _step_radii(words: tl.tuple, STEP: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """Return the top radii of step ``STEP``, two per f16x2, divided by the token's power of two."""
    AT: tl.constexpr = CONSTANTS.first_radius
    TREE: tl.constexpr = CONSTANTS.tree
    PLACES: tl.constexpr = step_angles(TREE, STEP, len(CONSTANTS.levels) + 1)
    inverse = ((30 - _largest_exponent(words[AT:], FAST)) << 10).to(tl.uint32, bitcast=True) * 0x10001
    radii = ()
    for number in tl.static_range(len(PLACES)):
        radii = radii + (multiply_f16x2(words[AT + PLACES[number]], inverse, FAST),)
    return radii


@triton.jit
def _descend_level(
    words: tl.tuple, table: tl.tensor, radii: tl.tuple, STEP: tl.constexpr, LEVEL: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the radii or channels of step ``STEP`` one level below ``LEVEL``, two per f16x2.

    ``radii`` are the radii of ``LEVEL``, two per f16x2. An empty tuple stands for a single radius of 1.
    """
    LEVEL_CONSTANTS: tl.constexpr = CONSTANTS.levels[LEVEL - 1]
    TREE: tl.constexpr = CONSTANTS.tree
    ANGLES: tl.constexpr = step_angles(TREE, STEP, LEVEL)
    ABOVE: tl.constexpr = step_angles(TREE, STEP, LEVEL + 1)
    LOOKUPS: tl.constexpr = step_lookups(ANGLES, LEVEL_CONSTANTS.packing.width, LEVEL_CONSTANTS.bits)
    PLACES: tl.constexpr = lookup_positions(ANGLES, LEVEL_CONSTANTS.packing.width, LEVEL_CONSTANTS.bits)
    result = ()
    for number in tl.static_range(len(LOOKUPS)):
        result = result + _look_up_directions(words, table, LOOKUPS[number][0], LOOKUPS[number][1], LEVEL_CONSTANTS, MODE)
    below = ()
    for number in tl.static_range(len(ANGLES)):
        if len(radii):
            radius = radii[tuple_index(ABOVE, ANGLES[number] // 2)]
            below = below + (scale_f16x2(result[PLACES[number]], radius, ANGLES[number] % 2, MODE.fast),)
        else:
            below = below + (result[PLACES[number]],)
    return below


@triton.jit
def _look_up_directions(
    words: tl.tuple, table: tl.tensor, ANGLE: tl.constexpr, COUNT: tl.constexpr, LEVEL_CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the direction (cosine, sine) of an angle as f16x2.

    If ``COUNT`` is 2, also return the direction of the angle in the next field.
    """
    SHARED: tl.constexpr = MODE.shared
    SYMBOL: tl.constexpr = LEVEL_CONSTANTS.first_symbol + ANGLE
    COLUMN: tl.constexpr = SYMBOL % LEVEL_CONSTANTS.packing.width
    POSITION: tl.constexpr = SYMBOL // LEVEL_CONSTANTS.packing.width * LEVEL_CONSTANTS.bits
    BITS: tl.constexpr = COUNT * LEVEL_CONSTANTS.bits
    FIRST: tl.constexpr = LEVEL_CONSTANTS.first_single_entry if COUNT == 1 else LEVEL_CONSTANTS.first_pair_entry
    PACKING: tl.constexpr = LEVEL_CONSTANTS.packing
    return look_up_field(words, table, PACKING, COLUMN, POSITION, BITS, COUNT, FIRST, SHARED, MODE.fast)


VALUES = tl.constexpr(4)
"""Number of float16 values per entry."""


@triton.jit
def look_up_field(
    words: tl.tuple,
    table: tl.tensor,
    PACKING: tl.constexpr,
    COLUMN: tl.constexpr,
    POSITION: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    FIRST: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Look up a table entry, and return its first ``WORDS`` f16x2 (1 or 2). Entries for ``WORDS`` = 1 contain the same f16x2 twice.

    The index of the entry, counted from entry ``FIRST``, is ``BITS`` bits of a column, beginning at bit ``POSITION``. ``SHARED`` describes
    the table (``SharedTable``).
    """
    UNIT: tl.constexpr = lookup_unit(VALUES, SHARED, FAST)
    PIECES: tl.constexpr = column_pieces(PACKING, COLUMN, POSITION, BITS)
    if FAST and SHARED.copies > 0 and len(PIECES) <= 2:
        ASSEMBLY: tl.constexpr = field_lookup_ptx(PIECES, WORDS, SHARED.offset + FIRST * UNIT, UNIT)
        inputs = [words[PIECES[0][0]]] if len(PIECES) == 1 else [words[PIECES[0][0]], words[PIECES[1][0]]]
        REGISTERS: tl.constexpr = register_constraints(WORDS, len(PIECES))
        if WORDS == 1:
            result = (tl.inline_asm_elementwise(ASSEMBLY, REGISTERS, inputs, dtype=tl.uint32, is_pure=True, pack=1),)
        else:
            result = tl.inline_asm_elementwise(ASSEMBLY, REGISTERS, inputs, dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1)
    else:
        place = column_bits(words, PACKING, COLUMN, POSITION, BITS) * UNIT
        result = look_up_words(place, table, WORDS, VALUES, FIRST, SHARED, FAST)
    return result
