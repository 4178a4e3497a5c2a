"""Load layers of a file to a device: threads read into staging memory, and the bytes are copied and checked from there.

Thus the checked bytes are the ones used, whatever happens to the file meanwhile.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import accumulate, chain
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from kvpack.coding import dispatch
from kvpack.coding.encoding import TORCH_DTYPES
from kvpack.file.container import located
from kvpack.file.header import layout_bytes
from kvpack.file.payload import Span
from kvpack.formats.base import DTYPE_BYTES

from . import staged_reads
from .layer import Layer, sliced
from .staged_reads import STAGING_BYTES, Copy, staged
from .stored import side_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from kvpack.coding.encoding import Progress
    from kvpack.file.container import File, SidePlaces

    from .device_copy import Bus
    from .parts import CachePart
    from .side import Side


@dataclass(frozen=True)
class _Group:
    """Sides, each with its place in one block of memory of ``nbytes`` bytes: those of one layer, or of consecutive layers.

    ``span`` covers them in the file, with the same places, if the device checks them; otherwise the host checks them one by one.
    """

    sides: Sequence[tuple[SidePlaces, int]]
    nbytes: int
    span: Span | None


def load_layers(
    file: File, part: CachePart, bus: Bus, *, staging_bytes: int = STAGING_BYTES, progress: Progress | None = None
) -> dict[int, Layer]:
    """Return the layers of ``part`` by number, on the device of ``bus``; the caller's stream waits for their copies, the host does not.

    Bytes are copied as soon as they are read, while the next ones are read. With all tokens, a layer's streams are views of one buffer, and
    the device checks what its kernels support once everything has arrived: digests, the codec's rules, and errors visible only after full
    decoding. The host waits for these checks; its own checks precede the copy. Raises the errors of ``File.read_side``, the first error in
    file order, followed by those found on the device, digests first; and OutOfBounds as in ``Cache.slice``. ``progress`` counts pieces.
    """
    header = file.header
    places = {number: [file.side_places(number, name) for name, _ in header.layers[number].sides()] for number in part.numbers}
    result: dict[int, dict[str, Side]] = {number: {} for number in places}
    # On the host, threads that check would wait for each other.
    ruled, chunked = (
        {number for number, codec in enumerate(header.codecs) if part.has_all_tokens and checks(codec, bus.device)}
        for checks in (dispatch.supports_value_checks, dispatch.supports_chunk_checks)
    )
    groups = _groups(file, places.values(), ruled, bus.device)
    group_copies = [list(_copies(number, group)) for number, group in enumerate(groups)]
    copies = list(chain.from_iterable(group_copies))
    done = 0

    def tell() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, len(copies))

    with contextlib.closing(bus), contextlib.closing(staged(copies, file, bus, staging_bytes, ruled, chunked)) as arriving:
        # All are allocated before the first copy, which waits for the work under way in the memory that they reuse.
        sizes = [group.nbytes for group in groups] if part.has_all_tokens else []
        targets = [torch.empty(size, dtype=torch.uint8, device=bus.device) for size in sizes]
        bus.follow()
        created: list[tuple[SidePlaces, Side]] = []
        if part.has_all_tokens:
            for group, target, begun in zip(groups, targets, group_copies, strict=True):
                # Entered once for all: that takes longer than to begin a copy.
                with bus.work():
                    for copy in begun:
                        bus.copy(target[copy.begin : copy.end], next(arriving))
                        tell()
                # While they are copied.
                views: dict[str, torch.Tensor] = {}
                created += [(side, _side(file, side, target, start, views)) for side, start in group.sides]
        else:
            for copy in copies:
                result[copy.side.layer][copy.side.side] = _rows(file, copy.side, next(arriving), part, bus)
                tell()
        states = {number: _states(file, number, part, bus) for number in places}
    _check(file, list(zip(groups, targets, strict=False)), created, ruled, chunked)
    for place, side in created:
        result[place.layer][place.side] = side
    layers = {}
    for number, sides in result.items():
        skipped = header.starts[number] - header.start if part.has_all_tokens else 0
        layers[number] = Layer(sides.get("k"), sides.get("v"), skipped=skipped, states=MappingProxyType(states[number]))
    return layers


def _check(
    file: File,
    groups: Sequence[tuple[_Group, torch.Tensor]],
    sides: Sequence[tuple[SidePlaces, Side]],
    ruled: AbstractSet[int],
    chunked: AbstractSet[int],
) -> None:
    """Check ``sides``, which are in the memory of ``groups``, on the device, and wait for the result.

    Raises DigestMismatch and InvalidPayload.
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
        (entry.codec, streams, entry.runs, f"{place.layer}.{place.side}")
        for place, side in sides
        for entry in [file.side(place.layer, place.side)]
        for streams in side.stored_streams()
    ]
    codecs = file.header.codecs
    ruled_sides = [(codecs[codec], streams, runs, where) for codec, streams, runs, where in stored if codec in ruled]
    check_values = dispatch.check_values(ruled_sides)
    file.check_digests((name, digest) for (name, _), digest in zip(hashed, digests(), strict=True))
    with located(file.where):
        check_values()
        for codec, streams, _, where in stored:
            if codec in chunked:
                dispatch.check_chunks(codecs[codec], streams, where)


