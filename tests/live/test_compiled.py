"""Live caches in code compiled by torch.compile give the results of eager code.

There are no graph breaks, and no compilation for each cache or step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Dynamo imports parts of PyTorch that other versions of it call deprecated.
pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"), pytest.mark.scenario]

LENGTHS = (40, 1, 1, 100, 1, 60, 1)
"""Number of tokens in each call. The tail fills up and rolls over, and one update is larger than its room."""


def step(live: kvpack.LiveCache, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Update two layers and attend to them, then update one of them without attending before the next step."""
    for layer in range(2):
        live.update(layer, k, v)
        q = q + live.attend(layer, q, softcap=20.0)
    live.update(1, k, v)
    live.update(1, v, k)
    return q + live.attend(1, q[:, :, -1:])


def results(run: Callable[..., torch.Tensor], live: kvpack.LiveCache) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for tokens in LENGTHS:
        k, v = torch.randn(2, 1, 2, tokens, 64, generator=generator)
        found.append(run(live, k, v, torch.randn(1, 4, tokens, 64, generator=generator)))
    return found


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    torch._dynamo.reset()
    yield torch.compile(step, backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()


@pytest.mark.parametrize("recipe", ["fp32", "octopus-3", "kivi-2"])
def test_compiled_code_equals_eager_code(recipe: str, compiled: Callable[..., Any]) -> None:
    eager, live = (kvpack.LiveCache(recipe, layers=2) for _ in range(2))
    for found, expected in zip(results(compiled, live), results(step, eager), strict=True):
        torch.testing.assert_close(found, expected)
    assert live.tokens == eager.tokens
    for layer in range(2):
        for found_side, side in zip(live.unpack(layer, torch.float32), eager.unpack(layer, torch.float32), strict=True):
            assert found_side is not None
            assert side is not None
            assert torch.equal(found_side, side)


def test_code_is_compiled_per_shape_but_not_per_cache_or_step(compiled: Callable[..., Any]) -> None:
    stats = torch._dynamo.utils.counters["stats"]
    counts = []
    for recipe in ("fp32", "octopus-3"):
        before = stats["unique_graphs"]
        results(compiled, kvpack.LiveCache(recipe, layers=2))
        counts.append(stats["unique_graphs"] - before)
    # One for the first length, one for a single token, one for any other.
    assert counts == [3, 0]


def test_a_layer_filled_by_eager_code_is_attended() -> None:
    live = kvpack.LiveCache("fp32", layers=1)
    k, v = torch.randn(2, 1, 2, 50, 64, generator=torch.Generator().manual_seed(0))
    live.update(0, k, v[..., :32])
    q = torch.randn(1, 4, 3, 64, generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    attend = torch.compile(lambda live, q: live.attend(0, q) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(attend(live, q), live.attend(0, q) * 2)
    continued = kvpack.LiveCache.of(live.freeze())
    torch.testing.assert_close(attend(continued, q), live.attend(0, q) * 2)
    torch._dynamo.reset()


def test_left_padding_is_skipped_in_compiled_code() -> None:
    def step(live: kvpack.LiveCache, k: torch.Tensor, q: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        live.update(0, k, k)
        return live.attend(0, q, starts=starts) * 2

    torch._dynamo.reset()
    k, q = torch.randn(2, 2, 9, 64), torch.randn(2, 4, 9, 64)
    for starts in (torch.tensor([4, 0]), torch.tensor([0, 9])):
        run = torch.compile(step, backend="aot_eager", fullgraph=True)
        found = run(kvpack.LiveCache("fp32", layers=1), k, q, starts)
        torch.testing.assert_close(found, step(kvpack.LiveCache("fp32", layers=1), k, q, starts))
    torch._dynamo.reset()


def test_compiled_code_refuses_the_same_arguments_as_eager_code(compiled: Callable[..., Any]) -> None:
    live = kvpack.LiveCache("fp32", layers=2)
    x = torch.zeros(1, 2, 3, 64)
    with pytest.raises(InvalidParameter, match=r"layers\[0\]"):
        compiled(live, x, torch.zeros(1, 2, 4, 64), torch.zeros(1, 4, 3, 64))


def test_a_deleted_cache_is_refused() -> None:
    from kvpack.live import operators

    ticket = operators.register_cache(kvpack.LiveCache("fp32", layers=1))
    with pytest.raises(InvalidParameter, match="no longer exists"):
        operators.live_update(ticket, torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1, 64), 0)


def test_declared_shapes_are_correct() -> None:
    from kvpack.live import operators

    live = kvpack.LiveCache("bf16", layers=1)
    k = torch.zeros(2, 2, 5, 64, dtype=torch.bfloat16)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.live_update, (live._calls.tickets[0], k, k[..., :32], 0), test_utils=checks)
    q = torch.zeros(2, 4, 3, 64, dtype=torch.bfloat16)
    torch.library.opcheck(operators.live_attend, (live._calls.tickets[0], q, None, None, 0, 32, None, True, None, None), test_utils=checks)
