"""Decode steps use CUDA graphs by default only for models whose code is known completely."""

from __future__ import annotations

import functools
import gc
import types
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import modeling_llama

from kvpack.integrations.transformers import KvpackCache, graphs
from kvpack.integrations.transformers.graphs import DEFAULT_EAGER_STEPS
from kvpack.integrations.transformers.model_snapshot import ModelSnapshot
from support.graph_device import ONE_LAYER, SIZES, Device, caches_match, count_captures, drop_replay, eager_cache, new_cache, random_ids
from support.interpreter import DEVICE, INTERPRETED
from support.zoo_models import ZOO, model_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STEPS = DEFAULT_EAGER_STEPS + 4


# Whole models in the interpreter.
pytestmark = pytest.mark.scenario


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return count_captures(monkeypatch)


def steps(model: Any, cache: Any, count: int = STEPS) -> list[torch.Tensor]:
    """Return the logits of ``count`` steps of one token each."""
    return [model(random_ids(1, 1, step), past_key_values=cache).logits for step in range(count)]


@pytest.mark.kernels
def test_many_equal_steps_are_replayed(device: Device) -> None:
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    before, expected = dict(vars(model)), eager_cache(model)
    logits = steps(model, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = new_cache(model, device, graphs=None)
        found = steps(model, cache)
    assert all(torch.equal(one, other) for one, other in zip(found, logits, strict=True))
    assert (device.captured, device.replayed) == (1, STEPS - DEFAULT_EAGER_STEPS)
    caches_match(cache, expected)
    for one in (cache, expected):
        one.release()
    assert vars(model).keys() == before.keys()


@pytest.mark.kernels
def test_generate_replays_steps(device: Device) -> None:
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    prompt, options = random_ids(2, 6), {"max_new_tokens": STEPS + 1, "do_sample": False, "pad_token_id": 0}
    with eager_cache(model) as expected:
        tokens = model.generate(prompt, past_key_values=expected, **options)
    with new_cache(model, device, graphs=None) as found:
        assert torch.equal(model.generate(prompt, past_key_values=found, **options), tokens)
    assert (device.captured, device.replayed) == (1, STEPS - DEFAULT_EAGER_STEPS)
    caches_match(found, expected)


class _Counting(modeling_llama.LlamaMLP):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (2 if self.calls > 6 else 1)


class _Weight(torch.Tensor):
    pass


def _halved(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def called(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs) / 2

    return called


def _has_a_module(model: Any, _: pytest.MonkeyPatch) -> None:
    model.model.layers[1].mlp.__class__ = _Counting


def _has_a_forward(model: Any, _: pytest.MonkeyPatch) -> None:
    own = model.model.layers[1].mlp
    own.forward = own.forward


def _has_an_attribute(model: Any, _: pytest.MonkeyPatch) -> None:
    own = model.model.layers[1].mlp
    del own.act_fn
    own.act_fn = functools.partial(_halved(torch.nn.functional.silu))


def _has_a_weight(model: Any, _: pytest.MonkeyPatch) -> None:
    own = model.model.norm
    own.weight = torch.nn.Parameter(own.weight.detach().as_subclass(_Weight))


def _has_a_function_of_a_class(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # It says that it is of the module of what it wraps.
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", _halved(modeling_llama.LlamaMLP.forward))


def _has_a_function_of_pytorch(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Linear, "forward", _halved(torch.nn.Linear.forward))


def _has_a_function_of_a_module(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "rotate_half", _halved(modeling_llama.rotate_half))


class _Rotating:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) / 2


def _has_an_object_of_a_module(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "rotate_half", _Rotating())


FOREIGN = {
    "a module": (_has_a_module, "_Counting"),
    "a forward": (_has_a_forward, "model.layers.1.mlp has a forward of its own"),
    "an attribute": (_has_an_attribute, "silu is of"),
    "a weight": (_has_a_weight, "weights are of type _Weight"),
    "a function of a class": (_has_a_function_of_a_class, "LlamaMLP.forward is of"),
    "a function of PyTorch": (_has_a_function_of_pytorch, "Linear.forward is of"),
    "a function of a module": (_has_a_function_of_a_module, "rotate_half is of"),
    "an object of a module": (_has_an_object_of_a_module, "_Rotating is of"),
}


REPLAYED = ("a function of a module",) if INTERPRETED else tuple(FOREIGN)
"""Cases that run the kernels. In the interpreter, each of them takes seconds."""


@pytest.mark.parametrize("name", FOREIGN)
def test_third_party_code_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Third-party code is detected if a model already has it, and when it is added to a model later."""
    change, reason = FOREIGN[name]
    model = model_of("Llama", **SIZES)
    snapshot = ModelSnapshot(model)
    assert snapshot.foreign_part is None
    change(model, monkeypatch)
    assert not snapshot.unchanged()
    assert reason in str(ModelSnapshot(model).foreign_part)


@pytest.mark.kernels
@pytest.mark.parametrize("name", REPLAYED)
def test_a_model_with_custom_code_is_not_replayed(name: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    change, reason = FOREIGN[name]
    found = []
    for replays in (False, True):
        model = model_of("Llama", **SIZES).to(DEVICE)
        with monkeypatch.context() as changed:
            change(model, changed)
            cache = new_cache(model, device, graphs=None) if replays else eager_cache(model)
            found.append(steps(model, cache))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert (device.captured, device.replayed) == (0, 0)
    assert cache.graphs is not None
    assert reason in str(cache.graphs.refused)


@pytest.mark.kernels
@pytest.mark.parametrize("name", [name for name in REPLAYED if name != "a weight"])
def test_code_that_changes_between_steps_runs(name: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for replays in (False, True):
        model = model_of("Llama", **SIZES).to(DEVICE)
        cache = new_cache(model, device, graphs=None) if replays else eager_cache(model)
        logits, replayed = steps(model, cache), device.replayed
        with monkeypatch.context() as changed:
            FOREIGN[name][0](model, changed)
            found.append(logits + steps(model, cache))
        assert device.replayed == replayed
    assert replayed > 0
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", [architecture.name for architecture in ZOO])
def test_the_code_of_all_tested_models_is_known(name: str) -> None:
    snapshot = ModelSnapshot(model_of(name))
    assert snapshot.foreign_part is None
    assert snapshot.unchanged()


@pytest.mark.kernels
def test_a_dispatch_mode_sees_every_operation(device: Device) -> None:
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return function(*args, **(kwargs or {}))

    model, counts = model_of("Llama", **ONE_LAYER).to(DEVICE), []
    cache = new_cache(model, device, graphs=None)
    steps(model, cache)
    replayed = device.replayed
    for _ in range(3):
        with Counting() as mode:
            model(random_ids(1, 1), past_key_values=cache)
        counts.append(mode.count)
    assert min(counts) > 20
    assert device.replayed == replayed
    with torch.device(DEVICE):
        steps(model, cache)
    assert device.replayed > replayed


@pytest.mark.kernels
def test_a_failing_capture_is_not_retried(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def failing(call: Callable[[], Any], device: torch.device) -> Any:
        tried.append(device)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "capture", failing)
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    expected = steps(model, eager_cache(model))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache = new_cache(model, device, graphs=None)
            assert all(torch.equal(one, other) for one, other in zip(steps(model, cache), expected, strict=True))
        assert cache.graphs is not None
        assert "captur" in str(cache.graphs.refused)
        cache.release()
    assert len(tried) == 1


@pytest.mark.kernels
def test_attributes_of_a_model_do_not_keep_it_alive(device: Device) -> None:
    """Attributes that refer to the model itself do not keep the model alive."""
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    model.generate = types.MethodType(type(model).generate, model)
    cache = new_cache(model, device, graphs=None)
    steps(model, cache)
    assert device.captured == 1
    kept = weakref.ref(model)
    drop_replay(cache)
    del model
    gc.collect()
    assert kept() is None


@pytest.mark.kernels
def test_a_custom_forward_is_kept(device: Device) -> None:
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    model.forward = own = types.MethodType(type(model).forward, model)
    cache = new_cache(model, device, graphs=None)
    assert model.forward is own
    steps(model, cache)
    assert device.captured == 0


def test_the_model_keeps_its_forward_on_the_cpu() -> None:
    model = model_of("Llama")
    with KvpackCache(model, "octopus-4") as cache:
        assert cache.graphs is None
        assert "forward" not in vars(model)
