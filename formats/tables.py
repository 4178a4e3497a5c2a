"""Tables that decoders look things up in, computed once and kept on each device that asked."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from .lazy import torch

if TYPE_CHECKING:
    from collections.abc import Callable

TABLES_KEPT = 64
"""Small tables and packings of each kind: they come from file headers, so their number has a bound."""
KEPT_BYTES = 1 << 24
"""Bytes of all the tensors that are kept: a header may ask for one of megabytes, and the next for another."""

_kept: OrderedDict[tuple[Any, ...], torch.Tensor] = OrderedDict()
_bytes = 0
_lock = threading.Lock()


def kept_on_device(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Keep what ``compute`` returns for its arguments; the result takes the ``device`` as its last argument.

    Of all tables those used last are kept, in at most ``KEPT_BYTES``.
    """

    def table(*arguments: Any) -> torch.Tensor:
        device = str(arguments[-1])
        key = (compute, device, *arguments[:-1])
        with _lock:
            found = _kept.get(key)
            if found is not None:
                _kept.move_to_end(key)
                return found
        # A tensor made in inference mode could never meet autograd afterwards; the caller's default device may be another.
        with torch.inference_mode(False), torch.device("cpu"):
            made = compute(*arguments[:-1]).to(device)
        _keep(key, made)
        return made

    return table


def _keep(key: tuple[Any, ...], made: torch.Tensor) -> None:
    global _bytes
    with _lock:
        if key not in _kept:
            _kept[key] = made
            _bytes += made.nbytes
        while _bytes > KEPT_BYTES:
            _bytes -= _kept.popitem(last=False)[1].nbytes


def _renew_lock() -> None:
    """Another thread of the parent may hold the lock at the fork, and is not there to release it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
