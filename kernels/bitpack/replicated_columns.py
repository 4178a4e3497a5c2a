"""Tiles of equal width for code streams of different widths. Codes must be bit fields, and numbers of columns powers of two.

A step covers one symbol per column of the widest stream. The rows of a narrower stream are loaded once and replicated side by side in
registers, and each copy is shifted to a different field.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
from triton import language as tl

from kvpack.formats.columns import Columns, is_power_of_two

from .bitfields import expand_planes, extract_field, load_planes
from .streams import WORD_BITS
from .tile_layout import broadcast_columns, column_tokens, tile_copies, valid_columns
from .tile_packing import has_whole_word_tiles, tile_width


class ReplicatedPacking(NamedTuple):
    """Layout of one stream's columns in replicated tiles, for ``load_stream`` and ``stream_step_words``.

    The first six fields are as in ``TilePacking``, except that ``tile_width`` counts only the loaded columns. A tile contains ``copies``
    copies of these columns. Each copy decodes different fields, so a tile yields ``fields_per_tile`` fields of ``bits`` bits.
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


def common_tile_width(packings: Sequence[Columns]) -> int | None:
    """Return the tile width that all streams can share, or None if they cannot share one.

    All streams must have bit fields. Their widths must all be equal or all be powers of two.
    """
    widths = {packing.width for packing in packings}
    if not all(map(has_whole_word_tiles, packings)) or not (all(map(is_power_of_two, widths)) or len(widths) == 1):
        return None
    return max(map(tile_width, packings))


def step_symbols(packings: Sequence[Columns], columns: int) -> list[tuple[int, ...]]:
    """Return the symbol index of each column of a replicated tile, ``[step][column]``; -1 in columns without a symbol.

    Each step decodes one tile of ``columns`` columns (``stream_step_words``).
    """
    symbols = columns if is_power_of_two(packings[0].width) else packings[0].width
    count = packings[0].symbols
    return [
        tuple(begin + column if column < symbols and begin + column < count else -1 for column in range(columns))
        for begin in range(0, count, symbols)
    ]


def replicated_packings(packings: Sequence[Columns], columns: int) -> list[ReplicatedPacking]:
    pointer = 0
    result = []
    for packing in packings:
        unreplicated = not is_power_of_two(packing.width)
        loaded = columns if unreplicated else packing.width
        fields_per_tile = 1 if unreplicated else columns // packing.width
        bits = packing.bases[0].bit_length() - 1
        copies = columns // loaded
        result.append(
            ReplicatedPacking(pointer, packing.column_bytes, packing.width, loaded, packing.fields, 0, copies, fields_per_tile, bits)
        )
        pointer += len(packing.planes)
    return result


def stream_widths(packings: Sequence[ReplicatedPacking], columns: int) -> tuple[int, ...]:
    """Return the argument of ``bitfields.load_column_fields``: for each stream, the widths of loaded columns and of replicated tiles."""
    return tuple(number for packing in packings for number in (packing.width, packing.tile_width, packing.width, columns))


@triton.constexpr_function
def step_bit(packing: ReplicatedPacking, step: int, target_bit: int) -> int:
    """Return the bit at which the digits of ``step`` begin in the words that ``stream_step_words`` returns.

    In replicated tiles, this is always ``target_bit``.
    """
    return step * packing.bits if packing.fields_per_tile == 1 else target_bit


