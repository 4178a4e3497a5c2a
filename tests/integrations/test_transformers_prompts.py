"""A prompt reuses the prefix that it shares with a file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import BatchEncoding

import kvpack
from kvpack.cli import main
from kvpack.errors import InvalidParameter, InvalidType, KvpackError
from kvpack.file.inputs import Inputs
from kvpack.integrations.transformers import KvpackCache
from kvpack.integrations.transformers.models import model_identity
from support.zoo_models import model_of

if TYPE_CHECKING:
    from pathlib import Path

IDS = torch.randint(1, 60, (1, 60), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def generated(model: Any, ids: torch.Tensor, cache: Any = None) -> list[Any]:
    return model.generate(ids, past_key_values=cache, do_sample=False, pad_token_id=0, max_new_tokens=6, use_cache=True).tolist()


def file_of(model: Any, path: Path, ids: torch.Tensor = IDS, recipe: str = "raw") -> Path:
    with KvpackCache(model, recipe) as cache:
        model(ids, past_key_values=cache)
        kvpack.save(cache.packed, path, metadata={"title": "one"})
    return path


def changed(token: int, count: int = 70) -> torch.Tensor:
    """Return a longer prompt whose ids differ from the file's at ``token``."""
    ids = torch.cat([IDS, IDS], 1)[:, :count].clone()
    ids[0, token] = 61
    return ids


