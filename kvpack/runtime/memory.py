"""Memory for large results on the CPU: separate allocations, in huge pages if the system has them.

Writing new memory spends most of its time on page faults: 0.4 to 0.7 ms per MiB with small pages, 0.1 with large ones. The heap has large
pages only inside a single result, and then keeps them for the host's next allocations. Memory of a freed pack is reused by the next one,
unless the system has reclaimed its pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MANY_BYTES = 1 << 22
"""Results of at least this size get their own memory."""

MIN_HUGE_PAGE_PIECE_BYTES = 1 << 16
"""Smaller results are on the heap."""

LARGE_PAGE = 1 << 21
"""Bytes of a large page on the processors that C kernels run on."""

_PIECE_BYTES = 1 << 26
_ALIGNMENT = 64


_spare: deque[mmap.mmap] = deque(maxlen=1)
"""Memory of _PIECE_BYTES that no result uses any more."""


class _Piece:
    """A block of memory from which results are allocated in order. It is freed with the last of them."""

    def __init__(self, nbytes: int) -> None:
        memory = _kept() if nbytes == _PIECE_BYTES else None
        if memory is None:
            # Private: a forked child writes pages of its own. Pages that no result reaches take no memory.
            memory = mmap.mmap(-1, nbytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
        # Results refer to the lease, and it to the memory.
        self._memory = (ctypes.c_char * len(memory)).from_buffer(memory)
        if nbytes == _PIECE_BYTES:
            weakref.finalize(self._memory, _keep, memory).atexit = False
        self._at = -ctypes.addressof(self._memory) % LARGE_PAGE
        self._end = self._at + nbytes

    def take(self, values: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate the next ``values`` values; None if they do not fit."""
        nbytes = values * dtype.itemsize
        if nbytes > self._end - self._at:
            return None
        result = torch.frombuffer(self._memory, dtype=dtype, count=values, offset=self._at)
        self._at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return result


def _keep(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_FREE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_FREE)
    _spare.append(memory)


def _kept() -> mmap.mmap | None:
    try:
        return _spare.pop()
    except IndexError:
        return None


_pieces: ContextVar[list[_Piece] | None] = ContextVar("kvpack_pieces_of_memory", default=None)


@contextlib.contextmanager
def shared_arena(values: int) -> Iterator[None]:
    """Allocate results side by side that are kept together, if they encode at least ``MANY_BYTES`` of ``values`` 16-bit values."""
    if 2 * values < MANY_BYTES or _pieces.get() is not None:
        yield
        return
    token = _pieces.set([])
    try:
        yield
    finally:
        _pieces.reset(token)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return ``torch.empty(shape, dtype=dtype, device=device)``; a large one on the CPU cannot be resized."""
    values, pieces = torch.Size(shape).numel(), _pieces.get()
    nbytes = values * dtype.itemsize
    if device.type == "cpu" and nbytes >= (MANY_BYTES if pieces is None else MIN_HUGE_PAGE_PIECE_BYTES) and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            found = pieces[-1].take(values, dtype) if pieces else None
            if found is None:
                piece = _Piece(nbytes if pieces is None else max(nbytes, _PIECE_BYTES))
                found = piece.take(values, dtype)
                if pieces is not None:
                    pieces.append(piece)
        except OSError:
            # A limit of address space, or a kernel without large pages.
            found = None
        if found is not None:
            return found.view(torch.Size(shape))
    return torch.empty(shape, dtype=dtype, device=device)
