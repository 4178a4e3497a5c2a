"""Models with states: a store resumes a prefix at a position whose states are stored."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack.cli import main
from kvpack.errors import InvalidHeader, InvalidParameter, OutOfBounds
from kvpack.file import container
from kvpack.identity.identity import states_key
from kvpack.store import state_entries
from kvpack.store.catalog import read_catalog, verify
from support.caches import random_pairs, unpack_all
from support.state_caches import STATEFUL, chunk_ends, same_states, stateful
from support.store_caches import CHUNK, IDENTITY, entries, entry_of, open_store, prompt

if TYPE_CHECKING:
    from collections.abc import Callable

IDS = prompt(8)
TOKENS = len(IDS)


def check(found: kvpack.Cache | None, whole: kvpack.Cache, position: int) -> None:
    assert same_states(found, position)
    assert found is not None
    for mine, theirs in zip(unpack_all(found), unpack_all(whole), strict=True):
        assert torch.equal(mine, theirs[:, :, :position])


def states_path(store: kvpack.Store, ids: list[int], chunks: int) -> Path:
    """Return the path of the states after ``chunks`` chunks."""
    name = states_key(store.keys(ids)[chunks - 1]).hex()
    return Path(next(path for path in entries(store.location) if path.endswith(name)))


@pytest.mark.parametrize("encryption", [None, {"k": bytes(32)}], ids=["clear", "encrypted"])
def test_the_longest_prefix_with_states_is_loaded(encryption: Any, tmp_path: Path) -> None:
    whole = stateful(TOKENS, chunk_ends(2, 5, 7))
    with open_store(tmp_path, STATEFUL, encryption=encryption) as store:
        assert store.save(IDS, whole) == 7 * CHUNK
        # Nothing resumes after chunk 8, so it is not stored.
        assert store.stats()["entries"] == 7 + 3
        for count, expected in ((8, 7), (7, 7), (6, 5), (4, 2), (2, 2), (1, 0)):
            ids = IDS[: count * CHUNK]
            assert store.match(ids) == expected * CHUNK
            tokens, found = store.load(ids)
            assert tokens == expected * CHUNK
            if expected:
                check(found, whole, tokens)
            else:
                assert found is None
        other = [*IDS[: 3 * CHUNK], *prompt(8, seed=1)]
        assert store.load(other)[0] == 2 * CHUNK
        assert store.counters()["faults"] == {}


def test_states_at_the_end_of_the_cache_are_used(tmp_path: Path) -> None:
    with open_store(tmp_path, STATEFUL) as store:
        whole = stateful(4 * CHUNK, [])
        assert store.save(IDS[: 4 * CHUNK], whole) == 4 * CHUNK
        check(store.load(IDS)[1], whole, 4 * CHUNK)
        longer = stateful(6 * CHUNK, [])
        assert store.save(IDS[: 6 * CHUNK], longer) == 6 * CHUNK
        # Saved again: all is there.
        assert store.save(IDS[: 6 * CHUNK], longer) == 6 * CHUNK
        assert store.counters()["saved_chunks"] == 6 + 2
        assert store.load(IDS[: 5 * CHUNK])[0] == 4 * CHUNK


def test_a_cache_without_states_at_ends_of_chunks_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path, STATEFUL) as store:
        with pytest.raises(InvalidParameter, match=r"has only after token 40 and 261\. A store needs states at multiples of 32 .*prefill"):
            store.save(IDS, stateful(TOKENS, [40]))
        with pytest.raises(InvalidParameter, match="the cache has none"):
            store.save(IDS, kvpack.pack(random_pairs(2, TOKENS, dims=(32, 32)), "kivi-2"))
        # Too short for a chunk: there is nothing to store.
        assert store.save(IDS[:20], stateful(20, [])) == 0
    with (
        open_store(tmp_path) as store,
        pytest.raises(InvalidParameter, match=r"layers\[0\] has the states conv.0 and recurrent.0, but the store's identity is for"),
    ):
        store.save(IDS, stateful(TOKENS, chunk_ends(2)))
    assert entries(tmp_path) == []


def test_readers_without_support_for_states_find_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path, STATEFUL) as store:
        store.save(IDS, stateful(TOKENS, chunk_ends(7)))
    with open_store(tmp_path) as store:
        assert store.match(IDS) == 0
        assert store.load(IDS) == (0, None)
        assert store.stats()["entries"] == 8


@pytest.mark.parametrize("damage", ["payload", "header", "missing", "cut"])
def test_damaged_states_are_a_miss(damage: str, tmp_path: Path) -> None:
    """The prefix that ends with the previous states is loaded, and the next save restores the missing ones."""
    whole = stateful(TOKENS, chunk_ends(2, 5))
    with open_store(tmp_path, STATEFUL) as store:
        store.save(IDS, whole)
        path = states_path(store, IDS, 5)
        data = bytearray(path.read_bytes())
        if damage == "missing":
            path.unlink()
        else:
            data[{"payload": -1, "header": 4100, "cut": 0}[damage]] ^= 1
            path.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
        check(store.load(IDS)[1], whole, 2 * CHUNK)
        assert len(store.counters()["faults"]) == (damage != "missing")
        assert store.save(IDS, whole) == 5 * CHUNK
        check(store.load(IDS)[1], whole, 5 * CHUNK)


def test_a_damaged_chunk_ends_before_the_states_after_it(tmp_path: Path) -> None:
    whole = stateful(TOKENS, chunk_ends(2, 5))
    with open_store(tmp_path, STATEFUL) as store:
        store.save(IDS, whole)
        path = Path(entry_of(store, IDS, 3))
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        check(store.load(IDS)[1], whole, 2 * CHUNK)
        assert store.save(IDS, whole) == 5 * CHUNK
        check(store.load(IDS)[1], whole, 5 * CHUNK)


def moved(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """Return a function that changes the contents of an entry with states, and writes it again with correct digests."""

    def changed(data: bytes) -> bytes:
        file = container.open_bytes(bytearray(data), where="entry")
        named = state_entries.StateFields.from_file(file)
        return b"".join(change((named, file)))

    return changed


def again(found: Any, *, position: int = 5 * CHUNK, chunk: bytes | None = None, model: Any = None, recipe: str | None = None) -> Any:
    named, file = found
    header = file.header
    own = kvpack.cache.states.collect_states(kvpack.cache.files.read(file))
    return state_entries.to_pieces(
        own, chunk or named.chunk_key, position, dict(header.model) if model is None else model, recipe or header.recipe
    )


PLANTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another chunk": (lambda found: again(found, chunk=bytes(32)), "has the states after the chunk 0000"),
    "another position": (lambda found: again(found, position=4 * CHUNK), "start is 128, expected 160"),
    "another model": (lambda found: again(found, model={"name": "other"}), "model is {'name': 'other'}"),
    "another recipe": (lambda found: again(found, recipe="kv=raw"), "recipe is 'kv=raw'"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_states_of_anything_else_are_not_used(name: str, tmp_path: Path) -> None:
    change, message = PLANTED[name]
    whole = stateful(TOKENS, chunk_ends(2, 5))
    with open_store(tmp_path, STATEFUL) as store:
        store.save(IDS, whole)
        path = states_path(store, IDS, 5)
        data = bytearray(moved(change)(path.read_bytes()))
        path.write_bytes(data)
        chunk = store.keys(IDS)[4]
        with pytest.raises(InvalidHeader, match=message):
            state_entries.read(data, chunk, 5 * CHUNK, STATEFUL.header_model, STATEFUL.recipe)
        check(store.load(IDS)[1], whole, 2 * CHUNK)


def test_states_with_tokens_or_other_sequences_are_refused(tmp_path: Path) -> None:
    chunk, model = bytes(range(32)), {"name": "m"}
    own = stateful(TOKENS, [])[0].states
    two = {name: state.repeat(2, 1, 1) for name, state in own.items()}
    data = b"".join(state_entries.to_pieces((two, {}), chunk, CHUNK, model, "kv=raw"))
    with pytest.raises(InvalidHeader, match=r"has 2 sequences, expected one"):
        state_entries.read(data, chunk, CHUNK, model, "kv=raw")
    good = bytearray().join(state_entries.to_pieces((own, {}), chunk, CHUNK, model, "kv=raw"))
    assert len(state_entries.read(good, chunk, CHUNK, model, "kv=raw")) == 2
    path = tmp_path / "chunk"
    kvpack.save(dataclasses.replace(stateful(CHUNK, []), recipe="kv=raw", model=model), path)
    file = container.open_file(path)
    with pytest.raises(InvalidHeader, match=r"the feature 'prefix-states' has 0 bytes, expected 80"):
        state_entries.StateFields.from_file(file)
    file.header.ignorable[state_entries.FEATURE] = states_key(chunk) + chunk + bytes(16)  # type: ignore[index]
    with pytest.raises(InvalidHeader, match="is not an entry of states"):
        state_entries.StateFields.from_file(file)


LOADED = [(7, 2, 5, 7), (7, 2, 5), (6, 2, 5), (5, 2, 5), (5, 5), (5,), (4,), (3,), (2,), (1,), (0,)]
"""Expected order of eviction after loads: the unused end, then the states before its middle, then everything that was loaded."""
SAVED = [(7, 2, 5, 7), (7, 2, 5), (6, 2, 5), (5, 2, 5), (5, 2), (4, 2), (3, 2), (2, 2), (2,), (1,), (0,)]
"""Expected order of eviction from the end. As long as any states remain, the prefix up to them can be resumed."""


@pytest.mark.parametrize(("loads", "expected"), [(True, LOADED), (False, SAVED)], ids=["loaded", "saved"])
def test_states_are_evicted_before_their_prefix(loads: bool, expected: list[tuple[int, ...]], tmp_path: Path) -> None:
    """After every eviction, the remaining entries are the first chunks, and states after some of them."""
    with open_store(tmp_path, STATEFUL) as store:
        store.save(IDS, stateful(TOKENS, chunk_ends(2, 5, 7)))
        if loads:
            store.load(IDS[: 5 * CHUNK])
        keys = store.keys(IDS)
        size = store.stats()["bytes"]
    seen = []
    while size > 0:
        with open_store(tmp_path, STATEFUL, max_bytes=size) as store:
            store.collect()
            there = {bytes.fromhex(os.path.basename(path)) for path in entries(tmp_path)}
            chunks = sum(key in there for key in keys)
            assert all(key in there for key in keys[:chunks])
            held = [count for count in (2, 5, 7) if states_key(keys[count - 1]) in there]
            assert all(count <= chunks for count in held)
            assert len(there) == chunks + len(held)
            assert store.stats()["bytes"] <= size
            seen.append((chunks, *held))
            size = store.stats()["bytes"] - 1
    assert seen == expected


def test_a_prefix_that_is_saved_again_counts_as_used(tmp_path: Path) -> None:
    """All entries of the prefix, including states in its middle, become newer than those of another prefix."""
    other = prompt(8, seed=3)
    with open_store(tmp_path, STATEFUL) as store:
        for ids in (IDS, other, IDS):
            store.save(ids, stateful(TOKENS, chunk_ends(2, 5, 7)))
        keys = [store.keys(ids) for ids in (IDS, other)]
        used = {entry.key: entry.used_ns for entry in store._backend.list()}
    names = [[*chunks[:7], *(states_key(chunks[count - 1]) for count in (2, 5, 7))] for chunks in keys]
    assert min(used[key] for key in names[0]) > max(used[key] for key in names[1])


def test_pins_keep_states(tmp_path: Path) -> None:
    with open_store(tmp_path, STATEFUL) as store:
        store.save(IDS, stateful(TOKENS, chunk_ends(2, 5, 7)))
        assert store.pin(IDS[: 6 * CHUNK]) == 5 * CHUNK
    with open_store(tmp_path, STATEFUL, max_bytes=1) as store:
        store.collect()
        assert store.load(IDS)[0] == 5 * CHUNK
        assert store.stats()["entries"] == 6
        assert store.unpin(IDS)
        assert not store.unpin(IDS)
        store.collect()
        assert store.stats()["entries"] == 0


def test_delete_removes_states(tmp_path: Path) -> None:
    with open_store(tmp_path, STATEFUL) as store:
        store.save(IDS, stateful(TOKENS, chunk_ends(2, 5, 7)))
        assert store.delete(IDS, start=4 * CHUNK) == 3
        assert store.stats()["entries"] == 4 + 1
        assert store.load(IDS)[0] == 2 * CHUNK


def test_states_are_stored_in_every_tier(tmp_path: Path) -> None:
    whole = stateful(TOKENS, chunk_ends(2, 5))
    with open_store(tmp_path / "slow", STATEFUL) as store:
        store.save(IDS, whole)
    tiers = [kvpack.Tier("memory://", max_bytes=10**8), tmp_path / "slow"]
    with kvpack.Store(tiers, STATEFUL, chunk=CHUNK) as store:
        for _ in range(2):
            check(store.load(IDS)[1], whole, 5 * CHUNK)
            assert [tier["entries"] for tier in store.stats()["tiers"]] == [6, 7]


def test_states_above_the_size_limit_of_entries_are_not_stored(tmp_path: Path) -> None:
    whole = stateful(TOKENS, chunk_ends(2))
    layers = tuple(dataclasses.replace(layer, states={"recurrent.0": torch.zeros(1, 2**20)} if layer.states else {}) for layer in whole)
    large = dataclasses.replace(whole, layers=layers, states_at={2 * CHUNK: tuple(layer.states for layer in layers)})
    with open_store(tmp_path, STATEFUL, max_entry_bytes=2**20) as store:
        assert store.save(IDS, large) == 0
        assert store.counters()["faults"] == {"encode LimitExceeded": 1}


def test_commands_support_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = stateful(TOKENS, chunk_ends(2, 5))
    folder, out = str(tmp_path / "store"), tmp_path / "out.kvpack"
    with open_store(folder, STATEFUL) as store:
        store.save(IDS, whole)
        keys = store.keys(IDS)
        assert all(error is None for _, error in verify(store._backend))
        catalog = read_catalog(store._backend)
        assert {key: entry.position for key, entry in catalog.states.items()} == {keys[1]: 2 * CHUNK, keys[4]: 5 * CHUNK}
        assert not catalog.unreadable
        assert catalog.count == 7
        store.collect()
        assert store.stats()["entries"] == 7
    assert main(["store", "ls", folder]) == 0
    assert "2 entries of states after chunks" in capsys.readouterr().out
    assert main(["store", "stat", folder]) == 0
    assert "2 of them are states after chunks" in capsys.readouterr().out
    assert main(["store", "verify", folder]) == 0
    assert main(["store", "export", folder, keys[4].hex()[:16], str(out)]) == 0
    check(kvpack.load(out), whole, 5 * CHUNK)
    other = str(tmp_path / "other")
    assert main(["store", "import", other, str(out), "--trust-names", "--chunk", str(CHUNK), "--tenant", IDENTITY.tenant]) == 0
    with open_store(other, STATEFUL) as store:
        check(store.load(IDS)[1], whole, 5 * CHUNK)


def test_slices_end_where_states_are_known() -> None:
    whole = stateful(TOKENS, chunk_ends(2, 5))
    part = whole[:, : 5 * CHUNK]
    check(part, whole, 5 * CHUNK)
    assert list(part.states_at) == chunk_ends(2)
    check(part[:, : 2 * CHUNK], whole, 2 * CHUNK)
    later = whole[:, 2 * CHUNK : 5 * CHUNK]
    assert later.start == 2 * CHUNK
    assert not later.states_at
    check(kvpack.concat([part[:, : 2 * CHUNK], later]), whole, 5 * CHUNK)
    assert list(kvpack.concat([part[:, : 2 * CHUNK], later]).states_at) == chunk_ends(2)
    with pytest.raises(OutOfBounds, match=r"tokens \[0:96\] of 261 were requested, but layers\[0\] has its states"):
        whole[:, : 3 * CHUNK]
    rows = whole.select([0, 0])
    assert rows.states_at[2 * CHUNK][0]["conv.0"].shape[0] == 2
    assert rows[:, : 2 * CHUNK][0].states["conv.0"].shape[0] == 2


def test_states_beyond_the_end_of_a_cache_are_not_used(tmp_path: Path) -> None:
    whole = stateful(4 * CHUNK + 5, chunk_ends(2, 5))
    with open_store(tmp_path, STATEFUL) as store:
        assert store.save(IDS[: whole.tokens], whole) == 2 * CHUNK
        assert store.stats()["entries"] == 3
    assert list(kvpack.concat([whole]).states_at) == chunk_ends(2)


def test_states_that_another_process_removed_are_stored_again(tmp_path: Path) -> None:
    """An entry that a store has read or written may have been removed since."""
    whole = stateful(TOKENS, chunk_ends(2, 5))
    with open_store(tmp_path, STATEFUL) as store:
        for _ in range(3):
            assert store.save(IDS, whole) == 5 * CHUNK
            check(store.load(IDS)[1], whole, 5 * CHUNK)
            for count in (2, 5):
                states_path(store, IDS, count).unlink()
            assert store.load(IDS) == (0, None)
            assert store.save(IDS, whole) == 5 * CHUNK
            assert store.save(IDS, whole) == 5 * CHUNK
        assert store.counters()["faults"] == {}
