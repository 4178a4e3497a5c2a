"""Tests of packing transformers' own caches: layers, positions, and refusals that name the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer, MtpCache, StaticIndexedLayer

import kvpack
from kvpack.formats.errors import InvalidParameter, InvalidType

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {
    "Mistral": {},
    "Phi3": {},
    "Starcoder2": {},
    "Gemma2": {"head_dim": 16},
    "GptOss": {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
}
LINEAR = {"layer_types": ["full_attention", "linear_attention"], "head_dim": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
STATES = {
    "FalconH1": (
        MAMBA | {"mamba_d_ssm": 64},
        0,
        ("conv", "recurrent"),
    ),
    "Jamba": (
        {"attn_layer_period": 2, "attn_layer_offset": 0, "num_experts": 2},
        1,
        ("conv", "recurrent"),
    ),
    "Bamba": (MAMBA | {"attn_layer_indices": [0]}, 1, ("conv", "recurrent")),
    "Qwen3Next": (
        LINEAR
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        1,
        ("conv", "recurrent"),
    ),
    "Lfm2": ({"layer_types": ["full_attention", "conv"]}, 1, ("conv",)),
}
WINDOW = 16


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def small_model(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name}ForCausalLM")
    return model_class(model_class.config_class(**(SIZES | options))).eval()


def token_ids(tokens: int) -> torch.Tensor:
    return torch.randint(0, 50, (1, tokens), generator=torch.Generator().manual_seed(0))


def filled(model: Any, tokens: int, cache: Any = None) -> Any:
    """Return the model's cache after ``tokens`` tokens, which are computed in two forward passes."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    model(token_ids(tokens)[:, : tokens - 3], past_key_values=cache)
    model(token_ids(tokens)[:, tokens - 3 :], past_key_values=cache)
    return cache


@pytest.mark.parametrize("tokens", [WINDOW - 4, WINDOW, 50])
@pytest.mark.parametrize("name", SLIDING)
def test_the_newest_tokens_of_a_sliding_window_are_packed(name: str, tokens: int) -> None:
    model = small_model(name, sliding_window=WINDOW, **SLIDING[name])
    whole, cache = filled(model, tokens, DynamicCache()), filled(model, tokens)
    packed = kvpack.pack(cache, "kv=raw:dtype=fp32")
    assert (packed.tokens, packed.stop) == (tokens, tokens)
    for layer, own, every in zip(packed, cache.layers, whole.layers, strict=True):
        held = min(tokens, WINDOW - 1) if isinstance(own, DynamicSlidingWindowLayer) else tokens
        assert (layer.skipped, layer.tokens) == (tokens - held, held)
        # Later layers attend over the same windows, so the cache that drops nothing holds the same tokens and more.
        for found, expected in zip(layer.unpack(torch.float32), (every.keys, every.values), strict=True):
            torch.testing.assert_close(found, expected[:, :, tokens - held :], rtol=1e-4, atol=1e-5)
        assert torch.equal(layer.unpack(torch.float32)[0], own.keys)


@pytest.mark.parametrize("tokens", [WINDOW - 4, WINDOW, 50])
@pytest.mark.parametrize("name", ["Mistral", "Gemma2"])
def test_the_filled_part_of_a_static_cache_is_packed_at_its_positions(name: str, tokens: int) -> None:
    model = small_model(name, sliding_window=WINDOW, **SLIDING[name])
    whole, cache = filled(model, tokens, DynamicCache()), filled(model, tokens, StaticCache(config=model.config, max_cache_len=64))
    packed = kvpack.pack(cache, "kv=raw:dtype=fp32")
    assert packed.tokens == tokens
    for layer, own, every in zip(packed, cache.layers, whole.layers, strict=True):
        held = min(tokens, WINDOW) if own.is_sliding else tokens
        assert (layer.skipped, layer.tokens) == (tokens - held, held)
        torch.testing.assert_close(layer.unpack(torch.float32)[0], every.keys[:, :, tokens - held :], rtol=1e-4, atol=1e-5)


