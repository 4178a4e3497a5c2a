"""Copies between pinned host memory and a CUDA device on a separate stream (``CopyQueue``), or within host memory (``HostCopyQueue``).

Copies run while the host reads, checks or writes other data. All loads and saves of a device share one copy stream. The "caller's stream"
is the stream that is current when the queue is created. Device memory allocated outside ``work`` belongs to the caller's stream, which may
still be using it. Call ``wait_for_caller`` before a copy to newly allocated memory, and ``close`` before memory is freed.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch


class CopyQueue:
    """An ordered queue of copies between pinned host memory and a CUDA device. A mark is a point in the queue.

    Staging memory comes from PyTorch's caching allocator for pinned memory, which reuses a block only after all copies from or to it are
    done.
    """

    def __init__(self, device: torch.device) -> None:
        number = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", number)
        self._caller = torch.cuda.current_stream(self.device)
        self._stream: Any = _copy_stream(number)
        self.wait_for_caller()

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        """Allocate uninitialized host memory, uint8 ``[nbytes]``, as the source or target of copies."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start copying ``source`` to ``target``, which has the same shape and dtype. One of the two must be staging memory.

        Call this only within ``work``.
        """
        target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        """Return a mark at the current end of the queue, to pass to ``wait``."""
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Block until all copies before ``mark`` are done. Any thread may call this method."""
        mark.synchronize()

    def wait_for_caller(self) -> None:
        """Make later copies wait for all work already queued on the caller's stream."""
        self._stream.wait_stream(self._caller)

    def work(self) -> AbstractContextManager[Any]:
        """Return a context manager in which new device work is queued in order with the copies."""
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return stream

    def close(self) -> None:
        """Make the caller's stream wait for all copies, so that it can reuse their memory."""
        self._caller.wait_stream(self._stream)


@cache
def _copy_stream(device_index: int) -> Any:
    """Return the stream for copies to and from a device. It is always the same one, because PyTorch reuses freed memory only on the same
    stream.
    """
    return torch.cuda.Stream(device_index)  # type: ignore[no-untyped-call]


class HostCopyQueue:
    """A queue that copies synchronously within host memory, for tests and for machines without a CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        return

    def wait_for_caller(self) -> None:
        return

    def work(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def close(self) -> None:
        return


Bus = CopyQueue | HostCopyQueue
