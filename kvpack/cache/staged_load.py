"""Load layers of a file to a device: read in threads in staging memory, copied from there, and checked there or on the device.

So the bytes that are checked are the bytes that are used, whatever happens to the file meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from kvpack.coding import dispatch
from kvpack.coding.encoding import TORCH_DTYPES
from kvpack.file.header import layout_bytes
from kvpack.file.parallel import in_parallel, usable_cores
from kvpack.file.payload import Span
from kvpack.formats.base import DTYPE_BYTES

from .layer import Layer, sliced
from .stored import side_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from kvpack.file.container import File, SidePlaces
    from kvpack.file.header import SideEntry

    from .bus import Bus
    from .parts import Part
    from .side import Side

STAGING_BYTES = 1 << 29
"""The most staging memory of one load, unless twice its largest copy is more."""
COPY_BYTES = 1 << 24
"""The most bytes of a copy, but for a side that the host checks; small layers are copied together."""
READ_BYTES = 1 << 22
"""The most bytes of a read, but for such a side: threads read the bytes of one copy together, so that it begins soon."""
_READERS = 12
"""Threads that only read. More wait for each other, since each read takes the interpreter a moment.

H200s' machines of 16 cores loaded 1.02 GB, medians of two rounds: with reads of 2 MiB in 45 and 42 ms by 8 threads, with reads of 4 MiB in
45 and 42 by 8, 37 and 39 by 10, 33 and 40 by 12, 40 and 41 by 16; with reads of 8 MiB in 48 and 47 by 8. An H100's of as many cores
loaded it in 38 to 41 ms with copies of 32 MiB, in 36 with these and two reads waiting, and in 56 to 68 where threads begin the copies.
"""
_CHECKERS = 16
"""Threads that also check what they read."""
_WAITING = 2
"""Reads that have memory before a thread begins them: less memory is more of it in the processor's cache."""


@dataclass(frozen=True)
class _Group:
    """Sides, each with its place in one piece of memory of ``nbytes`` bytes: of one layer, or of layers one after another.

    ``span`` holds them in the file, with the same places, if the device checks them; the host checks others, side by side.
    """

    sides: Sequence[tuple[SidePlaces, int]]
    nbytes: int
    span: Span | None


@dataclass(frozen=True)
class _Copy:
    """Bytes ``[begin, end)`` of the memory of the group with that ``number``, for ``side`` if the host checks that."""

    number: int
    begin: int
    end: int
    span: Span | None
    side: SidePlaces

    def reads(self) -> list[tuple[int, int]]:
        """What threads read, as places in the group's memory."""
        if self.span is None:
            return [(self.begin, self.end)]
        end = min(self.end, self.span.end - self.span.begin)
        return [(first, min(first + READ_BYTES, end)) for first in range(self.begin, end, READ_BYTES)]


def load_layers(file: File, part: Part, bus: Bus, *, staging_bytes: int = STAGING_BYTES) -> dict[int, Layer]:
    """The layers of ``part`` by number, on the device of ``bus``; the caller's stream waits for their copies, the host does not.

    Bytes are copied as soon as they are read, while those that follow are read. With all tokens, a layer's streams are views of one
    buffer, and the device checks what its kernels can, once all is there: digests, the codec's rules, and what only decoding all symbols
    tells. The host waits for that; what it checks itself, it checks before the copy. Raises as ``File.read_side``, the first error in the
    order of the file, those that the device finds last, digests first, and OutOfBounds as ``Cache.slice``.
    """
    header = file.header
    places = {number: [file.side_places(number, name) for name, _ in header.layers[number].sides()] for number in part.numbers}
    found: dict[int, dict[str, Side]] = {number: {} for number in places}
    # On the host, threads that check would wait for each other.
    ruled, chunked = (
        {number for number, codec in enumerate(header.codecs) if part.has_all_tokens and checks(codec, bus.device)}
        for checks in (dispatch.checks_values, dispatch.checks_chunks)
    )
    groups = _groups(file, places.values(), ruled, bus.device)
    copies = [copy for number, group in enumerate(groups) for copy in _copies(number, group)]
    with contextlib.closing(bus), contextlib.closing(_staged(copies, file, bus, staging_bytes, ruled, chunked)) as staged:
        # All are allocated before the first copy, which waits for the work under way in the memory that they reuse.
        sizes = [group.nbytes for group in groups] if part.has_all_tokens else []
        targets = [torch.empty(size, dtype=torch.uint8, device=bus.device) for size in sizes]
        bus.follow()
        for copy in copies:
            memory = next(staged)
            if part.has_all_tokens:
                bus.copy(targets[copy.number][copy.begin : copy.end], memory)
            else:
                found[copy.side.layer][copy.side.side] = _rows(file, copy.side, memory, part, bus)
        states = {number: _states(file, number, part, bus) for number in places}
    for place, side in _checked(file, list(zip(groups, targets, strict=False)), ruled, chunked):
        found[place.layer][place.side] = side
    layers = {}
    for number, sides in found.items():
        skipped = header.starts[number] - header.start if part.has_all_tokens else 0
        layers[number] = Layer(sides.get("k"), sides.get("v"), skipped=skipped, states=MappingProxyType(states[number]))
    return layers


