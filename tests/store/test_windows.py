"""Models with sliding windows: whole prompts are stored, and a load reads only the chunks within the windows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import kvpack
from kvpack.errors import InvalidParameter, KvpackWarning
from support.caches import random_pairs, unpack_all
from support.store_caches import CHUNK, IDENTITY, cache, entry_of, open_store, prompt, save

if TYPE_CHECKING:
    from kvpack import Cache

IDS = prompt(8)
TOKENS = 8 * CHUNK


def sliding(*windows: int | None) -> kvpack.Identity:
    return dataclasses.replace(IDENTITY, windows=windows)


def check(found: Cache | None, whole: Cache, skipped: list[int]) -> None:
    """Check that ``found`` is a prefix of ``whole`` whose layers have dropped the number of tokens in ``skipped``."""
    assert found is not None
    assert found.start == 0
    assert [layer.skipped for layer in found] == skipped
    assert {layer.seen_tokens for layer in found} == {found.tokens}
    for layer, own in zip(found, whole, strict=True):
        for mine, theirs in zip(layer.unpack(), own.unpack(), strict=True):
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine, theirs[:, :, layer.skipped : found.tokens])


@pytest.mark.parametrize(
    ("windows", "skipped"),
    [
        # The next token is number 256, and attends to the tokens from 257 - window on.
        ((33, None), [7 * CHUNK, 0]),
        ((34, None), [6 * CHUNK, 0]),
        ((1, 65), [8 * CHUNK, 6 * CHUNK]),
        ((1024, None), [0, 0]),
        ((64,), [6 * CHUNK, 0]),
    ],
)
def test_a_layer_loads_the_chunks_within_its_window(windows: tuple[int | None, ...], skipped: list[int], tmp_path: Path) -> None:
    whole = save(open_store(tmp_path), IDS)
    with open_store(tmp_path, sliding(*windows)) as store:
        tokens, found = store.load(IDS)
        assert tokens == TOKENS
        check(found, whole, skipped)


def test_keys_do_not_depend_on_windows(tmp_path: Path) -> None:
    assert sliding(33, None) == IDENTITY
    assert open_store(tmp_path, sliding(33, None)).keys(IDS) == open_store(tmp_path).keys(IDS)


def test_chunks_outside_every_window_are_not_read(tmp_path: Path) -> None:
    """Such chunks are only looked up. If all layers have windows, the first chunks may be damaged."""
    with open_store(tmp_path, sliding(64, 33)) as store:
        whole = save(store, IDS)
        damaged = Path(entry_of(store, IDS, 2))
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
        tokens, found = store.load(IDS)
        assert tokens == TOKENS
        check(found, whole, [6 * CHUNK, 7 * CHUNK])
        assert store.counters()["faults"] == {}
        Path(entry_of(store, IDS, 1)).unlink()
        tokens, found = store.load(IDS)
        assert tokens == CHUNK
        check(found, whole, [0, 0])


@pytest.mark.parametrize(("number", "tokens", "skipped"), [(7, 7, [5, 6]), (6, 6, [4, 5])])
def test_a_damaged_chunk_shortens_the_prefix_within_windows(number: int, tokens: int, skipped: list[int], tmp_path: Path) -> None:
    """The windows then extend back to earlier chunks, which were not read before."""
    with open_store(tmp_path, sliding(64, 33)) as store:
        whole = save(store, IDS)
        path = Path(entry_of(store, IDS, number))
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        found, loaded = store.load(IDS)
        assert found == tokens * CHUNK
        check(loaded, whole, [CHUNK * skip for skip in skipped])
        assert store.counters()["faults"] == {"load DigestMismatch": 1}
        assert store.match(IDS) == number * CHUNK


def dropped(tokens: int, skipped: int) -> Cache:
    """Return a cache of ``tokens`` tokens whose second layer has dropped the first ``skipped`` ones."""
    (full,), (k, v) = random_pairs(1, tokens, dims=(32, 32)), random_pairs(1, tokens, dims=(32, 32), seed=1)[0]
    return kvpack.pack([full, (k[:, :, skipped:], v[:, :, skipped:], skipped)], "kivi-2")


def test_chunks_that_follow_stored_ones_are_saved_without_them(tmp_path: Path) -> None:
    with open_store(tmp_path, sliding(None, 33)) as store:
        first = dropped(4 * CHUNK, 0)
        assert store.save(IDS[: 4 * CHUNK], first) == 4 * CHUNK
        later = dropped(TOKENS, 3 * CHUNK)
        assert store.save(IDS[:TOKENS], later) == TOKENS
        tokens, found = store.load(IDS)
        assert tokens == TOKENS
        assert found is not None
        assert found[1].skipped == 7 * CHUNK
        assert torch.equal(unpack_all(found)[2], unpack_all(later)[2][:, :, -CHUNK:])


def test_dropped_tokens_that_are_not_stored_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for skipped in (CHUNK, 1):
            with pytest.raises(InvalidParameter, match=rf"layers\[1\] holds {TOKENS - skipped} of 256 tokens, .*keep_all=True"):
                store.save(IDS[:TOKENS], dropped(TOKENS, skipped))
        one = dropped(CHUNK, 3)
        with pytest.raises(InvalidParameter, match=r"layers\[1\] holds 29 of 32 tokens, positions 3 to 31, but the store has the first 0"):
            store.save(IDS[:CHUNK], one)
        assert store.stats()["entries"] == 0
        save(store, IDS[: 2 * CHUNK + 5])
        with pytest.warns(KvpackWarning, match=r"layers\[1\] holds 160 of 256 tokens, positions 96 to 255, but the store has the first 64"):
            assert store.save(IDS[:TOKENS], dropped(TOKENS, 3 * CHUNK)) == 2 * CHUNK
        assert store.match(IDS) == 2 * CHUNK


def test_windows_work_with_tiers_and_encryption(tmp_path: Path) -> None:
    tiers = [kvpack.Tier("memory://", max_bytes=10**8), tmp_path / "slow"]
    keys = {"k": bytes(32)}
    whole = cache(len(IDS))
    with open_store(tmp_path / "slow", sliding(33, 64), encryption=keys) as store:
        assert store.save(IDS, whole) == TOKENS
    with kvpack.Store(tiers, sliding(33, 64), chunk=CHUNK, encryption=keys) as store:
        for _ in range(2):
            tokens, found = store.load(IDS)
            assert tokens == TOKENS
            check(found, whole, [7 * CHUNK, 6 * CHUNK])
        # Only what was read is copied to memory, and what is missing there is found in the folder.
        assert [tier["entries"] for tier in store.stats()["tiers"]] == [2, 8]
