"""Tests of concurrent calls: results are in order, the limit on calls holds, and the caller makes them if no thread starts."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from typing import Any

import pytest

from kvpack.runtime import threads
from kvpack.runtime.threads import Lock, StartedCalls, WorkerThreads, in_parallel


def test_results_are_in_order_and_calls_are_concurrent() -> None:
    together = threading.Barrier(4)
    assert list(in_parallel(lambda n: together.wait(60) * 0 + n, range(12), 4)) == list(range(12))
    assert list(in_parallel(str, [], 4)) == []
    assert list(in_parallel(str, [1], 4)) == ["1"]


def test_no_more_calls_start_than_requested() -> None:
    begun: list[int] = []
    calls = in_parallel(lambda n: begun.append(n) or n, range(100), 3)
    assert [next(calls), next(calls)] == [0, 1]
    calls.close()
    assert set(begun) <= set(range(5))
    seen = len(begun)
    time.sleep(0.01)
    assert len(begun) == seen, "calls were still running after closing"


def test_exceptions_are_raised_in_order() -> None:
    calls = in_parallel(lambda n: 1 // (3 - n), range(6), 4)
    assert [next(calls) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(calls)


def _none(*_: Any) -> int:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("start", [_none, lambda *_: 0], ids=["no thread starts", "threads end before they begin"])
def test_the_caller_does_the_work_without_threads(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads._thread, "start_new_thread", start)
    assert list(in_parallel(lambda n: n * n, range(9), 4)) == [n * n for n in range(9)]


@pytest.mark.parametrize("at_once", [0, 1, 3])
def test_started_calls_finish_in_threads_or_in_the_waiting_caller(at_once: int) -> None:
    begun = StartedCalls(lambda n: n * n, range(9), at_once)
    begun.wait()
    assert begun.results() == begun.results() == [n * n for n in range(9)]
    assert StartedCalls(str, [], at_once).results() == []


def test_the_first_error_is_raised_when_results_are_requested() -> None:
    begun = StartedCalls(lambda n: 1 // (3 - n), range(6), 2)
    begun.wait()
    with pytest.raises(ZeroDivisionError):
        begun.results()


def test_nothing_used_only_by_calls_is_kept_alive() -> None:
    class Memory:
        pass

    memory = Memory()
    alive, begun = weakref.ref(memory), StartedCalls(lambda n, kept=memory: n, range(3), 2)
    del memory
    begun.wait()
    assert alive() is None
    assert begun.results() == [0, 1, 2]


def test_an_interrupted_thread_does_not_keep_a_lock() -> None:
    def interrupt(frame: Any, event: str, _: object) -> None:
        if event.endswith("return") and frame.f_code.co_filename == threads.__file__:
            raise KeyboardInterrupt

    lock = Lock()
    sys.setprofile(interrupt)
    try:
        with lock:
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    assert not lock._lock.locked()


def test_a_call_is_made_once_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers, calls = WorkerThreads(1, "worker"), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert workers.submit(lambda: calls.append(1)).done()
    workers.submit(lambda: calls.append(2)).result(60)
    workers.close()
    assert calls == [1, 2]
