"""Words of packed rows, one token per thread, for code streams whose columns do not have the matrix units' layout.

A thread holds the words of its token's row, where every field has a position known at compile time: streams of any widths and any bases
come together in its registers.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
from triton import language as tl

from .bitfields import load_per_token
from .streams import Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.columns import Columns


MAX_TOGETHER = 8
"""16-bit words that one load takes, at most."""


def row_streams(name: str, packing: Columns) -> tuple[Stream, ...]:
    """Return the planes of one code stream in the widest elements, at most 128 bits, that divide a row."""
    return tuple(stream_of_words(f"{name}.{plane}", words) for plane, words in enumerate(packing.planes))


def stream_of_words(name: str, words: int) -> Stream:
    """Return a stream with rows of ``words`` 16-bit words."""
    together = math.gcd(words, MAX_TOGETHER)
    return Stream(name, 16 * together, words // together)


def rows_constants(packings: Sequence[Columns]) -> tuple[int, ...]:
    """Return the constants of ``load_rows``: the 16-bit words per row of each plane of each stream, one after another."""
    return tuple(words for packing in packings for words in packing.planes)


@triton.constexpr_function
def words_of_row(rows: tuple[int, ...]) -> int:
    """Return the number of 32-bit words that ``load_rows`` returns for a token."""
    return sum((stored_words + 1) // 2 for stored_words in rows)


@triton.jit
def load_rows(
    pointers: tl.tuple, first: tl.tensor, token: tl.tensor, valid: tl.tensor, ROWS: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """Load the words of a token's row, plane after plane: for the first half of every warp's tokens, then for the second half.

    Each word is uint32 ``[warp * token / 2]`` and holds two 16-bit words, the first in its low half.

    Unmasked tiles never end a stream whose words are cut (``plan``).
    """
    tokens = _split_halves(token)
    valids = _split_halves(valid)
    ELEMENTS: tl.constexpr = ROWS[0] if ROWS[0] % 2 else ROWS[0] // 2
    words = ()
    for which in tl.static_range(2):
        like = load_per_token(pointers[0], first, tokens[which], valids[which], ELEMENTS, 0, MASKED).to(tl.int32)
        for plane in tl.static_range(len(ROWS)):
            words = words + load_row(pointers[plane], first, tokens[which], valids[which], like, ROWS[plane], MASKED, FAST)
    return words


@triton.jit
def _split_halves(values: tl.tensor) -> tl.tuple:
    """Split ``[warp, token]`` into two ``[warp * token / 2]``; with two axes the compiler would spread a warp over both."""
    WARPS: tl.constexpr = values.shape[0]
    HALF: tl.constexpr = values.shape[1] // 2
    return tl.split(tl.reshape(tl.trans(tl.reshape(values, (WARPS, 2, HALF)), 0, 2, 1), (WARPS * HALF, 2)))


@triton.jit
def load_row(
    pointer: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    like: tl.tensor,
    STORED_WORDS: tl.constexpr,
    MASKED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Load the words of one plane's row for each token, uint32 in the shape and layout of ``like``, whose load the compiler sees."""
    words = ()
    if FAST and (MASKED or STORED_WORDS % 2 == 0):
        address = pointer.to(tl.int64) + first * (2 * STORED_WORDS) + token.to(tl.int64) * (2 * STORED_WORDS)
        words = _loaded(address, like, valid, STORED_WORDS, _together(STORED_WORDS), MASKED)
    elif STORED_WORDS % 2 == 0:
        for word in tl.static_range(STORED_WORDS // 2):
            words = words + (load_per_token(pointer, first, token, valid, STORED_WORDS // 2, word, MASKED).to(tl.uint32, bitcast=True),)
    elif FAST:
        # The aligned words that hold the row: it begins in the middle of one or not, and ends so as well.
        address = pointer.to(tl.int64) + first * (2 * STORED_WORDS)
        aligned = (address - (address & 2)).to(tl.pointer_type(tl.int32))
        half = token * STORED_WORDS + (address & 2).to(tl.int32) // 2
        shift = ((half & 1) * 16).to(tl.uint32)
        loaded = _loaded((aligned + half // 2).to(tl.int64), like, valid, STORED_WORDS + 1, 2, False)
        for word in tl.static_range(STORED_WORDS // 2):
            words = words + (_funnel(loaded[word], loaded[word + 1], shift),)
        words = words + (loaded[STORED_WORDS // 2] >> shift,)
    else:
        for word in tl.static_range(STORED_WORDS // 2):
            low = load_per_token(pointer, first, token, valid, STORED_WORDS, 2 * word, MASKED).to(tl.uint16, bitcast=True)
            high = load_per_token(pointer, first, token, valid, STORED_WORDS, 2 * word + 1, MASKED).to(tl.uint16, bitcast=True)
            words = words + (low.to(tl.uint32) | (high.to(tl.uint32) << 16),)
        last = load_per_token(pointer, first, token, valid, STORED_WORDS, STORED_WORDS - 1, MASKED)
        words = words + (last.to(tl.uint16, bitcast=True).to(tl.uint32),)
    return words


@triton.constexpr_function
def _together(stored_words: int) -> int:
    """Return the number of 16-bit words per load for a row of ``stored_words``, an aligned element of ``stream_of_words``."""
    return math.gcd(stored_words, MAX_TOGETHER)


@triton.constexpr_function
def _load(stored_words: int, together: int, masked: bool) -> str:
    """Return PTX that loads ``stored_words`` 16-bit words at an address, ``together`` per load, as 32-bit words; zeros if masked out."""
    count = (stored_words + 1) // 2
    text = f"{{ .reg .pred real; .reg .b16 low, high; setp.ne.b32 real, ${count + 2}, 0;" if masked else "{"
    if masked:
        text += "".join(f"mov.b32 ${word}, 0;" for word in range(count))
    load = "@real ld.global" if masked else "ld.global"
    for word in range(0, count, max(1, together // 2)):
        place = f"[${count} + {4 * word}];"
        if together > 2:
            vector = ", ".join(f"${number}" for number in range(word, word + together // 2))
            text += f"{load}.v{together // 2}.b32 {{{vector}}}, {place}"
        elif together == 2:
            text += f"{load}.b32 ${word}, {place}"
        else:
            text += f"mov.b32 {{low, high}}, ${word}; {load}.b16 low, {place}"
            text += f"{load}.b16 high, [${count} + {4 * word + 2}];" if 2 * word + 1 < stored_words else ""
            text += f"mov.b32 ${word}, {{low, high}};"
    return text + "}"


@triton.constexpr_function
def _registers(words: int, masked: bool) -> str:
    return ",".join(["=&r"] * words + (["l", "r", "r"] if masked else ["l", "r"]))


@triton.jit
def _loaded(
    address: tl.tensor, like: tl.tensor, valid: tl.tensor, STORED_WORDS: tl.constexpr, TOGETHER: tl.constexpr, MASKED: tl.constexpr
) -> tl.tuple:
    """Load words invisibly to the compiler, which would spend seconds tracing each load to all its uses.

    They are laid out as ``like``, whose load it sees.
    """
    WORDS: tl.constexpr = (STORED_WORDS + 1) // 2
    ASSEMBLY: tl.constexpr = _load(STORED_WORDS, TOGETHER, MASKED)
    REGISTERS: tl.constexpr = _registers(WORDS, MASKED)
    TYPES: tl.constexpr = (tl.uint32,) * WORDS
    if MASKED:
        words = tl.inline_asm_elementwise(ASSEMBLY, REGISTERS, [address, like, valid.to(tl.int32)], dtype=TYPES, is_pure=True, pack=1)
    else:
        words = tl.inline_asm_elementwise(ASSEMBLY, REGISTERS, [address, like], dtype=TYPES, is_pure=True, pack=1)
    return words


@triton.constexpr_function
def _load_one(bits: int, masked: bool) -> str:
    """Return PTX that loads one number of 16 or 32 bits, or 0 if masked out."""
    mask, real = ("setp.ne.b32 real, $2, 0;", "@real") if masked else ("", "")
    if bits == 16:
        load = f"mov.b16 half, 0; {real} ld.global.b16 half, [$1]; cvt.u32.u16 $0, half;"
    else:
        load = f"mov.b32 $0, 0; {real} ld.global.b32 $0, [$1];"
    return f"{{ .reg .pred real; .reg .b16 half; {mask} {load} }}"


@triton.jit
def load_unseen(
    pointer: tl.tensor, first: tl.tensor, token: tl.tensor, valid: tl.tensor, BITS: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr
) -> tl.tensor:
    """Load one number of ``BITS`` per token, int32 ``[warp, token]``, in the layout of its uses; the compiler sees only byte loads."""
    if FAST and BITS > 8:
        address = pointer.to(tl.int64) + first * (BITS // 8) + token.to(tl.int64) * (BITS // 8)
        ASSEMBLY: tl.constexpr = _load_one(BITS, MASKED)
        if MASKED:
            value = tl.inline_asm_elementwise(ASSEMBLY, "=&r,l,r", [address, valid.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1)
        else:
            value = tl.inline_asm_elementwise(ASSEMBLY, "=&r,l", [address], dtype=tl.int32, is_pure=True, pack=1)
    else:
        value = load_per_token(pointer, first, token, valid, 1, 0, MASKED).to(tl.int32)
    return value


@triton.jit
def _funnel(low: tl.tensor, high: tl.tensor, shift: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, shift], dtype=tl.uint32, is_pure=True, pack=1
    )
