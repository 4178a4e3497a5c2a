"""Seconds that a CUDA device works."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CALLS_A_GRAPH = 12
_REPLAYS = 7


def graph_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of one call, the median over replays of a CUDA graph that makes all ``calls`` in turn."""
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
        elapsed = _elapsed(graph.replay)
        if replay:
            seconds.append(elapsed / (rounds * len(calls)))
    return statistics.median(seconds)


def _elapsed(call: Callable[[], object]) -> float:
    """Seconds that the device works on ``call``."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def median_seconds(call: Callable[[], object]) -> float:
    """The median of three times after a warm-up call."""
    return statistics.median([_elapsed(call) for _ in range(4)][1:])
