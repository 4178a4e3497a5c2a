"""Read bytes of a file into staging memory, one copy after another, ahead of their consumer."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from operator import sub
from typing import TYPE_CHECKING, Any

import torch

from kvpack.kernels.cpu.library import library
from kvpack.runtime.mapping import is_cold
from kvpack.runtime.reader import BLOCK, Reader, open_direct
from kvpack.runtime.threads import in_parallel, usable_cores

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Generator, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from kvpack.file.container import File, SidePlaces
    from kvpack.file.payload import Span

    from .device_copy import Bus

STAGING_BYTES = 1 << 29
"""The most staging memory of one load, unless twice its largest copy is more."""
COPY_BYTES = 1 << 23
"""Maximum number of bytes of a copy, except for a side that the host checks; small layers are copied together."""
PIECE_BYTES = 1 << 20
"""Maximum number of bytes of a read by a thread in C: threads read the bytes of one copy together, so that it begins soon."""
READ_BYTES = 1 << 22
"""The same of a Python thread, except for a side that the host checks: each read takes the interpreter a moment."""
_SLOTS = 5
"""Copies that have staging memory at a time where threads in C read: it stays in the processor's cache."""
_BEHIND = 2
"""Copies that are under way, or begun, while the next is waited for."""
_READERS = 14
"""Threads that only read."""
_DIRECT_READERS = 8
"""Minimum number of threads that read past the page cache: so many requests keep a disk busy."""
_CHECKERS = 16
"""Number of threads that also check the bytes they read."""
_WAITING = 2
"""Reads that have memory before a Python thread begins them."""


@dataclass(frozen=True)
class Copy:
    """Bytes ``[begin, end)`` of the memory of group ``number``; ``side`` is set if the host checks them."""

    number: int
    begin: int
    end: int
    span: Span | None
    side: SidePlaces

    def reads(self, nbytes: int) -> list[tuple[int, int]]:
        """Split the bytes into reads for threads, as places in the group's memory, of at most ``nbytes`` bytes each."""
        if self.span is None:
            return [(self.begin, self.end)]
        end = min(self.end, self.span.end - self.span.begin)
        return [(first, min(first + nbytes, end)) for first in range(self.begin, end, nbytes)]


def staged(
    copies: Sequence[Copy], file: File, bus: Bus, staging_bytes: int, ruled: AbstractSet[int], chunked: AbstractSet[int]
) -> Generator[torch.Tensor, None, None]:
    """Yield the bytes of each copy in staging memory, which is reused once the caller's copies of earlier bytes have finished.

    The rules of the codecs numbered ``ruled``, the chunks of those numbered ``chunked``, and digests that the device checks, are left
    unchecked.
    """
    if copies and all(copy.span for copy in copies) and file.descriptor is not None and (compiled := library()) is not None:
        with contextlib.suppress(MemoryError):
            return _read_by_library(compiled, copies, file, bus, staging_bytes)
    return _read_in_threads(copies, file, bus, staging_bytes, ruled, chunked)


