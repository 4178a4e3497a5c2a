"""quaternion as tiles, dense arrangement (spec/codecs/quaternion.md): codewords and radii in columns of their own."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from .halves import product
from .pairs import joined, look_up_words, pair_of_codes, pair_product, unit
from .row_digits import above, digit, digit_constants, two_digits
from .row_tiles import TOKENS, decode_rows, factor_beside_rows, load_rows_and_factor, pairs_of, tiles_of
from .rows import row_streams, rows_constants
from .symbol_tiles import EXPONENT_BITS, FRACTION_BITS, UNIT_OF_CODES, code_of_symbols, look_up_symbols, steps_of, symbol_tile
from .tiles import WIDEST_DIGIT, Stream, Tiles, channels_of
from .tiles_quaternion import VALUES

if TYPE_CHECKING:
    from kvpack.formats.quaternion import Quaternion

FEW_WORDS = 8
"""Words of a row of which registers hold two tiles' beside all else: seven at head dim 64, thirteen at 128."""


def tiles(codec: Quaternion) -> Tiles | None:
    """The loader of ``codec``, None where there are too many codewords."""
    table = codec.codebook.to(torch.float16)
    if table.shape[0] > 1 << WIDEST_DIGIT:
        return None
    packings = codec.packings()
    every = tuple(packings.values())
    streams = tuple(stream for name, packing in packings.items() for stream in row_streams(name, packing))
    scale_bits = 16 if codec.norm == "fp16" else 32
    low_bits = packings["codeword_low"].bases[0].bit_length() - 1 if "codeword_low" in packings else 0
    chunks = -(-codec.dim // VALUES)
    rows = rows_constants(every)
    short = table.shape[0] <= 1 << FRACTION_BITS.value and codec.radius_bits <= EXPONENT_BITS
    pairs: tuple[int, ...] = ()
    if short:
        symbols = steps_of(chunks)
        steps = len(symbols)
        channels = tuple(channels_of(step, VALUES, value, codec.dim) for step in symbols for value in range(VALUES))
    else:
        pairs, channels = tiles_of(pairs_of(chunks, VALUES, codec.dim), VALUES)
        steps = len(channels)
    constants = (
        rows, digit_constants(every, 0), digit_constants(every, len(every) - 2), digit_constants(every, len(every) - 1),
        low_bits, codec.radius_bits, scale_bits, pairs, chunks,
    )  # fmt: skip
    return Tiles(
        load_rows_and_factor,
        decode_short if short else decode,
        factor_short if short else factor,
        constants,
        steps,
        channels,
        (*streams, Stream("scale", scale_bits, 1)),
        table,
        tokens=TOKENS,
        loads_ahead=short and sum(-(-halves // 2) for halves in rows) <= FEW_WORDS,
    )


@triton.jit
def decode_short(
    raw: tl.tuple,
    places: tl.tuple,
    table: tl.tensor,
    STEP: tl.constexpr,
    C: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """``decode`` of codewords and radii that are short enough for ``symbol_tiles``, but for the unit of the radii."""
    symbols = symbol_tile(raw, STEP, two_chunks, C[8], C, TURNED, FAST)
    found = look_up_symbols(symbols, table, SHARED, FAST)
    radius = code_of_symbols(symbols, C[5], FAST)
    return (
        product(found[0], radius, FAST),
        product(found[1], radius, FAST),
        product(found[2], radius, FAST),
        product(found[3], radius, FAST),
    )


@triton.jit
def two_chunks(words: tl.tuple, CHUNK: tl.constexpr, C: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The codewords of an even chunk and of the next one, radii above them."""
    CODEWORDS: tl.constexpr = C[1]
    HIGH_CODEWORDS: tl.constexpr = C[2]
    RADII: tl.constexpr = C[3]
    pair = two_digits(words, CODEWORDS, CHUNK, C[8], FAST)
    if C[4]:
        pair = above(two_digits(words, HIGH_CODEWORDS, CHUNK, C[8], FAST), pair, C[4], FAST)
    return pair | (two_digits(words, RADII, CHUNK, C[8], FAST) << FRACTION_BITS)


@triton.jit
def factor_short(raw: tl.tuple, C: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The scale over the largest radius code, in the unit that ``decode_short`` has radii in."""
    return factor_beside_rows(raw, C, FAST) * (1.0 / (UNIT_OF_CODES * ((1 << C[5]) - 1)))


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
    """The components of the chunks of ``STEP``: unit quaternions times radius codes."""
    PAIRS: tl.constexpr = C[7]
    return (decode_rows(raw, table, PAIRS, STEP, components, C, SHARED, TURNED, FAST),)


@triton.jit
def components(
    words: tl.tuple, table: tl.tensor, CHUNK: tl.constexpr, C: tl.constexpr, SHARED: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """The pairs (w, x) and (y, z) of one chunk."""
    CODEWORDS: tl.constexpr = C[1]
    HIGH_CODEWORDS: tl.constexpr = C[2]
    RADII: tl.constexpr = C[3]
    UNIT: tl.constexpr = unit(4, SHARED, FAST)
    place = digit(words, CODEWORDS, CHUNK, FAST) * UNIT
    if C[4]:
        place = place + digit(words, HIGH_CODEWORDS, CHUNK, FAST) * (UNIT << C[4])
    found = look_up_words(place, table, 2, 4, 0, SHARED, FAST)
    radii = pair_of_codes(two_digits(words, RADII, CHUNK, C[8], FAST), FAST)
    radius = joined(radii, radii, CHUNK % 2, CHUNK % 2, FAST)
    return (pair_product(found[0], radius, FAST), pair_product(found[1], radius, FAST))


@triton.jit
def factor(raw: tl.tuple, C: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The scale over the largest radius code."""
    return factor_beside_rows(raw, C, FAST) * (1.0 / ((1 << C[5]) - 1))
