"""Code streams whose columns are brought together: bit fields in rows of as many words as they have columns, a power of two.

A step is as many neighbouring symbols as the widest stream has columns. The rows of a narrower one are loaded as they lie, and copied
side by side in registers; each copy shows another field.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from triton import language as tl

from kvpack.formats.columns import is_power_of_two

from .axes import of_columns
from .fields import field, whole_planes
from .tiles import PAIRED_WIDTH, WORD_BITS, takes_whole_words, tile_width

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.columns import Columns

LOADED_WIDTH = PAIRED_WIDTH
"""Columns that are loaded at least: the matrix units' step has two registers of as many."""

COPIES, BESIDE, BITS = (tl.constexpr(number) for number in (6, 7, 8))
"""Of a stream's constants: copies of what is loaded side by side, fields side by side, and bits of a field."""


def columns_together(packings: Sequence[Columns]) -> int | None:
    """Columns of a tile of all streams; None where streams are no bit fields, or have widths that do not go together."""
    widths = {packing.width for packing in packings}
    if not all(map(takes_whole_words, packings)) or not (all(map(is_power_of_two, widths)) or len(widths) == 1):
        return None
    return max(map(tile_width, packings))


def steps_together(packings: Sequence[Columns], columns: int) -> list[tuple[int, ...]]:
    """The symbol of each column of each step, -1 for none."""
    symbols = columns if is_power_of_two(packings[0].width) else packings[0].width
    count = packings[0].symbols
    return [
        tuple(begin + column if column < symbols and begin + column < count else -1 for column in range(columns))
        for begin in range(0, count, symbols)
    ]


