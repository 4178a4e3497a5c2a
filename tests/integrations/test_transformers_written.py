"""Prompts in files of earlier kvpack versions: transformers models continue them with the recorded tokens, or refuse them."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch

import kvpack
from kvpack import cache_names
from kvpack.errors import KvpackError, KvpackWarning
from kvpack.integrations.transformers import KvpackCache
from support.written_files import BATCH, MANIFEST, PROMPT, batch_ids, continue_greedily, demo_model, prompt_ids


@pytest.fixture(scope="module")
def model() -> Any:
    return demo_model()


def test_a_prompt_continues_with_the_recorded_tokens(model: Any) -> None:
    recorded = json.loads(MANIFEST.read_text())["prompt"]
    with warnings.catch_warnings():
        # Old files name a sample of the weights, which may be worth a warning.
        warnings.simplefilter("ignore", KvpackWarning)
        cache = KvpackCache.load(PROMPT, model)
    with cache:
        assert continue_greedily(model, cache, prompt_ids()[-1:]) == recorded


def test_generate_continues_a_prompt(model: Any) -> None:
    (recorded,) = json.loads(MANIFEST.read_text())["prompt"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KvpackWarning)
        cache = KvpackCache.load(PROMPT, model)
    ids = torch.tensor([prompt_ids()])
    with cache:
        found = model.generate(
            ids, **cache_names.cache_argument(model, cache), max_new_tokens=len(recorded), do_sample=False, eos_token_id=None
        )
    assert found[0, ids.shape[1] :].tolist() == recorded


def test_a_prompt_of_other_weights_is_refused() -> None:
    other = demo_model()
    with torch.no_grad():
        other.model.embed_tokens.weight.mul_(2)
    with pytest.raises(KvpackError, match="weights"):
        KvpackCache.load(PROMPT, other)


def test_a_padded_batch_continues_with_the_recorded_tokens_or_is_refused(model: Any) -> None:
    recorded = json.loads(MANIFEST.read_text())["batch"]
    rows, mask = batch_ids()
    packed = kvpack.load(BATCH)
    assert (packed.tokens, packed[0].sides["k"].batch) == (16, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KvpackWarning)
        try:
            cache = KvpackCache.of(packed)
        except KvpackError:
            return
    assert continue_greedily(model, cache, rows[:, -1].tolist(), mask[:, :-1]) == recorded
