"""Conversion of an inference engine's pages on the CPU, between engine memory and packed rows.

A page contains the keys or values of all layers. Encoders and decoders prepare everything about a C call except addresses, so that
converting a page is cheap.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy
import torch

from kvpack.formats.base import Codec
from kvpack.formats.raw_positions import RawPositions
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.formats.streams import DTYPE_BYTES
from kvpack.formats.token_norms import GROUP_RATIO, HEADS, MAX_PER_PAGE, PAGE_TOKENS, SHARED_RATIO, TOKENS

from . import codecs, encode, library

DTYPES = encode.DTYPES

TokenIndices = numpy.ndarray[Any, numpy.dtype[numpy.int64]]


class PageValues(NamedTuple):
    """Location of a page's values ``[layer, head, token, channel]``: their address, and their strides in bytes. Channels are contiguous."""

    address: int
    layer: int
    head: int
    token: int


class StreamLocation(NamedTuple):
    """Location of a stream: its offset in the packed row of a page, and its strides per head and per stream row, all in bytes."""

    offset: int
    head: int
    row: int


def stream_locations(codec: Codec, heads: int, tokens: int, offsets: Mapping[str, int]) -> dict[str, StreamLocation]:
    """Return the location of every stream of ``codec`` in a page of ``tokens`` tokens. ``offsets`` contains the offset of each stream."""
    result = {}
    for name, layout in codec.layout(1, heads, tokens).items():
        row = DTYPE_BYTES[layout.dtype]
        for size in layout.shape[3:]:
            row *= size
        head = 0 if layout.shape[1] == 1 else row * layout.shape[2]
        # All tokens share the single row of such a stream.
        result[name] = StreamLocation(offsets[name], head, 0 if layout.per == "run" else row)
    return result


class PageEncoder:
    """Encoder for the values of ``layers`` layers of a page. In the packed row, consecutive layers are ``stride`` bytes apart."""

    def __init__(
        self, codec: Codec, layers: int, heads: int, tokens: int, dtype: torch.dtype, streams: Mapping[str, StreamLocation], stride: int
    ) -> None:
        self._call, names, self._kept = encode.create_call(codec, (layers, heads, tokens), dtype)
        self._streams = [(streams[name], stride) for name in names]

    def run(self, values: PageValues, row: int, threads: int, errors: int = 0) -> bool:
        """Encode ``values`` into the packed row at address ``row``. Returns False if ``formats/`` must encode them or reject some values.

        If ``errors`` is not 0, the errors of tokens (see ``encode.encode``) are written to this address, one layer after another. Raises
        MemoryError.
        """
        call = library.EncodeArguments.from_buffer_copy(self._call)
        call.x = library.Stream(*values)
        streams = (library.Stream * len(self._streams))()
        for index, (location, stride) in enumerate(self._streams):
            streams[index] = library.Stream(row + location.offset, stride, location.head, location.row)
        call.streams, call.threads, call.errors = streams, threads, errors
        return library.run("encode", call, "encode") != encode.REFUSED


class LargeErrorCheck:
    """Check of an encoded page for tokens with large errors, in ``layers`` layers.

    Consecutive layers are ``stride`` bytes apart in the page's row.
    """

    def __init__(self, codec: Codec, layers: int, heads: int, tokens: int, streams: Mapping[str, StreamLocation], stride: int) -> None:
        source = encode.error_scales(codec, codec.summary.error_spread)
        assert source is not None
        name, kind, ratio = source
        self._offset, members = streams[name].offset, codec.row_layouts[name].shape[3]
        self._call = library.SizesArguments(None, kind, layers, stride, heads, tokens, members, PAGE_TOKENS, ratio, 0)

    def run(self, row: int) -> bool:
        """Return True if the packed row at address ``row`` has a large error (see ``encode.has_large_error``)."""
        call = library.SizesArguments.from_buffer_copy(self._call)
        call.data = row + self._offset
        return library.run("has_large", call, "compare sizes") != 0


def supports_error_check(codec: Codec) -> bool:
    return codec.summary.error_spread > 0 and encode.error_scales(codec, 1.0) is not None


def supports_encoding(codec: Codec, dtype: torch.dtype) -> bool:
    """Return True if the C kernels can encode pages of ``dtype`` values with ``codec``."""
    return dtype in encode.DTYPES and encode.encodes_in_one_call(codec) and encode.supports(codec)


