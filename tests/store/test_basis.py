"""Stores of recipes that need a basis store it, return it, keep it as long as an entry needs it, and then remove it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack.coding.bases import Basis
from kvpack.errors import InvalidParameter
from kvpack.file import container
from kvpack.store.bases import StoredBasis
from kvpack.store.encryption import Cipher
from kvpack.store.keys import basis_keys
from support import redis_server, s3_server, warm_python
from support.basis_caches import BASIS, IDENTITY, RECIPE, cache_with_basis, count_bases, load_basis, save, with_basis, without_basis
from support.caches import random_pairs
from support.klt_bases import random_basis
from support.store_caches import CHUNK, KEYS, OTHER_KEYS, entries, is_same_prefix, open_store, prompt
from support.store_caches import cache as other_cache
from support.store_caches import save as save_other

if TYPE_CHECKING:
    from collections.abc import Iterator

IDS = prompt(3)
KINDS = ("folder", "encrypted", "tiers", "write-back", "Redis", "S3", "encrypted Redis")
"""Locations that other processes, and therefore other stores, can see."""


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Return a location and the options for it."""
    kind = request.param
    options: dict[str, Any] = {"encryption": KEYS} if "encrypted" in kind else {}
    if "encrypted" in kind:
        pytest.importorskip("cryptography")
    if "Redis" in kind:
        pytest.importorskip("redis")
        with redis_server.run_server(tmp_path) as server:
            yield server.url, {"timeout": 5, **options}
    elif kind == "S3":
        pytest.importorskip("obstore")
        with s3_server.run_server() as server:
            yield server.url, {"storage_options": server.options, **options}
    elif kind in ("tiers", "write-back"):
        tiers = [kvpack.Tier("memory://", max_bytes=10**7), kvpack.Tier(tmp_path / "slow")]
        yield tiers, {"write_back": kind == "write-back" or None}
    else:
        yield tmp_path / "store", options


def test_a_reader_without_the_basis_gets_it_from_the_store(place: tuple[Any, dict[str, Any]]) -> None:
    location, options = place
    with without_basis(location, **options) as store:
        assert store.load(IDS) == (0, None)
        assert store.basis() is None
        assert store.counters()["faults"] == {}
    with with_basis(location, **options) as store:
        whole = save(store, IDS)
        count = store.stats()["entries"]
        assert count == 3 + 1
        # Stored once, for other prompts and other recipes of the same basis too.
        save(store, prompt(2, seed=5))
        assert store.stats()["entries"] == count + 2
    with without_basis(location, **options) as store:
        assert store.match(IDS) == 3 * CHUNK
        for _ in range(2):
            tokens, found = store.load(IDS)
            assert tokens == 3 * CHUNK
            assert is_same_prefix(found, whole)
        basis = store.basis()
        assert basis is not None
        assert basis.digest == BASIS.digest
        # What was loaded without the basis can be packed on and saved.
        longer = prompt(2, seed=7)
        assert store.save(longer, cache_with_basis(len(longer))) == 2 * CHUNK
        assert store.counters()["faults"] == {}


