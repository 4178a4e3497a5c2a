"""The codecs whose symbols are entries of a table, packed rows to values in one pass: scalar, octahedral, angle, quaternion.

A value is a member of its symbol's entry times what its token, or its symbol, is stored to be scaled by; ``formats/`` is the oracle.
Each thread decodes the symbols of its channels, so that what is written is contiguous; an entry is kept within its table.
"""

# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

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
    from collections.abc import Mapping

    from kvpack.formats.base import Codec

Piece = tuple[int, int, int]
"""A code stream, a digit of it, and the bits by which that digit is shifted up in the kernel's."""


class Form(NamedTuple):
    """What a kernel knows of a codec: the values per symbol, and the pieces of each of its digits.

    An octahedral symbol is one number: an index of ``index_bits``, two sign bits from bit ``signs_at`` on, and from ``norm_at`` on a
    norm in ``norm_mask``. A quaternion's radius is a code of at most ``largest_radius``.
    """

    kind: str
    values: int
    digits: tuple[tuple[Piece, ...], ...]
    index_bits: int = 0
    signs_at: int = 0
    norm_at: int = 0
    norm_mask: int = 0
    largest_radius: int = 0


class CodeStream(NamedTuple):
    """A code stream's planes and packing: per digit the place of its first field and its base, in bits where all bases are binary."""

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
    table, norm_table = _tables(codec, scales.device)
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


@lru_cache(maxsize=64)
def _form(codec: Codec) -> Form | None:
    # A class that is not known itself may hold more than its parent's streams.
    numbers = {name: number for number, name in enumerate(codec.packings())}
    packings = codec.packings()

    def factored(name: str) -> tuple[Piece, ...]:
        if name in numbers:
            return ((numbers[name], 0, 0),)
        low = packings[f"{name}_low"].bases[0].bit_length() - 1
        return (numbers[f"{name}_low"], 0, 0), (numbers[f"{name}_high"], 0, low)

    direct: tuple[tuple[Piece, ...], ...] = (((0, 0, 0),), ((0, 1, 0),))
    if type(codec) is Scalar and not codec.bits_high:
        return Form("scalar", 1, (((0, 0, 0),),))
    if type(codec) is Quaternion:
        digits = direct if "symbol" in numbers else (factored("codeword"), factored("radius"))
        return Form("quaternion", 4, digits, largest_radius=(1 << codec.radius_bits) - 1)
    if type(codec) is Angle:
        if codec.norm == "fp32":
            return Form("angle fp32", 2, (factored("angle"),))
        return Form(f"angle {codec.norm}", 2, direct if "symbol" in numbers else (factored("angle"), factored("norm_codes")))
    if type(codec) is Octahedral:
        index_bits = 2 * (codec.b_dir - 1)
        with_index = norm_with_index(codec.b_dir, codec.b_norm)
        first = index_bits + (codec.b_norm if with_index else 0)
        # In one number: the direction, then the signs above the index and its norm, or the norm above the signs.
        if "symbol" in numbers:
            whole: tuple[Piece, ...] = ((0, 0, 0),) if len(packings["symbol"].bases) == 1 else ((0, 0, 0), (0, 1, first))
        else:
            whole = (*(((numbers["index"], 0, 0),) if "index" in numbers else ()), (numbers["sign"], 0, first))
        norm_at = index_bits if with_index else first + 2
        return Form("octahedral", 3, (whole,), index_bits, first, norm_at, (1 << codec.b_norm) - 1)
    return None


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


def _tables(codec: Codec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The entries of ``codec``, and octahedral's norms of triplets."""
    if isinstance(codec, Scalar):
        return signed_values(codec.magnitude_table, device), None
    if isinstance(codec, Octahedral):
        return signed_directions(codec.direction_table, device), values_of(codec.norm_table, device)
    if isinstance(codec, Angle):
        return bin_directions(codec.bins, device), None
    assert isinstance(codec, Quaternion)
    return codewords(codec.seed, codec.secondary, device), None


@triton.jit
def _digit_of_stream(
    planes: tl.tuple,
    strides: tl.tuple,
    batch: tl.tensor,
    head: tl.tensor,
    token: tl.tensor,
    symbol: tl.tensor,
    mask: tl.tensor,
    STREAM: tl.constexpr,
    DIGIT: tl.constexpr,
) -> tl.tensor:
    own = ()
    own_strides = ()
    PLANES: tl.constexpr = STREAM.planes
    for plane in tl.static_range(PLANES):
        own = own + (planes[STREAM.first_plane + plane],)
        own_strides = own_strides + (strides[STREAM.first_plane + plane],)
    first: tl.constexpr = STREAM.first_places[DIGIT]
    base: tl.constexpr = STREAM.bases[DIGIT]
    if STREAM.binary:
        value = load_bit_fields(own, own_strides, batch, head, token, symbol, mask, first, base, STREAM.width, STREAM.column_bytes)
    else:
        columns = load_columns(own, own_strides, batch, head, token, symbol, mask, STREAM.width, STREAM.column_bytes)
        value = digit_of_field(columns, symbol // STREAM.width, first, base, STREAM.fields)
    return value


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
    """The pieces of one digit together, int32."""
    value = tl.full(mask.shape, 0, tl.int32)
    for piece in tl.static_range(len(PIECES)):
        part = _digit_of_stream(
            planes, strides, batch, head, token, symbol, mask,
            constant_at(STREAMS, constant_at(PIECES, piece, 0)), constant_at(PIECES, piece, 1),
        )  # fmt: skip
        value |= part << constant_at(PIECES, piece, 2)
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
