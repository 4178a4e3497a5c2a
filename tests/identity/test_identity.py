"""The identity of a transformers model covers everything that its keys and values depend on, and nothing else."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import kvpack
from kvpack.formats.errors import InvalidParameter
from kvpack.identity.canonical_text import sample_values, to_json_value
from kvpack.identity.rope import longest_sequence

transformers = pytest.importorskip("transformers")

from kvpack.integrations.transformers import KvpackCache, recording  # noqa: E402
from kvpack.integrations.transformers.models import sample_digest  # noqa: E402
from support.small_models import SIZES, identity, run_elsewhere, small_llama  # noqa: E402


def changed_fields(one: kvpack.Identity, other: kvpack.Identity) -> set[str]:
    names = (field.name for field in dataclasses.fields(one) if field.compare)
    return {name for name in names if getattr(one, name) != getattr(other, name)}


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights and one scale per row, like those that quantization libraries create."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight * self.scale).T


def quantized(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.k_proj = Int8Linear(layer.self_attn.k_proj)
    return model


def with_setting(name: str, value: Any) -> Any:
    model = small_llama()
    setattr(model.config, name, value)
    return model


def scaled_frequencies() -> Any:
    model = small_llama()
    model.model.rotary_emb.inv_freq *= 0.5
    return model


def other_attribute(path: str, value: Any) -> Any:
    model = small_llama()
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, value)
    return model


STATES = {
    "as it is": small_llama,
    "sliding_window of the configuration": lambda: with_setting("sliding_window", 16),
    "sliding_window of a layer": lambda: other_attribute("model.layers.0.self_attn.sliding_window", 16),
    "rms_norm_eps": lambda: small_llama(rms_norm_eps=1e-3),
    "epsilon of a norm": lambda: other_attribute("model.norm.variance_epsilon", 1e-3),
    "scaling of attention": lambda: other_attribute("model.layers.1.self_attn.scaling", 1.0),
    "8-bit weights": lambda: quantized(small_llama()),
    "a quantization_config": lambda: with_setting("quantization_config", {"quant_method": "gptq", "bits": 4}),
    "inv_freq at run time": scaled_frequencies,
    "a nested configuration": lambda: with_setting("text_config", transformers.LlamaConfig(rms_norm_eps=1e-3)),
    "half of the parameters in another dtype": lambda: with_half_in_bfloat16(),
}


@dataclass
class Factors:
    first: Any


class Scaled(nn.Module):
    """A custom layer that multiplies by a factor which is not registered as a buffer."""

    def __init__(self, inner: nn.Module, **attributes: Any) -> None:
        super().__init__()
        self.inner = inner
        vars(self).update(attributes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def scaled(**attributes: Any) -> Any:
    model = small_llama()
    layer = model.model.layers[1].mlp
    layer.down_proj = Scaled(layer.down_proj, **attributes)
    return model


@pytest.mark.parametrize("name", ["factor", "_factor"])
@pytest.mark.parametrize(
    "made",
    [
        float,
        torch.tensor,
        lambda value: torch.tensor([value, 1.0]),
        numpy.float32,
        lambda value: numpy.array([[value]]),
        lambda value: {"first": torch.tensor(value)},
        lambda value: [None, torch.tensor(value)],
        lambda value: SimpleNamespace(first=value),
        lambda value: Factors(numpy.array(value)),
    ],
    ids=["float", "tensor", "vector", "numpy scalar", "array", "map", "list", "namespace", "dataclass"],
)
def test_unregistered_constants_of_a_module_change_the_identity(made: Callable[[float], Any], name: str) -> None:
    one, same, other = (kvpack.Identity.of(scaled(**{name: made(value)}), "raw") for value in (1.5, 1.5, 2.5))
    assert one == same
    assert changed_fields(one, other) == {"config"}


def test_attributes_that_record_calls_do_not_change_the_identity() -> None:
    """If such attributes counted, a model would refuse files that it wrote before a call."""
    first = kvpack.Identity.of(scaled(_calls=0, cos_cached=torch.zeros(3), _last_state=0.5), "raw")
    assert kvpack.Identity.of(scaled(_calls=7, cos_cached=torch.ones(5), _last_state=1.5), "raw") == first


def with_half_in_bfloat16() -> Any:
    model = small_llama()
    model.model.layers[1].to(torch.bfloat16)
    return model


def test_models_that_differ_in_anything_have_different_identities() -> None:
    found = {name: identity(make()) for name, make in STATES.items()}
    assert len({one.digest for one in found.values()}) == len(STATES)
    for name, one in found.items():
        assert changed_fields(one, found["as it is"]) <= {"config"}, name
        assert one.header_model.get("config") == one.config


def test_using_a_model_does_not_change_its_identity() -> None:
    model = small_llama()
    mine = kvpack.Identity.of(model, "octopus-3")
    with torch.no_grad():
        model(torch.arange(40)[None])
    model.config.use_cache = False
    model.set_attn_implementation("eager")
    model.train()
    model.eval()
    assert kvpack.Identity.of(model, "octopus-3") == mine


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def with_a_compiled_layer(model: Any) -> Any:
    model.model.layers[1] = compiled(model.model.layers[1])
    return model


@pytest.mark.parametrize("wrapped", [compiled, nn.DataParallel, lambda model: nn.DataParallel(compiled(model)), with_a_compiled_layer])
def test_wrappers_of_torch_do_not_change_the_identity(wrapped: Any) -> None:
    assert identity(wrapped(small_llama())) == identity(small_llama())


def test_a_module_of_another_library_is_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"a .*ModuleList is not a transformers model: pass the transformers model that it contains"):
        identity(nn.ModuleList([small_llama()]))


def test_the_same_model_has_the_same_identity_in_another_process() -> None:
    model = small_llama()
    mine = kvpack.Identity.of(model, "octopus-3", name="m").digest.hex()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        script = (
            "from support.small_models import *\n"
            f"for model in (small_llama(), transformers.AutoModelForCausalLM.from_pretrained({folder!r})):\n"
            "    print(kvpack.Identity.of(model, 'octopus-3', name='m').digest.hex())"
        )
        assert run_elsewhere(script).split() == [mine, mine]


@pytest.mark.parametrize(
    ("loaded_from", "name"),
    [
        ("org/model", "org/model"),
        ("model", "model"),
        ("", ""),
        ("/data/models/llama", "llama"),
        ("/data/models/llama/", "llama"),
        ("models/org/llama", "llama"),
        ("./llama", "llama"),
        ("../llama", "llama"),
        ("~/llama", "llama"),
        ("/home/me/.cache/huggingface/hub/models--org--model/snapshots/12ab34", "org/model"),
        ("/home/me/.cache/huggingface/hub/models--gpt2/snapshots/12ab34/", "gpt2"),
    ],
)
def test_model_names_contain_no_local_path(loaded_from: str, name: str) -> None:
    model = small_llama()
    model.config._name_or_path = loaded_from
    assert kvpack.Identity.of(model, "raw", weights="w").model == name


def test_a_relative_folder_is_named_by_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    model = small_llama()
    model.config._name_or_path = "org/model"
    assert kvpack.Identity.of(model, "raw", weights="w").model == "model"


def test_weights_are_digested_unless_they_are_named() -> None:
    model = small_llama()
    mine = kvpack.Identity.of(model, "octopus-3")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    assert changed_fields(kvpack.Identity.of(model, "octopus-3"), mine) == {"weights"}
    model = quantized(small_llama())
    mine = kvpack.Identity.of(model, "octopus-3")
    model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    assert changed_fields(kvpack.Identity.of(model, "octopus-3"), mine) == {"weights"}


def test_autocast_counts_as_another_dtype() -> None:
    model = small_llama()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert identity(model).dtype == "float32 autocast bfloat16"
    assert identity(model).dtype == "float32"


def test_values_that_are_not_in_memory_are_refused() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_hidden_layers=1))
    with pytest.raises(InvalidParameter, match=r"is on the meta device: its values are not in memory \(offloaded"):
        kvpack.Identity.of(model.eval(), "octopus-3")
    with pytest.raises(InvalidParameter, match=r"inv_freq is on the meta device"):
        identity(model)
    model = small_llama()
    model.lm_head.to("meta")
    with pytest.raises(InvalidParameter, match=r"lm_head\.weight is on the meta device.*pass weights="):
        kvpack.Identity.of(model, "octopus-3")
    assert identity(model).weights == "revision"


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_an_offloaded_model_has_the_same_identity(place: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    mine = kvpack.Identity.of(small_llama(), "octopus-3")

    def offloaded(model: Any) -> Any:
        if place == "memory":
            return accelerate.cpu_offload(model, execution_device="cpu")
        return accelerate.disk_offload(model, tempfile.mkdtemp(dir=tmp_path), execution_device="cpu")

    model = offloaded(small_llama())
    assert model.lm_head.weight.device.type == "meta"
    assert kvpack.Identity.of(model, "octopus-3") == mine
    model(torch.arange(9)[None])
    assert kvpack.Identity.of(model, "octopus-3") == mine
    edited = small_llama()
    edited.lm_head.weight.data[3, 4:5].neg_()
    assert changed_fields(kvpack.Identity.of(offloaded(edited), "octopus-3"), mine) == {"weights"}


def test_tensors_whose_bytes_cannot_be_read_are_refused() -> None:
    model = small_llama()
    model.model.layers[0].register_buffer("packed", torch.eye(4).to_sparse())
    with pytest.raises(InvalidParameter, match=r"layers\.0\.packed \(torch\.Tensor, .* \[4, 4\]\) cannot be digested, because its"):
        identity(model)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, :UserWarning")
def test_extra_tensors_of_a_quantized_layer_change_the_identity() -> None:
    class Packed(nn.Linear):
        """A layer that keeps its scales in a mapping of its own, and adds them to its state dict."""

        def __init__(self, scale: float) -> None:
            super().__init__(32, 50, bias=False)
            nn.init.ones_(self.weight)
            self.meta = {"scale": torch.tensor([scale])}

        def state_dict(self, *arguments: Any, prefix: str = "", **options: Any) -> Any:
            return {f"{prefix}weight": self.weight.detach(), f"{prefix}scale": self.meta["scale"]}

    def made(scale: float, layer: Any) -> kvpack.Identity:
        model = small_llama()
        model.lm_head = layer(scale)
        return kvpack.Identity.of(model, "octopus-3")

    def quantized_by_torch(scale: float) -> Any:
        """Return a layer whose scale is a part of a quantized tensor, whose bytes are the same for any scale."""
        layer = nn.Module()
        layer.register_buffer("weight", torch.quantize_per_tensor(torch.full((50, 32), scale), scale, 0, torch.qint8))
        return layer

    for layer in (Packed, quantized_by_torch):
        assert made(0.5, layer) == made(0.5, layer)
        assert "weights" in changed_fields(made(0.5, layer), made(0.25, layer))


def test_a_tensor_made_of_several_tensors_is_digested_completely() -> None:
    class Scaled(torch.Tensor):
        """A tensor that consists of codes and a scale, as in torchao."""

        @staticmethod
        def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, bits: int) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

        def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bits: int) -> None:
            self.codes, self.scale, self.bits = codes, scale, bits

        def __tensor_flatten__(self) -> Any:
            return ["codes", "scale"], {"bits": self.bits}

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.detach.default:
                return args[0]
            raise NotImplementedError(function)

    def made(code: int, scale: float, bits: int) -> kvpack.Identity:
        model = small_llama()
        codes = torch.full((50, 32), code, dtype=torch.int8)
        model.lm_head.weight = nn.Parameter(Scaled(codes, torch.tensor([scale]), bits), requires_grad=False)
        return kvpack.Identity.of(model, "octopus-3")

    one = made(1, 0.5, 8)
    assert made(1, 0.5, 8) == one
    for other in (made(2, 0.5, 8), made(1, 0.25, 8), made(1, 0.5, 4)):
        assert other.weights != one.weights


def test_a_model_with_active_dropout_is_refused() -> None:
    model = small_llama(attention_dropout=0.1)
    identity(model)
    model.train()
    with pytest.raises(InvalidParameter, match=r"training mode.*self_attn\.attention_dropout is 0\.1.*model\.eval\(\)"):
        identity(model)
    identity(small_llama().train())


def with_rope(kind: str, **more: Any) -> Any:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if kind == "longrope" else {"factor": 2.0}
    rope = {"rope_type": kind, "rope_theta": 1e4, **factors, "original_max_position_embeddings": 64, **more}
    return small_llama(rope_parameters=rope, max_position_embeddings=64)


def test_long_rope_settings_are_digested() -> None:
    assert '"short_factor"' in identity(with_rope("longrope")).rope
    long, other = (identity(with_rope("longrope", more=["x" * 100] * 20 + [end])).rope for end in "ab")
    assert long != other
    for rope in (long, other):
        assert len(rope) < 200
        assert longest_sequence(rope) == 64


@pytest.mark.parametrize(("kind", "longest"), [("longrope", 64), ("dynamic", 63)])
def test_sequences_whose_length_changes_the_frequencies_are_not_stored(kind: str, longest: int, tmp_path: Any) -> None:
    """The keys of a long prompt's prefix differ from those of the same prefix in a short prompt, although the ids are equal."""
    model, ids = with_rope(kind), list(range(50)) * 2
    store = kvpack.Store(tmp_path, kvpack.Identity.of(model, "raw", name="m"), chunk=16)

    def computed(tokens: int) -> kvpack.Cache:
        past = transformers.DynamicCache()
        with torch.no_grad():
            model(torch.tensor([ids[:tokens]]), past_key_values=past)
        return kvpack.pack(past, "raw")

    short, long = (computed(tokens)[0].unpack(torch.float32)[0] for tokens in (longest, 80))
    assert not torch.allclose(short[:, :, :16], long[:, :, :16], atol=0.05)
    with pytest.raises(InvalidParameter, match=rf"the cache holds 80 tokens: .* for sequences of more than {longest} tokens"):
        store.save(ids[:80], computed(80))
    assert store.save(ids[:longest], computed(longest)) == longest // 16 * 16
    assert store.load(ids[: longest - 1])[0] == store.match(ids[: longest - 1]) == (longest - 1) // 16 * 16
    assert store.load(ids[:longest]) == (0, None), "a prefix was loaded although the next token changes the frequencies"
    assert store.match(ids[:80]) == 0
    plain = kvpack.Store(tmp_path / "plain", identity(small_llama(), name="m"), chunk=32)
    assert plain._max_sequence is None


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_beginning_of_a_long_sequence_is_not_a_prefix_of_a_short_one(kind: str, tmp_path: Any) -> None:
    """The remaining keys are those of the long sequence, even if only a few are left."""
    model, ids = with_rope(kind), list(range(50)) * 2
    store = kvpack.Store(tmp_path, kvpack.Identity.of(model, "raw", name="m"), chunk=16)
    with torch.no_grad(), KvpackCache(model, "raw") as past, recording(model) as record:
        model(torch.tensor([ids]), past_key_values=past)
        dense = transformers.DynamicCache(config=model.config)
        model(torch.tensor([ids]), past_key_values=dense)
        sliced = past.packed[:, :32]
        past.crop(-68)
        given = kvpack.pack(dense, "raw", inputs=record.inputs(dense))[:, :32]
        for cache in (sliced, past.packed, given):
            with pytest.raises(InvalidParameter, match=r"tokens 0 to \d+ have the RoPE frequencies of a sequence of more than 6[34]"):
                store.save(ids[:32], cache)
        unknown = kvpack.pack(dense, "raw")
        kvpack.save(unknown, tmp_path / "long.kvpack")
        part = kvpack.load(tmp_path / "long.kvpack", tokens=32)
        for cache in (unknown[:, :32], unknown[:, :70][:, :32], part, kvpack.concat([part[:, :16], part[:, 16:]])):
            with pytest.raises(InvalidParameter, match="the cache was sliced from 100 tokens without inputs=: the model's rotary"):
                store.save(ids[:32], cache)
    with torch.no_grad(), KvpackCache(model, "raw") as past:
        model(torch.tensor([ids[:32]]), past_key_values=past)
        assert store.save(ids[:32], past.packed) == 32


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_long_sequence_does_not_change_the_identity(kind: str) -> None:
    """The frequencies that the longest pass leaves behind are not part of the identity, but a changed buffer is."""
    model = with_rope(kind)
    first = identity(model)
    with torch.no_grad():
        model(torch.tensor([list(range(50)) * 2]))
    rotary = model.model.rotary_emb
    assert not torch.equal(rotary.inv_freq, rotary.original_inv_freq)
    assert identity(model) == first
    rotary.original_inv_freq = rotary.original_inv_freq * 2
    assert identity(model) != first
    if kind == "dynamic":
        changed = with_rope(kind)
        changed.model.rotary_emb.inv_freq = changed.model.rotary_emb.inv_freq * 2
        assert identity(changed) != first


