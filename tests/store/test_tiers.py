"""A store of several tiers: entries in any tier are found, and each tier keeps its budget.

A fault in one tier is a miss in that tier.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvpack
from kvpack.formats.errors import InvalidParameter
from kvpack.store import breaker, tiers
from kvpack.store.counters import Counters
from kvpack.store.directory import Directory
from kvpack.store.memory import MemoryBackend
from support import redis_server, s3_server
from support.store_caches import CHUNK, IDENTITY, UNIFORM_IDENTITY, cache, entries, entry_of, is_same_prefix, open_store, prompt, save
from support.store_stress import FORK

MEMORY = kvpack.Tier("memory://", max_bytes=10**8)


def tiered(*locations: Any, identity: kvpack.Identity = IDENTITY, **options: Any) -> kvpack.Store:
    return kvpack.Store(list(locations), identity, **{"chunk": CHUNK, **options})


def counts(store: kvpack.Store) -> list[int]:
    """Return the number of entries in each tier."""
    return [tier["entries"] for tier in store.stats()["tiers"]]


@pytest.mark.parametrize("back", [False, True])
def test_saved_entries_are_in_every_tier(back: bool, tmp_path: Path) -> None:
    ids = prompt(4)
    with tiered(MEMORY, tmp_path / "a", tmp_path / "b", write_back=back) as store:
        whole = save(store, ids)
        assert is_same_prefix(store.load(ids)[1], whole)
    assert counts(store) == [4, 4, 4]
    assert store.stats()["entries"] == 4
    assert store.counters()["saved_chunks"] == 4
    for folder in ("a", "b"):
        assert is_same_prefix(open_store(tmp_path / folder).load(ids)[1], whole)


def test_entries_in_a_slower_tier_are_copied_to_faster_ones(tmp_path: Path) -> None:
    ids = prompt(4)
    whole = save(open_store(tmp_path / "slow"), ids)
    store = tiered(MEMORY, tmp_path / "fast", tmp_path / "slow")
    assert store.match(ids) == 4 * CHUNK
    assert counts(store) == [0, 0, 4]
    assert is_same_prefix(store.load(ids[: 2 * CHUNK])[1], whole)
    assert counts(store) == [2, 2, 4]
    assert store.counters()["promoted_chunks"] == 2
    assert is_same_prefix(store.load(ids)[1], whole)
    assert [tier["hit_chunks"] for tier in store.stats()["tiers"]] == [2, 0, 4]
    shutil.rmtree(tmp_path / "slow")
    shutil.rmtree(tmp_path / "fast")
    n, found = store.load(ids)
    assert n == 4 * CHUNK
    assert is_same_prefix(found, whole)
    found[0].k.runs[0].streams["codes.0"].zero_()
    assert is_same_prefix(store.load(ids)[1], whole), "writing to a tensor changed the tier"


def test_a_prefix_scattered_over_tiers_is_found(tmp_path: Path) -> None:
    ids = prompt(6)
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        whole = save(open_store(folder), ids)
    # Chunks 0 and 3 only in a, 1 and 4 in b, 2 and 5 in c.
    for number, folder in enumerate(folders):
        for chunk in range(6):
            if chunk % 3 != number:
                os.unlink(entry_of(open_store(folder), ids, chunk))
    store = tiered(*folders)
    assert store.match(ids) == 6 * CHUNK
    assert is_same_prefix(store.load(ids)[1], whole)
    assert counts(store) == [6, 4, 2]


def test_last_uses_decrease_along_a_chain_in_every_tier(tmp_path: Path) -> None:
    ids = prompt(5)
    store = tiered(tmp_path / "a", tmp_path / "b")
    save(store, ids)
    for number in (0, 1, 3):
        os.unlink(entry_of(open_store(tmp_path / "a"), ids, number))
    store.load(ids)
    for folder in ("a", "b"):
        times = [os.stat(entry_of(open_store(tmp_path / folder), ids, number)).st_mtime_ns for number in range(5)]
        assert times == sorted(times, reverse=True)
        assert len(set(times)) == 5


@pytest.mark.parametrize("bad", ["a", "b", "both"])
def test_a_damaged_copy_is_removed_and_a_valid_one_is_kept(bad: str, tmp_path: Path) -> None:
    ids = prompt(3)
    store = tiered(MEMORY, tmp_path / "a", tmp_path / "b")
    whole = save(tiered(tmp_path / "a", tmp_path / "b"), ids)
    for folder in ("a", "b") if bad == "both" else bad:
        with open(entry_of(open_store(tmp_path / folder), ids, 1), "r+b") as file:
            file.seek(6000)
            file.write(b"damage")
    n, found = store.load(ids)
    assert n == (CHUNK if bad == "both" else 3 * CHUNK), "the valid copy was not found by the same load"
    assert is_same_prefix(found, whole)
    assert store.counters()["damaged_entries"] == {"a": 1, "b": 0, "both": 2}[bad], "chunks of b were read"
    n, found = store.load(ids)
    assert n == (CHUNK if bad == "both" else 3 * CHUNK)
    assert is_same_prefix(found, whole)
    assert store.save(ids, whole) == 3 * CHUNK
    assert is_same_prefix(store.load(ids)[1], whole)


@pytest.mark.parametrize("keys", [None, {"k": bytes(32)}])
def test_invalid_bytes_in_a_slow_tier_evict_nothing_and_are_never_returned(keys: dict[str, bytes] | None, tmp_path: Path) -> None:
    if keys:
        pytest.importorskip("cryptography")
    good, bad = prompt(4, seed=1), prompt(1, seed=2)
    saved = open_store(tmp_path / "slow", encryption=keys)
    save(saved, bad)
    path = Path(entry_of(saved, bad, 0))
    sealed = path.read_bytes()
    whole = save(open_store(tmp_path / "size", encryption=keys), good)
    size = open_store(tmp_path / "size").stats()["bytes"]
    memory = kvpack.Tier("memory://", max_bytes=size)
    store = tiered(memory, tmp_path / "fast", tmp_path / "slow", encryption=keys)
    save(store, good)
    assert counts(store) == [4, 4, 5]
    for junk in (sealed[:-1] + bytes([sealed[-1] ^ 1]), sealed[:300] + bytes(size - 400), bytes(size - 100)):
        path.write_bytes(junk)
        assert store.load(bad) == (0, None)
        assert counts(store) == [4, 4, 4], "a damaged entry remained, or others were evicted for it"
        assert store.stats()["tiers"][0]["evicted_entries"] == 0
        assert store.counters()["promoted_chunks"] == 0
    assert is_same_prefix(store.load(good)[1], whole)
    assert store.stats()["tiers"][0]["hit_chunks"] == 4


def test_entries_refused_by_a_tier_are_read_from_the_next_and_repaired(tmp_path: Path) -> None:
    """Invalid bytes in the fastest tier hide neither later entries in that tier nor copies in other tiers."""
    ids = prompt(5)
    whole = save(tiered(tmp_path / "a", tmp_path / "b", tmp_path / "c"), ids)
    at = {name: open_store(tmp_path / name) for name in "abc"}
    for name, chunk, junk in (("a", 1, b"junk"), ("b", 1, bytes(9000)), ("a", 3, b""), ("a", 4, b"x" * 9000), ("b", 4, b"y")):
        Path(entry_of(at[name], ids, chunk)).write_bytes(junk)
    store = tiered(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    n, found = store.load(ids)
    assert n == 5 * CHUNK
    assert is_same_prefix(found, whole)
    assert store.counters()["damaged_entries"] == 2, "later chunks were not read from the tier of the first valid one"
    for one in at.values():
        n, found = one.load(ids)
        assert n == 5 * CHUNK, "a tier was not repaired"
        assert is_same_prefix(found, whole)


def test_unreadable_entries_in_a_fast_tier_hide_nothing(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    ids = prompt(3)
    ours, theirs = {"ours": bytes(32)}, {"theirs": bytes(32)}
    save(open_store(tmp_path / "fast", encryption=theirs), ids)
    whole = save(open_store(tmp_path / "slow", encryption=ours), ids)
    store = tiered(tmp_path / "fast", tmp_path / "slow", encryption=ours)
    for _ in range(2):
        n, found = store.load(ids)
        assert n == 3 * CHUNK
        assert is_same_prefix(found, whole)
    assert store.counters()["undecryptable_entries"] == 2
    assert open_store(tmp_path / "fast", encryption=theirs).load(ids)[0] == 3 * CHUNK, "it stays"


def test_unchecked_entries_are_not_recorded_as_used(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(3)
    save(store, ids)
    paths = [entry_of(store, ids, number) for number in range(3)]
    with open(paths[1], "r+b") as file:
        file.seek(6000)
        file.write(b"damage")
    for path in paths:
        os.utime(path, ns=(10**18, 10**18))
    assert store.load(ids)[0] == CHUNK
    assert os.stat(paths[0]).st_mtime_ns > 10**18
    assert os.stat(paths[2]).st_mtime_ns == 10**18


def test_every_tier_keeps_its_budget(tmp_path: Path) -> None:
    save(open_store(tmp_path / "size", UNIFORM_IDENTITY), prompt(1))
    (size,) = (os.stat(path).st_size for path in entries(tmp_path / "size"))
    budgets = [3 * size, 6 * size, 12 * size]
    places = [kvpack.Tier("memory://", max_bytes=budgets[0])]
    places += [kvpack.Tier(tmp_path / name, max_bytes=budget) for name, budget in zip("ab", budgets[1:], strict=True)]
    store = tiered(*places, identity=UNIFORM_IDENTITY)
    for seed in range(10):
        ids = prompt(2, seed=seed)
        whole = save(store, ids, seed=seed)
        assert is_same_prefix(store.load(ids)[1], whole)
        assert all(tier["bytes"] <= budget for tier, budget in zip(store.stats()["tiers"], budgets, strict=True))
    assert counts(store) == [3, 6, 12]
    assert [store.match(prompt(2, seed=seed)) // CHUNK for seed in range(10)] == [0, 0, 0, 0, 2, 2, 2, 2, 2, 2]
    pinned = prompt(2, seed=9)
    assert store.pin(pinned) == 2 * CHUNK
    for seed in range(20, 30):
        store.save(prompt(2, seed=seed), cache(2 * CHUNK + 5, UNIFORM_IDENTITY.recipe))
    assert store.match(pinned) == 2 * CHUNK
    assert store.unpin(pinned)
    long = prompt(20, seed=50)
    assert store.save(long, cache(len(long), UNIFORM_IDENTITY.recipe)) == 12 * CHUNK, "the largest tier does not use its budget"


def test_leaves_are_evicted_from_memory_before_their_ancestors() -> None:
    memory = MemoryBackend(Counters(), max_bytes=4 * 10)
    chain, other = [bytes([number]) * 32 for number in range(3)], [b"x" * 32]
    for length in (1, 2, 3):
        assert memory.put(chain[:length], [memoryview(bytes(10))], 0)
    assert memory.put(other, [memoryview(bytes(10))], 0)
    memory.touch(chain[:1], 0)
    for number, left in enumerate([2, 1, 1, 0]):
        assert memory.put([bytes([50 + number]) * 32], [memoryview(bytes(10))], 0)
        assert memory.count_present(chain) == left
    assert memory.size() == (4, 40)
    assert not memory.put([b"y" * 32], [memoryview(bytes(41))], 0)


def test_deletion_includes_queued_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = Directory.put

    def slow(self: Directory, *arguments: Any) -> bool:
        begun.set()
        assert go_on.wait(60)
        return real(self, *arguments)

    store = tiered(MEMORY, tmp_path, write_back=True)
    monkeypatch.setattr(Directory, "put", slow)
    ids = prompt(4)
    save(store, ids)
    assert begun.wait(60)
    threading.Timer(0.05, go_on.set).start()
    assert store.delete(ids) == 4
    store.close()
    assert counts(store) == [0, 0]
    assert store.load(ids) == (0, None)


def test_a_full_queue_drops_entries_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    real = Directory.put
    monkeypatch.setattr(Directory, "put", lambda *arguments: go_on.wait(60) and real(*arguments))
    monkeypatch.setattr(tiers, "QUEUE_BYTES", 20_000)
    store = tiered(MEMORY, tmp_path, identity=UNIFORM_IDENTITY, write_back=True)
    ids = prompt(5)
    save(store, ids)
    dropped = store.counters()["dropped_writes"]
    assert dropped == 3
    go_on.set()
    store.close()
    assert counts(store) == [5, 2]
    assert store.load(ids)[0] == 5 * CHUNK
    monkeypatch.setattr(tiers, "FLUSH_SECONDS", 0.05)
    go_on.clear()
    save(store, prompt(2, seed=1))
    store.close()
    assert store.counters()["dropped_writes"] == dropped + 1
    go_on.set()


def test_entries_refused_by_the_first_tier_are_not_postponed(tmp_path: Path) -> None:
    store = tiered(kvpack.Tier("memory://", max_bytes=10), tmp_path, write_back=True)
    save(store, prompt(3))
    assert counts(store) == [0, 3]


def test_queued_entries_are_written_if_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    store = tiered(MEMORY, tmp_path, write_back=True)
    save(store, prompt(3))
    store.close()
    assert counts(store) == [3, 3]


def _in_child(store: kvpack.Store, results: Any) -> None:
    ids = prompt(2, seed=7)
    # The store is not closed: the process ends when the queued entries are written.
    results.put((store.load(prompt(2))[0], store.save(ids, cache(len(ids))), store.load(ids)[0]))


def test_a_store_works_in_a_forked_process(tmp_path: Path) -> None:
    store = tiered(MEMORY, tmp_path, write_back=True)
    save(store, prompt(2))
    results = FORK.Queue()
    # As another thread of the parent would leave them at that moment.
    with store._backend._write_back._condition, store._backend._lock._lock:
        child = FORK.Process(target=_in_child, args=(store, results), daemon=True)
        child.start()
    assert results.get(timeout=600) == (2 * CHUNK,) * 3
    child.join()
    assert open_store(tmp_path).match(prompt(2, seed=7)) == 2 * CHUNK


@pytest.mark.scenario
def test_tiers_survive_servers_that_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")
    pytest.importorskip("obstore")
    monkeypatch.setattr(breaker, "PAUSE_SECONDS", 0.01)
    ids, more = prompt(3, seed=1), prompt(3, seed=2)
    with redis_server.run_server(tmp_path) as redis, s3_server.run_server() as s3:
        remote = kvpack.Tier(s3.url, storage_options=s3.options, timeout=5)
        with tiered(MEMORY, tmp_path / "disk", redis.url, remote, write_back=True) as store:
            whole = save(store, ids)
        assert counts(store) == [3, 3, 3, 3]
        other = tiered(MEMORY, redis.url, remote)
        redis.kill()
        assert is_same_prefix(other.load(ids)[1], whole)
        assert [tier["hit_chunks"] for tier in other.stats()["tiers"]] == [3 if n == 2 else 0 for n in range(3)]
        s3.kill()
        assert is_same_prefix(other.load(ids)[1], whole)
        second = save(other, more)
        assert is_same_prefix(other.load(more)[1], second)
        assert other.delete(more) == 3
        assert other.counters()["damaged_entries"] == 0
        assert other.counters()["faults"] != {}
        assert is_same_prefix(tiered(tmp_path / "disk", redis.url).load(ids)[1], whole)


@pytest.mark.parametrize(
    ("locations", "options", "message"),
    [
        ([], {}, "is an empty list"),
        ([["a"]], {}, "a tier cannot itself be a list of tiers"),
        (["memory://"], {}, "only in its own process, and needs a budget: pass max_bytes="),
        (["a", kvpack.Tier("b", timeout=5)], {}, "a folder has no option timeout"),
        ([kvpack.Tier("b", max_bytes=-1)], {}, "max_bytes is -1"),
        (["a"], {"max_bytes": 5}, "a list of tiers has no option max_bytes: each Tier has its own"),
        ("a", {"write_back": True}, "a folder has no option write_back"),
        (kvpack.Tier("a"), {}, "the location is a Tier, expected a list"),
    ],
    ids=str,
)
def test_invalid_tiers_are_refused(locations: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        kvpack.Store(locations, IDENTITY, chunk=CHUNK, **options)


def test_an_entry_damaged_in_two_tiers_is_restored_by_a_save(tmp_path: Path) -> None:
    store = tiered(tmp_path / "a", tmp_path / "b")
    ids = prompt(2)
    whole = save(store, ids)
    for backend in store._backend._backends:
        with open(backend._folder.path(store.keys(ids)[0]), "r+b") as file:
            file.seek(6000)
            file.write(b"damage")
    assert store.load(ids)[0] == 0
    assert store.save(ids, whole) == 2 * CHUNK
    assert store.save(ids, whole) == 2 * CHUNK
    assert is_same_prefix(store.load(ids)[1], whole)


class Failing:
    """A backend whose next calls fail as if by a system error: nothing is found or put."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.failing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def count_present(self, keys: Any) -> int:
        return 0 if self.failing else self._backend.count_present(keys)

    def get(self, keys: Any) -> list[Any]:
        return [] if self.failing else self._backend.get(keys)

    def contains_many(self, keys: Any) -> list[bool]:
        return [False] * len(keys) if self.failing else self._backend.contains_many(keys)

    def put(self, *arguments: Any) -> bool:
        return not self.failing and self._backend.put(*arguments)

    def put_all(self, chain: Any, entries: Any, now_ns: int) -> list[bool]:
        return [False] * len(entries) if self.failing else self._backend.put_all(chain, entries, now_ns)


