"""Decode steps run as CUDA graphs, with the same results as without.

Nothing that happens between steps changes the results, and steps that need the host have no graph.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers.models.gptj import modeling_gptj

from kvpack import cache_names
from kvpack.formats.errors import InvalidParameter, KvpackWarning
from kvpack.integrations.transformers import KvpackCache, graphs
from kvpack.integrations.transformers.graphs import EAGER_STEPS
from kvpack.integrations.transformers.model_snapshot import ModelSnapshot
from kvpack.integrations.transformers.states import CapturedLength
from kvpack.live import side
from support.graph_device import (
    ONE_LAYER,
    RECIPE,
    SIZES,
    Device,
    caches_match,
    count_captures,
    drop_replay,
    eager_cache,
    new_cache,
    random_ids,
)
from support.interpreter import DEVICE, INTERPRETED
from support.zoo_models import ZOO, model_of

if TYPE_CHECKING:
    from collections.abc import Iterator

WITHOUT_GRAPHS = {
    *("Qwen2-VL", "Qwen3-Next", "GPT-J", "Llama-4", "Falcon", "Falcon (ALiBi)", "Bloom", "MPT", "DeepSeek-V2", "DeepSeek-V3"),
    *("Falcon-H1", "Jamba", "Bamba"),
}
"""Models with multi-dimensional positions, states, chunks, steps that wait for the device, or attention that requires tensors."""
if not hasattr(modeling_gptj, "get_embed_positions"):
    # It was rewritten for transformers 5.24, and waits for nothing.
    WITHOUT_GRAPHS.remove("GPT-J")
ENCODED = {"T5", "BART"}
"""Models whose inputs are not only token ids."""


# Whole models in the interpreter.
pytestmark = pytest.mark.scenario


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return count_captures(monkeypatch)


@pytest.mark.kernels
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded on the left"])
def test_graphs_generate_the_same_tokens(device: Device, padded: bool) -> None:
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    prompt, mask = random_ids(2, 6), torch.ones(2, 6, dtype=torch.long, device=DEVICE)
    mask[1, : 3 if padded else 0] = 0
    options = {"max_new_tokens": 7, "do_sample": False, "attention_mask": mask}
    with eager_cache(model, RECIPE) as expected:
        tokens = model.generate(prompt, past_key_values=expected, **options)
    with new_cache(model, device) as found:
        assert torch.equal(model.generate(prompt, past_key_values=found, **options), tokens)
    # Of the 6 steps after the prompt, some run as they are; a capture is tried at once.
    assert (device.captured, device.replayed) == (1, 6 - EAGER_STEPS)
    caches_match(found, expected)


@pytest.mark.kernels
def test_operations_between_steps_do_not_break_replays(device: Device) -> None:
    """The operations are full windows, longer passes, dropped tokens, a change of rows, and a copy of the cache."""
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    logits: list[list[torch.Tensor]] = []
    caches = [eager_cache(model, "kv=group:b=8,g=8;tail=8"), new_cache(model, device, "kv=group:b=8,g=8;tail=8")]
    for cache in caches:
        device.cache, found = cache, []
        for step, count in enumerate([5, *[1] * 9, 3, *[1] * 3]):
            found.append(model(random_ids(2, count, step), past_key_values=cache).logits)
        cache.crop(-2)
        found += [model(random_ids(2, 1, step), past_key_values=cache).logits for step in range(3)]
        cache.batch_select_indices(torch.tensor([1, 0]))
        found += [model(random_ids(2, 1, step), past_key_values=cache).logits for step in range(3)]
        logits.append(found)
    assert all(torch.equal(one, other) for one, other in zip(*logits, strict=True))
    caches_match(caches[1], caches[0])
    assert device.captured >= 3
    assert device.replayed > 9


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_pages_grow_and_windows_slide_between_steps(name: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side, "MIN_WINDOWS", 2)
    sizes = ONE_LAYER | ({"sliding_window": 12} if name == "Mistral" else {})
    model, logits = model_of(name, **sizes).to(DEVICE), []
    counts = [5, *[1] * (28 if name == "Mistral" else 20)]
    caches = [eager_cache(model, "kv=group:b=8,g=8;tail=8"), new_cache(model, device, "kv=group:b=8,g=8;tail=8")]
    for cache in caches:
        device.cache = cache
        logits.append([model(random_ids(1, count, step), past_key_values=cache).logits for step, count in enumerate(counts)])
    assert all(torch.equal(one, other) for one, other in zip(*logits, strict=True))
    caches_match(caches[1], caches[0])
    assert (caches[1].live.skipped_tokens(0) > 0) == (name == "Mistral")
    assert device.captured >= 2
    assert device.replayed > 10


@pytest.mark.kernels
def test_caches_of_one_model_take_turns(device: Device) -> None:
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    plain, replayed = ([make() for _ in "ab"] for make in (lambda: eager_cache(model, RECIPE), lambda: new_cache(model, device)))
    for step, count in enumerate([4, *[1] * 5]):
        for number in (0, 1):
            given = random_ids(1, count + number * (step == 0), 2 * step + number)
            device.cache = replayed[number]
            found, expected = (model(given, past_key_values=caches[number]).logits for caches in (replayed, plain))
            assert torch.equal(found, expected)
    assert device.captured == 2
    [caches_match(*pair) for pair in zip(replayed, plain, strict=True)]


@pytest.mark.kernels
def test_steps_in_other_modes_have_other_graphs(device: Device) -> None:
    """Inference mode has a graph of its own. Under autocast and with gradients, nothing is captured."""
    model, logits = model_of("Llama", **ONE_LAYER).to(DEVICE), []
    modes: list[Callable[[], Any]] = [torch.no_grad, torch.inference_mode, torch.no_grad, torch.enable_grad]
    modes.append(lambda: torch.autocast(torch.device(DEVICE).type, torch.bfloat16))
    for cache in (eager_cache(model, RECIPE), new_cache(model, device)):
        found = []
        for number, mode in enumerate(modes):
            with mode():
                found += [model(random_ids(1, 1, 4 * number + step), past_key_values=cache).logits.detach() for step in range(4)]
        logits.append(found)
    assert all(torch.equal(one, other) for one, other in zip(*logits, strict=True))
    assert device.captured == 3


@pytest.mark.kernels
def test_padding_may_grow_between_steps(device: Device) -> None:
    """If padding hides tokens other than the first ones, no graph is used."""
    model, logits = model_of("Llama", **ONE_LAYER).to(DEVICE), []
    mask = torch.ones(2, 6, dtype=torch.long, device=DEVICE)
    mask[1, :2] = 0
    for cache in (eager_cache(model, RECIPE), new_cache(model, device)):
        found = [model(random_ids(2, 6), past_key_values=cache, attention_mask=mask).logits]
        for step in range(1, 8):
            now = torch.nn.functional.pad(mask, (0, step), value=1)
            now[0, : step // 3] = now[1, 3 : 3 + step // 6] = 0
            positions = now.cumsum(1)[:, -1:] - 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", KvpackWarning)
                step_logits = model(random_ids(2, 1, step), past_key_values=cache, attention_mask=now, position_ids=positions).logits
            found.append(step_logits)
        logits.append(found)
    assert all(torch.equal(one, other) for one, other in zip(*logits, strict=True))
    assert (device.captured, device.replayed) == (1, 4)


@pytest.mark.kernels
def test_a_step_that_reads_the_length_is_not_captured(device: Device) -> None:
    """A value that is read on the host during capture would be a constant in every replay."""
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    base, own = model.model, type(model.model).forward

    def forward(**kwargs: Any) -> Any:
        positions = torch.arange(kwargs["input_ids"].shape[1], device=DEVICE)[None]
        kwargs["position_ids"] = positions + cache_names.cache_in(kwargs).get_seq_length()
        return own(base, **kwargs)

    base.forward = forward
    with eager_cache(model, RECIPE) as cache:
        expected = [model(random_ids(1, count, step), past_key_values=cache).logits for step, count in enumerate([4, 1, 1, 1, 1])]
    refused = "run without CUDA graphs: a captured step gives different results"
    with new_cache(model, device) as cache, pytest.warns(KvpackWarning, match=refused):
        found = [model(random_ids(1, count, step), past_key_values=cache).logits for step, count in enumerate([4, 1, 1, 1, 1])]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert device.captured == 1


LENGTHS: dict[str, Callable[[Any], bool]] = {
    "more": lambda seen: seen > 7,
    "as many or more": lambda seen: seen + 1 >= 8,
    "fewer": lambda seen: seen < 7,
    "as many or fewer": lambda seen: 1 + seen <= 8,
    "as many": lambda seen: seen - 1 == 6,
    "others": lambda seen: seen != 7,
}


@pytest.mark.parametrize("compared", LENGTHS.values(), ids=LENGTHS)
def test_a_comparison_that_depends_on_the_length_is_refused(compared: Callable[[Any], bool]) -> None:
    with pytest.raises(InvalidParameter, match="compares the cache length"):
        compared(CapturedLength(3))
    assert compared(CapturedLength(20)) == compared(20)


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["more", "nothing"])
def test_a_step_that_compares_the_length_is_not_captured(name: str, device: Device) -> None:
    """One comparison changes its result at the eighth token, and another never does."""
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    mlp, caches = model.model.layers[0].mlp, []
    own, compared = mlp.forward, LENGTHS.get(name, lambda seen: seen > 0 and bool(seen) and seen != 0)
    mlp.forward = lambda x: own(x) * (2 if compared(caches[-1].get_seq_length()) else 1)
    logits = []
    for graphs_too in (False, True):
        caches.append(new_cache(model, device) if graphs_too else eager_cache(model, RECIPE))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            logits.append([model(random_ids(1, 1, step), past_key_values=caches[-1]).logits for step in range(9)])
    assert all(torch.equal(one, other) for one, other in zip(*logits, strict=True))
    assert any("compares the cache length" in str(one.message) for one in told) == (name != "nothing")
    assert (device.replayed > 0) == (name == "nothing")


@pytest.mark.kernels
@pytest.mark.parametrize("used", [True, False])
def test_random_numbers_equal_those_without_graphs(used: bool, device: Device) -> None:
    """A replay would draw other random numbers."""
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    mlp = model.model.layers[0].mlp
    own, logits = mlp.forward, []
    mlp.forward = lambda x: own(x) + torch.rand_like(x) * used
    for graphs_too in (False, True):
        cache = new_cache(model, device) if graphs_too else eager_cache(model, RECIPE)
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = [model(random_ids(1, 1, step), past_key_values=cache).logits for step in range(5)]
        logits.append([*found, torch.rand(3, device=DEVICE)])
    assert all(torch.equal(one, other) for one, other in zip(*logits, strict=True))
    assert any("a captured step gives different results" in str(one.message) for one in told) == used
    assert device.captured == 1


@pytest.mark.kernels
def test_a_graph_is_not_used_below_its_minimum_number_of_tokens(device: Device) -> None:
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    mlp, caches = model.model.layers[0].mlp, []
    own = mlp.forward
    mlp.forward = lambda x: own(x) * (2 if caches[-1].get_seq_length() > 4 else 1)
    logits = []
    for graphs_too in (False, True):
        caches.append(new_cache(model, device) if graphs_too else eager_cache(model, RECIPE))
        found = [model(random_ids(1, count, step), past_key_values=caches[-1]).logits for step, count in enumerate([10, 1, 1, 1, 1])]
        caches[-1].crop(-11)
        logits.append([*found, model(random_ids(1, 1), past_key_values=caches[-1]).logits])
    assert device.replayed == 3
    assert all(torch.equal(one, other) for one, other in zip(*logits, strict=True))


@pytest.mark.kernels
@pytest.mark.parametrize("what", ["hooks", "errors"])
def test_a_model_that_cannot_be_captured_runs_normally(device: Device, what: str) -> None:
    model = model_of("Llama", **SIZES).to(DEVICE)
    calls = []
    if what == "hooks":
        model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    else:
        own = model.model.layers[1].forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if cache_names.cache_in(kwargs).graphs.captured is not None:
                raise RuntimeError("not in a capture")
            return own(*args, **kwargs)

        model.model.layers[1].forward = forward
    expected = {"hooks": "model.layers.0 has forward hooks", "errors": "not in a capture"}[what]
    cache = new_cache(model, device)
    with pytest.warns(KvpackWarning, match=f"run without CUDA graphs: {expected}"):
        [model(random_ids(1, 1, step), past_key_values=cache) for step in range(5)]
    assert cache.packed.tokens == 5
    assert cache.live.stored_tokens(0) == cache.live.stored_tokens(1) == 5
    assert device.replayed == 0
    assert len(calls) == (5 if what == "hooks" else 0)


def _other_values(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, x.numel(), device=x.device, dtype=x.dtype).view(x.shape)


def _move_a_weight(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = _other_values(weight)


def _replace_a_weight(model: Any) -> None:
    own = model.model.layers[0].self_attn.o_proj
    own.weight = torch.nn.Parameter(_other_values(own.weight))


def _replace_a_module(model: Any) -> None:
    own = model.model.layers[0].mlp
    own.down_proj = torch.nn.Linear(64, 64, bias=False, device=own.down_proj.weight.device)


def _replace_a_buffer(model: Any) -> None:
    own = model.model.rotary_emb
    own.inv_freq = own.inv_freq / 2


def _add_a_hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out / 2)


def _add_a_hook_before(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (args[0] / 2,))


def _replace_a_forward(model: Any) -> None:
    model.model.layers[1].mlp.forward = lambda x: x / 2


def _train(model: Any) -> None:
    own = model.model.layers[0].self_attn
    own.training, own.attention_dropout = True, 0.0


def _replace_an_attribute(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.25


def _set_a_setting(model: Any) -> None:
    model.config.use_cache = not model.config.use_cache


CHANGES = {
    "a weight elsewhere": _move_a_weight,
    "another weight": _replace_a_weight,
    "another module": _replace_a_module,
    "another buffer": _replace_a_buffer,
    "a hook": _add_a_hook,
    "a hook before": _add_a_hook_before,
    "another forward": _replace_a_forward,
    "training": _train,
    "an attribute": _replace_an_attribute,
    "a setting": _set_a_setting,
    "another dtype": lambda model: model.to(torch.bfloat16).to(torch.float32),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_a_model_is_noticed(name: str) -> None:
    model = model_of("Llama", **SIZES)
    snapshot = ModelSnapshot(model)
    model.lm_head.weight.mul_(2)
    assert snapshot.unchanged()
    CHANGES[name](model)
    assert not snapshot.unchanged()


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["a weight elsewhere"] if INTERPRETED else CHANGES)
def test_a_model_that_changed_between_steps_is_not_replayed(name: str, device: Device) -> None:
    """Values that change in place keep their addresses, so addresses do not reveal the change."""
    found = []
    for replays in (False, True):
        model = model_of("Llama", **SIZES).to(DEVICE)
        cache = new_cache(model, device) if replays else eager_cache(model, RECIPE)
        logits = [model(random_ids(1, count, step), past_key_values=cache).logits for step, count in enumerate([4, 1, 1, 1])]
        model.lm_head.weight.mul_(2)
        logits.append(model(random_ids(1, 1, 4), past_key_values=cache).logits)
        replayed = device.replayed
        torch.manual_seed(1)
        CHANGES[name](model)
        logits.append(model(random_ids(1, 1, 5), past_key_values=cache).logits)
        assert device.replayed == replayed
        found.append(logits)
    assert replayed == 3
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_may_be_switched_between_steps(device: Device) -> None:
    peft = pytest.importorskip("peft")
    changes: list[Callable[[Any], object]] = [
        lambda model: model.set_adapter("other"),
        lambda model: model.base_model.disable_adapter_layers(),
        lambda model: model.base_model.enable_adapter_layers(),
        lambda model: model.merge_adapter(),
    ]
    logits = []
    for replays in (False, True):
        torch.manual_seed(0)
        options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
        model = peft.get_peft_model(model_of("Llama", **ONE_LAYER).to(DEVICE), peft.LoraConfig(**options))
        model.add_adapter("other", peft.LoraConfig(**options))
        cache = new_cache(model.eval(), device) if replays else eager_cache(model.eval(), RECIPE)
        found = [model(input_ids=random_ids(1, 4), past_key_values=cache).logits]
        for change in (lambda _: None, *changes):
            change(model)
            before = device.replayed
            found += [model(input_ids=random_ids(1, 1, len(found) + step), past_key_values=cache).logits for step in range(3)]
            assert device.replayed == before + 2 * replays
        logits.append(found)
    assert all(torch.equal(one, other) for one, other in zip(*logits, strict=True))
    assert device.captured == 1 + len(changes)


@pytest.mark.kernels
def test_hooks_on_all_modules_are_called(device: Device) -> None:
    model, calls = model_of("Llama", **ONE_LAYER).to(DEVICE), []
    cache = new_cache(model, device)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(module))
    try:
        with pytest.warns(KvpackWarning, match="run without CUDA graphs: every module has forward hooks"):
            [model(random_ids(1, 1, step), past_key_values=cache) for step in range(5)]
    finally:
        handle.remove()
    assert calls.count(model.model.layers[0]) == 5


@pytest.mark.kernels
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_model_runs_the_step_if_a_replay_fails(error: type[BaseException], device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    expected = eager_cache(model, RECIPE)
    logits = [model(random_ids(1, 1, step), past_key_values=expected).logits for step in range(5)]
    cache, capture = new_cache(model, device), graphs.capture

    def failing(call: Callable[[], Any], where: torch.device) -> tuple[Callable[[], None], Any]:
        replay, result = capture(call, where)

        def replayed() -> None:
            replay()
            for layer in cache.live._layers:
                layer.sides["k"].tail[:, :, 1] = 7
            raise error("no memory")

        return replayed, result

    monkeypatch.setattr(graphs, "capture", failing)
    found = [model(random_ids(1, 1), past_key_values=cache).logits]
    if error is RuntimeError:
        with pytest.warns(KvpackWarning, match="run without CUDA graphs: no memory"):
            found.append(model(random_ids(1, 1, 1), past_key_values=cache).logits)
    else:
        with pytest.raises(KeyboardInterrupt):
            model(random_ids(1, 1, 1), past_key_values=cache)
        # What an interrupted pass added is the caller's to keep.
        cache.crop(0)
        found.append(logits[1])
        monkeypatch.setattr(graphs, "capture", capture)
    found += [model(random_ids(1, 1, step), past_key_values=cache).logits for step in range(2, 5)]
    assert all(torch.equal(one, other) for one, other in zip(found, logits, strict=True))
    caches_match(cache, expected)


@pytest.mark.cuda
def test_threads_capture_separate_graphs(device: Device) -> None:
    models = [model_of("Llama", **SIZES).to(DEVICE) for _ in range(4)]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = [
        model.generate(random_ids(1, 8, seed), past_key_values=eager_cache(model, RECIPE), **options) for seed, model in enumerate(models)
    ]

    def generated(seed: int) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = models[seed].generate(random_ids(1, 8, seed), past_key_values=new_cache(models[seed], device), **options)
        return found

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(generated, range(4)))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert device.captured == 4


@pytest.mark.kernels
def test_only_decode_steps_are_captured(device: Device) -> None:
    """Passes with gradients, hidden states, tokens hidden on the right, or embeddings are not captured."""
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    hidden = torch.ones(1, 5, dtype=torch.long, device=DEVICE)
    hidden[0, 2] = 0
    with new_cache(model, device) as cache:
        model(random_ids(1, 4), past_key_values=cache)
        for _ in range(4):
            model(random_ids(1, 1), past_key_values=cache, output_hidden_states=True)
        with pytest.warns(KvpackWarning, match="the attention mask hides"):
            model(random_ids(1, 1), past_key_values=cache, attention_mask=torch.nn.functional.pad(hidden, (0, 4), value=1))
        for _ in range(4):
            model(inputs_embeds=model.get_input_embeddings()(random_ids(1, 1)), past_key_values=cache)
        with torch.enable_grad():
            for _ in range(4):
                model(random_ids(1, 1), past_key_values=cache)
    assert (device.captured, device.replayed) == (0, 0)


@pytest.mark.kernels
def test_the_model_is_left_unchanged(device: Device) -> None:
    """The model is restored by ``release`` and when its last cache is deleted. Other caches are unaffected until then."""
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    before = dict(vars(model))
    cache, plain = new_cache(model, device), eager_cache(model, RECIPE)
    for step in range(4):
        model(random_ids(1, 1, step), past_key_values=plain)
    assert device.captured == 0
    for step in range(4):
        model(random_ids(1, 1, step), past_key_values=cache)
    assert device.captured == 1
    caches_match(cache, plain)
    kept = weakref.ref(cache)
    del plain
    cache.release()
    assert vars(model).keys() == before.keys()
    device.cache = cache = None  # type: ignore[assignment]
    gc.collect()
    assert kept() is None


@pytest.mark.kernels
def test_a_graph_keeps_no_weights(device: Device) -> None:
    model = model_of("Llama", **ONE_LAYER).to(DEVICE)
    weight = weakref.ref(model.lm_head.weight)
    cache = new_cache(model, device)
    for step in range(4):
        model(random_ids(1, 1, step), past_key_values=cache)
    drop_replay(cache)
    del model
    gc.collect()
    assert weight() is None


@pytest.mark.cuda
def test_a_graph_ends_with_its_cache(device: Device) -> None:
    """The graph is freed at once, not by garbage collection, which may run while another graph is captured."""
    model = model_of("Llama", **SIZES).to(DEVICE)
    cache = new_cache(model, device)
    for step in range(4):
        model(random_ids(1, 1, step), past_key_values=cache)
    assert cache.graphs is not None
    graph = weakref.ref(cache.graphs._graph)
    gc.collect()
    gc.disable()
    try:
        device.cache = cache = None  # type: ignore[assignment]
        assert graph() is None
    finally:
        gc.enable()


def test_a_failing_capture_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stubs replace the functions of PyTorch that need a device."""
    calls: list[Any] = []

    class Graph:
        """A stub of a graph whose first capture fails, and whose next one succeeds."""

        def capture_begin(self, pool: Any = None, **options: Any) -> None:
            calls.append(("begin", pool))

        def capture_end(self) -> None:
            calls.append("end")
            if calls.count("end") == 1:
                raise RuntimeError("operation failed due to a previous error during capture")

    class Stream:
        def wait_stream(self, other: Any) -> None:
            """Do nothing, because no work is pending."""

    def ended(index: int, pool: Any) -> None:
        calls.append((index, pool))
        raise RuntimeError("not currently recording to mempool_id")

    for name, found in (("CUDAGraph", Graph), ("graph_pool_handle", lambda: (0, 3)), ("current_stream", lambda _: Stream())):
        monkeypatch.setattr(torch.cuda, name, found)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", ended, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda shape, **_: torch.ones(shape))
    monkeypatch.setattr(graphs, "_get_capture_stream", lambda _: Stream())
    with pytest.raises(RuntimeError, match="operation failed"):
        graphs.capture(lambda: calls.append(gc.isenabled()), torch.device("cuda", 1))
    # Garbage is not collected meanwhile: the end of a graph among it would end the capture.
    assert calls == [("begin", (0, 3)), False, "end", (1, (0, 3)), ("begin", None), "end"]
    assert gc.isenabled()


