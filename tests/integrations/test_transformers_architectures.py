"""Models with unusual shapes generate the same tokens over packed caches as over transformers' own, or are refused."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from transformers import EncoderDecoderCache

import kvpack
from kvpack import InvalidParameter, KvpackWarning
from kvpack.integrations.transformers import KvpackCache
from kvpack.integrations.transformers.models import Model
from support.tiny_configs import tiny_config
from support.zoo_models import model_of

if TYPE_CHECKING:
    from pathlib import Path

PROMPT, FOLLOWING = torch.arange(3, 35)[None], torch.tensor([[7, 40, 9, 22, 5]])
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
pytestmark = pytest.mark.filterwarnings("ignore:.*decodes the keys and values:kvpack.KvpackWarning")


def checkpointing(model: Any, on: bool) -> None:
    # transformers 5.23 has another name for it.
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    getattr(model, f"{name}_{'enable' if on else 'disable'}")()


def tiny(model_type: str, kind: str = "AutoModelForCausalLM", **others: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, kind).from_config(tiny_config(model_type, **others)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.generation_config.update(eos_token_id=None, pad_token_id=0, bos_token_id=0)
    return model


def both(model: Any) -> EncoderDecoderCache:
    return EncoderDecoderCache(KvpackCache(model, "raw"), KvpackCache(model, "raw"))


def prompt_of(model: Any, past: Any) -> kvpack.Cache:
    """Return the packed cache of the prompt, which is computed into ``past``."""
    with torch.no_grad():
        model(PROMPT, past_key_values=past)
    packed: kvpack.Cache = past.packed
    return packed


@pytest.mark.parametrize("model_type", ["t5", "umt5", "longt5", "switch_transformers", "mt5"])
def test_an_encoder_may_have_more_layers_than_the_decoder(model_type: str) -> None:
    model = tiny(model_type, "AutoModelForSeq2SeqLM", num_layers=3, num_decoder_layers=2)
    past = both(model)
    found = model.generate(PROMPT, past_key_values=past, **GREEDY)
    assert found.tolist() == model.generate(PROMPT, **GREEDY).tolist()
    assert [len(part.packed) for part in (past.self_attention_cache, past.cross_attention_cache)] == [2, 2]


@pytest.mark.parametrize("model_type", ["bart", "marian", "pegasus", "blenderbot", "whisper"])
def test_a_decoder_has_its_own_number_of_layers(model_type: str) -> None:
    model = tiny(model_type, encoder_layers=3, decoder_layers=2)
    past = KvpackCache(model, "raw")
    found = model.generate(PROMPT, past_key_values=past, **GREEDY)
    assert found.tolist() == model.generate(PROMPT, **GREEDY).tolist()
    assert len(past.packed) == 2
    again = KvpackCache.of(past.packed, model)
    following = torch.cat([found, FOLLOWING], 1)
    assert model.generate(following, past_key_values=again, **GREEDY).tolist() == model.generate(following, **GREEDY).tolist()


def test_decoder_windows_keep_the_encoders_tokens() -> None:
    model = tiny("t5gemma", "AutoModelForSeq2SeqLM")
    assert model.config.decoder.sliding_window < PROMPT.shape[1]
    past, options = both(model), {**GREEDY, "max_new_tokens": 20}
    assert model.generate(PROMPT, past_key_values=past, **options).tolist() == model.generate(PROMPT, **options).tolist()
    assert past.cross_attention_cache.packed[0].tokens == PROMPT.shape[1]


def longrope() -> Any:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    lengths = {"max_position_embeddings": 128, "original_max_position_embeddings": 16}
    return tiny("phi3", **lengths, rope_parameters={**rope, "original_max_position_embeddings": 16})


@pytest.mark.parametrize("tokens", [10, 32])
def test_recomputed_tokens_with_other_frequencies_are_added_to_the_cache(tokens: int) -> None:
    model, ids = longrope(), PROMPT[:, :tokens]
    past = KvpackCache(model, "raw")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Phi3ForCausalLM computes all tokens again", KvpackWarning)
        found = model.generate(ids, past_key_values=past, max_new_tokens=20, do_sample=False)
    assert found.tolist() == model.generate(ids, max_new_tokens=20, do_sample=False).tolist()
    assert past.packed.tokens == found.shape[1] - 1


def test_a_warning_reports_recomputed_tokens() -> None:
    model = longrope()
    past = KvpackCache(model, "raw")
    with torch.no_grad():
        model(PROMPT[:, :10], past_key_values=past)
    with pytest.warns(KvpackWarning, match="computes all tokens again"):
        found = model.generate(PROMPT, past_key_values=past, **GREEDY)
    assert found.tolist() == model.generate(PROMPT, **GREEDY).tolist()
    assert past.packed.inputs.tokens == past.packed.tokens == found.shape[1] - 1


@pytest.mark.parametrize("model_type", ["falcon_h1", "qwen3_next", "lfm2", "llama"])
def test_beams_repeat_a_single_stored_sequence(model_type: str) -> None:
    model = tiny(model_type)
    packed = prompt_of(model, KvpackCache(model, "raw"))
    ids, options = torch.cat([PROMPT, FOLLOWING], 1), {**GREEDY, "num_beams": 3}
    assert model.generate(ids, past_key_values=KvpackCache.of(packed, model), **options).tolist() == model.generate(ids, **options).tolist()


@pytest.mark.parametrize("model_type", ["falcon_h1", "llama"])
def test_a_pass_with_too_many_rows_is_refused_before_any_change(model_type: str) -> None:
    model = tiny(model_type)
    past = KvpackCache(model, "raw")
    prompt_of(model, past)
    with torch.no_grad():
        with pytest.raises(InvalidParameter, match=r"3 rows, but the cache holds 1 sequence: .*cache\.batch_repeat_interleave\(3\)"):
            model(FOLLOWING.expand(3, -1), past_key_values=past)
        expected = model(torch.cat([PROMPT, FOLLOWING], 1).expand(3, -1)).logits[:, PROMPT.shape[1] :]
        past.batch_repeat_interleave(3)
        found = model(FOLLOWING.expand(3, -1), past_key_values=past).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad(), pytest.raises(InvalidParameter, match="4 rows, but the cache holds 3 sequences"):
        model(FOLLOWING.expand(4, -1), past_key_values=past)


def test_rows_that_beams_would_repeat_are_compared_with_all_ids() -> None:
    model = tiny("llama")
    rows = torch.cat([PROMPT, PROMPT.flip(1)])
    past = KvpackCache(model, "raw")
    with torch.no_grad():
        model(rows, past_key_values=past)
    ids = torch.cat([rows, FOLLOWING.expand(2, -1)], 1)
    with pytest.raises(InvalidParameter, match="token 0 of row 0"):
        model.generate(ids.flip(0), past_key_values=past, num_beams=3, **GREEDY)
    found = model.generate(ids, past_key_values=past, num_beams=3, **GREEDY)
    assert found.tolist() == model.generate(ids, num_beams=3, **GREEDY).tolist()


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_a_file_is_loaded_for_a_model_with_offloaded_weights(offload: str, tmp_path: Path) -> None:
    model = tiny("llama")
    kvpack.save(prompt_of(model, KvpackCache(model, "raw")), tmp_path / "prompt.kvpack")
    ids = torch.cat([PROMPT, FOLLOWING], 1)
    expected = model.generate(ids, **GREEDY)
    device = torch.device("cpu")
    if offload == "cpu":
        cpu_offload(model, execution_device=device)
    else:
        disk_offload(model, str(tmp_path / "weights"), execution_device=device)
    assert next(model.parameters()).device.type == "meta"
    past = KvpackCache.load(tmp_path / "prompt.kvpack", model)
    assert model.generate(ids, past_key_values=past, **GREEDY).tolist() == expected.tolist()


@pytest.mark.parametrize("model_type", ["diffllama", "doge", "jetmoe", "inkling_text", "inkling2_text", "moshi"])
def test_layers_are_decoded_for_attention_that_reads_them(model_type: str) -> None:
    model = tiny(model_type)
    with pytest.warns(KvpackWarning, match="each call decodes the keys and values of its layer"):
        past = KvpackCache(model, "raw")
    assert model.generate(PROMPT, past_key_values=past, **GREEDY).tolist() == model.generate(PROMPT, **GREEDY).tolist()


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3n_text", "gpt_oss", "qwen2", "phi3", "mistral"])
def test_attention_that_passes_states_on_accepts_packed_layers(model_type: str) -> None:
    assert Model(tiny(model_type)).supports_packed_layers


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("minimax", "MiniMaxForCausalLM accepts only its own cache, a MiniMaxCache"),
        ("xlm", "XLMWithLMHeadModel keeps no cache of keys and values"),
        ("openai-gpt", "keeps no cache of keys and values, so there is nothing to pack"),
        ("blt", "transformers cannot create the cache layers for the configuration of BltForCausalLM"),
        ("mamba", "keeps no cache of keys and values"),
    ],
)
def test_models_without_a_suitable_cache_are_refused(model_type: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        KvpackCache(tiny(model_type), "raw")


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_gradient_checkpointing_is_refused_because_it_drops_the_cache(dense: bool, stored: bool) -> None:
    model = model_of("Mistral")
    past = KvpackCache(model, "raw", dense=dense)
    if stored:
        prompt_of(model, past)
    before = past.get_seq_length()
    model.train()
    checkpointing(model, True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InvalidParameter, match="gradient checkpointing, which gives layers no cache"):
            model(PROMPT, past_key_values=past)
    assert past.get_seq_length() == before
    checkpointing(model, False)
    with torch.no_grad():
        expected = model(PROMPT if not stored else torch.cat([PROMPT, PROMPT], 1)).logits[:, -PROMPT.shape[1] :]
        found = model(PROMPT, past_key_values=past).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_layer_that_does_not_get_the_cache_keeps_its_window() -> None:
    """Without the model, the cache cannot know that the layers use gradient checkpointing."""
    model = model_of("Mistral", "kvpack")
    packed = prompt_of(model, KvpackCache(model, "raw"))
    model.train()
    checkpointing(model, True)
    past = KvpackCache.of(packed)
    with pytest.raises(InvalidParameter, match="no mask for its window of 12"):
        model(PROMPT, past_key_values=past)


@pytest.mark.parametrize("stored", [False, True])
def test_dropout_is_refused_and_leaves_the_cache_unchanged(stored: bool) -> None:
    model = tiny("gpt2")
    past = KvpackCache(model, "raw")
    before = prompt_of(model, past).tokens if stored else 0
    model.train()
    with torch.no_grad(), pytest.raises(InvalidParameter, match=r"does not support arguments that the model passes \(dropout.*dense=True"):
        model(FOLLOWING, past_key_values=past)
    assert past.get_seq_length() == before
    model.eval()
    with torch.no_grad():
        found = model(FOLLOWING, past_key_values=past).logits
        expected = model(torch.cat([PROMPT[:, :before], FOLLOWING], 1)).logits[:, before:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
