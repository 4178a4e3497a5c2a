"""Loading of packed rows with one token per thread, for code streams whose columns do not match the layout of matrix operands.

A thread's registers contain the whole row of its token, so every field has a position known at compile time. This works for streams of any
width and base.
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


MAX_WORDS_PER_LOAD = 8
"""Maximum number of 16-bit words per load."""


def row_streams(name: str, packing: Columns) -> tuple[Stream, ...]:
    """Return a ``Stream`` for each plane of the code stream ``name``. Elements are as wide as rows permit, up to 128 bits."""
    return tuple(word_stream(f"{name}.{plane}", words) for plane, words in enumerate(packing.planes))


def word_stream(name: str, words: int) -> Stream:
    """Return a ``Stream`` with rows of ``words`` 16-bit words. Elements are as wide as rows permit, up to 128 bits."""
    words_per_load = math.gcd(words, MAX_WORDS_PER_LOAD)
    return Stream(name, 16 * words_per_load, words // words_per_load)


def stored_words_per_plane(packings: Sequence[Columns]) -> tuple[int, ...]:
    """Return the number of 16-bit words per row, for each plane of all ``packings``. This is the constant ``ROWS`` of ``load_rows``."""
    return tuple(words for packing in packings for words in packing.planes)


@triton.constexpr_function
def words_per_token(rows: tuple[int, ...]) -> int:
    """Return the number of 32-bit words per token that ``load_rows`` returns."""
    return sum((stored_words + 1) // 2 for stored_words in rows)


@triton.jit
def load_rows(
    pointers: tl.tuple, first: tl.tensor, token: tl.tensor, valid: tl.tensor, ROWS: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """Load the rows of all planes: for the first half of each warp's tokens, then for the second half.

    Each loaded tensor is uint32 ``[warp * token / 2]`` and contains two 16-bit words, the first in the low half. If rows have an odd number
    of words, unmasked tiles never reach the end of a stream (see ``attend.plan``).
    """
    tokens = _split_halves(token)
    valids = _split_halves(valid)
    ELEMENTS: tl.constexpr = ROWS[0] if ROWS[0] % 2 else ROWS[0] // 2
    words = ()
    for half in tl.static_range(2):
        layout_source = load_per_token(pointers[0], first, tokens[half], valids[half], ELEMENTS, 0, MASKED).to(tl.int32)
        for plane in tl.static_range(len(ROWS)):
            words = words + load_row(pointers[plane], first, tokens[half], valids[half], layout_source, ROWS[plane], MASKED, FAST)
    return words


@triton.jit
def _split_halves(values: tl.tensor) -> tl.tuple:
    """Split ``[warp, token]`` into the first and the second half of each warp's tokens, ``[warp * token / 2]`` each.

    The result has one axis, because the compiler would spread a warp over two.
    """
    WARPS: tl.constexpr = values.shape[0]
    HALF: tl.constexpr = values.shape[1] // 2
    return tl.split(tl.reshape(tl.trans(tl.reshape(values, (WARPS, 2, HALF)), 0, 2, 1), (WARPS * HALF, 2)))


@triton.jit
def load_row(
    pointer: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    layout_source: tl.tensor,
    STORED_WORDS: tl.constexpr,
    MASKED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Load the row of one plane for each token, as uint32 words with the shape and layout of ``layout_source``.

    ``layout_source`` comes from an ordinary load.
    """
    words = ()
    if FAST and (MASKED or STORED_WORDS % 2 == 0):
        address = pointer.to(tl.int64) + first * (2 * STORED_WORDS) + token.to(tl.int64) * (2 * STORED_WORDS)
        words = _load_words(address, layout_source, valid, STORED_WORDS, _words_per_load(STORED_WORDS), MASKED)
    elif STORED_WORDS % 2 == 0:
        for word in tl.static_range(STORED_WORDS // 2):
            words = words + (load_per_token(pointer, first, token, valid, STORED_WORDS // 2, word, MASKED).to(tl.uint32, bitcast=True),)
    elif FAST:
        # Load the aligned words that contain the row, which may begin or end in the middle of a word.
        address = pointer.to(tl.int64) + first * (2 * STORED_WORDS)
        aligned = (address - (address & 2)).to(tl.pointer_type(tl.int32))
        half_index = token * STORED_WORDS + (address & 2).to(tl.int32) // 2
        shift = ((half_index & 1) * 16).to(tl.uint32)
        loaded = _load_words((aligned + half_index // 2).to(tl.int64), layout_source, valid, STORED_WORDS + 1, 2, False)
        for word in tl.static_range(STORED_WORDS // 2):
            words = words + (_funnel_shift(loaded[word], loaded[word + 1], shift),)
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
def _words_per_load(stored_words: int) -> int:
    """Return the number of 16-bit words per load for rows of ``stored_words`` words, so that all loads are aligned."""
    return math.gcd(stored_words, MAX_WORDS_PER_LOAD)


@triton.constexpr_function
def _load_ptx(stored_words: int, words_per_load: int, masked: bool) -> str:
    """Return PTX that loads a row of ``stored_words`` 16-bit words as 32-bit words, ``words_per_load`` 16-bit words at a time.

    With ``masked``, the words of masked tokens are 0.
    """
    count = (stored_words + 1) // 2
    text = f"{{ .reg .pred real; .reg .b16 low, high; setp.ne.b32 real, ${count + 2}, 0;" if masked else "{"
    if masked:
        text += "".join(f"mov.b32 ${word}, 0;" for word in range(count))
    load = "@real ld.global" if masked else "ld.global"
    for word in range(0, count, max(1, words_per_load // 2)):
        address = f"[${count} + {4 * word}];"
        if words_per_load > 2:
            vector = ", ".join(f"${register}" for register in range(word, word + words_per_load // 2))
            text += f"{load}.v{words_per_load // 2}.b32 {{{vector}}}, {address}"
        elif words_per_load == 2:
            text += f"{load}.b32 ${word}, {address}"
        else:
            text += f"mov.b32 {{low, high}}, ${word}; {load}.b16 low, {address}"
            text += f"{load}.b16 high, [${count} + {4 * word + 2}];" if 2 * word + 1 < stored_words else ""
            text += f"mov.b32 ${word}, {{low, high}};"
    return text + "}"


@triton.constexpr_function
def _load_constraints(words: int, masked: bool) -> str:
    return ",".join(["=&r"] * words + (["l", "r", "r"] if masked else ["l", "r"]))


@triton.jit
def _load_words(
    address: tl.tensor,
    layout_source: tl.tensor,
    valid: tl.tensor,
    STORED_WORDS: tl.constexpr,
    WORDS_PER_LOAD: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tuple:
    """Load a row with inline PTX. With ordinary loads, the compiler would spend seconds on tracing each of them to its uses.

    The words have the layout of ``layout_source``, an ordinary load.
    """
    WORDS: tl.constexpr = (STORED_WORDS + 1) // 2
    ASSEMBLY: tl.constexpr = _load_ptx(STORED_WORDS, WORDS_PER_LOAD, MASKED)
    REGISTERS: tl.constexpr = _load_constraints(WORDS, MASKED)
    if MASKED:
        words = tl.inline_asm_elementwise(
            ASSEMBLY, REGISTERS, [address, layout_source, valid.to(tl.int32)], dtype=(tl.uint32,) * WORDS, is_pure=True, pack=1
        )
    else:
        words = tl.inline_asm_elementwise(ASSEMBLY, REGISTERS, [address, layout_source], dtype=(tl.uint32,) * WORDS, is_pure=True, pack=1)
    return words


@triton.constexpr_function
def _load_number_ptx(bits: int, masked: bool) -> str:
    """Return PTX that loads a number of ``bits`` bits (8, 16 or 32). With ``masked``, the number of a masked token is 0."""
    mask, real = ("setp.ne.b32 real, $2, 0;", "@real") if masked else ("", "")
    return f"{{ .reg .pred real; {mask} mov.b32 $0, 0; {real} ld.global.u{bits} $0, [$1]; }}"


@triton.jit
def load_number(
    pointer: tl.tensor, first: tl.tensor, token: tl.tensor, valid: tl.tensor, BITS: tl.constexpr, MASKED: tl.constexpr, MODE: tl.constexpr
) -> tl.tensor:
    """Load one ``BITS``-bit number per token as int32 ``[warp, token]``, with inline PTX, in the layout in which it is used.

    In that layout, four threads decode the same number. Bytes for values (``TRANSPOSED``) take the most operations to decode, so it is
    faster to load each of them once and to convert the layout of the decoded numbers.
    """
    if MODE.fast and (BITS > 8 or not MODE.transposed):
        address = pointer.to(tl.int64) + first * (BITS // 8) + token.to(tl.int64) * (BITS // 8)
        ASSEMBLY: tl.constexpr = _load_number_ptx(BITS, MASKED)
        if MASKED:
            value = tl.inline_asm_elementwise(ASSEMBLY, "=&r,l,r", [address, valid.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1)
        else:
            value = tl.inline_asm_elementwise(ASSEMBLY, "=&r,l", [address], dtype=tl.int32, is_pure=True, pack=1)
    else:
        value = load_per_token(pointer, first, token, valid, 1, 0, MASKED).to(tl.int32)
    return value


@triton.jit
def _funnel_shift(low: tl.tensor, high: tl.tensor, shift: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, shift], dtype=tl.uint32, is_pure=True, pack=1
    )
