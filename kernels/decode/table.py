"""Decoder for ``kernel`` of codecs whose symbols index a table: scalar, octahedral, angle and quaternion.

A value is an element of its symbol's table entry times a norm or scale, as in ``formats/``. A tile is ``[token, symbol]``, and the values
of a symbol are joined along a new axis; if there are three, the tile repeats each symbol three times instead. Table indices are clamped to
the table's size.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.bitpack.columns import constant_at

from .digits import CodeStream, code_streams, load_digit
from .kernel import TileDecoder, prepare_rows
from .rows import EnginePages, PackedPart, PreparedDecode, as_float32, load_per_token
from .table_codecs import TABLE_CODECS, TableForm, table_form

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvpack.formats.base import Codec



TRIPLET_THREAD_FACTOR = 2
"""Factor for the usual number of threads if symbols have three values, because lookups would otherwise fill the registers."""


class TableConstants(NamedTuple):
    """Compile-time constants of a codec.

    ``codes`` are the packings of its code streams, ``entries`` is the number of table entries, and ``scales`` is the index of the stream of
    norms or scales. ``joined`` is the number of values per tile lane: 1 for symbols with three values, otherwise all values of a symbol.
    """

    codes: tuple[CodeStream, ...]
    form: TableForm
    entries: int
    scales: int
    joined: int


def prepare(
    codec: Codec, packed: Sequence[PackedPart], out: torch.Tensor, rotated: bool, pages: EnginePages | None = None
) -> PreparedDecode | None:
    """Prepare the launch that decodes a table codec, as ``decode.prepare`` does. Returns None for other codecs and unsupported options.

    In float32, values equal those of the codec's ``decode_frame``, except for the last bits of logarithmic norms.
    """
    form = table_form(codec)
    if form is None:
        return None
    row = TABLE_CODECS[type(codec)]
    tables = [part for part in (row.table(codec, out.device), row.norm_table(codec, out.device)) if part is not None]
    joined = 1 if form.width == 3 else form.width
    constants = TableConstants(code_streams(codec), form, tables[0].numel() // form.width, len(codec.row_layouts) - 1, joined)
    return prepare_rows(
        codec, packed, out, rotated, pages, TileDecoder(_decode_table, constants), *tables, min_channels=joined,
        threads=TRIPLET_THREAD_FACTOR if form.width == 3 else 1,
    )  # fmt: skip


@triton.jit
def _load_piece(
    streams: tl.tuple, token: tl.tensor, symbol: tl.tensor, mask: tl.tensor, CODE: tl.constexpr, PIECE: tl.constexpr
) -> tl.tensor:
    """Load one piece of a digit, and shift it to its position in the digit: int32 ``[token, symbol]``."""
    return load_digit(streams, token, symbol, mask, CODE, PIECE.digit) << PIECE.shift


@triton.jit
def _load_combined_digit(
    streams: tl.tuple, token: tl.tensor, symbol: tl.tensor, mask: tl.tensor, CODES: tl.constexpr, PIECES: tl.constexpr
) -> tl.tensor:
    """Load all pieces of one digit of each symbol, and combine them into int32 ``[token, symbol]``."""
    value = tl.full(mask.shape, 0, tl.int32)
    for piece in tl.static_range(len(PIECES)):
        value |= _load_piece(streams, token, symbol, mask, constant_at(CODES, constant_at(PIECES, piece, 0)), constant_at(PIECES, piece))
    return value


@triton.jit
def _decode_table(tile: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tensor:
    """Return the values of a ``RowTile``, float32 ``[token, channel]``: entries of ``table`` ``[entry, value]`` times their norms.

    For octahedral, ``norm_table`` contains the norms that symbols select.
    """
    CODES: tl.constexpr = CONSTANTS.codes
    FORM: tl.constexpr = CONSTANTS.form
    JOINED: tl.constexpr = CONSTANTS.joined
    DIM: tl.constexpr = SHAPE.dim
    TOKENS: tl.constexpr = SHAPE.tokens
    CHANNELS: tl.constexpr = SHAPE.channels
    KIND: tl.constexpr = FORM.kind
    VALUES: tl.constexpr = FORM.width
    DIGITS: tl.constexpr = FORM.digits
    REPEATED: tl.constexpr = VALUES // JOINED
    lane = tl.arange(0, CHANNELS // JOINED)[None, :]
    if REPEATED == 1:
        symbol = lane
    else:
        symbol = lane // REPEATED
        # Positions of the first two values' sign bits; the third value has none, and bit 31 of the code is 0.
        sign_shift = tl.where(lane % 3 < 2, FORM.signs_at + lane % 3, 31)
    mask = (tile.token < tile.count) & (lane * JOINED < DIM)
    scale = tile.streams[CONSTANTS.scales]
    entry = _load_combined_digit(tile.streams, tile.token, symbol, mask, CODES, constant_at(DIGITS, 0))
    if KIND == "octahedral":
        symbol_code = entry
        entry = entry & ((1 << FORM.index_bits) - 1)
    else:
        entry = tl.minimum(entry, CONSTANTS.entries - 1)
    if KIND == "angle fp32":
        factor = as_float32(tl.load(scale + (tile.token * (DIM // 2) + lane), mask, 0))
    elif KIND == "angle linear" or KIND == "angle log":
        step = load_per_token(scale, tile.count, TOKENS, 2, 0)
        minimum = load_per_token(scale, tile.count, TOKENS, 2, 1)
        factor = minimum + step * _load_combined_digit(tile.streams, tile.token, symbol, mask, CODES, constant_at(DIGITS, 1)).to(tl.float32)
        if KIND == "angle log":
            factor = tl.exp2(factor)
    else:
        factor = load_per_token(scale, tile.count, TOKENS, 1, 0)
        if KIND == "quaternion":
            code = _load_combined_digit(tile.streams, tile.token, symbol, mask, CODES, constant_at(DIGITS, 1)).to(tl.float32)
            factor = code * tl.div_rn(factor, tl.full(factor.shape, FORM.largest_radius, tl.float32))
    if KIND == "octahedral":
        # Read only the table's first quarter, whose values have no signs, because it fits in few cache lines.
        direction_bits = tl.load(tile.table + (entry * VALUES + lane % 3), mask, 0.0).to(tl.int32, bitcast=True) ^ (
            (symbol_code >> sign_shift & 1) << 31
        )
        norm = tl.load(tile.norm_table + (symbol_code >> FORM.norm_at & FORM.norm_mask))
        value = direction_bits.to(tl.float32, bitcast=True) * norm * factor
    elif JOINED == 1:
        value = tl.load(tile.table + entry, mask, 0.0) * factor
    else:
        # Each thread loads all values of a symbol at once.
        address = (entry * VALUES)[:, :, None] + tl.arange(0, VALUES)[None, None, :]
        value = tl.load(tile.table + address, mask[:, :, None], 0.0) * factor[:, :, None]
    return tl.reshape(value, (TOKENS, CHANNELS))
