"""Run work over blocks of tokens on every core.

torch splits one operation over its threads and waits for all of them before the next. With many short operations the
waiting costs more than a second thread saves, and far more on a busy machine. So each thread gets its own blocks here,
and torch uses one thread in each.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from kvpack.runtime.modes import float32_no_grad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Block = tuple[int, int]


_state = threading.local()


@contextlib.contextmanager
def in_this_thread() -> Iterator[None]:
    """Let ``for_each_block`` run in the calling thread, without changing the host's thread settings."""
    before = getattr(_state, "in_this_thread", False)
    _state.in_this_thread = True
    try:
        yield
    finally:
        _state.in_this_thread = before


def for_each_block(work: Callable[[int, int], None], blocks: Sequence[Block], device: torch.device) -> None:
    """Call ``work(start, stop)`` for every block; on the CPU, in as many threads as PyTorch uses. Raises the first error.

    The caller is in ``float32_no_grad``; the threads enter it too, because modes are per thread.
    """
    threads = 1 if getattr(_state, "in_this_thread", False) else torch.get_num_threads()
    if len(blocks) < 2 or device.type != "cpu" or threads < 2:
        for start, stop in blocks:
            work(start, stop)
        return

    def work_on(block: Block) -> None:
        with float32_no_grad(device):
            work(*block)

    workers = min(threads, len(blocks))
    all_started = threading.Barrier(workers + 1)

    def start_worker() -> None:
        # A thread that has asked once keeps its number of threads, whatever other threads set.
        torch.get_num_threads()
        torch.set_num_threads(1)
        all_started.wait()

    with ThreadPoolExecutor(workers, initializer=start_worker) as pool:
        try:
            # No worker is idle before all have started, so the pool starts all of them here.
            results = pool.map(work_on, blocks)
            all_started.wait()
        except BaseException:
            all_started.abort()
            raise
        finally:
            # A thread that asks for the first time takes the number that any thread set last.
            torch.set_num_threads(threads)
        for _ in results:
            pass
