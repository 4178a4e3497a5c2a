"""Seconds that the process works: in one thread (``modes.one_thread``), other load on the machine disturbs them least."""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.coding.encoding import Progress


def interleaved(
    calls: Sequence[Callable[[], object]], repeats: int, at_once: int = 1, *, new_memory: bool = False, progress: Progress | None = None
) -> list[float]:
    """The seconds of one call of each: the median over ``repeats`` rounds, after one to warm up, each of ``at_once`` calls of each in turn.

    What the last call returns is freed outside the timing. With ``new_memory`` the allocator first gives what is free back to the
    system: otherwise a call takes pages that the one before it left, or pays for new ones, by chance.
    """
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if new_memory else None
    times: list[list[float]] = [[] for _ in calls]
    for number in range(repeats + 1):
        for place, (call, own) in enumerate(zip(calls, times, strict=True), 1):
            if give_back is not None:
                give_back(0)
            started = time.process_time()
            for _ in range(at_once):
                result = call()
            seconds = (time.process_time() - started) / at_once
            del result
            if number:
                own.append(seconds)
            if progress:
                progress(number * len(calls) + place, (repeats + 1) * len(calls))
    return [statistics.median(own) for own in times]
