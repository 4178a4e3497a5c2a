"""Decode packed rows of the codecs whose symbols are entries of a table, in one pass: scalar, octahedral, angle and quaternion.

A value is an element of its symbol's table entry times the norm or scale of its token or symbol; ``formats/`` is the oracle. Each
thread decodes the symbols of its own channels, so that writes are contiguous. Entry numbers are limited to the table's size.
"""

# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.angle import Angle, bin_directions
from kvpack.formats.columns import next_power_of_two
from kvpack.formats.octahedral import Octahedral, norm_with_index, signed_directions
from kvpack.formats.quaternion import Quaternion, codewords
from kvpack.formats.scalar import Scalar, signed_values
from kvpack.kernels.encode.rows import values_of
from kvpack.kernels.words.columns import (
    TILE_SYMBOLS,
    check_shape,
    constant_at,
    digit_of_field,
    launch,
    load_bit_fields,
    load_columns,
    tile_origin,
)

if TYPE_CHECKING:
    from kvpack.formats.base import Codec


class Piece(NamedTuple):
    """A part of one of the kernel's digits: digit ``digit`` of code stream ``stream``, shifted up by ``shift`` bits."""

    stream: int
    digit: int = 0
    shift: int = 0


class Form(NamedTuple):
    """What the kernel knows of a codec: ``values`` per symbol, and the pieces of each of a symbol's digits.

    An octahedral symbol is one number: an index of ``index_bits``, two sign bits from bit ``signs_at`` up, and from ``norm_at`` up a
    norm code under ``norm_mask``. A quaternion's radius code is at most ``largest_radius``.
    """

    kind: str
    values: int
    digits: tuple[tuple[Piece, ...], ...]
    index_bits: int = 0
    signs_at: int = 0
    norm_at: int = 0
    norm_mask: int = 0
    largest_radius: int = 0


class TableCodec(NamedTuple):
    """How one codec is decoded: its form, None where an option is not taken; its table ``[entry, values]``; octahedral's norms."""

    form: Callable[[Any], Form | None]
    table: Callable[[Any, torch.device], torch.Tensor]
    norm_table: Callable[[Any, torch.device], torch.Tensor | None] = lambda codec, device: None


class CodeStream(NamedTuple):
    """A code stream's planes and packing.

    ``first_places`` and ``bases`` have one number per digit: the place value of its first field and its base, both as a number of bits
    if ``binary``.
    """

    first_plane: int
    planes: int
    first_places: tuple[int, ...]
    bases: tuple[int, ...]
    binary: bool
    fields: int
    width: int
    column_bytes: int


