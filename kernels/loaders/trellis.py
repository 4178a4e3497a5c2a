"""Tile loader of codec trellis (spec/codecs/trellis.md): table values, indexed by windows of bits in a word and the next word.

A tile column is one word of a token's bit string; each step decodes one window that begins in it. If rows have fewer words than a tile has
columns, the windows of a word are spread over several columns. If a value's bits do not divide 16, windows begin at different bits in each
word; ``_column_shifts`` then returns the number of bits by which each column is shifted first.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.trellis import WORD_BITS, window_values
from kvpack.kernels.bitpack.replicated_columns import load_columns as load_words_of_columns
from kvpack.kernels.bitpack.streams import Stream
from kvpack.kernels.bitpack.tile_layout import broadcast_columns
from kvpack.kernels.bitpack.tile_packing import tile_field_count, tile_width
from kvpack.kernels.bitpack.token_factors import FACTOR_BITS, load_factors, read_factors
from kvpack.kernels.tables.shared_table import look_up_bits

from .tiles import Tiles

if TYPE_CHECKING:
    from kvpack.formats.trellis import Trellis


class TrellisConstants(NamedTuple):
    """Compile-time constants of a codec and its tiles.

    A row's ``words`` words are the columns of a tile of ``width`` columns; windows of ``window_bits`` bits begin every ``bits`` bits. If
    ``shifted``, columns are first shifted right by their own numbers, int16, which follow the table's ``entries`` entries.
    """

    words: int
    width: int
    bits: int
    window_bits: int
    shifted: bool
    entries: int
    norm_bits: int


def tiles(codec: Trellis) -> Tiles:
    """Return the loader of ``codec``, which always exists."""
    (packing,) = codec.packings().values()
    width = tile_width(packing)
    shifts, steps, used = _column_shifts(codec, packing.width, width, tile_field_count(packing))
    values = window_values(codec.table, "cpu").to(torch.float16)
    behind = torch.tensor(shifts, dtype=torch.int16, device="cpu").view(torch.float16).view(-1, 2)
    norm_bits = FACTOR_BITS[codec.norm]
    constants = TrellisConstants(packing.width, width, codec.bits, codec.state_bits, any(shifts), len(values), norm_bits)
    columns = [(column % packing.width, shift if column < used else WORD_BITS) for column, shift in enumerate(shifts)]
    return Tiles(
        load,
        decode,
        factor,
        constants,
        steps,
        tuple(tuple(_window_channel(codec, word, shift + step * codec.bits) for word, shift in columns) for step in range(steps)),
        (Stream("codes.0", WORD_BITS, packing.width), Stream("norm", norm_bits, 1)),
        torch.cat([torch.stack([values, values], -1), behind]),
        entries=len(values),
        load_columns=load_columns,
    )


def _column_shifts(codec: Trellis, words: int, width: int, side_by_side: int) -> tuple[list[int], int, int]:
    """Return the bit at which each column's first window begins in its word, the windows per column, and the number of columns in use."""
    firsts = [(-WORD_BITS * (column % words) - codec.state_bits) % codec.bits for column in range(width)]
    if side_by_side == 1 or WORD_BITS % codec.bits:
        return firsts, -(-WORD_BITS // codec.bits), words
    windows = WORD_BITS // codec.bits
    steps = max(1, windows // side_by_side)
    copies = min(side_by_side, windows)
    return [first + column // words % copies * steps * codec.bits for column, first in enumerate(firsts)], steps, copies * words


def _window_channel(codec: Trellis, word: int, bit: int) -> int:
    """Return the channel whose window begins at bit ``bit`` of ``word``; -1 if the bit is past the word."""
    if bit >= WORD_BITS:
        return -1
    after = (WORD_BITS * word + bit + codec.state_bits) % (codec.dim * codec.bits)
    return (after // codec.bits - 1) % codec.dim


@triton.jit
def load_columns(table: tl.tensor, rows: tl.tuple, CONSTANTS: tl.constexpr, TOKENS: tl.constexpr) -> tl.tuple:
    """Load the shift of each column, int16 ``[1, column]``."""
    begin = table.to(tl.pointer_type(tl.int16)) + 2 * CONSTANTS.entries
    return (tl.load(begin + tl.arange(0, CONSTANTS.width))[None, :],)


@triton.jit
def load(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    CONSTANTS: tl.constexpr,
    MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Load the tokens' words and their successors, int16 tiles ``[warp, token, column]`` or transposed, then norms (``token_factors``)."""
    WORDS: tl.constexpr = CONSTANTS.words
    column = tl.arange(0, CONSTANTS.width)[None, :]
    words = load_words_of_columns(pointers[0], first, token, valid, column, column % WORDS, WORDS, 0, False, MASKED, TRANSPOSED)
    # The first word of a row follows its last one.
    following = load_words_of_columns(pointers[0], first, token, valid, column, (column + 1) % WORDS, WORDS, 0, False, MASKED, TRANSPOSED)
    return (words, following) + load_factors(pointers[1], first, token, valid, CONSTANTS.norm_bits, 0, MASKED, FAST)


@triton.jit
def decode(
    loaded: tl.tuple,
    column_fields: tl.tuple,
    table: tl.tensor,
    STEP: tl.constexpr,
    CONSTANTS: tl.constexpr,
    SHARED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Return the value of window ``STEP`` of each column, scaled to a unit vector, as one binary16 tile in the layout of the words."""
    planes = (loaded[0], loaded[1])
    if CONSTANTS.shifted:
        planes = _shift_strings(loaded[0], loaded[1], broadcast_columns(column_fields[0], TRANSPOSED), FAST)
    result = look_up_bits(planes, table, STEP * CONSTANTS.bits, CONSTANTS.window_bits, 2, 0, SHARED, FAST)
    return (result[0],)


@triton.constexpr_function
def _shift_ptx() -> str:
    """Return PTX that shifts the 32-bit strings of a register's two columns, each by its own number, and splits them into words again."""
    return """{ .reg .b32 p, q, s, t;
        and.b32 s, $4, 0xFFFF; shr.b32 t, $4, 16;
        prmt.b32 p, $2, $3, 0x5410; prmt.b32 q, $2, $3, 0x7632;
        shr.b32 p, p, s; shr.b32 q, q, t;
        prmt.b32 $0, p, q, 0x5410; prmt.b32 $1, p, q, 0x7632; }"""


@triton.jit
def _shift_strings(words: tl.tensor, following: tl.tensor, shift: tl.tensor, FAST: tl.constexpr) -> tl.tuple:
    """Shift each column's 32-bit string right by ``shift`` bits; return int16 tiles of its low and high halves."""
    if FAST:
        halves = tl.inline_asm_elementwise(
            _shift_ptx(), "=r,=r,r,r,r", [words, following, shift], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
        )
    else:
        string = (
            words.to(tl.uint16, bitcast=True).to(tl.uint32) | (following.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
        ) >> shift.to(tl.uint32)
        halves = (string.to(tl.uint16).to(tl.int16, bitcast=True), (string >> 16).to(tl.uint16).to(tl.int16, bitcast=True))
    return halves


@triton.jit
def factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the norms, float32 ``[warp, token]``."""
    return read_factors(loaded, 2, CONSTANTS.norm_bits, 0, FAST)
