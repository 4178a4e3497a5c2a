"""Tiles of packed words with bit fields. Words are loaded as stored; field i of all words is a block of consecutive channels.

Words are int16 tiles, ``[warp, token, column]`` or transposed ``[warp, column, token]``. Two words share a register. ``FAST`` permits
inline PTX, which processes both words together; without it, the same functions use plain Triton. The compiler decides which two words share
a register: neighbors in most layouts, otherwise words 32 columns apart. Each half therefore uses the constants of its own column.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from .tile_layout import broadcast_columns, broadcast_tokens, column_tokens, second_token_offset, valid_columns


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
    """Load the row of words of each ``token`` ``[warp, token]`` as an int16 tile of ``PAD`` columns. Rows are counted from row ``first``.

    A row has ``ROW`` words. If ``ROW`` is a power of two, they are repeated to fill the columns; otherwise, they are padded with zeros.
    With ``SECOND_OFFSET``, the second half of the columns belongs to another token (``tile_layout``).
    """
    column_index = tl.arange(0, PAD)[None, :]
    column = broadcast_columns(column_index, TRANSPOSED)
    second = column_index // (PAD // 2)
    row = column_tokens(token, second, SECOND_OFFSET, TRANSPOSED)
    address = pointer + first * ROW + (row * ROW + (column % ROW if ROW & (ROW - 1) == 0 else column))
    if ROW & (ROW - 1) == 0:
        if MASKED:
            words = tl.load(address, valid_columns(valid, second, SECOND_OFFSET, TRANSPOSED), 0)
        else:
            words = tl.load(address)
    else:
        if MASKED:
            words = tl.load(address, broadcast_tokens(valid, TRANSPOSED) & (column < ROW), 0)
        else:
            words = tl.load(address, column < ROW, 0)
    return words


@triton.jit
def load_per_token(
    pointer: tl.tensor, first: tl.tensor, token: tl.tensor, valid: tl.tensor, ROW: tl.constexpr, AT: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """Load element ``AT`` of each token's row of ``ROW`` elements, ``[warp, token]``. Rows are counted from row ``first``."""
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
    """Load all planes of a code stream, each as an int16 tile of ``PACKING.tile_width`` columns.

    Words of a plane of bytes are repeated, and ``expand_planes`` then selects a byte for each column. ``PACKING`` is a ``TilePacking``.
    ``token`` and ``valid`` are ``[warp, token]``; for dual tiles, ``valid`` is a pair.
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
        BYTE_WORDS: tl.constexpr = (WIDTH + 1) // 2
        column_index = tl.arange(0, PAD)[None, :]
        second = column_index // (PAD // 2)
        row = column_tokens(token, second, SECOND_OFFSET, TRANSPOSED)
        address = (
            pointers[FIRST + BYTES // 2]
            + first * BYTE_WORDS
            + (row * BYTE_WORDS + broadcast_columns(column_index, TRANSPOSED) % BYTE_WORDS)
        )
        if MASKED:
            planes = planes + (tl.load(address, valid_columns(valid, second, SECOND_OFFSET, TRANSPOSED), 0),)
        else:
            planes = planes + (tl.load(address),)
    return planes


@triton.constexpr_function
def _extract_ptx(position: int, bits: int) -> str:
    mask = ((1 << bits) - 1) * 0x10001
    return f"shr.b32 $0, $1, {position}; and.b32 $0, $0, {mask};"


@triton.constexpr_function
def _extract_straddling_ptx(position: int, bits: int) -> str:
    low = 16 - position
    return f"""{{ .reg .b32 a, b;
        shr.b32 a, $1, {position}; and.b32 a, a, {((1 << low) - 1) * 0x10001};
        shl.b32 b, $2, {low}; lop3.b32 $0, b, {(((1 << bits) - 1) & ~((1 << low) - 1)) * 0x10001}, a, 0xEA; }}"""


@triton.jit
def extract_field(word: tl.tensor, POSITION: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Extract ``BITS`` bits of each word, beginning at bit ``POSITION``, as an int16 tile."""
    if BITS == 16:
        value = word
    elif FAST:
        value = tl.inline_asm_elementwise(_extract_ptx(POSITION, BITS), "=r,r", [word], dtype=tl.int16, is_pure=True, pack=2)
    else:
        value = (word >> POSITION) & ((1 << BITS) - 1)
    return value


