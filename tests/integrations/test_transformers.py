"""transformers models return the same results over packed layers as over the unpacked tensors."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
)

from kvpack.attention import attend
from kvpack.cache.cache import Cache
from kvpack.cache.layer import Layer
from kvpack.cache.packing import pack
from kvpack.formats.errors import InvalidParameter, InvalidType, KvpackWarning, OutOfBounds
from kvpack.integrations.transformers import KvpackCache
from kvpack.integrations.transformers import attention as packed_attention
from kvpack.integrations.transformers.masks import mask
from kvpack.integrations.transformers.states import PackedLength

RECIPES = ["raw", "kivi-2", "kivi-2;tail=64", "kv=group:b=4,g=32,rotation=signed-hadamard;layers=0:v=raw"]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 50}


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def small_model(attention: str = "kvpack", **config: Any) -> Any:
    torch.manual_seed(0)
    config |= {"num_hidden_layers": 3, "bos_token_id": 0, "eos_token_id": None, "attn_implementation": attention}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **config)).eval()


def prefill(model: Any, tokens: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(tokens, past_key_values=cache)
    return cache


def unpacked(cache: Cache) -> DynamicCache:
    return DynamicCache([layer.unpack(torch.float32) for layer in cache])


def token_ids(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 50, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def dense_attention(q: torch.Tensor, layer: Layer, *, scale: float, **options: Any) -> torch.Tensor:
    """Return the output of ordinary attention over the unpacked layer."""
    assert options == {"causal": True, "softcap": None, "sliding_window": None, "sink_logits": None, "starts": None}
    k, v = layer.unpack(torch.float32)
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)


def test_attention_sinks_of_a_model_become_sink_logits() -> None:
    model = small_model()
    layer = pack(prefill(model, token_ids(1, 20)), "kivi-4")[0]
    q, logits = torch.randn(1, 4, 3, 32), torch.tensor([1.0, 0.0, -1.0, 4.0])
    found, _ = packed_attention(model.model.layers[0].self_attn, q, layer, layer, None, scaling=0.2, s_aux=logits)
    expected = attend(q, layer, scale=0.2, sink_logits=logits)
    assert torch.equal(found, expected.transpose(1, 2))
    assert not torch.allclose(expected, attend(q, layer, scale=0.2))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("recipe", RECIPES)
def test_continuing_equals_continuing_over_unpacked_tensors(recipe: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    packed = pack(prefill(model, token_ids(batch, 83)), recipe)
    following = token_ids(batch, 9, seed=1)
    over_packed = KvpackCache.of(packed)
    found = [model(part, past_key_values=over_packed).logits for part in following.split([6, 1, 2], 1)]
    assert over_packed.packed.tokens == over_packed.get_seq_length() == 92
    monkeypatch.setattr("kvpack.live.layer.attend", dense_attention)
    over_packed = KvpackCache.of(packed)
    expected = [model(part, past_key_values=over_packed).logits for part in following.split([6, 1, 2], 1)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", ["kivi-2;tail=256", "raw"])
def test_raw_new_tokens_give_the_same_results_as_a_dense_cache(recipe: str) -> None:
    model = small_model().to(torch.bfloat16)
    packed = pack(prefill(model, token_ids(2, 300)), recipe)
    following = token_ids(2, 20, seed=1)
    found = model(following, past_key_values=KvpackCache.of(packed)).logits.float()
    expected = model(following, past_key_values=DynamicCache([layer.unpack(torch.bfloat16) for layer in packed])).logits.float()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)


def test_decoding_token_by_token_equals_one_chunk() -> None:
    model = small_model()
    packed = pack(prefill(model, token_ids(1, 40)), "kv=raw:dtype=fp32")
    following = token_ids(1, 6, seed=2)
    whole = model(following, past_key_values=KvpackCache.of(packed)).logits
    cache = KvpackCache.of(packed)
    steps = [model(following[:, i : i + 1], past_key_values=cache).logits for i in range(6)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)
    dense = model(following, past_key_values=unpacked(packed)).logits
    torch.testing.assert_close(whole, dense, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"do_sample": False}, {"num_beams": 3, "do_sample": False}, {"num_beams": 2, "num_return_sequences": 2, "do_sample": False}],
    ids=["greedy", "beams", "beams returned"],
)
@pytest.mark.parametrize("recipe", ["kv=raw:dtype=fp32", "kv=group:b=4,g=16,outliers=3,sinks=4,channel_scale=fp16;tail=48"])
def test_generate_returns_the_same_tokens_as_over_unpacked_tensors(recipe: str, options: dict[str, Any]) -> None:
    model = small_model()
    prompt = token_ids(1, 60)
    packed = pack(prefill(model, prompt[:, :50]), recipe)
    options |= {"max_new_tokens": 12, "pad_token_id": 0}
    # generate repeats a caller's cache for beams only when it made it, so both caches get their rows here.
    beams = options.get("num_beams", 1)
    over_packed, dense = KvpackCache.of(packed), unpacked(packed)
    over_packed.batch_repeat_interleave(beams)
    dense.batch_repeat_interleave(beams)
    found = model.generate(prompt, past_key_values=over_packed, **options)
    expected = model.generate(prompt, past_key_values=dense, **options)
    assert found.tolist() == expected.tolist()
    assert over_packed.packed.tokens == found.shape[1] - 1


def test_the_packed_cache_never_changes() -> None:
    model = small_model()
    packed = pack(prefill(model, token_ids(1, 70)), "kivi-2")
    before = [tensor.clone() for layer in packed for tensor in layer.unpack(torch.float32)]
    model.generate(token_ids(1, 75), past_key_values=KvpackCache.of(packed), max_new_tokens=70, do_sample=False, pad_token_id=0)
    after = [tensor for layer in packed for tensor in layer.unpack(torch.float32)]
    assert packed.tokens == 70
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_tokens_can_be_cropped_and_rows_selected() -> None:
    model = small_model()
    packed = pack(prefill(model, token_ids(3, 70)), "kivi-2")
    cache = KvpackCache.of(packed)
    cache.crop(-5)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert cache.get_seq_length() == 65
    assert cache.batch_size == 2
    for mine, theirs in zip(cache.packed, packed, strict=True):
        for found, expected in zip(mine.unpack(), theirs.unpack(), strict=True):
            assert torch.equal(found, expected[[2, 0], :, :65])
    with pytest.raises(OutOfBounds, match=r"crop\(-66\)"):
        cache.crop(-66)
    with pytest.raises(
        OutOfBounds, match=r"crop\(30\): expected the number of tokens to drop, as a negative number; crop\(30 - cache.get_seq"
    ):
        cache.crop(30)
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("tokens", [12, 40], ids=["inside the window", "beyond the window"])
def test_sliding_windows_and_softcap_give_the_same_results(tokens: int) -> None:
    torch.manual_seed(0)
    options = {"num_hidden_layers": 2, "sliding_window": 16, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, **options, attn_implementation="eager")).eval()
    dense = prefill(model, token_ids(1, tokens))
    packed = pack(dense, "kv=raw:dtype=fp32")
    following = token_ids(1, 5, seed=1)
    expected = model(following, past_key_values=dense).logits
    model.set_attn_implementation("kvpack")
    cache = KvpackCache.of(packed)
    found = model(following, past_key_values=cache).logits
    assert cache.is_sliding == [tokens > 15, False]
    assert cache.get_seq_length(0) == cache.get_seq_length(1) == tokens + 5
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_layer_without_its_oldest_tokens_requires_a_window() -> None:
    model = small_model()
    packed = pack(prefill(model, token_ids(1, 30)), "raw")
    newest = replace(packed[1], k=packed[1].k.slice(10, 30), v=packed[1].v.slice(10, 30), skipped=10)
    with pytest.raises(InvalidParameter, match="newest 20 of its earlier tokens"):
        model(token_ids(1, 2), past_key_values=KvpackCache.of(replace(packed, layers=(packed[0], newest))))


def test_a_layer_that_ends_before_the_cache_is_not_continued() -> None:
    pairs = [layer.unpack(torch.float32) for layer in pack(prefill(small_model(), token_ids(1, 30)), "raw")]
    pairs[1] = (pairs[1][0][:, :, 10:], pairs[1][1][:, :, 10:])
    with pytest.raises(InvalidParameter, match=r"layers\[1\] ends at position 20.* the cache ends at 30"):
        KvpackCache.of(pack(pairs, "raw"))


@pytest.mark.parametrize("tokens", [1, 4, 23])
def test_tensors_fall_back_to_dense_attention(tokens: int) -> None:
    first, following = token_ids(2, 19), token_ids(2, tokens, seed=1)
    logits = []
    for attention in ("kvpack", "eager"):
        model = small_model(attention)
        logits.append(model(following, past_key_values=prefill(model, first)).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)


def test_a_window_may_require_dense_attention() -> None:
    logits = []
    for attention in ("kvpack", "eager"):
        model = small_model(attention, use_sliding_window=True, sliding_window=8, max_window_layers=1)
        logits.append(model(token_ids(1, 7, seed=1), past_key_values=prefill(model, token_ids(1, 19))).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)


def test_a_layer_is_decoded_for_a_mask_that_hides_tokens() -> None:
    model = small_model()
    packed = pack(prefill(model, token_ids(2, 6)), "raw")
    hidden = torch.ones(2, 9, dtype=torch.long)
    model(token_ids(2, 3), past_key_values=KvpackCache.of(packed), attention_mask=hidden)
    hidden[1, 1:3] = 0
    shifted = torch.zeros(2, 1, 3, 9).masked_fill(hidden[:, None, None] == 0, float("-inf"))
    for given in (hidden, shifted):
        expected = model(token_ids(2, 3), past_key_values=unpacked(packed), attention_mask=given).logits
        with pytest.warns(KvpackWarning, match="the attention mask hides tokens other than left padding") as told:
            found = model(token_ids(2, 3), past_key_values=KvpackCache.of(packed), attention_mask=given).logits
        assert [one.category for one in told].count(KvpackWarning) == 1
        assert torch.equal(found, expected)
    with (
        pytest.warns(KvpackWarning),
        pytest.raises(InvalidParameter, match=r"the attention mask has 8 columns, but layers\[0\] has 9 tokens for a pass of 3"),
    ):
        model(token_ids(2, 3), past_key_values=KvpackCache.of(packed), attention_mask=shifted[..., :8])
    with pytest.raises(InvalidParameter, match=r"passes \(a mask\): use KvpackCache\.of\(cache, model, dense=True\)"):
        packed_attention(model.model.layers[0].self_attn, torch.zeros(2, 4, 3, 32), packed[0], packed[0], shifted)


def test_masks_that_packed_attention_does_not_apply_are_built() -> None:
    model = small_model()
    options = {"batch_size": 1, "q_length": 2, "q_offset": 6, "dtype": torch.float32, "use_vmap": False}
    assert mask(kv_length=PackedLength(8), config=model.config, **options) is None
    every = {"mask_function": lambda batch, head, q, k: q >= k - 1}
    found = mask(kv_length=PackedLength(8), config=model.config, **options, **every)
    assert found.flatten(0, 2).tolist() == [[True] * 8] * 2
    # Columns that are not there hide their tokens.
    short = mask(kv_length=PackedLength(8), config=model.config, **options, attention_mask=torch.ones(1, 7, dtype=torch.bool))
    assert short.flatten(0, 2).tolist() == [[True] * 7 + [False]] * 2


def test_the_filled_part_of_a_static_cache_is_packed() -> None:
    model = small_model("eager")
    cache, dense = StaticCache(config=model.config, max_cache_len=40), prefill(model, token_ids(1, 25))
    model(token_ids(1, 25), past_key_values=cache)
    found, expected = pack(cache, "kv=raw:dtype=fp32"), pack(dense, "kv=raw:dtype=fp32")
    assert found.tokens == 25
    for mine, theirs in zip(found.unpack(torch.float32), expected.unpack(torch.float32), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_cache_with_tokens_at_other_positions_is_refused() -> None:
    cache = prefill(small_model(), token_ids(1, 25))
    layer = cache.layers[1]
    layer.get_seq_length = lambda: 30
    with pytest.raises(InvalidParameter, match=r"layers\[1\]: the DynamicLayer has seen 30 tokens but contains the keys of 25"):
        pack(cache, "kivi-2")


def test_a_packed_cache_is_not_packed_again() -> None:
    packed = pack(prefill(small_model(), token_ids(1, 25)), "kivi-2")
    for past, name in ((packed, "a Cache"), (KvpackCache.of(packed), "a KvpackCache")):
        with pytest.raises(InvalidType, match=f"{name} is already packed: change its recipe with Cache.convert"):
            pack(past, "kivi-4")


def test_a_copy_continues_independently() -> None:
    model = small_model()
    cache = KvpackCache.of(pack(prefill(model, token_ids(1, 40)), "kivi-2"))
    other = copy.deepcopy(cache)
    first = model(token_ids(1, 7, seed=1), past_key_values=other).logits
    assert (cache.get_seq_length(), other.get_seq_length()) == (40, 47)
    assert torch.equal(model(token_ids(1, 7, seed=1), past_key_values=cache).logits, first)


def test_an_unsuitable_cache_is_refused() -> None:
    model = small_model()
    packed = pack(prefill(model, token_ids(1, 6)), "raw")
    with pytest.raises(OutOfBounds, match="layer 2, but the packed cache has 2 layers"):
        model(token_ids(1, 2), past_key_values=KvpackCache.of(Cache(packed.layers[:2], packed.recipe)))
    with pytest.raises(InvalidParameter, match="keys have batch, heads and dim"):
        model(token_ids(2, 2), past_key_values=KvpackCache.of(packed))
    with pytest.raises(InvalidParameter, match="starts at position 5"):
        KvpackCache.of(Cache(packed.layers, packed.recipe, start=5))


def test_from_pretrained_accepts_the_attention_name(tmp_path: Any) -> None:
    small_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="kvpack")
    assert model.config._attn_implementation == "kvpack"
    assert AttentionInterface()["kvpack"] is packed_attention
