"""Concurrent calls that do not wait for threads to start.

``threading.Thread.start``, which ThreadPoolExecutor uses, waits for the new thread to run, and waits forever if memory runs out first.
Here, the thread that requests a result makes the call itself if no other thread has started it.

Locks are free in a forked child even if a thread of its parent held them.
"""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from queue import SimpleQueue
from typing import Any, Generic, NoReturn, TypeVar

from kvpack.formats.errors import InvalidParameter

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(call: Callable[[Item], Result], items: Iterable[Item], at_once: int, waiting: int = 0) -> Generator[Result, None, None]:
    """Yield ``call(item)`` for each item in order, with up to ``at_once`` concurrent calls.

    Another ``waiting`` items are fetched ahead. If ``waiting`` is 0, idle threads wait until the caller requests another result. Closing
    the iterator waits for running calls and cancels calls that have not started.
    """
    remaining = iter(items)
    jobs = deque(map(_Job, islice(remaining, at_once + waiting)))
    queue: SimpleQueue[_Job | None] = SimpleQueue()
    for job in jobs:
        queue.put(job)
    helpers = _start_threads(call, queue, min(len(jobs), at_once) if len(jobs) > 1 else 0)
    try:
        while jobs:
            job = jobs.popleft()
            job.run(call)
            result = job.result()
            for new in map(_Job, islice(remaining, 1)):
                jobs.append(new)
                queue.put(new)
            yield result
    finally:
        for _ in range(helpers):
            queue.put(None)
        for job in jobs:
            job.cancel()


class StartedCalls(Generic[Item, Result]):
    """Calls ``call(item)`` for each item in up to ``at_once`` threads.

    A thread that waits for the results makes calls that no other thread has started.
    """

    def __init__(self, call: Callable[[Item], Result], items: Iterable[Item], at_once: int) -> None:
        self._jobs = [_Job(item) for item in items]
        self._call: Callable[[Item], Result] | None = call
        queue: SimpleQueue[_Job | None] = SimpleQueue()
        for job in self._jobs:
            queue.put(job)
        # Threads that have not ended yet keep this object alive, but nothing that the calls needed.
        for _ in range(_start_threads(self._call_item, queue, min(len(self._jobs), at_once))):
            queue.put(None)

    def _call_item(self, item: Item) -> Result:
        assert self._call is not None
        return self._call(item)

    def wait(self) -> None:
        """Wait for all calls. Their errors are not raised. Arguments that only the calls need are released."""
        if self._call is not None:
            for job in self._jobs:
                job.run(self._call_item)
            for job in self._jobs:
                job.wait()
            self._call = None

    def results(self) -> list[Result]:
        """Return the results in the order of the items. Raises the error of the first call that failed."""
        self.wait()
        return [job.result() for job in self._jobs]


class _Job:
    """One call. The thread that acquires the lock ``_started`` makes the call, and then releases ``_done``."""

    __slots__ = ("_done", "_error", "_item", "_result", "_started")

    def __init__(self, item: Any) -> None:
        self._item = item
        self._started, self._done = _thread.allocate_lock(), _thread.allocate_lock()
        self._done.acquire()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self, call: Callable[[Any], Any]) -> None:
        if self._started.acquire(blocking=False):
            try:
                self._result = call(self._item)
            except BaseException as error:
                self._error = error
            finally:
                self._done.release()

    def wait(self) -> None:
        with self._done:
            pass

    def result(self) -> Any:
        """Wait for the call and return its result, or raise its error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def cancel(self) -> None:
        """Prevent the call if it has not started. Otherwise, wait for it."""
        if not self._started.acquire(blocking=False):
            self.wait()


def _start_threads(call: Callable[[Any], Any], queue: SimpleQueue[_Job | None], count: int) -> int:
    """Start up to ``count`` threads that run jobs from ``queue``. Returns how many were started."""
    for started in range(count):
        try:
            _thread.start_new_thread(_run_jobs, (call, queue))
        except (RuntimeError, MemoryError):
            return started
    return count


def _run_jobs(call: Callable[[Any], Any], queue: SimpleQueue[_Job | None]) -> None:
    while (job := queue.get()) is not None:
        job.run(call)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _OuterThreads(threading.local):
    threads = 0


outer = _OuterThreads()
"""The calling thread's number of PyTorch threads outside of ``dispatch.serial_operations``, or 0 if it is outside."""


class WorkerThreads:
    """A pool of ``count`` threads named ``name``. Threads start on first use, and a forked child starts its own."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Make a call in one of the threads, or in the calling thread if none can be started. Returns the result's future."""
        future: Future[Result] = Future()
        job = _Job(None)

        def run(_: None) -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        # A forked child needs its own pool, because the parent's threads do not run in it. If two threads create a pool at once, the
        # dropped one has not started any thread.
        pool = self._pools.get(os.getpid())
        pool = pool or self._pools.setdefault(os.getpid(), ThreadPoolExecutor(self._count, thread_name_prefix=self._name))
        try:
            pool.submit(job.run, run)
        except RuntimeError:
            # The pool may make the call once it has a thread, so it must not be made again.
            job.run(run)
        return future

    def close(self) -> None:
        """Wait for running work, and stop the threads. The next call of ``submit`` starts new ones."""
        if (pool := self._pools.pop(os.getpid(), None)) is not None:
            pool.shutdown()


class Lock:
    """A lock like ``threading.Lock``, except that a forked child can always acquire it. Objects that contain one cannot be pickled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _ALL.add(self)

    def __reduce__(self) -> NoReturn:
        raise InvalidParameter("an open store, page codec or file cannot be pickled or copied: open it again in each process")

    @property
    def __enter__(self) -> Callable[[], bool]:
        # A method in Python could acquire the lock and then be interrupted by Ctrl-C, and nothing would release it.
        return self._lock.__enter__

    @property
    def __exit__(self) -> Callable[..., None]:
        return self._lock.__exit__


_ALL: weakref.WeakSet[Lock] = weakref.WeakSet()


def _replace_locks() -> None:
    for lock in _ALL:
        lock._lock = threading.Lock()


os.register_at_fork(after_in_child=_replace_locks)
