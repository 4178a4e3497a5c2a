"""Work over blocks of tokens, on every core.

torch splits one operation over its threads and waits for all of them before the next: with many short operations the
waiting costs more than the second thread brings, and far more when the machine has other work. So each thread gets
blocks of its own here, and torch runs one thread in each.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from .modes import own_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Block = tuple[int, int]

_CACHES_OF_A_DEVICE = 32


def caches_of(device: torch.device) -> int:
    """How many times as large a block is on ``device`` as on the CPU, where it fits a core's cache.

    Elsewhere a call is dear, and a block of a core's size keeps few of a device's at work.
    """
    return 1 if device.type == "cpu" else _CACHES_OF_A_DEVICE


def for_each_block(work: Callable[[int, int], None], blocks: Sequence[Block], device: torch.device) -> None:
    """Call ``work(start, stop)`` for every block, on the CPU in as many threads as torch has; the first error is raised.

    The caller is in ``own_modes``, and so are the threads here: modes belong to a thread.
    """
    threads = torch.get_num_threads()
    if len(blocks) < 2 or device.type != "cpu" or threads < 2:
        for start, stop in blocks:
            work(start, stop)
        return

    def work_on(block: Block) -> None:
        with own_modes(device):
            work(*block)

    workers = min(threads, len(blocks))
    all_started = threading.Barrier(workers + 1)

    def start_worker() -> None:
        # A thread that has asked once keeps its number, whatever others set.
        torch.get_num_threads()
        torch.set_num_threads(1)
        all_started.wait()

    with ThreadPoolExecutor(workers, initializer=start_worker) as pool:
        try:
            # No worker is idle before all have started, so the pool starts them all here.
            results = pool.map(work_on, blocks)
            all_started.wait()
        except BaseException:
            all_started.abort()
            raise
        finally:
            # And one that asks for the first time takes what any thread has set last.
            torch.set_num_threads(threads)
        for _ in results:
            pass
