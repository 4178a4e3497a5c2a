"""The argument names under which models accept and return caches, for every supported version of transformers."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvpack import cache_names
from kvpack.file.inputs import Inputs
from kvpack.integrations.transformers import KvpackCache, recording
from support.small_models import small_llama

PROMPT, FOLLOWING = torch.arange(3, 23)[None], torch.tensor([[40, 41, 42]])

PARAMETERS = inspect.signature(small_llama().forward).parameters
TAKEN = [name for name in ("past_key_values", "cache") if name == "past_key_values" or name in PARAMETERS]
"""Names that models of the installed version accept. transformers 5.24 renames the older one with a warning."""


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


class Named(torch.nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.forward = forward


def test_the_cache_argument_is_that_of_the_models_forward() -> None:
    assert cache_names.cache_argument(Named(lambda ids, past_key_values=None, **more: None), 1) == {"past_key_values": 1}
    assert cache_names.cache_argument(Named(lambda ids, layer_past=None: None), 1) == {"layer_past": 1}
    assert cache_names.cache_argument(Named(lambda ids, cache=None: None), 1) == {"cache": 1}
    assert cache_names.cache_argument(lambda ids, past_key_values=None: None, 1) == {"past_key_values": 1}


def test_a_cache_is_found_under_every_name() -> None:
    assert [cache_names.cache_in({name: 1, "input_ids": 2}) for name in cache_names.NAMES] == [1, 1, 1]
    assert cache_names.cache_in({"cache": None, "past_key_values": 1}) == 1
    assert cache_names.cache_in({"input_ids": 2}) is None
    assert cache_names.output_cache(SimpleNamespace(past_key_values=1)) == 1
    assert cache_names.output_cache(SimpleNamespace(cache=1)) == 1
    assert cache_names.output_cache((1, 2)) is None


@pytest.mark.parametrize("name", TAKEN)
def test_passes_are_recorded_under_every_name(name: str) -> None:
    model = small_llama()
    with KvpackCache(model, "raw") as past:
        model(PROMPT, **{name: past})
        model(FOLLOWING, **{name: past})
        ids = torch.cat([PROMPT, FOLLOWING], 1).flatten()
        assert past.packed.inputs == Inputs(ids.numpy().astype("<u4").tobytes())
    dense = DynamicCache()
    with recording(model) as record:
        model(PROMPT, **{name: dense})
    assert record.inputs(dense) == Inputs(PROMPT.flatten().numpy().astype("<u4").tobytes())


@pytest.mark.parametrize("name", TAKEN)
def test_generate_accepts_a_cache_under_every_name(name: str) -> None:
    model, options = small_llama(), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(PROMPT, **options)
    with KvpackCache(model, "raw") as past:
        assert torch.equal(model.generate(PROMPT, **{name: past}, **options), expected)
        assert past.get_seq_length() == expected.shape[1] - 1
