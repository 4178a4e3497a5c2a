"""Small caches for a recipe that needs a basis, with their identity, and counts of the entries that a store has for them."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import kvpack
from kvpack.coding.bases import Basis
from kvpack.errors import KvpackError
from kvpack.file import container
from support.caches import random_pairs
from support.klt_bases import random_basis
from support.store_caches import CHUNK, entries

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = {(layer, side): (2, 16) for layer in range(2) for side in "kv"}


def load_basis(seed: str = "") -> Basis:
    """Return the basis for the caches that ``cache`` creates."""
    return Basis.from_bytes(random_basis(SHAPES, 2, seed=seed))


BASIS = load_basis()
RECIPE = kvpack.Recipe("klt-2", BASIS)
IDENTITY = kvpack.Identity("x", RECIPE, tenant="tenant")
WITHOUT_BASIS = kvpack.Identity("x", RECIPE.text, tenant="tenant")


@lru_cache(16)
def cache_with_basis(tokens: int, seed: int = 0) -> kvpack.Cache:
    return kvpack.pack(random_pairs(2, tokens, heads=2, dims=(16, 16), seed=seed), RECIPE)


def with_basis(location: Any, **options: Any) -> kvpack.Store:
    return kvpack.Store(location, IDENTITY, **{"chunk": CHUNK, **options})


def without_basis(location: Any, **options: Any) -> kvpack.Store:
    return kvpack.Store(location, WITHOUT_BASIS, **{"chunk": CHUNK, **options})


def save(store: kvpack.Store, ids: list[int], seed: int = 0) -> kvpack.Cache:
    """Save a cache of all ``ids`` and return it."""
    whole = cache_with_basis(len(ids), seed)
    assert store.save(ids, whole) == len(ids) // CHUNK * CHUNK
    return whole


def count_bases(folder: Path | str) -> tuple[int, int]:
    """Return the number of complete bases, and of entries that need one, in an unencrypted folder."""
    bases = dependents = 0
    for path in entries(folder):
        try:
            with container.open_file(path) as file:
                bases += file.header.is_basis and Basis.load(path).digest.hex() == os.path.basename(path)
                dependents += BASIS.digest.hex() in file.header.recipe
        except KvpackError:
            continue
    return bases, dependents
