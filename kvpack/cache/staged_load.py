"""Load layers of a file to a device: read in threads in staging memory, copied from there, and checked there or on the device.

So the bytes that are checked are the bytes that are used, whatever happens to the file meanwhile.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from operator import sub
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from kvpack.coding import dispatch
from kvpack.coding.encoding import TORCH_DTYPES
from kvpack.file.header import layout_bytes
from kvpack.file.parallel import usable_cores
from kvpack.file.payload import Span
from kvpack.formats.base import DTYPE_BYTES

from .layer import Layer, sliced
from .staged_reads import StagedReads
from .stored import side_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from kvpack.file.container import File, SidePlaces
    from kvpack.file.header import SideEntry

    from .bus import Bus
    from .parts import Part
    from .side import Side
    from .staged_reads import ReadAhead

STAGING_BYTES = 1 << 29
"""The most staging memory of one load, unless twice its largest copy is more."""
COPY_BYTES = 1 << 24
"""The most bytes of a copy, but for a side that the host checks; small layers are copied together."""
READ_BYTES = 1 << 21
"""The most bytes of a read, but for such a side: threads read the bytes of one copy together, so that it begins soon."""
_THREADS = 16
"""Threads that read, and check what the device does not."""
_WAITING = 4
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

    @property
    def begin_in_file(self) -> float:
        """Where its bytes begin in the file; nowhere for a side that the host checks."""
        return inf if self.span is None else self.span.begin + self.begin

    @property
    def end_in_file(self) -> float:
        """Where its bytes end in the file."""
        return inf if self.span is None else min(self.span.begin + self.end, self.span.end)

    def reads(self) -> list[tuple[int, int]]:
        """What threads read, as places in the group's memory."""
        if self.span is None:
            return [(self.begin, self.end)]
        end = min(self.end, self.span.end - self.span.begin)
        return [(first, min(first + READ_BYTES, end)) for first in range(self.begin, end, READ_BYTES)]


