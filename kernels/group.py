"""group on the GPU: packed rows to values in one pass (spec/codecs/group.md); ``formats/group.py`` is its oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from .columns import bit_field, check_shape, launch, load_words, tile, tile_origin

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
    planes = tuple(streams[f"codes.{plane}"] for plane in range(len(packing.planes)))
    pairs, token_scale = _pairs(streams["scales"]), streams.get("token_scale")
    out = torch.empty(batch, heads, tokens, codec.dim, device=pairs.device)
    block_tokens, block_columns = tile(packing)
    if codec.axis == "token":
        # A tile then lies inside one group of tokens, and loads its scales once.
        block_tokens = min(block_tokens, codec.size)
    programs = batch * heads * -(-tokens // block_tokens)
    launch(
        _decode_frame,
        programs,
        out.device,
        out,
        planes,
        tuple(plane.stride() for plane in planes),
        pairs,
        pairs.stride(),
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
        BLOCK_COLUMNS=block_columns,
    )
    return out


def _pairs(scales: torch.Tensor) -> torch.Tensor:
    """Scale and centre as the halves of one int32 ``[..., 1]``, read at once; copied only when they are not aligned for it."""
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
    pairs: tl.tensor,
    pair_strides: tl.tuple,
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
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    token = first + tl.arange(0, BLOCK_TOKENS)
    column = tl.arange(0, BLOCK_COLUMNS).to(tl.int64)
    mask = (token < tokens)[:, None] & (column < WIDTH)[None, :]
    words = load_words(planes, plane_strides, batch, head, token, column, mask, WIDTH, COLUMN_BYTES)
    if token_scale is not None:
        factor = tl.load(token_scale + batch * token_scale_strides[0] + token * token_scale_strides[2], token < tokens, 0.0)
    pair_row = pairs + batch * pair_strides[0] + head * pair_strides[1]
    out_row = out + ((batch * heads + head) * tokens + token) * DIM
    middle: tl.constexpr = ((1 << BITS) - 1) / 2
    for field in tl.static_range((DIM + WIDTH - 1) // WIDTH):
        channel = field * WIDTH + column
        inside = mask & (channel < DIM)[None, :]
        if ALONG_TOKENS:
            row = pair_row + first // SIZE * pair_strides[2]
            pair = tl.load(row + channel * pair_strides[3], (column < WIDTH) & (channel < DIM), 0)[None, :]
        elif SIZE % WIDTH == 0:
            # All channels of the field are of one group.
            row = pair_row + field * WIDTH // SIZE * pair_strides[3]
            pair = tl.load(row + token * pair_strides[2], token < tokens, 0)[:, None]
        else:
            pair = tl.load(pair_row + token[:, None] * pair_strides[2] + (channel // SIZE)[None, :] * pair_strides[3], inside, 0)
        value = (bit_field(words, field * BITS, 1 << BITS).to(tl.float32) - middle) * _half(pair) + _half(pair >> 16)
        if token_scale is not None:
            value = value * factor.to(tl.float32)[:, None]
        tl.store(out_row[:, None] + channel[None, :], value, inside)
