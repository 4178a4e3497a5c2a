"""Writing of files whose tensors arrive in pieces, for example from a device.

Each piece is written at its final offset, and the header is written last. Only the pieces being written are in memory. As in
``container.write``, the file has another name until it is complete.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from kvpack.formats.errors import InvalidParameter
from kvpack.runtime.threads import in_parallel

from .atomic import replace_file
from .front import make_front, undigested_front
from .header import Contents, Header, TensorEntry, layout_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .atomic import Progress

PIECE_BYTES = 1 << 23
"""Recommended size of a piece in bytes: large enough for few calls, and small enough that writing can start soon."""
WRITES_AT_ONCE = 3
"""Number of concurrent writes. File systems write one piece of a file at a time, but further calls hide the time between pieces."""


@dataclass(frozen=True)
class Piece:
    """The next bytes of tensor ``name``. ``release`` is called, possibly from another thread, when ``data`` is no longer needed."""

    name: str
    data: memoryview
    release: Callable[[], None]


def write_pieces(
    path: str | os.PathLike[str], contents: Contents, pieces: Iterable[Piece], *, durable: bool = False, progress: Progress | None = None
) -> int:
    """Write an uncompressed file of ``contents`` atomically and return its size in bytes.

    ``pieces`` yields the bytes of each nonempty tensor of ``contents.layouts`` in order. It runs in the caller's thread, ahead of the
    writes. ``progress(done, total)`` counts bytes. Raises InvalidParameter if a tensor gets the wrong number of bytes, LimitExceeded, or
    WriteFailed as ``container.write`` does.
    """
    front = undigested_front(contents)

    def write(descriptor: int) -> int:
        os.ftruncate(descriptor, front.file_bytes)
        payload = _PayloadTracker(contents, len(front.text), {name: place.begin for name, place in front.places.items()})
        done = len(front.text) + len(front.tensor)

        def write_piece(item: tuple[Piece, int]) -> int:
            piece, at = item
            try:
                _write_at(descriptor, piece.data, at)
                return len(piece.data)
            finally:
                piece.release()

        for written in in_parallel(write_piece, payload.assign_offsets(pieces), WRITES_AT_ONCE):
            done += written
            if progress is not None:
                progress(done, front.file_bytes)
        final = make_front(payload.header())
        _write_at(descriptor, memoryview(final.text + final.tensor), 0)
        if progress is not None:
            progress(front.file_bytes, front.file_bytes)
        return front.file_bytes

    return replace_file(path, write, durable=durable)


class _PayloadTracker:
    """Tracks the file offsets of pieces, and computes the digests of their tensors."""

    def __init__(self, contents: Contents, start: int, begins: dict[str, int]) -> None:
        self._contents, self._start, self._begins = contents, start, begins
        self._digests = {name: xxhash.xxh3_128() for name in contents.layouts}
        self._sizes = dict.fromkeys(contents.layouts, 0)

    def assign_offsets(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, int]]:
        """Yield each piece with its offset in the file. Raises InvalidParameter if a tensor gets too many bytes."""
        for piece in pieces:
            size = self._sizes[piece.name]
            self._sizes[piece.name] = size + len(piece.data)
            self._check(piece.name, is_complete=False)
            self._digests[piece.name].update(piece.data)
            yield piece, self._start + self._begins[piece.name] + size

    def header(self) -> Header:
        """Return the complete header of the file. Raises InvalidParameter if a tensor is incomplete."""
        tensors = []
        for name, layout in self._contents.layouts.items():
            self._check(name, is_complete=True)
            tensors.append(TensorEntry(name, layout.dtype, layout.shape, "none", self._sizes[name], self._digests[name].digest()))
        return Header.of(self._contents, tuple(tensors))

    def _check(self, name: str, *, is_complete: bool) -> None:
        layout, size = self._contents.layouts[name], self._sizes[name]
        expected = layout_bytes(layout)
        if size > expected or (is_complete and size != expected):
            raise InvalidParameter(f"{name} has {size} bytes, expected {expected} for {layout.dtype} {list(layout.shape)}")


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