def load_layers(
    file: File, part: Part, bus: Bus, *, staging_bytes: int = STAGING_BYTES, ahead: ReadAhead | None = None
) -> dict[int, Layer]:
    """The layers of ``part`` by number, on the device of ``bus``; the caller's stream waits for their copies, the host does not.

    Bytes are copied as soon as they are read, while those that follow are read; what ``ahead`` reads is copied from its memory. With all
    tokens, a layer's streams are views of one buffer, and the device checks what its kernels can, once all is there: digests, the codec's
    rules, and what only decoding all symbols tells. The host waits for that; what it checks itself, it checks before the copy. Raises as
    ``File.read_side``, the first error in the order of the file, those that the device finds last, digests first, and OutOfBounds as
    ``Cache.slice``.
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
    with contextlib.closing(bus):
        # All are allocated before the first copy, which waits for the work under way in the memory that they reuse.
        sizes = [group.nbytes for group in groups] if part.has_all_tokens else []
        targets = [torch.empty(size, dtype=torch.uint8, device=bus.device) for size in sizes]
        bus.follow()
        # Sides are views, which are made before threads read: those would wait for it.
        made = _made(file, groups, targets)
        with contextlib.closing(_Staging(copies, file, bus, staging_bytes, ruled, chunked, ahead)) as staging:
            for number, copy in enumerate(copies):
                memory = staging.ready(number)
                if part.has_all_tokens:
                    bus.copy(targets[copy.number][copy.begin : copy.begin + len(memory)], memory)
                else:
                    found[copy.side.layer][copy.side.side] = _rows(file, copy.side, memory, part, bus)
                staging.copied(number)
        states = {number: _states(file, number, part, bus) for number in places}
    _check(file, list(zip(groups, targets, strict=False)), made, ruled, chunked)
    for place, side in made:
        found[place.layer][place.side] = side
    layers = {}
    for number, sides in found.items():
        skipped = header.starts[number] - header.start if part.has_all_tokens else 0
        layers[number] = Layer(sides.get("k"), sides.get("v"), skipped=skipped, states=MappingProxyType(states[number]))
    return layers


def _made(file: File, groups: Sequence[_Group], targets: Sequence[torch.Tensor]) -> list[tuple[SidePlaces, Side]]:
    """The sides of ``groups``, each of which has its memory on the device."""
    made: list[tuple[SidePlaces, Side]] = []
    for group, memory in zip(groups, targets, strict=False):
        views: dict[str, torch.Tensor] = {}
        made += [(side, _side(file, side, memory, start, views)) for side, start in group.sides]
    return made


def _check(
    file: File,
    groups: Sequence[tuple[_Group, torch.Tensor]],
    made: Sequence[tuple[SidePlaces, Side]],
    ruled: AbstractSet[int],
    chunked: AbstractSet[int],
) -> None:
    """Check the sides of ``groups``, each with its memory on the device, which checks them; the host waits for it.

    What is launched for the codecs' rules is found while it looks for digests. Raises DigestMismatch and InvalidPayload.
    """
    hashed = [
        (f"{side.layer}.{side.side}.{stream}", (memory, start + begin, start + end))
        for group, memory in groups
        if group.span
        for side, start in group.sides
        for stream, (begin, end) in side.streams.items()
    ]
    digests = dispatch.digests([place for _, place in hashed])
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


class _Staging:
    """The bytes of copies in staging memory, which is used again once what the caller has begun to copy is copied.

    The first copies are of bytes that ``ahead`` reads. Rules of the codecs numbered ``ruled``, and chunks of those numbered ``chunked``,
    are not checked, nor digests that the device checks.
    """

    def __init__(
        self,
        copies: Sequence[_Copy],
        file: File,
        bus: Bus,
        staging_bytes: int,
        ruled: AbstractSet[int],
        chunked: AbstractSet[int],
        ahead: ReadAhead | None,
    ) -> None:
        self._copies, self._file, self._bus, self._ahead = copies, file, bus, ahead
        self._ruled, self._chunked = ruled, chunked
        self._early = 0
        while ahead and self._early < len(copies) and copies[self._early].end_in_file <= ahead.nbytes:
            self._early += 1
        rest = copies[self._early :]
        self._parts = [[] if number < self._early else copy.reads() for number, copy in enumerate(copies)]
        self._largest = max((copy.end - copy.begin for copy in rest), default=0)
        threads = min(usable_cores(), _THREADS)
        # Reads that have memory, and the most copies that they are part of. One more is complete and being copied.
        owners = [number for number, own in enumerate(self._parts) for _ in own]
        with_memory = min(threads + _WAITING, len(owners))
        spread = 1 + max(map(sub, owners[max(0, with_memory - 1) :], owners), default=0)
        self._slots = 1 + min(spread, max(1, staging_bytes // max(1, self._largest) - 1))
        needed = self._slots * self._largest
        self._shares = bool(ahead and ahead.memory is not None and self._early and ahead.nbytes >= needed)
        shared = ahead.memory if ahead and self._shares else None
        self._memory = bus.staging(needed) if shared is None else shared
        # As a buffer, too, before threads read: each operation of torch's lets them go first.
        self._data = self._memory.numpy().data
        after = [self._after(number) for number in range(len(copies))]
        self._reads = StagedReads(self._read, [len(own) for own in self._parts], after, bus.wait, threads)

    def ready(self, number: int) -> torch.Tensor:
        """The bytes of copy ``number``, once they are read; copies are asked for in order. Raises what reading raises."""
        copy = self._copies[number]
        self._reads.ready(number)
        if number >= self._early:
            start = self._place(number)
            return self._memory[start : start + copy.end - copy.begin]
        ahead, span = self._ahead, copy.span
        assert ahead is not None
        assert ahead.memory is not None
        assert span is not None
        end = int(copy.end_in_file)
        with self._file.located():
            ahead.ready(end)
        memory = ahead.memory[span.begin + copy.begin : end]
        self._file.check_pads(span, copy.begin, copy.end, memory.numpy().data)
        return memory

    def copied(self, number: int) -> None:
        """Note that the caller has begun to copy what it was given for copy ``number``."""
        self._reads.copied(number, self._bus.mark())

    def close(self) -> None:
        """Wait for the reads under way."""
        self._reads.close()

    def _place(self, number: int) -> int:
        return (number - self._early) % self._slots * self._largest

    def _after(self, number: int) -> int | None:
        """The copy of what is in the memory of copy ``number`` before it."""
        if number >= self._early + self._slots:
            return number - self._slots
        if number < self._early or not self._shares:
            return None
        end = self._place(number) + self._largest
        return max((other for other in range(self._early) if self._copies[other].begin_in_file < end), default=None)

    def _read(self, number: int, part: int) -> None:
        copy, (first, last) = self._copies[number], self._parts[number][part]
        start = self._place(number) - copy.begin
        data = self._data[start + first : start + last]
        if copy.span:
            self._file.read_span_into(copy.span, first, last, data)
        else:
            codec = _entry(self._file, copy.side).codec
            self._file.read_side_into(copy.side, data, check_values=codec not in self._ruled, check_chunks=codec not in self._chunked)


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
