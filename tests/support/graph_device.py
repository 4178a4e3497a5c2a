"""Count captures and replays of decode steps, with or without a CUDA device.

Without a device, the interpreter runs the kernels, and ``Device`` replaces graphs. A captured step then has no effect, and a replay runs it
again with the new inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kvpack.integrations.transformers import KvpackCache, graphs
from support.interpreter import DEVICE, INTERPRETED

if TYPE_CHECKING:
    import pytest

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""Sizes of models for these tests.

The interpreter takes 8 ms per KV head to run the attention kernel, so there is only one KV head.
"""
ONE_LAYER = {**SIZES, "num_hidden_layers": 1}
"""Sizes for tests that do not need several layers. The interpreter takes about 20 ms per layer and step."""
RECIPE = "kv=group:b=8,g=32"


class Device:
    """Captures and replays steps of ``cache`` without a device, and counts both in ``captured`` and ``replayed``."""

    def __init__(self) -> None:
        self.cache: Any = None
        self.captured = self.replayed = 0

    def capture(self, call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        cache, told = self.cache, self.cache.graphs.captured
        self.captured += 1
        lengths = [(steps._lengths, steps._lengths.clone()) for steps in cache.live._steps if steps is not None]
        result = call()
        for now, before in lengths:
            now.copy_(before)

        def replay() -> None:
            self.replayed += 1
            cache.graphs.captured = told
            with cache.live.capturing(), cache.passes.without_recording():
                again = call()
            cache.graphs.captured = None
            for name, x in result.items():
                if isinstance(x, torch.Tensor):
                    x.copy_(again[name])

        return replay, result


def count_captures(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Count captures and replays of all KvpackCaches from now on, and return the ``Device`` with the counts."""
    found = Device()
    monkeypatch.setenv("KVPACK_KERNELS", "triton")
    if INTERPRETED:
        monkeypatch.setattr(graphs, "can_capture", lambda _: True)
        monkeypatch.setattr(graphs, "capture", found.capture)
    else:
        capture = graphs.capture

        def counted(call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
            replay, result = capture(call, device)
            found.captured += 1

            def replayed() -> None:
                found.replayed += 1
                replay()

            return replayed, result

        monkeypatch.setattr(graphs, "capture", counted)
    return found


def new_cache(model: Any, device: Device, recipe: str = RECIPE, graphs: bool | None = True) -> KvpackCache:
    device.cache = KvpackCache(model, recipe, graphs=graphs)
    return device.cache


def eager_cache(model: Any, recipe: str = RECIPE) -> KvpackCache:
    """Return a cache whose steps are never replayed."""
    return KvpackCache(model, recipe, graphs=False)


def drop_replay(cache: KvpackCache) -> None:
    """Drop the stand-in for the graph of ``cache``, which refers to the model."""
    assert cache.graphs is not None
    assert cache.graphs._graph is not None
    del cache.graphs._graph._replay


def random_ids(batch: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 60, (batch, count), generator=torch.Generator().manual_seed(seed), device="cpu").to(DEVICE)


def caches_match(actual: KvpackCache, expected: KvpackCache) -> None:
    """Assert that two caches have the same bytes and report the same origin."""
    one, other = actual.packed, expected.packed
    assert one.inputs == other.inputs
    for mine, theirs in zip(one, other, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine.unpack(torch.float32), theirs.unpack(torch.float32), strict=True))
