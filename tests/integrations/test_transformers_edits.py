"""A file belongs to exactly the weights that computed it. Any edit is noticed when the file is used with the model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call

import kvpack
from kvpack.errors import InvalidParameter, KvpackWarning
from kvpack.identity.fingerprint import digest_weights
from kvpack.identity.modules import list_model_parts
from kvpack.integrations.transformers import KvpackCache, recording
from kvpack.integrations.transformers.models import sample_digest
from support.small_models import small_llama

IDS = torch.arange(40)[None]
FOLLOWING = torch.arange(5)[None]
REFUSED = "the cache was computed by a model whose weights are 'sha256:"

pytestmark = pytest.mark.filterwarnings("ignore:the attention of", "ignore:.is_gradient_checkpointing. is deprecated")


def tied() -> Any:
    return small_llama(tie_word_embeddings=True)


def in_bf16() -> Any:
    return small_llama().to(torch.bfloat16)


def with_buffer() -> Any:
    """Return a model that has a persistent buffer."""
    model = small_llama()
    model.model.register_buffer("shift", torch.zeros(300))
    return model


def k_proj(model: Any, layer: int = 1) -> torch.nn.Parameter:
    found: torch.nn.Parameter = model.model.layers[layer].self_attn.k_proj.weight
    return found


def negate_embedding(model: Any) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[7] *= -1


def add_everywhere(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3


def one_value(model: Any) -> None:
    with torch.no_grad():
        k_proj(model)[3, 5] += 2**-10


def one_bit_through_data(model: Any) -> None:
    k_proj(model).data.view(torch.int16 if k_proj(model).element_size() == 2 else torch.int32)[5, 3] ^= 1


def copy_through_data(model: Any) -> None:
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data.copy_(weight.data.roll(1))


def other_data(model: Any) -> None:
    k_proj(model).data = k_proj(model).data * 1.01


def through_numpy(model: Any) -> None:
    model.model.norm.weight.detach().float().numpy()
    model.lm_head.weight.data.view(torch.int16).numpy()[2] ^= 1


def swapped(model: Any) -> None:
    first, second = (layer.self_attn for layer in model.model.layers)
    first.k_proj.weight, second.k_proj.weight = second.k_proj.weight, first.k_proj.weight


def swapped_values(model: Any) -> None:
    first, second = k_proj(model, 0), k_proj(model, 1)
    kept = first.data.clone()
    first.data.copy_(second.data)
    second.data.copy_(kept)


def negative_zero(model: Any) -> None:
    """Replace a 0 in the weights by -0, which is equal but has other bits."""
    with torch.no_grad():
        k_proj(model)[0, 0] = -0.0 if torch.copysign(torch.ones(()), k_proj(model)[0, 0].cpu()) > 0 else 0.0


def edit_buffer(model: Any) -> None:
    model.model.shift.data[17] = 1.0


EDITS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    f"{edit.__name__} of {make.__name__}": (make, edit)
    for make in (small_llama, tied, in_bf16)
    for edit in (
        negate_embedding, add_everywhere, one_value, one_bit_through_data, copy_through_data, other_data, through_numpy, swapped,
        swapped_values, negative_zero,
    )
} | {"edit_buffer": (with_buffer, edit_buffer)}  # fmt: skip


def saved(model: Any, path: Path) -> Path:
    with torch.inference_mode(), KvpackCache(model, "raw") as cache:
        model(IDS, past_key_values=cache)
        kvpack.save(cache.packed, path)
    return path


@pytest.mark.scenario
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_model_is_refused_wherever_the_file_is_used(name: str, tmp_path: Path) -> None:
    make, edit = EDITS[name]
    model = make()
    path = saved(model, tmp_path / "file")
    identity = kvpack.Identity.of(model, "raw")
    with kvpack.Store(tmp_path / "store", identity, chunk=20) as store:
        assert store.save(IDS[0].tolist(), kvpack.load(path)) == 40
        from_store = store.load(IDS[0].tolist())[1]
    # The model has met the file, so that anything that could be remembered of it is.
    KvpackCache.load(path, model).release()
    assert make() is not model
    KvpackCache.load(path, make()).release()
    edit(model)
    for meet in (
        lambda: KvpackCache.load(path, model),
        lambda: KvpackCache.load(path, model, prompt=IDS),
        lambda: KvpackCache.load(path, model, dense=True),
        lambda: KvpackCache.of(kvpack.load(path), model),
        lambda: KvpackCache.of(from_store, model),
    ):
        with pytest.raises(InvalidParameter, match=REFUSED):
            meet()
    with recording(model) as record:
        past = model(IDS, use_cache=True).past_key_values
    packed = kvpack.pack(past, "raw", model=kvpack.Identity.of(model, "raw").header_model, inputs=record.inputs(past))
    assert kvpack.Identity.of(model, "raw").digest != identity.digest
    for weights in (None, "a revision"):
        named = kvpack.Identity.of(model, "raw", weights=weights)
        with kvpack.Store(tmp_path / "other", named, chunk=20) as store:
            assert store.load(IDS[0].tolist()) == (0, None)
            with pytest.raises(InvalidParameter, match=r"(weights|config) of the cache's model is"):
                store.save(IDS[0].tolist(), kvpack.load(path))
            assert store.save(IDS[0].tolist(), packed) == 40
    other = saved(model, tmp_path / "edited")
    assert kvpack.load(other).model["weights"] == packed.model["weights"] != kvpack.load(path).model["weights"]


def unchanged(model: Any) -> Any:
    return model


def moved(model: Any) -> Any:
    """Move every weight to another address and return the model."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def strided(model: Any) -> Any:
    """Store the same values with other strides at an unaligned address, and return the model."""
    weight = k_proj(model)
    room = torch.zeros(weight.numel() + 1)
    weight.data = room[1:].view(*reversed(weight.shape)).T.copy_(weight.data)
    return model


