"""After ``reset``, a cache behaves like a new one, even with another number of sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import EncoderDecoderCache, WhisperConfig, WhisperForConditionalGeneration

from kvpack import LiveCache
from kvpack.formats.errors import InvalidParameter
from kvpack.integrations.transformers import KvpackCache
from support.caches import random_pairs
from support.zoo_models import model_of


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def ids(batch: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 50, (batch, count), generator=torch.Generator().manual_seed(seed))


def whisper() -> Any:
    torch.manual_seed(0)
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 32}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = WhisperConfig(
        **sizes, **tokens, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=200, num_mel_bins=16, max_source_positions=50,
        max_target_positions=64, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    settings = model.generation_config
    settings.no_timestamps_token_id, settings.return_timestamps, settings.is_multilingual = 150, True, False
    settings.max_length = None
    if hasattr(settings, "lang_to_id"):
        del settings.lang_to_id
    return model


def transcribed(model: Any, frames: int, cache: Any = None, **options: Any) -> list[Any]:
    audio = torch.randn(1, 16, frames, generator=torch.Generator().manual_seed(0))
    given = {} if cache is None else {"past_key_values": cache}
    mask = torch.ones(1, frames, dtype=torch.long)
    found = model.generate(
        input_features=audio, attention_mask=mask, return_timestamps=True, max_new_tokens=12, do_sample=False, **given, **options
    )
    return found.tolist()  # type: ignore[no-any-return]


@pytest.mark.scenario
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("recipe", ["raw", "kivi-2"])
@pytest.mark.parametrize("name", ["Llama", "Gemma-2", "Qwen3-Next", "Falcon-H1"])
def test_a_reset_cache_accepts_any_number_of_sequences(name: str, recipe: str, batch: int) -> None:
    model = model_of(name)
    with KvpackCache(model, recipe) as cache, KvpackCache(model, recipe) as new:
        model(ids(3, 40), past_key_values=cache)
        model(ids(3, 1), past_key_values=cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        for part in ids(batch, 34, 1).split([33, 1], 1):
            found, expected = model(part, past_key_values=cache).logits, model(part, past_key_values=new).logits
            assert torch.equal(found, expected)
        assert cache.packed.inputs == new.packed.inputs
        assert cache.packed.nbytes == new.packed.nbytes


def test_both_parts_of_a_reset_cache_accept_any_number_of_sequences() -> None:
    model = model_of("BART")
    past = EncoderDecoderCache(*(KvpackCache(model, "raw", dense=True) for _ in range(2)))
    with past.self_attention_cache, past.cross_attention_cache:
        for seed, batch in enumerate([3, 1, 2]):
            options: Any = {"max_new_tokens": 5, "do_sample": False}
            found = model.generate(ids(batch, 9, seed), past_key_values=past, **options)
            assert torch.equal(found, model.generate(ids(batch, 9, seed), **options))
            past.reset()


def test_an_empty_live_layer_keeps_its_codecs_and_accepts_any_batch_size() -> None:
    live = LiveCache("kivi-2", layers=2)
    for layer in range(2):
        live.update(layer, *random_pairs(1, 200, dims=(64, 64), batch=2)[0])
    codecs = [side.codec for layer in live.freeze() for side in layer.sides.values()]
    live.reset()
    assert live.batch(0) == 1
    for layer in range(2):
        live.update(layer, *random_pairs(1, 70, dims=(64, 64), batch=3)[0])
    assert [side.codec for layer in live.freeze() for side in layer.sides.values()] == codecs
    assert live.batch(1) == 3
    assert live.tokens == 70


@pytest.mark.parametrize("frames", [100, 260])
def test_each_segment_of_a_recording_starts_with_an_empty_cache(frames: int) -> None:
    model = whisper()
    past = EncoderDecoderCache(*(KvpackCache(model, "raw", dense=True) for _ in range(2)))
    expected = transcribed(model, frames)
    with past.self_attention_cache as tokens, past.cross_attention_cache as encoded:
        for _ in range(2):
            assert transcribed(model, frames, past) == expected
            assert encoded.get_seq_length() == 50
            assert tokens.get_seq_length() == tokens.packed.tokens > 0
            past.reset()


def test_a_segment_that_may_be_recomputed_is_refused_before_anything_is_computed() -> None:
    model = whisper()
    past = EncoderDecoderCache(*(KvpackCache(model, "raw", dense=True) for _ in range(2)))
    with past.self_attention_cache as tokens, past.cross_attention_cache as encoded:
        with pytest.raises(InvalidParameter, match=r"again for each temperature.* pass one temperature, or omit the cache"):
            transcribed(model, 100, past, temperature=(0.0, 0.4), logprob_threshold=-1.0)
        assert tokens.get_seq_length() == encoded.get_seq_length() == 0
        assert transcribed(model, 100, past, temperature=0.0) == transcribed(model, 100)