def _groups(file: File, layers: Iterable[Sequence[SidePlaces]], ruled: AbstractSet[int], device: torch.device) -> list[_Group]:
    """Group the sides of ``layers``, in order: consecutive sides that the device checks are combined, up to the size of a copy."""
    groups: list[_Group] = []
    for sides in layers:
        starts = list(accumulate((side.nbytes for side in sides), initial=0))
        group = _Group(list(zip(sides, starts, strict=False)), starts[-1], _span(file, sides, ruled, device))
        last = groups[-1] if groups else group
        if group.span and groups and last.span and last.span.begin + last.nbytes == group.span.begin:
            nbytes = last.nbytes + group.nbytes
            if nbytes <= staged_reads.COPY_BYTES:
                joined = Span(last.span.begin, group.span.end, (*last.span.pads, *group.span.pads))
                groups[-1] = _Group([*last.sides, *((side, last.nbytes + start) for side, start in group.sides)], nbytes, joined)
                continue
        groups.append(group)
    return groups


def _span(file: File, sides: Sequence[SidePlaces], ruled: AbstractSet[int], device: torch.device) -> Span | None:
    """Return the bytes of a layer's ``sides`` if the device checks all of them; the rules apply only to bytes whose digests match."""
    if not sides or any(file.side(side.layer, side.side).codec not in ruled for side in sides):
        return None
    stored = any(side.nbytes for side in sides)
    return file.span(sides) if stored and dispatch.supports_digests(device) else None


def _copies(number: int, group: _Group) -> Iterator[Copy]:
    """Yield the copies of a group."""
    if group.span is None:
        for side, start in group.sides:
            yield Copy(number, start, start + side.nbytes, None, side)
    else:
        # Of nearly one size, in whole pieces.
        step = -(-group.nbytes // -(-group.nbytes // staged_reads.COPY_BYTES) // staged_reads.PIECE_BYTES) * staged_reads.PIECE_BYTES
        for begin in range(0, group.nbytes, step):
            yield Copy(number, begin, min(begin + step, group.nbytes), group.span, group.sides[0][0])


def _side(file: File, places: SidePlaces, memory: torch.Tensor, start: int, views: dict[str, torch.Tensor]) -> Side:
    """Return the side whose tensors begin at ``start`` in ``memory``, uint8, at ``places``; ``views`` caches views of it by dtype."""
    entry = file.side(places.layer, places.side)
    tensors: dict[str, torch.Tensor] = {}
    for name, layout in file.header.streams[entry].items():
        if layout.dtype not in views:
            views[layout.dtype] = memory.view(TORCH_DTYPES[layout.dtype])
        view, begin = views[layout.dtype], (start + places.streams[name][0]) // DTYPE_BYTES[layout.dtype]
        tensors[name] = view.as_strided(layout.shape, layout.strides, view.storage_offset() + begin)
    return side_of(file.header, places.layer, places.side, entry, tensors, memory.device)


def _states(file: File, number: int, part: CachePart, bus: Bus) -> dict[str, torch.Tensor]:
    """Return the states of layer ``number`` on the device. Raises OutOfBounds for a part that ends before the file does."""
    result = {}
    for state in file.header.states_of(number):
        memory = torch.empty(layout_bytes(state.layout), dtype=torch.uint8, device="cpu")
        file.read_state_into(state, memory.numpy().data)
        result[state.name] = memory.view(TORCH_DTYPES[state.dtype]).view(state.shape).to(bus.device)
    if not result:
        return {}
    held = Layer(None, None, states=MappingProxyType(result))
    return dict(sliced(held, number, (part.start, part.stop), file.header.start, part.tokens).states)


def _rows(file: File, places: SidePlaces, memory: torch.Tensor, part: CachePart, bus: Bus) -> Side:
    """Copy the tokens of ``part`` of the side in ``memory`` to the device. Raises OutOfBounds."""
    skipped = file.header.starts[places.layer] - file.header.start
    layer = Layer(_side(file, places, memory, 0, {}), None, skipped=skipped)
    side = sliced(layer, places.layer, (part.start, part.stop), file.header.start, part.tokens).k
    assert side is not None
    return side.moved(lambda tensor: _copied(tensor, bus))


def _copied(tensor: torch.Tensor, bus: Bus) -> torch.Tensor:
    """Copy ``tensor``, of rows ``[batch, kv_head, row, ...]`` in staging memory, to the device, with at most one copy per head."""
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=bus.device)
    bus.follow()
    with bus.work():
        if tensor.is_contiguous():
            bus.copy(target, tensor)
        else:
            for to, rows in zip(target.flatten(0, 1), tensor.flatten(0, 1), strict=True):
                bus.copy(to, rows)
    return target
