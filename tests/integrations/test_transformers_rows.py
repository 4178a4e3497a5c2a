"""Every row of a batch continues from its own prompt, and tokens that padding hides stay hidden, even in a file."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from transformers import DynamicCache

import kvpack
from kvpack.file.inputs import MASKED, PADDED, Inputs
from kvpack.formats.errors import InvalidParameter, KvpackError
from kvpack.integrations.transformers import KvpackCache, recording
from support.zoo_models import model_of

if TYPE_CHECKING:
    from pathlib import Path

PAD, TOKENS, PADDING = 0, 40, 17
OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def ids(batch: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 50, (batch, count), generator=torch.Generator().manual_seed(seed))


def as_bytes(row: torch.Tensor) -> bytes:
    return row.numpy().astype("<u4").tobytes()


def padded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of which the second is padded on the left, and their mask."""
    rows = rows.clone()
    rows[1, :PADDING] = PAD
    mask = torch.ones_like(rows)
    mask[1, :PADDING] = 0
    return rows, mask


def longer(rows: torch.Tensor, mask: torch.Tensor | None = None, more: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones_like(rows) if mask is None else mask
    return torch.cat([rows, ids(len(rows), more, 9)], 1), torch.nn.functional.pad(mask, (0, more), value=1)


def saved(model: Any, path: Path, rows: torch.Tensor, mask: torch.Tensor | None = None, recipe: str = "raw") -> Path:
    """Save the cache of ``rows`` after ``generate``, and return the file's path."""
    with KvpackCache(model, recipe) as cache:
        model.generate(rows, attention_mask=torch.ones_like(rows) if mask is None else mask, past_key_values=cache, **OPTIONS)
        cache.crop(rows.shape[1] - cache.get_seq_length())
        kvpack.save(cache.packed, path)
    return path


def test_a_saved_batch_has_the_ids_of_each_row(tmp_path: Path) -> None:
    model, rows = model_of("Llama"), ids(3, TOKENS)
    path = saved(model, tmp_path / "file", rows)
    inputs = kvpack.load(path).inputs
    assert inputs is not None
    assert inputs.rows == tuple(as_bytes(row) for row in rows)
    assert inputs.tokens == TOKENS
    given, mask = longer(rows)
    expected = model.generate(given, attention_mask=mask, **OPTIONS)
    with KvpackCache.load(path, model) as cache:
        assert torch.equal(model.generate(given, attention_mask=mask, past_key_values=cache, **OPTIONS), expected)
        assert cache.packed.inputs is not None
        assert cache.packed.inputs.rows == tuple(as_bytes(row[:-1]) for row in expected)


def test_rows_that_differ_from_the_file_are_refused(tmp_path: Path) -> None:
    model, rows = model_of("Llama"), ids(3, TOKENS)
    path = saved(model, tmp_path / "file", rows)
    others = {
        "swapped": rows[[1, 0, 2]],
        "one row everywhere": rows[[0, 0, 0]],
        "wholly other": ids(3, TOKENS, 5),
        "the last token of the last row": torch.cat([rows[:, :-1], rows[:, -1:] + torch.tensor([[0], [0], [1]])], 1),
    }
    for name, other in others.items():
        given, mask = longer(other)
        with KvpackCache.load(path, model) as cache:
            with pytest.raises(InvalidParameter, match=r"token \d+ of row \d has id \d+, but the cache was computed from id \d+"):
                model.generate(given, attention_mask=mask, past_key_values=cache, **OPTIONS)
            assert cache.get_seq_length() == TOKENS, name


@pytest.mark.parametrize("chosen", [[1], [2, 0], [1, 1, 0]])
def test_selected_rows_continue_only_from_their_own_prompts(chosen: list[int], tmp_path: Path) -> None:
    model, rows = model_of("Llama"), ids(3, TOKENS)
    cache = kvpack.load(saved(model, tmp_path / "file", rows)).select(chosen)
    kvpack.save(cache, tmp_path / "selected")
    given, mask = longer(rows[chosen])
    with KvpackCache.load(tmp_path / "selected", model) as own:
        expected = model.generate(given, attention_mask=mask, **OPTIONS)
        assert torch.equal(model.generate(given, attention_mask=mask, past_key_values=own, **OPTIONS), expected)
    given, mask = longer(rows[[(row + 1) % 3 for row in chosen]])
    with KvpackCache.load(tmp_path / "selected", model) as own, pytest.raises(InvalidParameter, match="was computed from id"):
        model.generate(given, attention_mask=mask, past_key_values=own, **OPTIONS)
    with KvpackCache.load(tmp_path / "selected", model, prompt=longer(rows[chosen])[0]) as own:
        assert own.get_seq_length() == TOKENS


@pytest.mark.parametrize(("row", "token"), [(0, 0), (1, 7), (2, TOKENS - 1)])
def test_a_prompt_keeps_what_all_rows_have_in_common_with_the_file(row: int, token: int, tmp_path: Path) -> None:
    model, rows = model_of("Llama"), ids(3, TOKENS)
    path = saved(model, tmp_path / "file", rows)
    prompt, mask = longer(rows)
    prompt[row, token] = 51
    with KvpackCache.load(path, model, prompt=prompt) as cache:
        assert cache.get_seq_length() == token
        found = model.generate(prompt, attention_mask=mask, past_key_values=cache, **OPTIONS)
        assert torch.equal(found, model.generate(prompt, attention_mask=mask, **OPTIONS))


def of_a_version_before(cache: kvpack.Cache) -> kvpack.Cache:
    """Return ``cache`` as earlier versions saved it, without the ids of each row and without hidden tokens."""
    assert cache.inputs is not None
    texts = tuple(text.replace(PADDED, MASKED) for text in cache.inputs.undetermined)
    return replace(cache, inputs=replace(cache.inputs, rows=(), hidden=(), undetermined=texts))


@pytest.mark.parametrize("same", [0, 4])
def test_rows_with_unknown_ids_only_continue_with_a_prompt(same: int, tmp_path: Path) -> None:
    model, rows = model_of("Llama"), ids(2, TOKENS)
    rows[:, :same] = 7
    rows[:, same] = torch.tensor([8, 9])
    old = of_a_version_before(kvpack.load(saved(model, tmp_path / "file", rows)))
    kvpack.save(old, tmp_path / "old")
    for cache in (old, old.select([1]), old.select([1, 0])):
        with pytest.raises(InvalidParameter, match=r"differ from row to row of the batch, but the file does not store the ids.*prompt="):
            KvpackCache.of(cache, model)
    with pytest.raises(InvalidParameter, match="does not store the ids of each row"):
        KvpackCache.load(tmp_path / "old", model)
    prompt, mask = longer(rows)
    expected = model.generate(prompt, attention_mask=mask, **OPTIONS)
    with KvpackCache.load(tmp_path / "old", model, prompt=prompt) as own:
        assert own.get_seq_length() == same
        assert torch.equal(model.generate(prompt, attention_mask=mask, past_key_values=own, **OPTIONS), expected)
        assert own.packed.inputs is not None
        assert len(own.packed.inputs.rows) == 2
    # The other remedy that the message names.
    with KvpackCache.of(replace(old, inputs=None), model) as own:
        assert torch.equal(model.generate(prompt, attention_mask=mask, past_key_values=own, **OPTIONS), expected)


def test_for_a_padded_batch_of_an_earlier_version_no_prompt_is_suggested(tmp_path: Path) -> None:
    model = model_of("Llama")
    rows, mask = padded(ids(2, TOKENS))
    old = of_a_version_before(kvpack.load(saved(model, tmp_path / "file", rows, mask)))
    with pytest.raises(InvalidParameter, match="does not store the ids of each row") as error:
        KvpackCache.of(old, model)
    assert "prompt=" not in str(error.value)
    given, right = longer(rows, mask)
    with KvpackCache.of(replace(old, inputs=None), model) as own:
        found = model.generate(given, attention_mask=right, past_key_values=own, **OPTIONS)
    assert torch.equal(found, model.generate(given, attention_mask=right, **OPTIONS))


# Random weights make tokens of every size.
@pytest.mark.filterwarnings("ignore:.*lose precision:kvpack.KvpackWarning")
@pytest.mark.parametrize("recipe", ["raw", "octopus-4"])
@pytest.mark.parametrize("name", ["Llama", "Gemma-2", "GPT-2"])
def test_hidden_tokens_stay_hidden(name: str, recipe: str, tmp_path: Path) -> None:
    model = model_of(name)
    rows, mask = padded(ids(2, TOKENS))
    path = saved(model, tmp_path / "file", rows, mask, recipe)
    inputs = kvpack.load(path).inputs
    assert inputs is not None
    assert inputs.hidden == ((1, 0, PADDING),)
    given, right = longer(rows, mask)
    with KvpackCache(model, recipe) as cache:
        model.generate(rows, attention_mask=mask, past_key_values=cache, **OPTIONS)
        cache.crop(TOKENS - cache.get_seq_length())
        expected = model.generate(given, attention_mask=right, past_key_values=cache, **OPTIONS)
    wrong = right.clone()
    wrong[1, PADDING - 1] = 1
    for other in (torch.ones_like(right), wrong):
        with KvpackCache.load(path, model) as cache:
            with pytest.raises(InvalidParameter, match=r"was hidden by the attention mask when it was computed") as error:
                model.generate(given, attention_mask=other, past_key_values=cache, **OPTIONS)
            assert cache.get_seq_length() == TOKENS
            with pytest.raises(InvalidParameter, match="was hidden"):
                model(given[:, TOKENS:], past_key_values=cache)
            # The mask that the message gives is the right one.
            code = re.search(r"attention_mask = (torch\.ones\(.*\)); (.*)$", str(error.value))
            assert code is not None
            names: dict[str, Any] = {"torch": torch, "new": given.shape[1] - TOKENS}
            exec(f"attention_mask = {code[1]}; {code[2]}", names)
            assert torch.equal(names["attention_mask"], right)
            assert torch.equal(model.generate(given, attention_mask=right, past_key_values=cache, **OPTIONS), expected)


def test_hidden_tokens_stay_hidden_without_the_model(tmp_path: Path) -> None:
    model = model_of("Llama")
    rows, mask = padded(ids(2, TOKENS))
    loaded = kvpack.load(saved(model, tmp_path / "file", rows, mask))
    given, right = longer(rows, mask)
    with KvpackCache.of(loaded, model) as own:
        expected = model(given[:, TOKENS:], attention_mask=right, past_key_values=own).logits
    model.set_attn_implementation("kvpack")
    cache = KvpackCache.of(loaded)
    for wrong in (None, torch.ones_like(right)):
        with pytest.raises(InvalidParameter, match="token 0 of row 1 was hidden"):
            model(given[:, TOKENS:], attention_mask=wrong, past_key_values=cache)
    assert cache.get_seq_length() == TOKENS
    assert torch.equal(model(given[:, TOKENS:], attention_mask=right, past_key_values=cache).logits, expected)


def test_an_unsaved_cache_keeps_padding_hidden_between_turns() -> None:
    model = model_of("Llama")
    rows, mask = padded(ids(2, TOKENS))
    with KvpackCache(model, "raw") as cache:
        out = model.generate(rows, attention_mask=mask, past_key_values=cache, **OPTIONS)
        given, right = longer(out, torch.nn.functional.pad(mask, (0, 5), value=1))
        with pytest.raises(InvalidParameter, match="token 0 of row 1 was hidden"):
            model.generate(given, past_key_values=cache, attention_mask=torch.ones_like(right), **OPTIONS)
        with pytest.raises(InvalidParameter, match="token 0 of row 1 was hidden"):
            model(given[:, cache.get_seq_length() :], past_key_values=cache)
        cache.batch_select_indices([0])
        model(given[:1, cache.get_seq_length() :], past_key_values=cache)
        assert cache.packed.inputs == Inputs(as_bytes(given[0]))


def test_tokens_in_between_are_also_hidden(tmp_path: Path) -> None:
    """The test has padding on the right of a prompt, and rows that ended before others."""
    model, rows = model_of("Llama"), ids(2, TOKENS)
    mask = torch.ones_like(rows)
    mask[0, -9:] = 0
    with KvpackCache(model, "raw") as cache:
        with pytest.warns(match="hides tokens other than left padding"):
            model(rows, attention_mask=mask, past_key_values=cache)
        kvpack.save(cache.packed, tmp_path / "file")
    inputs = kvpack.load(tmp_path / "file").inputs
    assert inputs is not None
    assert inputs.hidden == ((0, TOKENS - 9, TOKENS),)
    given, right = longer(rows, mask)
    with KvpackCache.load(tmp_path / "file", model) as cache:
        with pytest.raises(InvalidParameter, match=f"token {TOKENS - 9} of row 0 was hidden"):
            model(given[:, TOKENS:], attention_mask=torch.ones_like(right), past_key_values=cache)
        with pytest.warns(match="hides tokens other than left padding"):
            model(given[:, TOKENS:], attention_mask=right, past_key_values=cache)
    part = kvpack.load(tmp_path / "file")[:, : TOKENS - 9]
    assert part.inputs is not None
    assert not part.inputs.hidden


def test_a_prompt_is_compared_where_it_is_not_padded(tmp_path: Path) -> None:
    model = model_of("Llama")
    rows, mask = padded(ids(2, TOKENS))
    path = saved(model, tmp_path / "file", rows, mask)
    given, right = longer(rows, mask)
    other = given.clone()
    other[1, :PADDING] = 33
    expected = model.generate(given, attention_mask=right, **OPTIONS)
    for prompt in (given, other):
        with KvpackCache.load(path, model, prompt=prompt) as cache:
            assert cache.get_seq_length() == TOKENS
            found = model.generate(prompt, attention_mask=right, past_key_values=cache, **OPTIONS)
            assert torch.equal(found[:, -5:], expected[:, -5:])
        with KvpackCache.load(path, model, prompt=prompt) as cache, pytest.raises(InvalidParameter, match="was hidden"):
            model.generate(given, attention_mask=torch.ones_like(right), past_key_values=cache, **OPTIONS)
    other[1, PADDING] = 33
    assert KvpackCache.load(path, model, prompt=other).get_seq_length() == PADDING
    # Padded tokens whose positions count the padding, too, are not those of the prompt.
    with KvpackCache(model, "raw") as cache:
        model(rows, attention_mask=mask, past_key_values=cache)
        kvpack.save(cache.packed, path)
    with pytest.raises(InvalidParameter, match="token ids do not determine the cache"):
        KvpackCache.load(path, model, prompt=given)


def test_a_mask_is_required_if_a_file_does_not_record_it(tmp_path: Path) -> None:
    model = model_of("Llama")
    rows, mask = padded(ids(1, TOKENS).expand(2, -1))
    with KvpackCache(model, "raw") as cache:
        model.generate(rows, attention_mask=mask, past_key_values=cache, **OPTIONS)
        cache.crop(TOKENS - cache.get_seq_length())
        packed = cache.packed
    old = of_a_version_before(packed).select([1])
    assert old.inputs is not None
    old = replace(old, inputs=Inputs(as_bytes(rows[1]), (f"tokens 0 to 39 {MASKED}",)))
    kvpack.save(old, tmp_path / "old")
    given, right = longer(rows[1:], mask[1:])
    expected = model.generate(given, attention_mask=right, **OPTIONS)
    with KvpackCache.load(tmp_path / "old", model) as own:
        for wrong in (torch.ones_like(right), None):
            with pytest.raises(InvalidParameter, match=r"hides tokens, but the cache does not record which: pass attention_mask="):
                model(given[:, TOKENS:], attention_mask=wrong, past_key_values=own)
        assert torch.equal(model.generate(given, attention_mask=right, past_key_values=own, **OPTIONS), expected)
    with KvpackCache.of(replace(old, inputs=None), model) as own:
        model(given[:, TOKENS:], past_key_values=own)


def test_beams_keep_the_ids_and_the_padding_of_their_rows(tmp_path: Path) -> None:
    model = model_of("Llama")
    rows, mask = padded(ids(2, TOKENS))
    path = saved(model, tmp_path / "file", rows, mask)
    given, right = longer(rows, mask)
    expected = model.generate(given, attention_mask=right, num_beams=3, **OPTIONS)
    with KvpackCache.load(path, model) as cache:
        assert torch.equal(model.generate(given, attention_mask=right, num_beams=3, past_key_values=cache, **OPTIONS), expected)
        inputs = cache.packed.inputs
        assert inputs is not None
        assert len(inputs.rows) == 6
        assert {stretch.row for stretch in inputs.hidden} == {3, 4, 5}
        assert all(row.startswith(as_bytes(given[number // 3])) for number, row in enumerate(inputs.rows))


def test_recorded_batches_have_the_ids_of_each_row() -> None:
    model = model_of("Llama")
    rows, mask = padded(ids(2, TOKENS))
    with recording(model) as record:
        past = DynamicCache(config=model.config)
        model.generate(rows, attention_mask=mask, past_key_values=past, **OPTIONS)
    inputs = record.inputs(past)
    assert [numpy.frombuffer(row, "<u4").tolist()[:TOKENS] for row in inputs.rows] == rows.tolist()
    assert inputs.hidden == ((1, 0, PADDING),)
    cache = kvpack.pack(past, "raw", inputs=inputs)
    assert isinstance(cache.inputs, Inputs)
    with KvpackCache.of(cache, model) as own, pytest.raises(KvpackError, match="was hidden"):
        model(ids(2, 1), past_key_values=own)