@triton.jit
def load_column_fields(iota: tl.tensor, PACKINGS: tl.constexpr) -> tl.tuple:
    """Load the per-column constants that ``expand_planes`` and ``select_by_field`` need: two tensors per code stream.

    The first tensor contains the bit where a column's byte begins in a plane of bytes. The second contains the index of the field that the
    column selects in a tile wider than a row. ``PACKINGS`` contains two integers per stream: the number of columns with words, and the
    number of tile columns. The constants are loaded from ``iota`` (int16 0, 1, 2, ...), because loaded values already have the layout of
    matrix operands.
    """
    column_fields = ()
    for index in tl.static_range(len(PACKINGS) // 2):
        column_fields = column_fields + _load_stream_fields(iota, PACKINGS[2 * index], PACKINGS[2 * index + 1])
    return column_fields


@triton.jit
def _load_stream_fields(iota: tl.tensor, WIDTH: tl.constexpr, PAD: tl.constexpr) -> tl.tuple:
    column = tl.arange(0, PAD)[None, :]
    return tl.load(iota + column % WIDTH // ((WIDTH + 1) // 2) * 8), tl.load(iota + column // WIDTH)


BYTES_PTX = tl.constexpr(
    """{ .reg .b32 a, b; shr.u32 a, $2, 3; shr.u32 b, $2, 11; add.u32 a, a, b; add.u32 a, a, 0x4240; prmt.b32 $0, $1, 0, a; }"""
)
"""PTX that extracts one byte from each half of a register. The halves of another register select bit 0 or 8 as its first bit."""


@triton.jit
def expand_planes(
    loaded: tl.tuple, column_fields: tl.tuple, PACKING_INDEX: tl.constexpr, PACKING: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the planes of a code stream as int16 tiles. In a plane of bytes, each column gets its own byte."""
    FIRST: tl.constexpr = PACKING.stream
    BYTES: tl.constexpr = PACKING.column_bytes
    expanded = ()
    for plane in tl.static_range(BYTES // 2):
        expanded = expanded + (loaded[FIRST + plane],)
    if BYTES % 2:
        word = loaded[FIRST + BYTES // 2]
        shift = broadcast_columns(column_fields[2 * PACKING_INDEX], MODE.transposed)
        if MODE.fast:
            byte = tl.inline_asm_elementwise(BYTES_PTX, "=r,r,r", [word, shift], dtype=tl.int16, is_pure=True, pack=2)
        else:
            byte = (word >> shift) & 0xFF
        expanded = expanded + (byte,)
    return expanded


@triton.constexpr_function
def select_ptx(field: int) -> str:
    # Bit 15 of each half of ``a`` shows that its field number is at least ``field``. It is then copied to all bits of the half.
    return f"""{{ .reg .b32 a; add.u32 a, $3, {(0x8000 - field) * 0x10001}; prmt.b32 a, a, 0, 0xBB99;
        lop3.b32 $0, a, $2, $1, 0xCA; }}"""


@triton.jit
def select_by_field(
    value: tl.tensor, other: tl.tensor, column_fields: tl.tuple, PACKING_INDEX: tl.constexpr, FIELD: tl.constexpr, MODE: tl.constexpr
) -> tl.tensor:
    """Return ``value`` in columns whose field index (``load_column_fields``) is below ``FIELD``, and ``other`` in all other columns.

    Both are 16-bit tiles of the code stream.
    """
    column_field = broadcast_columns(column_fields[2 * PACKING_INDEX + 1], MODE.transposed)
    if MODE.fast:
        value = tl.inline_asm_elementwise(
            select_ptx(FIELD), "=r,r,r,r", [value, other, column_field], dtype=value.dtype, is_pure=True, pack=2
        )
    else:
        value = tl.where(column_field < FIELD, value, other)
    return value


@triton.jit
def extract_straddling(planes: tl.tuple, BIT: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Extract ``BITS`` bits of each column, beginning at bit ``BIT``, as an int16 tile. The bits must span two words."""
    WORD: tl.constexpr = BIT // 16
    POSITION: tl.constexpr = BIT % 16
    if FAST:
        value = tl.inline_asm_elementwise(
            _extract_straddling_ptx(POSITION, BITS), "=r,r,r", [planes[WORD], planes[WORD + 1]], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        value = (planes[WORD] >> POSITION) & ((1 << (16 - POSITION)) - 1)
        value = (value | (planes[WORD + 1] << (16 - POSITION))) & ((1 << BITS) - 1)
    return value


@triton.jit
def extract_bits(planes: tl.tuple, BIT: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Extract ``BITS`` bits of each column, beginning at bit ``BIT``, as an int16 tile."""
    if BIT % 16 + BITS > 16:
        value = extract_straddling(planes, BIT, BITS, FAST)
    else:
        value = extract_field(planes[BIT // 16], BIT % 16, BITS, FAST)
    return value


@triton.constexpr_function
def shift_ptx(position: int, stride_bits: int) -> str:
    return f"""{{ .reg .b32 a, b, low, high; and.b32 a, $2, 0xFFFF; shr.u32 b, $2, 16;
        mad.lo.u32 a, a, {stride_bits}, {position}; mad.lo.u32 b, b, {stride_bits}, {position};
        shr.u32 low, $1, a; shr.u32 high, $1, b; prmt.b32 $0, low, high, 0x7610; }}"""


@triton.jit
def shift_to_field(
    word: tl.tensor,
    column_fields: tl.tuple,
    PACKING_INDEX: tl.constexpr,
    POSITION: tl.constexpr,
    STRIDE_BITS: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tensor:
    """Shift each int16 word right, so that the field selected by its column begins at bit 0.

    The first field begins at bit ``POSITION``, and each later field ``STRIDE_BITS`` bits higher. Bits above the field belong to other
    fields or, if ``MODE.fast`` is True, to the neighboring word.
    """
    column_field = broadcast_columns(column_fields[2 * PACKING_INDEX + 1], MODE.transposed)
    if MODE.fast:
        value = tl.inline_asm_elementwise(
            shift_ptx(POSITION, STRIDE_BITS), "=r,r,r", [word, column_field], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        value = word >> (column_field * STRIDE_BITS + POSITION)
    return value


@triton.constexpr_function
def step_position(step: int, bits: int, field_stride: int) -> int:
    """Return the bit at which the digits of ``step`` begin in the words that ``step_words`` returns.

    With a ``field_stride``, all steps share the same words, so the digits begin at a different bit in each step.
    """
    return step * bits if field_stride > 1 else 0


@triton.jit
def step_words(
    planes: tl.tuple,
    column_fields: tl.tuple,
    PACKING_INDEX: tl.constexpr,
    PACKING: tl.constexpr,
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    STEP: tl.constexpr,
    FIELDS_PER_TILE: tl.constexpr,
    FIELD_STRIDE: tl.constexpr,
    FIELDS: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tensor:
    """Return an int16 tile with the digits of step ``STEP`` at bit ``step_position``, for rows that are narrower than the tile.

    There are ``FIELDS`` fields, and field 0 begins at bit ``FIRST``. Neighboring fields of the tile are ``FIELD_STRIDE`` fields apart in a
    word (``tiles.tile_field_stride``). All other bits of the tile are undefined.
    """
    FIELD: tl.constexpr = 0 if FIELD_STRIDE > 1 else STEP * FIELDS_PER_TILE
    BEGIN: tl.constexpr = FIRST + FIELD * BITS
    LAST: tl.constexpr = BEGIN + (FIELDS_PER_TILE - 1) * FIELD_STRIDE * BITS
    if BEGIN // 16 == (LAST + BITS - 1) // 16:
        value = shift_to_field(planes[BEGIN // 16], column_fields, PACKING_INDEX, BEGIN % 16, FIELD_STRIDE * BITS, MODE)
    else:
        value = extract_bits(planes, BEGIN, BITS, MODE.fast)
        for index in tl.static_range(1, FIELDS_PER_TILE):
            if FIELD + index * FIELD_STRIDE < FIELDS:
                other = extract_bits(planes, BEGIN + index * FIELD_STRIDE * BITS, BITS, MODE.fast)
                value = select_by_field(value, other, column_fields, PACKING_INDEX, index, MODE)
    return value
