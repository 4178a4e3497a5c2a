"""Torch and NumPy, imported at first use. Both import slowly, and reading a header needs neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import numpy
    import torch
    from torch.nn import functional
else:

    class _LazyModule:
        def __init__(self, load: Callable[[], ModuleType]) -> None:
            self._load = load

        def __getattr__(self, attribute: str) -> Any:
            value = getattr(self._load(), attribute)
            setattr(self, attribute, value)
            return value

    def _numpy() -> ModuleType:
        import numpy

        return numpy

    def _torch() -> ModuleType:
        import torch

        return torch

    def _functional() -> ModuleType:
        from torch.nn import functional

        return functional

    numpy, torch, functional = _LazyModule(_numpy), _LazyModule(_torch), _LazyModule(_functional)

__all__ = ["functional", "numpy", "torch"]
