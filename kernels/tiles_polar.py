"""polar as tiles (spec/codecs/polar.md): a token a thread, which multiplies angles down the tree of radii.

A step is the pairs of channels below one radius of a level, or below two of them and more. Products are of binary16, so what is left
after the last level is no part of them: one radius is the token's factor, and several are decoded over a power of two near the largest.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two

from .fields import load_per_token
from .halves import load_factor, read_factor
from .pairs import joined, look_up_words, pair_product, unit
from .row_tiles import PAIRS_OF_A_TILE, TOKENS, tile_of_pairs
from .rows import digit, digit_constants, load_rows, row_streams, rows_constants, words_of_row
from .tiles import Stream, Tiles

if TYPE_CHECKING:
    from kvpack.formats.polar import Polar

LEVEL_OF_A_STEP = PAIRS_OF_A_TILE.value.bit_length()
"""The level whose radii have as many pairs of channels below them as a tile."""

MOST_DIM = 128
"""Above it the kernel takes minutes to compile."""

SCALES = 1 << 12
"""That are tried for the table of a level."""


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
        streams = (*streams, Stream("radius", 32, codec.radii // 2))
    else:
        streams = (*streams, Stream("radius", radius_bits, 1))
    firsts = accumulate((1 << level.bits for level in levels), initial=0)
    of_levels = []
    for number, run in enumerate(codec.stream_levels.values()):
        before = accumulate((level.angles for level in run), initial=0)
        of_levels += [(*digit_constants(every, number), angles, next(firsts)) for angles, _ in zip(before, run, strict=False)]
    entries, product = table(codec)
    constants = (
        rows, len(levels), codec.radii, radius_bits, len(streams) - 1, words_of_row(rows_constants(every)), LEVEL_OF_A_STEP, 1 / product,
        *of_levels,
    )  # fmt: skip
    channels = tuple(tuple(range(first, first + codec.dim // steps)) for first in range(0, codec.dim, codec.dim // steps))
    return Tiles(load, decode, factor, constants, steps, channels, streams, entries, tokens=TOKENS)


@lru_cache(maxsize=256)
def table(codec: Polar) -> tuple[torch.Tensor, float]:
    """Cosine and sine of every angle, level after level, up to a power of two of them; and what their products are to be divided by.

    Those of a level are multiplied by what leaves them nearest to binary16: the errors of few angles would add up over the levels.
    """
    angles = [(torch.arange(1 << codec.levels[0].bits, dtype=torch.float64) + 0.5) * (2 * torch.pi / (1 << codec.levels[0].bits))]
    for level, stored in zip(codec.levels[1:], codec.tables[1:], strict=True):
        angles.append(torch.tensor(struct.unpack(f"<{1 << level.bits}f", stored[0]), dtype=torch.float64))
    scales = 1 + torch.arange(SCALES, dtype=torch.float64)[:, None, None] / SCALES
    scaled, product = [], 1.0
    for of_level in angles:
        candidates = torch.stack([of_level.cos(), of_level.sin()], -1) * scales
        rounded = candidates.to(torch.float16)
        errors = ((rounded.to(torch.float64) - candidates) / candidates.abs().clamp_min(1e-3)).square().sum((1, 2))
        best = int(errors.argmin())
        scaled.append(rounded[best])
        product *= float(scales[best])
    every = torch.cat(scaled)
    entries = torch.zeros(next_power_of_two(len(every)), 2, dtype=torch.float16)
    entries[: len(every)] = every
    return entries, product


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
    WORDS: tl.constexpr = C[2] // 2
    raw = load_rows(pointers, first, token, valid, ROWS, MASKED, FAST)
    if WORDS:
        for word in tl.static_range(WORDS):
            raw = raw + (load_per_token(pointers[C[4]], first, token, valid, WORDS, word, MASKED),)
    else:
        raw = raw + load_factor(pointers[C[4]], first, token, valid, C[3], MASKED, FAST)
    return raw


@triton.jit
def _exponent(words: tl.tuple) -> tl.tensor:
    """The largest exponent field of pairs of binary16, int32, at most 29."""
    largest = words[0].to(tl.int32, bitcast=True) & 0
    for number in tl.static_range(len(words)):
        word = words[number].to(tl.int32, bitcast=True)
        largest = tl.maximum(largest, tl.maximum((word >> 10) & 31, (word >> 26) & 31))
    return tl.minimum(largest, 29)


@triton.jit
def factor(raw: tl.tuple, C: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The radius, or the power of two that several are decoded over, less the scales of the tables."""
    ROWS: tl.constexpr = C[0]
    ROW: tl.constexpr = words_of_row(ROWS)
    if C[2] > 1:
        value = ((_exponent(raw[2 * ROW :]) + 112) << 23).to(tl.float32, bitcast=True)
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
    COUNT: tl.constexpr = C[1]
    WHOLE: tl.constexpr = C[6]
    weights = _radii(words, STEP, C, FAST)
    ABOVE: tl.constexpr = COUNT - WHOLE if COUNT > WHOLE else 0
    for number in tl.static_range(ABOVE):
        pair = _angle(words, table, COUNT - number, STEP >> (COUNT - number - WHOLE), weights[0], C, SHARED, FAST)
        weights = (_half(pair, (STEP >> (COUNT - number - WHOLE - 1)) % 2, FAST),)
    for number in tl.static_range(ABOVE, COUNT - 1):
        weights = _below(words, table, weights, COUNT - number, STEP, C, SHARED, FAST)
    pairs = ()
    for node in tl.static_range(len(weights)):
        pairs = pairs + (_angle(words, table, 1, (STEP << (C[6] - 1)) + node, weights[node], C, SHARED, FAST),)
    return pairs


