"""Prompts of models with sliding windows or states are computed once, stored, and continued elsewhere.

The tests include padding and batches.
"""

from __future__ import annotations

import json
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvpack
from kvpack.errors import InvalidParameter, KvpackWarning
from kvpack.integrations.transformers import KvpackCache, recording
from support import warm_python
from support.model_zoo import Architecture
from support.zoo_models import model_of

CHUNK = 16
PROMPT = torch.randint(3, 60, (1, 77), generator=torch.Generator().manual_seed(0))
QUESTIONS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
SLIDING = ["Mistral", "Gemma-2", "Gemma-3", "Gemma-4", "GPT-OSS", "Phi-3", "Cohere2"]
HYBRIDS = [
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2_moe",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_next",
    "zamba2",
]
DTYPES = [*((name, "float32") for name in HYBRIDS), ("falcon_h1", "bfloat16"), ("qwen3_next", "bfloat16")]
SUPPORT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def generated(model: Any, ids: torch.Tensor, past: Any = None, **options: Any) -> list[Any]:
    # Without a mask, generate hides the tokens whose id is that of padding.
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, "use_cache": True, **options}
    options = {"max_new_tokens": 20, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KvpackWarning)
        return model.generate(ids, past_key_values=past, **options).tolist()


def continued(model: Any, ids: torch.Tensor, past: Any) -> tuple[list[Any], torch.Tensor]:
    """Return the tokens that ``generate`` appends to ``ids``, and the logits of each."""
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KvpackWarning)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=past, **options)
    return found.sequences.tolist(), torch.stack(found.logits)


def in_passes(model: Any, ids: torch.Tensor, tokens: int) -> Any:
    """Return transformers' own cache for ``ids``, computed in passes of ``tokens`` tokens."""
    past = DynamicCache(config=model.config.get_text_config(decoder=True))
    for part in ids.split(tokens, 1):
        model(part, past_key_values=past)
    return past


def open_store(folder: Path, model: Any) -> kvpack.Store:
    return kvpack.Store(folder, kvpack.Identity.of(model, "raw"), chunk=CHUNK)


def save(folder: Path, model: Any, prompt: torch.Tensor = PROMPT, **options: Any) -> int:
    """Compute a prompt, store it, and return the number of stored tokens."""
    with open_store(folder, model) as store, kvpack.prefill(model, prompt, "raw", **options) as cache:
        return store.save(prompt, cache)


CONTINUE = f"""
import json, sys, warnings
sys.path.insert(0, {str(SUPPORT)!r})
import kvpack, torch
from kvpack.integrations.transformers import KvpackCache
from support.zoo_models import model_of

folder, prompt, questions = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
found = {{}}
for name in sys.argv[4:]:
    model = model_of(name)
    with kvpack.Store(f"{{folder}}/{{name}}", kvpack.Identity.of(model, "raw"), chunk={CHUNK}) as store, torch.no_grad():
        tokens, cache = store.load(prompt)
    with KvpackCache.of(cache, model) as past:
        ids = torch.tensor([[*prompt, *questions[0]]])
        options = dict(attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, max_new_tokens=20)
        found[name] = tokens, [layer.skipped for layer in cache], model.generate(ids, past_key_values=past, **options).tolist()
print(json.dumps(found))
"""


def test_another_process_continues_a_stored_prompt(tmp_path: Path) -> None:
    for name in SLIDING:
        assert save(tmp_path / name, model_of(name), every=CHUNK if name == "Mistral" else 2048) == 64
    command = [warm_python.python(*warm_python.MODELS), "-c", CONTINUE, str(tmp_path)]
    command += [json.dumps(PROMPT[0].tolist()), json.dumps(QUESTIONS.tolist()), *SLIDING]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    for name in SLIDING:
        tokens, skipped, ids = found[name]
        assert tokens == 64
        # Windows of 12 reach the last chunk.
        assert {48} <= set(skipped) <= {0, 48}, name
        assert ids == generated(model_of(name), torch.cat([PROMPT, QUESTIONS[:1]], 1)), name


