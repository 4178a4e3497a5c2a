"""torch.compile around a model with a KvpackCache: the results of eager code, and no graph break in a layer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from zoo_models import model_of

from kvpack.formats.errors import InvalidShape
from kvpack.integrations.transformers import KvpackCache

if TYPE_CHECKING:
    from collections.abc import Iterator

# Dynamo imports parts of PyTorch that other versions of it call deprecated.
pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]

COUNTS = (20, 1, 1, 30, 1)


@pytest.fixture(autouse=True)
def _compilers_begin_anew(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    # Kept for every test, what PyTorch logs takes most of the time.
    caplog.set_level(logging.WARNING, logger="torch.__trace")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def logits(run: Any, cache: KvpackCache, padding: str | None, counts: tuple[int, ...] = COUNTS) -> list[torch.Tensor]:
    """Of each pass over two rows, of tokens that the mask does not hide."""
    generator = torch.Generator().manual_seed(0)
    mask, found = torch.ones(2, 0, dtype=torch.long), []
    for count in counts:
        ids = torch.randint(3, 60, (2, count), generator=generator)
        own = torch.ones(2, count, dtype=torch.long)
        if padding and mask.shape[1] == 0:
            own[1, slice(None, 5) if padding == "left" else slice(-5, None)] = 0
        mask = torch.cat([mask, own], 1)
        given = {"attention_mask": mask} if padding else {}
        found.append(run(ids, past_key_values=cache, **given).logits[own.bool()])
    return found


@pytest.mark.filterwarnings("ignore::kvpack.KvpackWarning")
@pytest.mark.parametrize(
    ("name", "recipe", "padding"),
    [
        ("Llama", "kv=group:b=4,g=8;tail=16", None),
        pytest.param("Llama", "raw", "right", marks=pytest.mark.scenario),
        ("Gemma-3", "raw", "left"),
        pytest.param("DeepSeek-V3", "raw", "left", marks=pytest.mark.scenario),
    ],
)
def test_a_compiled_model_gives_what_it_gives_eagerly(name: str, recipe: str, padding: str | None) -> None:
    model = model_of(name)
    eager, compiled = (KvpackCache(model, recipe) for _ in "ab")
    expected = logits(model, eager, padding)
    for found, own in zip(logits(torch.compile(model, backend="eager"), compiled, padding), expected, strict=True):
        torch.testing.assert_close(found, own)
    assert compiled.packed.inputs == eager.packed.inputs
    for side, other in zip(compiled.live.unpacked(0, torch.float32), eager.live.unpacked(0, torch.float32), strict=True):
        assert side is not None
        assert other is not None
        torch.testing.assert_close(side, other)


@pytest.mark.parametrize("recipe", ["raw", "kv=group:b=4,g=8;tail=16"])
def test_a_model_without_padding_is_one_graph(recipe: str) -> None:
    model = model_of("Llama")
    eager, compiled = (KvpackCache(model, recipe) for _ in "ab")
    run = torch.compile(lambda *args, **kwargs: model(*args, **kwargs), backend="aot_eager", fullgraph=True)
    for found, own in zip(logits(run, compiled, None), logits(model, eager, None), strict=True):
        torch.testing.assert_close(found, own)
    assert compiled.packed.inputs == eager.packed.inputs
    # The first pass, one of several tokens, and a step.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_a_graph_tells_of_passes_as_eager_code_does() -> None:
    """Of what the token ids do not determine, and of passes that end in an error."""
    model = model_of("Llama")
    run = torch.compile(lambda *args, **kwargs: model(*args, **kwargs), backend="aot_eager", fullgraph=True)
    found = []
    for call in (model, run):
        cache = KvpackCache(model, "raw")
        call(torch.full((1, 9), 5), past_key_values=cache)
        call(torch.full((1, 2), 5), past_key_values=cache, position_ids=torch.tensor([[9, 20]]))
        with pytest.raises(InvalidShape, match="does not continue"):
            call(torch.full((2, 2), 5), past_key_values=cache)
        call(torch.full((1, 2), 6), past_key_values=cache)
        found.append(cache.packed.inputs)
    assert found[0] == found[1]
    assert found[0].undetermined == ("tokens 9 to 10 have other positions than those that follow the cache",)


def test_steps_are_compiled_once_for_all_steps_and_caches() -> None:
    model = model_of("Llama")
    run = torch.compile(model, backend="eager")
    stats = torch._dynamo.utils.counters["stats"]
    logits(run, KvpackCache(model, "kv=group:b=4,g=8;tail=16"), "left")
    before = stats["unique_graphs"]
    logits(run, KvpackCache(model, "kv=group:b=4,g=8;tail=16"), "left", (20, 1, 1, 30, *[1] * 40))
    assert stats["unique_graphs"] == before
