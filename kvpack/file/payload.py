"""Stored tensors as arrays with checked digests, read whole or in pieces from a file that is not mapped."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import xxhash

from kvpack.formats.base import DTYPE_BYTES, NUMPY_DTYPES
from kvpack.formats.errors import InvalidPayload
from kvpack.formats.lazy import numpy

from .front import check_digest, check_hash
from .header import layout_bytes
from .zstd import decompressed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.base import Layout
    from kvpack.formats.value_blocks import Array

    from .front import Front
    from .header import TensorEntry
    from .user_files import Source

PIECE_BYTES = 1 << 20
"""A tensor of at most this many bytes is read at once, a larger one in pieces."""
_HASHED_BYTES = 1 << 18
"""The number of bytes read and hashed at once: they fit a core's cache."""


class InPieces:
    """A tensor of ``layout`` whose values are read on demand, from byte ``begin`` of ``source``."""

    def __init__(self, source: Source, begin: int, layout: Layout) -> None:
        self._source, self._begin, self._item = source, begin, DTYPE_BYTES[layout.dtype]
        self.shape, self.dtype = layout.shape, numpy.dtype(NUMPY_DTYPES[layout.dtype])
        # Allocating new memory costs more than reading into it.
        self._memory = bytearray()

    def flat(self, start: int, stop: int) -> numpy.ndarray[Any, Any]:
        """Return values ``[start, stop)`` of the flattened array, valid until the next call. Raises Truncated."""
        begin, end = self._begin + start * self._item, self._begin + stop * self._item
        if len(self._memory) < end - begin:
            self._memory = bytearray(end - begin)
        data = self._source.read(begin, end, self._memory)
        array: numpy.ndarray[Any, Any] = numpy.frombuffer(data, self.dtype)
        return array


def checked_array(source: Source, front: Front, tensor: TensorEntry, layout: Layout, *, checksums: bool) -> Array:
    """Return the tensor after checking its pad and digest: small ones are read at once, large ones in pieces, zstd frames whole."""
    start, place = len(front.text), front.places[tensor.name]
    begin, end = start + place.begin, start + place.end
    check_pad(tensor.name, source.read(start + place.pad, begin))
    if tensor.filter == "none" and end - begin > PIECE_BYTES:
        digest, memory = xxhash.xxh3_128(), bytearray(_HASHED_BYTES)
        for first in range(begin, end, _HASHED_BYTES):
            digest.update(source.read(first, min(first + _HASHED_BYTES, end), memory))
        check_hash(tensor.name, end - begin, digest.digest(), tensor.digest)
        return InPieces(source, begin, layout)
    stored = source.read(begin, end)
    check_digest(tensor.name, stored, tensor.digest)
    if tensor.filter != "none":
        stored = decompressed(tensor.name, stored, layout_bytes(layout), checksums=checksums)
    return layout.array(stored)


def read_checked(source: Source, front: Front, tensor: TensorEntry, layout: Layout, memory: memoryview, *, checksums: bool) -> None:
    """Copy the decoded tensor into ``memory``, of its size; the checks (pad, digest, frame) apply to the copy, not the file."""
    start, place = len(front.text), front.places[tensor.name]
    begin, end = start + place.begin, start + place.end
    check_pad(tensor.name, source.read(start + place.pad, begin))
    if tensor.filter != "none":
        stored = source.read(begin, end)
        check_digest(tensor.name, stored, tensor.digest)
        memory[:] = decompressed(tensor.name, stored, layout_bytes(layout), checksums=checksums)
        return
    digest = xxhash.xxh3_128()
    for first in range(0, len(memory), PIECE_BYTES):
        piece = memory[first : first + PIECE_BYTES]
        source.read_into(begin + first, piece)
        # Hashed while it is in the core's cache.
        digest.update(piece)
    check_hash(tensor.name, end - begin, digest.digest(), tensor.digest)


@dataclass(frozen=True)
class Span:
    """Bytes ``[begin, end)`` of a file: unfiltered tensors, and the pads between them, listed in order in ``pads`` with the pad before
    them.

    A pad is the name of the tensor after it and its position in the file.
    """

    begin: int
    end: int
    pads: tuple[tuple[str, int, int], ...]


def span_of(front: Front, tensors: Sequence[tuple[TensorEntry, int, int]]) -> Span | None:
    """Return the span of ``tensors``, each with its place ``[begin, end)`` in memory.

    The result is None unless they are laid out as in the file, starting at 0.
    """
    places = [front.places[tensor.name] for tensor, _, _ in tensors]
    for (tensor, begin, end), place in zip(tensors, places, strict=True):
        if tensor.filter != "none" or (place.begin - places[0].begin, place.end - places[0].begin) != (begin, end):
            return None
    start = len(front.text)
    pads = [(tensor.name, start + place.pad, start + place.begin) for (tensor, _, _), place in zip(tensors, places, strict=True)]
    return Span(start + places[0].begin, start + places[-1].end, tuple(pad for pad in pads if pad[1] < pad[2]))


def read_span(source: Source, span: Span, first: int, last: int, memory: memoryview) -> None:
    """Read bytes ``[first, last)`` of ``span`` into all of ``memory`` with one read, and check the pads, but not the digests.

    Reading threads wait for each other at every call, so each makes few. Raises the errors of ``check_pads``.
    """
    source.read_into(span.begin + first, memory)
    check_pads(source, span, first, last, memory)


def check_pads(source: Source, span: Span, first: int, last: int, memory: memoryview) -> None:
    """Check the pads among bytes ``[first, last)`` of ``span``, which are in ``memory``, and the one before the span if ``first`` is 0.

    ``first`` must be a multiple of ``TENSOR_ALIGNMENT``, and ``last`` too or the end, so that no pad is split. Raises InvalidPayload,
    MissingFile and Truncated.
    """
    pads = span.pads
    if not first and pads and pads[0][2] == span.begin:
        check_pad(pads[0][0], source.read(*pads[0][1:]))
    at_first, behind = (bisect_left(pads, span.begin + place, key=itemgetter(1)) for place in (first, last))
    for name, begin, end in pads[at_first:behind]:
        check_pad(name, memory[begin - span.begin - first : end - span.begin - first])


def check_pad(name: str, pad: memoryview) -> None:
    """Raise InvalidPayload unless the ``pad`` before tensor ``name`` is zero."""
    if any(pad):
        raise InvalidPayload(f"{name}: the padding before it is {pad.hex()}, expected {len(pad)} zero bytes")