@pytest.mark.scenario
@pytest.mark.parametrize("name", ["Mistral", "Gemma-3", "GPT-OSS"])
@pytest.mark.parametrize("where", ["left", "right", "none"])
def test_a_batch_continues_a_stored_prompt(name: str, where: str, tmp_path: Path) -> None:
    """The rows have different questions. One row is padded between the prompt and its question, or after the question."""
    model = model_of(name)
    save(tmp_path, model)
    ids = torch.cat([PROMPT[:, :64].expand(2, -1), QUESTIONS], 1)
    mask = torch.ones_like(ids)
    if where != "none":
        mask[1, slice(64, 68) if where == "left" else slice(69, 73)] = 0
    expected = generated(model, ids, attention_mask=mask)
    with open_store(tmp_path, model) as store:
        _, cache = store.load(PROMPT)
    with KvpackCache.of(cache, model) as past:
        past.batch_repeat_interleave(2)
        assert generated(model, ids, past, attention_mask=mask) == expected


def test_a_row_of_a_padded_batch_is_stored(tmp_path: Path) -> None:
    """Only the row without padding is stored, because padding means that token ids do not determine keys and values."""
    model = model_of("Gemma-3")
    ids = torch.cat([PROMPT, torch.nn.functional.pad(PROMPT[:, 9:], (9, 0))])
    with KvpackCache(model, "raw", keep_all=True) as cache:
        generated(model, ids, cache, attention_mask=(ids != 0).long())
        packed = cache.packed
    own = packed.token_ids[0]
    with open_store(tmp_path, model) as store:
        with pytest.raises(InvalidParameter, match=r"layers\[0\]\.k holds 2 sequences"):
            store.save(own, packed)
        with pytest.raises(InvalidParameter, match="token ids alone do not determine"):
            store.save(packed.token_ids[1], packed.select([1]))
        assert store.save(own, packed.select([0])) == len(own) // CHUNK * CHUNK
        tokens, loaded = store.load(own[:-1])
        assert tokens == (len(own) - 1) // CHUNK * CHUNK
    with KvpackCache.of(loaded, model) as past:
        assert generated(model, own[None], past, max_new_tokens=8) == generated(model, own[None], max_new_tokens=8)


@pytest.mark.parametrize("name", ["Mistral", "Gemma-3"])
def test_turns_extend_the_stored_prompt(name: str, tmp_path: Path) -> None:
    """Each turn loads the chunks that the previous turn stored, and stores the next ones.

    Sliding layers still hold the last of the loaded chunks.
    """
    model = model_of(name)
    ids, stored = PROMPT, 0
    with open_store(tmp_path, model) as store:
        for turn in range(4):
            tokens, cache = store.load(ids[:, :-1])
            assert tokens == min(stored, (ids.shape[1] - 1) // CHUNK * CHUNK)
            with kvpack.prefill(model, ids[:, :-1], cache or "raw", every=24) as past:
                expected = generated(model, ids)
                assert generated(model, ids, past) == expected
                stored = store.save(expected[0][:-1], past)
            assert stored == (len(expected[0]) - 1) // CHUNK * CHUNK
            ids = torch.cat([torch.tensor(expected), QUESTIONS[turn % 2 : turn % 2 + 1]], 1)
        assert store.counters()["faults"] == {}


def test_a_cache_with_all_states_goes_back_to_any_token() -> None:
    model = model_of("Mistral")
    longer = torch.cat([PROMPT, QUESTIONS[:1]], 1)
    with kvpack.prefill(model, longer, "raw") as cache:
        assert [layer.tokens for layer in cache.packed] == [86, 86]
        cache.crop(-66)
        assert generated(model, PROMPT, cache) == generated(model, PROMPT)


def test_prefill_computes_missing_tokens() -> None:
    model = model_of("Llama")
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(args[0].shape[1]), with_kwargs=True)
    with kvpack.prefill(model, PROMPT[0].tolist(), "raw", every=32) as cache:
        assert calls == [32, 32, 13]
        assert cache.packed.token_ids.tolist() == PROMPT.tolist()
        packed = cache.packed[:, :40]
    calls.clear()
    with kvpack.prefill(model, PROMPT, packed, every=32) as cache:
        assert calls == [24, 13]
        handle.remove()
        assert generated(model, torch.cat([PROMPT, QUESTIONS[:1]], 1), cache) == generated(model, torch.cat([PROMPT, QUESTIONS[:1]], 1))


