"""Caches of the lookup tables that codecs compute, per device."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from .lazy import torch

MAX_CACHED_TABLES = 64
"""Maximum number of cached small tables and packings of each kind. File headers determine which are needed, so a bound is required."""

_MAX_ENTRIES = 1024
"""Maximum number of entries of ``BoundedCache``."""
MAX_CACHED_BYTES = 1 << 24
"""Maximum number of bytes of all cached tensors. Each file header may need another table of several megabytes."""

_cached: OrderedDict[tuple[Any, ...], torch.Tensor] = OrderedDict()
_cached_bytes = 0
_lock = threading.Lock()


def cache_per_device(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Cache the tensors that ``compute`` returns, by argument and device.

    The returned function has ``device`` as an additional last argument. Up to ``MAX_CACHED_BYTES`` of tables are kept; the least recently
    used ones are dropped first.
    """

    def table(*arguments: Any) -> torch.Tensor:
        device = str(arguments[-1])
        key = (compute, device, *arguments[:-1])
        with _lock:
            cached = _cached.get(key)
            if cached is not None:
                _cached.move_to_end(key)
                return cached
        # A tensor made in inference mode could not be used with autograd later; the caller's default device may be another.
        with torch.inference_mode(False), torch.device("cpu"):
            computed = compute(*arguments[:-1]).to(device)
        _store(key, computed)
        return computed

    return table


def _store(key: tuple[Any, ...], tensor: torch.Tensor) -> None:
    global _cached_bytes
    with _lock:
        if key not in _cached:
            _cached[key] = tensor
            _cached_bytes += tensor.nbytes
        while _cached_bytes > MAX_CACHED_BYTES:
            _cached_bytes -= _cached.popitem(last=False)[1].nbytes


def _replace_lock() -> None:
    """Replace the lock in a forked child, because a thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_replace_lock)


class BoundedCache(dict[Any, Any]):
    """A dictionary of derived values that empties itself before it exceeds ``_MAX_ENTRIES`` entries."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= _MAX_ENTRIES:
            self.clear()
        super().__setitem__(key, value)
