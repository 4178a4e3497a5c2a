"""Stores of earlier kvpack versions: entries are found with the recorded values, or counted as misses of another identity."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

import kvpack
from kvpack.file.row import check_row
from support.second_decoder import decoder
from support.store_caches import entries
from support.written_files import (
    CHUNK,
    FOLDER,
    GEOMETRY,
    MANIFEST,
    PAGE_KEYS,
    PAGES,
    PROMPT,
    STORE,
    buffer,
    page_identities,
    pairs,
    random_pool,
    sample_values,
    store_identities,
    store_ids,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kvpack.store.page_store import PageStore

TOLERANCE = 2**-18


def copied(folder: Path, to: Path) -> Path:
    """Return a copy of a folder that only this user may change, whatever the modes in the checkout."""
    shutil.copytree(folder, to, copy_function=shutil.copyfile)
    for path in [to, *to.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return to


def assert_near(found: torch.Tensor, values: torch.Tensor) -> None:
    torch.testing.assert_close(found, values, rtol=0.0, atol=TOLERANCE * values.abs().max().item())


def assert_no_fault(store: kvpack.Store | PageStore) -> None:
    counters = store.counters()
    assert not counters["faults"]
    assert not counters["damaged_entries"]


@pytest.mark.parametrize("name", ["plain", "model"])
def test_a_prefix_is_found_or_a_counted_miss(name: str, tmp_path: Path) -> None:
    ids = store_ids(name)
    with kvpack.Store(copied(STORE, tmp_path / "store"), store_identities()[name], chunk=CHUNK) as store:
        tokens, cache = store.load(ids)
        assert_no_fault(store)
        counters = store.counters()
        assert counters["load_tokens"] == len(ids)
        assert counters["hit_tokens"] == tokens
        if cache is None:
            assert tokens == 0
            # What is computed again can be stored beside the old entries.
            source = kvpack.load(PROMPT) if name == "model" else None
            dense = [layer.unpack() for layer in source] if source else pairs("store", 1, 2, 2 * CHUNK, 64)
            expected = kvpack.pack(dense, store.identity.recipe)
            assert store.save(ids, expected) == len(ids)
            tokens, cache = store.load(ids)
            assert cache is not None
            assert_near(sample_values(cache), sample_values(expected))
        else:
            assert_near(sample_values(cache), load_file(FOLDER / f"store-{name}.safetensors")["values"])
        assert tokens == len(ids)


@pytest.mark.parametrize("name", ["plain", "model"])
def test_entries_can_be_opened_as_files(name: str) -> None:
    keys = json.loads(MANIFEST.read_text())["store"][name]["keys"]
    chunks = [kvpack.load(next(path for path in entries(STORE) if path.endswith(key))) for key in keys]
    assert_near(sample_values(kvpack.concat(chunks)), load_file(FOLDER / f"store-{name}.safetensors")["values"])


@pytest.mark.parametrize("name", ["plain", "engine"])
def test_pages_are_found_or_counted_misses(name: str, tmp_path: Path) -> None:
    recorded = load_file(FOLDER / "pages.safetensors")["values"]
    decoded = torch.zeros_like(random_pool())
    with kvpack.PageStore(copied(PAGES, tmp_path / "pages"), page_identities()[name], GEOMETRY) as store:
        loaded = store.get_into(PAGE_KEYS, buffer(decoded), [0, 1])
        assert_no_fault(store)
        assert len(set(loaded)) == 1
        assert store.counters()["hit_tokens"] == sum(loaded) * GEOMETRY.tokens
        if not any(loaded):
            assert not decoded.any()
            assert all(store.put(PAGE_KEYS, buffer(random_pool()), [0, 1]))
            assert all(store.get_into(PAGE_KEYS, buffer(decoded), [0, 1]))
        assert torch.equal(decoded, recorded)


@pytest.mark.parametrize("name", ["plain", "engine"])
def test_page_rows_contain_their_values(name: str) -> None:
    recorded = load_file(FOLDER / "pages.safetensors")["values"]
    for number, key in enumerate(json.loads(MANIFEST.read_text())["pages"][name]["keys"]):
        with open(next(path for path in entries(PAGES) if path.endswith(key)), "rb") as file:
            row = file.read()
        check_row(memoryview(row), key)
        values = [float(value) for layer in decoder.read_row(row).page.layers for side in layer.values() for value in side.values]
        assert torch.equal(torch.tensor(values).to(torch.bfloat16), recorded[number].flatten())


def test_an_old_store_supports_gc_and_eviction(tmp_path: Path) -> None:
    """Entries that no identity finds anymore are still counted, listed and evicted."""
    folder = copied(STORE, tmp_path / "store")
    identity = kvpack.Identity("other", "raw")
    with kvpack.Store(folder, identity, chunk=CHUNK, max_bytes=1) as store:
        assert store.stats()["entries"] == 4
        store.collect()
        assert store.stats()["entries"] == 0
        assert_no_fault(store)