@triton.jit
def _radii(words: tl.tuple, STEP: tl.constexpr, C: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """The radii that the step begins with, each as both halves of a pair: one, or as many of the last level as have its channels."""
    AT: tl.constexpr = C[5]
    if C[2] > 1:
        inverse = ((30 - _exponent(words[AT:])) << 10).to(tl.uint32, bitcast=True) * 0x10001
        COUNT: tl.constexpr = C[1]
        WHOLE: tl.constexpr = C[6]
        EACH: tl.constexpr = 1 << (WHOLE - COUNT) if COUNT < WHOLE else 1
        FIRST: tl.constexpr = STEP * EACH if COUNT < WHOLE else STEP >> (COUNT - WHOLE)
        radii = ()
        for number in tl.static_range(EACH):
            pair = pair_product(words[AT + (FIRST + number) // 2], inverse, FAST)
            radii = radii + (_half(pair, (FIRST + number) % 2, FAST),)
    else:
        radii = ((words[0] & 0) | 0x3C003C00,)
    return radii


@triton.jit
def _half(pair: tl.tensor, WHICH: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """One half of a pair as both of another."""
    return joined(pair, pair, WHICH, WHICH, FAST)


@triton.jit
def _below(
    words: tl.tuple,
    table: tl.tensor,
    weights: tl.tuple,
    LEVEL: tl.constexpr,
    STEP: tl.constexpr,
    C: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The radii of the level below ``LEVEL``, of whose radii ``weights`` are those of the step."""
    below = ()
    for node in tl.static_range(len(weights)):
        pair = _angle(words, table, LEVEL, STEP * len(weights) + node, weights[node], C, SHARED, FAST)
        below = below + (_half(pair, 0, FAST), _half(pair, 1, FAST))
    return below


@triton.jit
def _angle(
    words: tl.tuple,
    table: tl.tensor,
    LEVEL: tl.constexpr,
    NODE: tl.constexpr,
    weight: tl.tensor,
    C: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """The cosine and the sine of an angle of ``LEVEL``, times ``weight``."""
    OF_LEVEL: tl.constexpr = C[7 + LEVEL]
    place = digit(words, OF_LEVEL, OF_LEVEL[5] + NODE) * unit(2, SHARED, FAST)
    return pair_product(look_up_words(place, table, 1, 2, OF_LEVEL[6], SHARED, FAST)[0], weight, FAST)
