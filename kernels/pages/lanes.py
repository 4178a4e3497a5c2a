"""Conversion between an inference engine's pages and packed rows, on their device, with one launch for all pages.

A call converts one side (keys or values) of consecutive layers. It uses the encoders and decoders of caches, with a table of the offsets of
pages and rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from kvpack.formats.base import Codec
from kvpack.formats.opaque import Opaque
from kvpack.formats.raw import DTYPES as RAW_DTYPES
from kvpack.formats.raw import Raw
from kvpack.kernels import codecs
from kvpack.kernels.decode import decode as decoding
from kvpack.kernels.decode.rows import EnginePages, PackedPart, common_alignment, copy_to_device
from kvpack.kernels.encode.kernel import create_output
from kvpack.kernels.encode.page_values import copy_values, token_norms
from kvpack.kernels.encode.rows import MAX_ROW_BYTES, STREAM_ALIGNMENT, BatchOffsets
from kvpack.kernels.gpu import gpu

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
Offsets = numpy.ndarray[Any, numpy.dtype[numpy.int64]]
_STREAMS = {**DTYPES, "U8": torch.uint8, "U16": torch.uint16}


class LayerTensors:
    """The tensors of consecutive layers, ``[slot, kv_head, token, dim]`` each, with arbitrary strides."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors, self.first = tensors, tensors[0]
        self._alike = all(tensor.stride()[1:] == self.first.stride()[1:] for tensor in tensors)
        self._slot_strides = numpy.array([tensor.stride(0) for tensor in tensors], numpy.int64)

    def offsets(self, slots: Sequence[int], row_bytes: int, layer_bytes: int) -> Offsets | None:
        """Return three offsets for each page and layer, int64 ``[page and layer, 3]``, or None if the tensors are not supported.

        - The offset of the layer's values from the first layer's first slot, in elements.
        - The offset of the layer's streams from the first page's row, in bytes. Rows are ``row_bytes`` apart, and layers ``layer_bytes``.
        - The index of the page.

        The tensors must have equal strides, and their addresses must be a whole number of values apart.
        """
        size = self.first.element_size()
        # The engine may have moved its memory since the last job.
        addresses = numpy.array([tensor.data_ptr() for tensor in self.tensors], numpy.int64)
        apart = addresses - addresses[0]
        if not self._alike or (apart % size).any():
            return None
        result = numpy.empty((len(slots), len(self.tensors), 3), numpy.int64)
        result[:, :, 0] = numpy.array(slots, numpy.int64)[:, None] * self._slot_strides + apart // size
        pages = numpy.arange(len(slots), dtype=numpy.int64)[:, None]
        result[:, :, 1] = pages * row_bytes + numpy.arange(len(self.tensors), dtype=numpy.int64) * layer_bytes
        result[:, :, 2] = pages
        return result.reshape(-1, 3)