def there_and_back(model: Any) -> Any:
    kept = k_proj(model).data.clone()
    k_proj(model).data.mul_(3)
    k_proj(model).data.copy_(kept)
    return model


def frozen(model: Any) -> Any:
    return model.requires_grad_(False)


@pytest.mark.parametrize("change", [unchanged, copy.deepcopy, moved, strided, there_and_back, frozen], ids=lambda change: change.__name__)
def test_equal_weights_identify_the_same_model(change: Callable[[Any], Any], tmp_path: Path) -> None:
    path = saved(small_llama(), tmp_path / "file")
    model = change(small_llama())
    with torch.inference_mode(), KvpackCache.load(path, model) as cache:
        model(FOLLOWING, past_key_values=cache)
        assert cache.packed.model == kvpack.load(path).model
        assert cache.packed.inputs.undetermined == ()
    assert kvpack.Identity.of(model, "raw").weights == kvpack.load(path).model["weights"]


def test_the_digest_combines_digests_of_single_weights() -> None:
    """Threads and tied weights do not affect the digest, and the sample digest is still that of the first stores."""
    import hashlib
    import json

    from kvpack.identity.canonical_text import to_json_value

    for model in (small_llama(), tied(), in_bf16(), with_buffer()):
        total = hashlib.sha256()
        for part in list_model_parts(model):
            own = {
                f"{part.name}.{name}": x for name, x in [*part.module._parameters.items(), *part.module._buffers.items()] if x is not None
            }
            for name in sorted(own.keys() - {f"{part.name}.{name}" for name in part.module._non_persistent_buffers_set}):
                total.update(json.dumps([name, to_json_value(name, own[name].detach())], separators=(",", ":")).encode() + b"\n")
        assert digest_weights(list_model_parts(model)).text == f"sha256:{total.hexdigest()}"


def load_other_state(model: Any) -> None:
    model.load_state_dict({name: values * 1.01 for name, values in model.state_dict().items()})


def assign_other_state(model: Any) -> None:
    model.load_state_dict({name: values * 1.01 for name, values in model.state_dict().items()}, assign=True)


def shift_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(1.5)


