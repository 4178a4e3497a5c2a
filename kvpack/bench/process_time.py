"""Measures process time and wall time. With one thread (``modes.one_thread``), other load affects process time least."""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.coding.encoding import Progress


class CallTimes(NamedTuple):
    """The average times of one call in seconds: process time, which is summed over all threads, and wall time."""

    process: float
    wall: float


def time_interleaved(
    calls: Sequence[Callable[[], object]],
    repeats: int,
    at_once: int = 1,
    *,
    before: Sequence[Callable[[], object] | None] = (),
    new_memory: bool = False,
    average: Callable[[Sequence[float]], float] = statistics.median,
    progress: Progress | None = None,
) -> list[CallTimes]:
    """Return the times of one call of each function: the median over ``repeats`` rounds, each with ``at_once`` calls of each function.

    The first round is a warm-up. If a call may do work that later calls need, pass the mean as ``average``. ``before`` contains a function
    (or None) for each call, which is called before the timing. The result of the last call is freed after the timing. With ``new_memory``,
    free memory is first returned to the system. Otherwise, a call may or may not reuse pages of an earlier one, which makes times erratic.
    """
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if new_memory else None
    times: list[list[CallTimes]] = [[] for _ in calls]
    for number in range(repeats + 1):
        for place, (call, first, samples) in enumerate(zip(calls, before or [None] * len(calls), times, strict=True), 1):
            if first is not None:
                first()
            if give_back is not None:
                give_back(0)
            started = CallTimes(time.process_time(), time.perf_counter())
            for _ in range(at_once):
                result = call()
            seconds = CallTimes((time.process_time() - started.process) / at_once, (time.perf_counter() - started.wall) / at_once)
            del result
            if number:
                samples.append(seconds)
            if progress:
                progress(number * len(calls) + place, (repeats + 1) * len(calls))
    return [CallTimes(*(average(part) for part in zip(*samples, strict=True))) for samples in times]
