"""Reading of a file into staging memory, ahead of the consumer that copies the bytes to a device."""

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

    from kvpack.file.container import File, SideOffsets
    from kvpack.file.payload import Span

    from .device_copy import Bus

STAGING_BYTES = 1 << 29
"""Maximum staging memory of one load in bytes, unless two copies need more."""
COPY_BYTES = 1 << 23
"""Maximum size of a copy in bytes. Small layers are copied together. Keys or values that the host checks as a whole may be larger."""
PIECE_BYTES = 1 << 20
"""Maximum number of bytes in one read of a C thread. Threads share the reads of a copy, so that it can start soon."""
READ_BYTES = 1 << 22
"""Maximum number of bytes in one read of a Python thread. It is larger than in C, because each read needs the interpreter."""
_MAX_STAGED_COPIES = 5
"""Maximum number of copies that have staging memory if C threads read, so that the memory fits in the processor's cache."""
_MAX_UNFINISHED_COPIES = 2
"""Maximum number of copies that may be unfinished while the next one is read."""
_MAX_READERS = 14
"""Maximum number of threads that only read."""
_MIN_DIRECT_READERS = 8
"""Minimum number of threads for reads that bypass the page cache, because a disk is fastest with many requests."""
_MAX_CHECKERS = 16
"""Maximum number of threads that also check the bytes that they read."""
_MAX_WAITING_READS = 2
"""Maximum number of reads that have memory but no Python thread yet."""


@dataclass(frozen=True)
class StagedCopy:
    """A copy of bytes ``[begin, end)`` of the group with index ``number``.

    ``span`` is the group's byte range in the file. It is None if the host checks the bytes, which are then the keys or values ``side``.
    """

    number: int
    begin: int
    end: int
    span: Span | None
    side: SideOffsets

    def reads(self, nbytes: int) -> list[tuple[int, int]]:
        """Split the copy into reads of at most ``nbytes`` bytes, and return their byte ranges in the group."""
        if self.span is None:
            return [(self.begin, self.end)]
        end = min(self.end, self.span.end - self.span.begin)
        return [(first, min(first + nbytes, end)) for first in range(self.begin, end, nbytes)]


def staged(
    copies: Sequence[StagedCopy], file: File, bus: Bus, staging_bytes: int, value_codecs: AbstractSet[int], chunk_codecs: AbstractSet[int]
) -> Generator[torch.Tensor, None, None]:
    """Yield the bytes of each copy in staging memory. The memory is reused after the caller's copies from it have finished.

    Checks that the device makes are skipped: digests of spans, the rules of codecs in ``value_codecs``, and the chunks of codecs in
    ``chunk_codecs``. Codecs are identified by their index in the header.
    """
    if copies and all(copy.span for copy in copies) and file.descriptor is not None and (reader_library := library()) is not None:
        with contextlib.suppress(MemoryError):
            return _read_by_library(reader_library, copies, file, bus, staging_bytes)
    return _read_in_threads(copies, file, bus, staging_bytes, value_codecs, chunk_codecs)


def _read_by_library(
    reader_library: ctypes.CDLL, copies: Sequence[StagedCopy], file: File, bus: Bus, staging_bytes: int
) -> Generator[torch.Tensor, None, None]:
    """Implement ``staged`` with C threads, which can read byte ranges of an open file. Raises MemoryError if no thread can be started.

    If the file is not in the page cache and its file system supports direct I/O, whole blocks bypass the page cache.
    """
    spans = [copy.span for copy in copies if copy.span is not None]
    descriptor, direct = file.descriptor, None
    assert descriptor is not None
    if is_cold(descriptor, min(span.begin for span in spans), max(span.end for span in spans)):
        direct = open_direct(descriptor)
    block = 1 if direct is None else BLOCK
    largest = max(copy.end - copy.begin for copy in copies)
    # Direct reads include the rest of the first and of the last block.
    slot = largest if direct is None else (largest // block + 2) * block
    slots = min(len(copies), max(2, min(_MAX_STAGED_COPIES, staging_bytes // slot)))
    memory = bus.allocate_staging(slots * slot + block - 1)
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
    threads = min(usable_cores(), _MAX_READERS, sum(-(-size // PIECE_BYTES) for _, size, _ in reads))
    if direct is not None:
        # These threads wait for the disk, so they need no cores.
        threads = max(threads, min(_MIN_DIRECT_READERS, len(reads)))
    running = Reader(reader_library, descriptor, reads, memory, PIECE_BYTES, threads, direct)
    running.allow(slots)

    def copied() -> Generator[torch.Tensor, None, None]:
        marks: list[Any] = []
        behind = min(_MAX_UNFINISHED_COPIES, slots - 1)
        with running:
            for number, (place, check) in enumerate(zip(places, checks, strict=True)):
                if number >= behind > 0:
                    bus.wait(marks[number - behind])
                    running.allow(slots + number - behind + 1)
                if not running.wait(number):
                    # Retry through the page cache, which also raises the right error.
                    file.read_span_into(*check)
                file.check_pads(*check)
                yield place
                marks.append(bus.mark())

    return copied()


def _read_in_threads(
    copies: Sequence[StagedCopy], file: File, bus: Bus, staging_bytes: int, value_codecs: AbstractSet[int], chunk_codecs: AbstractSet[int]
) -> Generator[torch.Tensor, None, None]:
    """Implement ``staged`` with Python threads, which can make any copy."""
    if not copies:
        return
    reads = [copy.reads(READ_BYTES) for copy in copies]
    largest = max(1, *(copy.end - copy.begin for copy in copies))
    threads = min(usable_cores(), _MAX_READERS if all(copy.span for copy in copies) else _MAX_CHECKERS)
    # Number of reads that have memory, and of copies to which they belong. One more copy is read and being copied.
    owners = [number for number, ranges in enumerate(reads) for _ in ranges]
    ahead = min(threads + _MAX_WAITING_READS, len(owners))
    copies_ahead, max_copies = 1 + max(map(sub, owners[ahead - 1 :], owners)), max(1, staging_bytes // largest - 1)
    if copies_ahead > max_copies:
        ahead = copies_ahead = max_copies
    threads = min(threads, ahead)
    memory = bus.allocate_staging((copies_ahead + 1) * largest)
    # Create buffers before threads start, because each PyTorch operation would give way to them.
    free = deque((slot, slot.numpy().data, bus.mark()) for slot in torch.split(memory, largest))
    started = deque[tuple[torch.Tensor, memoryview]]()

    def with_memory() -> Iterator[tuple[StagedCopy, int, int, memoryview]]:
        for copy, ranges in zip(copies, reads, strict=True):
            slot, data, copied = free.popleft()
            bus.wait(copied)
            started.append((slot, data))
            for first, last in ranges:
                yield copy, first, last, data[first - copy.begin : last - copy.begin]

    def read(item: tuple[StagedCopy, int, int, memoryview]) -> None:
        copy, first, last, data = item
        if copy.span:
            file.read_span_into(copy.span, first, last, data)
        else:
            codec = file.side(copy.side.layer, copy.side.side).codec
            file.read_side_into(copy.side, data, check_values=codec not in value_codecs, check_chunks=codec not in chunk_codecs)

    with contextlib.closing(in_parallel(read, with_memory(), threads, ahead - threads)) as done:
        for copy, ranges in zip(copies, reads, strict=True):
            for _ in ranges:
                next(done)
            slot, data = started.popleft()
            yield slot[: copy.end - copy.begin]
            # The caller has started to copy from the slot.
            free.append((slot, data, bus.mark()))
