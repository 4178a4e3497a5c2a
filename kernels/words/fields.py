"""Digits of packed rows inside a tile: words are loaded as they lie, and a field of all of them is a block of channels.

Two adjacent words share a register, and the inline PTX (``FAST``) works on both at once;
without it the same functions are plain Triton.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from .axes import of_columns, of_tokens, token_of_columns, tokens_behind, valid_columns


@triton.jit
def load_words(
    pointer: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    ROW: tl.constexpr,
    PAD: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr,
    BEHIND: tl.constexpr = 0,
) -> tl.tensor:
    """Rows of ``ROW`` words from token ``first`` on, a tile of ``PAD`` columns: repeated if ROW is a power of two, else zeros follow.

    With ``BEHIND`` the other half of the columns is another token's (``axes``).
    """
    number = tl.arange(0, PAD)[None, :]
    column = of_columns(number, TURNED)
    second = number // (PAD // 2)
    row = token_of_columns(token, second, BEHIND, TURNED)
    place = pointer + first * ROW + (row * ROW + (column % ROW if ROW & (ROW - 1) == 0 else column))
    if ROW & (ROW - 1) == 0:
        if MASKED:
            words = tl.load(place, valid_columns(valid, second, BEHIND, TURNED), 0)
        else:
            words = tl.load(place)
    else:
        if MASKED:
            words = tl.load(place, of_tokens(valid, TURNED) & (column < ROW), 0)
        else:
            words = tl.load(place, column < ROW, 0)
    return words


@triton.jit
def load_per_token(
    pointer: tl.tensor, first: tl.tensor, token: tl.tensor, valid: tl.tensor, ROW: tl.constexpr, AT: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """Element ``AT`` of rows of ``ROW`` elements, ``[warp, token]``."""
    place = pointer + first * ROW + (token * ROW + AT)
    if MASKED:
        value = tl.load(place, valid, 0)
    else:
        value = tl.load(place)
    return value


@triton.jit
def load_planes(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    PACKING: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr,
) -> tl.tuple:
    """The planes of one code stream, each a tile of PAD columns; a plane of bytes is repeated, see ``whole_planes``.

    ``PACKING`` is (first pointer, bytes a column, columns, columns of the tile, fields, how two tokens share a row); if they do,
    ``valid`` is (that of the first ones, that of the second ones).
    """
    FIRST: tl.constexpr = PACKING.stream
    BYTES: tl.constexpr = PACKING.column_bytes
    WIDTH: tl.constexpr = PACKING.width
    PAD: tl.constexpr = PACKING.tile_width
    BEHIND: tl.constexpr = tokens_behind(PACKING.paired, token.shape[1])
    planes = ()
    for plane in tl.static_range(BYTES // 2):
        planes = planes + (load_words(pointers[FIRST + plane], first, token, valid, WIDTH, PAD, MASKED, TURNED, BEHIND),)
    if BYTES % 2:
        HALF: tl.constexpr = (WIDTH + 1) // 2
        number = tl.arange(0, PAD)[None, :]
        second = number // (PAD // 2)
        row = token_of_columns(token, second, BEHIND, TURNED)
        place = pointers[FIRST + BYTES // 2] + first * HALF + (row * HALF + of_columns(number, TURNED) % HALF)
        if MASKED:
            planes = planes + (tl.load(place, valid_columns(valid, second, BEHIND, TURNED), 0),)
        else:
            planes = planes + (tl.load(place),)
    return planes


@triton.constexpr_function
def _field(position: int, bits: int) -> str:
    mask = ((1 << bits) - 1) * 0x10001
    return f"shr.b32 $0, $1, {position}; and.b32 $0, $0, {mask};"


@triton.constexpr_function
def _field_of_two(position: int, bits: int) -> str:
    low = 16 - position
    return f"""{{ .reg .b32 a, b;
        shr.b32 a, $1, {position}; and.b32 a, a, {((1 << low) - 1) * 0x10001};
        shl.b32 b, $2, {low}; lop3.b32 $0, b, {(((1 << bits) - 1) & ~((1 << low) - 1)) * 0x10001}, a, 0xEA; }}"""


@triton.jit
def field(word: tl.tensor, POSITION: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """``BITS`` bits of each word from ``POSITION`` up, int16."""
    if BITS == 16:
        value = word
    elif FAST:
        value = tl.inline_asm_elementwise(_field(POSITION, BITS), "=r,r", [word], dtype=tl.int16, is_pure=True, pack=2)
    else:
        value = (word >> POSITION) & ((1 << BITS) - 1)
    return value


@triton.jit
def load_places(numbers: tl.tensor, PACKINGS: tl.constexpr) -> tl.tuple:
    """What ``whole_planes`` and ``beside`` need to know of each column, for each packing (columns, columns of the tile) of ``PACKINGS``.

    It is loaded from ``numbers``, int16 0, 1, 2, …, although it could be computed: only what comes from loads is laid out as the
    matrix units read it before the words are decoded, and not after.
    """
    places = ()
    for number in tl.static_range(len(PACKINGS) // 2):
        places = places + _load_place(numbers, PACKINGS[2 * number], PACKINGS[2 * number + 1])
    return places


@triton.jit
def _load_place(numbers: tl.tensor, WIDTH: tl.constexpr, PAD: tl.constexpr) -> tl.tuple:
    column = tl.arange(0, PAD)[None, :]
    return tl.load(numbers + column % WIDTH // ((WIDTH + 1) // 2) * 8), tl.load(numbers + column // WIDTH)


@triton.jit
def whole_planes(
    raw: tl.tuple, places: tl.tuple, NUMBER: tl.constexpr, PACKING: tl.constexpr, TURNED: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """The planes of code stream ``NUMBER`` among what was loaded, a plane of bytes as a byte a column."""
    FIRST: tl.constexpr = PACKING.stream
    BYTES: tl.constexpr = PACKING.column_bytes
    WIDTH: tl.constexpr = PACKING.width
    whole = ()
    for plane in tl.static_range(BYTES // 2):
        whole = whole + (raw[FIRST + plane],)
    if BYTES % 2:
        word = raw[FIRST + BYTES // 2]
        shift = of_columns(places[2 * NUMBER], TURNED)
        if FAST and (WIDTH + 1) // 2 % 2 == 0:
            byte = tl.inline_asm_elementwise(
                "{ .reg .b32 a; and.b32 a, $2, 15; shr.b32 a, $1, a; and.b32 $0, a, 0x00FF00FF; }",
                "=r,r,r",
                [word, shift],
                dtype=tl.int16,
                is_pure=True,
                pack=2,
            )
        else:
            byte = (word >> shift) & 0xFF
        whole = whole + (byte,)
    return whole


@triton.constexpr_function
def _beside(field: int) -> str:
    return f"{{ .reg .pred p; .reg .b32 a; and.b32 a, $3, 0xFFFF; setp.ge.u32 p, a, {field}; selp.b32 $0, $2, $1, p; }}"


@triton.jit
def beside(
    value: tl.tensor,
    other: tl.tensor,
    places: tl.tuple,
    NUMBER: tl.constexpr,
    WIDTH: tl.constexpr,
    FIELD: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """The 16-bit ``value`` in the columns of fields before ``FIELD``, and ``other`` in the rest, for the stream of ``NUMBER``."""
    place = of_columns(places[2 * NUMBER + 1], TURNED)
    if FAST and WIDTH % 2 == 0:
        value = tl.inline_asm_elementwise(_beside(FIELD), "=r,r,r,r", [value, other, place], dtype=value.dtype, is_pure=True, pack=2)
    else:
        value = tl.where(place < FIELD, value, other)
    return value


@triton.jit
def straddling(planes: tl.tuple, BIT: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """``BITS`` bits of each column from ``BIT`` up that lie in two words, int16."""
    WORD: tl.constexpr = BIT // 16
    POSITION: tl.constexpr = BIT % 16
    if FAST:
        value = tl.inline_asm_elementwise(
            _field_of_two(POSITION, BITS), "=r,r,r", [planes[WORD], planes[WORD + 1]], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        value = (planes[WORD] >> POSITION) & ((1 << (16 - POSITION)) - 1)
        value = (value | (planes[WORD + 1] << (16 - POSITION))) & ((1 << BITS) - 1)
    return value


@triton.jit
def digit(planes: tl.tuple, BIT: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """``BITS`` bits of each column from ``BIT`` up, int16."""
    if BIT % 16 + BITS > 16:
        value = straddling(planes, BIT, BITS, FAST)
    else:
        value = field(planes[BIT // 16], BIT % 16, BITS, FAST)
    return value


@triton.constexpr_function
def _shifted(position: int, distance: int) -> str:
    return f"{{ .reg .b32 by; and.b32 by, $2, 0xFFFF; mad.lo.u32 by, by, {distance}, {position}; shr.b32 $0, $1, by; }}"


@triton.jit
def shifted(
    word: tl.tensor,
    places: tl.tuple,
    NUMBER: tl.constexpr,
    WIDTH: tl.constexpr,
    POSITION: tl.constexpr,
    DISTANCE: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Words whose low bits are those from ``POSITION`` up in the columns of the first field, ``DISTANCE`` further up in each next one's.

    What is above them belongs to other fields, or when ``FAST`` to the word beside.
    """
    place = of_columns(places[2 * NUMBER + 1], TURNED)
    if FAST and WIDTH % 2 == 0:
        value = tl.inline_asm_elementwise(_shifted(POSITION, DISTANCE), "=r,r,r", [word, place], dtype=tl.int16, is_pure=True, pack=2)
    else:
        value = word >> (place * DISTANCE + POSITION)
    return value