class PageSide:
    """The keys or values of an engine's pages, in consecutive layers with the same codec.

    ``offsets`` are the offsets of the first layer's streams in a row. The streams of consecutive layers are ``stride`` bytes apart.
    """

    def __init__(self, codec: Codec, layers: Sequence[torch.Tensor], offsets: Mapping[str, int], stride: int) -> None:
        self.codec, self.layers, self.stride = codec, LayerTensors(layers), stride
        self.streams = []
        """Name, dtype, offset (in values of that dtype), shape and strides of each stream."""
        for name, layout in codec.layout(1, *layers[0].shape[1:3]).items():
            dtype = _STREAMS[layout.dtype]
            self.streams.append((name, dtype, offsets[name] // dtype.itemsize, layout.shape, layout.strides))

    def offsets(self, batch: PageBatch) -> Offsets | None:
        """Return the offsets of all pages of ``batch`` and layers, as ``LayerTensors.offsets`` does."""
        return self.layers.offsets(batch.slots, batch.rows.stride(0), self.stride)


class PageBatch(NamedTuple):
    """Pages to convert: their ``slots``, their ``rows``, uint8 ``[page, byte]`` on the same device, and their ``status``, int32 ``[page]``.

    Encoders set the status of pages that they do not encode, and decoders skip pages with a nonzero status.
    """

    slots: Sequence[int]
    rows: torch.Tensor
    status: torch.Tensor


def supports_rows(rows: torch.Tensor) -> bool:
    """Return True if kernels can read and write ``rows``, uint8 ``[page, byte]``, in place."""
    return not (rows.data_ptr() % STREAM_ALIGNMENT or rows.stride(0) % STREAM_ALIGNMENT or rows.stride(1) != 1)


def encode(side: PageSide, batch: PageBatch, errors: torch.Tensor | None = None) -> bool:
    """Encode the values of ``side``, and write the streams to all rows of ``batch``. Returns False if the kernels do not support the call.

    Unless ``errors`` is None, the relative error of each token is written to it, float32 ``[page and layer, kv_head, token]``.
    """
    codec, first = side.codec, side.layers.first
    streams = _streams(side, batch)
    offsets = side.offsets(batch)
    if offsets is None:
        return False
    x = first[:1].expand(len(offsets), *first.shape[1:])
    origins = _batch_offsets(offsets, first)
    if _stores_unchanged(codec, first.dtype):
        copy_values(x, next(iter(streams.values())), origins, None)
        return True
    encoder = codecs.codec_kernels(codec).encode
    row = first.shape[3] * first.element_size()
    if encoder is None or row > MAX_ROW_BYTES or first.dtype not in DTYPES.values() or not gpu(first.device).multiplies_bf16:
        return False
    return encoder(codec, x, create_output(codec, streams, batch.status, origins, errors))


def decode(side: PageSide, batch: PageBatch) -> bool:
    """Decode the streams of ``side`` in all rows of ``batch`` with status 0. Returns False if the kernels do not support the call."""
    codec, first = side.codec, side.layers.first
    streams = _streams(side, batch)
    offsets = side.offsets(batch)
    if offsets is None:
        return False
    if _stores_unchanged(codec, first.dtype):
        x = first[:1].expand(len(offsets), *first.shape[1:])
        copy_values(x, next(iter(streams.values())), _batch_offsets(offsets, first), batch.status)
        return True
    if first.dtype not in DTYPES.values():
        return False
    pages = EnginePages(offsets[:, [1, 0, 2]], batch.status)
    return decoding.decode_into(codec, [PackedPart(streams, first.shape[2], 0)], first[:1], True, pages)


def gather(layers: LayerTensors, slots: Sequence[int], pages: torch.Tensor) -> None:
    """Copy the values in ``slots`` to ``pages`` ``[page and layer, ...]``. Pages must be a multiple of ``STREAM_ALIGNMENT`` bytes apart."""
    _copy_pages(layers, slots, pages, None)


def scatter(layers: LayerTensors, slots: Sequence[int], pages: torch.Tensor, status: torch.Tensor) -> None:
    """Copy ``pages`` back to ``slots``, except pages with a nonzero ``status``, int32 ``[page]``. This is the reverse of ``gather``."""
    _copy_pages(layers, slots, pages, status)


def norms(layers: LayerTensors, slots: Sequence[int]) -> torch.Tensor:
    """Return the norm of each token of the pages in ``slots``, float32 ``[page and layer, kv_head, token]``."""
    first, offsets = layers.first, layers.offsets(slots, 0, 0)
    if offsets is not None:
        return token_norms(first[:1].expand(len(offsets), *first.shape[1:]), _batch_offsets(offsets, first))
    each = [norms(LayerTensors([tensor]), slots) for tensor in layers.tensors]
    return torch.stack(each, 1).flatten(0, 1)


def _copy_pages(layers: LayerTensors, slots: Sequence[int], pages: torch.Tensor, status: torch.Tensor | None) -> None:
    step = pages.stride(0) * pages.element_size()
    every = len(layers.tensors) * step
    offsets = layers.offsets(slots, every, step)
    if offsets is not None:
        copy_values(layers.first[:1].expand(len(offsets), *layers.first.shape[1:]), pages, _batch_offsets(offsets, layers.first), status)
        return
    for number, tensor in enumerate(layers.tensors):
        offsets = LayerTensors([tensor]).offsets(slots, every, step)
        assert offsets is not None
        copy_values(tensor[:1].expand(len(offsets), *tensor.shape[1:]), pages[number:], _batch_offsets(offsets, tensor), status)


def _stores_unchanged(codec: Codec, dtype: torch.dtype) -> bool:
    """Return True if rows store values of ``dtype`` unchanged, so that encoding and decoding are copies."""
    return isinstance(codec, Opaque) or (type(codec) is Raw and DTYPES[RAW_DTYPES[codec.dtype]] == dtype)


def _batch_offsets(offsets: Offsets, x: torch.Tensor) -> BatchOffsets:
    aligned = math.gcd(16, common_alignment(offsets[:, 0]) * x.element_size())
    return BatchOffsets(copy_to_device(offsets, x.device), aligned)


def _streams(side: PageSide, batch: PageBatch) -> dict[str, torch.Tensor]:
    """Return the streams of the first layer as views of the first row of ``batch``."""
    row = batch.rows[0, : batch.rows.shape[1] // STREAM_ALIGNMENT * STREAM_ALIGNMENT]
    as_dtype: dict[torch.dtype, torch.Tensor] = {}
    result = {}
    for name, dtype, begin, shape, strides in side.streams:
        if dtype not in as_dtype:
            as_dtype[dtype] = row.view(dtype)
        values = as_dtype[dtype]
        result[name] = values.as_strided(shape, strides, values.storage_offset() + begin)
    return result