def decode_frame(codec: Codec, streams: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Decode streams of any strides to float32 ``[batch, kv_head, token, dim]`` in the coded frame; None for a codec of no table.

    Raises InvalidShape when a stream is not as ``codec.layout`` says.
    """
    form = _form(codec)
    if form is None:
        return None
    names = [f"{name}.{plane}" for name, packing in codec.packings().items() for plane in range(len(packing.planes))]
    batch, heads, tokens = streams[names[0]].shape[:3]
    for name, layout in codec.layout(batch, heads, tokens).items():
        check_shape(name, streams[name], layout.shape)
    planes = tuple(streams[name] for name in names)
    (scales,) = (streams[name] for name in codec.scales(1, 1, 1))
    row = TABLE_CODECS[type(codec)]
    table, norm_table = row.table(codec, scales.device), row.norm_table(codec, scales.device)
    out = torch.empty(batch, heads, tokens, codec.dim, dtype=torch.float32, device=scales.device)
    channels = next_power_of_two(codec.dim)
    block_tokens = max(1, TILE_SYMBOLS // channels)
    launch(
        _decode_frame, batch * heads * -(-tokens // block_tokens), out.device,
        out, planes, tuple(plane.stride() for plane in planes), scales, (*scales.stride(), 0), table, norm_table, heads, tokens,
        STREAMS=_code_streams(codec), FORM=form,
        ENTRIES=table.numel() // form.values, DIM=codec.dim, BLOCK_TOKENS=block_tokens, BLOCK_CHANNELS=channels,
    )  # fmt: skip
    return out


def _scalar(codec: Scalar) -> Form | None:
    return None if codec.bits_high else Form("scalar", 1, ((Piece(0),),))


def _octahedral(codec: Octahedral) -> Form:
    """One digit: the direction, then the signs above the index and its norm, or the norm above the signs."""
    packings, numbers = codec.packings(), _numbers(codec)
    index_bits = 2 * (codec.b_dir - 1)
    with_index = norm_with_index(codec.b_dir, codec.b_norm)
    signs_at = index_bits + (codec.b_norm if with_index else 0)
    if "symbol" not in numbers:
        index = (Piece(numbers["index"]),) if "index" in numbers else ()
        whole = (*index, Piece(numbers["sign"], shift=signs_at))
    elif len(packings["symbol"].bases) == 1:
        whole = (Piece(0),)
    else:
        whole = (Piece(0), Piece(0, digit=1, shift=signs_at))
    norm_at = index_bits if with_index else signs_at + 2
    return Form("octahedral", 3, (whole,), index_bits, signs_at, norm_at, (1 << codec.b_norm) - 1)


def _angle(codec: Angle) -> Form:
    if codec.norm == "fp32":
        return Form("angle fp32", 2, (_pieces(codec, "angle"),))
    return Form(f"angle {codec.norm}", 2, _two_digits(codec, "angle", "norm_codes"))


def _quaternion(codec: Quaternion) -> Form:
    return Form("quaternion", 4, _two_digits(codec, "codeword", "radius"), largest_radius=(1 << codec.radius_bits) - 1)


def _numbers(codec: Codec) -> dict[str, int]:
    """The number of each code stream."""
    return {name: number for number, name in enumerate(codec.packings())}


def _pieces(codec: Codec, name: str) -> tuple[Piece, ...]:
    """The digit that stream ``name`` holds, or that streams of its low and its high part hold."""
    numbers = _numbers(codec)
    if name in numbers:
        return (Piece(numbers[name]),)
    low_bits = codec.packings()[f"{name}_low"].bases[0].bit_length() - 1
    return Piece(numbers[f"{name}_low"]), Piece(numbers[f"{name}_high"], shift=low_bits)


def _two_digits(codec: Codec, first: str, second: str) -> tuple[tuple[Piece, ...], ...]:
    """The two digits of a symbol in the direct arrangement, or those of streams ``first`` and ``second`` in the dense one."""
    if "symbol" in codec.packings():
        return (Piece(0),), (Piece(0, digit=1),)
    return _pieces(codec, first), _pieces(codec, second)


TABLE_CODECS: dict[type[Codec], TableCodec] = {
    Scalar: TableCodec(_scalar, lambda codec, device: signed_values(codec.magnitude_table, device)),
    Octahedral: TableCodec(
        _octahedral,
        lambda codec, device: signed_directions(codec.direction_table, device),
        lambda codec, device: values_of(codec.norm_table, device),
    ),
    Angle: TableCodec(_angle, lambda codec, device: bin_directions(codec.bins, device)),
    Quaternion: TableCodec(_quaternion, lambda codec, device: codewords(codec.seed, codec.secondary, device)),
}
"""The codecs that this kernel decodes, by exact class: a subclass may hold more than its parent's streams."""


@lru_cache(maxsize=64)
def _form(codec: Codec) -> Form | None:
    row = TABLE_CODECS.get(type(codec))
    return row.form(codec) if row else None


@lru_cache(maxsize=64)
def _code_streams(codec: Codec) -> tuple[CodeStream, ...]:
    streams, planes = [], 0
    for packing in codec.packings().values():
        first, bases = tuple(places[0] for places in packing.place_values), packing.bases
        if packing.binary:
            first, bases = (tuple(value.bit_length() - 1 for value in values) for values in (first, bases))
        count = len(packing.planes)
        streams.append(CodeStream(planes, count, first, bases, packing.binary, packing.fields, packing.width, packing.column_bytes))
        planes += count
    return tuple(streams)


@triton.jit
def _piece_of_stream(
    planes: tl.tuple,
    strides: tl.tuple,
    batch: tl.tensor,
    head: tl.tensor,
    token: tl.tensor,
    symbol: tl.tensor,
    mask: tl.tensor,
    STREAM: tl.constexpr,
    PIECE: tl.constexpr,
) -> tl.tensor:
    """One piece of a digit, int32 ``[token, channel]``, at its bits of the digit."""
    own = ()
    own_strides = ()
    PLANES: tl.constexpr = STREAM.planes
    for plane in tl.static_range(PLANES):
        own = own + (planes[STREAM.first_plane + plane],)
        own_strides = own_strides + (strides[STREAM.first_plane + plane],)
    first: tl.constexpr = STREAM.first_places[PIECE.digit]
    base: tl.constexpr = STREAM.bases[PIECE.digit]
    if STREAM.binary:
        value = load_bit_fields(own, own_strides, batch, head, token, symbol, mask, first, base, STREAM.width, STREAM.column_bytes)
    else:
        columns = load_columns(own, own_strides, batch, head, token, symbol, mask, STREAM.width, STREAM.column_bytes)
        value = digit_of_field(columns, symbol // STREAM.width, first, base, STREAM.fields)
    return value << PIECE.shift


@triton.jit
def _digit(
    planes: tl.tuple,
    strides: tl.tuple,
    batch: tl.tensor,
    head: tl.tensor,
    token: tl.tensor,
    symbol: tl.tensor,
    mask: tl.tensor,
    STREAMS: tl.constexpr,
    PIECES: tl.constexpr,
) -> tl.tensor:
    """One digit of each symbol, int32 ``[token, channel]``: its pieces together."""
    value = tl.full(mask.shape, 0, tl.int32)
    for piece in tl.static_range(len(PIECES)):
        value |= _piece_of_stream(
            planes, strides, batch, head, token, symbol, mask,
            constant_at(STREAMS, constant_at(PIECES, piece, 0)), constant_at(PIECES, piece),
        )  # fmt: skip
    return value


@triton.jit
def _decode_frame(
    out: tl.tensor,
    planes: tl.tuple,
    plane_strides: tl.tuple,
    scales: tl.tensor,
    scale_strides: tl.tuple,
    table: tl.tensor,
    norm_table: tl.tensor,
    heads: tl.tensor,
    tokens: tl.tensor,
    STREAMS: tl.constexpr,
    FORM: tl.constexpr,
    ENTRIES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
) -> None:
    """Decode ``[BLOCK_TOKENS, BLOCK_CHANNELS]`` values of one head.

    ``out`` is float32 ``[batch, kv_head, token, dim]``; ``planes`` are ``[batch, kv_head, token, words]`` and ``scales``
    ``[batch, kv_head, token, ...]``, of any strides; ``table`` is ``[ENTRIES, values]`` and ``norm_table`` ``[norm code]``.
    ``token`` is ``[token, 1]``, ``channel`` ``[1, channel]``, and all tiles are ``[token, channel]``.
    """
    KIND: tl.constexpr = FORM.kind
    VALUES: tl.constexpr = FORM.values
    DIGITS: tl.constexpr = FORM.digits
    batch, head, begin = tile_origin(heads, tokens, BLOCK_TOKENS)
    token = (begin + tl.arange(0, BLOCK_TOKENS))[:, None]
    channel = tl.arange(0, BLOCK_CHANNELS)[None, :]
    mask = (token < tokens) & (channel < DIM)
    symbol = channel // VALUES
    scale = scales + batch * scale_strides[0] + head * scale_strides[1] + token * scale_strides[2]
    entry = _digit(planes, plane_strides, batch, head, token, symbol, mask, STREAMS, constant_at(DIGITS, 0))
    whole = entry
    if KIND == "octahedral":
        # The signs are the higher part of an entry's number.
        entry = entry & ((1 << FORM.index_bits) - 1) | (entry >> FORM.signs_at & 3) << FORM.index_bits
    value = tl.load(table + tl.minimum(entry, ENTRIES - 1) * VALUES + channel % VALUES, mask, 0.0)
    if KIND == "angle fp32":
        value = value * tl.load(scale + symbol.to(tl.int64) * scale_strides[3], mask, 0.0)
    else:
        factor = tl.load(scale, token < tokens, 0.0).to(tl.float32)
        if KIND == "octahedral":
            value = value * tl.load(norm_table + (whole >> FORM.norm_at & FORM.norm_mask)) * factor
        elif KIND == "scalar":
            value = value * factor
        else:
            code = _digit(planes, plane_strides, batch, head, token, symbol, mask, STREAMS, constant_at(DIGITS, 1)).to(tl.float32)
            if KIND == "quaternion":
                value = value * (code * tl.div_rn(factor, tl.full(factor.shape, FORM.largest_radius, tl.float32)))
            else:
                least = tl.load(scale + scale_strides[3], token < tokens, 0.0).to(tl.float32)
                norm = least + factor * code
                if KIND == "angle log":
                    norm = tl.exp2(norm)
                value = value * norm
    tl.store(out + ((batch * heads + head) * tokens + token) * DIM + channel, value, mask)
