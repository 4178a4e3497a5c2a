"""Times decode steps of several caches in alternation, because the host limits their speed and its own speed varies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from kvpack import cache_names

from .serve_graphs import use_flash_attention

WARM_STEPS, STEPS, ROUNDS = 2, 8, 6


@dataclass(frozen=True)
class DecodeSteps:
    """Decode steps of ``model`` over the cache ``past``. With ``flash``, SDPA uses FlashAttention.

    Without ``graphs``, steps over a KvpackCache never replay CUDA graphs.
    """

    name: str
    model: Any
    past: Any
    flash: bool = False
    graphs: bool = True


@contextmanager
def without_graphs(past: Any) -> Iterator[None]:
    """Return a context manager that disables CUDA graphs over the KvpackCache ``past``."""
    before, past.graphs = past.graphs, None
    try:
        yield
    finally:
        past.graphs = before


def time_steps(runs: Sequence[DecodeSteps], batch: int, device: str, wait: Callable[[str], None]) -> dict[str, float]:
    """Return the seconds per step for each of ``runs``, by name.

    Each run is timed in ``ROUNDS`` rounds, which alternate with those of the other runs. Its result is the median, over its rounds, of the
    mean step time; warm-up steps are excluded.
    """
    token = torch.full((batch, 1), 5, dtype=torch.int64, device=device)
    result: dict[str, list[float]] = {run.name: [] for run in runs}
    for _ in range(ROUNDS):
        for run in runs:
            over, begin = cache_names.cache_argument(run.model, run.past), 0.0
            with use_flash_attention() if run.flash else nullcontext(), nullcontext() if run.graphs else without_graphs(run.past):
                for step in range(WARM_STEPS + STEPS):
                    if step == WARM_STEPS:
                        wait(device)
                        begin = time.perf_counter()
                    run.model(token, **over, use_cache=True, logits_to_keep=1)
                wait(device)
            result[run.name].append((time.perf_counter() - begin) / STEPS)
    return {name: median(seconds) for name, seconds in result.items()}
