"""Tests of generating into a KvpackCache: batches, padding, beams, assisted decoding, sliding windows, and encoders."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers import EncoderDecoderCache

import kvpack
from kvpack.formats.errors import InvalidParameter
from kvpack.integrations.transformers import KvpackCache, record
from kvpack.live import cache as live_cache
from support.zoo_models import images, model_of

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = torch.arange(3, 35)[None]
ROWS = torch.cat([PROMPT, PROMPT.flip(1), PROMPT.roll(5)])
REPEATED = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12] * 6])


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def generated(model: Any, ids: torch.Tensor, cache: Any = None, **options: Any) -> list[Any]:
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 8, "use_cache": True, **options}
    return model.generate(ids, past_key_values=cache, **options).tolist()


def padded(where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of different lengths, and their attention mask."""
    ids = ROWS.clone()
    for row, count in ((1, 5), (2, 17)):
        ids[row, slice(None, count) if where == "left" else slice(-count, None)] = 0
    return ids, (ids != 0).long()


# Soft caps, sliding windows of 12, sinks, chunks of 12, latents, a position bias.
KINDS = ["Gemma-2", "Gemma-3", "GPT-OSS", "Llama-4", "DeepSeek-V3", "Bloom", "GPT-2"]


DECODED = ["Llama-4", "DeepSeek-V3", "Bloom"]


@pytest.mark.parametrize(("name", "where"), [*((name, "right") for name in KINDS), *((name, "left") for name in DECODED)])
def test_rows_with_different_lengths_generate_the_same_tokens(name: str, where: str) -> None:
    model = model_of(name)
    ids, mask = padded(where)
    expected = generated(model, ids, attention_mask=mask)
    with pytest.warns(kvpack.KvpackWarning, match="decodes the keys and values of its layer") as told, KvpackCache(model, "raw") as cache:
        assert generated(model, ids, cache, attention_mask=mask) == expected
    assert [one.category for one in told].count(kvpack.KvpackWarning) == 1


# Layers of Gemma-4 that share keys and values get the last rows of the mask.
@pytest.mark.parametrize("name", ["Llama", "Gemma-4", *(name for name in KINDS if name not in DECODED)])
def test_left_padded_rows_are_attended_packed(name: str) -> None:
    """No warning is given for prompts longer than windows and chunks, so nothing is decoded."""
    model = model_of(name)
    ids, mask = padded("left")
    expected = generated(model, ids, attention_mask=mask, max_new_tokens=20)
    with KvpackCache(model, "raw") as cache:
        assert generated(model, ids, cache, attention_mask=mask, max_new_tokens=20) == expected


@pytest.mark.parametrize("recipe", ["raw", "octopus-4"])
@pytest.mark.parametrize("name", ["Llama", "Gemma-3"])
def test_padded_rows_generate_as_if_alone(name: str, recipe: str) -> None:
    """Results agree until the first window is packed."""
    model = model_of(name)
    ids, mask = padded("left")
    with KvpackCache(model, recipe) as cache:
        together = torch.tensor(generated(model, ids, cache, attention_mask=mask))
    for row, own in zip(ids, mask, strict=True):
        with KvpackCache(model, recipe) as cache:
            alone = generated(model, row[own.bool()][None], cache)
        assert together[(ids == row).all(1).nonzero()[0, 0]][32 - int(own.sum()) :].tolist() == alone[0]


@pytest.mark.parametrize("name", ["Llama", "Gemma-3"])
def test_beams_of_padded_rows_equal_those_of_the_model(name: str) -> None:
    """Reordered rows keep their own padding, and beams of short rows do not end before those of others."""
    model = model_of(name)
    ids, mask = padded("left")
    options = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 12}
    expected = generated(model, ids, **options)
    with KvpackCache(model, "raw") as cache:
        assert generated(model, ids, cache, **options) == expected


def test_layers_are_decoded_for_a_mask_that_hides_tokens_in_the_middle() -> None:
    model = model_of("Llama")
    ids, mask = padded("left")
    mask[0, 7] = 0
    expected = generated(model, ids, attention_mask=mask)
    with pytest.warns(kvpack.KvpackWarning, match="hides tokens other than left padding"), KvpackCache(model, "raw") as cache:
        assert generated(model, ids, cache, attention_mask=mask) == expected