class PageDecoder:
    """Decoder for the values of ``layers`` layers of a page. In the packed row, consecutive layers are ``stride`` bytes apart."""

    def __init__(
        self, codec: Codec, layers: int, heads: int, tokens: int, dtype: torch.dtype, streams: Mapping[str, StreamLocation], stride: int
    ) -> None:
        description = codecs.describe(codec)
        assert description is not None
        self._streams = [(streams[name], stride) for name in description.streams]
        self._tokens, self._described, rotation = tokens, description, codecs.describe_rotation(codec.rotation)
        self._kept = rotation
        side = library.SideArgument(ctypes.pointer(description.struct), None, 1)
        self._call = library.UnpackArguments(
            batch=layers, heads=heads, stop=tokens, side=side, dtype=DTYPES.index(dtype), rotation=rotation.struct, threads=1
        )

    def run(self, row: int, values: PageValues, threads: int) -> None:
        """Decode the packed row at address ``row`` into ``values``."""
        segment = (ctypes.c_int64 * (2 + 4 * len(self._streams)))(0, self._tokens)
        for index, (location, stride) in enumerate(self._streams):
            segment[2 + 4 * index : 6 + 4 * index] = [row + location.offset, stride, location.head, location.row]
        call = library.UnpackArguments.from_buffer_copy(self._call)
        call.side.segments, call.out, call.threads = ctypes.addressof(segment), library.Stream(*values), threads
        library.run("unpack", call, "unpack")


def supports_decoding(codec: Codec, dtype: torch.dtype) -> bool:
    """Return True if the C kernels can decode pages of ``codec`` to ``dtype``."""
    if library.library() is None or dtype not in DTYPES or isinstance(codec, CodecWithSidecars):
        return False
    description = codecs.describe(codec)
    # Derived streams are not stored in packed rows.
    return description is not None and not {codecs.SCALE_TABLE, codecs.BASIS, codecs.CHUNK_RANGES} & set(description.streams)


class RawTokenChooser:
    """Chooses the raw tokens of each layer of a page by its keys, as ``formats.raw_positions.store_in_slots`` does.

    The keys have ``heads`` heads, ``tokens`` tokens, ``dim`` channels and ``dtype``. A layer has at most ``slots`` raw tokens. ``shared``
    contains the units that share scales (heads or tokens).
    """

    def __init__(
        self,
        raw: RawPositions,
        layers: int,
        heads: int,
        tokens: int,
        dim: int,
        dtype: torch.dtype,
        group_tokens: int,
        slots: int,
        shared: Collection[str],
    ) -> None:
        self._heads = heads
        self._layers, self._tokens, self._slots = layers, tokens, slots
        dtype_index = DTYPES.index(dtype)
        sizes = {"layers": layers, "heads": heads, "tokens": tokens, "dim": dim, "slots": slots, "page": PAGE_TOKENS, "few": MAX_PER_PAGE}
        high = raw.high_norm if group_tokens > 1 else 0.0
        sharing = {"shared": (HEADS, SHARED_RATIO), "grouped": (TOKENS, GROUP_RATIO)}
        ratios = {name: ratio if kind in shared and raw.high_norm else 0.0 for name, (kind, ratio) in sharing.items()}
        self._call = library.RawSlotsArguments(dtype=dtype_index, low=raw.low_norm, high=high, **ratios, **sizes)

    def run(self, keys: PageValues, threads: int) -> tuple[TokenIndices, TokenIndices]:
        """Return each layer's raw tokens, int64 ``[layer, slot]``, and its counts of tokens without a slot, int64 ``[layer, 2]``.

        Raw tokens are ascending and padded with -1. The counts are as in ``raw_positions.count_left_out``.
        """
        chosen = numpy.empty((self._layers, self._slots), numpy.int64)
        left_out, norms = numpy.zeros((self._layers, 2), numpy.int64), numpy.empty((self._layers, self._heads, self._tokens), numpy.float32)
        call = library.RawSlotsArguments.from_buffer_copy(self._call)
        call.x, call.threads = library.Stream(*keys), threads
        call.norms, call.chosen, call.left_out = norms.ctypes.data, chosen.ctypes.data, left_out.ctypes.data
        library.run("raw_slots", call, "choose raw tokens")
        return chosen, left_out
