"""Copies between pinned host memory and a CUDA device, on their own stream (``StreamBus``); ``HostBus`` stands in for a device.

Copies run while the host reads, checks or writes other pieces. All loads and saves of a device share one copy stream. The caller's stream
is the stream that is current when the bus is created. Device memory that is allocated outside ``work`` belongs to the caller's stream,
which may still be using it: call ``follow`` before a copy to new memory, and ``order`` or ``close`` before memory is freed.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Bus(Protocol):
    """Copies that run in order. A mark is a point in that order."""

    device: torch.device

    def staging(self, nbytes: int) -> torch.Tensor:
        """Allocate host memory, uint8 ``[nbytes]``, as source or target of copies. Its content is undefined."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Within ``work``, start to copy ``source`` to ``target``, of the same shape and dtype; one of the two is in staging memory."""
        ...

    def mark(self) -> Any:
        """Return a mark at the end of the copies started so far."""
        ...

    def wait(self, mark: Any) -> None:
        """Make the host wait for the copies before ``mark``. Any thread may call it."""
        ...

    def follow(self) -> None:
        """Make later copies wait for the work of the caller's stream so far."""
        ...

    def order(self, mark: Any) -> None:
        """Make later work of the caller's stream wait for the copies before ``mark``, without blocking the host."""
        ...

    def work(self) -> AbstractContextManager[Any]:
        """Return a context in which device work runs in order with the copies."""
        ...

    def close(self) -> None:
        """Make the caller's stream wait for every copy, so that memory it frees is no longer written or read."""
        ...


class StreamBus:
    """The bus of an existing CUDA device.

    Staging memory comes from torch's caching allocator of pinned memory: the first call allocates it, later calls reuse it, and none is
    reused before the copies from and to it have finished.
    """

    def __init__(self, device: torch.device) -> None:
        number = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", number)
        self._caller = torch.cuda.current_stream(self.device)
        self._stream: Any = _stream_of(number)
        self.follow()

    def staging(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def follow(self) -> None:
        self._stream.wait_stream(self._caller)

    def order(self, mark: Any) -> None:
        self._caller.wait_event(mark)

    def work(self) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return stream

    def close(self) -> None:
        self._caller.wait_stream(self._stream)


@cache
def _stream_of(number: int) -> Any:
    """Return the copy stream of a device. Memory freed on a stream is reused only on that stream."""
    return torch.cuda.Stream(number)  # type: ignore[no-untyped-call]


class HostBus:
    """A bus without a device: it copies within host memory, synchronously."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def staging(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        return

    def follow(self) -> None:
        return

    def order(self, mark: None) -> None:
        return

    def work(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def close(self) -> None:
        return
