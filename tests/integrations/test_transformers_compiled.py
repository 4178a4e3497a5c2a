"""Tests of torch.compile around a model with a KvpackCache: results equal eager code's, and no layer breaks the graph."""

from __future__ import annotations

import inspect
import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack.formats.errors import InvalidParameter
from kvpack.integrations.transformers import KvpackCache
from support.zoo_models import model_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# Dynamo imports parts of PyTorch that other versions of it call deprecated.
pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"), pytest.mark.scenario]

COUNTS = (20, 1, 1, 30, 1)
PASSES = ((0, 20), (20, 21), (21, 22), (22, 39), (39, 40))
"""The first token of each forward pass, and the token after its last one."""

REASONS = "reason" in inspect.signature(torch.compiler.disable).parameters


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
    """Return the logits of each pass over two rows, for the tokens that the mask does not hide."""
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
    ("name", "layers", "padding"),
    [
        ("Llama", 2, "right"),
        # The attention of one layer, before layers of experts.
        ("DeepSeek-V3", 1, "left"),
    ],
)
def test_a_compiled_model_gives_the_same_results_as_eager_mode(name: str, layers: int, padding: str) -> None:
    model = model_of(name, num_hidden_layers=layers)
    eager, compiled = (KvpackCache(model, "raw") for _ in "ab")
    expected = logits(model, eager, padding)
    for found, own in zip(logits(torch.compile(model, backend="eager"), compiled, padding), expected, strict=True):
        torch.testing.assert_close(found, own)
    assert compiled.packed.inputs == eager.packed.inputs
    for side, other in zip(compiled.live.unpack(0, torch.float32), eager.live.unpack(0, torch.float32), strict=True):
        assert side is not None
        assert other is not None
        torch.testing.assert_close(side, other)


@pytest.mark.filterwarnings("ignore::kvpack.KvpackWarning")
@pytest.mark.parametrize(
    ("name", "layers", "recipe", "padding"),
    [
        ("Llama", 1, "kv=group:b=4,g=8;tail=16", None),
        # A window that slides, one that does not, and a cap of the scores.
        ("Gemma-2", 2, "kv=group:b=4,g=8;tail=16", "left"),
        ("GPT-OSS", 1, "raw", "right"),
    ],
)
def test_a_model_over_packed_layers_is_compiled_to_one_graph(name: str, layers: int, recipe: str, padding: str | None) -> None:
    """The test runs with and without padding, and with sliding windows of 12 tokens, which the passes fill and exceed.

    The model's forward pass is that of caches whose steps may be replayed.
    """
    model = model_of(name, num_hidden_layers=layers)
    eager, compiled = (KvpackCache(model, recipe, graphs=True) for _ in "ab")
    assert "forward" in vars(model)
    run = torch.compile(lambda *args, **kwargs: model(*args, **kwargs), backend="aot_eager", fullgraph=True)
    for found, own in zip(logits(run, compiled, padding), logits(model, eager, padding), strict=True):
        torch.testing.assert_close(found, own)
    assert compiled.packed.inputs == eager.packed.inputs
    # The first pass, one of several tokens, and a step.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


@pytest.mark.filterwarnings("ignore:.*which share")
def test_padding_in_a_graph_may_change_between_passes() -> None:
    """The same code handles passes without padding, with padding on the left, and on the right or in the middle of the first pass."""
    model = model_of("Mistral", num_hidden_layers=1)
    run = torch.compile(lambda *args, **kwargs: model(*args, **kwargs), backend="aot_eager", fullgraph=True)
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    for hidden in (slice(0, 0), slice(0, 5), slice(0, 20), slice(15, 20), slice(7, 9)):
        with pytest.warns(kvpack.KvpackWarning, match="decodes") if hidden.start else nullcontext():
            found = []
            for call in (run, model):
                cache = KvpackCache(model, "kv=group:b=4,g=8;tail=16")
                mask = torch.ones(2, 40, dtype=torch.long)
                mask[1, hidden] = 0
                logits = [call(ids[:, start:stop], past_key_values=cache, attention_mask=mask[:, :stop]).logits for start, stop in PASSES]
                found.append(torch.cat(logits, 1)[mask.bool()])
            torch.testing.assert_close(*found)
    # The first pass, a step, and passes of any number of tokens over masks of one.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def test_unsupported_features_in_a_graph_are_refused_with_a_reason() -> None:
    model = model_of("Llama")
    run = torch.compile(lambda *args, **kwargs: model(*args, **kwargs), backend="aot_eager", fullgraph=True)
    ids = torch.full((1, 4), 5)
    for options, given, reason in (
        ({"dense": True}, {}, r"dense=True"),
        ({}, {"attention_mask": torch.zeros(1, 1, 4, 4)}, "decoded in eager code"),
    ):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=reason if REASONS else "disable"):
            run(ids, past_key_values=KvpackCache(model, "raw", **options), **given)


def test_a_copied_mask_with_other_padding_is_refused() -> None:
    """Attention recognizes such a mask by its placeholder tensor."""
    cache = KvpackCache(model_of("Llama"), "raw")
    starts = cache.compiled.starts(0, 4, torch.tensor([[True, True, True, False]]))
    with pytest.raises(InvalidParameter, match="pad on the left"):
        cache.compiled.attend(0, torch.zeros(1, 4, 4, 16), starts=starts.clone(), causal=True)


def test_a_graph_records_passes_like_eager_code() -> None:
    """Compiled code records inputs that token ids do not determine, and passes that end in an error, as eager code does."""
    model = model_of("Llama", num_hidden_layers=1)
    run = torch.compile(lambda *args, **kwargs: model(*args, **kwargs), backend="aot_eager", fullgraph=True)
    found = []
    for call in (model, run):
        cache = KvpackCache(model, "raw")
        call(torch.full((1, 9), 5), past_key_values=cache)
        call(torch.full((1, 2), 5), past_key_values=cache, position_ids=torch.tensor([[9, 20]]))
        with pytest.raises(InvalidParameter, match="the forward pass has 2 rows, but the cache holds 1 sequence"):
            call(torch.full((2, 2), 5), past_key_values=cache)
        call(torch.full((1, 2), 6), past_key_values=cache)
        found.append(cache.packed.inputs)
    assert found[0] == found[1]
    assert found[0].undetermined == ("tokens 9 to 10 have positions other than those that follow the cache",)


@pytest.mark.filterwarnings("ignore:.*which share")
def test_steps_are_compiled_once_for_all_caches() -> None:
    model = model_of("Llama", num_hidden_layers=1)
    run = torch.compile(model, backend="eager")
    stats = torch._dynamo.utils.counters["stats"]
    logits(run, KvpackCache(model, "kv=group:b=4,g=8;tail=16"), "left")
    before = stats["unique_graphs"]
    logits(run, KvpackCache(model, "kv=group:b=4,g=8;tail=16"), "left", (20, 1, 1, 30, *[1] * 40))
    assert stats["unique_graphs"] == before