def to_other_dtype(model: Any) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (load_other_state, "weights"),
        (assign_other_state, "weights"),
        (one_value, "weights"),
        (negate_embedding, "weights"),
        (other_data, "weights"),
        (swapped, "weights"),
        (shift_frequencies, "config"),
        (to_other_dtype, "dtype"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_model_edited_between_loading_and_the_first_pass_is_refused(
    edit: Callable[[Any], None], field: str, tokens: int, tmp_path: Path
) -> None:
    path, model = saved(small_llama(), tmp_path / "file"), small_llama()
    parameters = list(model.parameters())
    with torch.no_grad(), KvpackCache.load(path, model) as cache:
        edit(model)
        for _ in range(2):
            with pytest.raises(InvalidParameter, match=f"the model's {field} changed between the check of the cache and the cache's first"):
                model(FOLLOWING[:, :tokens], past_key_values=cache)
        assert cache.get_seq_length() == 40
        cache.reset()
        model(IDS, past_key_values=cache)
        model(FOLLOWING, past_key_values=cache)
        assert cache.packed.inputs.undetermined == ()
        assert cache.packed.model == kvpack.Identity.of(model, "raw").header_model
    assert parameters


@pytest.mark.parametrize("edit", [one_value, negate_embedding, other_data])
def test_edits_of_weights_without_version_counters_are_refused(edit: Callable[[Any], None], tmp_path: Path) -> None:
    """Tensors that are created in inference mode have no version counters, so all values are compared again."""
    path = saved(small_llama(), tmp_path / "file")
    with torch.inference_mode():
        model = small_llama()
        with KvpackCache.load(path, model) as cache:
            model(FOLLOWING, past_key_values=cache)
        with KvpackCache.load(path, model) as cache:
            edit(model)
            with pytest.raises(InvalidParameter, match="the model's weights changed between the check of the cache"):
                model(FOLLOWING, past_key_values=cache)


def test_edits_after_the_first_pass_over_a_loaded_cache_are_recorded(tmp_path: Path) -> None:
    path, model = saved(small_llama(), tmp_path / "file"), small_llama()
    with torch.no_grad(), KvpackCache.load(path, model) as cache:
        one_value(model)
        with torch.no_grad():
            k_proj(model)[3, 5] -= 2**-10
        model(FOLLOWING, past_key_values=cache)
        load_other_state(model)
        model(FOLLOWING, past_key_values=cache)
        assert cache.packed.inputs.undetermined == ("tokens 45 to 49 were computed after the model's weights changed",)


def test_untraceable_changes_of_weights_between_passes_are_recorded() -> None:
    model = small_llama()
    with torch.inference_mode(), KvpackCache(model, "raw") as cache:
        model(IDS, past_key_values=cache)
        first = cache.packed
        functional_call(model, {name: 2 * x for name, x in model.named_parameters()}, (FOLLOWING,), {"past_key_values": cache})
        assert cache.packed.inputs.undetermined == ("tokens 40 to 44 were computed after the model's weights changed",)
        cache.crop(-FOLLOWING.shape[1])
        model(FOLLOWING, past_key_values=cache)
        assert cache.packed.inputs.undetermined == ()
        one_bit_through_data(model)
        model(FOLLOWING, past_key_values=cache)
        assert cache.packed.inputs.undetermined == ("tokens 45 to 49 may have been computed after the model's weights changed",)
        model(FOLLOWING, past_key_values=cache)
        assert "tokens 50 to 54 were computed after the model's weights changed" in cache.packed.inputs.undetermined
        assert dict(cache.packed.model) == dict(first.model)
        cache.reset()
        model(IDS, past_key_values=cache)
        assert cache.packed.inputs.undetermined == ()
        assert cache.packed.model["weights"] == kvpack.Identity.of(model, "raw").weights != first.model["weights"]


def test_changes_of_weights_that_no_step_checks_are_recorded() -> None:
    """Steps of one token check only a few weights. A change of other weights is noticed when the cache is packed."""
    model = frozen(small_llama())
    with torch.inference_mode(), KvpackCache(model, "raw") as cache:
        model(IDS, past_key_values=cache)
        with torch.no_grad():
            model.lm_head.weight[3] *= 2
        for token in FOLLOWING[0]:
            model(token[None, None], past_key_values=cache)
        assert cache.packed.inputs.undetermined == ("tokens 40 to 44 may have been computed after the model's weights changed",)


def test_edits_before_the_first_token_and_after_the_last_name_the_right_weights() -> None:
    model = small_llama()
    with torch.inference_mode(), KvpackCache(model, "raw") as cache:
        one_bit_through_data(model)
        expected = kvpack.Identity.of(model, "raw").weights
        model(IDS, past_key_values=cache)
        copy_through_data(model)
        assert cache.packed.model["weights"] == expected
        assert cache.packed.inputs.undetermined == ()


def test_a_cache_keeps_no_weights_and_names_deleted_models() -> None:
    import gc
    import weakref

    model = small_llama()
    expected, alive = kvpack.Identity.of(model, "raw").header_model, weakref.ref(model.lm_head.weight)
    cache = KvpackCache(model, "raw")
    model(IDS, past_key_values=cache)
    cache.release()
    del model
    gc.collect()
    assert dict(cache.packed.model) == expected
    gc.collect()
    assert alive() is None


def test_an_old_file_is_compared_by_its_sample_with_one_warning(tmp_path: Path) -> None:
    model = small_llama()
    packed = kvpack.load(saved(model, tmp_path / "file"))
    old = replace(packed, model={**packed.model, "weights": sample_digest(model)})
    kvpack.save(old, tmp_path / "old")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        KvpackCache.load(tmp_path / "old", model).release()
    found = [str(one.message) for one in told if issubclass(one.category, KvpackWarning) and "sample" in str(one.message)]
    assert len(found) == 1
    assert "is from an earlier version of kvpack, which recorded only a sample of the model's weights" in found[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KvpackWarning)
        with KvpackCache.load(tmp_path / "old", model) as cache:
            model(FOLLOWING, past_key_values=cache)
            # It does not come to know more than it knew.
            assert cache.packed.model["weights"] == old.model["weights"]
        add_everywhere(model)
        with pytest.raises(InvalidParameter, match="a model whose weights are 'sample-sha256:"):
            KvpackCache.load(tmp_path / "old", model)


def test_unreadable_weights_are_reported(tmp_path: Path) -> None:
    path = saved(small_llama(), tmp_path / "file")
    model = small_llama()
    model.lm_head.to("meta")
    with pytest.warns(KvpackWarning, match="the weights of the model are not in memory .* were compared with the cache's"):
        KvpackCache.load(path, model).release()


def test_a_model_without_a_name_is_not_taken_for_any_other(tmp_path: Path) -> None:
    """A model has no name if, for example, kvpack does not know what its adapters do.

    Where a model must be named, that is an error, and elsewhere a note.
    """
    peft = pytest.importorskip("peft")
    settings = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM")
    unknown = peft.get_peft_model(small_llama(), settings).eval()
    path = saved(small_llama(), tmp_path / "file")
    why = "has the adapter .*AdaptionPrompt.*, which kvpack does not recognize"
    with pytest.raises(InvalidParameter, match=f"but this one cannot be compared with it: .*{why}.*; if both compute the same, use "):
        KvpackCache.load(path, unknown)
    cache = replace(kvpack.load(path), model={})
    KvpackCache.of(cache, unknown).release()
    with KvpackCache(unknown, "raw") as past, torch.inference_mode():
        unknown(IDS, past_key_values=past)
        with pytest.warns(KvpackWarning, match=f"the cache cannot record its model, so a wrong one would not be noticed: .*{why}"):
            assert not past.packed.model


def test_adapters_are_compared_by_all_their_weights(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def made() -> Any:
        torch.manual_seed(1)
        settings = peft.LoraConfig(target_modules=["k_proj", "v_proj"], r=2, init_lora_weights=False)
        return peft.get_peft_model(small_llama(), settings).eval()

    model = made()
    path = saved(model, tmp_path / "file")
    KvpackCache.load(path, made()).release()
    layer = model.base_model.model.model.layers[0].self_attn.k_proj
    for weight, field in ((layer.lora_B["default"].weight, "adapter"), (layer.base_layer.weight, "weights")):
        kept = weight.data.clone()
        weight.data[0, 1] += 2**-12
        with pytest.raises(InvalidParameter, match=f"a model whose {field} (is|are) '"):
            KvpackCache.load(path, model)
        weight.data.copy_(kept)
    KvpackCache.load(path, model).release()


def test_another_dtype_identifies_another_model(tmp_path: Path) -> None:
    path = saved(small_llama(), tmp_path / "file")
    with pytest.raises(InvalidParameter, match="a model whose dtype is 'float32', but this one's is 'bfloat16'"):
        KvpackCache.load(path, in_bf16())
    quarter = small_llama()
    quarter.lm_head.weight.data = quarter.lm_head.weight.data.to(torch.float16)
    with pytest.raises(InvalidParameter, match=REFUSED):
        KvpackCache.load(path, quarter)


@pytest.mark.cuda
def test_a_device_computes_the_same_digest(tmp_path: Path) -> None:
    for make in (small_llama, tied, in_bf16, with_buffer, lambda: small_llama(hidden_size=256, intermediate_size=1000)):
        host, device = make(), make().to("cuda")
        path = saved(host, tmp_path / "file")
        assert digest_weights(list_model_parts(device)).text == digest_weights(list_model_parts(host)).text
        KvpackCache.load(path, device).release()
        with torch.inference_mode(), KvpackCache(device, "raw") as cache:
            device(IDS.to("cuda"), past_key_values=cache)
            one_bit_through_data(device)
            assert cache.packed.model["weights"] == kvpack.load(path).model["weights"]
        with pytest.raises(InvalidParameter, match=REFUSED):
            KvpackCache.load(path, device)
