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
from .serve_rows import DYNAMIC, TIMES

if TYPE_CHECKING:
    from collections.abc import Mapping

    import kvpack

STEPS, ROUNDS = 16, 16
"""Number of decode steps (or generated tokens) per timing, and number of timings. In total, two windows of tokens are encoded."""


def with_plain_attention(model: Any) -> Any:
    """Return a copy of ``model`` with the same weights, without hooks and packed attention, which would slow it down."""
    return copy.deepcopy(model, {id(x): x for x in chain(model.parameters(), model.buffers())})


def step_rows(
    model: Any, plain: Any, dense: Any, packed: Mapping[str, kvpack.Cache], ids: torch.Tensor
) -> list[dict[str, Any]]:
    """Return one row per cache. ``packed`` caches run with ``model``, and ``dense``, a DynamicCache, runs with ``plain``.

    All caches contain the tokens of ``ids``, ``[batch, token]``, except the last. Times are seconds per step and per generated token.
    """
    from kvpack.integrations.transformers import KvpackCache

    sizes = [sum(layer.keys.nbytes + layer.values.nbytes for layer in dense.layers), *(cache.nbytes for cache in packed.values())]
    with ExitStack() as stack:
        runs = [(plain, dense), *((model, stack.enter_context(KvpackCache.of(cache, model))) for cache in packed.values())]
        generated = time_interleaved([_Generation(*run, ids) for run in runs], ROUNDS, average=fmean)
        eager = time_interleaved(
            [partial(_step, model, cache_names.cache_argument(model, past), ids[:, -1:]) for model, past in runs],
            ROUNDS,
            STEPS,
            average=fmean,
        )
    return [
        {
            **dict.fromkeys(TIMES), "cache": name, "cache_bytes": size,
            "step_seconds": step.process, "generate_seconds": compiled.process / STEPS,
        }
        for name, size, step, compiled in zip([DYNAMIC, *packed], sizes, eager, generated, strict=True)
    ]  # fmt: skip


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
