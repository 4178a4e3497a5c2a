"""Tile loader of the trellis codec (spec/codecs/trellis.md): table values, indexed by windows of a row's circular bit string.

A symbol is 16 neighboring bits of the string, with the windows of 1, 2, 4 or 8 neighboring channels. Symbols are extracted from a row in
the registers of one thread and assembled into tiles (``symbol_tiles``). Windows are looked up in these tiles, two together if their bits
form a short index.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.trellis import WORD_BITS, Trellis, window_values
from kvpack.kernels.bitpack.bitfields import load_per_token
from kvpack.kernels.bitpack.streams import Stream
from kvpack.kernels.bitpack.symbol_tiles import WIDTH, load_symbol_tile
from kvpack.kernels.bitpack.thread_rows import load_rows, row_streams, stored_words_per_plane
from kvpack.kernels.bitpack.thread_tiles import TOKENS, read_row_factor
from kvpack.kernels.bitpack.token_factors import FACTOR_BITS
from kvpack.kernels.tables.shared_table import look_up

from .tiles import Tiles

MAX_INDEX_BITS = 10
"""Maximum number of bits of a joint index of two windows, so that shared memory has room for several copies of the table."""

MAX_WORDS_AHEAD = 16
"""Maximum number of 16-bit words per row for which the rows of two tiles fit in registers."""


class TrellisConstants(NamedTuple):
    """Compile-time constants of a trellis codec and its rows.

    ``rows`` is the number of 16-bit words per row, in the form that ``load_rows`` needs. The first symbol begins at bit ``first_bit`` of a
    row. A symbol has ``windows`` windows, which begin ``bits`` bits apart. A table index covers ``windows_per_index`` windows and has
    ``index_bits`` bits.
    """

    rows: tuple[int, ...]
    factor_bits: int
    symbols: int
    first_bit: int
    windows: int
    bits: int
    windows_per_index: int
    index_bits: int


def tiles(codec: Trellis) -> Tiles:
    """Return the tile loader of ``codec``, which always exists."""
    (packing,) = codec.packings().values()
    windows = next(n for n in (8, 4, 2, 1) if n * codec.bits <= 8 and (n - 1) * codec.bits + codec.state_bits <= WORD_BITS)
    windows_per_index = 2 if codec.bits + codec.state_bits <= MAX_INDEX_BITS else 1
    constants = TrellisConstants(
        rows=stored_words_per_plane([packing]),
        factor_bits=FACTOR_BITS[codec.norm],
        symbols=codec.dim // windows,
        first_bit=-codec.state_bits % codec.bits,
        windows=windows,
        bits=codec.bits,
        windows_per_index=windows_per_index,
        index_bits=codec.state_bits + (windows_per_index - 1) * codec.bits,
    )
    values = window_values(codec.table, "cpu").to(torch.float16)
    index = torch.arange(1 << constants.index_bits, device="cpu")
    entries = torch.stack([values[index % len(values)], values[index >> (windows_per_index - 1) * codec.bits]], -1)
    symbols = -(-constants.symbols // WIDTH.value) * WIDTH.value
    channels = tuple(
        tuple(_window_channel(codec, constants, symbol, window) for symbol in range(first, first + WIDTH.value))
        for first in range(0, symbols, WIDTH.value)
        for window in range(windows)
    )
    return Tiles(
        load,
        decode,
        factor,
        constants,
        len(channels) // windows,
        channels,
        (*row_streams("codes", packing), Stream("norm", constants.factor_bits, 1)),
        entries,
        tokens=TOKENS,
        loads_ahead=packing.width <= MAX_WORDS_AHEAD,
        many_copies=True,
    )


def _window_channel(codec: Trellis, constants: TrellisConstants, symbol: int, window: int) -> int:
    """Return the channel of window ``window`` of a symbol, or -1 if there is no such symbol."""
    if symbol >= constants.symbols:
        return -1
    after = (_symbol_bit(constants, symbol) + window * codec.bits + codec.state_bits) % (codec.dim * codec.bits)
    return (after // codec.bits - 1) % codec.dim


def _symbol_bit(constants: TrellisConstants, symbol: int) -> int:
    """Return the bit of a row at which a symbol begins.

    If every word begins with a whole symbol, neighboring symbols are in neighboring words, so that one operation extracts two of them.
    """
    size, words = constants.windows * constants.bits, constants.rows[0]
    if WORD_BITS % size == 0:
        word, before = symbol % words, symbol // words
        return WORD_BITS * word + size * before + constants.first_bit
    return size * symbol + constants.first_bit


symbol_bit = triton.constexpr_function(_symbol_bit)


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
    """Load the rows (``thread_rows.load_rows``), and the norms as int32 ``[warp, token]``.

    Each norm is loaded by one thread, not by every thread that uses it, because registers also hold the norms of the next tile.
    """
    ROWS: tl.constexpr = CONSTANTS.rows
    norm = load_per_token(pointers[1], first, token, valid, 1, 0, MASKED)
    return load_rows(pointers, first, token, valid, ROWS, MASKED, MODE.fast) + (norm.to(tl.int32),)


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the unit-vector coordinates that the windows of 16 symbols decode to: one float16 tile for each window of a symbol.

    Tiles are ``[warp, token, symbol]``, or ``[warp, symbol, token]`` if transposed.
    """
    WINDOWS: tl.constexpr = CONSTANTS.windows
    WINDOWS_PER_INDEX: tl.constexpr = CONSTANTS.windows_per_index
    symbols = load_symbol_tile(loaded, STEP, symbol_pair, CONSTANTS.symbols, CONSTANTS, MODE)
    values = ()
    for window in tl.static_range(0, WINDOWS, WINDOWS_PER_INDEX):
        values = values + _look_up_windows(symbols, table, window, CONSTANTS, MODE)
    return values