def test_a_setting_without_a_stable_text_is_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"config\.odd is a .*object, which kvpack cannot include in a digest"):
        identity(with_setting("odd", object()))


def test_the_callers_description_is_part_of_the_key(tmp_path: Any) -> None:
    model = small_llama()
    plain, hooked = (kvpack.Store(tmp_path, identity(model, extra=extra), chunk=32) for extra in ("", "a hook on layer 3"))
    assert not set(plain.keys(range(64))) & set(hooked.keys(range(64)))


def test_samples_read_together_equal_samples_read_separately() -> None:
    values = torch.randn(7, 300, generator=torch.Generator().manual_seed(0))
    named: list[tuple[str, Any]] = [
        ("long", values), ("not contiguous", values.T), ("half", values.to(torch.bfloat16)), ("byte", values.to(torch.float8_e4m3fn)),
        ("flags", values > 0), ("integers", values.to(torch.int64)), ("few", values[0, :3]), ("part", values[2:5, 10:90]),
        ("none", values[:0]), ("scalar", values[0, 0]), ("text", "x"),
    ]  # fmt: skip
    assert sample_values(named, 64) == [to_json_value(name, value, 64) for name, value in named]
    with pytest.raises(InvalidParameter, match="lost is on the meta device"):
        sample_values([*named, ("lost", torch.empty(3, device="meta"))], 64)


