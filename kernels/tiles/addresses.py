"""Addresses of a side's streams in memory, for kernels that load tiles from them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from kvpack.kernels.bitpack.streams import Stream, has_dense_rows
from kvpack.kernels.gpu import gpu

from .bound_loader import RowStream
from .work import STREAM_INTEGERS

VARIABLE = "KVPACK_INLINE_ASSEMBLY"


def uses_inline_ptx(device: torch.device) -> bool:
    """Return True if kernels on ``device`` use inline PTX."""
    return not gpu(device).interpreted and os.environ.get(VARIABLE, "") != "0"


def stream_addresses(streams: Mapping[str, torch.Tensor], requested: Sequence[Stream], keep_alive: list[torch.Tensor]) -> list[int]:
    """Return the address, batch stride and head stride of each ``requested`` stream as one flat list, in bytes.

    Streams whose rows are not contiguous and aligned are copied. All tensors whose addresses are returned are appended to ``keep_alive``.
    """
    result: list[int] = []
    for stream in requested:
        tensor = streams[stream.name]
        size, (batch, head) = tensor.element_size(), tensor.stride()[:2]
        if not has_dense_rows(tensor) or (tensor.data_ptr() | size * batch | size * head) % (stream.bits // 8):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            batch, head = tensor.stride()[:2]
        keep_alive.append(tensor)
        result += [tensor.data_ptr(), size * batch if tensor.shape[0] > 1 else 0, size * head if tensor.shape[1] > 1 else 0]
    return result


def describe_streams(rows: numpy.ndarray[Any, numpy.dtype[numpy.int64]], streams: Sequence[Stream], first: int) -> tuple[RowStream, ...]:
    """Return the ``RowStream`` of each stream. Its address and strides are columns of the table ``rows``, beginning with column ``first``.

    A stream never counts as more aligned than its rows. Otherwise, kernels would be compiled again for each alignment that the length of a
    cache happens to cause.
    """
    result = []
    for number, stream in enumerate(streams):
        at, row_bytes = first + STREAM_INTEGERS.value * number, stream.row * stream.bits // 8
        aligned = int(numpy.gcd.reduce(rows[:, at : at + STREAM_INTEGERS.value], axis=None, initial=math.gcd(16, row_bytes)))
        result.append(RowStream(stream.bits, aligned, row_bytes, stream.tokens))
    return tuple(result)
