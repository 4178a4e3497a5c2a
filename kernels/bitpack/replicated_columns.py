"""Code streams of different widths in tiles of one width: bit fields with a power-of-two number of columns.

A step covers as many neighboring symbols as the widest stream has columns. The rows of a narrower stream are loaded as stored, each word
once, and replicated side by side in registers; each copy shows another field.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from kvpack.formats.columns import is_power_of_two

from .bitfields import field, load_planes, whole_planes
from .streams import WORD_BITS
from .tile_layout import copied, of_columns, token_of_columns, valid_columns
from .tile_packing import takes_whole_words, tile_width

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.columns import Columns


class ReplicatedPacking(NamedTuple):
    """One stream's columns in the form that ``load_stream`` and ``words_of_stream`` need.

    The first six fields are those of ``tiles.TilePacking``, where ``tile_width`` counts the loaded columns. ``copies`` of these are side by
    side in a tile, which shows ``fields_per_tile`` fields of ``bits`` each.
    """

    stream: int
    column_bytes: int
    width: int
    tile_width: int
    fields: int
    dual: int
    copies: int
    fields_per_tile: int
    bits: int


def common_width(packings: Sequence[Columns]) -> int | None:
    """Return the tile width for all streams; None if a stream has no bit fields, or if widths differ and are not all powers of two."""
    widths = {packing.width for packing in packings}
    if not all(map(takes_whole_words, packings)) or not (all(map(is_power_of_two, widths)) or len(widths) == 1):
        return None
    return max(map(tile_width, packings))


def symbols_of_steps(packings: Sequence[Columns], columns: int) -> list[tuple[int, ...]]:
    """Return the symbol of each column of each step, -1 for none."""
    symbols = columns if is_power_of_two(packings[0].width) else packings[0].width
    count = packings[0].symbols
    return [
        tuple(begin + column if column < symbols and begin + column < count else -1 for column in range(columns))
        for begin in range(0, count, symbols)
    ]


def replicated_packings(packings: Sequence[Columns], columns: int) -> list[ReplicatedPacking]:
    """Return the packing of each stream in tiles of ``columns``."""
    pointer = 0
    result = []
    for packing in packings:
        whole = not is_power_of_two(packing.width)
        loaded = columns if whole else packing.width
        beside = 1 if whole else columns // packing.width
        bits = packing.bases[0].bit_length() - 1
        copies = columns // loaded
        result.append(ReplicatedPacking(pointer, packing.column_bytes, packing.width, loaded, packing.fields, 0, copies, beside, bits))
        pointer += len(packing.planes)
    return result


def stream_widths(packings: Sequence[ReplicatedPacking], columns: int) -> tuple[int, ...]:
    """Return the widths for ``bitfields.load_column_fields``: for each stream, the loaded columns, then those of the tile."""
    return tuple(number for packing in packings for number in (packing.width, packing.tile_width, packing.width, columns))


@triton.constexpr_function
def bit_of_step(packing: ReplicatedPacking, step: int, at: int) -> int:
    """Return the bit at which the digits of ``step`` begin in the words of ``words_of_stream``."""
    return step * packing.bits if packing.fields_per_tile == 1 else at


@triton.jit
def load_columns(
    pointer: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    second: tl.tensor,
    word: tl.tensor,
    ROW: tl.constexpr,
    SECOND_OFFSET: tl.constexpr,
    COPIED: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> tl.tensor:
    """Load one word per column, from rows of ``ROW`` words from token ``first`` on: a tile of the pointer's type.

    ``word``, ``[1, column]``, is the word's number in the row; ``second`` is as in ``tile_layout.token_of_columns``. ``COPIED``: the tile
    will be replicated in registers.
    """
    # With warps as the outermost axis, the compiler would lay a transposed tile out in shared memory in the order of its reads, and could
    # then not copy its rows there ahead of time.
    WARPS_LAST: tl.constexpr = TRANSPOSED and COPIED
    if WARPS_LAST:
        token = tl.permute(token, (1, 0))
        if MASKED and SECOND_OFFSET:
            valid = (tl.permute(valid[0], (1, 0)), tl.permute(valid[1], (1, 0)))
        elif MASKED:
            valid = tl.permute(valid, (1, 0))
    row = token_of_columns(token, second, SECOND_OFFSET, TRANSPOSED and not WARPS_LAST)
    address = pointer + first * ROW + (row * ROW + of_columns(word, TRANSPOSED and not WARPS_LAST))
    if MASKED:
        words = tl.load(address, valid_columns(valid, second, SECOND_OFFSET, TRANSPOSED and not WARPS_LAST), 0)
    else:
        words = tl.load(address)
    if WARPS_LAST:
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
    TRANSPOSED: tl.constexpr,
) -> tl.tuple:
    """Run ``bitfields.load_planes`` for a stream with a ``ReplicatedPacking``: tiles of ``PACKING.tile_width`` columns."""
    if PACKING.copies == 1:
        planes = load_planes(pointers, first, token, valid, PACKING, MASKED, TRANSPOSED)
    else:
        planes = ()
        column = tl.arange(0, PACKING.tile_width)[None, :]
        for plane in tl.static_range((PACKING.column_bytes + 1) // 2):
            pointer = pointers[PACKING.stream + plane]
            word = column % words_of_plane(PACKING, plane)
            planes = planes + (
                load_columns(pointer, first, token, valid, column, word, words_of_plane(PACKING, plane), 0, True, MASKED, TRANSPOSED),
            )
    return planes


@triton.constexpr_function
def words_of_plane(packing: ReplicatedPacking, plane: int) -> int:
    """Return the number of words in a row of one plane; the last plane may consist of bytes."""
    return packing.width if 2 * plane + 1 < packing.column_bytes else (packing.width + 1) // 2


@triton.jit
def words_of_stream(
    loaded: tl.tuple,
    column_fields: tl.tuple,
    NUMBER: tl.constexpr,
    PACKING: tl.constexpr,
    STEP: tl.constexpr,
    AT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Return the words with the digits of ``STEP`` of stream ``NUMBER``, int16 tiles, low words first; copies begin at bit ``AT``."""
    words = whole_planes(loaded, column_fields, 2 * NUMBER, PACKING, TRANSPOSED, FAST)
    if PACKING.fields_per_tile > 1:
        words = (_side_by_side(words, column_fields, NUMBER, PACKING, STEP, AT, TRANSPOSED, FAST),)
    return words


