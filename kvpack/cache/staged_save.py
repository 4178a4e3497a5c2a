"""Saving of a cache from a device. Copies to staging memory, digests and writes overlap."""

from __future__ import annotations

import contextlib
from collections import deque
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from kvpack.file.streamed import PIECE_BYTES, WRITES_AT_ONCE, Piece, write_pieces
from kvpack.runtime.modes import float32_no_grad

from .stored_layers import stored_streams

if TYPE_CHECKING:
    import os
    from collections.abc import Generator, Iterator

    from kvpack.coding.encoding import Progress

    from .cache import Cache
    from .device_copy import Bus

_COPIES_AHEAD = 2
"""Number of pieces that are copied ahead of the one being written."""


def save_from(
    bus: Bus,
    cache: Cache,
    path: str | os.PathLike[str],
    *,
    durable: bool = False,
    progress: Progress | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> int:
    """Write ``cache``, which is on the device of ``bus``, to ``path``. Returns the number of bytes. Raises the same errors as ``save``."""
    with float32_no_grad(bus.device), contextlib.closing(bus), contextlib.closing(_pieces(bus, cache, piece_bytes)) as pieces:
        return write_pieces(path, cache.contents, pieces, durable=durable, progress=progress)


def _pieces(bus: Bus, cache: Cache, piece_bytes: int) -> Generator[Piece, None, None]:
    """Yield the pieces of all tensors in order. Up to ``_COPIES_AHEAD`` later pieces are copied meanwhile."""
    count = WRITES_AT_ONCE + _COPIES_AHEAD + 1
    memory = bus.allocate_staging(count * piece_bytes)
    free: SimpleQueue[torch.Tensor] = SimpleQueue()
    for number in range(count):
        free.put(memory[number * piece_bytes : (number + 1) * piece_bytes])

    def start_copies() -> Iterator[tuple[str, torch.Tensor, int, Any]]:
        for name, data in _tensors(bus, cache):
            for first in range(0, len(data), piece_bytes):
                part, slot = data[first : first + piece_bytes], free.get()
                with bus.work():
                    bus.copy(slot[: len(part)], part)
                yield name, slot, len(part), bus.mark()

    copies = start_copies()
    ahead = deque(islice(copies, _COPIES_AHEAD))
    while ahead:
        ahead.extend(islice(copies, 1))
        name, slot, size, copied = ahead.popleft()
        bus.wait(copied)
        yield Piece(name, slot[:size].numpy().data, partial(free.put, slot))


def _tensors(bus: Bus, cache: Cache) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the bytes (uint8, on the device) of each tensor in the file."""
    for number, layer in enumerate(cache.layers):
        for side_name, side in layer.sides.items():
            with bus.work():
                streams = stored_streams(side.merged())
                flat = {name: tensor.detach().contiguous().flatten().view(torch.uint8) for name, tensor in streams.items()}
            for name, data in flat.items():
                yield f"{number}.{side_name}.{name}", data
        for name, state in sorted(layer.states.items()):
            with bus.work():
                flat_state = state.detach().contiguous().flatten().view(torch.uint8)
            yield f"{number}.state.{name}", flat_state
