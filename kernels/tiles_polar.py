"""polar as tiles (spec/codecs/polar.md): a token a thread, which multiplies angles down the tree of radii.

Products are of binary16, so what is left after the last level is no part of them: one radius is the token's factor, and several are
decoded over a power of two near the largest. ``polar_steps`` says which angles a step looks up, and in what table.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two

from .field_lookups import look_up_field
from .fields import load_per_token
from .halves import load_factor, read_factor
from .pairs import pair_product, pair_scaled
from .polar_steps import angles_of_step, blocks_of_step, lookups_of, place_in, places_of, table
from .row_digits import row_packing
from .row_tiles import PAIRS_OF_A_TILE, TOKENS, tile_of_pairs
from .rows import load_row, load_rows, row_streams, rows_constants, stream_of_words, words_of_row
from .tiles import Stream, Tiles

if TYPE_CHECKING:
    from kvpack.formats.polar import Polar

MOST_DIM = 128
"""Above it the kernel takes minutes to compile."""


def tiles(codec: Polar) -> Tiles | None:
    """The loader of ``codec``, None where a level has a pair unlike the others, several radii are binary32, or dims are too many."""
    levels = codec.levels
    steps, rest = divmod(codec.dim, 2 * PAIRS_OF_A_TILE.value)
    if rest or codec.dim > MOST_DIM or codec.dim % (1 << len(levels)) or (codec.radii > 1 and (codec.norm == "fp32" or codec.radii % 2)):
        return None
    packings = codec.packings()
    every = tuple(packings.values())
    streams = tuple(stream for name, packing in packings.items() for stream in row_streams(name, packing))
    rows = rows_constants(every)
    radius_bits = 16 if codec.norm == "fp16" else 32
    if codec.radii > 1:
        rows = (*rows, codec.radii)
        streams = (*streams, stream_of_words("radius", codec.radii))
    else:
        streams = (*streams, Stream("radius", radius_bits, 1))
    tree = (levels[0].angles, blocks_of_step(levels[0].angles, every[0].width))
    of_levels, counts = [], []
    for number, run in enumerate(codec.stream_levels.values()):
        before = accumulate((level.angles for level in run), initial=0)
        for angles, level in zip(before, run, strict=False):
            of_levels.append((*row_packing(every, number), angles, level.bits))
            of_steps = (angles_of_step(tree, step, len(of_levels)) for step in range(steps))
            lookups = (lookup for angles in of_steps for lookup in lookups_of(angles, every[number].width, level.bits))
            counts.append(frozenset(count for _, count in lookups))
    entries, firsts, product = table(codec, tuple(counts))
    constants = (
        rows, len(levels), codec.radii, radius_bits, len(streams) - 1, words_of_row(rows_constants(every)), tree, 1 / product,
        *((*of_level, *first) for of_level, first in zip(of_levels, firsts, strict=True)),
    )  # fmt: skip
    channels = tuple(tuple(2 * angle + value for angle in angles_of_step(tree, step, 1) for value in range(2)) for step in range(steps))
    padded = torch.zeros(next_power_of_two(len(entries)), entries.shape[1], dtype=entries.dtype)
    padded[: len(entries)] = entries
    return Tiles(load, decode, factor, constants, steps, channels, streams, padded, len(entries), TOKENS)


@triton.jit
def load(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    C: tl.constexpr,
    MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The rows, among them several radii, then the radii of each token."""
    ROWS: tl.constexpr = C[0]
    RADII: tl.constexpr = C[2]
    raw = load_rows(pointers, first, token, valid, ROWS, MASKED, FAST)
    if RADII > 1:
        like = load_per_token(pointers[C[4]], first, token, valid, RADII // 2, 0, MASKED)
        raw = raw + load_row(pointers[C[4]], first, token, valid, like, RADII, MASKED, FAST)
    else:
        raw = raw + load_factor(pointers[C[4]], first, token, valid, C[3], MASKED, FAST)
    return raw


@triton.jit
def _exponent(words: tl.tuple, FAST: tl.constexpr) -> tl.tensor:
    """The largest exponent field of pairs of binary16, int32, at most 29."""
    largest = words[0].to(tl.int32, bitcast=True) & 0x7FFF7FFF
    for number in tl.static_range(1, len(words)):
        largest = _larger(largest, words[number].to(tl.int32, bitcast=True) & 0x7FFF7FFF, FAST)
    return tl.minimum(_larger(largest, largest >> 16, FAST) >> 10 & 31, 29)


@triton.jit
def _larger(first: tl.tensor, second: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """The larger ones of two pairs of 15 bits, as which binary16 that are not negative are ordered."""
    if FAST:
        value = tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1)
    else:
        value = tl.maximum(first & 0xFFFF, second & 0xFFFF) | tl.maximum(first >> 16, second >> 16) << 16
    return value


@triton.jit
def factor(raw: tl.tuple, C: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The radius, or the power of two that several are decoded over, less the scales of the tables."""
    ROWS: tl.constexpr = C[0]
    ROW: tl.constexpr = words_of_row(ROWS)
    if C[2] > 1:
        value = ((_exponent(raw[2 * ROW :], FAST) + 112) << 23).to(tl.float32, bitcast=True)
    else:
        value = read_factor(raw, 2 * ROW, C[3], FAST)
    return value * C[7]


@triton.jit
def decode(
    raw: tl.tuple,
    places: tl.tuple,
    table: tl.tensor,
    STEP: tl.constexpr,
    C: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The channels of ``STEP``, over the token's factor."""
    ROWS: tl.constexpr = C[0]
    ROW: tl.constexpr = words_of_row(ROWS)
    WARPS: tl.constexpr = raw[2 * ROW].shape[0]
    first = _pairs(raw[:ROW], table, STEP, C, SHARED, FAST)
    second = _pairs(raw[ROW : 2 * ROW], table, STEP, C, SHARED, FAST)
    return (tile_of_pairs(first, second, WARPS, TURNED, FAST),)


@triton.jit
def _pairs(words: tl.tuple, table: tl.tensor, STEP: tl.constexpr, C: tl.constexpr, SHARED: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """The pairs of channels of ``STEP``."""
    LEVELS: tl.constexpr = C[1]
    pairs = ()
    if C[2] > 1:
        pairs = _radii(words, STEP, C, FAST)
    for above in tl.static_range(LEVELS):
        pairs = _below(words, table, pairs, STEP, LEVELS - above, C, SHARED, FAST)
    return pairs


@triton.jit
def _radii(words: tl.tuple, STEP: tl.constexpr, C: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """The radii that the step begins with, two by two, over the token's power of two."""
    AT: tl.constexpr = C[5]
    PLACES: tl.constexpr = angles_of_step(C[6], STEP, C[1] + 1)
    inverse = ((30 - _exponent(words[AT:], FAST)) << 10).to(tl.uint32, bitcast=True) * 0x10001
    radii = ()
    for number in tl.static_range(len(PLACES)):
        radii = radii + (pair_product(words[AT + PLACES[number]], inverse, FAST),)
    return radii


@triton.jit
def _below(
    words: tl.tuple,
    table: tl.tensor,
    radii: tl.tuple,
    STEP: tl.constexpr,
    LEVEL: tl.constexpr,
    C: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """What lies below the radii of ``LEVEL`` in the step, two by two; ``radii`` are those, two by two as well, or none where it is 1."""
    OF_LEVEL: tl.constexpr = C[7 + LEVEL]
    ANGLES: tl.constexpr = angles_of_step(C[6], STEP, LEVEL)
    ABOVE: tl.constexpr = angles_of_step(C[6], STEP, LEVEL + 1)
    LOOKUPS: tl.constexpr = lookups_of(ANGLES, OF_LEVEL[2], OF_LEVEL[6])
    PLACES: tl.constexpr = places_of(ANGLES, OF_LEVEL[2], OF_LEVEL[6])
    found = ()
    for number in tl.static_range(len(LOOKUPS)):
        found = found + _directions(words, table, LOOKUPS[number][0], LOOKUPS[number][1], OF_LEVEL, SHARED, FAST)
    below = ()
    for number in tl.static_range(len(ANGLES)):
        if len(radii):
            radius = radii[place_in(ABOVE, ANGLES[number] // 2)]
            below = below + (pair_scaled(found[PLACES[number]], radius, ANGLES[number] % 2, FAST),)
        else:
            below = below + (found[PLACES[number]],)
    return below


@triton.jit
def _directions(
    words: tl.tuple,
    table: tl.tensor,
    ANGLE: tl.constexpr,
    COUNT: tl.constexpr,
    OF_LEVEL: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Cosine and sine of an angle of a level, and if ``COUNT`` is 2 those of the next field of its column."""
    SYMBOL: tl.constexpr = OF_LEVEL[5] + ANGLE
    COLUMN: tl.constexpr = SYMBOL % OF_LEVEL[2]
    POSITION: tl.constexpr = SYMBOL // OF_LEVEL[2] * OF_LEVEL[6]
    BITS: tl.constexpr = COUNT * OF_LEVEL[6]
    FIRST: tl.constexpr = OF_LEVEL[6 + COUNT]
    return look_up_field(words, table, OF_LEVEL, COLUMN, POSITION, BITS, COUNT, FIRST, SHARED, FAST)
