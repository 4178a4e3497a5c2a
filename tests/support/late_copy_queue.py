"""A copy queue without a device, which makes each copy as late as a device could."""

from __future__ import annotations

import threading
from typing import Any

import torch

from kvpack.cache.device_copy import HostCopyQueue

PATTERN = 0xA5


class LateCopyQueue(HostCopyQueue):
    """Makes copies at the last possible moment: when the host or the caller waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made = 0
        self.begun = 0
        self.closed = False
        self._lock = threading.Lock()

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), PATTERN, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._waiting.append((target, source))
        self.begun += 1

    def mark(self) -> Any:
        return self.begun

    def wait(self, mark: Any) -> None:
        with self._lock:
            while self._made < mark:
                target, source = self._waiting.pop(0)
                target.copy_(source)
                self._made += 1

    def close(self) -> None:
        self.wait(self.begun)
        self.closed = True