def _checked(
    file: File, groups: Sequence[tuple[_Group, torch.Tensor]], ruled: AbstractSet[int], chunked: AbstractSet[int]
) -> list[tuple[SidePlaces, Side]]:
    """The sides of ``groups``, each with its memory on the device, which checks them; the host waits for it.

    Sides are made while it looks for digests. Raises DigestMismatch and InvalidPayload.
    """
    hashed = [
        (f"{side.layer}.{side.side}.{stream}", (memory, start + begin, start + end))
        for group, memory in groups
        if group.span
        for side, start in group.sides
        for stream, (begin, end) in side.streams.items()
    ]
    digests = dispatch.digests([place for _, place in hashed])
    made: list[tuple[SidePlaces, Side]] = []
    for group, memory in groups:
        views: dict[str, torch.Tensor] = {}
        made += [(side, _side(file, side, memory, start, views)) for side, start in group.sides]
    stored = [
        (_entry(file, place).codec, streams, f"{file.where}: {place.layer}.{place.side}")
        for place, side in made
        for streams in side.stored_streams()
    ]
    codecs = file.header.codecs
    check_values = dispatch.check_values([(codecs[codec], streams, where) for codec, streams, where in stored if codec in ruled])
    file.check_digests((name, digest) for (name, _), digest in zip(hashed, digests(), strict=True))
    check_values()
    for codec, streams, where in stored:
        if codec in chunked:
            dispatch.check_chunks(codecs[codec], streams, where)
    return made


def _groups(file: File, layers: Iterable[Sequence[SidePlaces]], ruled: AbstractSet[int], device: torch.device) -> list[_Group]:
    """The groups of the sides of ``layers``, in order: those that the device checks and the file holds one after another, of a copy."""
    groups: list[_Group] = []
    for sides in layers:
        starts = list(accumulate((side.nbytes for side in sides), initial=0))
        group = _Group(list(zip(sides, starts, strict=False)), starts[-1], _span(file, sides, ruled, device))
        last = groups[-1] if groups else group
        if group.span and groups and last.span and last.span.begin + last.nbytes == group.span.begin:
            nbytes = last.nbytes + group.nbytes
            if nbytes <= COPY_BYTES:
                joined = Span(last.span.begin, group.span.end, (*last.span.pads, *group.span.pads))
                groups[-1] = _Group([*last.sides, *((side, last.nbytes + start) for side, start in group.sides)], nbytes, joined)
                continue
        groups.append(group)
    return groups


def _span(file: File, sides: Sequence[SidePlaces], ruled: AbstractSet[int], device: torch.device) -> Span | None:
    """The bytes of a layer's ``sides``, if the device checks all of them: rules are asked of bytes that have their digests."""
    if not sides or any(_entry(file, side).codec not in ruled for side in sides):
        return None
    fewest = min(end - begin for side in sides for begin, end in side.streams.values())
    return file.span(sides) if dispatch.checks_digests(fewest, device) else None


