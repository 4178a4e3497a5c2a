"""Encoding on the GPU in one pass over the input, for codecs with a kernel. ``formats/`` encodes all others.

Kernels support all stored options and local searches. ``formats/`` handles all other options, and inputs with values that a kernel flags
(``rows.flag_unless``): it returns the same streams or raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from kvpack.formats.base import Codec
from kvpack.kernels import codecs
from kvpack.kernels.gpu import gpu

from .kernel import create_output
from .rows import MAX_ROW_BYTES

_DTYPES = {"U8": torch.uint8, "U16": torch.uint16, "F16": torch.float16, "F32": torch.float32}


class Encoding(NamedTuple):
    """A prepared encoding. ``run()`` launches the kernels. It returns False if they do not support the codec's options.

    After the launch, ``streams`` are valid if ``flag``, int32 ``[1]``, is 0.
    """

    streams: dict[str, torch.Tensor]
    flag: torch.Tensor
    run: Callable[[], bool]


def encode(
    codec: Codec, x: torch.Tensor, previous: Mapping[str, torch.Tensor] | None = None, errors: torch.Tensor | None = None
) -> dict[str, torch.Tensor] | None:
    """Encode ``x`` ``[batch, kv_head, token, dim]`` in bfloat16, float16 or float32 into the streams of ``codec.layout``.

    ``x`` may have arbitrary strides. ``previous`` contains the streams of the preceding tokens, if any, and ``errors`` is as in ``Output``.
    Returns None if ``formats/`` must encode ``x``, because the kernels do not support the codec, its options or some values.
    """
    encoding = prepare(codec, x, previous, errors)
    if encoding is None or not encoding.run() or encoding.flag.item():
        return None
    return encoding.streams


def prepare(
    codec: Codec, x: torch.Tensor, previous: Mapping[str, torch.Tensor] | None = None, errors: torch.Tensor | None = None
) -> Encoding | None:
    """Prepare the encoding of ``x``, and allocate its streams.

    Returns None if there is no kernel for the codec or device, or if ``x`` is empty. Streams with one row for all tokens are copied from
    ``previous``, or filled with zeros if it is None.
    """
    encoder = codecs.codec_kernels(codec).encode
    batch, heads, tokens, dim = x.shape
    if encoder is None or dim * x.element_size() > MAX_ROW_BYTES or not x.numel() or not gpu(x.device).multiplies_bf16:
        return None
    streams = {}
    for name, layout in codec.layout(batch, heads, tokens).items():
        if layout.per == "run" and previous is not None:
            streams[name] = previous[name].clone()
        else:
            allocate = torch.zeros if layout.per == "run" else torch.empty
            streams[name] = allocate(layout.shape, dtype=_DTYPES[layout.dtype], device=x.device)
    flag = torch.zeros(1, dtype=torch.int32, device=x.device)
    return Encoding(streams, flag, partial(encoder, codec, x, create_output(codec, streams, flag, None, errors)))
