"""The inputs of forward passes are recorded with a cache: token ids, and the names of other inputs."""

from __future__ import annotations

import copy
import gc
import warnings
from dataclasses import replace
from typing import Any

import numpy
import peft
import pytest
import torch
from transformers import DynamicCache

from kvpack.cache.cache import Cache
from kvpack.cache.packing import pack
from kvpack.file.inputs import Inputs
from kvpack.formats.errors import InvalidParameter
from kvpack.integrations.transformers import KvpackCache, recording
from kvpack.integrations.transformers.record import CHANGED
from support.zoo_models import ZOO

FP32 = "kv=raw:dtype=fp32"
PROMPT = torch.arange(3, 23)[None]
FOLLOWING = torch.tensor([[40, 41, 42, 43]])


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def model_of(name: str = "Llama") -> Any:
    model = next(architecture for architecture in ZOO if architecture.name == name).model()
    model.set_attn_implementation("kvpack")
    return model


def recorded(model: Any, ids: torch.Tensor = PROMPT) -> Cache:
    with recording(model) as record:
        past = model(ids).past_key_values
    return pack(past, FP32, inputs=record.inputs(past))


def ids_of(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().numpy().astype("<u4").tobytes()


def hooks_of(model: Any) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def test_ids_of_all_passes_are_concatenated() -> None:
    model = model_of()
    cache = KvpackCache.of(recorded(model), model)
    for part in FOLLOWING.split([2, 1, 1], 1):
        model(part, past_key_values=cache)
    assert cache.packed.inputs == Inputs(ids_of(torch.cat([PROMPT, FOLLOWING], 1)))
    cache.crop(-3)
    assert cache.packed.inputs == Inputs(ids_of(torch.cat([PROMPT, FOLLOWING[:, :1]], 1)))
    cache.reset()
    assert cache.packed.inputs == Inputs()


@pytest.mark.scenario
@pytest.mark.parametrize("name", ["Llama", "GPT-NeoX", "OPT", "Falcon", "Qwen2-VL", "Mistral", "Gemma-3"])
def test_generate_is_recorded(name: str) -> None:
    model = model_of(name) if name != "Falcon" else next(one for one in ZOO if one.name == name).model()
    cache = KvpackCache.of(recorded(model), model, dense=name == "Falcon")
    ids = model.generate(torch.cat([PROMPT, FOLLOWING], 1), past_key_values=cache, max_new_tokens=70, do_sample=False)
    assert cache.packed.inputs == Inputs(ids_of(ids[:, :-1]))


def test_passes_outside_the_model_are_reported() -> None:
    model = model_of()
    cache = KvpackCache.of(recorded(model))
    assert cache.packed.inputs == Inputs(ids_of(PROMPT))
    model(FOLLOWING, past_key_values=cache)
    found = cache.packed.inputs
    assert found is not None
    assert found.token_ids == ids_of(PROMPT)
    assert found.undetermined == ("tokens 20 to 23 came from forward passes that were not recorded: give KvpackCache the model",)
    assert found.starts == (20,)
    assert cache.packed[:, :20].inputs == Inputs(ids_of(PROMPT))


def test_a_cache_without_ids_can_be_continued_if_the_caller_wraps_it() -> None:
    model = model_of()
    packed = pack(model(PROMPT).past_key_values, FP32)
    cache = KvpackCache.of(packed, model)
    assert cache.packed.inputs is None
    model(FOLLOWING, past_key_values=cache)
    assert cache.packed.inputs == Inputs()


def embedded(model: Any, cache: Any) -> None:
    model(inputs_embeds=model.get_input_embeddings()(FOLLOWING), past_key_values=cache)


def shifted(model: Any, cache: Any) -> None:
    model(FOLLOWING, position_ids=torch.arange(25, 29)[None], past_key_values=cache)


def shifted_inside(model: Any, cache: Any) -> None:
    model.model(FOLLOWING, position_ids=torch.arange(25, 29)[None], past_key_values=cache)


def under_autocast(model: Any, cache: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(FOLLOWING, past_key_values=cache)


def training(model: Any, cache: Any) -> None:
    model.train()
    model(FOLLOWING, past_key_values=cache)
    model.eval()


def with_unknown_argument(model: Any, cache: Any) -> None:
    model(FOLLOWING, past_key_values=cache, token_type_ids=torch.zeros(1, 4, dtype=torch.int64))


def with_two_unknown_arguments(model: Any, cache: Any) -> None:
    model(FOLLOWING, past_key_values=cache, pixel_values=torch.zeros(1), image_grid_thw=torch.ones(1, 3))


def one_by_one(model: Any, cache: Any) -> None:
    for part in FOLLOWING.split(1, 1):
        with torch.autocast("cpu", torch.bfloat16):
            model(part, past_key_values=cache)


UNDETERMINED = [
    (embedded, "came from embeddings, not from token ids"),
    (shifted, "have positions other than those that follow the cache"),
    (shifted_inside, "have positions other than those that follow the cache"),
    (under_autocast, "were computed under autocast to bfloat16"),
    (one_by_one, "were computed under autocast to bfloat16"),
    (training, "were computed in training mode"),
    (with_unknown_argument, "depend on the argument token_type_ids"),
    (with_two_unknown_arguments, "depend on the arguments image_grid_thw, pixel_values"),
]


@pytest.mark.parametrize(("run", "why"), UNDETERMINED)
def test_undetermined_inputs_are_named(run: Any, why: str) -> None:
    model = model_of()
    cache = KvpackCache.of(recorded(model), model)
    run(model, cache)
    found = cache.packed.inputs
    assert found is not None
    assert found.undetermined == (f"tokens 20 to 23 {why}",)
    assert found.starts == (20,)


@pytest.mark.parametrize(("run", "why"), UNDETERMINED)
def test_undetermined_inputs_are_named_for_the_prefill_of_a_plain_cache(run: Any, why: str) -> None:
    model = model_of()
    past = DynamicCache(config=model.config)
    with recording(model) as record:
        model(PROMPT, past_key_values=past)
        run(model, past)
    assert record.inputs(past).undetermined == (f"tokens 20 to 23 {why}",)
    assert record.inputs(past).token_ids[:80] == ids_of(PROMPT)
    past.crop(-4)
    assert record.inputs(past) == Inputs(ids_of(PROMPT))


def test_a_mask_that_hides_tokens_is_named() -> None:
    model = model_of()
    past = DynamicCache(config=model.config)
    mask = torch.ones_like(PROMPT)
    with recording(model) as record:
        model(PROMPT, attention_mask=mask, past_key_values=past)
    assert record.inputs(past) == Inputs(ids_of(PROMPT))
    mask[0, 0] = 0
    past = DynamicCache(config=model.config)
    with recording(model) as record:
        model(PROMPT, attention_mask=mask, past_key_values=past)
    assert record.inputs(past).undetermined == ("tokens 0 to 19 were computed with an attention mask that hides tokens",)


def test_plain_passes_outside_the_recording_are_reported() -> None:
    model = model_of()
    past = DynamicCache(config=model.config)
    model(PROMPT, past_key_values=past)
    with recording(model) as record:
        model(FOLLOWING, past_key_values=past)
    model(FOLLOWING, past_key_values=past)
    found = record.inputs(past)
    assert found.starts == (0, 24)
    assert all("were not recorded" in text for text in found.undetermined)
    assert hooks_of(model) == 0
    with pytest.raises(InvalidParameter, match="no recorded forward pass used this DynamicCache"):
        record.inputs(DynamicCache())


def test_rows_with_different_ids_are_reported_and_selecting_one_makes_them_known() -> None:
    model = model_of()
    cache = KvpackCache.of(recorded(model), model)
    cache.batch_repeat_interleave(2)
    model(torch.tensor([[40, 41, 42, 43], [40, 41, 50, 51]]), past_key_values=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    found = cache.packed.inputs
    assert found is not None
    assert found.undetermined == ("tokens 22 to 23 differ from row to row of the batch",)
    assert found.token_ids == ids_of(torch.cat([PROMPT, FOLLOWING[:, :2]], 1))
    cache.batch_select_indices(torch.tensor([0]))
    assert cache.packed.inputs == Inputs(ids_of(torch.cat([PROMPT, torch.tensor([[40, 41, 50, 51]])], 1)))


def test_passes_of_any_number_are_recorded() -> None:
    model = model_of()
    cache = KvpackCache.of(recorded(model), model)
    ids = torch.arange(90)[None] % 60
    for part in ids.split(1, 1):
        model(part, past_key_values=cache)
    assert cache.packed.inputs == Inputs(ids_of(torch.cat([PROMPT, ids], 1)))


def test_a_copy_is_recorded_independently() -> None:
    model = model_of()
    cache = KvpackCache.of(recorded(model), model)
    model(FOLLOWING, past_key_values=cache)
    other = copy.deepcopy(cache)
    model(FOLLOWING[:, :1], past_key_values=other)
    assert cache.packed.inputs == Inputs(ids_of(torch.cat([PROMPT, FOLLOWING], 1)))
    assert other.packed.inputs == Inputs(ids_of(torch.cat([PROMPT, FOLLOWING, FOLLOWING[:, :1]], 1)))


def test_a_copy_of_a_model_is_not_recorded() -> None:
    model = model_of()
    expected = model.generate(PROMPT, do_sample=False, max_new_tokens=4, pad_token_id=0)
    cache = KvpackCache(model, "raw")
    copied = copy.deepcopy(model)
    del model, cache
    gc.collect()
    for own in (None, KvpackCache(copied, "raw")):
        assert torch.equal(copied.generate(PROMPT, past_key_values=own, do_sample=False, max_new_tokens=4, pad_token_id=0), expected)
    with pytest.raises(InvalidParameter, match="token 0 of row 0 has id"):
        copied.generate(expected + 1, past_key_values=own, max_new_tokens=4)


def test_another_model_is_refused() -> None:
    """The other model has the same shapes, and its attention accepts packed layers."""
    model, other = model_of(), model_of()
    cache, own = KvpackCache(model, "raw"), KvpackCache(other, "raw")
    model(PROMPT, past_key_values=cache)
    for wrong in (other, other.model, copy.deepcopy(other)):
        with pytest.raises(InvalidParameter, match="the cache was made for a different model than this Llama"):
            wrong(FOLLOWING, past_key_values=cache)
    assert cache.get_seq_length() == PROMPT.shape[1]
    # A part of the model, and a cache of that part beside one of the whole.
    model.model(FOLLOWING, past_key_values=cache)
    other(PROMPT, past_key_values=KvpackCache(other.model, "raw"))
    other(PROMPT, past_key_values=own)


def test_generate_accepts_embeddings_with_a_cache() -> None:
    model = model_of()
    options = {"inputs_embeds": model.get_input_embeddings()(PROMPT), "do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
    expected = model.generate(**options)
    with KvpackCache(model, "raw") as cache:
        assert torch.equal(model.generate(**options), expected)
        assert torch.equal(model.generate(past_key_values=cache, **options), expected)
        inputs = cache.packed.inputs
    assert inputs is not None
    assert inputs.starts[0] == 0


def test_hooks_are_removed_with_the_last_cache_of_a_model() -> None:
    model = model_of()
    first, second = KvpackCache.of(recorded(model), model), KvpackCache.of(recorded(model), model)
    hooks = hooks_of(model)
    assert hooks == 4
    assert "prepare_inputs_for_generation" in vars(model)
    first.release()
    gc.collect()
    assert hooks_of(model) == hooks
    model(FOLLOWING, past_key_values=second)
    assert second.packed.inputs == Inputs(ids_of(torch.cat([PROMPT, FOLLOWING], 1)))
    del second
    gc.collect()
    assert hooks_of(model) == 0
    assert "prepare_inputs_for_generation" not in vars(model)


def test_passes_after_a_release_are_not_recorded() -> None:
    model = model_of()
    cache = KvpackCache.of(recorded(model), model)
    cache.release()
    model(FOLLOWING, past_key_values=cache)
    found = cache.packed.inputs
    assert found is not None
    assert "were not recorded" in found.undetermined[0]


def test_hooks_keep_neither_caches_nor_models_alive() -> None:
    import weakref

    model = model_of()
    cache = KvpackCache.of(recorded(model), model)
    model(FOLLOWING, past_key_values=cache)
    seen = weakref.ref(cache), weakref.ref(model)
    cache.release()
    del cache
    assert seen[0]() is None
    del model
    gc.collect()
    assert seen[1]() is None


class Wrapper(torch.nn.Module):
    """A wrapper whose forward calls the forward of the inner model directly, as PEFT's does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model
        self.config = model.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)


@pytest.mark.parametrize("given", ["wrapper", "inner"])
def test_a_wrapper_that_calls_the_inner_forward_is_recorded_once(given: str) -> None:
    inner = model_of()
    wrapper = Wrapper(inner)
    cache = KvpackCache.of(recorded(inner), wrapper if given == "wrapper" else inner)
    wrapper(FOLLOWING, past_key_values=cache)
    assert cache.packed.inputs == Inputs(ids_of(torch.cat([PROMPT, FOLLOWING], 1)))
    assert KvpackCache(wrapper, FP32).packed.model == KvpackCache(inner, FP32).packed.model != {}


def test_ids_that_contradict_the_cache_are_refused() -> None:
    model = model_of()
    packed = recorded(model)
    other = PROMPT.clone()
    other[0, 7] = 60
    with pytest.raises(InvalidParameter, match="token 7 of row 0 has id 60, but the cache was computed from id 10"):
        model.generate(torch.cat([other, FOLLOWING], 1), past_key_values=KvpackCache.of(packed, model), max_new_tokens=2)
    with pytest.raises(InvalidParameter, match="got 20 token ids, but the cache holds 20: pass those 20 ids followed by at least one"):
        model.generate(PROMPT, past_key_values=KvpackCache.of(packed, model), max_new_tokens=2)


def test_ids_are_little_endian_words() -> None:
    inputs = recorded(model_of(), torch.tensor([[1, 2, 63]])).inputs
    assert inputs is not None
    assert numpy.frombuffer(inputs.token_ids, "<u4").tolist() == [1, 2, 63]


def with_adapters() -> Any:
    """Return a model with two LoRA adapters: "default", which is active, and "b"."""
    torch.manual_seed(0)
    settings = peft.LoraConfig(target_modules=["k_proj", "v_proj"], r=2, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.get_peft_model(model_of(), settings).eval()
    model.add_adapter("b", settings)
    return model


@pytest.mark.parametrize(
    "change", [lambda model: model.set_adapter("b"), lambda model: model.merge_adapter(), lambda model: model.to(torch.bfloat16)]
)
def test_a_cache_names_the_model_of_its_first_token(change: Any) -> None:
    """The weights may have changed since the cache was created, so it names the model as of its first token."""
    model = with_adapters()
    cache = KvpackCache(model, FP32)
    change(model)
    model(PROMPT, past_key_values=cache)
    assert cache.packed.model == KvpackCache(model, FP32).packed.model != KvpackCache(with_adapters(), FP32).packed.model
    assert copy.deepcopy(cache).packed.model == cache.packed.model
    model.unload()
    cache.reset()
    model(PROMPT, past_key_values=cache)
    assert cache.packed.model["adapter"] == "disabled"


@pytest.mark.parametrize("loaded", [False, True], ids=["its own", "loaded"])
def test_adapters_that_were_switched_between_passes_are_named(loaded: bool) -> None:
    model = with_adapters()
    cache = KvpackCache(model, FP32)
    model(PROMPT, past_key_values=cache)
    if loaded:
        cache = KvpackCache.of(cache.packed[:, :19], model)
        model(PROMPT[:, 19:], past_key_values=cache)
    model.set_adapter("b")
    model(FOLLOWING, past_key_values=cache)
    assert undetermined(cache) == ("tokens 20 to 23 were computed with different adapters from the first token",)
    cache.crop(-len(FOLLOWING[0]))
    model.set_adapter("default")
    model(FOLLOWING, past_key_values=cache)
    assert undetermined(cache) == ()
    cache = KvpackCache.of(cache.packed, model)
    model.set_adapter("b")
    with pytest.raises(
        InvalidParameter, match="the model's adapter changed between the check of the cache and the cache's first forward pass"
    ):
        model(FOLLOWING, past_key_values=cache)
    model.set_adapter("default")
    model(FOLLOWING, past_key_values=cache)


def scale(model: Any, by: float, name: str = "") -> None:
    """Multiply the weights whose names contain ``name`` in place, as an optimizer would."""
    for key, parameter in model.named_parameters():
        if name in key:
            parameter.mul_(by)


@pytest.mark.scenario
@pytest.mark.parametrize("loaded", [False, True], ids=["its own", "loaded"])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model: scale(model, 2), "adapter"),
        (lambda model: scale(model.unload(), 2), "adapter"),
        (lambda model: scale(model, 2, "lora_B"), "adapter"),
        (lambda model: model.to(torch.bfloat16), "dtype"),
    ],
    ids=["all", "unloaded", "adapters", "dtype"],
)
def test_weights_that_changed_between_passes_are_named(change: Any, named: str, tokens: int, loaded: bool) -> None:
    model = with_adapters()
    cache = KvpackCache(model, FP32)
    model(PROMPT, past_key_values=cache)
    if loaded:
        cache = KvpackCache.of(cache.packed[:, :19], model)
        model(PROMPT[:, 19:], past_key_values=cache)
    change(model)
    model(FOLLOWING[:, :tokens], past_key_values=cache)
    last = "token 20" if tokens == 1 else "tokens 20 to 23"
    assert f"{last} were computed after the model's {named} changed" in undetermined(copy.deepcopy(cache))
    assert cache.packed.model == KvpackCache(with_adapters(), FP32).packed.model
    cache.reset()
    model(PROMPT, past_key_values=cache)
    assert undetermined(cache) == ()
    assert cache.packed.model == KvpackCache(model, FP32).packed.model


def test_weights_that_moved_or_changed_back_are_the_same() -> None:
    model = model_of()
    cache = KvpackCache(model, FP32)
    model(PROMPT, past_key_values=cache)
    scale(model, 2)
    model(FOLLOWING, past_key_values=cache)
    assert undetermined(cache) == ("tokens 20 to 23 were computed after the model's weights changed",)
    cache.crop(-len(FOLLOWING[0]))
    scale(model, 0.5)
    model(FOLLOWING, past_key_values=cache)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    model(FOLLOWING, past_key_values=cache)
    assert undetermined(cache) == ()


def test_adapters_of_a_plain_prefill_are_named() -> None:
    model = with_adapters()
    with recording(model) as record:
        past = model(PROMPT).past_key_values
        with model.disable_adapter():
            model(FOLLOWING, past_key_values=past)
    assert record.inputs(past).undetermined == ("tokens 20 to 23 were computed with different adapters from the first token",)


def test_adapters_chosen_by_an_argument_are_named() -> None:
    model = with_adapters()
    cache = KvpackCache(model, FP32)
    model(PROMPT, past_key_values=cache, adapter_names=["b"])
    assert undetermined(cache) == ("tokens 0 to 19 depend on the argument adapter_names",)


def undetermined(cache: Any) -> tuple[str, ...]:
    return tuple(cache.packed.inputs.undetermined)


def _evicted(layer: Any) -> None:
    keep = [0, 1, 2, *range(4, layer.keys.shape[2], 2)]
    layer.keys, layer.values = layer.keys[:, :, keep].contiguous(), layer.values[:, :, keep].contiguous()


def _without_the_first(layer: Any) -> None:
    layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]


def _without_another_token_in_one_head(layer: Any) -> None:
    keep = torch.arange(19).expand(layer.keys.shape[1], -1).clone()
    keep[-1, 7:] += 1
    index = keep[None, :, :, None].expand(layer.keys.shape[0], -1, -1, layer.keys.shape[3])
    layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)


def _with_another_value(layer: Any) -> None:
    layer.keys = layer.keys.clone()
    layer.keys[0, -1, 11, -1] += 1


def _with_another_value_in_place(layer: Any) -> None:
    layer.values[0, 0, 4, 1] *= 2


def _rounded(layer: Any) -> None:
    layer.keys = layer.keys.bfloat16().float()


def _turned(layer: Any) -> None:
    layer.keys, layer.values = layer.keys.flip(2), layer.values.flip(2)


def _with_heads_turned(layer: Any) -> None:
    layer.keys, layer.values = layer.keys.flip(1), layer.values.flip(1)


CHANGES = [
    _evicted,
    _without_the_first,
    _without_another_token_in_one_head,
    _with_another_value,
    _with_another_value_in_place,
    _rounded,
    _turned,
    _with_heads_turned,
]


@pytest.mark.parametrize("layers", [slice(None), slice(1)], ids=["all layers", "the first layer"])
@pytest.mark.parametrize("change", CHANGES)
def test_ids_are_dropped_if_values_were_changed(change: Any, layers: slice) -> None:
    model = model_of()
    with recording(model) as record:
        past = model(PROMPT, use_cache=True).past_key_values
        for layer in past.layers[layers]:
            change(layer)
        inputs = record.inputs(past)
        assert inputs.tokens == 0
        assert inputs.undetermined[0].endswith(CHANGED)
        assert inputs.starts[0] == 0
        held = past.layers[0].keys.shape[2]
        if all(layer.keys.shape[2] == held for layer in past.layers):
            # Nor do ids of later passes follow those of the prompt, and a cache that was changed once is not forgotten.
            model(FOLLOWING, past_key_values=past)
            again = record.inputs(past)
            assert (again.tokens, again.starts[0]) == (0, 0)
            packed = pack(past, FP32, inputs=again)
            with pytest.warns(match="no tokens of the cache are kept for the prompt"):
                assert KvpackCache.of(packed, model, prompt=PROMPT).get_seq_length() == 0
            with pytest.raises(InvalidParameter, match=r"recorded for tokens \[0:"):
                pack(past, FP32, inputs=replace(inputs, count=inputs.count + 5))


@pytest.mark.parametrize("change", [_evicted, _without_the_first, _with_another_value])
def test_ids_are_dropped_if_values_were_changed_between_passes(change: Any) -> None:
    model = model_of()
    with recording(model) as record:
        past = model(PROMPT, use_cache=True).past_key_values
        for layer in past.layers:
            change(layer)
        model(FOLLOWING, past_key_values=past)
    inputs = record.inputs(past)
    assert (inputs.tokens, inputs.starts[0]) == (0, 0)


def test_ids_are_dropped_if_a_hook_drops_values_during_decoding() -> None:
    """Some presses compress the cache only once in several steps."""
    model = model_of()

    def press(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        past = kwargs["past_key_values"]
        if past.get_seq_length() > PROMPT.shape[1] + 2:
            for layer in past.layers:
                _evicted(layer)

    with recording(model) as record:
        past = model(PROMPT, use_cache=True).past_key_values
        handle = model.register_forward_hook(press, with_kwargs=True)
        for token in FOLLOWING.split(1, 1):
            model(token, past_key_values=past)
        handle.remove()
    inputs = record.inputs(past)
    assert (inputs.tokens, inputs.starts[0]) == (0, 0)


ROWS = torch.arange(3, 63).reshape(3, 20)


def test_inputs_are_packed_only_with_the_values_that_they_were_recorded_for() -> None:
    model = model_of()
    with recording(model) as record:
        past = model(ROWS, use_cache=True).past_key_values
    inputs = record.inputs(past)
    pairs = [(layer.keys, layer.values) for layer in past.layers]
    assert pack(pairs, FP32, inputs=inputs).inputs == inputs
    part = [(k[1:2, :, 4:15], v[1:2, :, 4:15]) for k, v in pairs]
    assert pack(part, FP32, start=4, inputs=inputs.select([1], 0).slice(4, 15, 0)).inputs == Inputs(ids_of(ROWS[1, 4:15]))
    assert pack(pairs[1:], FP32, inputs=inputs).inputs == inputs
    for change in (
        lambda k: k.flip(0),
        lambda k: k.roll(1, 2),
        lambda k: k.roll(1, 1),
        lambda k: torch.cat([k[:, :, 1:], k[:, :, :1]], 2),
        lambda k: k.bfloat16().float(),
        lambda k: k + (torch.arange(20) == 7)[:, None],
    ):
        with pytest.raises(InvalidParameter, match=r"layers\[0\]\.k: inputs were recorded for different values"):
            pack([(change(k), v) for k, v in pairs], FP32, inputs=inputs)
    with pytest.raises(InvalidParameter, match="inputs were recorded for different values"):
        pack(part, FP32, start=4, inputs=inputs.select([2], 0).slice(4, 15, 0))


@pytest.mark.parametrize("rows", [[2, 0, 1], [1], [0, 0, 2, 2], [1, 2]])
def test_ids_follow_selected_rows(rows: list[int]) -> None:
    model = model_of()
    with recording(model) as record:
        past = model(ROWS, use_cache=True).past_key_values
        past.batch_select_indices(torch.tensor(rows))
        chosen = record.inputs(past)
        assert chosen.known_ids == tuple(ids_of(ROWS[row]) for row in rows)
        following = FOLLOWING.repeat(len(rows), 1) + torch.arange(len(rows))[:, None]
        model(following, past_key_values=past)
        past.crop(-1)
        assert record.inputs(past).known_ids == tuple(ids_of(torch.cat([ROWS[row], following[n, :-1]])) for n, row in enumerate(rows))


def test_ids_follow_beams() -> None:
    model = model_of()
    with recording(model) as record:
        past = DynamicCache(config=model.config)
        found = model.generate(
            ROWS[:2], past_key_values=past, num_beams=3, num_return_sequences=3, max_new_tokens=8, do_sample=False, pad_token_id=0
        )
    known = {bytes(row) for row in record.inputs(past).known_ids}
    assert len(record.inputs(past).known_ids) == 6
    # The cache holds the last beams before the last token.
    assert any(ids_of(row[:-1]) in known for row in found)
    cache = pack(past, FP32, inputs=record.inputs(past))
    for number in range(6):
        one = cache.select([number])
        assert one.inputs is not None
        ids = torch.from_numpy(numpy.frombuffer(one.inputs.token_ids, "<u4").astype("int64"))[None]
        expected = pack(model(ids, use_cache=True).past_key_values, FP32)
        for mine, theirs in zip(one.unpack(torch.float32), expected.unpack(torch.float32), strict=True):
            torch.testing.assert_close(mine[0], theirs[0], rtol=1e-4, atol=1e-4)


def test_ids_of_other_tokens_are_kept_if_the_newest_are_dropped() -> None:
    model = model_of()
    with recording(model) as record:
        past = model(PROMPT, use_cache=True).past_key_values
        past.crop(-5)
        assert record.inputs(past) == Inputs(ids_of(PROMPT[:, :15]))
        model(FOLLOWING, past_key_values=past)
        assert record.inputs(past) == Inputs(ids_of(torch.cat([PROMPT[:, :15], FOLLOWING], 1)))
        past.reset()
        model(FOLLOWING, past_key_values=past)
        assert record.inputs(past) == Inputs(ids_of(FOLLOWING))


@pytest.mark.parametrize("name", ["Gemma-2", "Mistral"])
def test_sliding_layers_have_the_ids_of_all_tokens(name: str) -> None:
    model = model_of(name)
    prompt = torch.randint(2, 50, (2, 90), generator=torch.Generator().manual_seed(0))
    with recording(model) as record:
        past = DynamicCache(config=model.config)
        for part in prompt.split([70, 1, 1, 18], 1):
            model(part, past_key_values=past)
        assert record.inputs(past).known_ids == tuple(ids_of(row) for row in prompt)
        past.batch_select_indices(torch.tensor([1, 0]))
        assert record.inputs(past).known_ids == tuple(ids_of(row) for row in prompt.flip(0))
        past.layers[-1].keys = past.layers[-1].keys.flip(2)
        assert record.inputs(past).tokens == 0