def _read_by_library(
    compiled: ctypes.CDLL, copies: Sequence[Copy], file: File, bus: Bus, staging_bytes: int
) -> Generator[torch.Tensor, None, None]:
    """Run ``staged`` for copies with spans of an open file. Raises MemoryError immediately if no thread can be started.

    A file outside the page cache is read directly into whole blocks of the staging memory, if its file system allows that.
    """
    spans = [copy.span for copy in copies if copy.span is not None]
    descriptor, direct = file.descriptor, None
    assert descriptor is not None
    if is_cold(descriptor, min(span.begin for span in spans), max(span.end for span in spans)):
        direct = open_direct(descriptor)
    block = 1 if direct is None else BLOCK
    largest = max(copy.end - copy.begin for copy in copies)
    # With the rest of the first block and of the last.
    slot = largest if direct is None else (largest // block + 2) * block
    slots = min(len(copies), max(2, min(_SLOTS, staging_bytes // slot)))
    memory = bus.staging(slots * slot + block - 1)
    memory = memory[-memory.data_ptr() % block :]
    data = memory.numpy().data
    checks, reads, places = [], [], []
    for number, (copy, span) in enumerate(zip(copies, spans, strict=True)):
        size = min(copy.end, span.end - span.begin) - copy.begin
        lead = (span.begin + copy.begin) % block
        begin = number % slots * slot + lead
        checks.append((span, copy.begin, copy.begin + size, data[begin : begin + size]))
        reads.append((span.begin + copy.begin - lead, size + lead, memory.data_ptr() + begin - lead))
        places.append(memory[begin : begin + copy.end - copy.begin])
    threads = min(usable_cores(), _READERS, sum(-(-size // PIECE_BYTES) for _, size, _ in reads))
    if direct is not None:
        # They wait for the disk, and not for a core.
        threads = max(threads, min(_DIRECT_READERS, len(reads)))
    running = Reader(compiled, descriptor, reads, memory, PIECE_BYTES, threads, direct)
    running.allow(slots)

    def copied() -> Generator[torch.Tensor, None, None]:
        marks: list[Any] = []
        behind = min(_BEHIND, slots - 1)
        with running:
            for number, (place, check) in enumerate(zip(places, checks, strict=True)):
                if number >= behind > 0:
                    bus.wait(marks[number - behind])
                    running.allow(slots + number - behind + 1)
                if not running.wait(number):
                    # Once more, through the page cache, and for the error's own words.
                    file.read_span_into(*check)
                file.check_pads(*check)
                yield place
                marks.append(bus.mark())

    return copied()


def _read_in_threads(
    copies: Sequence[Copy], file: File, bus: Bus, staging_bytes: int, ruled: AbstractSet[int], chunked: AbstractSet[int]
) -> Generator[torch.Tensor, None, None]:
    """Run ``staged`` for any copies in Python threads."""
    if not copies:
        return
    reads = [copy.reads(READ_BYTES) for copy in copies]
    largest = max(1, *(copy.end - copy.begin for copy in copies))
    threads = min(usable_cores(), _READERS if all(copy.span for copy in copies) else _CHECKERS)
    # Reads that have memory, and the most copies that they are part of. One more is complete and being copied.
    owners = [number for number, ranges in enumerate(reads) for _ in ranges]
    ahead = min(threads + _WAITING, len(owners))
    spread, most = 1 + max(map(sub, owners[ahead - 1 :], owners)), max(1, staging_bytes // largest - 1)
    if spread > most:
        ahead = spread = most
    threads = min(threads, ahead)
    memory = bus.staging((spread + 1) * largest)
    # As buffers, too, before threads read: each operation of torch's lets them go first.
    free = deque((slot, slot.numpy().data, bus.mark()) for slot in torch.split(memory, largest))
    begun = deque[tuple[torch.Tensor, memoryview]]()

    def with_memory() -> Iterator[tuple[Copy, int, int, memoryview]]:
        for copy, ranges in zip(copies, reads, strict=True):
            slot, data, copied = free.popleft()
            bus.wait(copied)
            begun.append((slot, data))
            for first, last in ranges:
                yield copy, first, last, data[first - copy.begin : last - copy.begin]

    def read(item: tuple[Copy, int, int, memoryview]) -> None:
        copy, first, last, data = item
        if copy.span:
            file.read_span_into(copy.span, first, last, data)
        else:
            codec = file.side(copy.side.layer, copy.side.side).codec
            file.read_side_into(copy.side, data, check_values=codec not in ruled, check_chunks=codec not in chunked)

    with contextlib.closing(in_parallel(read, with_memory(), threads, ahead - threads)) as done:
        for copy, ranges in zip(copies, reads, strict=True):
            for _ in ranges:
                next(done)
            slot, data = begun.popleft()
            yield slot[: copy.end - copy.begin]
            # The caller has begun to copy it.
            free.append((slot, data, bus.mark()))
