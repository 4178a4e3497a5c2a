"""Decode packed rows of the codecs whose symbols are entries of a table, in one pass: scalar, octahedral, angle and quaternion.

A value is an element of its symbol's table entry times the norm or scale of its token or symbol; ``formats/`` is the oracle. A tile
is ``[token, symbol]``; the values of a symbol are brought side by side, or, where there are three, a tile repeats each symbol three
times. Entry numbers are limited to the table's size.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from triton import language as tl

from kvpack.kernels.bitpack.columns import constant_at

from . import rows
from .digits import code_streams, load_digit
from .rows import as_float32, load_block, load_per_token, rows_from
from .stored import load_signs, original, signs_of, store_tile
from .table_codecs import TABLE_CODECS, form_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvpack.formats.base import Codec

    from .rows import Packed, Pages, Prepared


TRIPLET_THREADS = 2
"""Times as many threads as usual for triplets: lookups of one thread's values would fill its registers, and leave room for few warps."""


def prepare(codec: Codec, packed: Sequence[Packed], out: torch.Tensor, rotated: bool, pages: Pages | None = None) -> Prepared | None:
    """Return the launch that decodes ``packed``, with streams of any strides, into ``out`` ``[batch, kv_head, token, dim]`` with dense
    channels.

    ``rotated``: into the original frame, else in the coded one. In float32 the values are those of the codec's ``decode_frame``, except for
    the last bits of logarithmic norms. None for a codec of no table. Raises InvalidParameter if a stream is not as
    ``codec.layout`` says.
    """
    form = form_of(codec)
    if form is None:
        return None
    batch, heads = out.shape[:2]
    rows.check(codec, packed, batch, heads)
    names = list(codec.row_layouts)
    row = TABLE_CODECS[type(codec)]
    table, norm_table = row.table(codec, out.device), row.norm_table(codec, out.device)
    channels = rows.channels_of(codec.dim, rotated)
    joined = 1 if form.values == 3 else form.values
    channels = max(channels, joined)
    tile = rows.tile_tokens(channels, rotated)
    streams = [([part.streams[name] for name in names], part.tokens, part.first) for part in packed]
    work = rows.work_of(streams, [1] * len(names), batch * heads, tile, out.device, pages)
    matrix = signs_of(codec.rotation, channels, out.device) if rotated else work.table
    return rows.prepared(
        _decode, work, out, matrix, table, work.table if norm_table is None else norm_table,
        CODES=code_streams(codec), FORM=form, ENTRIES=table.numel() // form.values, SCALES=len(names) - 1,
        ROTATED=rotated, DIM=codec.dim, TILE=tile, CHANNELS=channels, JOINED=joined,
        threads=TRIPLET_THREADS if form.values == 3 else 1,
    )  # fmt: skip


@triton.jit
def _piece(streams: tl.tuple, token: tl.tensor, symbol: tl.tensor, mask: tl.tensor, CODE: tl.constexpr, PIECE: tl.constexpr) -> tl.tensor:
    """One piece of a digit, int32 ``[token, symbol]``, at its bits of the digit."""
    return load_digit(streams, token, symbol, mask, CODE, PIECE.digit) << PIECE.shift


@triton.jit
def _digit(streams: tl.tuple, token: tl.tensor, symbol: tl.tensor, mask: tl.tensor, CODES: tl.constexpr, PIECES: tl.constexpr) -> tl.tensor:
    """One digit of each symbol, int32 ``[token, symbol]``: its pieces together."""
    value = tl.full(mask.shape, 0, tl.int32)
    for piece in tl.static_range(len(PIECES)):
        value |= _piece(streams, token, symbol, mask, constant_at(CODES, constant_at(PIECES, piece, 0)), constant_at(PIECES, piece))
    return value


