"""Two lines in transformers: create a KvpackCache from a model and a recipe, and call generate."""

from __future__ import annotations

import gc
import io
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

import kvpack
from kvpack.formats.errors import InvalidParameter, InvalidType
from kvpack.integrations.transformers import KvpackCache, attention_switch, model_changes, plain_attention

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 50}
OPTIONS = {"do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def model() -> Any:
    return qwen("sdpa")


def qwen(attention: str) -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(**SIZES, num_hidden_layers=3, bos_token_id=0, eos_token_id=None, attn_implementation=attention)
    ).eval()


def gemma() -> Any:
    torch.manual_seed(0)
    config = Gemma2Config(
        **SIZES, num_hidden_layers=4, sliding_window=32, query_pre_attn_scalar=16, bos_token_id=0, eos_token_id=None, pad_token_id=0
    )
    config._attn_implementation = "eager"
    return Gemma2ForCausalLM(config).eval()


def ids(batch: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 50, (batch, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.scenario
@pytest.mark.parametrize("make", [lambda: qwen("sdpa"), lambda: qwen("eager"), gemma], ids=["sdpa", "eager", "sliding windows, soft caps"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_lossless_caches_generate_the_same_tokens_as_the_model(make: Any, options: dict[str, Any]) -> None:
    model = make()
    prompt = ids(1, 60)
    expected = model.generate(prompt, max_new_tokens=90, **OPTIONS, **options)
    with KvpackCache(model, "raw") as cache:
        found = model.generate(prompt, past_key_values=cache, max_new_tokens=90, **OPTIONS, **options)
        assert cache.packed.tokens == 149
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("shape", [lambda ids: ids, lambda ids: ids[0], lambda ids: ids.tolist(), lambda ids: ids[0].tolist()])
def test_generate_of_a_cache_equals_that_of_the_model(model: Any, shape: Any) -> None:
    prompt = ids(1, 60)
    expected = model.generate(prompt, max_new_tokens=9, **OPTIONS)
    # Padding and the end of a text are one token, of which transformers would warn.
    model.generation_config.eos_token_id = 0
    # Many models are saved like this after training.
    model.config.use_cache = model.generation_config.use_cache = False
    with KvpackCache(model, "raw") as cache:
        assert cache.generate(shape(prompt), max_new_tokens=9, **OPTIONS).tolist() == expected.tolist()
        longer = torch.cat([expected, expected[:, :1]], 1)
        assert cache.generate(shape(longer), max_new_tokens=1, **OPTIONS).shape == (1, 71)
        with pytest.raises(InvalidParameter, match=r"token 0 of row 0 has id .*, but the cache was computed from"):
            cache.generate(shape(longer + 1), max_new_tokens=1)
        with pytest.raises(InvalidType, match="expected token ids"):
            cache.generate("text")
        packed = cache.packed
    with pytest.raises(InvalidParameter, match=r"has no model to generate with: use KvpackCache\.of\(cache, model\)"):
        KvpackCache.of(packed).generate(longer)


def test_a_batch_generates_with_its_mask(model: Any) -> None:
    prompt, mask = ids(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[0, :5] = 0
    expected = model.generate(prompt, attention_mask=mask, max_new_tokens=5, **OPTIONS)
    with KvpackCache(model, "raw") as cache:
        assert cache.generate(prompt, attention_mask=mask, max_new_tokens=5, **OPTIONS).tolist() == expected.tolist()


def test_a_batch_is_packed_as_it_grows(model: Any) -> None:
    with KvpackCache(model, "k=octahedral:b=4;v=group:b=4,g=32;raw=4,0.6,4") as cache:
        found = model.generate(ids(3, 100), past_key_values=cache, max_new_tokens=170, **OPTIONS)
    assert found.shape == (3, 270)
    live, file = cache.live.freeze()[2].k, cache.packed[2].k
    assert live is not None
    assert file is not None
    assert (live.packed_tokens, live.tail.shape[2]) == (128, 141)
    assert (file.packed_tokens, file.tail.shape[2]) == (269, 0)


def test_the_attention_implementation_is_restored(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """While the implementation is replaced, other caches work as before."""
    attention_switch._announced_model.clear()
    prompt = ids(1, 30)
    expected = model.generate(prompt, max_new_tokens=5, **OPTIONS)
    with caplog.at_level(logging.INFO, "kvpack"):
        first, second = KvpackCache(model, "kivi-2"), KvpackCache(model, "octopus-3")
        # Once in a process, whatever the model.
        KvpackCache(gemma(), "kivi-2").release()
    message = (
        "the attention of Qwen2ForCausalLM is now \"kvpack\", for packed layers; plain tensors still use 'sdpa', "
        "which release() restores"
    )
    assert [(record.levelno, record.message) for record in caplog.records] == [(logging.INFO, message)]
    assert model.config._attn_implementation == "kvpack"
    assert model.generate(prompt, max_new_tokens=5, **OPTIONS).tolist() == expected.tolist()
    first.release()
    assert model.config._attn_implementation == "kvpack"
    second.release()
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("kvpack")
    KvpackCache(model, "kivi-2").release()
    assert model.config._attn_implementation == "kvpack"


def test_a_file_can_be_continued(model: Any, tmp_path: Path) -> None:
    prompt = ids(1, 40)
    with KvpackCache(model, "raw") as cache:
        text = model.generate(prompt, past_key_values=cache, max_new_tokens=10, **OPTIONS)
        kvpack.save(cache.packed, tmp_path / "text.kvpack")
    expected = model.generate(text, max_new_tokens=10, **OPTIONS)
    with KvpackCache.load(tmp_path / "text.kvpack", model) as cache:
        assert cache.get_seq_length() == 49
        assert model.generate(text, past_key_values=cache, max_new_tokens=10, **OPTIONS).tolist() == expected.tolist()
    with KvpackCache.load(tmp_path / "text.kvpack", model) as cache, pytest.raises(InvalidParameter, match="has id"):
        model.generate(ids(1, 50, seed=9), past_key_values=cache, max_new_tokens=1, **OPTIONS)


def test_an_attention_implementation_set_meanwhile_is_kept(model: Any) -> None:
    with KvpackCache(model, "raw") as cache:
        model.set_attn_implementation("eager")
        with pytest.raises(InvalidParameter, match="the attention of Qwen2ForCausalLM is 'eager', which does not support packed layers"):
            model(ids(1, 5), past_key_values=cache)
        assert model(ids(1, 5), output_attentions=True).attentions[0] is not None
    assert model.config._attn_implementation == "eager"
    with KvpackCache(model, "raw") as cache:
        model(ids(1, 5), past_key_values=cache)
    assert model.config._attn_implementation == "eager"


def test_a_file_without_tokens_cannot_be_continued(model: Any, tmp_path: Path) -> None:
    """A file without tokens does not describe what its layers contain."""
    with KvpackCache(model, "octopus-4") as cache:
        kvpack.save(cache.packed, tmp_path / "empty")
    with pytest.raises(InvalidParameter, match=r"no layer of the cache has keys or values: start with KvpackCache\(model, recipe\)"):
        KvpackCache.load(tmp_path / "empty", model)


def test_a_cache_can_be_created_from_a_configuration(model: Any) -> None:
    ids = torch.arange(1, 21)[None]
    with KvpackCache(model, "octopus-4") as cache:
        expected = [model(part, past_key_values=cache).logits for part in (ids, ids[:, :1])]
    before, cache = model.config._attn_implementation, KvpackCache(config=model.config, recipe="octopus-4")
    model.set_attn_implementation("kvpack")
    found = [model(part, past_key_values=cache).logits for part in (ids, ids[:, :1])]
    model.set_attn_implementation(before)
    assert all(map(torch.equal, found, expected))
    assert cache.packed.tokens == 21
    assert cache.packed.model == {}
    with pytest.raises(InvalidParameter, match="a model has its own"):
        KvpackCache(model, "raw", config=model.config)
    with pytest.raises(InvalidParameter, match="expected the configuration of a transformers model"):
        KvpackCache(config={}, recipe="raw")
    with pytest.raises(InvalidType, match=r"use KvpackCache\(model, recipe\), or KvpackCache\(config="):
        KvpackCache(recipe="raw")


def test_supported_constructor_arguments_are_accepted(model: Any) -> None:
    packed = kvpack.pack([(torch.zeros(1, 2, 4, 32),) * 2] * 3, "raw")
    assert KvpackCache.of(packed, model).get_seq_length() == 4
    for kind, text, call in [
        (InvalidParameter, "needs a recipe, such as", lambda: KvpackCache(model)),
        (InvalidParameter, "unknown word 'octopus-33'", lambda: KvpackCache(model, "octopus-33")),
        (InvalidType, "is not a packed cache: use KvpackCache", lambda: KvpackCache.of([], model)),
        (InvalidParameter, "the cache has 3 layers", lambda: KvpackCache.of(packed, gemma())),
    ]:
        with pytest.raises(kind, match=text):
            call()


def test_moving_or_pickling_a_cache_is_refused_by_name(model: Any) -> None:
    with KvpackCache(model, "kivi-2") as cache:
        with pytest.raises(InvalidParameter, match=r"layers\[1\] is packed, and its pages stay on their device: omit offload"):
            cache.offload(1)
        with pytest.raises(InvalidParameter, match=r"a LiveCache or KvpackCache cannot be pickled: .* KvpackCache\.load"):
            torch.save(cache, io.BytesIO())


def test_a_deleted_model_does_not_affect_the_next_one() -> None:
    model, other = qwen("sdpa"), qwen("sdpa")
    kept = attention_switch.AttentionSwitch.for_model(model)
    number = id(model.config)
    assert plain_attention.plain_attention_name(model.config) == "sdpa"
    assert number in plain_attention._previous_attention
    entry = model_changes._IN_EFFECT[attention_switch.AttentionSwitch, id(model)]
    del model
    gc.collect()
    assert number not in plain_attention._previous_attention
    # As if the other model had the id of the one that is gone.
    model_changes._IN_EFFECT[attention_switch.AttentionSwitch, id(other)] = entry
    made = attention_switch.AttentionSwitch.for_model(other)
    assert made is not kept
    assert other.config._attn_implementation == "kvpack"
    del made
    assert other.config._attn_implementation == "sdpa"


@pytest.mark.scenario
def test_another_thread_saves_while_a_model_generates(model: Any, tmp_path: Path) -> None:
    """Every saved file contains complete tokens with their ids, and the generated text does not change."""
    prompt, options = torch.arange(1, 21)[None], {**OPTIONS, "max_new_tokens": 200}
    expected = model.generate(prompt, past_key_values=KvpackCache(model, "k=octahedral:b=4;v=group:b=4,g=32"), **options)
    cache, ended, saved = KvpackCache(model, "k=octahedral:b=4;v=group:b=4,g=32"), threading.Event(), []

    def save() -> None:
        while not ended.is_set():
            kvpack.save(cache.packed, tmp_path / "file")
            saved.append(kvpack.load(tmp_path / "file", copy=True))

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save)
        found = model.generate(prompt, past_key_values=cache, **options)
        ended.set()
        saving.result()
    assert found.tolist() == expected.tolist()
    assert len({packed.tokens for packed in saved}) > 2
    for packed in saved:
        assert packed.inputs.tokens == packed.tokens
        assert {layer.seen_tokens for layer in packed} == {packed.tokens}


def test_a_thread_that_ended_within_a_pass_does_not_block_others(model: Any) -> None:
    prompt, cache = torch.arange(1, 21)[None], KvpackCache(model, "octopus-4")
    thread = threading.Thread(target=cache.passes.lock.acquire)
    thread.start()
    thread.join()
    assert model.generate(prompt, past_key_values=cache, max_new_tokens=2, **OPTIONS).shape[1] == 22


def test_forwards_with_and_without_a_signature_are_distinguished(model: Any) -> None:
    """generate looks for a parameter named ``attention_mask``. The mask's length shows whether all ids were passed, or only new ones."""
    text = ids(1, 60)
    expected = model.generate(text, max_new_tokens=4, **OPTIONS).tolist()
    forward = model.forward
    for wrapped, refused in (
        (lambda *given, **named: forward(*given, **named), True),
        (wraps(forward)(lambda *a, **b: forward(*a, **b)), False),
    ):
        model.forward = forward
        with KvpackCache(model, "raw") as cache:
            model(text[:, :20], past_key_values=cache)
            model.forward = wrapped
            if not refused:
                assert model.generate(text, past_key_values=cache, max_new_tokens=4, **OPTIONS).tolist() == expected
                continue
            with pytest.raises(
                InvalidParameter, match=r"cannot skip the cache's 20 tokens if the 60 token ids .*functools\.wraps"
            ):
                model.generate(text, past_key_values=cache, max_new_tokens=4, **OPTIONS)
            # Ids that differ from the cache's follow it.
            found = model.generate(text[:, 20:], past_key_values=cache, max_new_tokens=4, **OPTIONS)
            assert found[0, 40:].tolist() == expected[0][60:]


def test_embeddings_continue_after_the_cache(model: Any) -> None:
    """generate drops as many embeddings as the cache has tokens, whatever their values."""
    text = ids(1, 40)
    embeddings = model.get_input_embeddings()(text)
    expected = model.generate(inputs_embeds=embeddings, max_new_tokens=4, **OPTIONS).tolist()
    with KvpackCache(model, "raw") as cache:
        model(text[:, :20], past_key_values=cache)
        for given, reason in [
            (embeddings[:, :20], "got 20 embeddings, but the cache holds 20 tokens: pass the embeddings of those tokens"),
            (embeddings[:, :15], "got 15 embeddings, but the cache holds 20 tokens"),
            (embeddings.roll(-3, 1), f"the embedding of token 0 differs from the embedding of id {int(text[0, 0])}"),
        ]:
            with pytest.raises(InvalidParameter, match=reason):
                model.generate(inputs_embeds=given, past_key_values=cache, max_new_tokens=4, **OPTIONS)
            assert cache.get_seq_length() == 20
        found = model.generate(inputs_embeds=embeddings, past_key_values=cache, max_new_tokens=4, **OPTIONS)
        assert found.tolist() == expected


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Position ids are not supported")
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (peft.PrefixTuningConfig, "of type PREFIX_TUNING, which replaces the cache that it receives"),
        (peft.PromptTuningConfig, "of type PROMPT_TUNING, with which PEFT computes only the last token"),
    ],
)
def test_adapters_with_virtual_tokens_do_not_continue_a_cache(settings: Any, reason: str, model: Any) -> None:
    """PEFT would replace the cache, or drop new tokens. It leaves its own methods in the model, whose ids are still checked."""
    base, text = model, ids(1, 40)
    adapted = peft.get_peft_model(base, settings(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    adapted.generate(input_ids=text[:, :5], max_new_tokens=2, **OPTIONS)
    replaced = vars(base)["prepare_inputs_for_generation"]
    with KvpackCache(base, "raw") as cache:
        base(text[:, :20], past_key_values=cache)
        with pytest.raises(InvalidParameter, match=f"the active adapter of PeftModelForCausalLM is {reason}"):
            adapted.generate(input_ids=text[:, :25], past_key_values=cache, max_new_tokens=4, **OPTIONS)
        with pytest.raises(InvalidParameter, match="token 0 of row 0 has id"):
            base.generate(text[:, 1:30], past_key_values=cache, max_new_tokens=4, **OPTIONS)
        assert cache.get_seq_length() == 20
    assert vars(base)["prepare_inputs_for_generation"] == replaced
    if settings is peft.PrefixTuningConfig:
        with pytest.raises(InvalidParameter, match=reason):
            KvpackCache(adapted, "raw")
