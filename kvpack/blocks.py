"""Work over blocks of tokens, on every core.

torch splits one operation over its threads and waits for all of them before the next: with many short operations the
waiting costs more than the second thread brings, and far more when the machine has other work. So each thread gets
blocks of its own here, and torch runs one thread in each.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Block = tuple[int, int]

_lock = threading.Lock()
_users = 0
_threads = 1


def for_each_block(work: Callable[[int, int], None], blocks: Sequence[Block], device: torch.device) -> None:
    """Call ``work(start, stop)`` for every block, on the CPU in as many threads as torch has; the first error is raised."""
    if len(blocks) < 2 or device.type != "cpu" or torch.get_num_threads() < 2:
        for start, stop in blocks:
            work(start, stop)
        return
    with _one_thread_each() as threads, ThreadPoolExecutor(min(threads, len(blocks))) as pool:
        for _ in pool.map(lambda block: work(*block), blocks):
            pass


@contextlib.contextmanager
def _one_thread_each() -> Iterator[int]:
    """While any user is inside, torch starts no threads of its own; gives the number it had."""
    global _users, _threads
    with _lock:
        if not _users:
            _threads = torch.get_num_threads()
            torch.set_num_threads(1)
        _users += 1
    try:
        yield _threads
    finally:
        with _lock:
            _users -= 1
            if not _users:
                torch.set_num_threads(_threads)