@pytest.mark.parametrize("weights", [None, "a revision"])
def test_a_cache_computed_with_other_weights_is_not_stored(weights: str | None, tmp_path: Any) -> None:
    """The cache is refused even if the caller created the store's identity.

    Caches of earlier versions, which name only a sample of the weights, are refused too.
    """
    model, ids = small_llama(), torch.arange(3, 35)[None]
    with torch.no_grad(), KvpackCache(model, "octopus-3") as cache:
        model(ids, past_key_values=cache)
        old = replace(cache.packed, model={**cache.packed.model, "weights": sample_digest(model)})
    for changed in (False, True):
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(2 if changed else 1)
        one = kvpack.Identity.of(model, "octopus-3", weights=weights)
        with kvpack.Store(str(tmp_path / "store"), one, chunk=32) as store:
            if changed:
                with pytest.raises(InvalidParameter, match=r"weights of the cache's model is 'sha256:.*but .* identity has 'sha256:"):
                    store.save(ids, cache)
                with pytest.raises(
                    InvalidParameter, match=r"weights of the cache's model is 'sample-sha256:.*but the store's identity has"
                ):
                    store.save(ids, old)
            else:
                assert store.save(ids, old) == store.save(ids, cache) == 32


def test_attributes_may_be_removed_while_a_model_is_read() -> None:
    """Another thread, or the garbage collector, releases a cache of the model, which removes its wrappers from the model."""
    model = small_llama()

    class Settings(list[int]):
        def __iter__(self) -> Iterator[int]:
            vars(model).pop("second", None)
            return super().__iter__()

    model.first, model.second = Settings([1]), 2
    described = kvpack.Identity.of(model, "raw", weights=None)
    assert not hasattr(model, "second")
    model.second = 2
    assert kvpack.Identity.of(model, "raw", weights=None) == described