def test_a_store_refuses_layers_that_dropped_tokens(tmp_path: Any) -> None:
    model = small_model("Mistral", sliding_window=WINDOW)
    cache, ids = filled(model, 70), token_ids(70)
    store = kvpack.Store(tmp_path, kvpack.Identity("model", "raw", weights="w"), chunk=8)
    with pytest.raises(InvalidParameter, match=r"layers\[0\] holds 15 of 70 tokens, positions 55 to 69, but the store has the first 0"):
        store.save(ids, kvpack.pack(cache, "raw"))
    with pytest.raises(InvalidParameter, match="token_ids has 70 ids, but the cache has 15 tokens"):
        store.save(ids, kvpack.pack([(layer.keys, layer.values) for layer in cache.layers], "raw"))
    assert store.match(ids) == 0
    inside = kvpack.pack(filled(model, WINDOW - 1), "raw")
    assert store.save(ids[:, : WINDOW - 1], inside) == 8


@pytest.mark.parametrize("name", STATES)
def test_layer_states_are_kept(name: str) -> None:
    options, layer, kinds = STATES[name]
    model = small_model(name, **options)
    cache = model(token_ids(12), use_cache=True).past_key_values
    packed = kvpack.pack(cache, "raw")
    assert list(packed[layer].states) == [f"{kind}.0" for kind in kinds]
    for kind in kinds:
        assert torch.equal(packed[layer].states[f"{kind}.0"], getattr(cache.layers[layer], f"{kind}_states")[0])


def test_unknown_states_are_refused_by_name() -> None:
    cache = small_model("MiniMax", **LINEAR, num_local_experts=2)(token_ids(12), use_cache=True).past_key_values
    with pytest.raises(InvalidParameter, match="the cache is a MiniMaxCache: its linear_cache"):
        kvpack.pack(cache, "raw")


def test_layers_that_share_keys_have_no_sides() -> None:
    options: dict[str, Any] = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50, "laurel_rank": 4, "head_dim": 16}
    options |= SIZES | {"num_hidden_layers": 3, "num_kv_shared_layers": 1, "sliding_window": WINDOW, "activation_sparsity_pattern": None}
    config = transformers.Gemma3nTextConfig(**options)
    torch.manual_seed(0)
    cache = filled(transformers.Gemma3nForCausalLM(config).eval(), 20)
    assert [type(layer).__name__ for layer in cache.layers][-1] == "DummyLayer"
    assert [(list(layer.sides), layer.skipped) for layer in kvpack.pack(cache, "raw")] == [(["k", "v"], 5), (["k", "v"], 5), ([], 0)]


def test_both_halves_of_an_encoder_decoder_cache_are_packed() -> None:
    options = {"d_model": 32, "d_ff": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16, "vocab_size": 50, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**options)).eval()
    cache = model(input_ids=token_ids(7), decoder_input_ids=token_ids(3), use_cache=True).past_key_values
    with pytest.raises(InvalidParameter, match=r"EncoderDecoderCache contains two caches, .* pack its self_attention_cache"):
        kvpack.pack(cache, "raw")
    assert kvpack.pack(cache.self_attention_cache, "raw").tokens == 3
    assert kvpack.pack(cache.cross_attention_cache, "raw").tokens == 7


X = torch.zeros(1, 1, 8, 16)


def with_layer(layer: Any, tokens: int = 8) -> DynamicCache:
    """Return a cache with a plain layer, followed by ``layer``. Both contain tokens."""
    cache = DynamicCache()
    cache.update(X, X, 0)
    layer.update(X[:, :, :tokens], X[:, :, :tokens])
    cache.layers.append(layer)
    return cache


def indexed(layer: Any) -> Any:
    layer.update_indexer(torch.zeros(1, 8, 4))
    return layer


class WithMore(DynamicLayer):
    """A layer with an attribute that kvpack does not know."""

    def __init__(self, more: Any) -> None:
        super().__init__()
        self.more = more