@triton.constexpr_function
def _fields_of_a_window(bits: int) -> int:
    """Return the number of neighboring fields that one word can hold, a power of two."""
    return 1 << ((WORD_BITS // bits).bit_length() - 1)


@triton.jit
def _side_by_side(
    planes: tl.tuple,
    column_fields: tl.tuple,
    NUMBER: tl.constexpr,
    PACKING: tl.constexpr,
    STEP: tl.constexpr,
    AT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Return each copy's own field, moved to bit ``AT``, as one int16 tile; each copy shifts shared words to its own field."""
    SIZE: tl.constexpr = PACKING.bits
    FIRST: tl.constexpr = STEP * PACKING.fields_per_tile
    LAST: tl.constexpr = PACKING.fields - 1
    TOGETHER: tl.constexpr = _fields_of_a_window(SIZE)
    COUNT: tl.constexpr = (PACKING.fields_per_tile + TOGETHER - 1) // TOGETHER
    own = column_fields[4 * NUMBER + 3] % PACKING.fields_per_tile
    value = copied(_window(planes, FIRST * SIZE, TOGETHER * SIZE, FAST), PACKING.copies, TRANSPOSED)
    for number in tl.static_range(1, COUNT):
        if FIRST + number * TOGETHER <= LAST:
            other = copied(_window(planes, (FIRST + number * TOGETHER) * SIZE, TOGETHER * SIZE, FAST), PACKING.copies, TRANSPOSED)
            # All bits of a word or none, because the assembler would compute a predicate again for every register.
            before = of_columns(tl.where(own < number * TOGETHER, -1, 0).to(tl.int16), TRANSPOSED)
            if FAST:
                value = tl.inline_asm_elementwise(
                    "lop3.b32 $0, $1, $2, $3, 0xE4;", "=r,r,r,r", [value, other, before], dtype=tl.int16, is_pure=True, pack=2
                )
            else:
                value = (value & before) | (other & ~before)
    shift = of_columns(own % TOGETHER * SIZE, TRANSPOSED)
    if FAST and PACKING.width % 2 == 0:
        value = tl.inline_asm_elementwise(
            _moved_to(AT, (TOGETHER - 1) * SIZE), "=r,r,r", [value, shift], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        value = ((value >> shift) & ((1 << SIZE) - 1)) << AT
    return value


@triton.constexpr_function
def _moved_to(at: int, last: int) -> str:
    """Return PTX that moves fields from bits up to ``last`` to bit ``at``; using a product keeps the shift units free."""
    turn = "shl.b32 by, 1, by; mul.lo.u32 $0, $1, by;" if at >= last else "shf.l.wrap.b32 $0, $1, $1, by;"
    return f"{{ .reg .b32 by; and.b32 by, $2, 0xFFFF; sub.u32 by, {at}, by; {turn} }}"


@triton.constexpr_function
def _halves_of(position: int) -> str:
    low = 16 - position
    return f"""{{ .reg .b32 a, b;
        shr.b32 a, $1, {position}; shl.b32 b, $2, {low}; lop3.b32 $0, a, b, {((1 << low) - 1) * 0x10001}, 0xE4; }}"""


@triton.jit
def _window(planes: tl.tuple, BEGIN: tl.constexpr, SIZE: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return ``SIZE`` bits of each column from ``BEGIN`` up, as far as it has them, an int16 tile; higher bits are unspecified."""
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
