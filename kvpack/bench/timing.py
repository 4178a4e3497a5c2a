"""Times work on a CUDA device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_CALLS_A_GRAPH = 12
_EAGER_CALLS = 100
_REPLAYS = 7
_CALLS_IN_A_ROW = 10
_GRAPH_SLEEP = 1 << 20
"""Number of cycles, half a millisecond, for which a device is kept busy while the host launches a graph."""
_FIRST_SLEEP, _LAST_SLEEP = 1 << 24, 1 << 30
"""Range of the number of cycles for which a device is kept busy, from some milliseconds to half a second."""


def graph_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the seconds per call: the median over replays of a CUDA graph that runs all ``calls``.

    The device is kept busy until a replay is queued, because launching a graph with many kernels can take longer than running them.
    """
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, _CALLS_A_GRAPH // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    seconds = []
    for replay in range(_REPLAYS + 1):
        torch.cuda._sleep(_GRAPH_SLEEP)  # type: ignore[no-untyped-call]
        elapsed = _device_seconds(graph.replay)
        if replay:
            seconds.append(elapsed / (rounds * len(calls)))
    return statistics.median(seconds)


def eager_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the seconds per call without graphs, over many calls: host time or device time, whichever is larger."""
    rounds = max(1, _EAGER_CALLS // len(calls))
    seconds = []
    for _ in range(_REPLAYS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(rounds):
            for call in calls:
                call()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) / (rounds * len(calls)))
    return statistics.median(seconds[1:])


def _device_seconds(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def median_seconds(call: Callable[[], object]) -> float:
    """Return the median time in seconds of three calls, after a warm-up call."""
    return statistics.median([_device_seconds(call) for _ in range(4)][1:])


def repeated_seconds(call: Callable[[], object]) -> float:
    """Return the seconds per call for several calls in a row, as the median of three runs: device time or host time, whichever is larger.
    """

    def run() -> None:
        for _ in range(_CALLS_IN_A_ROW):
            call()

    call()
    return statistics.median([_device_seconds(run) for _ in range(4)][1:]) / _CALLS_IN_A_ROW


def queued_seconds(call: Callable[[], object]) -> float | None:
    """Return the device seconds per call for several calls in a row, or None if the calls wait for the device.

    The device is kept busy until all calls are queued, so that it does not wait for the host.
    """
    call()
    torch.cuda.synchronize()
    cycles = _FIRST_SLEEP
    while cycles <= _LAST_SLEEP:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(_CALLS_IN_A_ROW):
            call()
        end.record()
        queued = not begin.query()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        if queued:
            return float(begin.elapsed_time(end)) / 1e3 / _CALLS_IN_A_ROW
        cycles *= 4
    return None
