"""Decode packed rows of the codecs whose symbols are entries of a table, in one pass: scalar, octahedral, angle and quaternion.

A value is an element of its symbol's table entry times the norm or scale of its token or symbol; ``formats/`` is the oracle. Each
thread decodes the symbols of its own channels, so that writes are contiguous. Entry numbers are limited to the table's size.
"""

# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
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

from .forms import TABLE_CODECS, form_of

if TYPE_CHECKING:
    from kvpack.formats.base import Codec


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
    form = form_of(codec)
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
