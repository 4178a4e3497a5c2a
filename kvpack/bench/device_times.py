"""Times calls until the device has finished: process time on a CPU, wall time on other devices."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from .process_time import time_interleaved
from .serve_peers import try_measure

REPEATS = 3
"""Number of timings of a call, after one warm-up call."""


def call_seconds(calls: Sequence[Callable[[], None]], device: str) -> list[tuple[float | None, str | None]]:
    """Return for each call its time in seconds and None. If it raised an error, return None and the error's text."""
    if device == "cpu":
        return [(measured.process, None) for measured in time_interleaved(calls, REPEATS)]
    return [try_measure(partial(_median, call, device)) for call in calls]


def _median(call: Callable[[], None], device: str) -> float:
    result = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        call()
        result.append(time.perf_counter() - begin)
    free_memory(device)
    return statistics.median(result[1:])


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
