"""Threads that are kept from call to call."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor


class OwnThreads:
    """``count`` threads called ``name``, which begin when they are first asked for; a forked child begins its own."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._pools: dict[int, ThreadPoolExecutor] = {}

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Those of this process: of the parent's threads none runs in a child, which would wait for them forever."""
        found = self._pools.get(os.getpid())
        # An executor that two threads make at once, and one keeps, has begun no thread.
        return found or self._pools.setdefault(os.getpid(), ThreadPoolExecutor(self._count, thread_name_prefix=self._name))

    def close(self) -> None:
        """Wait for what they do, and end them; ``pool`` begins others."""
        if (pool := self._pools.pop(os.getpid(), None)) is not None:
            pool.shutdown()