@triton.jit
def load_columns(
    pointer: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    is_second: tl.tensor,
    word: tl.tensor,
    ROW: tl.constexpr,
    SECOND_OFFSET: tl.constexpr,
    COPIED: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> tl.tensor:
    """Load one word per column from the row of each ``token``. Rows have ``ROW`` words and are counted from row ``first``.

    ``word``, ``[1, column]``, is the index in the row of each column's word. ``is_second`` is as in ``tile_layout.column_tokens``.
    ``COPIED`` is True if the tile will be replicated in registers.
    """
    # With warps as the outermost axis, the compiler would store a transposed tile in shared memory in the order of its reads, and could
    # then not copy its rows there ahead of time.
    WARPS_LAST: tl.constexpr = TRANSPOSED and COPIED
    if WARPS_LAST:
        token = tl.permute(token, (1, 0))
        if MASKED and SECOND_OFFSET:
            valid = (tl.permute(valid[0], (1, 0)), tl.permute(valid[1], (1, 0)))
        elif MASKED:
            valid = tl.permute(valid, (1, 0))
    row = column_tokens(token, is_second, SECOND_OFFSET, TRANSPOSED and not WARPS_LAST)
    address = pointer + first * ROW + (row * ROW + broadcast_columns(word, TRANSPOSED and not WARPS_LAST))
    if MASKED:
        words = tl.load(address, valid_columns(valid, is_second, SECOND_OFFSET, TRANSPOSED and not WARPS_LAST), 0)
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
    """Load all planes of a stream as ``bitfields.load_planes`` does. ``PACKING`` is a ``ReplicatedPacking``."""
    if PACKING.copies == 1:
        planes = load_planes(pointers, first, token, valid, PACKING, MASKED, TRANSPOSED)
    else:
        planes = ()
        column = tl.arange(0, PACKING.tile_width)[None, :]
        for plane in tl.static_range((PACKING.column_bytes + 1) // 2):
            pointer = pointers[PACKING.stream + plane]
            word = column % plane_words(PACKING, plane)
            planes = planes + (
                load_columns(pointer, first, token, valid, column, word, plane_words(PACKING, plane), 0, True, MASKED, TRANSPOSED),
            )
    return planes


@triton.constexpr_function
def plane_words(packing: ReplicatedPacking, plane: int) -> int:
    return packing.width if 2 * plane + 1 < packing.column_bytes else (packing.width + 1) // 2


@triton.jit
def stream_step_words(
    loaded: tl.tuple,
    column_fields: tl.tuple,
    STREAM_INDEX: tl.constexpr,
    PACKING: tl.constexpr,
    STEP: tl.constexpr,
    TARGET_BIT: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tuple:
    """Return the words that contain the digits of step ``STEP`` of a code stream, as int16 tiles, low words first.

    The digits begin at bit ``TARGET_BIT`` in replicated tiles, and at bit ``step_bit`` in other tiles.
    """
    words = expand_planes(loaded, column_fields, 2 * STREAM_INDEX, PACKING, MODE)
    if PACKING.fields_per_tile > 1:
        words = (_replicate(words, column_fields, STREAM_INDEX, PACKING, STEP, TARGET_BIT, MODE),)
    return words


@triton.constexpr_function
def _fields_per_window(bits: int) -> int:
    """Return the number of neighboring fields of ``bits`` bits that fit in one word, rounded down to a power of two."""
    return 1 << ((WORD_BITS // bits).bit_length() - 1)


@triton.jit
def _replicate(
    planes: tl.tuple,
    column_fields: tl.tuple,
    STREAM_INDEX: tl.constexpr,
    PACKING: tl.constexpr,
    STEP: tl.constexpr,
    TARGET_BIT: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tensor:
    """Replicate the columns of ``planes`` in one int16 tile, and move a different field to bit ``TARGET_BIT`` in each copy."""
    SIZE: tl.constexpr = PACKING.bits
    FIRST: tl.constexpr = STEP * PACKING.fields_per_tile
    LAST: tl.constexpr = PACKING.fields - 1
    FIELDS_PER_WINDOW: tl.constexpr = _fields_per_window(SIZE)
    COUNT: tl.constexpr = (PACKING.fields_per_tile + FIELDS_PER_WINDOW - 1) // FIELDS_PER_WINDOW
    copy_field = column_fields[4 * STREAM_INDEX + 3] % PACKING.fields_per_tile
    value = tile_copies(_read_window(planes, FIRST * SIZE, FIELDS_PER_WINDOW * SIZE, MODE.fast), PACKING.copies, MODE.transposed)
    for window in tl.static_range(1, COUNT):
        if FIRST + window * FIELDS_PER_WINDOW <= LAST:
            next_value = tile_copies(
                _read_window(planes, (FIRST + window * FIELDS_PER_WINDOW) * SIZE, FIELDS_PER_WINDOW * SIZE, MODE.fast),
                PACKING.copies,
                MODE.transposed,
            )
            # Use a bit mask, because the assembler would recompute a predicate for every register.
            keep_mask = broadcast_columns(tl.where(copy_field < window * FIELDS_PER_WINDOW, -1, 0).to(tl.int16), MODE.transposed)
            if MODE.fast:
                value = tl.inline_asm_elementwise(
                    "lop3.b32 $0, $1, $2, $3, 0xE4;", "=r,r,r,r", [value, next_value, keep_mask], dtype=tl.int16, is_pure=True, pack=2
                )
            else:
                value = (value & keep_mask) | (next_value & ~keep_mask)
    shift = broadcast_columns(copy_field % FIELDS_PER_WINDOW * SIZE, MODE.transposed)
    if MODE.fast:
        value = tl.inline_asm_elementwise(
            move_ptx(TARGET_BIT, (FIELDS_PER_WINDOW - 1) * SIZE), "=r,r,r", [value, shift], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        value = ((value >> shift) & ((1 << SIZE) - 1)) << TARGET_BIT
    return value


@triton.constexpr_function
def move_ptx(target_bit: int, last: int) -> str:
    """Return PTX that moves the field in each half of a register from any bit up to ``last`` to bit ``target_bit``.

    It multiplies where possible, to keep the shift units free.
    """
    turn = "shl.b32 by, 1, by; mul.lo.u32 {0}, $1, by;" if target_bit >= last else "shf.l.wrap.b32 {0}, $1, $1, by;"
    low = f"and.b32 by, $2, 0xFFFF; sub.u32 by, {target_bit}, by; {turn.format('low')}"
    high = f"shr.u32 by, $2, 16; sub.u32 by, {target_bit}, by; {turn.format('high')}"
    return f"{{ .reg .b32 by, low, high; {low} {high} prmt.b32 $0, low, high, 0x7610; }}"


@triton.constexpr_function
def _join_ptx(position: int) -> str:
    low = 16 - position
    return f"""{{ .reg .b32 a, b;
        shr.b32 a, $1, {position}; shl.b32 b, $2, {low}; lop3.b32 $0, a, b, {((1 << low) - 1) * 0x10001}, 0xE4; }}"""


@triton.jit
def _read_window(planes: tl.tuple, BEGIN: tl.constexpr, SIZE: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Read up to ``SIZE`` bits of each column, beginning at bit ``BEGIN``, as an int16 tile. Higher bits of the tile are undefined."""
    WORD: tl.constexpr = BEGIN // 16
    POSITION: tl.constexpr = BEGIN % 16
    if POSITION == 0:
        value = planes[WORD]
    elif POSITION + SIZE <= 16 or len(planes) == WORD + 1:
        value = extract_field(planes[WORD], POSITION, 16 - POSITION, FAST)
    elif FAST:
        value = tl.inline_asm_elementwise(
            _join_ptx(POSITION), "=r,r,r", [planes[WORD], planes[WORD + 1]], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        value = ((planes[WORD] >> POSITION) & ((1 << (16 - POSITION)) - 1)) | (planes[WORD + 1] << (16 - POSITION))
    return value
