"""PyTorch modes for kvpack's own computations, regardless of the caller's modes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad


def float32_no_grad(device: torch.device) -> AbstractContextManager[None]:
    """Return a context manager for encoding and decoding on ``device`` in true float32, with ordinary tensors and without gradients.

    Autocast would round rotations to bfloat16. Tensors created in inference mode cannot be used later by other threads or by autograd. A
    cache that requires gradients would keep its model's activations alive. The precision of matrix products is a global setting, which
    ``formats.products`` controls.
    """
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(device.type) or flushes_subnormals():
        return _set_modes(device)
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()


def is_traced(*values: Any) -> bool:
    """Return True if autograd, forward-mode differentiation or a transform of ``torch.func`` must see the operations on these tensors."""
    if forward_ad._current_level >= 0 or peek_interpreter_stack() is not None:
        return True
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in values)


def writable(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context manager in which the caller's ``tensor`` can be written to.

    A tensor created in inference mode can be written to only in that mode.
    """
    return torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context manager that disables autocast and the flushing of subnormal numbers to 0.

    Autocast would change float32 products.
    """
    autocast = torch.is_autocast_enabled(device.type)
    if flushes_subnormals():
        return _keep_subnormals(torch.autocast(device.type, enabled=False) if autocast else contextlib.nullcontext())
    if not autocast:
        # Entering autocast takes microseconds even if nothing changes.
        return contextlib.nullcontext()
    off: AbstractContextManager[None] = torch.autocast(device.type, enabled=False)
    return off


def flushes_subnormals() -> bool:
    """Return True if the calling thread flushes subnormal numbers to 0, as after ``torch.set_flush_denormal(True)``.

    Each thread has its own setting, which new threads inherit. PyTorch has no function that returns it.
    """
    return _MIN_NORMAL * 0.5 == 0.0


_MIN_NORMAL = sys.float_info.min


@contextlib.contextmanager
def _keep_subnormals(inner_context: AbstractContextManager[None]) -> Iterator[None]:
    """Return a context manager that keeps subnormal numbers in a thread that otherwise flushes them."""
    torch.set_flush_denormal(False)
    try:
        with inner_context:
            yield
    finally:
        torch.set_flush_denormal(True)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Return a context manager that limits PyTorch, and libraries that use its thread count, to one thread."""
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