@triton.constexpr_function
def position_of_step(step: int, bits: int, distance: int) -> int:
    """Where the digits of a step lie in what ``words_of_step`` gives: with fields apart, all steps share the words."""
    return step * bits if distance > 1 else 0


@triton.jit
def words_of_step(
    planes: tl.tuple,
    places: tl.tuple,
    NUMBER: tl.constexpr,
    PACKING: tl.constexpr,
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    STEP: tl.constexpr,
    BESIDE: tl.constexpr,
    DISTANCE: tl.constexpr,
    FIELDS: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Words that hold the digits of the fields that one tile of narrow rows holds, at bit ``position_of_step``.

    Field 0 begins at bit ``FIRST``; fields side by side are ``DISTANCE`` fields apart (``tiles.distance``), and there are ``FIELDS``.
    Other bits are anything's.
    """
    FIELD: tl.constexpr = 0 if DISTANCE > 1 else STEP * BESIDE
    BEGIN: tl.constexpr = FIRST + FIELD * BITS
    LAST: tl.constexpr = BEGIN + (BESIDE - 1) * DISTANCE * BITS
    if BEGIN // 16 == (LAST + BITS - 1) // 16:
        value = shifted(planes[BEGIN // 16], places, NUMBER, PACKING.width, BEGIN % 16, DISTANCE * BITS, TURNED, FAST)
    else:
        value = digit(planes, BEGIN, BITS, FAST)
        for number in tl.static_range(1, BESIDE):
            if FIELD + number * DISTANCE < FIELDS:
                other = digit(planes, BEGIN + number * DISTANCE * BITS, BITS, FAST)
                value = beside(value, other, places, NUMBER, PACKING.width, number, TURNED, FAST)
    return value
