"""Which models may continue packed caches, and the errors for all others."""

from __future__ import annotations

import copy
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BigBirdPegasusConfig,
    BigBirdPegasusForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    DynamicCache,
    EncoderDecoderCache,
    MllamaForCausalLM,
    MllamaTextConfig,
    MoshiConfig,
    MoshiForCausalLM,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import kvpack
from kvpack.cache.cache import Cache
from kvpack.cache.packing import pack
from kvpack.errors import InvalidParameter, InvalidType, KvpackWarning, OutOfBounds
from kvpack.integrations.transformers import KvpackCache, recording
from support.tiny_configs import tiny_config
from support.zoo_models import images, model_of

FP32 = "kv=raw:dtype=fp32"
PROMPT = torch.arange(3, 35)[None]
FOLLOWING = torch.tensor([[7, 40, 9, 22, 5]])


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def recorded(model: Any, **images: Any) -> Cache:
    with recording(model) as record:
        past = model(PROMPT, use_cache=True, **images).past_key_values
    return pack(past, FP32, inputs=record.inputs(past))


def logits_of(model: Any, attention: str, cache: type = DynamicCache, mask: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return the logits of a prefill over a plain cache, and of two passes that continue it."""
    model.set_attn_implementation(attention)
    past = DynamicCache(config=model.config) if cache is DynamicCache else StaticCache(config=model.config, max_cache_len=48)
    result, seen = [], 0
    for part in torch.cat([PROMPT, FOLLOWING], 1).expand(2, -1).split([32, 4, 1], 1):
        seen += part.shape[1]
        result.append(model(part, past_key_values=past, attention_mask=None if mask is None else mask[:, :seen]).logits)
    return result


def test_a_prompt_with_an_image_does_not_change_the_models_identity() -> None:
    """The model stores the position of the text after the image, and sets it again for every prompt."""
    model, other = (model_of("Qwen2-VL", image_token_id=60) for _ in range(2))
    prompt = PROMPT.clone()
    prompt[:, 8:24] = 60
    with KvpackCache(model, "raw") as past:
        model(prompt, past_key_values=past, **images())
        packed = past.packed
    with KvpackCache(model, "raw") as past:
        model(PROMPT, past_key_values=past)
        text = past.packed
    assert text.model == packed.model
    KvpackCache.of(packed, model, rope_deltas=model.model.rope_deltas).release()
    KvpackCache.of(text, other).release()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_explicitly_noncausal_attention_equals_that_over_dense_tensors(attention: str) -> None:
    """Eager attention uses the mask. Without a mask, SDPA uses ``is_causal`` for a prompt, but not for its continuation."""
    model = model_of("Llama", attention=attention)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    for mask in (None, PADDING):
        expected, past = logits_of(model, attention, mask=mask), KvpackCache(model, "raw")
        seen = 0
        for part, own in zip(torch.cat([PROMPT, FOLLOWING], 1).expand(2, -1).split([32, 4, 1], 1), expected, strict=True):
            seen += part.shape[1]
            found = model(part, past_key_values=past, attention_mask=None if mask is None else mask[:, :seen]).logits
            hidden = 5 if seen == 32 and mask is not None else 0
            assert torch.allclose(found[:, hidden:], own[:, hidden:], rtol=0, atol=1e-5 * float(own.abs().max()))
        past.release()


@pytest.mark.scenario
def test_explicitly_noncausal_compiled_attention_is_refused() -> None:
    model = model_of("Llama", attention="eager")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    compiled = torch.compile(model, backend="eager")
    with (
        KvpackCache(model, "raw") as past,
        pytest.raises(InvalidParameter, match=r"Attention has is_causal=False, .* several tokens without compilation"),
    ):
        compiled(PROMPT, past_key_values=past)
    with KvpackCache(model, "raw") as past:
        model(PROMPT, past_key_values=past)
        found = compiled(FOLLOWING[:, :1], past_key_values=past).logits
    past = DynamicCache(config=model.config)
    model(PROMPT, past_key_values=past)
    expected = model(FOLLOWING[:, :1], past_key_values=past).logits
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_a_mask_is_causal_if_the_model_asks_for_one_and_its_attention_is_silent() -> None:
    """BigBirdPegasus has only eager attention, and its ``is_causal`` is False."""
    torch.manual_seed(0)
    sizes = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_layers": 2, "encoder_attention_heads": 4}
    config = BigBirdPegasusConfig(d_model=32, vocab_size=64, max_position_embeddings=64, **sizes)
    model = BigBirdPegasusForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    padding = torch.ones(1, 37, dtype=torch.int64)
    padding[0, :5] = 0
    for mask in (None, padding):
        results = []
        for past in (DynamicCache(config=config), KvpackCache(model, "raw")):
            parts = torch.cat([PROMPT, FOLLOWING], 1).split([24, 12, 1], 1)
            seen = [24, 36, 37]
            logits = [
                model(part, past_key_values=past, attention_mask=None if mask is None else mask[:, :stop]).logits
                for part, stop in zip(parts, seen, strict=True)
            ]
            results.append(torch.cat(logits, 1)[:, 5:])
        past.release()
        assert torch.allclose(*results, rtol=0, atol=1e-5 * float(results[0].abs().max()))


PADDING = torch.ones(2, 37, dtype=torch.int64)
PADDING[1, :5] = 0


@pytest.mark.parametrize("mask", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", ["Llama", "GPT-OSS", "Gemma-2", "Mistral", "GPT-2", "Qwen2-VL", "Llama-4", "DeepSeek-V3", "StableLM"])
def test_dense_tensors_use_the_models_own_attention_bit_for_bit(name: str, cache: type, mask: torch.Tensor | None) -> None:
    model = model_of(name)
    own = model.config._attn_implementation
    expected = logits_of(model, own, cache, mask)
    for one, other in zip(expected, logits_of(model, "kvpack", cache, mask), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT-2"])
def test_dense_tensors_use_eager_attention_if_it_is_named(name: str) -> None:
    model = model_of(name)
    for one, other in zip(logits_of(model, "eager"), logits_of(model, "kvpack|eager"), strict=True):
        assert torch.equal(one, other)
    assert KvpackCache.of(recorded(model), model).get_seq_length() == 32


def test_masks_unsupported_by_packed_attention_work_with_dense_tensors() -> None:
    model = model_of("Llama")
    positions = torch.tensor([[*range(16), *range(16)]])
    found = []
    for attention in ("sdpa", "kvpack"):
        model.set_attn_implementation(attention)
        found.append(model(PROMPT, position_ids=positions, use_cache=False).logits)
    assert torch.equal(*found)


class Box:
    """A mask that is not a tensor, like those of flex attention."""

    def __init__(self, seen: torch.Tensor) -> None:
        self.seen_tokens, self.shape = seen, seen.shape

    @staticmethod
    def attention(module: Any, q: Any, k: Any, v: Any, mask: Box | None, **options: Any) -> Any:
        return sdpa_attention_forward(module, q, k, v, None if mask is None else mask.seen_tokens, **options)

    @staticmethod
    def mask(**options: Any) -> Box:
        return Box(sdpa_mask(**{**options, "allow_is_causal_skip": False}))


def test_non_tensor_masks_are_passed_to_the_attention_that_supports_them() -> None:
    AttentionInterface.register("boxed", Box.attention)
    AttentionMaskInterface.register("boxed", Box.mask)
    model, holes = model_of("Llama"), torch.ones_like(PROMPT)
    holes[0, 5:8] = 0
    expected = [model(PROMPT, attention_mask=mask).logits for mask in (None, holes)]
    model.set_attn_implementation("boxed")
    with KvpackCache(model, "raw") as cache:
        for mask, logits in zip((None, holes), expected, strict=True):
            assert torch.equal(model(PROMPT, attention_mask=mask).logits, logits)
        with pytest.warns(KvpackWarning, match="hides tokens"):
            found = model(PROMPT, attention_mask=holes, past_key_values=cache).logits
    torch.testing.assert_close(found, expected[1])


@pytest.mark.parametrize("mask", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_last_logits_are_part_of_all_logits(attention: str, mask: torch.Tensor | None) -> None:
    """Layers of Gemma-4 that share keys and values receive only the last queries."""
    model = model_of("Gemma-4", attention)
    ids = torch.cat([PROMPT, FOLLOWING], 1).expand(2, -1)
    expected = model(ids, attention_mask=mask).logits[:, -3:]
    with KvpackCache(model, "raw") as packed:
        for cache in (packed, DynamicCache(config=model.config)):
            found = model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=3).logits
            torch.testing.assert_close(found, expected)


def test_a_model_that_selects_keys_by_index_is_refused_under_another_name() -> None:
    """Such a model turns the indices into a mask if its attention is called "sdpa" or "eager"."""
    sizes = {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    config = DeepseekV32Config(
        **{**sizes, **experts, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        vocab_size=64, index_topk=8, index_n_heads=2, index_head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = DeepseekV32ForCausalLM(config).eval()
    expected = model(PROMPT).logits
    with pytest.raises(InvalidParameter, match=r"layers\[0\] of DeepseekV32ForCausalLM keeps a DynamicIndexedLayer"):
        KvpackCache(model, "raw")
    assert torch.equal(model(PROMPT).logits, expected)
    model.set_attn_implementation("kvpack")
    with pytest.raises(InvalidParameter, match="DeepseekV32Attention passes indices in place of a mask, and its own attention would"):
        model(PROMPT)


def test_a_copy_of_a_model_uses_the_same_dense_attention() -> None:
    for attention, weights in (("eager", True), ("sdpa", False)):
        model = model_of("Qwen2-VL", attention)
        with KvpackCache(model, "raw"):
            copied = copy.deepcopy(model)
        for one in (copied, copy.deepcopy(copied)):
            assert any(x is not None for x in one(PROMPT, output_attentions=True).attentions) == weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_over_decoded_lossless_layers_equal_those_of_the_model(dtype: torch.dtype) -> None:
    model = model_of("Llama").to(dtype)
    past = model(PROMPT, use_cache=True).past_key_values
    packed = pack([(layer.keys.clone(), layer.values.clone()) for layer in past.layers], "lossless")
    expected = model(FOLLOWING, past_key_values=past).logits
    with KvpackCache.of(packed, model, dense=True) as cache:
        assert torch.equal(model(FOLLOWING, past_key_values=cache).logits, expected)


@pytest.mark.parametrize("name", ["Falcon", "Falcon (ALiBi)", "Bloom", "DeepSeek-V2", "DeepSeek-V3", "MPT", "Llama-4"])
def test_models_that_need_tensors_get_them_with_a_warning(name: str) -> None:
    model = model_of(name)
    packed = recorded(model)
    expected = model(FOLLOWING, past_key_values=model(PROMPT, use_cache=True).past_key_values).logits
    with pytest.warns(kvpack.KvpackWarning, match=f"{type(model).__name__} has attention that does not support packed layers") as told:
        cache = KvpackCache.of(packed, model)
    assert [one.category for one in told].count(KvpackWarning) == 1
    assert torch.equal(model(FOLLOWING, past_key_values=cache).logits, expected)
    assert cache.packed.tokens == 37
    with warnings.catch_warnings():
        warnings.simplefilter("error", kvpack.KvpackWarning)
        assert torch.equal(model(FOLLOWING, past_key_values=KvpackCache.of(packed, model, dense=True)).logits, expected)


def test_packed_cross_attention_is_decoded_with_a_warning() -> None:
    model = model_of("BART")
    options = {"input_ids": PROMPT, "decoder_input_ids": FOLLOWING}
    past = model(**options, past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache())).past_key_values
    packed = [pack(part, FP32) for part in (past.self_attention_cache, past.cross_attention_cache)]
    options["decoder_input_ids"] = torch.tensor([[9]])
    expected = model(**options, past_key_values=past).logits
    model.set_attn_implementation("kvpack")
    with pytest.warns(kvpack.KvpackWarning, match="was read, which decodes all") as told:
        found = model(**options, past_key_values=EncoderDecoderCache(*(KvpackCache.of(cache) for cache in packed))).logits
    assert [one.category for one in told].count(KvpackWarning) == 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Llama", "Falcon", "DeepSeek-V3"])
def test_an_unchanged_attention_implementation_gives_an_error_with_a_fix(name: str, attention: str) -> None:
    model = model_of(name)
    packed = recorded(model)
    model.set_attn_implementation(attention)
    with pytest.raises(InvalidParameter, match=r'model\.set_attn_implementation\("kvpack"\).*KvpackCache\.of\(cache, dense=True\)'):
        model(FOLLOWING, past_key_values=KvpackCache.of(packed))
    if name == "Llama":
        cache = KvpackCache.of(packed, model)
        model.set_attn_implementation(attention)
        with pytest.raises(InvalidParameter, match=rf"of LlamaForCausalLM is '{attention}'.*model\.set_attn_implementation\(\"kvpack\"\)"):
            model(FOLLOWING, past_key_values=cache)
        model.set_attn_implementation("kvpack")
        model(FOLLOWING, past_key_values=cache)
        assert cache.packed.tokens == 37


TOUCHES: list[Any] = [
    lambda states: states.shape,
    lambda states: states.to("cpu"),
    lambda states: states[..., 0],
    list,
    len,
    lambda states: torch.cat([states]),
    lambda states: torch.zeros(1, 2, 1, 8) @ states,
]


@pytest.mark.parametrize("touch", TOUCHES)
def test_using_packed_states_directly_gives_an_error_with_a_fix(touch: Any) -> None:
    model = model_of("Llama")
    states, _ = KvpackCache.of(recorded(model)).update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)
    with pytest.raises(InvalidParameter, match="set_attn_implementation"):
        touch(states)


def test_a_pass_that_failed_between_layers_cannot_be_continued() -> None:
    model = model_of("Llama")
    cache = KvpackCache.of(recorded(model))
    with pytest.raises(InvalidParameter, match="set_attn_implementation"):
        model(FOLLOWING, past_key_values=cache)
    model.set_attn_implementation("kvpack")
    with pytest.raises(InvalidParameter, match=r"layers\[0\] has seen 37 tokens, but layers\[1\] has seen 32, because a forward"):
        model(FOLLOWING, past_key_values=cache)


def test_a_first_pass_that_failed_between_layers_cannot_be_continued() -> None:
    model = model_of("Llama")
    cache = KvpackCache(model, "raw")
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(FOLLOWING, past_key_values=cache)
    hook.remove()
    with pytest.raises(InvalidParameter, match=r"failed, but tokens 0 to 4, which it added, are still .*: drop them with crop\(-5\)"):
        model(FOLLOWING, past_key_values=cache)
    with pytest.raises(OutOfBounds, match=r"crop\(0\) leaves 5 tokens, but layers\[1\] has seen only 0.*call crop\(-5\) to drop"):
        cache.crop(0)
    cache.reset()
    assert torch.equal(model(FOLLOWING, past_key_values=cache).logits, model(FOLLOWING, past_key_values=KvpackCache(model, "raw")).logits)


def fail(*_: Any) -> None:
    raise MemoryError


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("end", [fail, interrupt])
@pytest.mark.parametrize("module", ["model.layers.1", "lm_head"])
@pytest.mark.parametrize("name", ["Llama", "Gemma-3", "GPT-OSS", "Llama-4"])
def test_a_failed_pass_is_repeated_without_the_tokens_that_it_added(name: str, module: str, end: Any) -> None:
    model = model_of(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KvpackWarning)
        cache = KvpackCache(model, "raw")
        model(PROMPT, past_key_values=cache)
        expected = model(FOLLOWING, past_key_values=copy.deepcopy(cache)).logits
        hook = model.get_submodule(module).register_forward_pre_hook(end)
        with pytest.raises((MemoryError, KeyboardInterrupt)):
            model(FOLLOWING, past_key_values=cache)
        hook.remove()
        for one in (copy.deepcopy(cache), cache) if end is fail else (cache,):
            with pytest.raises(InvalidParameter, match=r"tokens 32 to 36, which it added, are still .*: drop them with crop\(-5\)"):
                model(FOLLOWING, past_key_values=one)
            one.crop(-5)
            assert torch.equal(model(FOLLOWING, past_key_values=one).logits, expected)


def test_generate_continues_after_tokens_of_a_failed_pass() -> None:
    model = model_of("Llama")
    cache = KvpackCache(model, "raw")
    ids = torch.cat([PROMPT, FOLLOWING], 1)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    hook = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.generate(PROMPT, past_key_values=cache, **options)
    hook.remove()
    assert model.generate(ids, past_key_values=cache, **options).tolist() == model.generate(ids, **options).tolist()


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
@pytest.mark.parametrize("dense", [False, True], ids=["packed", "dense"])
def test_gradients_are_not_lost_silently(dense: bool, masked: bool) -> None:
    model = model_of("Llama")
    mask = torch.tensor([[1, 1, 0, 1, 1]]) if masked else None
    with torch.no_grad():
        expected = model(FOLLOWING, attention_mask=mask).logits
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", KvpackWarning)
        logits = model(FOLLOWING, attention_mask=mask, past_key_values=KvpackCache(model, "raw", dense=dense)).logits
        torch.testing.assert_close(logits, expected)
        with pytest.raises(InvalidParameter, match=r"gradients cannot flow through a KvpackCache.*under torch\.no_grad\(\)"):
            logits.sum().backward()
        # Where keys and values have no parameters to train, nothing is lost.
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lm_head" in name)
        model(FOLLOWING, past_key_values=KvpackCache(model, "raw", dense=dense)).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


def test_attention_weights_equal_those_of_dense_layers_or_are_refused() -> None:
    model = model_of("Llama", "eager")
    expected = model(FOLLOWING, output_attentions=True).attentions
    with KvpackCache(model, "raw", dense=True) as cache:
        found = model(FOLLOWING, past_key_values=cache, output_attentions=True).attentions
    assert len(found) == len(expected) == 2
    torch.testing.assert_close(found, expected)
    with KvpackCache(model, "raw") as cache:
        with pytest.raises(InvalidParameter, match="output_attentions=True is not supported with packed layers"):
            model(FOLLOWING, past_key_values=cache, output_attentions=True)
        with pytest.raises(InvalidParameter, match="output_attentions=True is not supported"):
            model.generate(FOLLOWING, past_key_values=cache, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
        assert cache.get_seq_length() == 0


def test_caches_of_other_models_are_refused() -> None:
    model, larger = model_of("Llama", "kvpack"), model_of("Llama", "kvpack", num_hidden_layers=5)
    packed = recorded(larger)
    with pytest.raises(InvalidParameter, match="the cache has 5 layers, but LlamaForCausalLM has 2"):
        KvpackCache.of(packed, model)
    with pytest.raises(InvalidParameter, match="the cache has 5 layers, but the model of this LlamaAttention has 2"):
        model(FOLLOWING, past_key_values=KvpackCache.of(packed))
    with pytest.raises(InvalidParameter, match="the cache has 2 layers, but LlamaForCausalLM has 5"):
        KvpackCache.of(recorded(model), larger)
    heads = recorded(model_of("Llama", num_key_value_heads=4))
    with pytest.raises(
        InvalidParameter, match=r"layers\[0\]: keys have batch, heads and dim \[1, 2, 8\], but the cache has \[1, 4, 8\]"
    ):
        model(FOLLOWING, past_key_values=KvpackCache.of(heads, model))
    wide = recorded(model_of("Llama", head_dim=16))
    with pytest.raises(InvalidParameter, match=r"dim \[1, 2, 8\], but the cache has \[1, 2, 16\]"):
        model(FOLLOWING, past_key_values=KvpackCache.of(wide))


@pytest.mark.parametrize("name", ["Mistral", "Phi-3", "StarCoder2", "Gemma-3", "GPT-OSS"])
def test_sliding_layers_continue_and_are_cropped_within_their_window(name: str) -> None:
    model = model_of(name)
    packed = recorded(model)
    dense = model(PROMPT).past_key_values
    expected = [model(part, past_key_values=dense).logits for part in FOLLOWING.split(1, 1)]
    model.set_attn_implementation("kvpack")
    cache = KvpackCache.of(packed, model)
    with pytest.raises(InvalidParameter, match=r"newest 11 of its tokens \(1 are to be dropped\), but the model attends to a window of 12"):
        cache.crop(-1)
    assert cache.get_seq_length() == 32
    for _ in range(2):
        found = [model(part, past_key_values=cache).logits for part in FOLLOWING.split(1, 1)]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        cache.crop(-5)
    cut = pack([(layer.keys[:, :, 4:], layer.values[:, :, 4:]) for layer in model(PROMPT).past_key_values.layers], FP32)
    assert cut.tokens < 32


def test_dense_sliding_layers_need_the_window() -> None:
    model = model_of("Mistral")
    packed = recorded(model)
    with pytest.raises(InvalidParameter, match=r"layers\[0\] dropped tokens outside its sliding window.* window size: use Kvpack"):
        KvpackCache.of(packed, dense=True)
    expected = model(FOLLOWING, past_key_values=model(PROMPT).past_key_values).logits
    assert torch.equal(model(FOLLOWING, past_key_values=KvpackCache.of(packed, model, dense=True)).logits, expected)


def test_multidimensional_positions_continue_after_the_prompt() -> None:
    global PROMPT
    model = model_of("Qwen2-VL", image_token_id=60)
    text, PROMPT = PROMPT, PROMPT.clone()
    PROMPT[:, 8:24] = 60
    try:
        packed = recorded(model, **images())
        dense = model(PROMPT, **images()).past_key_values
    finally:
        PROMPT = text
    deltas = model.model.rope_deltas
    assert deltas.tolist() == [[-12]]
    assert packed.inputs is not None
    assert packed.inputs.undetermined == (
        "tokens 0 to 31 depend on the arguments image_grid_thw, mm_token_type_ids, pixel_values",
        "tokens 0 to 31 have positions other than those that follow the cache",
    )
    expected = model(FOLLOWING, past_key_values=dense).logits
    model.set_attn_implementation("kvpack")
    with pytest.raises(InvalidParameter, match=r"Qwen2VLForConditionalGeneration has multi-dimensional rotary positions.*rope_deltas="):
        KvpackCache.of(packed, model)
    with pytest.raises(
        InvalidParameter, match=r"Qwen2VLAttention has multi-dimensional rotary positions.*KvpackCache\.of\(cache, model\)"
    ):
        model(FOLLOWING, past_key_values=KvpackCache.of(packed))
    found = model(FOLLOWING, past_key_values=KvpackCache.of(packed, model, rope_deltas=deltas)).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # As in a new process, and after a prompt with other images.
    for other in (None, torch.tensor([[-3]])):
        model.model.rope_deltas = other
        cache = KvpackCache.of(packed, model, rope_deltas=deltas)
        torch.testing.assert_close(model(FOLLOWING, past_key_values=cache).logits, expected, rtol=1e-5, atol=1e-5)
    cache, positions = KvpackCache.of(packed, model, rope_deltas=deltas), torch.arange(32, 32 + FOLLOWING.shape[1]).expand(3, 1, -1)
    with pytest.raises(InvalidParameter, match="gives token 32 the position 32, but after this cache its position is 20"):
        model(FOLLOWING, past_key_values=cache, position_ids=positions)
    found = model(FOLLOWING, past_key_values=cache, position_ids=positions - 12).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_text_continues_in_an_image_model() -> None:
    model = model_of("Qwen2-VL")
    packed = recorded(model)
    expected = model(FOLLOWING, past_key_values=model(PROMPT).past_key_values).logits
    model.set_attn_implementation("kvpack")
    torch.testing.assert_close(model(FOLLOWING, past_key_values=KvpackCache.of(packed, model)).logits, expected, rtol=1e-5, atol=1e-5)
    model.model.rope_deltas = torch.tensor([[-12]])
    torch.testing.assert_close(model(FOLLOWING, past_key_values=KvpackCache.of(packed, model)).logits, expected, rtol=1e-5, atol=1e-5)
    model.model.rope_deltas = None
    unknown = Cache(packed.layers, packed.recipe)
    with pytest.raises(InvalidParameter, match="the cache does not record where they continue"):
        KvpackCache.of(unknown, model)
    found = model(FOLLOWING, past_key_values=KvpackCache.of(unknown, model, rope_deltas=0)).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(InvalidParameter, match="rope_deltas is for models with multi-dimensional rotary positions"):
        KvpackCache.of(packed, model_of("Llama"), rope_deltas=0)


PAST = [(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8))]


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        (KvpackCache.of(pack(PAST, FP32)), "a KvpackCache is not a packed cache: use {}cache.packed"),
        (PAST, "a list is not a packed cache: use {}kvpack.pack(past_key_values, recipe)"),
        (DynamicCache(PAST), "a DynamicCache is not a packed cache: use {}kvpack.pack(past_key_values, recipe)"),
        ("prompt.kvpack", "a str is not a packed cache: use {}kvpack.load('prompt.kvpack')"),
        (Path("prompt.kvpack"), "a PosixPath is not a packed cache: use {}kvpack.load('prompt.kvpack')"),
    ],
)
def test_arguments_that_are_no_packed_caches_give_an_error_with_a_fix(given: Any, instead: str, tmp_path: Path) -> None:
    path = isinstance(given, (str, Path))
    continued = "to continue from a file, use KvpackCache.load(path, model)" if path else instead.format("KvpackCache.of(")
    with pytest.raises(InvalidType, match=re.escape(continued)):
        KvpackCache.of(given)
    with pytest.raises(InvalidType, match=re.escape(instead.format("kvpack.save("))):
        kvpack.save(given, tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_none_is_accepted_because_a_store_returns_it_for_a_miss(tmp_path: Path) -> None:
    with pytest.raises(InvalidType, match=re.escape("use KvpackCache(model, recipe), which creates an empty cache")):
        KvpackCache.of(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="a NoneType is not a packed cache"):
        kvpack.save(None, tmp_path / "file")


def test_arguments_of_another_type_are_refused() -> None:
    with pytest.raises(InvalidType, match=r"model is a list, expected a transformers model, .* such as \{'name': 'llama'\}"):
        pack(PAST, FP32, model=["llama"])  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="model is 'llama', expected the transformers model that will continue from the cache"):
        KvpackCache.of(pack(PAST, FP32), "llama")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="inputs is a list, expected a kvpack"):
        pack(PAST, FP32, inputs=[1, 2])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda model: setattr(model.config, "rms_norm_eps", 1e-3), "config"),
        (lambda model: model.to(torch.bfloat16), "dtype"),
        (lambda model: model.config.rope_parameters.update(rope_theta=5e5), "rope"),
        (lambda model: model.lm_head.weight.data[3, 5:6].neg_(), "weights"),
        (lambda model: model.model.rotary_emb.inv_freq.mul_(2), "config"),
    ],
)
def test_a_cache_that_names_its_model_is_refused_by_another(change: Any, field: str) -> None:
    model = model_of("Llama", "kvpack")
    model.config._name_or_path = "one"
    named = kvpack.Identity.of(model, FP32).header_model
    cache = replace(recorded(model), model=named)
    KvpackCache.of(cache, model)
    change(model)
    with pytest.raises(InvalidParameter, match=f"the cache was computed by a model whose {field} (is|are) '"):
        KvpackCache.of(cache, model)
    KvpackCache.of(replace(cache, model={}), model)


def test_errors_name_the_cause_of_a_difference() -> None:
    """Weights of another dtype differ too, but the message names the dtype."""
    model = model_of("Llama")
    packed = KvpackCache(model, "raw").packed
    with pytest.raises(InvalidParameter, match=r"dtype is 'float32', but this one's is 'bfloat16': load .*dtype=torch\.float32\)"):
        KvpackCache.of(packed, model_of("Llama").to(torch.bfloat16))
    with pytest.raises(InvalidParameter, match="a model whose weights are 'sha256:"):
        KvpackCache.of(packed, model_of("Llama", vocab_size=65))


def test_undetermined_inputs_are_refused_by_a_store_after_a_file(tmp_path: Path) -> None:
    model = model_of("Llama", "kvpack")
    cache = KvpackCache.of(recorded(model), model)
    ids = torch.cat([PROMPT, FOLLOWING, FOLLOWING], 1)
    model(ids[:, 32:], past_key_values=cache, token_type_ids=torch.zeros(1, 10, dtype=torch.int64))
    kvpack.save(cache.packed, tmp_path / "file")
    loaded = kvpack.load(tmp_path / "file")
    assert loaded.inputs == cache.packed.inputs
    with kvpack.Store(tmp_path / "store", kvpack.Identity.of(model, FP32), chunk=8) as store:
        with pytest.raises(InvalidParameter, match="tokens 32 to 41 depend on the argument token_type_ids"):
            store.save(ids, loaded)
        assert store.save(ids[:, :32], loaded[:, :32]) == 32


def test_layers_are_decoded_for_attention_without_the_caches_window() -> None:
    """Moshi passes no window to attention, which sees all tokens that the cache has kept from earlier passes."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 96, "sliding_window": 8}
    model = MoshiForCausalLM(MoshiConfig(**sizes)).eval()
    parts = PROMPT.split([20, 9, 3], 1)
    with (
        KvpackCache(model, "raw", dense=False) as cache,
        pytest.raises(InvalidParameter, match="MoshiAttention attends to all tokens, but its cache keeps"),
    ):
        model(parts[0], past_key_values=cache)
    with pytest.warns(KvpackWarning, match="decodes the keys and values of its layer"):
        cache = KvpackCache(model, "raw")
    past = DynamicCache(config=model.config)
    for part in parts:
        assert torch.equal(model(part, past_key_values=cache).logits, model(part, past_key_values=past).logits)


def test_layers_with_image_tokens_are_refused() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = MllamaForCausalLM(MllamaTextConfig(**sizes, intermediate_size=96, cross_attention_layers=[1], pad_token_id=0))
    with pytest.raises(InvalidParameter, match=r"layers \[1\] of MllamaForCausalLM are cross-attention layers over images"):
        KvpackCache(model, "raw")


def test_a_model_part_without_attention_is_left_unchanged() -> None:
    model = model_of("Qwen2-VL")
    model.config.vision_config._attn_implementation = None
    KvpackCache(model, "raw").release()
    assert model.config.vision_config._attn_implementation is None
    assert model.config._attn_implementation == "sdpa"


def test_a_prefix_is_not_causal_only_in_the_first_pass(tmp_path: Path) -> None:
    """The model calls a pass the first if its cache is not initialized. The second pass is longer than the first."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("hrm_text")).eval()
    assert model.config.prefix_lm
    passes = [{"input_ids": ids, "token_type_ids": torch.ones_like(ids)} for ids in (FOLLOWING, PROMPT)]
    plain = DynamicCache(config=model.config)
    expected = [model(**given, past_key_values=plain).logits for given in passes]
    with KvpackCache(model, FP32, dense=True) as past:
        assert not past.is_initialized
        logits = model(**passes[0], past_key_values=past).logits
        torch.testing.assert_close(logits, expected[0])
        assert past.is_initialized
        kvpack.save(past.packed, tmp_path / "prefix.kvpack")
        past.reset()
        assert not past.is_initialized
    with KvpackCache.load(tmp_path / "prefix.kvpack", model, dense=True) as past:
        assert past.is_initialized
        torch.testing.assert_close(model(**passes[1], past_key_values=past).logits, expected[1])