def stream_constants(packings: Sequence[Columns], columns: int) -> list[tuple[int, ...]]:
    """For each stream what ``fields.load_planes`` needs, then the numbers that have names above."""
    pointer = 0
    found: list[tuple[int, ...]] = []
    for packing in packings:
        whole = not is_power_of_two(packing.width)
        loaded = columns if whole else min(columns, max(LOADED_WIDTH, packing.width))
        beside = 1 if whole else columns // packing.width
        bits = packing.bases[0].bit_length() - 1
        found.append((pointer, packing.column_bytes, packing.width, loaded, packing.fields, 0, columns // loaded, beside, bits))
        pointer += len(packing.planes)
    return found


def places_of(constants: Sequence[tuple[int, ...]], columns: int) -> tuple[int, ...]:
    """For ``fields.load_places``: of each stream the columns that are loaded, and those of the tile."""
    return tuple(number for stream in constants for number in (stream[2], stream[3], stream[2], columns))


@triton.constexpr_function
def bit_of_step(stream: tuple[int, ...], step: int, at: int) -> int:
    """Where the digits of ``step`` begin in the words of ``words_of_stream``."""
    beside, bits = stream[7:9]
    return step * bits if beside == 1 else at


@triton.jit
def words_of_stream(
    raw: tl.tuple,
    places: tl.tuple,
    NUMBER: tl.constexpr,
    PACKING: tl.constexpr,
    STEP: tl.constexpr,
    AT: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The words that hold the digits of ``STEP`` of stream ``NUMBER``, one below the other; fields side by side begin at bit ``AT``."""
    words = whole_planes(raw, places, 2 * NUMBER, PACKING, TURNED, FAST)
    if PACKING[BESIDE] > 1:
        words = (_side_by_side(words, places, NUMBER, PACKING, STEP, AT, TURNED, FAST),)
    return words


@triton.constexpr_function
def _fields_of_a_window(bits: int) -> int:
    """How many neighbouring fields one word can hold, a power of two."""
    return 1 << ((WORD_BITS // bits).bit_length() - 1)


@triton.jit
def _side_by_side(
    planes: tl.tuple,
    places: tl.tuple,
    NUMBER: tl.constexpr,
    PACKING: tl.constexpr,
    STEP: tl.constexpr,
    AT: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """The field of each copy of the row at bit ``AT``: words of several fields each, which every copy shifts to its own."""
    SIZE: tl.constexpr = PACKING[BITS]
    FIRST: tl.constexpr = STEP * PACKING[BESIDE]
    LAST: tl.constexpr = PACKING[4] - 1
    TOGETHER: tl.constexpr = _fields_of_a_window(SIZE)
    COUNT: tl.constexpr = (PACKING[BESIDE] + TOGETHER - 1) // TOGETHER
    own = places[4 * NUMBER + 3] % PACKING[BESIDE]
    value = _copied(_window(planes, FIRST * SIZE, TOGETHER * SIZE, FAST), PACKING[COPIES], TURNED)
    for number in tl.static_range(1, COUNT):
        if FIRST + number * TOGETHER <= LAST:
            other = _copied(_window(planes, (FIRST + number * TOGETHER) * SIZE, TOGETHER * SIZE, FAST), PACKING[COPIES], TURNED)
            # All bits of a word, or none: the assembler would find a predicate anew for every register.
            before = of_columns(tl.where(own < number * TOGETHER, -1, 0).to(tl.int16), TURNED)
            if FAST:
                value = tl.inline_asm_elementwise(
                    "lop3.b32 $0, $1, $2, $3, 0xE4;", "=r,r,r,r", [value, other, before], dtype=tl.int16, is_pure=True, pack=2
                )
            else:
                value = (value & before) | (other & ~before)
    place = of_columns(own % TOGETHER * SIZE, TURNED)
    if FAST and PACKING[2] % 2 == 0:
        value = tl.inline_asm_elementwise(_turned_to(AT), "=r,r,r", [value, place], dtype=tl.int16, is_pure=True, pack=2)
    else:
        value = ((value >> place) & ((1 << SIZE) - 1)) << AT
    return value


@triton.constexpr_function
def _turned_to(at: int) -> str:
    return f"{{ .reg .b32 by; and.b32 by, $2, 0xFFFF; sub.u32 by, {at}, by; shf.l.wrap.b32 $0, $1, $1, by; }}"


@triton.constexpr_function
def _halves_of(position: int) -> str:
    low = 16 - position
    return f"""{{ .reg .b32 a, b;
        shr.b32 a, $1, {position}; shl.b32 b, $2, {low}; lop3.b32 $0, a, b, {((1 << low) - 1) * 0x10001}, 0xE4; }}"""


@triton.jit
def _window(planes: tl.tuple, BEGIN: tl.constexpr, SIZE: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """``SIZE`` bits of each column from ``BEGIN`` up, as far as it has them; above them is anything."""
    WORD: tl.constexpr = BEGIN // 16
    POSITION: tl.constexpr = BEGIN % 16
    if POSITION == 0:
        value = planes[WORD]
    elif POSITION + SIZE <= 16 or len(planes) == WORD + 1:
        value = field(planes[WORD], POSITION, 16 - POSITION, FAST)
    elif FAST:
        value = tl.inline_asm_elementwise(
            _halves_of(POSITION), "=r,r,r", [planes[WORD], planes[WORD + 1]], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        value = ((planes[WORD] >> POSITION) & ((1 << (16 - POSITION)) - 1)) | (planes[WORD + 1] << (16 - POSITION))
    return value


@triton.jit
def _copied(value: tl.tensor, COPIES: tl.constexpr, TURNED: tl.constexpr) -> tl.tensor:
    """A tile whose columns repeat those of ``value``."""
    if COPIES > 1:
        WARPS: tl.constexpr = value.shape[0]
        WIDTH: tl.constexpr = value.shape[1 if TURNED else 2]
        TOKENS: tl.constexpr = value.shape[2 if TURNED else 1]
        if TURNED:
            value = tl.broadcast_to(value[:, None, :, :], (WARPS, COPIES, WIDTH, TOKENS))
            value = tl.reshape(value, (WARPS, COPIES * WIDTH, TOKENS))
        else:
            value = tl.broadcast_to(value[:, :, None, :], (WARPS, TOKENS, COPIES, WIDTH))
            value = tl.reshape(value, (WARPS, TOKENS, COPIES * WIDTH))
    return value
