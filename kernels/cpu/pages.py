"""Pages of engines on the CPU: convert one side of several layers of a page between an engine's memory and the streams of a row.

A plan contains everything about a call except addresses, so that a page needs no allocation and no description.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

from kvpack.formats.base import DTYPE_BYTES
from kvpack.formats.head_norms import GROUP_RATIO, HEADS, MAX_PER_PAGE, PAGE_TOKENS, SHARED_RATIO, TOKENS
from kvpack.formats.side_cars import WithSideCars

from . import codecs, encode, library, rotations

if TYPE_CHECKING:
    from kvpack.formats.base import Codec
    from kvpack.formats.raw_positions import RawPositions

DTYPES = encode.DTYPES

Chosen = numpy.ndarray[Any, numpy.dtype[numpy.int64]]


class Values(NamedTuple):
    """Values ``[layer, head, token, channel]`` in memory, with contiguous channels: an address and strides in bytes."""

    address: int
    layer: int
    head: int
    token: int


class Place(NamedTuple):
    """A stream of one side: its offset in the first layer's row, and the bytes from head to head and from row to row."""

    offset: int
    head: int
    row: int


def places(codec: Codec, heads: int, tokens: int, offsets: Mapping[str, int]) -> dict[str, Place]:
    """Return the place of every stream of a page's side; the streams begin at ``offsets``."""
    result = {}
    for name, layout in codec.layout(1, heads, tokens).items():
        row = DTYPE_BYTES[layout.dtype]
        for size in layout.shape[3:]:
            row *= size
        head = 0 if layout.shape[1] == 1 else row * layout.shape[2]
        # Every token has the row of its run.
        result[name] = Place(offsets[name], head, 0 if layout.per == "run" else row)
    return result


class Encoder:
    """Encodes ``layers`` layers of a page, ``stride`` bytes apart in its row."""

    def __init__(
        self, codec: Codec, layers: int, heads: int, tokens: int, dtype: torch.dtype, streams: Mapping[str, Place], stride: int
    ) -> None:
        self._call, names, self._kept = encode.call_of(codec, (layers, heads, tokens), dtype)
        self._streams = [(streams[name], stride) for name in names]

    def run(self, values: Values, row: int, threads: int) -> bool:
        """Encode ``values`` to the row at address ``row``; False for values that ``formats/`` must encode or refuse. Raises MemoryError."""
        call = library.Encode.from_buffer_copy(self._call)
        call.x = library.Stream(*values)
        streams = (library.Stream * len(self._streams))()
        for number, (place, stride) in enumerate(self._streams):
            streams[number] = library.Stream(row + place.offset, stride, place.head, place.row)
        call.streams, call.threads = streams, threads
        return encode.run(call)


def supports_encoding(codec: Codec, dtype: torch.dtype, dim: int) -> bool:
    """Return True if the C library can encode pages of ``dtype`` with ``codec``."""
    return encode.is_one_call(codec) and encode.supports(codec, torch.empty(1, 1, 1, dim, dtype=dtype, device="cpu"))


class Decoder:
    """Decodes ``layers`` layers of a page, ``stride`` bytes apart in its row."""

    def __init__(
        self, codec: Codec, layers: int, heads: int, tokens: int, dtype: torch.dtype, streams: Mapping[str, Place], stride: int
    ) -> None:
        described = codecs.described(codec)
        assert described is not None
        self._streams = [(streams[name], stride) for name in described.streams]
        self._tokens, self._described, rotation = tokens, described, rotations.described(codec.rotation)
        self._kept = rotation
        side = library.SideArgument(ctypes.pointer(described.struct), None, 1)
        self._call = library.Unpack(
            batch=layers, heads=heads, stop=tokens, side=side, dtype=DTYPES.index(dtype), rotation=rotation.struct, threads=1
        )

    def run(self, row: int, values: Values, threads: int) -> None:
        """Decode the row at address ``row`` to ``values``. Raises MemoryError."""
        segment = (ctypes.c_int64 * (2 + 4 * len(self._streams)))(0, self._tokens)
        for number, (place, stride) in enumerate(self._streams):
            segment[2 + 4 * number : 6 + 4 * number] = [row + place.offset, stride, place.head, place.row]
        call = library.Unpack.from_buffer_copy(self._call)
        call.side.segments, call.out, call.threads = ctypes.addressof(segment), library.Stream(*values), threads
        compiled = library.library()
        assert compiled is not None
        if compiled.kvpack_unpack(ctypes.byref(call)):
            raise MemoryError("not enough memory to unpack: the buffers could not be allocated")


def supports_decoding(codec: Codec, dtype: torch.dtype) -> bool:
    """Return True if the C library can decode pages of ``codec`` to ``dtype``."""
    if library.library() is None or dtype not in DTYPES or isinstance(codec, WithSideCars):
        return False
    described = codecs.described(codec)
    # Rows hold no stream that is made when a page is described.
    return described is not None and not {codecs.TABLE, codecs.BASIS, codecs.PLACES} & set(described.streams)


class Chooser:
    """Chooses the raw tokens of ``layers`` layers of a page by keys of ``heads`` heads, ``tokens`` tokens, ``dim`` values and ``dtype``.

    ``shared`` says what shares scales of the keys. The choice equals that of ``formats.raw_positions.store_in_slots``.
    """

    def __init__(
        self,
        raw: RawPositions,
        layers: int,
        heads: int,
        tokens: int,
        dim: int,
        dtype: torch.dtype,
        token_group: int,
        slots: int,
        shared: Collection[str],
    ) -> None:
        self._heads = heads
        self._layers, self._tokens, self._slots = layers, tokens, slots
        number = DTYPES.index(dtype)
        sizes = {"layers": layers, "heads": heads, "tokens": tokens, "dim": dim, "slots": slots, "page": PAGE_TOKENS, "few": MAX_PER_PAGE}
        high = raw.high_norm if token_group > 1 else 0.0
        of_shared = {"shared": (HEADS, SHARED_RATIO), "grouped": (TOKENS, GROUP_RATIO)}
        ratios = {name: ratio if kind in shared and raw.high_norm else 0.0 for name, (kind, ratio) in of_shared.items()}
        self._call = library.RawSlots(dtype=number, low=raw.low_norm, high=high, **ratios, **sizes)

    def run(self, keys: Values, threads: int) -> tuple[Chosen, Chosen]:
        """Return the raw tokens of each layer, int64 ``[layer, slot]``, ascending and padded with -1, and counts of ``[layer, 2]``.

        They count the tokens without a slot, as in ``tokens_of_slots``. Raises MemoryError.
        """
        chosen = numpy.empty((self._layers, self._slots), numpy.int64)
        left_out, norms = numpy.zeros((self._layers, 2), numpy.int64), numpy.empty((self._layers, self._heads, self._tokens), numpy.float32)
        call = library.RawSlots.from_buffer_copy(self._call)
        call.x, call.threads = library.Stream(*keys), threads
        call.norms, call.chosen, call.left_out = norms.ctypes.data, chosen.ctypes.data, left_out.ctypes.data
        encode.run_raw_slots(call)
        return chosen, left_out
