"""quaternion as tiles, dense arrangement (spec/codecs/quaternion.md): codewords and radii in columns of their own."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from .pairs import joined, look_up_words, pair_of_codes, pair_product, unit
from .row_tiles import TOKENS, decode_rows, factor_beside_rows, load_rows_and_factor, pairs_of, tiles_of
from .rows import digit, digit_constants, row_streams, rows_constants, two_digits
from .tiles import WIDEST_DIGIT, Stream, Tiles
from .tiles_quaternion import VALUES

if TYPE_CHECKING:
    from kvpack.formats.quaternion import Quaternion


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
    pairs, channels = tiles_of(pairs_of(chunks, VALUES, codec.dim), VALUES)
    constants = (
        rows_constants(every), digit_constants(every, 0), digit_constants(every, len(every) - 2), digit_constants(every, len(every) - 1),
        low_bits, codec.radius_bits, scale_bits, pairs, chunks,
    )  # fmt: skip
    return Tiles(
        load_rows_and_factor,
        decode,
        factor,
        constants,
        len(channels),
        channels,
        (*streams, Stream("scale", scale_bits, 1)),
        table,
        tokens=TOKENS,
    )


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
    place = digit(words, CODEWORDS, CHUNK) * UNIT
    if C[4]:
        place = place + digit(words, HIGH_CODEWORDS, CHUNK) * (UNIT << C[4])
    found = look_up_words(place, table, 2, 4, 0, SHARED, FAST)
    radii = pair_of_codes(two_digits(words, RADII, CHUNK, C[8]), FAST)
    radius = joined(radii, radii, CHUNK % 2, CHUNK % 2, FAST)
    return (pair_product(found[0], radius, FAST), pair_product(found[1], radius, FAST))


@triton.jit
def factor(raw: tl.tuple, C: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The scale over the largest radius code."""
    return factor_beside_rows(raw, C, FAST) * (1.0 / ((1 << C[5]) - 1))
