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

from kvpack.coding import dispatch
from kvpack.coding.encoding import TORCH_DTYPES
from kvpack.file.header import layout_bytes
from kvpack.file.parallel import in_parallel, usable_cores
from kvpack.formats.base import DTYPE_BYTES

from .layer import Layer, sliced
from .stored import side_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from kvpack.file.container import File, SidePlaces
    from kvpack.file.header import SideEntry

    from .bus import Bus
    from .parts import Part
    from .side import Side

STAGING_BYTES = 1 << 29
"""The most staging memory of one load, unless three times its largest side is more."""
_COPYING = 2
"""Sides that are being copied while others are read."""
_WAITING = 2
"""Sides that have memory before a thread begins them: less memory is more of it in the processor's cache."""
_MAX_THREADS = 16


def load_layers(file: File, part: Part, bus: Bus, *, staging_bytes: int = STAGING_BYTES) -> dict[int, Layer]:
    """The layers of ``part`` by number, on the device of ``bus``; the caller's stream waits for their copies, the host does not.

    A side is copied as soon as its bytes are checked, while those that follow are read. With all tokens, a layer's streams are views
    of one buffer, and each side is one copy; the codec's rules are checked on the device, once all is there, if a kernel does so, and so
    is what only decoding all symbols tells: the host waits for that. Raises as ``File.read_side``, the first error in the order of the
    file, those that the device finds last, and OutOfBounds as ``Cache.slice``.
    """
    places = {number: [file.side_places(number, name) for name, _ in file.header.layers[number].sides()] for number in part.numbers}
    found: dict[int, dict[str, Side]] = {number: {} for number in places}
    every = [side for sides in places.values() for side in sides]
    codecs = file.header.codecs
    # On the host, threads that check would wait for each other.
    ruled, chunked = (
        {number for number, codec in enumerate(codecs) if part.has_all_tokens and checks(codec, bus.device)}
        for checks in (dispatch.checks_values, dispatch.checks_chunks)
    )
    staged = _staged(every, file, bus, staging_bytes, ruled, chunked)
    with contextlib.closing(bus), contextlib.closing(staged):
        # All are allocated before the first copy, which waits for the work under way in the memory that they reuse.
        targets = {number: _targets(sides, bus) for number, sides in places.items() if part.has_all_tokens}
        bus.follow()
        for number, sides in places.items():
            for at, side in enumerate(sides):
                memory = next(staged)
                if part.has_all_tokens:
                    bus.copy(targets[number][at], memory[: side.nbytes])
                else:
                    found[number][side.side] = _rows(file, side, memory, part, bus)
        states = {number: _states(file, number, part, bus) for number in places}
    # Made when nothing is read any more: threads that read wait for each operation of this one.
    layers = {}
    stored: list[tuple[int, Mapping[str, torch.Tensor], str]] = []
    for number, sides in places.items():
        if part.has_all_tokens:
            found[number] = {side.side: _side(file, side, target) for side, target in zip(sides, targets[number], strict=True)}
            for side in sides:
                where = f"{file.where}: {number}.{side.side}"
                stored += [(_entry(file, side).codec, streams, where) for streams in found[number][side.side].stored_streams()]
        skipped = file.header.starts[number] - file.header.start if part.has_all_tokens else 0
        layer = Layer(found[number].get("k"), found[number].get("v"), skipped=skipped)
        layers[number] = replace(layer, states=MappingProxyType(states[number]))
    dispatch.check_values([(codecs[codec], streams, where) for codec, streams, where in stored if codec in ruled])
    for codec, streams, where in stored:
        if codec in chunked:
            dispatch.check_chunks(codecs[codec], streams, where)
    return layers


def _entry(file: File, places: SidePlaces) -> SideEntry:
    return dict(file.header.layers[places.layer].sides())[places.side]


def _targets(sides: Sequence[SidePlaces], bus: Bus) -> list[torch.Tensor]:
    """Memory for each side, in one buffer."""
    buffer = torch.empty(sum(side.nbytes for side in sides), dtype=torch.uint8, device=bus.device)
    return list(torch.split(buffer, [side.nbytes for side in sides]))


def _side(file: File, places: SidePlaces, memory: torch.Tensor) -> Side:
    """The side whose tensors are in ``memory``, uint8, where ``places`` puts them."""
    entry = _entry(file, places)
    tensors: dict[str, torch.Tensor] = {}
    views: dict[str, torch.Tensor] = {}
    for name, layout in file.header.streams[entry].items():
        begin, end = places.streams[name]
        if layout.dtype not in views:
            views[layout.dtype] = memory.view(TORCH_DTYPES[layout.dtype])
        size = DTYPE_BYTES[layout.dtype]
        tensors[name] = views[layout.dtype][begin // size : end // size].view(layout.shape)
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


def _staged(
    sides: Sequence[SidePlaces], file: File, bus: Bus, staging_bytes: int, ruled: AbstractSet[int], chunked: AbstractSet[int]
) -> Generator[torch.Tensor, None, None]:
    """The checked bytes of each side in staging memory, reused once what the caller has begun to copy by the next side is copied.

    Rules of the codecs numbered ``ruled``, and chunks of those numbered ``chunked``, are not checked.
    """
    if not sides:
        return
    largest = max(1, *(side.nbytes for side in sides))
    threads = min(usable_cores(), _MAX_THREADS)
    count = min(max(staging_bytes // largest, _COPYING + 1), threads + _WAITING + _COPYING, len(sides) + _COPYING)
    threads = min(threads, count - _COPYING)
    memory = bus.staging(count * largest)
    slots = [memory[at * largest : (at + 1) * largest] for at in range(count)]
    # As buffers, too, before threads read: each operation of torch's lets them go first.
    free = deque((slot, slot.numpy().data, bus.mark()) for slot in slots)

    def with_memory() -> Iterator[tuple[SidePlaces, torch.Tensor, memoryview]]:
        for side in sides:
            slot, data, copied = free.popleft()
            bus.wait(copied)
            yield side, slot, data

    def read(item: tuple[SidePlaces, torch.Tensor, memoryview]) -> tuple[torch.Tensor, memoryview]:
        side, slot, data = item
        codec = _entry(file, side).codec
        file.read_side_into(side, data, check_values=codec not in ruled, check_chunks=codec not in chunked)
        return slot, data

    with contextlib.closing(in_parallel(read, with_memory(), threads, count - _COPYING - threads)) as done:
        for slot, data in done:
            yield slot
            # The caller has begun to copy it.
            free.append((slot, data, bus.mark()))