@pytest.mark.parametrize("tokens", [4 * CHUNK - 1, 4 * CHUNK, 4 * CHUNK + 1])
def test_a_worker_replies_from_computed_and_from_loaded_tokens(tokens: int, tmp_path: Path) -> None:
    """Prompts that end at or next to the end of a chunk need no special case."""
    model = model_of("Llama")
    ids = PROMPT[0, :tokens].tolist()
    expected = generated(model, PROMPT[:, :tokens])
    whole = (tokens - 1) // CHUNK * CHUNK
    with open_store(tmp_path, model) as store:
        for stored in (0, whole):
            found, prefix = store.load(ids[:-1])
            assert found == stored
            with kvpack.prefill(model, ids[:-1], "raw" if prefix is None else prefix) as cache:
                assert store.save(ids[:-1], cache) == whole
                assert generated(model, PROMPT[:, :tokens], cache) == expected


def test_prefill_refuses_a_prompt_that_does_not_continue_the_cache() -> None:
    model = model_of("Llama")
    with kvpack.prefill(model, PROMPT, "raw") as cache:
        packed = cache.packed
    attention = model.config._attn_implementation
    other = torch.cat([PROMPT, PROMPT[:, :1]], 1)
    other[0, 3] = 61
    with pytest.raises(InvalidParameter, match=r"token 3 of row 0 has id 61"):
        kvpack.prefill(model, other, packed)
    with pytest.raises(InvalidParameter, match=r"token 3 of row 0 has id 61"):
        kvpack.prefill(model, other[:, :-1], packed)
    with pytest.raises(InvalidParameter, match="token_ids has 76 tokens, but the cache holds 77: pass at least those 77 tokens"):
        kvpack.prefill(model, PROMPT[:, :-1], packed)
    for wrong in ({"every": 0}, {"chunk": -1}):
        with pytest.raises(InvalidParameter, match=r"(every is 0|chunk is -1), expected a positive number of tokens"):
            kvpack.prefill(model, PROMPT, "raw", **wrong)
    hybrid = model_of("Falcon-H1")
    with pytest.raises(InvalidParameter, match="every=40 skips the ends of chunks, where a store needs states: pass a multiple of 16"):
        kvpack.prefill(hybrid, PROMPT, "raw", every=40, chunk=CHUNK)
    assert model.config._attn_implementation == attention


@pytest.mark.scenario
@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_a_model_with_states_resumes_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    """With the same passes and the same attention function, logits equal those over transformers' own cache."""
    model = Architecture(name).model().to(getattr(torch, dtype))
    ids = torch.cat([PROMPT, QUESTIONS[:1]], 1)
    expected = {tokens: continued(model, ids, in_passes(model, ids[:, :tokens], 32)) for tokens in (32, 64)}
    assert save(tmp_path, model, every=32, chunk=CHUNK, dense=True) == 64
    with open_store(tmp_path, model) as store:
        assert store.stats()["entries"] == 4 + 2
        for asked, tokens in ((77, 64), (63, 32)):
            found, cache = store.load(PROMPT[:, :asked])
            assert found == tokens
            with KvpackCache.of(cache, model, dense=True) as past:
                own, logits = continued(model, ids, past)
            assert own == expected[tokens][0]
            assert torch.equal(logits, expected[tokens][1])
            if name != "kimi_linear" and dtype == "float32":
                # Packed attention adds in another order.
                with KvpackCache.of(cache, model) as past:
                    assert continued(model, ids, past)[0] == own
        assert store.load(PROMPT[:, :31]) == (0, None)


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
def test_packed_layers_resume(name: str, tmp_path: Path) -> None:
    """They continue like a KvpackCache that computed the prompt itself in the same passes."""
    model = Architecture(name).model()
    ids = torch.cat([PROMPT, QUESTIONS[:1]], 1)
    with kvpack.prefill(model, PROMPT[:, :64], "raw", every=32, chunk=CHUNK) as past:
        packed = past.packed
        expected = continued(model, ids, past)
    with open_store(tmp_path, model) as store:
        assert store.save(PROMPT[:, :64], packed) == 64
        _, cache = store.load(PROMPT)
    with KvpackCache.of(cache, model) as past:
        found = continued(model, ids, past)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-6)


CONTINUE_HYBRIDS = CONTINUE.replace("from support.zoo_models import model_of", "from support.model_zoo import Architecture").replace(
    "model_of(name)", "Architecture(name).model()"
)


def test_another_process_resumes_models_with_states(tmp_path: Path) -> None:
    names = ["falcon_h1", "qwen3_5_text", "nemotron_h"]
    for name in names:
        assert save(tmp_path / name, Architecture(name).model(), every=32, chunk=CHUNK) == 64
    command = [warm_python.python(*warm_python.MODELS), "-c", CONTINUE_HYBRIDS, str(tmp_path)]
    command += [json.dumps(PROMPT[0].tolist()), json.dumps(QUESTIONS.tolist()), *names]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    ids = torch.cat([PROMPT, QUESTIONS[:1]], 1)
    for name in names:
        tokens, _, own = found[name]
        assert tokens == 64
        model = Architecture(name).model()
        assert own == generated(model, ids, in_passes(model, ids[:, :64], 32)), name


