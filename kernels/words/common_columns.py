"""Code streams whose columns are brought together: bit fields in rows of as many words as they have columns, a power of two.

A step is as many neighbouring symbols as the widest stream has columns. The rows of a narrower one are loaded as they lie, no word
twice, and copied side by side in registers; each copy shows another field.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from kvpack.formats.columns import is_power_of_two
from kvpack.kernels.loaders.tiles import WORD_BITS, takes_whole_words, tile_width

from .axes import copied, of_columns, token_of_columns, valid_columns
from .fields import field, load_planes, whole_planes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.columns import Columns


class CommonPacking(NamedTuple):
    """One stream's columns as ``load_stream`` and ``words_of_stream`` take them.

    The first six are those of ``tiles.TilePacking``, with the columns that are loaded as ``tile_width``. ``copies`` of these lie side
    by side in a tile, which shows ``beside`` fields of ``bits`` each.
    """

    stream: int
    column_bytes: int
    width: int
    tile_width: int
    fields: int
    paired: int
    copies: int
    beside: int
    bits: int


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


def stream_constants(packings: Sequence[Columns], columns: int) -> list[CommonPacking]:
    """The packing of each stream in tiles of ``columns``."""
    pointer = 0
    found = []
    for packing in packings:
        whole = not is_power_of_two(packing.width)
        loaded = columns if whole else packing.width
        beside = 1 if whole else columns // packing.width
        bits = packing.bases[0].bit_length() - 1
        copies = columns // loaded
        found.append(CommonPacking(pointer, packing.column_bytes, packing.width, loaded, packing.fields, 0, copies, beside, bits))
        pointer += len(packing.planes)
    return found


def places_of(packings: Sequence[CommonPacking], columns: int) -> tuple[int, ...]:
    """For ``fields.load_places``: of each stream the columns that are loaded, and those of the tile."""
    return tuple(number for packing in packings for number in (packing.width, packing.tile_width, packing.width, columns))


@triton.constexpr_function
def bit_of_step(packing: CommonPacking, step: int, at: int) -> int:
    """Where the digits of ``step`` begin in the words of ``words_of_stream``."""
    return step * packing.bits if packing.beside == 1 else at


@triton.jit
def load_columns(
    pointer: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    second: tl.tensor,
    word: tl.tensor,
    ROW: tl.constexpr,
    BEHIND: tl.constexpr,
    COPIED: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr,
) -> tl.tensor:
    """A word of rows of ``ROW``, from token ``first`` on, in each column; ``word`` and ``second`` (``axes``) are ``[1, column]``.

    ``COPIED``: the tile is to be copied in registers.
    """
    # The compiler would lay a turned tile out in shared memory as it is read there, and so could not copy its rows there ahead of
    # time, were its warps the outermost axis.
    APART: tl.constexpr = TURNED and COPIED
    if APART:
        token = tl.permute(token, (1, 0))
        if MASKED and BEHIND:
            valid = (tl.permute(valid[0], (1, 0)), tl.permute(valid[1], (1, 0)))
        elif MASKED:
            valid = tl.permute(valid, (1, 0))
    row = token_of_columns(token, second, BEHIND, TURNED and not APART)
    place = pointer + first * ROW + (row * ROW + of_columns(word, TURNED and not APART))
    if MASKED:
        words = tl.load(place, valid_columns(valid, second, BEHIND, TURNED and not APART), 0)
    else:
        words = tl.load(place)
    if APART:
        words = tl.permute(words, (1, 2, 0))
    return words


@triton.jit
def load_stream(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    PACKING: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr,
) -> tl.tuple:
    """``fields.load_planes`` of a stream that ``stream_constants`` describe."""
    if PACKING.copies == 1:
        planes = load_planes(pointers, first, token, valid, PACKING, MASKED, TURNED)
    else:
        planes = ()
        column = tl.arange(0, PACKING.tile_width)[None, :]
        for plane in tl.static_range((PACKING.column_bytes + 1) // 2):
            pointer = pointers[PACKING.stream + plane]
            word = column % words_of_plane(PACKING, plane)
            planes = planes + (
                load_columns(pointer, first, token, valid, column, word, words_of_plane(PACKING, plane), 0, True, MASKED, TURNED),
            )
    return planes


@triton.constexpr_function
def words_of_plane(packing: CommonPacking, plane: int) -> int:
    """Words of a row of one plane, of which the last may be of bytes."""
    return packing.width if 2 * plane + 1 < packing.column_bytes else (packing.width + 1) // 2


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
    if PACKING.beside > 1:
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
    SIZE: tl.constexpr = PACKING.bits
    FIRST: tl.constexpr = STEP * PACKING.beside
    LAST: tl.constexpr = PACKING.fields - 1
    TOGETHER: tl.constexpr = _fields_of_a_window(SIZE)
    COUNT: tl.constexpr = (PACKING.beside + TOGETHER - 1) // TOGETHER
    own = places[4 * NUMBER + 3] % PACKING.beside
    value = copied(_window(planes, FIRST * SIZE, TOGETHER * SIZE, FAST), PACKING.copies, TURNED)
    for number in tl.static_range(1, COUNT):
        if FIRST + number * TOGETHER <= LAST:
            other = copied(_window(planes, (FIRST + number * TOGETHER) * SIZE, TOGETHER * SIZE, FAST), PACKING.copies, TURNED)
            # All bits of a word, or none: the assembler would find a predicate anew for every register.
            before = of_columns(tl.where(own < number * TOGETHER, -1, 0).to(tl.int16), TURNED)
            if FAST:
                value = tl.inline_asm_elementwise(
                    "lop3.b32 $0, $1, $2, $3, 0xE4;", "=r,r,r,r", [value, other, before], dtype=tl.int16, is_pure=True, pack=2
                )
            else:
                value = (value & before) | (other & ~before)
    place = of_columns(own % TOGETHER * SIZE, TURNED)
    if FAST and PACKING.width % 2 == 0:
        value = tl.inline_asm_elementwise(
            _turned_to(AT, (TOGETHER - 1) * SIZE), "=r,r,r", [value, place], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        value = ((value >> place) & ((1 << SIZE) - 1)) << AT
    return value


@triton.constexpr_function
def _turned_to(at: int, last: int) -> str:
    """Fields that begin at bits up to ``last`` at bit ``at``; products leave the units that shift to what cannot do without."""
    turn = "shl.b32 by, 1, by; mul.lo.u32 $0, $1, by;" if at >= last else "shf.l.wrap.b32 $0, $1, $1, by;"
    return f"{{ .reg .b32 by; and.b32 by, $2, 0xFFFF; sub.u32 by, {at}, by; {turn} }}"


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