class TierMachine(RuleBasedStateMachine):
    """Compares tiers with a dict of chunks for each of them, despite faults, damage and loss in any tier."""

    prompts = st.sampled_from([(seed, chunks) for seed in range(2) for chunks in range(1, 4)])
    numbers = st.integers(0, 2)

    @initialize(back=st.booleans())
    def begin(self, back: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self.store = tiered(MEMORY, self.folder / "a", self.folder / "b", write_back=back)
        self.failing = [Failing(backend) for backend in self.store._backend._backends]
        self.store._backend._backends = self.failing
        self.there: list[set[bytes]] = [set(), set(), set()]
        self.bad: set[tuple[int, bytes]] = set()
        self.back = back

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.store.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def settle(self) -> None:
        """Wait until queued entries are stored, so that the model matches every tier."""
        if self.store._backend._write_back is not None:
            self.store._backend._write_back.close()

    def first_with(self, key: bytes) -> int | None:
        return next((tier for tier in range(3) if key in self.there[tier] and not self.failing[tier].failing), None)

    def expected(self, keys: list[bytes]) -> int:
        return next((number for number, key in enumerate(keys) if self.first_with(key) is None), len(keys))

    @rule(what=prompts)
    def save(self, what: tuple[int, int]) -> None:
        ids = prompt(what[1], first=1, seed=what[0])
        keys = self.store.keys(ids)
        known = self.expected(keys)
        stored = self.store.save(ids, WHOLE[what]) // CHUNK
        self.settle()
        up = [tier for tier in range(3) if not self.failing[tier].failing]
        assert stored == (len(keys) if up else known)
        for tier in up:
            self.bad -= {(tier, key) for key in keys[known:] if key not in self.there[tier]}
            self.there[tier].update(keys[known:])

    @rule(what=prompts)
    def load(self, what: tuple[int, int]) -> None:
        ids = prompt(what[1], first=1, seed=what[0])
        keys = self.store.keys(ids)
        assert self.store.match(ids) == self.expected(keys) * CHUNK
        good = 0
        for key in keys:
            tiers_with = [tier for tier in range(3) if key in self.there[tier] and not self.failing[tier].failing]
            serving = next((tier for tier in tiers_with if (tier, key) not in self.bad), None)
            # What was met on the way to a good one is removed.
            for tier in tiers_with[: None if serving is None else tiers_with.index(serving)]:
                self.there[tier].discard(key)
                self.bad.discard((tier, key))
            if serving is None:
                break
            for upper in range(serving):
                if not self.failing[upper].failing:
                    self.there[upper].add(key)
            good += 1
        n, found = self.store.load(ids)
        assert n == good * CHUNK
        assert found is None if n == 0 else is_same_prefix(found, WHOLE[what])

    @rule(what=prompts, start=st.integers(0, 2))
    def delete(self, what: tuple[int, int], start: int) -> None:
        ids = prompt(what[1], first=1, seed=what[0])
        gone = set(self.store.keys(ids)[start:])
        assert self.store.delete(ids, start=start * CHUNK) == len(gone & set().union(*self.there))
        for tier in range(3):
            self.there[tier] -= gone
            self.bad -= {(tier, key) for key in gone}

    @rule(tier=numbers)
    def fail(self, tier: int) -> None:
        self.failing[tier].failing = not self.failing[tier].failing

    @rule()
    def restart(self) -> None:
        """Restart the process, which loses the entries of the memory tier."""
        self.failing[0].delete(sorted(self.there[0]))
        self.there[0].clear()
        self.bad = {(tier, key) for tier, key in self.bad if tier}

    @precondition(lambda self: hasattr(self, "there") and self.there[1] | self.there[2])
    @rule(tier=st.integers(1, 2), data=st.data(), damage=st.booleans())
    def harm(self, tier: int, data: st.DataObject, damage: bool) -> None:
        """Damage an entry in the same way in every tier, or remove it."""
        if not self.there[tier]:
            return
        key = data.draw(st.sampled_from(sorted(self.there[tier])))
        path = self.failing[tier]._folder.path(key)
        if not damage:
            os.unlink(path)
            self.there[tier].discard(key)
            self.bad.discard((tier, key))
        elif (tier, key) not in self.bad:
            with open(path, "r+b") as file:
                # In the payload, for save looks at the front of what it has not read.
                file.seek(6000)
                file.write(b"damage")
            self.bad.add((tier, key))

    @invariant()
    def every_tier_holds_what_the_model_says(self) -> None:
        if hasattr(self, "there"):
            held = [{entry.key for entry in backend.list()} for backend in self.failing]
            assert held == self.there


LONGEST = cache(CHUNK * 4 + 5)
WHOLE = {(seed, chunks): LONGEST[:, : CHUNK * chunks + 5] for seed in range(2) for chunks in range(1, 4)}
"""The prompts share a chunk, so their caches have the same values."""

TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize(
    "mutant", ["no promotion", "discards everywhere", "asks once", "queue forgets nothing", "notes in parts", "promotes first"]
)
def test_violations_of_these_rules_are_noticed(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers that break one of the rules fail the test of that rule."""
    whole = tiers.Tiers
    if mutant == "no promotion":
        monkeypatch.setattr(whole, "_put_in", lambda _, backends, chain, entries, now_ns: [False] * len(entries))
        failing: Any = test_entries_in_a_slower_tier_are_copied_to_faster_ones
    elif mutant == "discards everywhere":
        monkeypatch.setattr(whole, "discard", lambda self, key, data: self.delete([key]))
        failing = lambda path: test_a_damaged_copy_is_removed_and_a_valid_one_is_kept("a", path)  # noqa: E731
    elif mutant == "asks once":
        monkeypatch.setattr(whole, "count_present", lambda self, keys: max(backend.count_present(keys) for backend in self._backends))
        failing = test_a_prefix_scattered_over_tiers_is_found
    elif mutant == "promotes first":
        real = whole.find

        def promoting(self: Any, keys: Any, **options: Any) -> Any:
            found = real(self, keys, **options)
            self.accept(keys[: len(found)], found, time.time_ns())
            return found

        monkeypatch.setattr(whole, "find", promoting)
        failing = lambda path: test_invalid_bytes_in_a_slow_tier_evict_nothing_and_are_never_returned(None, path)  # noqa: E731
    elif mutant == "queue forgets nothing":
        monkeypatch.setattr(tiers.WriteBackQueue, "cancel", lambda self, keys: None)
        failing = lambda path: test_deletion_includes_queued_entries(path, monkeypatch)  # noqa: E731
    else:
        monkeypatch.setattr(whole, "touch", lambda *_, **__: time.sleep(0))
        failing = test_last_uses_decrease_along_a_chain_in_every_tier
    with pytest.raises(AssertionError):
        failing(tmp_path)
