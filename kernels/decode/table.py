"""Decoder for ``kernel`` of codecs whose symbols index a table: scalar, octahedral, angle and quaternion.

A value is an element of its symbol's table entry times a norm or scale, as in ``formats/``. A tile is ``[token, symbol]``, and the values
of a symbol are joined along a new axis; if there are three, the tile repeats each symbol three times instead. Table indices are clamped to
the table's size.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.angle import Angle, bin_directions
from kvpack.formats.base import Codec
from kvpack.formats.octahedral import Octahedral, norm_extends_index, signed_directions
from kvpack.formats.quaternion import Quaternion, codewords
from kvpack.formats.scalar import Scalar, signed_values
from kvpack.formats.token_norms import LOG8
from kvpack.kernels.bitpack.columns import constant_at
from kvpack.kernels.encode.rows import table_values

from .digits import CodeStream, code_streams, load_digit
from .kernel import TileDecoder, prepare_rows
from .rows import EnginePages, PackedPart, PreparedDecode, as_float32, load_per_token

TRIPLET_THREAD_FACTOR = 2
"""Factor for the usual number of threads if symbols have three values, because lookups would otherwise fill the registers."""


class TableConstants(NamedTuple):
    """Compile-time constants of a table codec.

    ``codes`` are the packings of its code streams, ``entries`` is the number of table entries, and ``scales`` is the index of the stream of
    norms or scales. ``joined`` is the number of values per tile lane: 1 for three-value symbols, otherwise the number per symbol.
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
    """Load one piece of a digit, shifted to its position in the digit: int32 ``[token, symbol]``."""
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
    """Decode a ``RowTile`` to float32 ``[token, channel]``: entries of ``table`` ``[entry, value]`` times their norms.

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


class DigitPiece(NamedTuple):
    """Part of a digit: digit ``digit`` of code stream ``stream`` provides the bits of the whole digit from bit ``shift`` on."""

    stream: int
    digit: int = 0
    shift: int = 0


class TableForm(NamedTuple):
    """Description of how a codec's symbols select table entries: ``width`` values per symbol, and the pieces of each digit of a symbol.

    An octahedral symbol is one number. It contains a table index of ``index_bits`` bits, two sign bits from bit ``signs_at`` on, and a norm
    code from bit ``norm_at`` on, masked by ``norm_mask``. A quaternion's radius code is at most ``largest_radius``.
    """

    kind: str
    width: int
    digits: tuple[tuple[DigitPiece, ...], ...]
    index_bits: int = 0
    signs_at: int = 0
    norm_at: int = 0
    norm_mask: int = 0
    largest_radius: int = 0


class TableCodec(NamedTuple):
    """Functions that return a codec's form (or None), its table ``[entry, value]``, and its table of norms (or None)."""

    form: Callable[[Any], TableForm | None]
    table: Callable[[Any, torch.device], torch.Tensor]
    norm_table: Callable[[Any, torch.device], torch.Tensor | None] = lambda codec, device: None


def _scalar_form(codec: Scalar) -> TableForm | None:
    return None if codec.bits_high or codec.norm == LOG8 else TableForm("scalar", 1, ((DigitPiece(0),),))


def _octahedral_form(codec: Octahedral) -> TableForm | None:
    """Return the form of the octahedral codec, with one digit that contains the direction index, the signs and the norm code."""
    if codec.norm == LOG8:
        return None
    packings, streams = codec.packings(), _stream_indices(codec)
    index_bits = 2 * (codec.b_dir - 1)
    with_index = norm_extends_index(codec.b_dir, codec.b_norm)
    signs_at = index_bits + (codec.b_norm if with_index else 0)
    if "symbol" not in streams:
        index = (DigitPiece(streams["index"]),) if "index" in streams else ()
        pieces = (*index, DigitPiece(streams["sign"], shift=signs_at))
    elif len(packings["symbol"].bases) == 1:
        pieces = (DigitPiece(0),)
    else:
        pieces = (DigitPiece(0), DigitPiece(0, digit=1, shift=signs_at))
    norm_at = index_bits if with_index else signs_at + 2
    return TableForm("octahedral", 3, (pieces,), index_bits, signs_at, norm_at, (1 << codec.b_norm) - 1)


def _angle_form(codec: Angle) -> TableForm:
    if codec.norm == "fp32":
        return TableForm("angle fp32", 2, (_digit_pieces(codec, "angle"),))
    return TableForm(f"angle {codec.norm}", 2, _two_digit_pieces(codec, "angle", "norm_codes"))


def _quaternion_form(codec: Quaternion) -> TableForm:
    return TableForm("quaternion", 4, _two_digit_pieces(codec, "codeword", "radius"), largest_radius=(1 << codec.radius_bits) - 1)


def _stream_indices(codec: Codec) -> dict[str, int]:
    return {name: number for number, name in enumerate(codec.packings())}


def _digit_pieces(codec: Codec, name: str) -> tuple[DigitPiece, ...]:
    """Return the pieces of the digit ``name``: one for a stream of that name, or two for the streams of its low and its high bits."""
    streams = _stream_indices(codec)
    if name in streams:
        return (DigitPiece(streams[name]),)
    low_bits = codec.packings()[f"{name}_low"].bases[0].bit_length() - 1
    return DigitPiece(streams[f"{name}_low"]), DigitPiece(streams[f"{name}_high"], shift=low_bits)


def _two_digit_pieces(codec: Codec, first: str, second: str) -> tuple[tuple[DigitPiece, ...], ...]:
    """Return the pieces of a symbol's two digits.

    In the direct arrangement, both digits are in the stream "symbol"; otherwise, they are in the streams ``first`` and ``second``.
    """
    if "symbol" in codec.packings():
        return (DigitPiece(0),), (DigitPiece(0, digit=1),)
    return _digit_pieces(codec, first), _digit_pieces(codec, second)


TABLE_CODECS: dict[type[Codec], TableCodec] = {
    Scalar: TableCodec(_scalar_form, lambda codec, device: signed_values(codec.magnitude_table, device)),
    Octahedral: TableCodec(
        _octahedral_form,
        lambda codec, device: signed_directions(codec.direction_table, device),
        lambda codec, device: table_values(codec.norm_table, device),
    ),
    Angle: TableCodec(_angle_form, lambda codec, device: bin_directions(codec.bins, device)),
    Quaternion: TableCodec(_quaternion_form, lambda codec, device: codewords(codec.seed, codec.secondary, device)),
}
"""Codecs that this kernel decodes. They are looked up by exact class, because a subclass may store more streams."""


@lru_cache(maxsize=64)
def table_form(codec: Codec) -> TableForm | None:
    """Return the form of ``codec``, or None if its class or its options are not supported."""
    row = TABLE_CODECS.get(type(codec))
    return row.form(codec) if row else None
