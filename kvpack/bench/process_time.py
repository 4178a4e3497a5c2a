"""Seconds that the process works, and that pass: in one thread (``modes.one_thread``), other load disturbs the former least."""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.coding.encoding import Progress


class Seconds(NamedTuple):
    """The averages of one call: of the process, in all its threads, and on the clock."""

    process: float
    wall: float


def interleaved(
    calls: Sequence[Callable[[], object]],
    repeats: int,
    at_once: int = 1,
    *,
    before: Sequence[Callable[[], object] | None] = (),
    new_memory: bool = False,
    average: Callable[[Sequence[float]], float] = statistics.median,
    progress: Progress | None = None,
) -> list[Seconds]:
    """Return the seconds per call of each function: the median over ``repeats`` rounds of ``at_once`` calls of each in turn, after a
    warm-up round.

    ``average`` is another average than the median, for calls that now and then do what the others leave to them.

    What ``before`` holds for a call is called before its timing, and what the last call returns is freed after it. With ``new_memory`` the
    allocator first gives what is free back to the system: otherwise a call takes pages that the one before it left, or pays for new ones,
    by chance.
    """
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if new_memory else None
    times: list[list[Seconds]] = [[] for _ in calls]
    for number in range(repeats + 1):
        for place, (call, first, own) in enumerate(zip(calls, before or [None] * len(calls), times, strict=True), 1):
            if first is not None:
                first()
            if give_back is not None:
                give_back(0)
            started = Seconds(time.process_time(), time.perf_counter())
            for _ in range(at_once):
                result = call()
            seconds = Seconds((time.process_time() - started.process) / at_once, (time.perf_counter() - started.wall) / at_once)
            del result
            if number:
                own.append(seconds)
            if progress:
                progress(number * len(calls) + place, (repeats + 1) * len(calls))
    return [Seconds(*(average(part) for part in zip(*own, strict=True))) for own in times]