@pytest.mark.parametrize("where", ["left", "none"])
def test_a_batch_with_states_resumes(where: str, tmp_path: Path) -> None:
    model = model_of("Falcon-H1")
    save(tmp_path, model, every=32, chunk=CHUNK)
    ids = torch.cat([PROMPT[:, :64].expand(2, -1), QUESTIONS], 1)
    mask = torch.ones_like(ids)
    if where == "left":
        mask[1, 64:68] = 0
    past = in_passes(model, ids[:, :64], 32)
    expected = generated(model, ids, past, attention_mask=mask)
    with open_store(tmp_path, model) as store:
        _, cache = store.load(PROMPT)
    with KvpackCache.of(cache, model) as own:
        own.batch_repeat_interleave(2)
        assert generated(model, ids, own, attention_mask=mask) == expected


def test_turns_of_a_model_with_states_extend_the_stored_prompt(tmp_path: Path) -> None:
    """Each turn resumes after the last whole chunk of the previous turn's prompt."""
    model = model_of("Qwen3-Next")
    ids, stored = PROMPT, 0
    with open_store(tmp_path, model) as store:
        for turn in range(3):
            tokens, cache = store.load(ids[:, :-1])
            assert tokens == stored
            with kvpack.prefill(model, ids[:, :-1], cache or "raw", every=32, chunk=CHUNK) as past:
                # What is generated has no states at the ends of chunks.
                stored = (ids.shape[1] - 1) // CHUNK * CHUNK
                own = generated(model, ids, past, max_new_tokens=10)
                assert store.save(own[0][:-1], past) == stored
            assert own == generated(model, ids, max_new_tokens=10), turn
            ids = torch.cat([torch.tensor(own), QUESTIONS[turn % 2 : turn % 2 + 1]], 1)
        assert store.counters()["faults"] == {}


def test_states_kept_by_a_recording_are_stored(tmp_path: Path) -> None:
    """The recording is created manually, over transformers' own cache."""
    model = model_of("Falcon-H1")
    with recording(model) as record:
        past = DynamicCache(config=model.config)
        for part in PROMPT.split(32, 1):
            model(part, past_key_values=past)
            record.snapshot_states(past)
        inputs, states = record.inputs(past), record.states_at(past)
        assert list(states) == [32, 64, 77]
    cache = kvpack.pack(past, "raw", inputs=inputs, states_at=states)
    assert list(cache.states_at) == [32, 64]
    with open_store(tmp_path, model) as store:
        assert store.save(PROMPT, cache) == 64
        tokens, loaded = store.load(PROMPT)
        assert (tokens, store.match(PROMPT[:, :63])) == (64, 32)
    ids = torch.cat([PROMPT, QUESTIONS[:1]], 1)
    with KvpackCache.of(loaded, model, dense=True) as own:
        found, logits = continued(model, ids, own)
    expected = continued(model, ids, in_passes(model, PROMPT[:, :64], 32))
    assert found == expected[0]
    assert torch.equal(logits, expected[1])
    with pytest.raises(InvalidParameter, match=r"states_at\[32\] differs in layers, names or shapes"):
        kvpack.pack(past, "raw", states_at={32: states[32][:1]})
    with pytest.raises(InvalidParameter, match="states_at is 7, expected a map"):
        kvpack.pack(past, "raw", states_at=7)  # type: ignore[arg-type]


def test_a_recording_drops_states_of_moved_rows() -> None:
    model = model_of("Falcon-H1")
    rows = torch.cat([PROMPT, PROMPT.flip(1)])
    with recording(model) as record:
        past = DynamicCache(config=model.config)
        with pytest.raises(InvalidParameter, match="no recorded forward pass used this DynamicCache"):
            record.snapshot_states(past)
        model(rows, past_key_values=past)
        record.snapshot_states(past)
        assert list(record.states_at(past)) == [77]
        past.reorder_cache(torch.tensor([1, 0]))
        assert record.states_at(past) == {}
        record.snapshot_states(past)
        assert list(record.states_at(past)) == [77]
        past.reset()
        assert record.states_at(past) == {}
