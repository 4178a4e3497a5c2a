"""The kvpack file: a safetensors file in which every bit is covered by a check (spec/container.md).

A length, a JSON header, then the data: the tensor ``kvpack.header`` and the payload tensors at multiples of 64.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self

import xxhash

from kvpack.formats.errors import InvalidParameter, KvpackError, OutOfBounds
from kvpack.formats.value_blocks import check_finite

from . import basis
from .atomic import write_file
from .footprint import check_size
from .front import aligned, check_digest, check_hash, make_front, read_front, undigested_front
from .header import Contents, Header, TensorEntry, layout_bytes
from .payload import Span, check_pad, check_pads, checked_array, read_checked, read_span, span_of
from .user_files import InMemory, OnDisk, open_regular, path_text
from .zstd import FEATURE as CHECKSUMS
from .zstd import compressed, decompressed

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvpack.formats.base import Layout
    from kvpack.formats.value_blocks import Array

    from .atomic import Progress
    from .header import SideEntry
    from .layer_states import StateEntry
    from .user_files import Source


def file_size(contents: Contents) -> int:
    """Return the exact size in bytes of the file that ``write`` produces without compression. Raises LimitExceeded."""
    return undigested_front(contents).file_bytes


def write(
    path: str | os.PathLike[str],
    contents: Contents,
    arrays: Mapping[str, Any],
    *,
    compress: bool = False,
    durable: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write a file atomically and return its size in bytes.

    ``arrays`` contains a C-contiguous buffer for every name of ``contents.layouts``. ``compress`` stores a tensor as a zstd
    frame where that saves 3 % or more. ``durable`` syncs file and folder. ``progress(done, total)`` counts bytes.
    Raises InvalidParameter and LimitExceeded before anything is written, then WriteFailed.
    """
    return write_file(path, pieces(contents, arrays, compress=compress), durable=durable, progress=progress)


def to_bytes(contents: Contents, arrays: Mapping[str, Any], *, compress: bool = False) -> bytes:
    """Return the bytes of the file that ``write`` produces. Raises InvalidParameter and LimitExceeded."""
    return b"".join(pieces(contents, arrays, compress=compress))


def pieces(contents: Contents, arrays: Mapping[str, Any], *, compress: bool = False) -> list[memoryview]:
    """Return the bytes of the file that ``write`` produces, as consecutive pieces. Raises InvalidParameter and LimitExceeded."""
    if set(arrays) != set(contents.layouts):
        odd = sorted(map(str, set(arrays) ^ set(contents.layouts)))
        raise InvalidParameter(f"arrays missing or not in the layout: {', '.join(odd[:8])}")
    stored, tensors = {}, []
    for name, layout in contents.layouts.items():
        raw = _flat(name, arrays[name])
        if len(raw) != layout_bytes(layout):
            raise InvalidParameter(f"{name} has {len(raw)} bytes, expected {layout_bytes(layout)} for {layout.dtype} {list(layout.shape)}")
        frame = compressed(raw) if compress else None
        stored[name] = raw if frame is None else memoryview(frame)
        chosen = "none" if frame is None else "zstd"
        tensors.append(TensorEntry(name, layout.dtype, layout.shape, chosen, len(stored[name]), xxhash.xxh3_128_digest(stored[name])))
    if any(tensor.filter == "zstd" for tensor in tensors):
        contents = replace(contents, ignorable={**contents.ignorable, CHECKSUMS: b""})
    front = make_front(Header.of(contents, tuple(tensors)))
    result = [memoryview(front.text), memoryview(front.tensor)]
    for name, place in front.places.items():
        result += [memoryview(bytes(place.begin - place.pad)), stored[name]]
    return result


