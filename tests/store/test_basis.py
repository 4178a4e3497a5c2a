"""Stores of recipes that need a basis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import kvpack
from kvpack.coding.bases import Basis
from kvpack.errors import InvalidRecipe, MissingBasis

from klt_bases import random_basis  # isort: skip

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = {(0, "k"): (2, 16), (0, "v"): (2, 16)}


@pytest.mark.parametrize("text", ["klt-2", "kv=transform:bits=4,chunk=16"])
def test_entries_are_read_with_the_basis_that_their_identity_names(text: str, tmp_path: Path) -> None:
    scopes = {(0, "k"): "layer", (0, "v"): "head"}
    basis, other = (Basis.of_bytes(random_basis(SHAPES, 1, seed=seed, scopes=scopes)) for seed in ("", "other"))
    recipe = kvpack.Recipe(text, basis)
    k, v = torch.randn(2, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    cache, ids = kvpack.pack([(k, v)], recipe), list(range(40))
    identity = kvpack.Identity("x", recipe.text)
    with kvpack.Store(tmp_path, identity, chunk=16, basis=basis) as store:
        store.save(ids, cache)
    # An entry that is parsed, and one that is read like it.
    with kvpack.Store(tmp_path, identity, chunk=16, basis=basis) as store:
        for _ in range(2):
            tokens, found = store.load(ids)
            assert tokens == 32
            assert found is not None
            for values, expected in zip(found.unpack(torch.float32)[0], cache.prefix(32).unpack(torch.float32)[0], strict=True):
                torch.testing.assert_close(values, expected)
    with pytest.raises(MissingBasis, match="needs its basis: give basis="):
        kvpack.Store(tmp_path, identity, chunk=16)
    with pytest.raises(InvalidRecipe, match=f"names the basis {basis.digest.hex()}, and {other.digest.hex()} was given"):
        kvpack.Store(tmp_path, identity, chunk=16, basis=other)
    with pytest.raises(InvalidRecipe, match="does not name its basis"):
        kvpack.Store(tmp_path, kvpack.Identity("x", text), chunk=16, basis=basis)
    elsewhere = kvpack.Identity("x", kvpack.Recipe(text, other).text)
    with kvpack.Store(tmp_path, elsewhere, chunk=16, basis=other) as store:
        assert store.load(ids) == (0, None)
