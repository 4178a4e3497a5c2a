"""A model continues from a file as if the file had never been written, turn after turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack.integrations.transformers import KvpackCache
from support.zoo_models import model_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvpack.cache.cache import Cache


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def ids(batch: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 60, (batch, count), generator=torch.Generator().manual_seed(seed))


def same(one: Cache, other: Cache) -> bool:
    """Return True if two caches have the same codes and the same raw tokens."""
    for mine, theirs in zip(one, other, strict=True):
        for side, its in zip(mine.sides.values(), theirs.sides.values(), strict=True):
            if side.merged_runs() != its.merged_runs() or not torch.equal(side.tail, its.tail):
                return False
            if not torch.equal(side.unpack(torch.float32), its.unpack(torch.float32)):
                return False
    return True


RECIPES = ["kivi-2", "oscar-2", "kivi-4;tail=32", "octopus-3", "k=group:b=2,g=32,axis=token;v=raw"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loaded_cache_equals_the_one_in_the_file(recipe: str, tmp_path: Path) -> None:
    model, path = model_of("Llama"), tmp_path / "file"
    with KvpackCache(model, recipe) as cache:
        model(ids(1, 185), past_key_values=cache)
        kvpack.save(cache.packed, path)
    loaded = kvpack.load(path)
    with KvpackCache.load(path, model) as cache:
        assert same(cache.packed, loaded)
        assert cache.packed.nbytes == loaded.nbytes
        cache.crop(0)
        assert same(cache.packed, loaded)
    kvpack.save(cache.packed, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


@pytest.mark.scenario
@pytest.mark.parametrize("recipe", RECIPES)
def test_twelve_turns_with_a_file_take_the_bytes_of_one(recipe: str, tmp_path: Path) -> None:
    model, path, prompt = model_of("Llama"), tmp_path / "file", ids(1, 245)
    with KvpackCache(model, recipe) as cache:
        model(prompt[:, :185], past_key_values=cache)
        kvpack.save(cache.packed, path)
    for end in range(190, 250, 5):
        with KvpackCache.load(path, model) as cache:
            model(prompt[:, end - 5 : end], past_key_values=cache)
            kvpack.save(cache.packed, path)
    with KvpackCache(model, recipe) as cache:
        model(prompt, past_key_values=cache)
        once = cache.packed
    turns = kvpack.load(path)
    assert turns.tokens == once.tokens
    assert turns.nbytes <= 1.02 * once.nbytes
    assert turns.inputs == once.inputs
