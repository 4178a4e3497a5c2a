"""Reads stored tensors as arrays, and checks their digests. Large tensors on disk are read in pieces, without mapping the file."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import xxhash

from kvpack.formats.errors import InvalidPayload
from kvpack.formats.lazy import numpy
from kvpack.formats.streams import DTYPE_BYTES, NUMPY_DTYPES, Layout

from .front import COPY_AGAIN, Front, check_digest, check_hash
from .header import TensorEntry, layout_bytes
from .zstd import decompress_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.value_blocks import Array

    from .user_files import Source

PIECE_BYTES = 1 << 20
"""Maximum size, in bytes, of a tensor that is read whole. Larger tensors are read in pieces."""
_HASHED_BYTES = 1 << 18
"""Number of bytes to read and then hash in one step, so that they fit in a core's cache."""


class LazyArray:
    """An array with values that are read only on request. The first value is at byte ``begin`` of ``source``."""

    def __init__(self, source: Source, begin: int, layout: Layout) -> None:
        self._source, self._begin, self._item = source, begin, DTYPE_BYTES[layout.dtype]
        self.shape, self.dtype = layout.shape, numpy.dtype(NUMPY_DTYPES[layout.dtype])
        # The memory is reused, because allocating takes longer than reading.
        self._memory = bytearray()

    def flat(self, start: int, stop: int) -> numpy.ndarray[Any, Any]:
        """Return values ``[start, stop)`` of the flattened array. They are valid until the next call."""
        begin, end = self._begin + start * self._item, self._begin + stop * self._item
        if len(self._memory) < end - begin:
            self._memory = bytearray(end - begin)
        data = self._source.read(begin, end, self._memory)
        array: numpy.ndarray[Any, Any] = numpy.frombuffer(data, self.dtype)
        return array


def checked_array(source: Source, front: Front, tensor: TensorEntry, layout: Layout, *, checksums: bool) -> Array:
    """Check the padding and the digest of a tensor. Returns the tensor as an array.

    Large tensors are read in pieces, but zstd frames are always read whole.
    """
    start, place = len(front.text), front.places[tensor.name]
    begin, end = start + place.begin, start + place.end
    check_pad(tensor.name, source.read(start + place.pad, begin))
    if tensor.filter == "none" and end - begin > PIECE_BYTES:
        digest, memory = xxhash.xxh3_128(), bytearray(_HASHED_BYTES)
        for first in range(begin, end, _HASHED_BYTES):
            digest.update(source.read(first, min(first + _HASHED_BYTES, end), memory))
        check_hash(tensor.name, end - begin, digest.digest(), tensor.digest)
        return LazyArray(source, begin, layout)
    stored = source.read(begin, end)
    check_digest(tensor.name, stored, tensor.digest)
    if tensor.filter != "none":
        stored = decompress_frame(tensor.name, stored, layout_bytes(layout), checksums=checksums)
    return layout.array(stored)


def read_checked(source: Source, front: Front, tensor: TensorEntry, layout: Layout, memory: memoryview, *, checksums: bool) -> None:
    """Copy a decoded tensor into ``memory``, which has the same size, and check its padding, digest and zstd frame.

    The checks apply to the copy, which stays valid if the file changes.
    """
    start, place = len(front.text), front.places[tensor.name]
    begin, end = start + place.begin, start + place.end
    check_pad(tensor.name, source.read(start + place.pad, begin))
    if tensor.filter != "none":
        stored = source.read(begin, end)
        check_digest(tensor.name, stored, tensor.digest)
        memory[:] = decompress_frame(tensor.name, stored, layout_bytes(layout), checksums=checksums)
        return
    digest = xxhash.xxh3_128()
    for first in range(0, len(memory), PIECE_BYTES):
        piece = memory[first : first + PIECE_BYTES]
        source.read_into(begin + first, piece)
        # Hash the piece while it is in the core's cache.
        digest.update(piece)
    check_hash(tensor.name, end - begin, digest.digest(), tensor.digest)


@dataclass(frozen=True)
class Span:
    """The bytes ``[begin, end)`` of a file, which contain unfiltered tensors and the padding between them.

    ``pads`` lists all padding in order, including the padding before the span. Each element is (name of the tensor after the padding,
    begin, end), where ``begin`` and ``end`` are offsets in the file.
    """

    begin: int
    end: int
    pads: tuple[tuple[str, int, int], ...]


def find_span(front: Front, tensors: Sequence[tuple[TensorEntry, int, int]]) -> Span | None:
    """Return the byte range of ``tensors`` in the file if they have the same layout there as in memory, or None otherwise.

    Each tensor entry comes with its byte range in memory. The first tensor begins at 0.
    """
    places = [front.places[tensor.name] for tensor, _, _ in tensors]
    for (tensor, begin, end), place in zip(tensors, places, strict=True):
        if tensor.filter != "none" or (place.begin - places[0].begin, place.end - places[0].begin) != (begin, end):
            return None
    start = len(front.text)
    pads = [(tensor.name, start + place.pad, start + place.begin) for (tensor, _, _), place in zip(tensors, places, strict=True)]
    return Span(start + places[0].begin, start + places[-1].end, tuple(pad for pad in pads if pad[1] < pad[2]))


def read_span(source: Source, span: Span, first: int, last: int, memory: memoryview) -> None:
    """Read bytes ``[first, last)`` of ``span`` into ``memory``, which has the same size. Padding is checked, but digests are not.

    All bytes are read with one call, because every call makes its thread wait for the GIL. Raises the same errors as ``check_pads``.
    """
    source.read_into(span.begin + first, memory)
    check_pads(source, span, first, last, memory)


def check_pads(source: Source, span: Span, first: int, last: int, memory: memoryview) -> None:
    """Check the padding in bytes ``[first, last)`` of ``span``. ``memory`` contains these bytes.

    If ``first`` is 0, the padding before the span is checked too. ``first`` and ``last`` must not split padding: they must be multiples of
    ``TENSOR_ALIGNMENT``, or ``last`` the end of the span. Raises InvalidPayload, MissingFile and Truncated.
    """
    pads = span.pads
    if not first and pads and pads[0][2] == span.begin:
        check_pad(pads[0][0], source.read(*pads[0][1:]))
    start, stop = (bisect_left(pads, span.begin + offset, key=itemgetter(1)) for offset in (first, last))
    for name, begin, end in pads[start:stop]:
        check_pad(name, memory[begin - span.begin - first : end - span.begin - first])


def check_pad(name: str, pad: memoryview) -> None:
    """Raise InvalidPayload unless ``pad``, the padding before tensor ``name``, is zero."""
    if any(pad):
        raise InvalidPayload(f"{name}: the padding before it is {pad.hex()}, expected {len(pad)} zero bytes: {COPY_AGAIN}")
