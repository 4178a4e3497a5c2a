"""transformers models over caches whose codec needs a basis: tokens are packed as they arrive, saved, and continued."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache

import kvpack
from kvpack.errors import InvalidParameter, MissingBasis
from kvpack.integrations.transformers import KvpackCache
from support.klt_bases import random_basis
from support.small_models import small_llama

if TYPE_CHECKING:
    from pathlib import Path

RECIPE = "klt-4;tail=32"


@pytest.fixture(scope="module")
def model() -> Any:
    return small_llama()


@pytest.fixture
def basis(tmp_path: Path) -> Path:
    path = tmp_path / "x.kvbasis"
    path.write_bytes(random_basis({(layer, side): (1, 16) for layer in range(2) for side in "kv"}, 2))
    return path


def token_ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 50, (1, count), generator=torch.Generator().manual_seed(seed))


def next_logits(model: Any, cache: Any, seed: int) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(token_ids(3, seed), past_key_values=cache).logits
    return logits


def dense(packed: kvpack.Cache) -> DynamicCache:
    return DynamicCache([layer.unpack(torch.float32) for layer in packed])


def test_tokens_equal_those_over_the_unpacked_cache(model: Any, basis: Path, tmp_path: Path) -> None:
    with KvpackCache(model, kvpack.Recipe(RECIPE, basis)) as cache:
        next_logits(model, cache, 1)
        with torch.no_grad():
            model(token_ids(200), past_key_values=cache)
        assert cache.packed[0].k.packed_tokens > 100  # type: ignore[union-attr]
        path = tmp_path / "x.kvpack"
        kvpack.save(cache.packed, path)
        expected = next_logits(model, dense(cache.packed), 2)
        torch.testing.assert_close(next_logits(model, cache, 2), expected)
    with KvpackCache.load(path, model, basis=basis.parent) as cache:
        torch.testing.assert_close(next_logits(model, cache, 2), expected)
        with torch.no_grad():
            model(token_ids(150), past_key_values=cache)
        expected = next_logits(model, dense(cache.packed), 3)
        torch.testing.assert_close(next_logits(model, cache, 3), expected)


def test_copies_of_an_empty_cache_have_the_basis(model: Any, basis: Path) -> None:
    copied = copy.deepcopy(KvpackCache(model, kvpack.Recipe(RECIPE, basis)))
    model(token_ids(150), past_key_values=copied)
    assert copied.packed.tokens == 150


def test_a_basis_that_is_missing_or_of_another_model_is_refused(model: Any, basis: Path, tmp_path: Path) -> None:
    with KvpackCache(model, RECIPE) as cache, pytest.raises(MissingBasis, match="needs a basis: pass --basis FILE"):
        next_logits(model, cache, 1)
    with KvpackCache(model, kvpack.Recipe(RECIPE, basis)) as cache:
        next_logits(model, cache, 1)
        kvpack.save(cache.packed, tmp_path / "x.kvpack")
    with pytest.raises(MissingBasis, match="is needed: pass its file"):
        KvpackCache.load(tmp_path / "x.kvpack", model)
    with pytest.raises(InvalidParameter, match="is a basis for a model whose name is 'x'"):
        kvpack.LiveCache(kvpack.Recipe(RECIPE, basis), layers=2, model={"name": "y"})
    three = kvpack.LiveCache(kvpack.Recipe(RECIPE, basis), layers=3)
    with pytest.raises(InvalidParameter, match="is a basis for a model with 2 layers, but the cache has 3"):
        three.update(0, torch.randn(1, 1, 4, 16), torch.randn(1, 1, 4, 16))