class Slotted(DynamicLayer):
    __slots__ = ("hidden",)

    def __init__(self) -> None:
        super().__init__()
        self.hidden = X


class Unknown:
    """A class that resembles a cache layer, but that kvpack does not know."""

    def __init__(self, seen: int, **more: Any) -> None:
        self.keys = self.values = X
        self.seen_tokens = seen
        self.__dict__ |= more

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Leave the contents unchanged."""

    def get_seq_length(self) -> int:
        return self.seen_tokens


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (indexed(DynamicIndexedLayer()), r"layers\[1\] is a DynamicIndexedLayer: its indexer_keys cannot be packed"),
        (indexed(StaticIndexedLayer(max_cache_len=9)), r"StaticIndexedLayer: its indexer_keys and indexer_cumulative_length"),
        (DynamicIndexedLayer(), r"layers\[1\] is a DynamicIndexedLayer: a cache of this class cannot be packed"),
        (WithMore(torch.zeros(1)), r"layers\[1\] is a WithMore: its more cannot be packed"),
        (WithMore({"states": [None, (torch.zeros(1),)]}), "its more cannot be packed"),
        (WithMore(object()), "its more cannot be packed"),
        (Slotted(), r"layers\[1\] is a Slotted: its hidden cannot be packed"),
        (Unknown(8, memory=[X]), r"layers\[1\] is a Unknown: its memory"),
    ],
    ids=["indexed", "static indexed", "indexed without an index", "tensor", "nested", "object", "slot", "unknown class"],
)
def test_a_layer_with_unknown_tensors_is_refused_by_name(layer: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        kvpack.pack(with_layer(layer), "raw")


@pytest.mark.parametrize("seen", [7, 9])
def test_a_layer_of_an_unknown_class_must_contain_all_tokens_that_it_saw(seen: int) -> None:
    with pytest.raises(InvalidParameter, match=rf"layers\[1\]: the Unknown has seen {seen} tokens but contains the keys of 8"):
        kvpack.pack(with_layer(Unknown(seen, is_sliding=True)), "raw")
    assert [layer.tokens for layer in kvpack.pack(with_layer(Unknown(8)), "raw")] == [8, 8]
    assert kvpack.pack(with_layer(WithMore({"settings": (1, "a", None, torch.float32)})), "raw").tokens == 8


def test_unknown_kinds_of_caches_are_refused_by_name() -> None:
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForCausalLM(config).eval()
    for cache, message in (
        (transformers.QuantizedCache("fp8", config), "the cache is a QuantizedCache: a cache of this class cannot be packed"),
        (MtpCache(config=config), "the cache is a MtpCache: a cache of this class"),
    ):
        with pytest.raises(InvalidParameter, match=message):
            kvpack.pack(filled(model, 8, cache), "raw")
    quantized = transformers.QuantizedCache("fp8", config).layers[0]
    with pytest.raises(InvalidParameter, match=r"layers\[1\] is a Fp8QuantizedLayer: its _quantized_keys and _quantized_values"):
        kvpack.pack(with_layer(quantized), "raw")
    for empty in (DynamicCache(), DynamicCache(config=config), StaticCache(config=config, max_cache_len=8)):
        with pytest.raises(InvalidParameter, match="Cache has no keys or values yet: run a forward pass"):
            kvpack.pack(empty, "raw")
    with pytest.raises(InvalidType, match="not a KV cache"):
        kvpack.pack(object(), "raw")


def test_layers_that_saw_different_numbers_of_tokens_are_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"different numbers of tokens \(layers\[0\] 8 and layers\[1\] 5\)"):
        kvpack.pack(with_layer(DynamicLayer(), tokens=5), "raw")


def test_an_empty_layer_among_others_has_no_sides() -> None:
    cache = with_layer(DynamicLayer())
    cache.layers.insert(1, DynamicLayer())
    cache.layers.append(DynamicLayer())
    cache.layers[-1].lazy_initialization(X, X)
    assert [layer.tokens for layer in kvpack.pack(cache, "raw")] == [8, 0, 8, 0]
