"""``model=`` is a transformers model, an identity, a name, or a mapping of fields, in every function that records it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpack
from kvpack.errors import InvalidParameter, InvalidType
from support.caches import random_pairs

PAIRS = random_pairs(1, 4, heads=1, dims=(8, 8))


def recorded(model: Any) -> list[dict[str, str]]:
    """Return the fields that ``model`` leaves in a packed cache and in a frozen one."""
    live = kvpack.LiveCache("raw", layers=1, model=model)
    live.update(0, *PAIRS[0])
    return [dict(kvpack.pack(PAIRS, "raw", model=model).model), dict(live.freeze().model)]


def test_a_name_and_a_map_are_recorded_unchanged() -> None:
    assert recorded(None) == [{}, {}]
    assert recorded("llama") == recorded({"name": "llama"}) == [{"name": "llama"}] * 2


def test_an_identity_is_recorded_without_recipe_and_tenant() -> None:
    identity = kvpack.Identity("llama", "raw", weights="w1", tenant="tenant")
    assert recorded(identity) == [{"name": "llama", "weights": "w1"}] * 2


def test_a_model_gets_the_same_name_as_in_its_caches() -> None:
    pytest.importorskip("transformers")
    from kvpack.integrations.transformers import KvpackCache
    from kvpack.models import load_model

    model = load_model()
    with KvpackCache(model, "raw") as cache:
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        expected = dict(cache.packed.model)
    assert expected["weights"]
    assert recorded(model) == [expected] * 2
    assert dict(kvpack.pack(PAIRS, "raw", model=kvpack.Identity.of(model, "octopus-3")).model) == expected


@pytest.mark.parametrize("model", [3, ["llama"], torch.zeros(1)])
def test_other_types_are_refused(model: Any) -> None:
    with pytest.raises(InvalidType, match=r"model is a .*, expected a transformers model, a kvpack\.Identity, a name"):
        kvpack.pack(PAIRS, "raw", model=model)
    with pytest.raises(InvalidType, match="model is a"):
        kvpack.LiveCache("raw", layers=1, model=model)


def test_fields_that_do_not_fit_in_a_header_are_refused() -> None:
    for model in ("x" * 70_000, {"name": 3}):
        with pytest.raises(InvalidParameter):
            recorded(model)