def open_file(path: str | os.PathLike[str], *, memory_limit: int | None = None, copy: bool = False) -> File:
    """Open a file and check its size, version and headers. Tensors are mapped and checked when first used.

    With ``copy`` the file is read into memory once, so that later changes of the file cannot affect checked data.
    ``memory_limit`` bounds the file and what it takes in memory (``footprint``). Order: spec/container.md, Reading.
    Raises MissingFile, NotKvpack, Truncated, DigestMismatch, UnsupportedVersion, UnknownCodec, InvalidHeader and LimitExceeded.
    """
    where = path_text(path)
    source: Source = (disk := OnDisk(open_regular(where)))
    try:
        with located(where):
            if memory_limit is not None:
                check_size(source.size, memory_limit)
            if copy:
                source = InMemory(disk.read_whole())
                disk.close()
    except BaseException:
        source.close()
        raise
    return File(source, where, memory_limit)


def open_bytes(data: bytes | bytearray | memoryview, *, where: str = "bytes", memory_limit: int | None = None) -> File:
    """Open a file that is already in memory; tensors are views of ``data``.

    Raises the errors of ``open_file``, with ``where`` as the name.
    """
    if memory_limit is not None:
        with located(where):
            check_size(len(data), memory_limit)
    return File(InMemory(data), where, memory_limit)


@dataclass(frozen=True)
class SidePlaces:
    """The places ``[begin, end)`` of a side's decoded tensors in one block of memory of ``nbytes`` bytes, by stream name.

    Every tensor begins at a multiple of 64, as in a file: without a filter, the bytes are those of the file.
    """

    layer: int
    side: str
    streams: Mapping[str, tuple[int, int]]
    nbytes: int


