"""Decoding of packed rows on the GPU. Codecs with their own kernel need one pass. For all others, a kernel unpacks the digits, and PyTorch
decodes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvpack.formats.base import Codec
from kvpack.kernels import codecs
from kvpack.kernels.bitpack import columns

from .output import supports_rotation
from .rows import EnginePages, PackedPart, PreparedDecode

MAX_TOKEN_STRIDE = 1 << 20
"""Exclusive upper bound of an output's token stride, in elements, because offsets within a block are 32-bit."""

FUSED_DTYPES = (torch.bfloat16, torch.float16)
"""Output dtypes for which kernels also apply inverse rotations, by float16 matrix products."""


def decode_frame(codec: Codec, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode ``streams``, with arbitrary strides, to float32 ``[batch, kv_head, token, dim]`` in the coded frame.

    Raises InvalidParameter if a stream does not match ``codec.layout``.
    """
    # A stream shared by all heads has a head axis of 1, but other streams have the full shape.
    batch, heads = (max(stream.shape[axis] for stream in streams.values()) for axis in (0, 1))
    tokens = codec.token_count(streams)
    out = torch.empty(batch, heads, tokens, codec.dim, dtype=torch.float32, device=next(iter(streams.values())).device)
    if decode_into(codec, [PackedPart(streams, tokens, 0)], out, False):
        return out
    return codec.decode_digits(codec.digits(streams, columns.unpack), streams)


def decode_into(codec: Codec, packed: Sequence[PackedPart], out: torch.Tensor, rotated: bool, pages: EnginePages | None = None) -> bool:
    """Decode ``packed`` into ``out`` ``[batch, kv_head, token, dim]``. Returns False if no kernel supports the call.

    Arguments and errors are as in ``prepare``. Unlike ``prepare``, this function also supports codecs that need several launches.
    """
    result = prepare(codec, packed, out, rotated, pages)
    if result is None:
        return supports_output(out) and codecs.codec_kernels(codec).decode_into(codec, packed, out, rotated, pages)
    result.run(out)
    return True


def prepare(
    codec: Codec, packed: Sequence[PackedPart], out: torch.Tensor, rotated: bool, pages: EnginePages | None = None
) -> PreparedDecode | None:
    """Prepare the launch that decodes ``packed`` into outputs with the dtype, shape and strides of ``out``.

    ``out`` is ``[batch, kv_head, token, dim]``, in the original frame if ``rotated``, otherwise in the coded frame. With ``pages``,
    ``packed`` is one page whose layout all pages share. Returns None in three cases: the codec has no decoder, ``supports_output`` returns
    False for ``out``, or ``rotated`` is True and the dtype or head dim is not supported (``FUSED_DTYPES``, ``stored.supports_rotation``).
    Raises InvalidParameter if a stream does not match ``codec.layout``.
    """
    rotated = rotated and codec.rotation.kind != "none"
    if not supports_output(out) or (rotated and (out.dtype not in FUSED_DTYPES or not supports_rotation(codec.rotation))):
        return None
    return codecs.codec_kernels(codec).prepare(codec, packed, out, rotated, pages)


def supports_output(out: torch.Tensor) -> bool:
    """Return True if kernels can write to ``out``: its channels must be contiguous, and its token stride less than ``MAX_TOKEN_STRIDE``."""
    return out.stride(3) == 1 and out.stride(2) < MAX_TOKEN_STRIDE
