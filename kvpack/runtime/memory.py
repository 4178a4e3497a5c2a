"""Memory for large tensors on the CPU, allocated outside the heap and, if available, in huge pages.

Page faults take most of the time of writing to new memory: 0.4 to 0.7 ms per MiB with small pages, and 0.1 ms with huge pages. The heap
uses huge pages only within a single tensor, and then keeps them for other allocations of the process. The next pack reuses the memory of a
freed pack, unless the system has reclaimed it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch

MIN_OWN_MEMORY_BYTES = 1 << 22
"""Minimum size in bytes of a tensor that is allocated outside the heap."""

MIN_ARENA_BYTES = 1 << 16
"""Minimum size in bytes of a tensor that is allocated in a shared arena. Smaller tensors are on the heap."""

HUGE_PAGE_BYTES = 1 << 21
"""Size of a huge page in bytes on the processors that the C kernels support."""

_PIECE_BYTES = 1 << 26
_ALIGNMENT = 64


_spare: deque[mmap.mmap] = deque(maxlen=1)
"""A block of ``_PIECE_BYTES`` bytes that no tensor uses anymore."""


class _Block:
    """A block of memory from which tensors are allocated in order. It is freed together with the last tensor."""

    def __init__(self, nbytes: int) -> None:
        memory = _take_spare() if nbytes == _PIECE_BYTES else None
        if memory is None:
            # Private, so that a forked child writes to its own pages. Unused pages take no memory.
            memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
        # Results keep this array alive, and the array keeps the memory alive.
        self._memory = (ctypes.c_char * len(memory)).from_buffer(memory)
        if nbytes == _PIECE_BYTES:
            weakref.finalize(self._memory, _keep_spare, memory).atexit = False
        self._at = -ctypes.addressof(self._memory) % HUGE_PAGE_BYTES
        self._end = self._at + nbytes

    def take(self, values: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate a tensor of ``values`` values. Returns None if it does not fit in the block."""
        nbytes = values * dtype.itemsize
        if nbytes > self._end - self._at:
            return None
        result = torch.frombuffer(self._memory, dtype=dtype, count=values, offset=self._at)
        self._at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return result


def _keep_spare(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_FREE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_FREE)
    _spare.append(memory)


def _take_spare() -> mmap.mmap | None:
    try:
        return _spare.pop()
    except IndexError:
        return None


_pieces: ContextVar[list[_Block] | None] = ContextVar("kvpack_pieces_of_memory", default=None)


@contextlib.contextmanager
def shared_arena(values: int) -> Iterator[None]:
    """Return a context manager that allocates tensors next to each other.

    Has no effect if ``values`` 16-bit values take less than ``MIN_OWN_MEMORY_BYTES``.
    """
    if 2 * values < MIN_OWN_MEMORY_BYTES or _pieces.get() is not None:
        yield
        return
    token = _pieces.set([])
    try:
        yield
    finally:
        _pieces.reset(token)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor, as ``torch.empty`` does. A large tensor on the CPU cannot be resized."""
    values, pieces = torch.Size(shape).numel(), _pieces.get()
    nbytes = values * dtype.itemsize
    if device.type == "cpu" and nbytes >= (MIN_OWN_MEMORY_BYTES if pieces is None else MIN_ARENA_BYTES) and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            result = pieces[-1].take(values, dtype) if pieces else None
            if result is None:
                piece = _Block(nbytes if pieces is None else max(nbytes, _PIECE_BYTES))
                result = piece.take(values, dtype)
                if pieces is not None:
                    pieces.append(piece)
        except OSError:
            # Address space is limited, or the kernel has no huge pages.
            result = None
        if result is not None:
            return result.view(torch.Size(shape))
    return torch.empty(shape, dtype=dtype, device=device)