def test_there_are_no_graphs_without_a_device() -> None:
    model = model_of("Llama")
    with KvpackCache(model, "octopus-4", graphs=True) as cache:
        for step in range(5):
            model(torch.tensor([[step]]), past_key_values=cache)
        assert cache.packed.tokens == 5


@pytest.mark.cuda
@pytest.mark.parametrize("name", [architecture.name for architecture in ZOO if architecture.name not in ENCODED])
def test_models_of_the_zoo_generate_the_same_tokens(name: str, device: Device) -> None:
    model = model_of(name).to("cuda")
    # MPT's configuration leaves caches out.
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    with warnings.catch_warnings():
        # What decodes for each call, or gets no graph, says so.
        warnings.simplefilter("ignore", KvpackWarning)
        expected = model.generate(random_ids(2, 20), past_key_values=eager_cache(model, "raw"), **options)
        found = model.generate(random_ids(2, 20), past_key_values=new_cache(model, device, "raw"), **options)
    assert torch.equal(found, expected)
    assert device.replayed == (0 if name in WITHOUT_GRAPHS else 39 - EAGER_STEPS)


@pytest.mark.cuda
def test_a_step_that_waits_for_the_device_is_not_captured(device: Device) -> None:
    model = model_of("Llama", **SIZES).to("cuda")
    mlp = model.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x) if x.abs().sum().item() >= 0 else x
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(random_ids(2, 20), past_key_values=eager_cache(model, "raw"), **options)
    with pytest.warns(KvpackWarning, match="decode steps of LlamaForCausalLM run without CUDA graphs"):
        found = model.generate(random_ids(2, 20), past_key_values=new_cache(model, device, "raw"), **options)
    assert torch.equal(found, expected)
    assert device.replayed == 0
    # Neither the allocator nor the generator is in a capture.
    torch.cuda.empty_cache()
    torch.rand(1, device="cuda")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Falcon-H1", "it keeps states"), ("Qwen2-VL", "it has multi-dimensional rotary positions"), ("Bloom", "keys and values are decoded")],
)
def test_a_cache_without_graphs_says_why(name: str, reason: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        KvpackCache(model_of(name), "raw", graphs=True)
    assert any(f"run without CUDA graphs: {reason}" in str(one.message) for one in told)