@pytest.mark.parametrize("name", ["Llama", "Gemma-3"])
def test_padded_rows_continue_from_a_file(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    ids, mask = padded("left")
    with KvpackCache(model, "raw") as cache:
        more = torch.tensor(generated(model, ids, cache, attention_mask=mask, max_new_tokens=2))
        kvpack.save(cache.packed, tmp_path / "file")
    mask = torch.nn.functional.pad(mask, (0, 2), value=1)
    expected = generated(model, more, attention_mask=mask)
    with KvpackCache.load(tmp_path / "file", model) as cache:
        assert cache.get_seq_length() == 33
        assert generated(model, more, cache, attention_mask=mask) == expected


def test_a_lossy_recipe_gives_the_models_own_tokens_until_a_window_is_full() -> None:
    model = model_of("Llama")
    with KvpackCache(model, "octopus-2") as cache:
        assert generated(model, ROWS, cache, max_new_tokens=40) == generated(model, ROWS, max_new_tokens=40)
        assert cache.live.freeze()[0].k.packed_tokens == 0
        assert cache.packed[0].k.packed_tokens > 0


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=["beams", "beams returned"])
@pytest.mark.parametrize("name", ["Gemma-3", "Llama-4", "BART"])
def test_beams_of_rows_equal_those_of_the_model(name: str, options: dict[str, Any]) -> None:
    model = model_of(name)
    expected = generated(model, ROWS, max_new_tokens=8, **options)
    assert generated(model, ROWS, over(model), max_new_tokens=8, **options) == expected


def over(model: Any, recipe: str = "raw") -> Any:
    """Return an empty cache. A warning about models that read dense states is expected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kvpack.KvpackWarning)
        if model.config.is_encoder_decoder:
            return EncoderDecoderCache(KvpackCache(model, recipe), KvpackCache(model, recipe))
        return KvpackCache(model, recipe)


@pytest.mark.scenario
@pytest.mark.parametrize("name", ["Llama", "Gemma-3", "Llama-4", "DeepSeek-V3"])
@pytest.mark.parametrize("kind", ["prompt lookup", "an assistant"])
def test_assisted_decoding_generates_the_same_tokens(name: str, kind: str) -> None:
    """Prompts are longer than a window, so that sliding layers drop tokens, and the candidates are wrong."""
    model = model_of(name)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 6}
    if kind == "an assistant":
        torch.manual_seed(1)
        options = {"assistant_model": copy.deepcopy(model)}
        for parameter in options["assistant_model"].parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    expected = generated(model, REPEATED, max_new_tokens=60)
    cache, cropped = over(model), []
    crop = cache.crop
    cache.crop = lambda count: (cropped.append(count), crop(count))
    assert generated(model, REPEATED, cache, max_new_tokens=60, **options) == expected
    assert min(cropped) < 0
    # The cache goes on, where transformers would compute its tokens once more.
    longer = torch.tensor(expected)
    options["attention_mask"] = torch.ones_like(longer)
    assert generated(model, longer, cache, **options) == generated(model, longer, attention_mask=torch.ones_like(longer))


@pytest.mark.parametrize("name", ["Gemma-3", "Llama-4"])
def test_sliding_layers_store_their_window_and_tokens_encoded_with_it(name: str) -> None:
    model = model_of(name)
    cache = over(model)
    ids = torch.randint(1, 60, (1, 300), generator=torch.Generator().manual_seed(0))
    for step in [ids[:, :270], *ids[:, 270:279].split(1, 1)]:
        model(step, past_key_values=cache)
    slides = [number for number, window in enumerate(cache.live.sliding_windows) if window is not None]
    assert slides
    for number in slides:
        assert 11 <= cache.live.stored_tokens(number) <= 12 + 128 + 256
        assert cache.live.seen_tokens(number) == 279
    assert min(cache.live.stored_tokens(number) for number in slides) < 279


@pytest.mark.scenario
@pytest.mark.kernels
def test_decoding_steps_of_sliding_layers_only_run_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's tensors stay valid for CUDA graphs, even with padded rows. Some layers of Gemma 3 slide, others do not."""
    from kvpack.coding import dispatch
    from kvpack.live.steps import TritonSteps
    from support.interpreter import DEVICE, INTERPRETED

    if INTERPRETED:
        monkeypatch.setenv(dispatch.VARIABLE, "triton")
    model = model_of("Gemma-3").to(DEVICE)
    ids, mask = (x.to(DEVICE) for x in padded("left"))
    expected = generated(model, ids, attention_mask=mask, max_new_tokens=4)
    by_steps: list[bool] = []
    attend = TritonSteps.attend

    def watched(*given: Any, **options: Any) -> Any:
        found = attend(*given, **options)
        by_steps.append(found is not None)
        return found

    monkeypatch.setattr(TritonSteps, "attend", watched)
    with KvpackCache(model, "fp32;tail=8") as cache:
        assert generated(model, ids, cache, attention_mask=mask, max_new_tokens=4) == expected
        assert any(window is not None for window in cache.live.sliding_windows)
        layers = len(cache.layers)
    assert by_steps == [True] * 3 * layers