@triton.jit
def _look_up_windows(symbols: tl.tensor, table: tl.tensor, WINDOW: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr) -> tl.tuple:
    """Look up the windows that share a table index, beginning with window ``WINDOW`` of each symbol. Returns their values."""
    SHARED: tl.constexpr = MODE.shared
    BITS: tl.constexpr = CONSTANTS.index_bits
    result = look_up(symbols, table, WINDOW * CONSTANTS.bits, BITS, 2, SHARED.offset, SHARED.copies, 1 << BITS, MODE.fast)
    if CONSTANTS.windows_per_index == 1:
        values = (result[0],)
    else:
        values = (result[0], result[1])
    return values


@triton.jit
def symbol_pair(words: tl.tuple, SYMBOL: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return two neighboring symbols: the even-numbered symbol in the low 16 bits, and the next symbol in the high 16 bits."""
    WORDS: tl.constexpr = CONSTANTS.rows[0]
    FIRST: tl.constexpr = symbol_bit(CONSTANTS, SYMBOL)
    # There may be no symbol after the last one.
    SECOND: tl.constexpr = symbol_bit(CONSTANTS, SYMBOL + 1) % (16 * WORDS)
    SHIFT: tl.constexpr = FIRST % 16
    first = _two_words(words, FIRST // 16, WORDS) >> SHIFT
    if SECOND == (FIRST + 16) % (16 * WORDS):
        if SHIFT:
            first |= _two_words(words, FIRST // 16 + 2, WORDS) << (32 - SHIFT)
    else:
        second = _two_words(words, SECOND // 16, WORDS) >> (SECOND % 16)
        first = (first & 0xFFFF) | (second << 16)
    return first


@triton.jit
def _two_words(words: tl.tuple, WORD: tl.constexpr, WORDS: tl.constexpr) -> tl.tensor:
    """Return 16-bit word ``WORD`` of a row and the next word, as uint32. The word after the last one is the first one."""
    FIRST: tl.constexpr = WORD % WORDS
    SECOND: tl.constexpr = (WORD + 1) % WORDS
    first, second = words[FIRST // 2], words[SECOND // 2]
    if FIRST % 2 == 0 and SECOND == FIRST + 1:
        value = first
    else:
        if FIRST % 2:
            first = first >> 16
        if SECOND % 2 == 0:
            second = second << 16
        value = (first & 0xFFFF) | (second & 0xFFFF0000)
    return value


@triton.jit
def factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the norms, float32 ``[warp, token]``."""
    return read_row_factor(loaded, CONSTANTS, FAST)
