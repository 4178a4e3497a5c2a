"""Check settings of the host process that an adapter must not change.

They are threads, random states, dtype, device, modes, and CUDA streams.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


def settings() -> tuple[Any, ...]:
    """Return the settings of this thread and process that adapters must not change."""
    streams = [torch.cuda.current_stream()] if torch.cuda.is_available() else []
    generators = torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy.random.get_state()[1].tobytes()
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    threads = torch.get_num_threads(), torch.get_num_interop_threads()
    return *generators, *modes, *threads, torch.get_default_dtype(), torch.get_default_device(), *streams


@contextmanager
def vllm_like_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set up this process like a vLLM worker.

    It has a 16-bit default dtype and inference mode, and raises an error if a call sets the number of threads.
    """

    def forbidden(*_: object) -> None:
        raise AssertionError("the adapter changed the host's number of threads")

    dtype = torch.get_default_dtype()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "set_num_threads", forbidden)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
                yield
        finally:
            torch.set_default_dtype(dtype)


class Watched:
    """A wrapper of an adapter that checks after every call, even a failing one, that ``settings`` are unchanged."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return self.call(name, found) if callable(found) else found

    def call(self, name: str, function: Any) -> Any:
        """Return ``function`` wrapped in a check that it leaves ``settings`` unchanged."""

        def run(*arguments: Any, **options: Any) -> Any:
            self.called.add(name)
            before = settings()
            try:
                return function(*arguments, **options)
            finally:
                assert settings() == before, name

        return run
