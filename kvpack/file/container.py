"""The kvpack file: a safetensors file in which every bit is covered by a check (spec/container.md).

It consists of a length, a JSON header, the tensor ``kvpack.header``, and the payload tensors at multiples of 64 bytes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self

import xxhash

from kvpack.formats.arguments import prefix_errors
from kvpack.formats.errors import InvalidParameter, OutOfBounds
from kvpack.formats.value_blocks import check_finite

from . import basis
from .atomic import write_file
from .footprint import check_size
from .front import align_up, check_digest, check_hash, make_front, read_front, undigested_front
from .header import Contents, Header, SideEntry, TensorEntry, layout_bytes
from .payload import Span, check_pad, check_pads, checked_array, find_span, read_checked, read_span
from .user_files import DiskFile, MemoryFile, Source, open_regular, path_text
from .zstd import FEATURE as CHECKSUMS
from .zstd import compress_frame, decompress_frame

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvpack.formats.streams import Layout
    from kvpack.formats.value_blocks import Array

    from .atomic import Progress
    from .layer_states import StateEntry


def file_size(contents: Contents) -> int:
    """Return the size in bytes of the file that ``write`` would create without compression."""
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
    """Write a file atomically. Returns its size in bytes.

    ``arrays`` contains a C-contiguous buffer for each name in ``contents.layouts``. With ``compress=True``, a tensor is stored as a zstd
    frame if that saves 3% or more. With ``durable=True``, the file and its folder are synced to disk. ``progress(done, total)`` counts
    bytes. Raises InvalidParameter or LimitExceeded before anything is written, and WriteFailed if the system cannot write the file.
    """
    return write_file(path, pieces(contents, arrays, compress=compress), durable=durable, progress=progress)


def to_bytes(contents: Contents, arrays: Mapping[str, Any], *, compress: bool = False) -> bytes:
    """Return the bytes of the file that ``write`` would create. Raises InvalidParameter or LimitExceeded."""
    return b"".join(pieces(contents, arrays, compress=compress))


def pieces(contents: Contents, arrays: Mapping[str, Any], *, compress: bool = False) -> list[memoryview]:
    """Return the bytes of the file that ``write`` would create, as consecutive buffers. Raises InvalidParameter or LimitExceeded."""
    names, array_names = set(contents.layouts), set(arrays)
    if names != array_names:
        missing, unknown = (sorted(map(str, a - b))[:8] for a, b in ((names, array_names), (array_names, names)))
        raise InvalidParameter(
            f"arrays must match the layout: missing {', '.join(missing) or 'none'}, unknown {', '.join(unknown) or 'none'}"
        )
    stored, tensors = {}, []
    for name, layout in contents.layouts.items():
        raw = _flat_bytes(name, arrays[name])
        if len(raw) != layout_bytes(layout):
            raise InvalidParameter(f"{name} has {len(raw)} bytes, expected {layout_bytes(layout)} for {layout.dtype} {list(layout.shape)}")
        frame = compress_frame(raw) if compress else None
        stored[name] = raw if frame is None else memoryview(frame)
        filter_name = "none" if frame is None else "zstd"
        tensors.append(TensorEntry(name, layout.dtype, layout.shape, filter_name, len(stored[name]), xxhash.xxh3_128_digest(stored[name])))
    if any(tensor.filter == "zstd" for tensor in tensors):
        contents = replace(contents, ignorable={**contents.ignorable, CHECKSUMS: b""})
    front = make_front(Header.from_contents(contents, tuple(tensors)))
    result = [memoryview(front.text), memoryview(front.tensor)]
    for name, place in front.places.items():
        result += [memoryview(bytes(place.begin - place.pad)), stored[name]]
    return result


def open_file(path: str | os.PathLike[str], *, memory_limit: int | None = None, copy: bool = False) -> File:
    """Open a file, and check its size, version and headers. Tensors are mapped, and checked when they are first used."""
    where = path_text(path)
    disk = DiskFile(open_regular(where))
    try:
        if memory_limit is not None:
            with prefix_errors(where):
                check_size(disk.size, memory_limit)
        file = File(disk, where, memory_limit)
        if copy:
            # Only after the header, because another file may be larger than memory.
            with prefix_errors(where):
                file._source = disk.copy_to_memory()
    except BaseException:
        disk.close()
        raise
    return file


def open_bytes(data: bytes | bytearray | memoryview, *, where: str = "bytes", memory_limit: int | None = None) -> File:
    """Open a file that is in memory as ``data``. Tensors are views of ``data``.

    ``where`` is the file's name in messages. Raises the same errors as ``open_file``.
    """
    if memory_limit is not None:
        with prefix_errors(where):
            check_size(len(data), memory_limit)
    return File(MemoryFile(data), where, memory_limit)


@dataclass(frozen=True)
class SideOffsets:
    """Offsets of a layer's decoded keys or values in a block of ``nbytes`` bytes of memory.

    ``streams`` contains the byte range of each stream by name. As in a file, each tensor begins at a multiple of 64 bytes. Uncompressed
    tensors therefore have the same layout in memory and in the file.
    """

    layer: int
    side: str
    streams: Mapping[str, tuple[int, int]]
    nbytes: int


class File:
    """An open kvpack file, from ``open_file`` or ``open_bytes``. As a context manager, it closes the file.

    ``front`` contains the bytes before the payload, ``size`` is in bytes, and ``tensors`` are the header's tensor entries by name. Error
    messages begin with ``where``.
    """

    def __init__(self, source: Source, where: str, memory_limit: int | None) -> None:
        self.where = where
        self.size = source.size
        self._source = source
        try:
            with prefix_errors(where):
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
        """Close the file. Views from ``tensor`` remain valid and keep the file mapped until the last one is gone."""
        self._source.close()

    def tensor(self, name: str) -> memoryview:
        """Return the decoded bytes of a tensor as a flat view. On first use, its digest and the padding before it are checked.

        The view of a mapped file is writable and private. Raises OutOfBounds if there is no such tensor, DigestMismatch if its digest is
        wrong, and InvalidPayload if padding is not zero or a zstd frame is invalid.
        """
        if name not in self.tensors:
            raise OutOfBounds(f"{self.where} has no tensor {name!r}")
        entry, place, start = self.tensors[name], self.front.places[name], len(self.front.text)
        with prefix_errors(self.where):
            stored = self._source.view(start + place.begin, start + place.end)
            if name not in self._verified:
                if any(pad := self._source.view(start + place.pad, start + place.begin)):
                    check_pad(name, pad)
                check_digest(name, stored, entry.digest)
                self._verified.add(name)
            if entry.filter == "none":
                return stored
            return decompress_frame(name, stored, layout_bytes(self.header.layouts[name]), checksums=self._has_checksums)

    def read_side(self, layer: int, side: str, *, check_values: bool = True) -> dict[str, memoryview]:
        """Return the decoded bytes of a layer's keys ("k") or values ("v") by stream name.

        Checks digests and padding, and also the codec's rules, unless ``check_values`` is False (for bytes from a trusted writer). Raises
        OutOfBounds if the file does not have these keys or values, DigestMismatch and InvalidPayload.
        """
        data, arrays = {}, {}
        entry = self.side(layer, side)
        for stream, layout in self.header.streams[entry].items():
            data[stream] = self.tensor(f"{layer}.{side}.{stream}")
            if check_values and stream != "tail":
                arrays[stream] = layout.array(data[stream])
        if check_values:
            with prefix_errors(self.where):
                self._check(entry, arrays, f"{layer}.{side}")
        return data

    def read_ahead(self, layer_indices: Iterable[int]) -> Iterator[int]:
        """Yield each index in ``layer_indices`` as soon as the layer's bytes are in memory, while later layers are read from disk.

        Raises MissingFile or Truncated.
        """
        # The difference between consecutive indices and their positions in the list is constant.
        for _, group in groupby(enumerate(layer_indices), lambda one: one[1] - one[0]):
            extents = {number: self._layer_extent(number) for _, number in group}
            begin, end = min(begin for begin, _ in extents.values()), max(end for _, end in extents.values())
            with prefix_errors(self.where), contextlib.closing(self._source.read_ahead(begin, end)) as ahead:
                reached = begin
                for number, (_, last) in extents.items():
                    while reached < last:
                        reached = next(ahead)
                    yield number

    def _layer_extent(self, layer_index: int) -> tuple[int, int]:
        """Return the byte range of a layer's tensors, from the beginning of the first to the end of the last."""
        names = [
            f"{layer_index}.{side}.{stream}"
            for side, entry in self.header.layers[layer_index].sides()
            for stream in self.header.streams[entry]
        ]
        places = [self.front.places[name] for name in (*names, *(state.where for state in self.header.states_in_layer(layer_index)))]
        start = len(self.front.text)
        return start + min((place.begin for place in places), default=0), start + max((place.end for place in places), default=0)

    def read_state(self, state: StateEntry) -> memoryview:
        """Return the decoded bytes of a state. Digest and padding are checked on first use. Raises DigestMismatch or InvalidPayload."""
        data = self.tensor(state.where)
        if self.header.is_basis:
            with prefix_errors(self.where):
                basis.check_frame_values(state, state.layout.array(data))
        return data

    def read_state_into(self, state: StateEntry, memory: memoryview) -> None:
        """Copy the decoded bytes of a state into ``memory``, which has the same size, and check the copy.

        Raises DigestMismatch, InvalidPayload, MissingFile or Truncated.
        """
        with prefix_errors(self.where):
            read_checked(self._source, self.front, self.tensors[state.where], state.layout, memory, checksums=self._has_checksums)

    def side_offsets(self, layer: int, side: str) -> SideOffsets:
        """Return the offsets at which ``read_side_into`` stores the tensors of a layer's keys or values.

        Raises OutOfBounds if the file does not have these keys or values.
        """
        entry = self.side(layer, side)
        if entry not in self._places:
            places, end = {}, 0
            for stream, layout in self.header.streams[entry].items():
                begin = align_up(end)
                end = begin + layout_bytes(layout)
                places[stream] = begin, end
            self._places[entry] = places, align_up(end)
        return SideOffsets(layer, side, *self._places[entry])

    def read_side_into(self, offsets: SideOffsets, memory: memoryview, *, check_values: bool = True, check_chunks: bool = True) -> None:
        """Copy a layer's decoded keys or values into ``memory``, at least ``offsets.nbytes`` bytes, and check the copies.

        The checks and their order are the same as in ``read_side``. With ``check_values=False``, the caller must check the codec's rules
        instead. With ``check_chunks=False``, the caller must check only the rules of ``Codec.check_chunks``. Several threads may call this
        method for different keys or values. Raises DigestMismatch, InvalidPayload, MissingFile and Truncated.
        """
        entry, arrays, prefix = self.side(offsets.layer, offsets.side), {}, f"{offsets.layer}.{offsets.side}"
        layouts, tensors = self.header.streams[entry], self._tensors_at(offsets)
        with prefix_errors(self.where):
            span = find_span(self.front, tensors)
            if span is not None:
                read_span(self._source, span, 0, span.end - span.begin, memory[: span.end - span.begin])
                for tensor, begin, end in tensors:
                    check_digest(tensor.name, memory[begin:end], tensor.digest)
            else:
                for (tensor, begin, end), layout in zip(tensors, layouts.values(), strict=True):
                    read_checked(self._source, self.front, tensor, layout, memory[begin:end], checksums=self._has_checksums)
            if not check_values:
                return
            for (stream, layout), (_, begin, end) in zip(layouts.items(), tensors, strict=True):
                if stream != "tail":
                    arrays[stream] = layout.array(memory[begin:end])
            self._check(entry, arrays, prefix, check_chunks)

    def span(self, sides: Sequence[SideOffsets]) -> Span | None:
        """Return the byte range of ``sides`` if they have the same layout in the file as in memory, one after another, or None otherwise.
        """
        tensors, start = [], 0
        for places in sides:
            tensors += [(tensor, start + begin, start + end) for tensor, begin, end in self._tensors_at(places)]
            start += places.nbytes
        return find_span(self.front, tensors)

    def read_span_into(self, span: Span, first: int, last: int, memory: memoryview) -> None:
        """Read bytes ``[first, last)`` of ``span`` into ``memory``, which has the same size. Padding is checked, but digests are not."""
        with prefix_errors(self.where):
            read_span(self._source, span, first, last, memory)

    @property
    def descriptor(self) -> int | None:
        """The file descriptor, or None if the file is in memory. Callers that read spans from it must check them with ``check_pads``."""
        return self._source.descriptor

    def check_pads(self, span: Span, first: int, last: int, memory: memoryview) -> None:
        """Check the padding in bytes ``[first, last)`` of ``span``. ``memory`` contains these bytes."""
        with prefix_errors(self.where):
            check_pads(self._source, span, first, last, memory)

    def check_digests(self, digests: Iterable[tuple[str, bytes]]) -> None:
        """Compare (tensor name, digest) pairs with the header. Raises DigestMismatch for the first difference."""
        with prefix_errors(self.where):
            for name, digest in digests:
                check_hash(name, self.tensors[name].stored_bytes, digest, self.tensors[name].digest)

    def verify(self, progress: Progress | None = None) -> None:
        """Check all bytes that were not checked when the file was opened: keys, values and states.

        ``progress(done, total)`` counts stored bytes. A file on disk is read in pieces instead of mapped, so that truncation raises
        Truncated. Raises DigestMismatch, InvalidPayload or Truncated.
        """
        done, total = 0, sum(tensor.stored_bytes for tensor in self.header.tensors)
        for number, layer in enumerate(self.header.layers):
            for side, entry in layer.sides():
                stored = {stream: self.tensors[f"{number}.{side}.{stream}"] for stream in self.header.streams[entry]}
                with prefix_errors(self.where):
                    layouts = self.header.streams[entry]
                    arrays = {stream: self._checked_array(tensor, layouts[stream]) for stream, tensor in stored.items()}
                    arrays.pop("tail", None)
                    self._check(entry, arrays, f"{number}.{side}")
                done += sum(tensor.stored_bytes for tensor in stored.values())
                if progress is not None:
                    progress(done, total)
            for state in self.header.states_in_layer(number):
                tensor = self.tensors[state.where]
                with prefix_errors(self.where):
                    array = self._checked_array(tensor, state.layout)
                    if self.header.is_basis:
                        basis.check_frame_values(state, array)
                done += tensor.stored_bytes
                if progress is not None:
                    progress(done, total)

    @property
    def _has_checksums(self) -> bool:
        return CHECKSUMS in self.header.ignorable

    def _checked_array(self, tensor: TensorEntry, layout: Layout) -> Array:
        return checked_array(self._source, self.front, tensor, layout, checksums=self._has_checksums)

    def _check(self, entry: SideEntry, arrays: Mapping[str, Array], where: str, check_chunks: bool = True) -> None:
        """Raise InvalidPayload if the streams of a side break a rule of its codec."""
        codec = self.header.codecs[entry.codec]
        codec.check(arrays, where)
        codec.check_runs(arrays, entry.runs, where)
        if check_chunks:
            codec.check_chunks(arrays, where)
        if self.header.is_basis:
            for name, array in arrays.items():
                check_finite(f"{where}.{name}", array, "the rows of a basis")

    def _tensors_at(self, offsets: SideOffsets) -> list[tuple[TensorEntry, int, int]]:
        return [(self.tensors[f"{offsets.layer}.{offsets.side}.{stream}"], *place) for stream, place in offsets.streams.items()]

    def side(self, layer: int, side: str) -> SideEntry:
        """Return the header entry of a layer's keys ("k") or values ("v"). Raises OutOfBounds if they are absent."""
        layers = self.header.layers
        layer_entry = layers[layer] if 0 <= layer < len(layers) else None
        entry = {"k": layer_entry.k, "v": layer_entry.v}.get(side) if layer_entry else None
        if entry is None:
            raise OutOfBounds(f"{self.where} has no keys or values {layer}.{side}: it has {len(layers)} layers, each with k, v or both")
        return entry


def _flat_bytes(name: str, array: Any) -> memoryview:
    view = memoryview(array)
    if not view.c_contiguous:
        raise InvalidParameter(f"{name} is not C-contiguous: pass numpy.ascontiguousarray(array)")
    return view.cast("B") if view.nbytes else memoryview(b"")
