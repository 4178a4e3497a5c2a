"""Load layers of a file to a device: read and checked in threads in staging memory, then copied from there.

So the bytes that are checked are the bytes that are used, whatever happens to the file meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from kvpack.coding.encoding import TORCH_DTYPES
from kvpack.file.header import layout_bytes
from kvpack.file.parallel import in_parallel, usable_cores

from .layer import Layer, sliced
from .stored import side_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from kvpack.file.container import File, SidePlaces

    from .bus import Bus
    from .parts import Part
    from .side import Side

STAGING_BYTES = 1 << 29
"""The most staging memory of one load, unless three times its largest side is more."""
_COPYING = 2
"""Sides that are being copied while others are read."""
_MAX_THREADS = 16


def load_layers(file: File, part: Part, bus: Bus, *, staging_bytes: int = STAGING_BYTES) -> Generator[tuple[int, Layer], None, None]:
    """Each layer of ``part``, with its number, on the device of ``bus``.

    A layer is yielded when its bytes are checked and its copy has begun; the caller's stream waits for that copy. Meanwhile the
    next layers are read. With all tokens, a layer's streams are views of one buffer, and each side is one copy.
    Raises as ``File.read_side``, the first error in the order of the file, and OutOfBounds as ``Cache.slice``.
    """
    places = {number: [file.side_places(number, name) for name, _ in file.header.layers[number].sides()] for number in part.numbers}
    staged = _staged([side for sides in places.values() for side in sides], file, bus, staging_bytes)
    with contextlib.closing(bus), contextlib.closing(staged):
        # All are allocated before the first copy, which waits for the work under way in the memory that they reuse.
        buffers = {number: _buffer(sides, bus) for number, sides in places.items() if part.has_all_tokens}
        bus.follow()
        for number, sides in places.items():
            found, begin = {}, 0
            for side in sides:
                memory = next(staged)
                if part.has_all_tokens:
                    target = buffers[number][begin : begin + side.nbytes]
                    bus.copy(target, memory[: side.nbytes])
                    found[side.side] = _side(file, side, target)
                    begin += side.nbytes
                else:
                    found[side.side] = _rows(file, side, memory, part, bus)
            bus.order(bus.mark())
            skipped = file.header.starts[number] - file.header.start if part.has_all_tokens else 0
            layer = Layer(found.get("k"), found.get("v"), skipped=skipped)
            yield number, replace(layer, states=MappingProxyType(_states(file, number, part, bus)))


def _buffer(sides: Sequence[SidePlaces], bus: Bus) -> torch.Tensor:
    return torch.empty(sum(side.nbytes for side in sides), dtype=torch.uint8, device=bus.device)


def _side(file: File, places: SidePlaces, memory: torch.Tensor) -> Side:
    """The side whose tensors are in ``memory``, uint8, where ``places`` puts them."""
    entry = dict(file.header.layers[places.layer].sides())[places.side]
    tensors = {}
    for name, layout in file.header.streams[entry].items():
        begin, end = places.streams[name]
        tensors[name] = memory[begin:end].view(TORCH_DTYPES[layout.dtype]).view(layout.shape)
    return side_of(file.header, entry, tensors, memory.device)


def _states(file: File, number: int, part: Part, bus: Bus) -> dict[str, torch.Tensor]:
    """The states of layer ``number`` on the device. Raises OutOfBounds for a part that ends before the file does."""
    found = {}
    for state in file.header.states_of(number):
        memory = torch.empty(layout_bytes(state.layout), dtype=torch.uint8, device="cpu")
        file.read_state_into(state, memory.numpy().data)
        found[state.name] = memory.view(TORCH_DTYPES[state.dtype]).view(state.shape).to(bus.device)
    held = Layer(None, None, states=MappingProxyType(found))
    return dict(sliced(held, number, (part.start, part.stop), file.header.start, part.tokens).states)


def _rows(file: File, places: SidePlaces, memory: torch.Tensor, part: Part, bus: Bus) -> Side:
    """The tokens of ``part`` of the side in ``memory``, copied to the device. Raises OutOfBounds."""
    skipped = file.header.starts[places.layer] - file.header.start
    layer = Layer(_side(file, places, memory), None, skipped=skipped)
    side = sliced(layer, places.layer, (part.start, part.stop), file.header.start, part.tokens).k
    assert side is not None
    return side.moved(lambda tensor: _copied(tensor, bus))


def _copied(tensor: torch.Tensor, bus: Bus) -> torch.Tensor:
    """``tensor``, of rows ``[batch, kv_head, row, ...]`` in staging memory, on the device: a copy for every head at most."""
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=bus.device)
    bus.follow()
    if tensor.is_contiguous():
        bus.copy(target, tensor)
    else:
        for to, rows in zip(target.flatten(0, 1), tensor.flatten(0, 1), strict=True):
            bus.copy(to, rows)
    return target


def _staged(sides: Sequence[SidePlaces], file: File, bus: Bus, staging_bytes: int) -> Generator[torch.Tensor, None, None]:
    """The checked bytes of each side in staging memory, reused once what the caller has begun to copy by the next side is copied."""
    if not sides:
        return
    largest = max(1, *(side.nbytes for side in sides))
    count = min(max(staging_bytes // largest, _COPYING + 1), min(usable_cores(), _MAX_THREADS) + _COPYING, len(sides) + _COPYING)
    memory = bus.staging(count * largest)
    free = deque((memory[at * largest : (at + 1) * largest], bus.mark()) for at in range(count))

    def with_memory() -> Iterator[tuple[SidePlaces, torch.Tensor]]:
        for side in sides:
            slot, copied = free.popleft()
            bus.wait(copied)
            yield side, slot

    def read(item: tuple[SidePlaces, torch.Tensor]) -> torch.Tensor:
        side, slot = item
        file.read_side_into(side, slot.numpy().data)
        return slot

    with contextlib.closing(in_parallel(read, with_memory(), count - _COPYING)) as slots:
        for slot in slots:
            yield slot
            # The caller has begun to copy it.
            free.append((slot, bus.mark()))
