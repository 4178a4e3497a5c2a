"""Times decode steps and ``generate`` on the CPU. Each round measures all caches, in process time of one thread."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import partial
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from kvpack import cache_names

from .process_time import time_interleaved
from .serve_peers import DYNAMIC, TIMES, cache_bytes, measured_row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import kvpack

STEPS, ROUNDS = 16, 16
"""Number of decode steps (or generated tokens) per timing, and number of timings. In total, two windows of tokens are encoded."""


def with_plain_attention(model: Any) -> Any:
    """Return a copy of ``model`` with the same weights, without hooks and packed attention, which would slow it down."""
    return copy.deepcopy(model, {id(x): x for x in chain(model.parameters(), model.buffers())})


def spare_tokens() -> int:
    """Return the number of tokens that the measurements add to each cache."""
    return 2 * STEPS * (ROUNDS + 1)


def step_rows(
    model: Any, plain: Any, dense: Any, others: Mapping[str, Callable[[], Any]], packed: Mapping[str, kvpack.Cache], ids: torch.Tensor
) -> list[dict[str, Any]]:
    """Return one row per cache. ``packed`` caches run with ``model``, and all others with ``plain``. ``dense`` is a DynamicCache.

    All caches contain the tokens of ``ids``, ``[batch, token]``, except the last. Times are seconds per step and per generated token. If a
    cache cannot be created, its row has the ``error``.
    """
    from kvpack.integrations.transformers import KvpackCache

    caches, failed = {DYNAMIC: dense}, []
    for name, make in others.items():
        result = measured_row(name, lambda make=make: {"made": make()})  # type: ignore[misc]
        if "error" in result:
            failed.append(result)
        else:
            caches[name] = result["made"]
    sizes = [*(cache_bytes(past) for past in caches.values()), *(cache.nbytes for cache in packed.values())]
    with ExitStack() as stack:
        runs = [*((plain, past) for past in caches.values())]
        runs += [(model, stack.enter_context(KvpackCache.of(cache, model))) for cache in packed.values()]
        generated = time_interleaved([_Generation(*run, ids) for run in runs], ROUNDS, average=fmean)
        eager = time_interleaved(
            [partial(_step, model, cache_names.cache_argument(model, past), ids[:, -1:]) for model, past in runs],
            ROUNDS,
            STEPS,
            average=fmean,
        )
    rows = [
        {
            **dict.fromkeys(TIMES), "cache": name, "cache_bytes": size,
            "step_seconds": step.process, "generate_seconds": compiled.process / STEPS,
        }
        for name, size, step, compiled in zip([*caches, *packed], sizes, eager, generated, strict=True)
    ]  # fmt: skip
    return [*rows[: len(caches)], *failed, *rows[len(caches) :]]


class _Generation:
    """A ``generate`` call that adds STEPS tokens to ``past``."""

    def __init__(self, model: Any, past: Any, ids: torch.Tensor) -> None:
        self._model, self._over, self._ids = model, cache_names.cache_argument(model, past), ids

    def __call__(self) -> None:
        # Without a mask, generate would hide generated tokens that equal the padding token.
        options: dict[str, Any] = {"attention_mask": torch.ones_like(self._ids)}
        options |= {"min_new_tokens": STEPS, "max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
        self._ids = self._model.generate(self._ids, **self._over, **options)


def _step(model: Any, cache_argument: dict[str, Any], token: torch.Tensor) -> None:
    model(token, **cache_argument, use_cache=True, logits_to_keep=1)
