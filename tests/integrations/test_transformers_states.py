"""Models whose layers hold recurrent or convolution states, with or without keys and values."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

import kvpack
from kvpack.errors import InvalidParameter, KvpackWarning, OutOfBounds
from kvpack.integrations.transformers import KvpackCache
from support.zoo_models import model_of

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = torch.arange(3, 35)[None]
ROWS = torch.cat([PROMPT, PROMPT.flip(1)])
HEADS = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "vocab_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OTHERS: dict[str, dict[str, Any]] = {
    "Lfm2Config": {**HEADS, "layer_types": ["conv", "full_attention", "conv"]},
    "RecurrentGemmaConfig": {**HEADS, "lru_width": 32, "attention_window_size": 12, "head_dim": 8},
}


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def small(name: str) -> Any:
    if name not in OTHERS:
        return model_of(name)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**OTHERS[name])).eval()


def generated(model: Any, ids: torch.Tensor, cache: Any = None, **options: Any) -> list[Any]:
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6, "use_cache": True, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KvpackWarning)
        return model.generate(ids, past_key_values=cache, **options).tolist()


@pytest.mark.parametrize("name", ["Qwen3-Next", "Falcon-H1", "Lfm2Config"])
def test_a_model_generates_into_a_file_and_continues(name: str, tmp_path: Path) -> None:
    model = small(name)
    expected = generated(model, ROWS, max_new_tokens=12)
    with KvpackCache(model, "raw") as cache:
        first = generated(model, ROWS, cache)
        packed = cache.packed
        kvpack.save(packed, tmp_path / "cache")
        states = copy.deepcopy([dict(layer.states) for layer in packed])
    assert any(states)
    with KvpackCache.load(tmp_path / "cache", model) as cache:
        assert generated(model, torch.tensor(first), cache) == expected
    with KvpackCache.of(packed, model) as cache:
        assert generated(model, torch.tensor(first), cache) == expected
    # The model wrote to copies.
    for layer, kept in zip(packed, states, strict=True):
        assert all(torch.equal(layer.states[key], value) for key, value in kept.items())


@pytest.mark.parametrize("name", ["Falcon-H1", "Jamba"])
def test_beams_reorder_states(name: str) -> None:
    model = small(name)
    with KvpackCache(model, "raw") as cache:
        assert generated(model, ROWS, cache, num_beams=3) == generated(model, ROWS, num_beams=3)


@pytest.mark.parametrize("name", ["Falcon-H1", "Jamba", "Lfm2Config", "Llama"])
def test_generate_does_not_compile_a_model(name: str) -> None:
    """On a CUDA device, generate compiles the model if a cache reports a fixed size."""
    with KvpackCache(small(name), "raw") as cache:
        assert not cache.is_compileable


def test_states_that_are_not_kept_cannot_go_back() -> None:
    model = small("Falcon-H1")
    with KvpackCache(model, "raw") as cache:
        generated(model, PROMPT, cache)
        tokens = cache.get_seq_length()
        cache.crop(0)
        with pytest.raises(OutOfBounds, match=r"crop\(-1\): layers\[0\] keeps states, but has none after the first 36 tokens: call reset"):
            cache.crop(-1)
        assert cache.get_seq_length() == tokens
        with pytest.raises(InvalidParameter, match=r"layers\[0\] keeps recurrent states, which cannot be rolled back: use"):
            cache.activate_past_recording()
        packed = cache.packed
        cache.reset()
        assert cache.get_seq_length() == 0
        assert not cache.packed[0].states
        assert generated(model, PROMPT, cache) == generated(model, PROMPT)
    longer = torch.cat([PROMPT, torch.tensor([[*generated(model, PROMPT)[0][32:], 5]])], 1)
    with KvpackCache.of(packed, model, prompt=longer) as cache:
        assert cache.get_seq_length() == tokens
        assert generated(model, longer, cache) == generated(model, longer)
    with pytest.warns(KvpackWarning, match="none of them are kept"), KvpackCache.of(packed, model, prompt=PROMPT) as cache:
        assert cache.get_seq_length() == 0


FOLLOWING = torch.tensor([[7, 40, 9, 22, 5]])


@pytest.mark.parametrize("name", ["Falcon-H1", "Jamba", "Qwen3-Next", "Lfm2Config"])
def test_a_cache_goes_back_to_kept_states(name: str) -> None:
    """The continuation equals that of a cache that ended at the kept states, bit for bit, including keys and values."""
    model = small(name)

    def follows(cache: KvpackCache) -> Any:
        return model(FOLLOWING, past_key_values=cache).logits

    expected = {}
    for tokens in (10, 20):
        with KvpackCache(model, "raw", dense=True) as cache:
            model(PROMPT[:, :10], past_key_values=cache)
            if tokens == 20:
                model(PROMPT[:, 10:20], past_key_values=cache)
            expected[tokens] = follows(cache)
    with KvpackCache(model, "raw", dense=True) as cache:
        cache.snapshot_states()
        assert cache.states_at == ()
        for start, stop in ((0, 10), (10, 20), (20, 32)):
            model(PROMPT[:, start:stop], past_key_values=cache)
            if stop < 32:
                cache.snapshot_states()
        assert cache.states_at == (10, 20)
        with pytest.raises(OutOfBounds, match=r"has none after the first 19 tokens: call rewind\(19\), which returns to"):
            cache.crop(-13)
        assert cache.get_seq_length() == 32
        follows(cache)
        cache.crop(-17)
        assert torch.equal(follows(cache), expected[20])
        assert cache.rewind(24) == 20
        assert torch.equal(follows(cache), expected[20])
        assert cache.rewind(19) == 10
        assert cache.states_at == (10,)
        assert torch.equal(follows(cache), expected[10])
        assert cache.rewind(15) == 15
        packed = cache.packed
        assert list(packed.states_at) == [10]
        assert cache.rewind(9) == 0
        assert cache.states_at == ()
        model(PROMPT[:, :10], past_key_values=cache)
        assert torch.equal(follows(cache), expected[10])
        with pytest.raises(OutOfBounds, match=r"rewind\(16\): the cache holds 15 tokens"):
            cache.rewind(16)
    with KvpackCache.of(packed, model, dense=True) as cache:
        assert cache.states_at == (10, 15)
        cache.crop(-5)
        assert torch.equal(follows(cache), expected[10])
    with KvpackCache.of(packed[:, :10], model, dense=True) as cache:
        assert torch.equal(follows(cache), expected[10])


def test_a_cache_goes_back_for_every_row_and_beam() -> None:
    model = small("Falcon-H1")
    with KvpackCache(model, "raw") as cache:
        model(ROWS[:, :16], past_key_values=cache)
        cache.snapshot_states()
        model(ROWS[:, 16:], past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0, 1]))
        cache.reorder_cache(torch.tensor([2, 1]))
        assert cache.rewind(30) == 16
        found = model(ROWS[:, 16:], past_key_values=cache).logits
        for held in (cache, KvpackCache.of(cache.packed, model)):
            assert copy.deepcopy(held).rewind(20) == 16
    with KvpackCache(model, "raw") as cache:
        model(ROWS.flip(0)[:, :16], past_key_values=cache)
        # The rows are 1 and 0: those that rows 2 and 1 were of the first choice.
        torch.testing.assert_close(found, model(ROWS[:, 16:], past_key_values=cache).logits)


def test_a_failed_pass_is_undone_by_going_back() -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    model = small("Lfm2Config")
    with KvpackCache(model, "raw", dense=True) as cache:
        model(PROMPT[:, :16], past_key_values=cache)
        cache.snapshot_states()
        expected = model(PROMPT[:, 16:], past_key_values=copy.deepcopy(cache)).logits
        for number in (0, 1, 2):
            hook = model.model.layers[number].register_forward_hook(fail)
            with pytest.raises(MemoryError):
                model(PROMPT[:, 16:], past_key_values=cache)
            hook.remove()
            with pytest.raises(InvalidParameter, match="a forward pass over the cache failed"):
                cache.snapshot_states()
            assert cache.rewind(16) == 16
            assert torch.equal(model(PROMPT[:, 16:], past_key_values=copy.deepcopy(cache)).logits, expected)


def test_a_prompt_keeps_as_much_as_states_allow() -> None:
    model = small("Qwen3-Next")
    with KvpackCache(model, "raw") as cache:
        for start in (0, 16):
            model(PROMPT[:, start : start + 16], past_key_values=cache)
            cache.snapshot_states()
        packed = cache.packed
    other = torch.cat([PROMPT[:, :20], FOLLOWING], 1)
    with pytest.warns(KvpackWarning, match="begin with the same 20 tokens, and the first 16 of them are kept: layers keep states"):
        cache = KvpackCache.of(packed, model, prompt=other)
    with cache:
        assert cache.get_seq_length() == 16
        assert generated(model, other, cache) == generated(model, other)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_states_cannot_be_continued_after_a_failed_pass(number: int, error: type[BaseException]) -> None:
    def fail(*_: Any) -> None:
        raise error

    model = small("Lfm2Config")
    cache = KvpackCache(model, "raw")
    model(PROMPT, past_key_values=cache)
    hook = model.model.layers[number].register_forward_hook(fail)
    with pytest.raises(error):
        model(PROMPT, past_key_values=cache)
    hook.remove()
    if number == 2:
        cache.crop(0)
    with pytest.raises(InvalidParameter, match="cannot be rolled back"):
        _ = cache.packed
    for _ in range(2):
        with pytest.raises(InvalidParameter, match="a forward pass over the cache failed, and states cannot be rolled back"):
            model(PROMPT, past_key_values=cache)
    cache.reset()
    expected = model(PROMPT).logits
    torch.testing.assert_close(model(PROMPT, past_key_values=cache).logits, expected)


def test_a_cache_and_a_model_have_the_same_states() -> None:
    model, other = small("Falcon-H1"), model_of("Llama")
    with KvpackCache(model, "raw") as cache:
        generated(model, PROMPT, cache)
        packed = cache.packed
    unnamed = kvpack.Cache(packed.layers, packed.recipe)
    with pytest.raises(InvalidParameter, match=r"layers\[0\] of the cache has the states conv.0 and recurrent.0, which only a model"):
        KvpackCache.of(unnamed)
    with pytest.raises(InvalidParameter, match=r"layers\[0\] of the cache has the states"):
        KvpackCache.of(unnamed, other)
    pairs = kvpack.pack([(torch.zeros(1, 2, 4, 8),) * 2] * 2, "raw")
    with pytest.raises(InvalidParameter, match=r"layers\[0\] of the model keeps states, but the cache has none for it"):
        KvpackCache.of(pairs, model)
    layer = packed[0]
    strange = kvpack.Cache((type(layer)(layer.k, layer.v, states={"conv.7": layer.states["conv.0"]}), packed[1]), packed.recipe)
    with pytest.raises(InvalidParameter, match=r"has the state 'conv.7', but the model keeps conv.0 to conv.0 and recurrent.0"):
        KvpackCache.of(strange, model)


def test_a_model_that_stores_states_in_its_modules_is_refused() -> None:
    model = small("RecurrentGemmaConfig")
    with KvpackCache(model, "raw") as cache:
        model(PROMPT, past_key_values=cache)
        with pytest.raises(
            InvalidParameter, match=r"layers\[0\] contains no state after the cache's tokens: the model keeps its states in its"
        ):
            model(PROMPT[:, :1], past_key_values=cache)
        with pytest.raises(InvalidParameter, match=r"layers\[0\] contains no state"):
            _ = cache.packed
    past = transformers.DynamicCache(config=model.config)
    model(PROMPT, past_key_values=past)
    with pytest.raises(InvalidParameter, match=r"layers\[0\] is a LinearAttentionLayer without a state"):
        kvpack.pack(past, "raw")
