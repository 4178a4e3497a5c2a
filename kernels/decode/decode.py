"""Decoding on the GPU: packed rows to values in one pass for codecs with a kernel here; others are only unpacked by a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpack.formats.angle import Angle
from kvpack.formats.group import Group
from kvpack.formats.octahedral import Octahedral
from kvpack.formats.quaternion import Quaternion
from kvpack.formats.scalar import Scalar
from kvpack.kernels.words import columns

from . import group, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kvpack.formats.base import Codec

DECODERS: dict[type[Codec], Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor | None]] = {
    Group: group.decode_frame,
    Scalar: table.decode_frame,
    Octahedral: table.decode_frame,
    Angle: table.decode_frame,
    Quaternion: table.decode_frame,
}
"""By the class itself: a subclass may have more streams than its parent."""


def decode_frame(codec: Codec, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode streams of any strides to float32 ``[batch, kv_head, token, dim]`` in the coded frame: ``codec.decode_frame``.

    Raises InvalidShape when a stream is not as ``codec.layout`` says.
    """
    decoder = DECODERS.get(type(codec))
    frame = decoder(codec, streams) if decoder else None
    return codec.decode_digits(codec.digits(streams, columns.unpack), streams) if frame is None else frame