class File:
    """An open kvpack file: ``header``, ``front``, ``size`` in bytes, ``tensors`` by name. A context manager.

    ``open_file`` and ``open_bytes`` create it. Every error names ``where``.
    """

    def __init__(self, source: Source, where: str, memory_limit: int | None) -> None:
        self.where = where
        self.size = source.size
        self._source = source
        try:
            with located(where):
                self.header, self.front = read_front(source, memory_limit)
        except BaseException:
            self.close()
            raise
        self.tensors: dict[str, TensorEntry] = dict(zip(self.front.places, self.header.tensors, strict=True))
        self._verified: set[str] = set()
        self._places: dict[SideEntry, tuple[dict[str, tuple[int, int]], int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; views from ``tensor`` stay valid and keep the mapping alive until the last view is gone."""
        self._source.close()

    def tensor(self, name: str) -> memoryview:
        """Return the decoded bytes of a tensor as a flat view; its digest and the pad before it are checked on first use.

        The view of a mapped file is writable and private. Raises OutOfBounds for an unknown name, DigestMismatch, and
        InvalidPayload for a nonzero pad or a zstd frame of the wrong size.
        """
        if name not in self.tensors:
            raise OutOfBounds(f"{self.where}: has no tensor {name!r}")
        entry, place, start = self.tensors[name], self.front.places[name], len(self.front.text)
        with located(self.where):
            stored = self._source.view(start + place.begin, start + place.end)
            if name not in self._verified:
                if any(pad := self._source.view(start + place.pad, start + place.begin)):
                    check_pad(name, pad)
                check_digest(name, stored, entry.digest)
                self._verified.add(name)
            if entry.filter == "none":
                return stored
            return decompressed(name, stored, layout_bytes(self.header.layouts[name]), checksums=self._checksums)

    def read_side(self, layer: int, side: str, *, check_values: bool = True) -> dict[str, memoryview]:
        """Return the decoded bytes of every tensor of one side ("k" or "v") by stream name, after checks of digests, pads and codec rules.

        ``check_values=False`` skips the codec's rules, for bytes from a writer that is known to follow them.
        Raises DigestMismatch and InvalidPayload, and OutOfBounds when the file does not have the side.
        """
        data, arrays = {}, {}
        entry = self.side(layer, side)
        for stream, layout in self.header.streams[entry].items():
            data[stream] = self.tensor(f"{layer}.{side}.{stream}")
            if check_values and stream != "tail":
                arrays[stream] = layout.array(data[stream])
        if check_values:
            with located(self.where):
                self._check(entry, arrays, f"{layer}.{side}")
        return data

    def in_memory(self, numbers: Iterable[int]) -> Iterator[int]:
        """Yield the layers ``numbers`` as soon as their bytes are in memory; the next ones are read from the disk meanwhile.

        Raises MissingFile and Truncated.
        """
        # Numbers that follow each other differ from their places by the same.
        for _, group in groupby(enumerate(numbers), lambda one: one[1] - one[0]):
            extents = {number: self._extent(number) for _, number in group}
            begin, end = min(begin for begin, _ in extents.values()), max(end for _, end in extents.values())
            with located(self.where), contextlib.closing(self._source.ahead(begin, end)) as ahead:
                reached = begin
                for number, (_, last) in extents.items():
                    while reached < last:
                        reached = next(ahead)
                    yield number

    def _extent(self, number: int) -> tuple[int, int]:
        """Return the offset of a layer's first tensor in the file, and the end of its last one."""
        names = [f"{number}.{side}.{stream}" for side, entry in self.header.layers[number].sides() for stream in self.header.streams[entry]]
        places = [self.front.places[name] for name in (*names, *(state.where for state in self.header.states_of(number)))]
        start = len(self.front.text)
        return start + min((place.begin for place in places), default=0), start + max((place.end for place in places), default=0)

    def read_state(self, state: StateEntry) -> memoryview:
        """Return the decoded bytes of a state; digest and pad are checked on first use. Raises DigestMismatch and InvalidPayload."""
        data = self.tensor(state.where)
        if self.header.is_basis:
            with located(self.where):
                basis.check_frame_values(state, state.layout.array(data))
        return data

    def read_state_into(self, state: StateEntry, memory: memoryview) -> None:
        """Copy the decoded bytes of a state into ``memory``, of its size, and check the copy.

        Raises DigestMismatch, InvalidPayload, MissingFile and Truncated.
        """
        with located(self.where):
            read_checked(self._source, self.front, self.tensors[state.where], state.layout, memory, checksums=self._checksums)

    def side_places(self, layer: int, side: str) -> SidePlaces:
        """Return the places to which ``read_side_into`` reads the tensors of a side. Raises OutOfBounds for a side that the file lacks."""
        entry = self.side(layer, side)
        if entry not in self._places:
            places, end = {}, 0
            for stream, layout in self.header.streams[entry].items():
                begin = aligned(end)
                end = begin + layout_bytes(layout)
                places[stream] = begin, end
            self._places[entry] = places, aligned(end)
        return SidePlaces(layer, side, *self._places[entry])

    def read_side_into(self, places: SidePlaces, memory: memoryview, *, check_values: bool = True, check_chunks: bool = True) -> None:
        """Copy the decoded tensors of one side into ``memory``, of at least ``places.nbytes`` bytes, and check the copies.

        The same checks, in the same order, as ``read_side``; without ``check_values``, all rules of the codec are left to the caller, and
        without ``check_chunks``, ``Codec.check_chunks``. Calls for different sides may run in different threads.
        Raises DigestMismatch, InvalidPayload, MissingFile and Truncated.
        """
        entry, arrays, prefix = self.side(places.layer, places.side), {}, f"{places.layer}.{places.side}"
        layouts, tensors = self.header.streams[entry], self._placed(places)
        with located(self.where):
            span = span_of(self.front, tensors)
            if span is not None:
                read_span(self._source, span, 0, span.end - span.begin, memory[: span.end - span.begin])
                for tensor, begin, end in tensors:
                    check_digest(tensor.name, memory[begin:end], tensor.digest)
            else:
                for (tensor, begin, end), layout in zip(tensors, layouts.values(), strict=True):
                    read_checked(self._source, self.front, tensor, layout, memory[begin:end], checksums=self._checksums)
            if not check_values:
                return
            for (stream, layout), (_, begin, end) in zip(layouts.items(), tensors, strict=True):
                if stream != "tail":
                    arrays[stream] = layout.array(memory[begin:end])
            self._check(entry, arrays, prefix, check_chunks)

    def span(self, sides: Sequence[SidePlaces]) -> Span | None:
        """Return the file range that the memory of ``sides`` maps, one side after another; None if that memory is not the file's."""
        tensors, start = [], 0
        for places in sides:
            tensors += [(tensor, start + begin, start + end) for tensor, begin, end in self._placed(places)]
            start += places.nbytes
        return span_of(self.front, tensors)

    def read_span_into(self, span: Span, first: int, last: int, memory: memoryview) -> None:
        """Copy bytes ``[first, last)`` of ``span`` into ``memory``, of their size, with ``payload.read_span``."""
        with located(self.where):
            read_span(self._source, span, first, last, memory)

    @property
    def descriptor(self) -> int | None:
        """Descriptor from which bytes of a span may be read, before ``check_pads``; None if there is none."""
        return self._source.descriptor

    def check_pads(self, span: Span, first: int, last: int, memory: memoryview) -> None:
        """Check the pads among bytes ``[first, last)`` of ``span``, which are in ``memory``, with ``payload.check_pads``."""
        with located(self.where):
            check_pads(self._source, span, first, last, memory)

    def check_digests(self, found: Iterable[tuple[str, bytes]]) -> None:
        """Raise DigestMismatch for the first tensor whose digest in ``found`` differs from the header's."""
        with located(self.where):
            for name, digest in found:
                check_hash(name, self.tensors[name].stored_bytes, digest, self.tensors[name].digest)

    def verify(self, progress: Progress | None = None) -> None:
        """Check every byte that opening did not check: all sides and states. ``progress(done, total)`` counts stored bytes.

        A file is read in pieces and never mapped, so one that is truncated meanwhile raises Truncated.
        Raises DigestMismatch, InvalidPayload and Truncated.
        """
        done, total = 0, sum(tensor.stored_bytes for tensor in self.header.tensors)
        for number, layer in enumerate(self.header.layers):
            for side, entry in layer.sides():
                stored = {stream: self.tensors[f"{number}.{side}.{stream}"] for stream in self.header.streams[entry]}
                with located(self.where):
                    layouts = self.header.streams[entry]
                    arrays = {stream: self._checked_array(tensor, layouts[stream]) for stream, tensor in stored.items()}
                    arrays.pop("tail", None)
                    self._check(entry, arrays, f"{number}.{side}")
                done += sum(tensor.stored_bytes for tensor in stored.values())
                if progress is not None:
                    progress(done, total)
            for state in self.header.states_of(number):
                tensor = self.tensors[state.where]
                with located(self.where):
                    array = self._checked_array(tensor, state.layout)
                    if self.header.is_basis:
                        basis.check_frame_values(state, array)
                done += tensor.stored_bytes
                if progress is not None:
                    progress(done, total)

    @property
    def _checksums(self) -> bool:
        return CHECKSUMS in self.header.ignorable

    def _checked_array(self, tensor: TensorEntry, layout: Layout) -> Array:
        return checked_array(self._source, self.front, tensor, layout, checksums=self._checksums)

    def _check(self, entry: SideEntry, arrays: Mapping[str, Array], where: str, check_chunks: bool = True) -> None:
        """Raise InvalidPayload if a side breaks the rules of its codec."""
        codec = self.header.codecs[entry.codec]
        codec.check(arrays, where)
        codec.check_runs(arrays, entry.runs, where)
        if check_chunks:
            codec.check_chunks(arrays, where)
        if self.header.is_basis:
            for name, array in arrays.items():
                check_finite(f"{where}.{name}", array, "the rows of a basis")

    def _placed(self, places: SidePlaces) -> list[tuple[TensorEntry, int, int]]:
        return [(self.tensors[f"{places.layer}.{places.side}.{stream}"], *place) for stream, place in places.streams.items()]

    def side(self, layer: int, side: str) -> SideEntry:
        """Return the header entry of one side. Raises OutOfBounds if the file does not have the side."""
        layers = self.header.layers
        held = layers[layer] if 0 <= layer < len(layers) else None
        entry = {"k": held.k, "v": held.v}.get(side) if held else None
        if entry is None:
            raise OutOfBounds(f"{self.where}: has no side {layer}.{side}")
        return entry


def _flat(name: str, array: Any) -> memoryview:
    view = memoryview(array)
    if not view.c_contiguous:
        raise InvalidParameter(f"{name} is not C-contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Name the file ``where`` at the beginning of every KvpackError."""
    try:
        yield
    except KvpackError as error:
        raise type(error)(f"{where}: {error}") from None
