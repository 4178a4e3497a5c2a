"""Bit fields of packed rows in a tile: words are loaded as stored, and one field of all of them is a block of channels.

Words are int16 tiles, ``[warp, token, column]`` or transposed ``[warp, column, token]``. Two adjacent words share a register, and the
inline PTX (``FAST``) works on both at once; without it the same functions are plain Triton.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from .tile_layout import of_columns, of_tokens, second_token_offset, token_of_columns, valid_columns


@triton.jit
def load_words(
    pointer: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    ROW: tl.constexpr,
    PAD: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SECOND_OFFSET: tl.constexpr = 0,
) -> tl.tensor:
    """Load rows of ``ROW`` words from token ``first`` on, an int16 tile of ``PAD`` columns.

    ``token`` is ``[warp, token]``. Words are repeated if ``ROW`` is a power of two, else followed by zeros. With ``SECOND_OFFSET`` the
    second half of the columns belongs to another token (``tile_layout``).
    """
    number = tl.arange(0, PAD)[None, :]
    column = of_columns(number, TRANSPOSED)
    second = number // (PAD // 2)
    row = token_of_columns(token, second, SECOND_OFFSET, TRANSPOSED)
    address = pointer + first * ROW + (row * ROW + (column % ROW if ROW & (ROW - 1) == 0 else column))
    if ROW & (ROW - 1) == 0:
        if MASKED:
            words = tl.load(address, valid_columns(valid, second, SECOND_OFFSET, TRANSPOSED), 0)
        else:
            words = tl.load(address)
    else:
        if MASKED:
            words = tl.load(address, of_tokens(valid, TRANSPOSED) & (column < ROW), 0)
        else:
            words = tl.load(address, column < ROW, 0)
    return words


@triton.jit
def load_per_token(
    pointer: tl.tensor, first: tl.tensor, token: tl.tensor, valid: tl.tensor, ROW: tl.constexpr, AT: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """Load element ``AT`` of rows of ``ROW`` elements, ``[warp, token]``."""
    address = pointer + first * ROW + (token * ROW + AT)
    if MASKED:
        value = tl.load(address, valid, 0)
    else:
        value = tl.load(address)
    return value


@triton.jit
def load_planes(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    PACKING: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> tl.tuple:
    """Load the planes of one code stream, each an int16 tile of ``PACKING.tile_width`` columns; a plane of bytes is repeated
    (``whole_planes``).

    ``PACKING`` is a ``tiles.TilePacking``. ``token`` and ``valid`` are ``[warp, token]``; for dual tiles ``valid`` is a pair.
    """
    FIRST: tl.constexpr = PACKING.stream
    BYTES: tl.constexpr = PACKING.column_bytes
    WIDTH: tl.constexpr = PACKING.width
    PAD: tl.constexpr = PACKING.tile_width
    SECOND_OFFSET: tl.constexpr = second_token_offset(PACKING.dual, token.shape[1])
    planes = ()
    for plane in tl.static_range(BYTES // 2):
        planes = planes + (load_words(pointers[FIRST + plane], first, token, valid, WIDTH, PAD, MASKED, TRANSPOSED, SECOND_OFFSET),)
    if BYTES % 2:
        HALF: tl.constexpr = (WIDTH + 1) // 2
        number = tl.arange(0, PAD)[None, :]
        second = number // (PAD // 2)
        row = token_of_columns(token, second, SECOND_OFFSET, TRANSPOSED)
        address = pointers[FIRST + BYTES // 2] + first * HALF + (row * HALF + of_columns(number, TRANSPOSED) % HALF)
        if MASKED:
            planes = planes + (tl.load(address, valid_columns(valid, second, SECOND_OFFSET, TRANSPOSED), 0),)
        else:
            planes = planes + (tl.load(address),)
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
    """Extract ``BITS`` bits of each word from ``POSITION`` up, an int16 tile."""
    if BITS == 16:
        value = word
    elif FAST:
        value = tl.inline_asm_elementwise(_field(POSITION, BITS), "=r,r", [word], dtype=tl.int16, is_pure=True, pack=2)
    else:
        value = (word >> POSITION) & ((1 << BITS) - 1)
    return value


@triton.jit
def load_column_fields(numbers: tl.tensor, PACKINGS: tl.constexpr) -> tl.tuple:
    """Load the constants of each column for ``whole_planes`` and ``beside``, for each of ``PACKINGS`` (columns, columns of the tile).

    They are loaded from ``numbers``, int16 0, 1, 2, …, although they could be computed: only loaded values get the layout that the matrix
    units read before the words are decoded, not after.
    """
    column_fields = ()
    for number in tl.static_range(len(PACKINGS) // 2):
        column_fields = column_fields + _load_fields_of(numbers, PACKINGS[2 * number], PACKINGS[2 * number + 1])
    return column_fields


@triton.jit
def _load_fields_of(numbers: tl.tensor, WIDTH: tl.constexpr, PAD: tl.constexpr) -> tl.tuple:
    column = tl.arange(0, PAD)[None, :]
    return tl.load(numbers + column % WIDTH // ((WIDTH + 1) // 2) * 8), tl.load(numbers + column // WIDTH)


@triton.jit
def whole_planes(
    loaded: tl.tuple, column_fields: tl.tuple, NUMBER: tl.constexpr, PACKING: tl.constexpr, TRANSPOSED: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """Return the planes of code stream ``NUMBER`` of the ``loaded`` ones, int16 tiles; a plane of bytes has one byte per column."""
    FIRST: tl.constexpr = PACKING.stream
    BYTES: tl.constexpr = PACKING.column_bytes
    WIDTH: tl.constexpr = PACKING.width
    whole = ()
    for plane in tl.static_range(BYTES // 2):
        whole = whole + (loaded[FIRST + plane],)
    if BYTES % 2:
        word = loaded[FIRST + BYTES // 2]
        shift = of_columns(column_fields[2 * NUMBER], TRANSPOSED)
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
def _neighbor(field: int) -> str:
    return f"{{ .reg .pred p; .reg .b32 a; and.b32 a, $3, 0xFFFF; setp.ge.u32 p, a, {field}; selp.b32 $0, $2, $1, p; }}"


@triton.jit
def beside(
    value: tl.tensor,
    other: tl.tensor,
    column_fields: tl.tuple,
    NUMBER: tl.constexpr,
    WIDTH: tl.constexpr,
    FIELD: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Select ``value``, a 16-bit tile, in columns whose field is before ``FIELD``, and ``other`` elsewhere, for stream ``NUMBER``."""
    own = of_columns(column_fields[2 * NUMBER + 1], TRANSPOSED)
    if FAST and WIDTH % 2 == 0:
        value = tl.inline_asm_elementwise(_neighbor(FIELD), "=r,r,r,r", [value, other, own], dtype=value.dtype, is_pure=True, pack=2)
    else:
        value = tl.where(own < FIELD, value, other)
    return value


