"""Decode on the GPU: packed rows to values in one pass for codecs with their own kernel; for others, a kernel only unpacks them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvpack.kernels import codecs
from kvpack.kernels.bitpack import columns

from .rows import Packed, Pages, Prepared
from .stored import turns_back

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpack.formats.base import Codec

MAX_TOKEN_STRIDE = 1 << 20
"""Elements between two tokens of an output, at most: offsets within a block are 32-bit."""

FUSED_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of values that the kernels rotate: their products are of binary16."""


def decode_frame(codec: Codec, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode streams of any strides to float32 ``[batch, kv_head, token, dim]`` in the coded frame, like ``codec.decode_frame``.

    Raises InvalidParameter if a stream does not match ``codec.layout``.
    """
    # Of a stream with one row for all heads, there is another one for each.
    batch, heads = (max(stream.shape[axis] for stream in streams.values()) for axis in (0, 1))
    tokens = codec.token_count(streams)
    out = torch.empty(batch, heads, tokens, codec.dim, dtype=torch.float32, device=next(iter(streams.values())).device)
    if decode_into(codec, [Packed(streams, tokens, 0)], out, False):
        return out
    return codec.decode_digits(codec.digits(streams, columns.unpack), streams)


def decode_into(codec: Codec, packed: Sequence[Packed], out: torch.Tensor, rotated: bool, pages: Pages | None = None) -> bool:
    """Decode ``packed`` into ``out`` ``[batch, kv_head, token, dim]``, in its dtype and strides; return True on success.

    Accepted arguments and errors are those of ``prepare``; codecs whose decoder needs several launches are also supported.
    """
    result = prepare(codec, packed, out, rotated, pages)
    if result is None:
        return supports_output(out) and codecs.of_codec(codec).decode_into(codec, packed, out, rotated, pages)
    result.run(out)
    return True


def prepare(codec: Codec, packed: Sequence[Packed], out: torch.Tensor, rotated: bool, pages: Pages | None = None) -> Prepared | None:
    """Return the launch that decodes ``packed`` into outputs with the dtype, shape and strides of ``out``, or None.

    ``out`` is ``[batch, kv_head, token, dim]``. ``rotated``: into the original frame, otherwise in the coded one. ``pages`` have the layout
    of the given one. The result is None for codecs without a decoder, rotated values with dtypes other than ``FUSED_DTYPES`` or head dims
    that ``stored.original`` does not support, and outputs with non-contiguous channels. Raises InvalidParameter if a stream does not match
    ``codec.layout``.
    """
    rotated = rotated and codec.rotation.kind != "none"
    if not supports_output(out) or (rotated and (out.dtype not in FUSED_DTYPES or not turns_back(codec.rotation))):
        return None
    return codecs.of_codec(codec).prepare(codec, packed, out, rotated, pages)


def supports_output(out: torch.Tensor) -> bool:
    """Return True if the kernels' offsets reach all of an output: its channels are contiguous, and its tokens not too far apart."""
    return out.stride(3) == 1 and out.stride(2) < MAX_TOKEN_STRIDE
