"""Saves a cache from a device. Copies to staging memory, digests and writes overlap.

Each piece is written at its final offset, and the header is written last. As in ``container.write``, the file has a temporary name until it
is complete.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from kvpack.file.atomic import replace_file
from kvpack.file.front import make_front, undigested_front
from kvpack.file.header import Contents, Header, TensorEntry, layout_bytes
from kvpack.formats.errors import InvalidParameter
from kvpack.runtime.modes import float32_no_grad
from kvpack.runtime.threads import in_parallel

from .stored_layers import stored_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from kvpack.coding.encoding import Progress

    from .cache import Cache
    from .device_copy import Bus

PIECE_BYTES = 1 << 23
"""Recommended size of a piece in bytes: large enough for few calls, and small enough that writing can start soon."""
WRITES_AT_ONCE = 3
"""Number of concurrent writes. File systems write one piece of a file at a time, but further calls hide the time between pieces."""


@dataclass(frozen=True)
class Piece:
    """The next bytes of the tensor ``name``. ``release`` is called, possibly from another thread, when ``data`` is no longer needed."""

    name: str
    data: memoryview
    release: Callable[[], None]


def write_pieces(
    path: str | os.PathLike[str], contents: Contents, pieces: Iterable[Piece], *, durable: bool = False, progress: Progress | None = None
) -> int:
    """Write an uncompressed file of ``contents`` atomically. Returns its size in bytes.

    ``pieces`` yields the bytes of each nonempty tensor of ``contents.layouts`` in order. It runs in the caller's thread, ahead of the
    writes. ``progress(done, total)`` counts bytes. Raises InvalidParameter if a tensor gets the wrong number of bytes, and the same errors
    as ``container.write``.
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
        return Header.from_contents(self._contents, tuple(tensors))

    def _check(self, name: str, *, is_complete: bool) -> None:
        layout, size = self._contents.layouts[name], self._sizes[name]
        expected = layout_bytes(layout)
        if size > expected or (is_complete and size != expected):
            raise InvalidParameter(f"{name} has {size} bytes, expected {expected} for {layout.dtype} {list(layout.shape)}")


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


_COPIES_AHEAD = 2
"""Number of pieces to copy ahead of the one being written."""


def save_from(
    queue: Bus,
    cache: Cache,
    path: str | os.PathLike[str],
    *,
    durable: bool = False,
    progress: Progress | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> int:
    """Write ``cache``, which is on the device of ``queue``, to ``path``, and return the file's size in bytes.

    Raises the errors of ``save``.
    """
    with float32_no_grad(queue.device), contextlib.closing(queue), contextlib.closing(_pieces(queue, cache, piece_bytes)) as pieces:
        return write_pieces(path, cache.contents, pieces, durable=durable, progress=progress)


def _pieces(queue: Bus, cache: Cache, piece_bytes: int) -> Generator[Piece, None, None]:
    """Yield the pieces of all tensors in order. Meanwhile, up to ``_COPIES_AHEAD`` later pieces are copied."""
    count = WRITES_AT_ONCE + _COPIES_AHEAD + 1
    memory = queue.allocate_staging(count * piece_bytes)
    free: SimpleQueue[torch.Tensor] = SimpleQueue()
    for number in range(count):
        free.put(memory[number * piece_bytes : (number + 1) * piece_bytes])

    def start_copies() -> Iterator[tuple[str, torch.Tensor, int, Any]]:
        for name, data in _tensors(queue, cache):
            for first in range(0, len(data), piece_bytes):
                part, slot = data[first : first + piece_bytes], free.get()
                with queue.work():
                    queue.copy(slot[: len(part)], part)
                yield name, slot, len(part), queue.mark()

    copies = start_copies()
    ahead = deque(islice(copies, _COPIES_AHEAD))
    while ahead:
        ahead.extend(islice(copies, 1))
        name, slot, size, copied = ahead.popleft()
        queue.wait(copied)
        yield Piece(name, slot[:size].numpy().data, partial(free.put, slot))


def _tensors(queue: Bus, cache: Cache) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the bytes (uint8, on the device) of each tensor in the file."""
    for number, layer in enumerate(cache.layers):
        for side_name, side in layer.sides.items():
            with queue.work():
                streams = stored_streams(side.merged())
                flat = {name: tensor.detach().contiguous().flatten().view(torch.uint8) for name, tensor in streams.items()}
            for name, data in flat.items():
                yield f"{number}.{side_name}.{name}", data
        for name, state in sorted(layer.states.items()):
            with queue.work():
                flat_state = state.detach().contiguous().flatten().view(torch.uint8)
            yield f"{number}.state.{name}", flat_state
