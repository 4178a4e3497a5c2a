"""Tests of adapters in a model's identity: PEFT's, inside or around the model, by name, weights, scaling, and state."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import kvpack
from kvpack.formats.errors import InvalidParameter

peft = pytest.importorskip("peft")

from support.small_models import identity, run_elsewhere, small_llama  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "k_proj"], "init_lora_weights": False, **options})


def with_two_loras() -> Any:
    """Return a PeftModel with the active adapter "first" and an inactive one, "second"."""
    model = peft.get_peft_model(small_llama(), lora(), adapter_name="first")
    model.add_adapter("second", lora())
    return model.eval()


def with_default_lora(seed: int) -> Any:
    return peft.get_peft_model(small_llama(), _seeded(seed)).eval()


def _seeded(seed: int) -> Any:
    torch.manual_seed(seed)
    return lora()


def scale(model: Any, name: str, factor: float) -> Any:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling[name] *= factor
    return model


def active(model: Any, *names: str) -> Any:
    model.set_adapter(names[0]) if len(names) == 1 else model.base_model.set_adapter(list(names))
    return model


def merged(model: Any) -> Any:
    model.merge_adapter()
    return model


def in_transformers(disabled: bool = False, rank: int = 2) -> Any:
    model = small_llama()
    model.add_adapter(lora(r=rank), adapter_name="first")
    if disabled:
        model.disable_adapters()
    return model.eval()


def of_kind(config: Any) -> Any:
    return peft.get_peft_model(small_llama(), config, adapter_name="first").eval()


STATES: dict[str, Callable[[], Any]] = {
    "none": small_llama,
    "first": with_two_loras,
    "second": lambda: active(with_two_loras(), "second"),
    "both": lambda: active(with_two_loras(), "first", "second"),
    "first, scaled": lambda: scale(with_two_loras(), "first", 2.0),
    "first, merged": lambda: merged(with_two_loras()),
    "default": lambda: with_default_lora(1),
    "another default": lambda: with_default_lora(2),
    "transformers' own": in_transformers,
    "transformers' own, disabled": lambda: in_transformers(disabled=True),
    "with a normalized direction": lambda: of_kind(lora(use_dora=True)),
    "with a layer to save": lambda: of_kind(lora(modules_to_save=["lm_head"])),
    "with trainable tokens": lambda: of_kind(lora(trainable_token_indices=[1, 2])),
    "IA3": lambda: of_kind(peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])),
    "OFT": lambda: of_kind(peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4, r=0)),
    "VeRA": lambda: of_kind(peft.VeraConfig(target_modules=["q_proj"])),
    "LoHa": lambda: of_kind(peft.LoHaConfig(target_modules=["q_proj"])),
    "layer norms": lambda: of_kind(peft.LNTuningConfig(target_modules=["input_layernorm"])),
    "prompt": lambda: of_kind(peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")),
    "prefix": lambda: of_kind(peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")),
}


@pytest.mark.parametrize("named", [None, "customer"], ids=["found", "named by the caller"])
def test_models_with_different_adapters_have_different_identities(named: str | None) -> None:
    found = {name: identity(make(), adapter=named) for name, make in STATES.items()}
    assert len({one.digest for one in found.values()}) == len(STATES)
    assert len({dataclasses.replace(one, adapter="") for one in found.values()}) == 1, "an adapter changed other fields"
    for name in set(STATES) - {"none", "transformers' own, disabled"}:
        assert "sha256:" in found[name].adapter
        assert named is None or found[name].adapter.startswith("customer sha256:")


def test_identities_name_the_active_adapters() -> None:
    model = with_two_loras()
    assert identity(model).adapter.startswith("first sha256:")
    assert identity(active(model, "second")).adapter.startswith("second sha256:")
    assert identity(active(model, "first", "second")).adapter.startswith("first,second sha256:")
    for module in merged(active(model, "first")).modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.set_adapter("second")
    assert identity(model).adapter.startswith("first,second sha256:"), "a merged adapter was not named"


def test_disabling_adapters_changes_the_identity_until_they_are_enabled() -> None:
    model = with_two_loras()
    first = identity(model)
    with model.disable_adapter():
        off = identity(model)
    assert off.adapter == "disabled"
    assert identity(model) == first
    model.base_model.disable_adapter_layers()
    assert identity(model) == off
    inside = in_transformers()
    on = identity(inside)
    inside.disable_adapters()
    assert identity(inside) == off
    inside.enable_adapters()
    assert identity(inside) == on
    prompted = STATES["prompt"]()
    with prompted.disable_adapter():
        assert identity(prompted).adapter == "disabled"


def test_disabling_one_layer_changes_the_identity() -> None:
    model = with_two_loras()
    first = identity(model)
    layer = next(module for module in model.modules() if hasattr(module, "lora_A"))
    layer.enable_adapters(False)
    assert identity(model) != first
    layer.enable_adapters(True)
    assert identity(model) == first


def test_the_inner_model_has_the_same_identity_as_its_wrapper() -> None:
    model = with_two_loras()
    assert identity(model.base_model.model) == identity(model.base_model) == identity(model)
    assert kvpack.Identity.of(model.base_model.model, "bf16") == kvpack.Identity.of(model, "bf16")
    assert identity(in_transformers(rank=4)) == identity(model), "the library changed the identity of the adapter"


def test_inactive_adapters_change_nothing() -> None:
    model = peft.get_peft_model(small_llama(), lora(), adapter_name="first").eval()
    alone = kvpack.Identity.of(model, "bf16")
    model.add_adapter("second", lora(target_modules=["v_proj", "o_proj"], r=2))
    assert kvpack.Identity.of(model.eval(), "bf16") == alone
    assert alone.weights == kvpack.Identity.of(small_llama(), "bf16").weights


@pytest.mark.scenario
@pytest.mark.parametrize("kind", [name for name in STATES if name not in ("none", "transformers' own, disabled")])
def test_every_weight_of_an_adapter_changes_the_identity(kind: str) -> None:
    model = STATES[kind]()
    mine = identity(model)
    with torch.no_grad():
        model.eval()(torch.arange(5)[None])
    assert identity(model) == mine, "running the model changed its adapters"
    plain = {tensor.shape for tensor in small_llama().state_dict().values()}
    words = ["second"] if kind == "second" else ["first", "default", "prompt"]
    own = [tensor for name, tensor in model.named_parameters() if any(word in name for word in words)]
    assert own
    assert any(tensor.shape not in plain for tensor in own) or kind in ("layer norms", "with a layer to save")
    changed = 0
    for tensor in own:
        with torch.no_grad():
            old = tensor.clone()
            tensor.view(-1)[-1] += 1
            changed += identity(model) != mine
            tensor.copy_(old)
    assert changed == len(own)
    assert identity(model) == mine


def test_the_same_state_has_the_same_identity_in_another_process() -> None:
    here = str(Path(__file__).parent)
    script = (
        f"sys.path.insert(0, {here!r})\nfrom test_adapters import *\nfor name, make in STATES.items(): print(identity(make()).digest.hex())"
    )
    assert run_elsewhere(script).splitlines() == [identity(make()).digest.hex() for make in STATES.values()]


def test_customers_never_get_each_others_tokens(tmp_path: Path) -> None:
    model, ids = with_two_loras(), list(range(64))
    k, v = torch.randn(2, 1, 1, 64, 16).to(torch.bfloat16)
    cache = kvpack.pack([(k, v)] * 2, "raw")

    def store() -> kvpack.Store:
        return kvpack.Store(tmp_path, kvpack.Identity.of(model, "raw", name="m"), chunk=32)

    assert store().save(ids, cache) == 64
    with model.disable_adapter():
        assert store().load(ids) == (0, None)
    assert active(model, "second") is model
    assert store().load(ids) == (0, None)
    assert scale(active(model, "first"), "first", 0.5) is model
    assert store().load(ids) == (0, None)
    scale(model, "first", 2.0)
    assert store().load(ids)[0] == 64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: of_kind(peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM")), "AdaptionPromptModel"),
        (lambda: of_kind(peft.PolyConfig(target_modules=["q_proj"])), "PolyModel, whose output depends on more than the preceding tokens"),
        (
            lambda: of_kind(peft.MultitaskPromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM", num_tasks=2)),
            "MultitaskPromptTuningConfig, whose prompt depends on task_ids",
        ),
        (lambda: of_kind(lora(alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM")), "ALoraLinearVariant, whose output depends on more"),
        (lambda: of_kind(peft.PveraConfig(target_modules=["q_proj"], sample_at_inference=True)), "its values are random"),
        (lambda: with_an_unknown_attribute(), r"q_proj\.gate is a .*object, which kvpack cannot include in a digest"),
    ],
    ids=["adaption prompt", "poly", "multitask", "activated", "random", "unknown"],
)
def test_adapters_that_cannot_be_digested_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        identity(make())


def test_adapters_of_unknown_libraries_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_llama()
    other = type("Layer", (nn.Identity,), {"__module__": "adapters.layer"})
    model.model.layers[0].post = other()
    identity(model)
    monkeypatch.setitem(sys.modules, "adapters", types.SimpleNamespace(AdapterConfig=object))
    with pytest.raises(InvalidParameter, match=r"layers\.0\.post has the adapter adapters\.layer\.Layer, which kvpack does not recognize"):
        identity(model)


def with_an_unknown_attribute() -> Any:
    model = with_two_loras()
    model.base_model.model.model.layers[0].self_attn.q_proj.gate = object()
    return model


def test_an_adapter_without_a_library_is_digested() -> None:
    class Lora(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.factor = base, 1.0
            self.down, self.up = nn.Parameter(torch.randn(4, 32)), nn.Parameter(torch.randn(32, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.factor * x @ self.down.T @ self.up.T

    model = small_llama()
    attention = model.model.layers[0].self_attn
    attention.q_proj = Lora(attention.q_proj)
    mine = identity(model)
    assert mine.adapter.startswith("sha256:")
    with torch.no_grad():
        attention.q_proj.up[0, 0] += 1
    assert identity(model).adapter != mine.adapter
    with torch.no_grad():
        attention.q_proj.up[0, 0] -= 1
    attention.q_proj.factor = 2.0
    assert identity(model).config != mine.config