@pytest.mark.parametrize("text", ["klt-2", "kv=transform:bits=4,chunk=16"])
def test_both_page_codecs_read_with_the_basis_of_the_store(text: str, tmp_path: Path) -> None:
    shapes, scopes = {(0, "k"): (2, 16), (0, "v"): (2, 16)}, {(0, "k"): "layer", (0, "v"): "head"}
    basis, other = (Basis.from_bytes(random_basis(shapes, 1, seed=seed, scopes=scopes)) for seed in ("", "other"))
    recipe = kvpack.Recipe(text, basis)
    k, v = torch.randn(2, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    whole, ids = kvpack.pack([(k, v)], recipe), list(range(40))
    identities = kvpack.Identity("x", recipe), kvpack.Identity("x", recipe.text)
    assert identities[0] == identities[1], "equal recipes with a basis gave different identities"
    with kvpack.Store(tmp_path, identities[0], chunk=16) as store:
        store.save(ids, whole)
    for identity in identities:
        # An entry that is parsed, and one that is read like it.
        with kvpack.Store(tmp_path, identity, chunk=16) as store:
            for _ in range(2):
                tokens, found = store.load(ids)
                assert tokens == 32
                assert found is not None
                for values, expected in zip(found.unpack(torch.float32)[0], whole[:, :32].unpack(torch.float32)[0], strict=True):
                    torch.testing.assert_close(values, expected)
    with pytest.raises(InvalidParameter, match=f"names the basis {basis.digest.hex()}, but {other.digest.hex()} was passed"):
        kvpack.Recipe(recipe.text, other)
    with pytest.raises(InvalidParameter, match="does not name its basis"):
        kvpack.Store(tmp_path, kvpack.Identity("x", text), chunk=16)
    elsewhere = kvpack.Identity("x", kvpack.Recipe(text, other))
    with kvpack.Store(tmp_path, elsewhere, chunk=16) as store:
        assert store.load(ids) == (0, None)
    both = f"k=klt:bits=2,basis={basis.digest.hex()};v=klt:bits=2,basis={other.digest.hex()}"
    with pytest.raises(InvalidParameter, match=r"names 2 bases: use the same one"):
        kvpack.Store(tmp_path, kvpack.Identity("x", both), chunk=16)


def test_another_process_reads_without_the_basis(tmp_path: Path) -> None:
    with with_basis(tmp_path) as store:
        save(store, IDS)
    code = (
        "import sys, kvpack\n"
        f"store = kvpack.Store({str(tmp_path)!r}, kvpack.Identity('x', {RECIPE.text!r}, tenant='tenant'), chunk={CHUNK})\n"
        f"tokens, found = store.load({IDS!r})\n"
        "print(tokens, float(found.unpack()[0][0].float().sum()))\n"
    )
    done = subprocess.run([warm_python.python(), "-c", code], capture_output=True, text=True, check=True)
    tokens, total = done.stdout.split()
    assert int(tokens) == 3 * CHUNK
    assert float(total) == pytest.approx(float(cache_with_basis(len(IDS))[:, : 3 * CHUNK].unpack()[0][0].float().sum()))


def test_a_basis_of_another_model_is_refused(tmp_path: Path) -> None:
    identity = kvpack.Identity("another", RECIPE)
    with pytest.raises(InvalidParameter, match="is a basis for a model whose name is 'x', but the name of the cache's model is 'another'"):
        kvpack.Store(tmp_path, identity, chunk=CHUNK)
    with with_basis(tmp_path) as store:
        save(store, IDS)
    with kvpack.Store(tmp_path, kvpack.Identity("another", RECIPE.text), chunk=CHUNK) as store:
        assert store.basis() is None
        assert store.counters()["unreadable_entries"] == 1
        assert store.counters()["faults"] == {"load InvalidParameter": 1}
    assert count_bases(tmp_path) == (1, 3), "a valid basis that other entries need was removed"


def test_entries_with_a_missing_basis_are_misses(tmp_path: Path) -> None:
    with with_basis(tmp_path) as store:
        save(store, IDS)
    os.unlink(_path(tmp_path))
    with without_basis(tmp_path) as store:
        assert store.match(IDS) == 0
        assert store.load(IDS) == (0, None)
        assert store.save(IDS, cache_with_basis(len(IDS))) == 0
        assert store.counters()["faults"] == {"load MissingBasis": 1, "save MissingBasis": 1}
    with with_basis(tmp_path) as store:
        assert store.load(IDS)[0] == 3 * CHUNK
        save(store, IDS)
    with without_basis(tmp_path) as store:
        assert store.load(IDS)[0] == 3 * CHUNK


@pytest.mark.parametrize("harm", ["a flipped bit", "cut", "empty", "junk", "another basis", "an entry", "a folder"])
@pytest.mark.parametrize("found_by", ["a getter", "the next put"])
def test_a_damaged_basis_is_a_miss_and_is_rewritten(harm: str, found_by: str, tmp_path: Path) -> None:
    with with_basis(tmp_path) as store:
        whole = save(store, IDS)
    path = _path(tmp_path)
    good = path.read_bytes()
    path.unlink()
    if harm == "a folder":
        path.mkdir()
    else:
        other = next(Path(one).read_bytes() for one in entries(tmp_path) if one != str(path))
        flipped = bytearray(good)
        flipped[-1000] ^= 1
        bad = {"a flipped bit": bytes(flipped), "cut": good[:-64], "empty": b"", "junk": b"junk" * 99, "an entry": other}
        path.write_bytes(bad.get(harm, bytes(load_basis("other").data)))
    if found_by == "a getter":
        with without_basis(tmp_path) as store:
            assert store.load(IDS) == (0, None)
            assert sum(store.counters()["faults"].values()) >= 1
    with with_basis(tmp_path) as store:
        save(store, prompt(2, seed=3))
    assert path.read_bytes() == good
    with without_basis(tmp_path) as store:
        assert is_same_prefix(store.load(IDS)[1], whole)


def test_a_basis_damaged_in_one_tier_is_read_from_the_next(tmp_path: Path) -> None:
    tiers = [tmp_path / "fast", tmp_path / "slow"]
    with with_basis(tiers) as store:
        whole = save(store, IDS)
    path = _path(tiers[0])
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with without_basis(tiers) as store:
        assert is_same_prefix(store.load(IDS)[1], whole)
        assert store.counters()["damaged_entries"] == 1
    # The good one was copied to where the bad one was.
    assert count_bases(tiers[0]) == count_bases(tiers[1]) == (1, 3)
    path.unlink()
    with with_basis(tiers) as store:
        save(store, IDS)
    assert count_bases(tiers[0]) == (1, 3), "a put did not add missing entries to every tier"


@pytest.mark.scenario
@pytest.mark.parametrize("kind", ["folder", "memory", "Redis", "S3"])
def test_entries_are_evicted_before_their_basis(kind: str, tmp_path: Path) -> None:
    """Other prompts fill the store one entry at a time, and the basis stays as long as an entry that needs it remains."""
    if kind == "Redis":
        pytest.importorskip("redis")
        with redis_server.run_server(tmp_path) as server:
            _evict_all(server.url, {"timeout": 5})
    elif kind == "S3":
        pytest.importorskip("obstore")
        with s3_server.run_server() as server:
            _evict_all(server.url, {"storage_options": server.options})
    else:
        _evict_all(tmp_path / "store" if kind == "folder" else "memory://", {})


def _evict_all(location: Any, options: dict[str, Any]) -> None:
    size = cache_with_basis(len(IDS))[:, :CHUNK].nbytes
    options = {"max_bytes": len(BASIS.data) + 12 * size, **options}
    with with_basis(location, **options) as store:
        first, second = prompt(3, seed=1), prompt(3, seed=2)
        for ids in (first, second, first):
            save(store, ids)
        backend = store._backend
        # The same backend, for memory is a process' own.
        other = open_store("memory://", max_bytes=10**6)
        other._backend, other._loader._backend = backend, backend
        left = []
        for seed in range(60):
            chunks = store.match(first) + store.match(second)
            basis = backend.count_present([BASIS.digest])
            assert basis or not chunks, "an entry is left without its basis"
            left.append((basis, chunks // CHUNK))
            if left[-1] == (0, 0):
                break
            ids = prompt(1, seed=100 + seed)
            other.save(ids, other_cache(len(ids)))
    assert left[0] == (1, 6)
    assert left[-1] == (0, 0), "an unused basis was not evicted"
    assert (1, 1) in left or (1, 2) in left


def test_the_basis_counts_toward_the_budget_and_is_stored_first(tmp_path: Path) -> None:
    with with_basis(tmp_path, max_bytes=len(BASIS.data) - 1) as store:
        assert store.save(IDS, cache_with_basis(len(IDS))) == 0
        assert store.counters()["refused_chunks"] == 1
    with with_basis(tmp_path, max_entry_bytes=len(BASIS.data) - 1) as store:
        assert store.save(IDS, cache_with_basis(len(IDS))) == 0
        assert store.counters()["faults"] == {"encode LimitExceeded": 1}
    with with_basis(tmp_path) as store:
        assert store.save(IDS[: CHUNK - 1], cache_with_basis(CHUNK - 1)) == 0, "an incomplete chunk was stored"
    assert entries(tmp_path) == []
    size = cache_with_basis(len(IDS))[:, :CHUNK].nbytes
    with with_basis(tmp_path, max_bytes=len(BASIS.data) + 2 * size + 2000) as store:
        assert CHUNK <= store.save(IDS, cache_with_basis(len(IDS))) <= 2 * CHUNK
        assert store.stats()["bytes"] <= len(BASIS.data) + 2 * size + 2000
    assert count_bases(tmp_path)[0] == 1


def test_a_pin_also_keeps_the_basis(tmp_path: Path) -> None:
    with with_basis(tmp_path) as store:
        whole = save(store, IDS)
        assert store.pin(IDS) == 3 * CHUNK
    with open_store(tmp_path, max_bytes=0) as other:
        other.collect()
    with without_basis(tmp_path) as store:
        assert is_same_prefix(store.load(IDS)[1], whole)
        assert store.unpin(IDS)
    with open_store(tmp_path, max_bytes=0) as other:
        other.collect()
    assert entries(tmp_path) == []


def test_gc_removes_an_unused_basis(tmp_path: Path) -> None:
    with with_basis(tmp_path) as store:
        save(store, IDS)
        other = load_basis("other")
        stale = kvpack.Identity("x", kvpack.Recipe("klt-2", other))
        with kvpack.Store(tmp_path, stale, chunk=CHUNK) as another:
            assert another.save(IDS, _packed(other)) == 3 * CHUNK
            assert another.delete(IDS) == 3
        hour = 3600 * 10**9
        for age, left in ((0, 2), (hour - 60 * 10**9, 2), (hour + 60 * 10**9, 1)):
            for digest in (other.digest, BASIS.digest):
                when = time.time_ns() - age
                os.utime(_path(tmp_path, digest), ns=(when, when))
            store.collect()
            assert count_bases(tmp_path) == (left, 3)
        assert not _path(tmp_path, other.digest).exists()
        assert store.counters()["reclaimed_entries"] == 1
        store.delete(IDS)
        store.collect()
    assert entries(tmp_path) == []


def test_gc_keeps_a_basis_while_an_entry_is_unreadable(tmp_path: Path) -> None:
    with with_basis(tmp_path) as store:
        save(store, IDS)
        keys = store.keys(IDS)
        store.delete(IDS, start=CHUNK)
        path = tmp_path / keys[0].hex()[0] / keys[0].hex()[1] / keys[0].hex()
        data = path.read_bytes()
        old = time.time_ns() - 2 * 3600 * 10**9
        os.utime(_path(tmp_path), ns=(old, old))
        # Of a later version of the format.
        assert data.count(b'"kvpack":"1 ') == 1
        path.write_bytes(data.replace(b'"kvpack":"1 ', b'"kvpack":"9 '))
        store.collect()
        assert _path(tmp_path).exists()
        path.write_bytes(b"junk")
        store.collect()
        assert not _path(tmp_path).exists()


def _packed(basis: Basis) -> kvpack.Cache:
    return kvpack.pack(random_pairs(2, len(IDS), heads=2, dims=(16, 16)), kvpack.Recipe("klt-2", basis))


def test_each_encryption_key_has_its_own_basis_entry(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    with with_basis(tmp_path, encryption=KEYS) as store:
        whole = save(store, IDS)
    # Of other keys alone, the store works as if it were empty.
    with with_basis(tmp_path, encryption=OTHER_KEYS) as store:
        assert store.load(IDS) == (0, None)
        save(store, prompt(2, seed=3))
    for keys in (KEYS, {**OTHER_KEYS, **KEYS}, {**KEYS, **OTHER_KEYS}):
        with without_basis(tmp_path, encryption=keys) as store:
            assert is_same_prefix(store.load(IDS)[1], whole)
            assert store.counters()["faults"] == {}
    # Nothing of the basis is in the clear.
    data = bytes(BASIS.data)[-4000:-3000]
    assert all(data not in Path(path).read_bytes() for path in entries(tmp_path))
    names = [key for keys in (KEYS, OTHER_KEYS) for key in basis_keys(BASIS.digest, Cipher(keys, "tenant"))]
    assert all(_path(tmp_path, name).exists() for name in names)
    # One in the clear, or of another store without keys, is not looked at.
    assert not _path(tmp_path).exists()


def test_a_load_uses_the_basis_before_the_chunks(tmp_path: Path) -> None:
    with with_basis(tmp_path) as store:
        save(store, IDS)
    for path in entries(tmp_path):
        os.utime(path, ns=(10**18, 10**18))
    with with_basis(tmp_path) as store:
        store.load(IDS)
        keys = [BASIS.digest, *store.keys(IDS)]
    times = [_path(tmp_path, key).stat().st_mtime_ns for key in keys]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 4
    assert min(times) > 10**18


def test_a_basis_is_only_looked_up_if_there_is_something_to_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(StoredBasis, "get", lambda self: asked.append(self))
    with without_basis(tmp_path) as store:
        assert store.load(IDS) == (0, None)
    assert asked == []


def test_recipes_without_a_basis_have_none(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        save_other(store, IDS)
        assert store.basis() is None
        assert store.stats()["entries"] == 3


def test_the_entry_is_the_basis_file(tmp_path: Path) -> None:
    with with_basis(tmp_path) as store:
        save(store, IDS)
    assert _path(tmp_path).read_bytes() == bytes(BASIS.data)
    with container.open_file(_path(tmp_path)) as file:
        assert file.header.is_basis
    assert IDENTITY.recipe == RECIPE.text


def _path(folder: Path, key: bytes = BASIS.digest) -> Path:
    name = key.hex()
    return folder / name[0] / name[1] / name
