"""Caches of encoder-decoder models are continued only with the source from which they were computed."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    FSMTConfig,
    FSMTForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import kvpack
from kvpack.file.inputs import Inputs
from kvpack.formats.errors import InvalidParameter
from kvpack.integrations.transformers import KvpackCache, recording
from support.zoo_models import model_of

if TYPE_CHECKING:
    from pathlib import Path

A = torch.arange(3, 19)[None]
B = A.flip(1)
BEGUN = torch.tensor([[2, 7, 40, 9]])
FP32 = "kv=raw:dtype=fp32"
OTHER = "the encoder got a different source than the one that the caches were computed from"


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def whisper() -> Any:
    torch.manual_seed(0)
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 32}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = WhisperConfig(
        **sizes, **tokens, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=200, num_mel_bins=16, max_source_positions=20,
        max_target_positions=64, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config).eval()


def features(seed: int) -> torch.Tensor:
    return torch.randn(1, 16, 40, generator=torch.Generator().manual_seed(seed))


def generated(model: Any, source: torch.Tensor, past: Any = None, begun: torch.Tensor = BEGUN, **options: Any) -> torch.Tensor:
    options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "use_cache": True, **options}
    begun = begun.expand(len(source), -1)
    if source.is_floating_point():
        # Whisper returns the new ids alone.
        return torch.cat([begun, model.generate(source, decoder_input_ids=begun, past_key_values=past, **options)], 1)
    return model.generate(input_ids=source, decoder_input_ids=begun, past_key_values=past, **options)


def empty(model: Any) -> Any:
    return EncoderDecoderCache(*(KvpackCache(model, FP32, dense=True) for _ in range(2)))


def saved(model: Any, source: torch.Tensor, folder: Path, name: str, **options: Any) -> torch.Tensor:
    """Generate from ``source``, save both caches, and return all ids."""
    past = empty(model)
    ids = generated(model, source, past, **options)
    kvpack.save(past.self_attention_cache.packed, folder / f"{name}.self")
    kvpack.save(past.cross_attention_cache.packed, folder / f"{name}.cross")
    return ids


def loaded(model: Any, folder: Path, *names: str) -> Any:
    tokens, encoded = names * 2 if len(names) == 1 else names
    files = (folder / f"{tokens}.self", folder / f"{encoded}.cross")
    return EncoderDecoderCache(*(KvpackCache.load(file, model, dense=True) for file in files))


@pytest.mark.parametrize("name", ["T5", "BART", "Whisper"])
def test_generate_refuses_a_different_source(name: str, tmp_path: Path) -> None:
    model = whisper() if name == "Whisper" else model_of(name)
    one, other = (features(0), features(1)) if name == "Whisper" else (A, B)
    ids, _ = saved(model, one, tmp_path, "one"), saved(model, other, tmp_path, "other")
    assert torch.equal(generated(model, one, loaded(model, tmp_path, "one"), ids), generated(model, one, begun=ids))
    past = loaded(model, tmp_path, "one")
    for _ in range(2):
        with pytest.raises(InvalidParameter, match=OTHER):
            generated(model, other, past, ids)
    assert past.get_seq_length() == ids.shape[1] - 1
    # The refused cache goes on with its own source.
    assert torch.equal(generated(model, one, past, ids), generated(model, one, begun=ids))
    for source in (one, other):
        with pytest.raises(InvalidParameter, match=r"come from different sources.* pair caches that were saved together"):
            generated(model, source, loaded(model, tmp_path, "one", "other"), ids)


def test_passes_and_encoder_outputs_are_compared(tmp_path: Path) -> None:
    model = model_of("BART")
    ids = saved(model, A, tmp_path, "one")
    new = {"decoder_input_ids": ids[:, -1:], "use_cache": True}
    expected = model(input_ids=A, decoder_input_ids=ids).logits[:, -1:]
    outputs = [model.get_encoder()(source) for source in (A, B)]
    right: list[Any] = [{"input_ids": A}, {"input_ids": A, "attention_mask": torch.ones_like(A)}, {"encoder_outputs": outputs[0]}]
    right.append({"inputs_embeds": model.get_input_embeddings()(A)})
    for source in right:
        found = model(past_key_values=loaded(model, tmp_path, "one"), **source, **new).logits
        torch.testing.assert_close(found, expected)
    masked = torch.ones_like(A)
    masked[:, 0] = 0
    for source in ({"input_ids": B}, {"input_ids": A, "attention_mask": masked}, {"encoder_outputs": outputs[1]}):
        past = loaded(model, tmp_path, "one")
        with pytest.raises(InvalidParameter, match=OTHER):
            model(past_key_values=past, **source, **new)
        assert past.self_attention_cache.get_seq_length() == ids.shape[1] - 1


def test_caches_with_known_outputs_only_are_compared_by_them(tmp_path: Path) -> None:
    model = model_of("BART")
    outputs = [model.get_encoder()(source) for source in (A, B)]
    past = empty(model)
    model(encoder_outputs=outputs[0], decoder_input_ids=BEGUN[:, :3], past_key_values=past)
    for number, part in enumerate((past.self_attention_cache, past.cross_attention_cache)):
        kvpack.save(part.packed, tmp_path / f"one.{('self', 'cross')[number]}")
    new = {"decoder_input_ids": BEGUN[:, 3:], "use_cache": True}
    expected = model(encoder_outputs=outputs[0], decoder_input_ids=BEGUN).logits[:, 3:]
    for source in ({"encoder_outputs": outputs[0]}, {"input_ids": A}):
        torch.testing.assert_close(model(past_key_values=loaded(model, tmp_path, "one"), **source, **new).logits, expected)
    for source in ({"encoder_outputs": outputs[1]}, {"input_ids": B}):
        with pytest.raises(InvalidParameter, match=OTHER):
            model(past_key_values=loaded(model, tmp_path, "one"), **source, **new)


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_each_row_of_a_batch_has_its_source(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    ids = saved(model, torch.cat([A, B]), tmp_path, "rows")
    expected = generated(model, torch.cat([A, B]), begun=ids)
    assert torch.equal(generated(model, torch.cat([A, B]), loaded(model, tmp_path, "rows"), ids), expected)
    with pytest.raises(InvalidParameter, match=f"{OTHER}: row 1 "):
        generated(model, torch.cat([A, A]), loaded(model, tmp_path, "rows"), ids)
    for order in ([1, 0], [1]):
        for part in ("self", "cross"):
            kvpack.save(kvpack.load(tmp_path / f"rows.{part}").select(order), tmp_path / f"chosen.{part}")
        assert torch.equal(
            generated(model, torch.cat([A, B])[order], loaded(model, tmp_path, "chosen"), ids[order]),
            generated(model, torch.cat([A, B])[order], begun=ids[order]),
        )
        with pytest.raises(InvalidParameter, match=f"{OTHER}: row 0 "):
            generated(model, torch.cat([A, B])[: len(order)], loaded(model, tmp_path, "chosen"), ids[order])


@pytest.mark.parametrize("name", ["T5", "BART", "Whisper"])
def test_beams_share_the_source_of_their_row(name: str, tmp_path: Path) -> None:
    model = whisper() if name == "Whisper" else model_of(name)
    one, other = (features(0), features(1)) if name == "Whisper" else (A, B)
    ids = saved(model, one, tmp_path, "one")
    beams = {"num_beams": 3}
    expected = generated(model, one, begun=ids, **beams)
    assert torch.equal(generated(model, one, loaded(model, tmp_path, "one"), ids, **beams), expected)
    with pytest.raises(InvalidParameter, match=OTHER):
        generated(model, other, loaded(model, tmp_path, "one"), ids, **beams)
    # Of a batch, beams over it, saved.
    if name != "Whisper":
        past = empty(model)
        found = generated(model, torch.cat([one, other]), past, **beams)
        assert torch.equal(found, generated(model, torch.cat([one, other]), **beams))
        names = [part.packed.inputs.undetermined for part in (past.self_attention_cache, past.cross_attention_cache)]
        assert names[0][0] == names[1][0]
        assert len(set(names[0][0].split(": ")[1].split(" "))) == 2


def test_an_unpacked_cache_is_recorded_with_its_source() -> None:
    model = model_of("T5")
    with recording(model) as record:
        past = model(input_ids=A, decoder_input_ids=BEGUN[:, :3], past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()))
    parts = (past.past_key_values.self_attention_cache, past.past_key_values.cross_attention_cache)
    packed = [kvpack.pack(part, FP32, inputs=record.inputs(part)) for part in parts]
    expected = model(input_ids=A, decoder_input_ids=BEGUN).logits[:, 3:]
    past = EncoderDecoderCache(*(KvpackCache.of(cache, model, dense=True) for cache in packed))
    with pytest.raises(InvalidParameter, match=OTHER):
        model(input_ids=B, decoder_input_ids=BEGUN[:, 3:], past_key_values=past)
    torch.testing.assert_close(model(input_ids=A, decoder_input_ids=BEGUN[:, 3:], past_key_values=past).logits, expected)


def test_tokens_of_several_sources_cannot_be_continued_with_one() -> None:
    model = model_of("T5")
    past = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with recording(model) as record:
        for source, part in ((A, BEGUN[:, :2]), (B, BEGUN[:, 2:3])):
            model(input_ids=source, decoder_input_ids=part, past_key_values=past)
    tokens = kvpack.pack(past.self_attention_cache, FP32, inputs=record.inputs(past.self_attention_cache))
    for source in (A, B):
        pair = EncoderDecoderCache(KvpackCache.of(tokens, model, dense=True), KvpackCache(model, FP32, dense=True))
        with pytest.raises(InvalidParameter, match="the tokens of the cache were computed from different sources"):
            model(input_ids=source, decoder_input_ids=BEGUN[:, 3:], past_key_values=pair)


def test_parts_of_other_libraries_are_compared() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
    config = FSMTConfig(langs=["en", "de"], src_vocab_size=64, tgt_vocab_size=64, **sizes, **heads)
    model = FSMTForConditionalGeneration(config).eval()
    past = empty(model)
    model(input_ids=A, decoder_input_ids=BEGUN[:, :3], past_key_values=past)
    parts = (past.self_attention_cache, past.cross_attention_cache)
    pair = EncoderDecoderCache(*(KvpackCache.of(part.packed, model, dense=True) for part in parts))
    with pytest.raises(InvalidParameter, match=OTHER):
        model(input_ids=B, decoder_input_ids=BEGUN[:, 3:], past_key_values=pair)
    expected = model(input_ids=A, decoder_input_ids=BEGUN[:, 3:], past_key_values=past).logits
    torch.testing.assert_close(model(input_ids=A, decoder_input_ids=BEGUN[:, 3:], past_key_values=pair).logits, expected)


def test_an_unknown_source_is_reported_once(tmp_path: Path) -> None:
    """The source is unknown in files that were written before sources were recorded."""
    model = model_of("BART")
    ids = saved(model, A, tmp_path, "one")
    parts = []
    for part in ("self", "cross"):
        cache = kvpack.load(tmp_path / f"one.{part}")
        assert cache.inputs is not None
        old = Inputs(cache.inputs.token_ids, ("tokens 0 to 8 depend on what an encoder was given",))
        parts.append(dataclasses.replace(cache, inputs=old if part == "self" else None))
    past = EncoderDecoderCache(*(KvpackCache.of(cache, model, dense=True) for cache in parts))
    with pytest.warns(kvpack.KvpackWarning, match="does not record the encoder's input, so a wrong source would not be noticed") as told:
        assert torch.equal(generated(model, A, past, ids), generated(model, A, begun=ids))
    assert len(told) == 1
    # A later pass makes the first tokens' source no better known.
    inputs = past.self_attention_cache.packed.inputs
    assert inputs is not None
    assert not [text for text in inputs.undetermined if "sha256" in text]


def test_empty_caches_can_be_reused_for_another_source() -> None:
    model = model_of("T5")
    past = empty(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for source in (A, B):
            assert torch.equal(generated(model, source, past), generated(model, source))
            with pytest.raises(InvalidParameter, match=OTHER):
                model(input_ids=source + 1, decoder_input_ids=BEGUN[:, :1], past_key_values=past)
            past.reset()