def _copies(number: int, group: _Group) -> Iterator[_Copy]:
    """The copies of a group."""
    if group.span is None:
        for side, start in group.sides:
            yield _Copy(number, start, start + side.nbytes, None, side)
    else:
        # Of nearly one size, in whole reads.
        step = -(-group.nbytes // -(-group.nbytes // COPY_BYTES) // READ_BYTES) * READ_BYTES
        for begin in range(0, group.nbytes, step):
            yield _Copy(number, begin, min(begin + step, group.nbytes), group.span, group.sides[0][0])


def _staged(
    copies: Sequence[_Copy], file: File, bus: Bus, staging_bytes: int, ruled: AbstractSet[int], chunked: AbstractSet[int]
) -> Generator[torch.Tensor, None, None]:
    """The bytes of each copy in staging memory, reused once what the caller has begun to copy by the next one is copied.

    Rules of the codecs numbered ``ruled``, and chunks of those numbered ``chunked``, are not checked, nor digests that the device checks.
    """
    if not copies:
        return
    reads = [copy.reads() for copy in copies]
    largest = max(1, *(copy.end - copy.begin for copy in copies))
    threads = min(usable_cores(), _READERS if all(copy.span for copy in copies) else _CHECKERS)
    # Reads that have memory, and the most copies that they are part of. One more is complete and being copied.
    owners = [number for number, own in enumerate(reads) for _ in own]
    ahead = min(threads + _WAITING, len(owners))
    spread, most = 1 + max(map(sub, owners[ahead - 1 :], owners)), max(1, staging_bytes // largest - 1)
    if spread > most:
        ahead = spread = most
    threads = min(threads, ahead)
    memory = bus.staging((spread + 1) * largest)
    # As buffers, too, before threads read: each operation of torch's lets them go first.
    free = deque((slot, slot.numpy().data, bus.mark()) for slot in torch.split(memory, largest))
    begun = deque[tuple[torch.Tensor, memoryview]]()

    def with_memory() -> Iterator[tuple[_Copy, int, int, memoryview]]:
        for copy, own in zip(copies, reads, strict=True):
            slot, data, copied = free.popleft()
            bus.wait(copied)
            begun.append((slot, data))
            for first, last in own:
                yield copy, first, last, data[first - copy.begin : last - copy.begin]

    def read(item: tuple[_Copy, int, int, memoryview]) -> None:
        copy, first, last, data = item
        if copy.span:
            file.read_span_into(copy.span, first, last, data)
        else:
            codec = _entry(file, copy.side).codec
            file.read_side_into(copy.side, data, check_values=codec not in ruled, check_chunks=codec not in chunked)

    with contextlib.closing(in_parallel(read, with_memory(), threads, ahead - threads)) as done:
        for copy, own in zip(copies, reads, strict=True):
            for _ in own:
                next(done)
            slot, data = begun.popleft()
            yield slot[: copy.end - copy.begin]
            # The caller has begun to copy it.
            free.append((slot, data, bus.mark()))


def _entry(file: File, places: SidePlaces) -> SideEntry:
    layer = file.header.layers[places.layer]
    entry = layer.k if places.side == "k" else layer.v
    assert entry is not None
    return entry


def _side(file: File, places: SidePlaces, memory: torch.Tensor, start: int, views: dict[str, torch.Tensor]) -> Side:
    """The side whose tensors are from ``start`` on in ``memory``, uint8, where ``places`` puts them; ``views`` of it are kept by dtype."""
    entry = _entry(file, places)
    tensors: dict[str, torch.Tensor] = {}
    for name, layout in file.header.streams[entry].items():
        if layout.dtype not in views:
            views[layout.dtype] = memory.view(TORCH_DTYPES[layout.dtype])
        view, begin = views[layout.dtype], (start + places.streams[name][0]) // DTYPE_BYTES[layout.dtype]
        tensors[name] = view.as_strided(layout.shape, layout.strides, view.storage_offset() + begin)
    return side_of(file.header, entry, tensors, memory.device)


def _states(file: File, number: int, part: Part, bus: Bus) -> dict[str, torch.Tensor]:
    """The states of layer ``number`` on the device. Raises OutOfBounds for a part that ends before the file does."""
    found = {}
    for state in file.header.states_of(number):
        memory = torch.empty(layout_bytes(state.layout), dtype=torch.uint8, device="cpu")
        file.read_state_into(state, memory.numpy().data)
        found[state.name] = memory.view(TORCH_DTYPES[state.dtype]).view(state.shape).to(bus.device)
    if not found:
        return {}
    held = Layer(None, None, states=MappingProxyType(found))
    return dict(sliced(held, number, (part.start, part.stop), file.header.start, part.tokens).states)


def _rows(file: File, places: SidePlaces, memory: torch.Tensor, part: Part, bus: Bus) -> Side:
    """The tokens of ``part`` of the side in ``memory``, copied to the device. Raises OutOfBounds."""
    skipped = file.header.starts[places.layer] - file.header.start
    layer = Layer(_side(file, places, memory, 0, {}), None, skipped=skipped)
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
