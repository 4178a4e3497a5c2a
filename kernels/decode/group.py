"""Decode packed rows of group to values in one pass (spec/codecs/group.md); ``formats/group.py`` is the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.kernels.words.columns import check_shape, launch, load_bit_fields, tile, tile_origin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.formats.group import Group


def decode_frame(codec: Group, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode streams of any strides to float32 ``[batch, kv_head, token, dim]`` in the coded frame.

    The values are those of ``Group.decode_frame``, bit for bit. Raises InvalidShape when a stream is not as ``codec.layout`` says.
    """
    packing = codec.packings()["codes"]
    batch, heads, tokens = streams["codes.0"].shape[:3]
    for name, layout in codec.layout(batch, heads, tokens).items():
        check_shape(name, streams[name], layout.shape)
    # There are few scales of 8 bits: they become binary16 before the kernel reads them.
    codec, streams = codec.with_pairs(streams)
    planes = tuple(streams[f"codes.{plane}"] for plane in range(len(packing.planes)))
    scales, token_scale = _as_int32(streams["scales"]), streams.get("token_scale")
    out = torch.empty(batch, heads, tokens, codec.dim, dtype=torch.float32, device=scales.device)
    block_tokens, block_channels = tile(packing)
    if codec.axis == "token":
        # A tile then lies within one group of tokens and loads one row of scales.
        block_tokens = min(block_tokens, codec.size)
    programs = batch * heads * -(-tokens // block_tokens)
    launch(
        _decode_frame,
        programs,
        out.device,
        out,
        planes,
        tuple(plane.stride() for plane in planes),
        scales,
        scales.stride(),
        token_scale,
        None if token_scale is None else token_scale.stride(),
        heads,
        tokens,
        BITS=codec.bits,
        DIM=codec.dim,
        SIZE=codec.size,
        ALONG_TOKENS=codec.axis == "token",
        WIDTH=packing.width,
        COLUMN_BYTES=packing.column_bytes,
        BLOCK_TOKENS=block_tokens,
        BLOCK_CHANNELS=block_channels,
    )
    return out


def _as_int32(scales: torch.Tensor) -> torch.Tensor:
    """``[..., 2]`` of scale and centre as int32 ``[..., 1]``, so that one load reads both; copied only if not aligned for it."""
    *strides, last = scales.stride()
    if last != 1 or any(step % 2 for step in (scales.storage_offset(), *strides)):
        scales = scales.clone(memory_format=torch.contiguous_format)
    return scales.view(torch.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _half(bits: tl.tensor) -> tl.tensor:
    """The low 16 bits as a binary16, widened to float32."""
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_frame(
    out: tl.tensor,
    planes: tl.tuple,
    plane_strides: tl.tuple,
    scales: tl.tensor,
    scale_strides: tl.tuple,
    token_scale: tl.tensor,
    token_scale_strides: tl.tuple,
    heads: tl.tensor,
    tokens: tl.tensor,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    ALONG_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMN_BYTES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
) -> None:
    """Decode ``[BLOCK_TOKENS, BLOCK_CHANNELS]`` values of one head.

    ``out`` is float32 ``[batch, kv_head, token, dim]`` and contiguous; ``planes`` are int16 ``[batch, kv_head, token, words]``,
    ``scales`` int32 ``[batch, kv_head, token or token group, dim or channel group]``, each a (scale, centre), and ``token_scale``
    ``[batch, 1, token]``, all of any strides. ``token`` is ``[token, 1]``, ``channel`` ``[1, channel]``, and the tiles of codes and
    values are ``[token, channel]``; those of scales are ``[1, channel]`` along tokens.
    """
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    channel = tl.arange(0, BLOCK_CHANNELS)[None, :]
    mask = (token < tokens) & (channel < DIM)
    code = load_bit_fields(planes, plane_strides, batch, head, token, channel, mask, 0, BITS, WIDTH, COLUMN_BYTES)
    scale_row = scales + batch * scale_strides[0] + head * scale_strides[1]
    if ALONG_TOKENS:
        scale_centre = tl.load(scale_row + first // SIZE * scale_strides[2] + channel.to(tl.int64) * scale_strides[3], channel < DIM, 0)
    else:
        scale_centre = tl.load(scale_row + token * scale_strides[2] + (channel // SIZE).to(tl.int64) * scale_strides[3], mask, 0)
    middle: tl.constexpr = ((1 << BITS) - 1) / 2
    value = (code.to(tl.float32) - middle) * _half(scale_centre) + _half(scale_centre >> 16)
    if token_scale is not None:
        factor = tl.load(token_scale + batch * token_scale_strides[0] + token * token_scale_strides[2], token < tokens, 0.0)
        value = value * factor.to(tl.float32)
    tl.store(out + ((batch * heads + head) * tokens + token) * DIM + channel, value, mask)
