"""Encode on the GPU in one pass over the input, for codecs with a kernel here; ``formats/`` encodes the rest.

A kernel supports every option that its codec stores, and local searches. Anything else, and every run with a value that it flags
(``rows.flag_unless``), is left to ``formats/``, which returns the same streams or raises the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvpack.kernels import codecs

from .kernel import output_of
from .rows import LARGEST_ROW

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

_DTYPES = {"U8": torch.uint8, "U16": torch.uint16, "F16": torch.float16, "F32": torch.float32}


class Encoding(NamedTuple):
    """Streams to be filled: ``run()`` launches the kernels, and returns False if they do not support the codec's options.

    The streams are valid once ``flag``, int32 ``[1]``, has been read as 0.
    """

    streams: dict[str, torch.Tensor]
    flag: torch.Tensor
    run: Callable[[], bool]


def encode(codec: Codec, x: torch.Tensor, before: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor] | None:
    """Encode ``x`` ``[batch, kv_head, token, dim]`` in bfloat16, float16 or float32, of any strides, to the streams of ``codec.layout``.

    ``before`` contains the streams of the run that it continues. Returns None if ``formats/`` must encode it, because the kernels do not
    support the codec, its options or the values.
    """
    encoding = prepare(codec, x, before)
    if encoding is None or not encoding.run() or encoding.flag.item():
        return None
    return encoding.streams


def has_products(device: torch.device) -> bool:
    """Return True if the matrix units of ``device`` multiply bfloat16 (from Ampere on), or the kernels are interpreted."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def prepare(codec: Codec, x: torch.Tensor, before: Mapping[str, torch.Tensor] | None = None) -> Encoding | None:
    """Return the launch of ``encode``, with its memory allocated; None for a codec or device without a kernel, and for an empty ``x``.

    Run rows start as those of the run ``before``, or 0 without one.
    """
    encoder = codecs.of_codec(codec).encode
    batch, heads, tokens, dim = x.shape
    if encoder is None or dim * x.element_size() > LARGEST_ROW or not x.numel() or not has_products(x.device):
        return None
    streams = {}
    for name, layout in codec.layout(batch, heads, tokens).items():
        if layout.per == "run" and before is not None:
            streams[name] = before[name].clone()
        else:
            make = torch.zeros if layout.per == "run" else torch.empty
            streams[name] = make(layout.shape, dtype=_DTYPES[layout.dtype], device=x.device)
    flag = torch.zeros(1, dtype=torch.int32, device=x.device)
    return Encoding(streams, flag, partial(encoder, codec, x, output_of(codec, streams, flag)))
