"""Tile loader for keys of codec octahedral in the dense arrangement, if indices have 8 bits (spec/codecs/octahedral.md).

Codes are looked up where matrix units expect the operand, so that no value moves between lanes. A lane of a matrix operand has tokens and
every fourth pair of columns of its own. If a row has N sign words, lane ``i`` of four gets N consecutive index words, beginning with word
``i`` x N. The signs of its first triplets are then field ``i`` of consecutive sign words, and the signs of its second triplets are a fixed
number of fields later.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.bitpack.token_factors import FACTOR_BITS, load_factor, read_factor
from kvpack.kernels.tables.shared_table import look_up_triplets

from .octahedral import VALUES
from .tiles import Tiles

if TYPE_CHECKING:
    from kvpack.formats.octahedral import Octahedral

LANES = tl.constexpr(4)
"""Number of lanes that share the columns of a token in a matrix operand."""


class OctahedralKeyConstants(NamedTuple):
    """Compile-time constants of an octahedral codec. Rows have ``index_words`` words of indices and ``sign_words`` words of signs.

    A word has 16 bits, and both counts are even.
    """

    index_words: int
    sign_words: int
    norm_bits: int


def tiles(codec: Octahedral, values: Tiles) -> Tiles | None:
    """Return the tile loader for keys of ``codec``, or None if rows are not supported. ``values`` is the codec's loader for values.

    A row must have two 8-bit indices per word, eight signs per word, and an even number of words of both.
    """
    index, sign = codec.packings().values()
    suits = index.bases == (256,) and index.fields == 2 and sign.bases == (4,) and sign.fields == 8
    if not suits or index.width % 2 or sign.width % 2:
        return None

    def channel(word: int, field_index: int, coordinate: int) -> int:
        number = VALUES * (word + field_index * index.width) + coordinate
        return number if word < index.width and number < codec.dim else -1

    channels = []
    for step in range(sign.width // 2):
        words = [lane * sign.width + 2 * step + half for half in range(2) for lane in range(LANES.value)]
        channels += [tuple(channel(word, second, value) for word in words for value in range(2)) for second in range(2)]
        channels.append(tuple(channel(word, second, 2) for word in words for second in range(2)))
    return Tiles(
        load,
        decode,
        factor,
        OctahedralKeyConstants(index.width, sign.width, FACTOR_BITS[codec.norm]),
        sign.width // 2,
        tuple(channels),
        values.streams,
        values.table,
        packings=(index, sign),
        stream_widths=(1, 2, 1, LANES.value),
    )


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
    """Load pairs of index words, int32 ``[warp, token, lane]``, then pairs of sign words, int32 ``[warp, token]``, then the norms."""
    INDICES: tl.constexpr = CONSTANTS.index_words // 2
    SIGNS: tl.constexpr = CONSTANTS.sign_words // 2
    loaded = ()
    index = pointers[0].to(tl.pointer_type(tl.int32)) + first * INDICES
    sign = pointers[1].to(tl.pointer_type(tl.int32)) + first * SIGNS
    for step in tl.static_range(SIGNS):
        # The last lane may have fewer words: it reads another one instead, which has no channel.
        word = tl.minimum(tl.arange(0, LANES) * SIGNS + step, INDICES - 1)
        address = index + (token[:, :, None] * INDICES + word[None, None, :])
        if MASKED:
            loaded = loaded + (tl.load(address, valid[:, :, None], 0),)
        else:
            loaded = loaded + (tl.load(address),)
    for step in tl.static_range(SIGNS):
        address = sign + (token * SIGNS + step)
        if MASKED:
            loaded = loaded + (tl.load(address, valid, 0),)
        else:
            loaded = loaded + (tl.load(address),)
    return loaded + load_factor(pointers[2], first, token, valid, CONSTANTS.norm_bits, MASKED, MODE.fast)


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the three float16 tiles ``[warp, token, column]`` of step ``STEP``, with the channels that ``tiles`` assigns."""
    SHARED: tl.constexpr = MODE.shared
    SIGNS: tl.constexpr = CONSTANTS.sign_words // 2
    # The second triplets' signs are this many words, and fields, after the first triplets' signs.
    LATER: tl.constexpr = STEP + CONSTANTS.index_words // 2
    BITS: tl.constexpr = LATER // SIGNS * 2
    half = column_fields[1].to(tl.int32)[:, None, :, None, None]
    lane = column_fields[3].to(tl.int32)[:, None, :]
    word = loaded[STEP][:, :, None, :, None]
    first = loaded[SIGNS + STEP][:, :, None]
    second = loaded[SIGNS + LATER % SIGNS][:, :, None]
    SHAPE: tl.constexpr = (word.shape[0], word.shape[1], 2, LANES, 2)
    if MODE.fast and MODE.shared.copies > 0:
        # The sign of x becomes the highest bit of a byte of one word, and the sign of y that of the same byte of another word.
        BEGIN: tl.constexpr = 7 + -BITS % 8
        words = (
            tl.broadcast_to(word, SHAPE),
            tl.broadcast_to(half, SHAPE),
            tl.broadcast_to((first << (7 - 2 * lane))[:, :, None, :, None], SHAPE),
            tl.broadcast_to((first << (6 - 2 * lane))[:, :, None, :, None], SHAPE),
            tl.broadcast_to((second << (BEGIN - 2 * lane))[:, :, None, :, None], SHAPE),
            tl.broadcast_to((second << (BEGIN - 1 - 2 * lane))[:, :, None, :, None], SHAPE),
        )
        result = look_up_triplets(words, (BITS + 7) // 8, SHARED)
    else:
        lane = lane[:, :, None, :, None]
        value = tl.arange(0, 2)[None, None, None, None, :]
        place = 16 * half + 2 * lane + value
        index = (word >> (16 * half)) & 0xFF
        other = (word >> (16 * half + 8)) & 0xFF
        xy = tl.load(table + 4 * index + value)
        other_xy = tl.load(table + 4 * other + value)
        result = (
            tl.where((first[:, :, :, None, None] >> place) & 1 == 1, -xy, xy),
            tl.where((second[:, :, :, None, None] >> (place + BITS)) & 1 == 1, -other_xy, other_xy),
            tl.load(table + 4 * tl.where(value == 0, index, other) + 2),
        )
    return (
        tl.reshape(result[0], (SHAPE[0], SHAPE[1], 4 * LANES)),
        tl.reshape(result[1], (SHAPE[0], SHAPE[1], 4 * LANES)),
        tl.reshape(result[2], (SHAPE[0], SHAPE[1], 4 * LANES)),
    )


@triton.jit
def factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the norms, float32 ``[warp, token]``."""
    return read_factor(loaded, CONSTANTS.sign_words, CONSTANTS.norm_bits, FAST)