@pytest.mark.parametrize("recipe", ["raw", "k=octahedral:b=2;v=group:b=2,g=32"])
@pytest.mark.parametrize("name", ["Gemma-3n", "Gemma-4"])
def test_layers_that_share_keys_attend_a_long_prompt_before_packing(
    name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer that owns the tokens encodes them, and drops invisible ones, only after the other layers have attended to them."""
    monkeypatch.setattr(live_cache, "MAX_DEFERRED_TOKENS", 8)
    model = model_of(name)
    expected = model(PROMPT).logits
    with KvpackCache(model, f"{recipe};tail=8") as cache:
        for one in (cache, copy.deepcopy(cache)):
            torch.testing.assert_close(model(PROMPT, past_key_values=one).logits, expected)
        assert cache.live.skipped_tokens(0) == 0
        if recipe == "raw":
            assert generated(model, torch.cat([PROMPT, ROWS[1:2]], 1), cache) == generated(model, torch.cat([PROMPT, ROWS[1:2]], 1))
            assert cache.live.skipped_tokens(0) > 0


def test_a_loaded_layer_also_slides(tmp_path: Path) -> None:
    model = model_of("Gemma-3")
    ids = torch.randint(1, 60, (1, 300), generator=torch.Generator().manual_seed(0))
    with KvpackCache(model, "raw") as cache:
        model(ids[:, :40], past_key_values=cache)
        kvpack.save(cache.packed, tmp_path / "file")
    with KvpackCache.load(tmp_path / "file", model) as cache:
        assert cache.live.sliding_windows == (12, None)
        assert cache.is_sliding == [True, False]
        found = [model(part, past_key_values=cache).logits for part in (ids[:, 40:299], ids[:, 299:])]
        assert cache.live.stored_tokens(0) < 150 < cache.live.stored_tokens(1) == 300
    expected = model(ids).logits
    torch.testing.assert_close(torch.cat(found, 1), expected[:, 40:], rtol=1e-4, atol=1e-5)


def test_a_prompt_may_contain_an_image() -> None:
    model = model_of("Qwen2-VL", image_token_id=60)
    ids = PROMPT.clone()
    ids[:, 8:24] = 60
    expected = generated(model, ids, **images())
    with KvpackCache(model, "raw") as cache:
        assert generated(model, ids, cache, **images()) == expected
        assert cache.packed.inputs.undetermined


@pytest.mark.filterwarnings("ignore:.*which share")
@pytest.mark.parametrize("name", ["BART", "T5"])
def test_an_encoder_decoder_model_needs_a_cache_with_two_parts(name: str) -> None:
    model = model_of(name)
    expected = generated(model, ROWS)
    cache = over(model)
    assert generated(model, ROWS, cache) == expected
    assert cache.cross_attention_cache.packed.tokens == 32
    lossy = over(model, "kv=group:b=8,g=8")
    generated(model, ROWS, lossy)
    assert lossy.cross_attention_cache.packed.bits_per_value < 32
    with (
        pytest.warns(kvpack.KvpackWarning),
        pytest.raises(InvalidParameter, match=r"has an encoder.*use EncoderDecoderCache\(KvpackCache"),
    ):
        generated(model, ROWS, KvpackCache(model, "raw"))
    with pytest.raises(
        InvalidParameter, match="has an encoder, and transformers crops two-part caches only if both parts are DynamicCaches"
    ):
        generated(model, REPEATED, over(model), prompt_lookup_num_tokens=3)


def test_an_encoders_cache_continues_from_files(tmp_path: Path) -> None:
    """Without the encoder's cache, transformers would compute all of the decoder's tokens again."""
    model = model_of("BART")
    cache = over(model)
    begun = torch.tensor(generated(model, ROWS, cache))
    parts = []
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        kvpack.save(part.packed, tmp_path / "part")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", kvpack.KvpackWarning)
            parts.append(KvpackCache.load(tmp_path / "part", model))
    held = begun.shape[1] - 1
    cache = EncoderDecoderCache(*parts)
    assert cache.get_seq_length() == held
    assert generated(model, ROWS, cache, decoder_input_ids=begun) == generated(model, ROWS, decoder_input_ids=begun)
    assert cache.get_seq_length() == held + 8
    with pytest.raises(InvalidParameter, match="generate got 1 token ids, but the cache holds 16: pass those 16 ids"):
        generated(model, ROWS, cache, decoder_input_ids=begun[:, :1])


@pytest.mark.parametrize("name", ["Llama", "Gemma-3", "DeepSeek-V3"])
def test_a_chunked_prompt_continues_after_the_cache(name: str) -> None:
    """generate prepares each chunk separately, and compares none of them with the cache."""
    model = model_of(name)
    expected = generated(model, REPEATED)
    options = {"prefill_chunk_size": 5}
    for given in ({}, {"attention_mask": torch.ones_like(REPEATED)}):
        with KvpackCache(model, "raw", dense=name == "DeepSeek-V3" or None) as cache:
            begun = generated(model, REPEATED[:, :8], cache, max_new_tokens=2, prompt_lookup_num_tokens=2)
            cache.crop(8 - cache.get_seq_length())
            for wrong, reason in [
                (REPEATED.roll(3, 1), "token 0 of row 0 has id 10, but the cache was computed from id 5"),
                (REPEATED[:, :8], "generate got 8 token ids, but the cache holds 8: pass those 8 ids followed by at least one"),
                (REPEATED[:, :6], "generate got 6 token ids, but the cache holds 8: pass those 8 ids followed by at least one"),
            ]:
                mask = {name: torch.ones_like(wrong) for name in given}
                with pytest.raises(InvalidParameter, match=reason):
                    generated(model, wrong, cache, **options, **mask)
                assert cache.get_seq_length() == 8
            assert generated(model, REPEATED, cache, **options, **given) == expected
            assert begun[0][:8] == REPEATED[0, :8].tolist()


def test_after_assisted_decoding_only_following_ids_are_accepted() -> None:
    """Even ids that begin like the cache's are refused."""
    model = model_of("Llama")
    with KvpackCache(model, "raw") as cache:
        generated(model, REPEATED[:, :16], cache, prompt_lookup_num_tokens=3)
        cache.crop(16 - cache.get_seq_length())
        ids = torch.cat([REPEATED[:, :16], REPEATED], 1)
        found = generated(model, REPEATED, cache, attention_mask=torch.ones_like(ids))
        assert found[0][REPEATED.shape[1] :] == generated(model, ids)[0][ids.shape[1] :]


def test_ids_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison in each step would wait for the device."""
    compared = []
    differing = record.Record.first_mismatch
    monkeypatch.setattr(record.Record, "first_mismatch", lambda self, ids: (compared.append(ids.shape[1]), differing(self, ids))[1])
    model = model_of("Llama")
    with KvpackCache(model, "raw") as cache:
        model(PROMPT[:, :20], past_key_values=cache)
        generated(model, PROMPT, cache)
    assert compared == [20]


@pytest.mark.parametrize("name", ["Llama", "Gemma-3"])
@pytest.mark.parametrize("recipe", ["raw", "bf16"])
def test_generation_works_in_bfloat16(name: str, recipe: str) -> None:
    model = model_of(name).to(torch.bfloat16)
    with KvpackCache(model, recipe) as cache:
        assert generated(model, ROWS, cache, max_new_tokens=16) == generated(model, ROWS, max_new_tokens=16)


def test_generate_refuses_a_cache_that_it_would_not_use() -> None:
    model = model_of("Llama")
    with pytest.raises(InvalidParameter, match="use_cache=False, which computes all tokens again at every step: pass use_cache=True"):
        generated(model, PROMPT, KvpackCache(model, "raw"), use_cache=False)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}


@pytest.mark.parametrize(("name", "sizes"), [("MambaConfig", {"state_size": 8}), ("RwkvConfig", {"attention_hidden_size": 32})])
def test_models_without_keys_and_values_are_refused_by_name(name: str, sizes: dict[str, int]) -> None:
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SMALL, **sizes)).eval()
    text = r"(keeps no cache of|has no layer with) keys and values, so there is nothing to pack"
    pairs = kvpack.pack([(torch.zeros(1, 2, 4, 8),) * 2] * model.config.num_hidden_layers, "raw")
    with pytest.raises(InvalidParameter, match=text):
        KvpackCache(model, "raw")
    with pytest.raises(InvalidParameter, match=text):
        KvpackCache.of(pairs, model)
    with pytest.raises(InvalidParameter, match=text):
        KvpackCache.of(pairs, model, prompt=PROMPT)
