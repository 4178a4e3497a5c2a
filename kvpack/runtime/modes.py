"""The torch modes in which kvpack computes, whatever modes its caller has set."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


def float32_no_grad(device: torch.device) -> AbstractContextManager[None]:
    """Encode and decode on ``device`` in true float32, on ordinary tensors without gradients.

    Autocast would round the rotation to bfloat16. Tensors made in inference mode cannot be used by other threads or by autograd later. A
    cache with gradients would keep alive everything that its model computed. Products of reduced precision are left to
    ``formats.products``, because their setting is global.
    """
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(device.type) or flushes_subnormals():
        return _set_modes(device)
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()


def writing(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context in which ``tensor``, which belongs to someone else, can be written.

    Tensors made in inference mode can only be written in that mode.
    """
    return torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Compute float32 products in float32, and keep subnormal numbers."""
    autocast = torch.is_autocast_enabled(device.type)
    if flushes_subnormals():
        return _keeping_subnormals(torch.autocast(device.type, enabled=False) if autocast else contextlib.nullcontext())
    if not autocast:
        # Autocast takes some microseconds to be set to what it is.
        return contextlib.nullcontext()
    off: AbstractContextManager[None] = torch.autocast(device.type, enabled=False)
    return off


def flushes_subnormals() -> bool:
    """Return True if the calling thread replaces subnormal numbers by 0, as after ``torch.set_flush_denormal(True)``.

    The setting is of each thread, and of the threads that it starts. PyTorch has no function that returns it.
    """
    return _SMALLEST_NORMAL * 0.5 == 0.0


_SMALLEST_NORMAL = sys.float_info.min


@contextlib.contextmanager
def _keeping_subnormals(inside: AbstractContextManager[None]) -> Iterator[None]:
    """Keep subnormal numbers in the block, in a thread that flushes them."""
    torch.set_flush_denormal(False)
    try:
        with inside:
            yield
    finally:
        torch.set_flush_denormal(True)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limit PyTorch, and libraries that use its thread count, to one thread in the block; restore the count afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _set_modes(device: torch.device) -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), without_autocast(device):
        yield
