"""Decode packed rows of codecs whose symbols are table entries, in one pass: scalar, octahedral, angle and quaternion.

A value is an element of its symbol's table entry times the norm or scale of its token or symbol; ``formats/`` is the oracle. A tile is
``[token, symbol]``. The values of a symbol are joined side by side; if there are three, a tile repeats each symbol three times instead.
Entry numbers are clamped to the table's size.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.bitpack.columns import constant_at

from .digits import CodeStream, code_streams, load_digit
from .kernel import Decoder, prepare_rows
from .rows import as_float32, load_per_token
from .table_codecs import TABLE_CODECS, Form, form_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvpack.formats.base import Codec

    from .rows import Packed, Pages, Prepared


TRIPLET_THREADS = 2
"""Times as many threads as usual for triplets: lookups of one thread's values would fill its registers, and leave room for few warps."""


class TableConstants(NamedTuple):
    """The packings of codes, the codec's form, the number of table entries, the scale stream's number, and the values per entry.

    Values are ``joined`` if they are in one lane of a tile: all but triplets.
    """

    codes: tuple[CodeStream, ...]
    form: Form
    entries: int
    scales: int
    joined: int


def prepare(codec: Codec, packed: Sequence[Packed], out: torch.Tensor, rotated: bool, pages: Pages | None = None) -> Prepared | None:
    """Run ``prepare_rows`` for a table codec; None for any other codec.

    In float32 the values equal those of the codec's ``decode_frame``, except for the last bits of logarithmic norms.
    """
    form = form_of(codec)
    if form is None:
        return None
    row = TABLE_CODECS[type(codec)]
    tables = [part for part in (row.table(codec, out.device), row.norm_table(codec, out.device)) if part is not None]
    joined = 1 if form.values == 3 else form.values
    constants = TableConstants(code_streams(codec), form, tables[0].numel() // form.values, len(codec.row_layouts) - 1, joined)
    return prepare_rows(
        codec, packed, out, rotated, pages, Decoder(_values, constants), *tables, least_channels=joined,
        threads=TRIPLET_THREADS if form.values == 3 else 1,
    )  # fmt: skip


@triton.jit
def _piece(streams: tl.tuple, token: tl.tensor, symbol: tl.tensor, mask: tl.tensor, CODE: tl.constexpr, PIECE: tl.constexpr) -> tl.tensor:
    """Load one piece of a digit, int32 ``[token, symbol]``, at its bit position."""
    return load_digit(streams, token, symbol, mask, CODE, PIECE.digit) << PIECE.shift


@triton.jit
def _digit(streams: tl.tuple, token: tl.tensor, symbol: tl.tensor, mask: tl.tensor, CODES: tl.constexpr, PIECES: tl.constexpr) -> tl.tensor:
    """Load one digit of each symbol, int32 ``[token, symbol]``, and combine its pieces."""
    value = tl.full(mask.shape, 0, tl.int32)
    for piece in tl.static_range(len(PIECES)):
        value |= _piece(streams, token, symbol, mask, constant_at(CODES, constant_at(PIECES, piece, 0)), constant_at(PIECES, piece))
    return value


@triton.jit
def _values(tile: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tensor:
    """Return the entries of the tile's ``table``, ``[entry, value]``, times their norms.

    The second norms of octahedral are in ``norm_table``.
    """
    CODES: tl.constexpr = CONSTANTS.codes
    FORM: tl.constexpr = CONSTANTS.form
    JOINED: tl.constexpr = CONSTANTS.joined
    DIM: tl.constexpr = SHAPE.dim
    TOKENS: tl.constexpr = SHAPE.tokens
    CHANNELS: tl.constexpr = SHAPE.channels
    KIND: tl.constexpr = FORM.kind
    VALUES: tl.constexpr = FORM.values
    DIGITS: tl.constexpr = FORM.digits
    REPEATED: tl.constexpr = VALUES // JOINED
    lane = tl.arange(0, CHANNELS // JOINED)[None, :]
    if REPEATED == 1:
        symbol = lane
    else:
        symbol = lane // REPEATED
        # The shifts that move an entry's sign bits into place; the third value has no sign.
        sign_at = tl.where(lane % 3 < 2, FORM.signs_at + lane % 3, 31)
    mask = (tile.token < tile.count) & (lane * JOINED < DIM)
    scale = tile.streams[CONSTANTS.scales]
    entry = _digit(tile.streams, tile.token, symbol, mask, CODES, constant_at(DIGITS, 0))
    if KIND == "octahedral":
        whole = entry
        entry = entry & ((1 << FORM.index_bits) - 1)
    else:
        entry = tl.minimum(entry, CONSTANTS.entries - 1)
    if KIND == "angle fp32":
        factor = as_float32(tl.load(scale + (tile.token * (DIM // 2) + lane), mask, 0))
    elif KIND == "angle linear" or KIND == "angle log":
        step = load_per_token(scale, tile.count, TOKENS, 2, 0)
        least = load_per_token(scale, tile.count, TOKENS, 2, 1)
        factor = least + step * _digit(tile.streams, tile.token, symbol, mask, CODES, constant_at(DIGITS, 1)).to(tl.float32)
        if KIND == "angle log":
            factor = tl.exp2(factor)
    else:
        factor = load_per_token(scale, tile.count, TOKENS, 1, 0)
        if KIND == "quaternion":
            code = _digit(tile.streams, tile.token, symbol, mask, CODES, constant_at(DIGITS, 1)).to(tl.float32)
            factor = code * tl.div_rn(factor, tl.full(factor.shape, FORM.largest_radius, tl.float32))
    if KIND == "octahedral":
        # The table's first quarter, whose values have no signs, is in few lines of the cache.
        unit = tl.load(tile.table + (entry * VALUES + lane % 3), mask, 0.0).to(tl.int32, bitcast=True) ^ ((whole >> sign_at & 1) << 31)
        norm = tl.load(tile.norm_table + (whole >> FORM.norm_at & FORM.norm_mask))
        value = unit.to(tl.float32, bitcast=True) * norm * factor
    elif JOINED == 1:
        value = tl.load(tile.table + entry, mask, 0.0) * factor
    else:
        # A thread loads all values of a symbol at once.
        at = (entry * VALUES)[:, :, None] + tl.arange(0, VALUES)[None, None, :]
        value = tl.load(tile.table + at, mask[:, :, None], 0.0) * factor[:, :, None]
    return tl.reshape(value, (TOKENS, CHANNELS))
