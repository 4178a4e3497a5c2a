"""Decoding on the GPU: packed rows to values in one pass for codecs with a kernel of their own; others are only unpacked by a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpack.kernels import codecs
from kvpack.kernels.words import columns

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kvpack.formats.base import Codec


def decode_frame(codec: Codec, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode streams of any strides to float32 ``[batch, kv_head, token, dim]`` in the coded frame: ``codec.decode_frame``.

    Raises InvalidShape when a stream is not as ``codec.layout`` says.
    """
    frame = codecs.of_codec(codec).decode(codec, streams)
    return codec.decode_digits(codec.digits(streams, columns.unpack), streams) if frame is None else frame
