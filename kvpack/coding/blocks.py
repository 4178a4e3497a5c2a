"""Parallel processing of blocks of tokens on all cores.

PyTorch splits each operation over its threads, and waits for all of them before the next operation. With many short operations, the waiting
costs more than a second thread saves, especially on a busy machine. Here, each thread processes whole blocks, with PyTorch limited to one
thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from kvpack.runtime.modes import float32_no_grad
from kvpack.runtime.threads import outer

Block = tuple[int, int]


_state = threading.local()


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Return a context manager that makes ``for_each_block`` run in the calling thread. PyTorch's thread settings do not change."""
    before = getattr(_state, "single_threaded", False)
    _state.single_threaded = True
    try:
        yield
    finally:
        _state.single_threaded = before


def for_each_block(work: Callable[[int, int], None], blocks: Sequence[Block], device: torch.device) -> None:
    """Call ``work(start, stop)`` for each block. On the CPU, as many threads as PyTorch uses process the blocks.

    The caller must be in ``float32_no_grad``, which each thread also enters. Raises the first error.
    """
    before = torch.get_num_threads()
    threads = 1 if getattr(_state, "single_threaded", False) else outer.threads or before
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
        # After its first get_num_threads, a thread's setting no longer follows what other threads set.
        torch.get_num_threads()
        torch.set_num_threads(1)
        all_started.wait()

    with ThreadPoolExecutor(workers, initializer=start_worker) as pool:
        try:
            # Each worker waits until all have started, so the pool has to start every one of them.
            results = pool.map(work_on, blocks)
            all_started.wait()
        except BaseException:
            all_started.abort()
            raise
        finally:
            # A thread's first get_num_threads returns the number that any thread set last.
            torch.set_num_threads(before)
        for _ in results:
            pass