@triton.jit
def straddling(planes: tl.tuple, BIT: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Extract ``BITS`` bits of each column from ``BIT`` up that span two words, an int16 tile."""
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
    """Extract ``BITS`` bits of each column from ``BIT`` up, an int16 tile."""
    if BIT % 16 + BITS > 16:
        value = straddling(planes, BIT, BITS, FAST)
    else:
        value = field(planes[BIT // 16], BIT % 16, BITS, FAST)
    return value


@triton.constexpr_function
def _shifted(position: int, stride_bits: int) -> str:
    return f"{{ .reg .b32 by; and.b32 by, $2, 0xFFFF; mad.lo.u32 by, by, {stride_bits}, {position}; shr.b32 $0, $1, by; }}"


@triton.jit
def shifted(
    word: tl.tensor,
    column_fields: tl.tuple,
    NUMBER: tl.constexpr,
    WIDTH: tl.constexpr,
    POSITION: tl.constexpr,
    STRIDE_BITS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Shift words down by ``POSITION`` in the columns of the first field, and by ``STRIDE_BITS`` more for each field to its right.

    ``word``, int16, and the result are tiles. The bits above the field belong to other fields or, when ``FAST``, to the neighboring word.
    """
    own = of_columns(column_fields[2 * NUMBER + 1], TRANSPOSED)
    if FAST and WIDTH % 2 == 0:
        value = tl.inline_asm_elementwise(_shifted(POSITION, STRIDE_BITS), "=r,r,r", [word, own], dtype=tl.int16, is_pure=True, pack=2)
    else:
        value = word >> (own * STRIDE_BITS + POSITION)
    return value


@triton.constexpr_function
def position_of_step(step: int, bits: int, field_stride: int) -> int:
    """Return the bit at which a step's digits begin in the output of ``words_of_step``; with a stride, all steps share the words."""
    return step * bits if field_stride > 1 else 0


@triton.jit
def words_of_step(
    planes: tl.tuple,
    column_fields: tl.tuple,
    NUMBER: tl.constexpr,
    PACKING: tl.constexpr,
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    STEP: tl.constexpr,
    FIELDS_PER_TILE: tl.constexpr,
    FIELD_STRIDE: tl.constexpr,
    FIELDS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Return the words with the digits of ``STEP`` in a tile of narrow rows, at bit ``position_of_step``: an int16 tile.

    Field 0 of ``FIELDS`` begins at bit ``FIRST``; fields side by side are ``FIELD_STRIDE`` fields apart (``tiles.tile_field_stride``). All
    other bits are unspecified.
    """
    FIELD: tl.constexpr = 0 if FIELD_STRIDE > 1 else STEP * FIELDS_PER_TILE
    BEGIN: tl.constexpr = FIRST + FIELD * BITS
    LAST: tl.constexpr = BEGIN + (FIELDS_PER_TILE - 1) * FIELD_STRIDE * BITS
    if BEGIN // 16 == (LAST + BITS - 1) // 16:
        value = shifted(planes[BEGIN // 16], column_fields, NUMBER, PACKING.width, BEGIN % 16, FIELD_STRIDE * BITS, TRANSPOSED, FAST)
    else:
        value = digit(planes, BEGIN, BITS, FAST)
        for number in tl.static_range(1, FIELDS_PER_TILE):
            if FIELD + number * FIELD_STRIDE < FIELDS:
                other = digit(planes, BEGIN + number * FIELD_STRIDE * BITS, BITS, FAST)
                value = beside(value, other, column_fields, NUMBER, PACKING.width, number, TRANSPOSED, FAST)
    return value
