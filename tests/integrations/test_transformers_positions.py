"""Multi-dimensional rotary positions: a cache continues after the images of its prompt.

It does so in any process, and after any other prompt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers import DynamicCache

import kvpack
from kvpack import InvalidParameter
from kvpack.integrations.transformers import KvpackCache
from kvpack.integrations.transformers.models import Model, has_multidimensional_positions
from support.tiny_configs import tiny_config
from support.zoo_models import images, model_of

if TYPE_CHECKING:
    from pathlib import Path

PROMPT, FOLLOWING = torch.arange(3, 35)[None], torch.tensor([[7, 40, 9, 22, 5]])
WITH_IMAGE = PROMPT.clone()
WITH_IMAGE[:, 8:24] = 60
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
HEADS = {
    "qwen2_vl": 128,
    "qwen2_5_vl": 128,
    "qwen3_vl": 8,
    "qwen3_5": 8,
    "glm4v": 64,
    "glm4v_moe": 128,
    "paddleocr_vl": 128,
    "cohere_compass": 8,
    "minicpmv4_7": 8,
}
"""Model types whose sections of rotary dimensions are not in the configuration, with a head dim that fits the default sections."""


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def tiny(model_type: str, kind: str = "AutoModelForImageTextToText") -> Any:
    torch.manual_seed(0)
    config = tiny_config(model_type)
    text = config.get_text_config(decoder=True)
    text.head_dim = HEADS[model_type]
    text.hidden_size = text.num_attention_heads * max(8, text.head_dim)
    model = getattr(transformers, kind).from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.generation_config.update(eos_token_id=None, pad_token_id=0, bos_token_id=0)
    return model


def positions(first: int, last: int) -> torch.Tensor:
    """Return the positions ``[first, last)`` of a prompt whose tokens 8 to 23 are an image that spans 4 positions."""
    tokens = torch.arange(first, last)
    placed = torch.where(tokens < 8, tokens, torch.where(tokens < 24, 8 + (tokens - 8) // 4, tokens - 12))
    return placed.expand(3, 1, -1).contiguous()


@pytest.mark.scenario
@pytest.mark.parametrize("model_type", HEADS)
def test_a_file_continues_after_the_image(model_type: str, tmp_path: Path) -> None:
    model, new = tiny(model_type), tiny(model_type)
    assert "mrope_section" not in str(model.config)
    dense = DynamicCache(config=model.config.get_text_config(decoder=True))
    model(PROMPT, position_ids=positions(0, 32), past_key_values=dense)
    expected = model(FOLLOWING, position_ids=positions(32, 37), past_key_values=dense).logits
    with KvpackCache(model, "raw") as past:
        model(PROMPT, position_ids=positions(0, 32), past_key_values=past)
        kvpack.save(past.packed, tmp_path / "prompt")
    assert kvpack.load(tmp_path / "prompt").position_offsets == (-12,)
    found = new(FOLLOWING, past_key_values=KvpackCache.load(tmp_path / "prompt", new)).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    past = KvpackCache.load(tmp_path / "prompt", new)
    options = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, "max_new_tokens": 1}
    logits = new.generate(torch.cat([PROMPT, FOLLOWING], 1), past_key_values=past, **options).logits[0]
    torch.testing.assert_close(logits, expected[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", sorted(HEADS.keys() - {"qwen3_5", "minicpmv4_7"}))
def test_attention_alone_identifies_models_with_several_position_dimensions(model_type: str) -> None:
    model = tiny(model_type)
    with KvpackCache(model, "raw") as past:
        model(PROMPT, position_ids=positions(0, 32), past_key_values=past)
        packed = past.packed
    with pytest.raises(InvalidParameter, match=r"use KvpackCache\.of\(cache, model\)"):
        KvpackCache.of(packed)
    model.set_attn_implementation("kvpack")
    alone = KvpackCache.of(replace(packed, position_offsets=None))
    with pytest.raises(InvalidParameter, match=r"has multi-dimensional rotary positions, which need the model"):
        model(FOLLOWING, past_key_values=alone)
    with pytest.raises(InvalidParameter, match="does not record where they continue"):
        KvpackCache.of(replace(packed, position_offsets=None), model)


@pytest.mark.parametrize("name", ["Llama", "Gemma-3", "GPT-OSS"])
def test_other_models_have_one_dimensional_positions(name: str) -> None:
    model = model_of(name)
    assert not Model(model).has_multidimensional_positions
    assert not any(has_multidimensional_positions(module) for module in model.modules())
    with KvpackCache(model, "raw") as past:
        model(PROMPT, past_key_values=past)
        packed = past.packed
    assert packed.position_offsets is None
    with pytest.raises(InvalidParameter, match=r"rotary positions, but .*ForCausalLM has none"):
        KvpackCache.of(replace(packed, position_offsets=(-12,)), model)


def test_caches_of_two_prompts_take_turns() -> None:
    """The model stores where one prompt continues, while each cache stores it for its own prompt."""
    model = model_of("Qwen2-VL", image_token_id=60)
    image, text = KvpackCache(model, "raw"), KvpackCache(model, "raw")
    model(WITH_IMAGE, past_key_values=image, **images())
    model(PROMPT, past_key_values=text)
    assert (image.packed.position_offsets, text.packed.position_offsets) == ((-12,), None)
    stored = image.packed
    for step in range(5):
        for past, prompt in ((image, WITH_IMAGE), (text, PROMPT)):
            ids = torch.cat([prompt, FOLLOWING[:, : step + 1]], 1)
            found = model(ids[:, -1:], past_key_values=past).logits
            expected = model(ids, **(images(33 + step) if past is image else {})).logits[:, -1:]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # The tokens that follow are text, and the offset stays.
    assert image.packed.position_offsets == (-12,)
    ids = torch.cat([WITH_IMAGE, FOLLOWING], 1)
    expected = model.generate(ids, **GREEDY, **images(37))
    model(PROMPT, past_key_values=KvpackCache(model, "raw"))
    assert model.generate(ids, past_key_values=KvpackCache.of(stored, model), **GREEDY).tolist() == expected.tolist()


def test_beams_continue_after_a_stored_image() -> None:
    model, new = (model_of("Qwen2-VL", image_token_id=60) for _ in range(2))
    with KvpackCache(model, "raw") as past:
        model(WITH_IMAGE, past_key_values=past, **images())
        packed = past.packed
    options = {**GREEDY, "num_beams": 3}
    expected = model.generate(WITH_IMAGE, **options, **images())
    past = KvpackCache.of(packed[:, :32], new)
    # At least one token follows the cache.
    past.crop(-1)
    with pytest.raises(InvalidParameter, match="does not record where positions continue after them"):
        new.generate(WITH_IMAGE, past_key_values=past, **options)
    with KvpackCache(model, "raw") as past:
        model(WITH_IMAGE, past_key_values=past, **images())
        past.crop(-1)
        assert past.packed.position_offsets == (-12,)
        packed = past.packed
    assert new.generate(WITH_IMAGE, past_key_values=KvpackCache.of(packed, new), **options).tolist() == expected.tolist()


def test_rows_of_a_padded_batch_have_their_own_positions() -> None:
    model, new = (model_of("Qwen2-VL") for _ in range(2))
    rows = torch.cat([PROMPT, torch.nn.functional.pad(PROMPT[:, 9:], (9, 0))])
    mask = (rows != 0).long()
    following = torch.cat([rows, FOLLOWING.expand(2, -1)], 1)
    longer = torch.nn.functional.pad(mask, (0, FOLLOWING.shape[1]), value=1)
    expected = model.generate(following, attention_mask=longer, **GREEDY)
    with KvpackCache(model, "raw") as past:
        model.generate(rows, attention_mask=mask, past_key_values=past, max_new_tokens=1, do_sample=False)
        packed = past.packed
    assert packed.position_offsets == (0, -9)
    found = new.generate(following, attention_mask=longer, past_key_values=KvpackCache.of(packed, new), **GREEDY)
    assert found.tolist() == expected.tolist()
    swapped = packed.select([1, 0])
    assert swapped.position_offsets == (-9, 0)


def test_recorded_positions_must_match() -> None:
    model = model_of("Qwen2-VL", image_token_id=60)
    with KvpackCache(model, "raw") as past:
        model(WITH_IMAGE, past_key_values=past, **images())
        packed = past.packed
    KvpackCache.of(packed, model, rope_deltas=torch.tensor([[-12]])).release()
    with pytest.raises(InvalidParameter, match=r"rope_deltas is \[0\], but the cache records \[-12\]: omit rope_deltas"):
        KvpackCache.of(packed, model, rope_deltas=0)