@pytest.mark.parametrize(("prompt", "kept"), [
    (changed(45), 45),
    (changed(0), 0),
    (changed(69), 60),
    (IDS, 59),
    (IDS[:, :20], 19),
    (IDS[:, :1], 0),
], ids=["inside", "at the first token", "after the file", "the file's own", "shorter", "one token"])  # fmt: skip
@pytest.mark.parametrize("name", ["Llama", "DeepSeek-V3"])
def test_the_common_tokens_are_kept(name: str, prompt: torch.Tensor, kept: int, tmp_path: Path, recwarn: Any) -> None:
    model = model_of(name)
    path = file_of(model, tmp_path / "file")
    computed = []
    model.register_forward_pre_hook(lambda _, args, kwargs: computed.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    with KvpackCache.load(path, model, prompt=prompt) as cache:
        assert cache.get_seq_length() == kept
        found = generated(model, prompt, cache)
        assert computed[0] == prompt.shape[1] - kept
        inputs = cache.packed.inputs
        assert inputs.token_ids == torch.tensor(found)[0, :-1].numpy().astype("<u4").tobytes()
        assert not inputs.undetermined
    assert found == generated(model, prompt)
    assert KvpackCache.load(path, model, prompt=prompt[0].tolist()).get_seq_length() == kept


@pytest.mark.filterwarnings("ignore:.*which share")
def test_common_lossy_tokens_are_kept_unchanged(tmp_path: Path) -> None:
    model = model_of("Llama")
    path = file_of(model, tmp_path / "file", recipe="kv=group:b=4,g=8")
    with KvpackCache.load(path, model, prompt=changed(45)) as cache:
        for mine, theirs in zip(cache.packed, kvpack.load(path), strict=True):
            for one, other in zip(mine.unpack(), theirs.unpack(), strict=True):
                assert torch.equal(one, other[:, :, :45])
        assert len(generated(model, changed(45), cache)[0]) == 76


def test_rows_keep_their_common_prefix(tmp_path: Path) -> None:
    model = model_of("Llama")
    path = file_of(model, tmp_path / "file", IDS.expand(2, -1))
    prompt = torch.cat([changed(50), changed(30)])
    with KvpackCache.load(path, model, prompt=prompt) as cache:
        assert cache.get_seq_length() == 30
        assert generated(model, prompt, cache) == generated(model, prompt)
    with pytest.raises(InvalidParameter, match=r"the prompt has 1 rows, but the cache holds 2 sequences: pass one row per sequence"):
        KvpackCache.load(path, model, prompt=IDS)


def of_frequencies(kind: str) -> Any:
    """Return a model whose RoPE uses other frequencies for more than 25 tokens."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4} if kind == "longrope" else {"factor": 2.0}
    settings = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 25, **factors}
    return model_of("Llama", rope_parameters=settings, max_position_embeddings=25)


@pytest.mark.parametrize(("tokens", "prompt", "kept"), [(24, 23, 15), (24, 40, 0), (40, 20, 0)], ids=["both short", "to long", "from long"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_keys_with_other_frequencies_are_not_kept(kind: str, tokens: int, prompt: int, kept: int, tmp_path: Path) -> None:
    """If RoPE's frequencies depend on the sequence length, the same token ids have other keys in a long sequence."""
    model = of_frequencies(kind)
    path = file_of(model, tmp_path / "file", changed(30, 45)[:, :tokens])
    ids = changed(15)[:, :prompt]
    if kept:
        cache = KvpackCache.load(path, model, prompt=ids)
    else:
        with pytest.warns(kvpack.KvpackWarning, match=r"no tokens of .* kept for the prompt: the (cache|prompt) has 40 .*above 2[45]"):
            cache = KvpackCache.load(path, model, prompt=ids)
    with cache:
        assert cache.get_seq_length() == kept
        found = model(ids[:, kept:], past_key_values=cache).logits[:, -1]
    assert torch.allclose(found, model(ids).logits[:, -1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_keys_of_a_cropped_long_sequence_are_not_kept(kind: str, tmp_path: Path) -> None:
    """Keys of the long pass are dropped even if only a few are left. Those that an earlier short pass computed are kept."""
    model = of_frequencies(kind)
    ids, prompt = changed(45), changed(15)[:, :22]
    for first, kept in ((40, 0), (20, 15)):
        with KvpackCache(model, "raw") as cache:
            for part in ids[:, :40].split([first, 40 - first] if first < 40 else [40], 1):
                model(part, past_key_values=cache)
            cache.crop(-22)
            kvpack.save(cache.packed, tmp_path / "file")
        if kept:
            cache = KvpackCache.load(tmp_path / "file", model, prompt=prompt)
        else:
            text = (
                "no tokens of the cache are kept for the prompt: tokens 0 to 17 have the RoPE frequencies of a sequence of more than 2[45]"
            )
            with pytest.warns(kvpack.KvpackWarning, match=text):
                cache = KvpackCache.load(tmp_path / "file", model, prompt=prompt)
        with cache:
            assert cache.get_seq_length() == kept
            found = model(prompt[:, kept:], past_key_values=cache).logits[:, -1]
        assert torch.allclose(found, model(prompt).logits[:, -1], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("token", "kept"), [(58, 58), (20, 0)], ids=["inside what is held", "before it"])
def test_sliding_layers_keep_what_they_can(token: int, kept: int, tmp_path: Path) -> None:
    model = model_of("Gemma-3")
    path = file_of(model, tmp_path / "file")
    cache = kvpack.load(path)
    first = replace(cache[0], k=cache[0].k.slice(32, 60), v=cache[0].v.slice(32, 60), skipped=32)
    kvpack.save(replace(cache, layers=(first, cache[1])), path)
    prompt = changed(token)
    if not kept:
        with pytest.warns(kvpack.KvpackWarning, match="the same 20 tokens, and none of them are kept"):
            cache = KvpackCache.load(path, model, prompt=prompt)
    else:
        cache = KvpackCache.load(path, model, prompt=prompt)
    assert cache.get_seq_length() == kept
    assert generated(model, prompt, cache) == generated(model, prompt)


def test_incomparable_prompts_are_refused(tmp_path: Path) -> None:
    model = model_of("Llama")
    path = file_of(model, tmp_path / "file")
    cache = kvpack.load(path)
    ids = cache.inputs.token_ids
    cases: list[tuple[type[KvpackError], str, Any, Any]] = [
        (InvalidParameter, "does not hold the token ids that it was computed from", None, IDS),
        (InvalidParameter, "does not hold the token ids that it was computed from", Inputs(), IDS),
        (
            InvalidParameter,
            "tokens 0 to 3 came from embeddings: token ids do not",
            Inputs(ids, ("tokens 0 to 3 came from embeddings",)),
            IDS,
        ),
        (InvalidType, "prompt has dtype torch.float32, expected token ids", cache.inputs, IDS.float()),
        (InvalidType, r"pass tokenizer\(text\)\['input_ids'\]", cache.inputs, "text"),
        (InvalidType, r"pass tokenizer\(text\)\['input_ids'\]", cache.inputs, BatchEncoding({"input_ids": IDS})),
        (InvalidParameter, r"prompt has shape \[1, 0\], expected token ids", cache.inputs, IDS[:, :0]),
        (InvalidParameter, r"prompt has shape \[1, 1, 60\], expected token ids", cache.inputs, IDS[None]),
    ]
    for kind, text, inputs, prompt in cases:
        with pytest.raises(kind, match=text):
            KvpackCache.of(replace(cache, inputs=inputs), model, prompt=prompt)
    # What came from anything else is after the tokens that are kept.
    image = Inputs(ids, ("tokens 40 to 43 came from embeddings",), (40,))
    assert KvpackCache.of(replace(cache, inputs=image), model, prompt=IDS).get_seq_length() == 40
    assert KvpackCache.of(replace(cache, inputs=Inputs(ids[:80])), model, prompt=IDS).get_seq_length() == 20
    model.train()
    with KvpackCache(model, "raw") as trained:
        model(IDS, past_key_values=trained)
        with pytest.raises(InvalidParameter, match="were computed in training mode: token ids do not determine the cache"):
            KvpackCache.of(trained.packed, model, prompt=IDS)


def test_a_file_names_its_model_and_keeps_its_metadata(tmp_path: Path, capsys: Any) -> None:
    model = model_of("Llama")
    model.config._name_or_path = "one"
    path = file_of(model, tmp_path / "file")
    named = kvpack.load(path).model
    assert named == kvpack.Identity.of(model, "raw").header_model
    with KvpackCache.load(path, model) as cache, KvpackCache(model, "raw") as other:
        assert other.packed.model == named
        model(IDS, past_key_values=cache)
        kvpack.save(cache.packed, tmp_path / "longer")
    longer = kvpack.load(tmp_path / "longer")
    assert longer.model == named
    assert longer.metadata == {"title": "one"}
    assert longer.inputs.tokens == longer.tokens == 120
    moved_file = replace(kvpack.load(path), model={**named, "name": "/a/folder of/another machine"})
    with kvpack.Store(tmp_path / "store", kvpack.Identity.of(model, "raw"), chunk=20) as store:
        assert store.save(IDS[0].tolist(), moved_file) == 60
    KvpackCache.of(moved_file, model)
    other = model_of("Llama", rms_norm_eps=1e-3)
    with pytest.raises(InvalidParameter, match="the cache was computed by a model whose config is '"):
        KvpackCache.load(path, other)
    moved = model_of("Llama")
    moved.config._name_or_path = "another folder"
    with KvpackCache.load(path, moved) as cache:
        assert cache.get_seq_length() == 60
    with torch.no_grad():
        moved.model.layers[1].mlp.down_proj.weight.mul_(1.01)
    with pytest.raises(InvalidParameter, match="the cache was computed by a model whose weights are 'sha256:"):
        KvpackCache.load(path, moved)
    assert main(["inspect", str(tmp_path / "longer")]) == 0
    printed = capsys.readouterr().out
    assert "token ids of the first 120 tokens\n" in printed
    assert "title: one" in printed
    assert "model one\n" in printed


def test_a_model_with_offloaded_weights_is_named_without_them() -> None:
    model = model_of("Llama")
    model.config._name_or_path = "one"
    whole = model_identity(model)
    model.model.layers[1].mlp.down_proj.to("meta")
    assert model_identity(model) == {name: text for name, text in whole.items() if name != "weights"}
    assert whole["weights"].startswith("sha256:")