@triton.jit(do_not_specialize=["blocks", "heads", "block_tokens"])
def _decode(
    out: tl.tensor,
    work: tl.tensor,
    status: tl.tensor,
    matrix: tl.tensor,
    table: tl.tensor,
    norm_table: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    blocks: tl.tensor,
    heads: tl.tensor,
    block_tokens: tl.tensor,
    STREAMS: tl.constexpr,
    INTEGERS: tl.constexpr,
    PAGED: tl.constexpr,
    OUT_ALIGNED: tl.constexpr,
    CODES: tl.constexpr,
    FORM: tl.constexpr,
    ENTRIES: tl.constexpr,
    SCALES: tl.constexpr,
    ROTATED: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    JOINED: tl.constexpr,
) -> None:
    """Decode the block of one program, tile by tile. ``table`` is ``[ENTRIES, values]`` and ``norm_table`` ``[norm code]``."""
    KIND: tl.constexpr = FORM.kind
    VALUES: tl.constexpr = FORM.values
    DIGITS: tl.constexpr = FORM.digits
    REPEATED: tl.constexpr = VALUES // JOINED
    block = load_block(out, work, status, batch_stride, head_stride, token_stride, blocks, heads, STREAMS, INTEGERS, PAGED, OUT_ALIGNED)
    if ROTATED:
        signs = load_signs(matrix, CHANNELS)
    token = tl.arange(0, TILE)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    lane = tl.arange(0, CHANNELS // JOINED)[None, :]
    if REPEATED == 1:
        symbol = lane
    else:
        symbol = lane // REPEATED
        # What an entry's signs are to be shifted by; the third value has none.
        sign_at = tl.where(lane % 3 < 2, FORM.signs_at + lane % 3, 31)
    for begin in range(0, block_tokens, TILE):
        count = block.count - begin
        streams = rows_from(block.streams, begin, STREAMS)
        mask = (token < count) & (lane * JOINED < DIM)
        scale = streams[SCALES]
        entry = _digit(streams, token, symbol, mask, CODES, constant_at(DIGITS, 0))
        if KIND == "octahedral":
            whole = entry
            entry = entry & ((1 << FORM.index_bits) - 1)
        else:
            entry = tl.minimum(entry, ENTRIES - 1)
        if KIND == "angle fp32":
            factor = as_float32(tl.load(scale + (token * (DIM // 2) + lane), mask, 0))
        elif KIND == "angle linear" or KIND == "angle log":
            step = load_per_token(scale, count, TILE, 2, 0)
            least = load_per_token(scale, count, TILE, 2, 1)
            factor = least + step * _digit(streams, token, symbol, mask, CODES, constant_at(DIGITS, 1)).to(tl.float32)
            if KIND == "angle log":
                factor = tl.exp2(factor)
        else:
            factor = load_per_token(scale, count, TILE, 1, 0)
            if KIND == "quaternion":
                code = _digit(streams, token, symbol, mask, CODES, constant_at(DIGITS, 1)).to(tl.float32)
                factor = code * tl.div_rn(factor, tl.full(factor.shape, FORM.largest_radius, tl.float32))
        if KIND == "octahedral":
            # The table's first quarter, whose values have no signs, is in few lines of the cache.
            unit = tl.load(table + (entry * VALUES + lane % 3), mask, 0.0).to(tl.int32, bitcast=True) ^ ((whole >> sign_at & 1) << 31)
            norm = tl.load(norm_table + (whole >> FORM.norm_at & FORM.norm_mask))
            value = unit.to(tl.float32, bitcast=True) * norm * factor
        elif JOINED == 1:
            value = tl.load(table + entry, mask, 0.0) * factor
        else:
            # A thread loads all values of a symbol at once.
            at = (entry * VALUES)[:, :, None] + tl.arange(0, VALUES)[None, None, :]
            value = tl.load(table + at, mask[:, :, None], 0.0) * factor[:, :, None]
        value = tl.reshape(value, (TILE, CHANNELS))
        if ROTATED:
            value = original(value, signs, DIM)
        store_tile(block.out + begin * token_stride, token_stride, token, channel, count, value, DIM)
