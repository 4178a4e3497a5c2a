"""The index of a folder is only a hint: after any change to it or to the folder, its answers match the folder."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvpack
from kvpack.store import directory, disk_usage, eviction, index, index_tables
from kvpack.store.counters import Counters
from kvpack.store.directory import Directory
from kvpack.store.encryption import Cipher
from kvpack.store.summary import summarize
from support.faulty_os import FaultyOs
from support.store_caches import IDENTITY, KEYS, open_store, prompt, save
from support.store_stress import FORK

HEAD = (2000).to_bytes(8, "little") + b'{"__metadata__":{"format":"kvpack","kvpack":"'


def key(number: int) -> bytes:
    """Return a key that belongs to one of few folders, so that each folder has several."""
    return bytes([number % 7, number // 256, number % 256]) + bytes(29)


def put(backend: Directory, number: int, size: int = 100, used_ns: int | None = None) -> bool:
    return backend.put([key(number)], [memoryview(HEAD + bytes(size))], time.time_ns() if used_ns is None else used_ns)


def truth(folder: Path) -> tuple[int, int]:
    sizes = [path.stat().st_size for path in folder.glob("?/?/*")]
    return len(sizes), sum(sizes)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (directory, eviction):
        monkeypatch.setattr(module, "MIN_ENTRIES", 1)


def opened(folder: Path, **options: Any) -> Directory:
    return Directory(folder, Counters(), **options)


def indexed(folder: Path, **options: Any) -> Directory:
    """Return a directory with a complete index."""
    backend = opened(folder, **options)
    for number in range(20):
        assert put(backend, number)
    assert backend.size() == truth(folder)
    assert backend._index.exists
    assert backend._index._stale_folders() == []
    return backend


def unaware(backend: Directory, number: int) -> None:
    """Put an entry as a version of kvpack without an index does."""
    other = opened(Path(backend._folder.root))
    other._index.add = lambda key, size, used_ns, about, rename: rename()  # type: ignore[method-assign]
    put(other, number)


def test_changes_by_the_store_itself_need_no_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = indexed(tmp_path)
    monkeypatch.setattr(index.Index, "_refresh_folder", lambda *given: pytest.fail("a folder was listed"))
    put(backend, 20)
    backend.delete([key(3), key(99)])
    assert backend.size() == truth(tmp_path) == (20, 20 * (100 + len(HEAD)))
    assert opened(tmp_path).size() == truth(tmp_path)


CHANGES = {
    "rm": lambda backend: next(iter(Path(backend._folder.root).glob("?/?/*"))).unlink(),
    "cp": lambda backend: shutil.copy(backend._folder.path(key(1)), backend._folder.path(bytes([1, 9]) + bytes(30))),
    "an older kvpack": lambda backend: unaware(backend, 50),
    "an older kvpack, then this": lambda backend: (unaware(backend, 50), put(backend, 57)),
    "a folder moved away": lambda backend: os.rename(f"{backend._folder.root}/0/1", f"{backend._folder.root}/away"),
    "a cut file": lambda backend: (Path(backend._folder.path(key(1))).unlink(), Path(backend._folder.path(key(1))).write_bytes(b"cut")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_by_others_are_noticed(change: str, tmp_path: Path) -> None:
    backend = indexed(tmp_path)
    CHANGES[change](backend)
    for one in (backend, opened(tmp_path)):
        assert one.size() == truth(tmp_path)


def test_a_change_without_a_new_time_is_found_later(tmp_path: Path) -> None:
    backend = indexed(tmp_path)
    leaf = tmp_path / "0" / "1"
    changed = leaf.stat()
    next(iter(leaf.iterdir())).unlink()
    os.utime(leaf, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    assert backend.size() != truth(tmp_path)
    for _ in range(256):
        backend._index.check_next_folder()
    assert backend.size() == truth(tmp_path)


@pytest.mark.parametrize("damage", ["removed", "junk", "empty", "cut", "of another version", "of another run"])
def test_a_damaged_index_causes_no_fault(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexed(tmp_path).close()
    file = tmp_path / "index.db"
    if damage == "removed":
        file.unlink()
    elif damage == "of another version":
        backend = opened(tmp_path)
        with backend._index._transaction() as connection:
            connection.execute("PRAGMA user_version = 99")
        backend.close()
    elif damage == "of another run":
        monkeypatch.setattr(index, "boot_id", lambda: bytes(8))
    else:
        file.write_bytes({"junk": b"junk" * 5000, "empty": b"", "cut": file.read_bytes()[:5000]}[damage])
    backend = opened(tmp_path, max_bytes=20 * (100 + len(HEAD)))
    for number in range(20, 30):
        assert put(backend, number)
        assert backend.size() == truth(tmp_path)
        assert opened(tmp_path).size() == truth(tmp_path)
    assert backend._counters.as_dict()["faults"] == {}
    assert truth(tmp_path)[1] <= 20 * (100 + len(HEAD))
    assert backend._index.exists == (damage != "of another version")


def test_a_copied_folder_is_listed_again(tmp_path: Path) -> None:
    backend = indexed(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    next(iter((tmp_path / "b").glob("?/?/*"))).unlink()
    assert opened(tmp_path / "b").size() == truth(tmp_path / "b")
    assert backend.size() == truth(tmp_path / "a")


@pytest.mark.parametrize("death", ["before", "after"])
@pytest.mark.parametrize("operation", ["replace", "unlink"])
def test_a_kill_during_a_change_leaves_the_index_outdated_but_not_wrong(
    operation: str, death: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = indexed(tmp_path)

    def die() -> None:
        one = opened(tmp_path)
        FaultyOs((operation,), 1, death=death).install(monkeypatch)
        put(one, 40)
        one.delete([key(2)])

    child = FORK.Process(target=die)
    child.start()
    child.join(60)
    assert child.exitcode == -9
    for one in (backend, opened(tmp_path)):
        assert one.size() == truth(tmp_path)


def test_a_fork_has_its_own_connection(tmp_path: Path) -> None:
    backend = indexed(tmp_path)
    child = FORK.Process(target=lambda: (put(backend, 30), os._exit(0 if backend.size() == truth(tmp_path) else 1)))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    put(backend, 31)
    assert backend.size() == truth(tmp_path) == (22, 22 * (100 + len(HEAD)))


def test_a_locked_index_blocks_nobody(tmp_path: Path) -> None:
    backend, other = indexed(tmp_path), opened(tmp_path)
    with other._index._transaction():
        assert put(backend, 30)
        # SQLite by itself waits for 5,000 ms.
        assert backend._index._connection.execute("PRAGMA busy_timeout").fetchone()[0] < 100
        assert backend.size() == truth(tmp_path)
    assert backend.size() == truth(tmp_path)


def test_entries_are_ordered_by_last_use_even_if_rows_are_older(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    for number in range(30):
        put(backend, number, used_ns=10_000 + 10 * number)
    uses = [(7, 2 * 10**18), (3, 50_000), (0, 10_155), (8, 10_165)]
    for number, used in uses:
        os.utime(backend._folder.path(key(number)), ns=(used, used))
        # A row knows the first of them, and not the others.
        assert number != 7 or backend.size()[0] == 30
    files = {path.stat().st_mtime_ns: path.name for path in tmp_path.glob("?/?/*")}
    latest = 10**18
    expected = [name for used, name in sorted(files.items(), key=lambda item: (item[0] <= latest, item[0]))]
    assert len(expected) == 30
    assert [name.hex() for name, _ in eviction.least_recently_used(backend._index, backend._folder, latest)] == expected
    # What was looked at is noted, so that it costs nothing the next time.
    times = sorted(path.stat().st_mtime_ns for path in tmp_path.glob("?/?/*"))
    assert [row[3] for row in backend._index.least_recently_used(99, (-1, -1), 2**62)] == times


def test_bytes_reserved_by_dead_writers_are_reclaimed(tmp_path: Path) -> None:
    size = 100 + len(HEAD)
    backend = indexed(tmp_path, max_bytes=40 * size)
    lost = backend._usage
    assert lost.reserve(10 * size, lambda total: True, lambda: None) is not None
    for number in range(20, 60):
        assert put(backend, number)
    assert 30 < truth(tmp_path)[0] <= 40
    assert lost.read().total == truth(tmp_path)[1]


class IndexMachine(RuleBasedStateMachine):
    """Two users with an index, one without, and a process that removes files. Sizes are correct, and the budget holds."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(os.path.join(os.environ["KVPACK_TEST_FOLDER"], os.urandom(8).hex()))
        self.size = 100 + len(HEAD)
        self.users = [opened(self.folder, max_bytes=30 * self.size) for _ in range(2)]

    @rule(user=st.integers(0, 1), number=st.integers(0, 60))
    def put(self, user: int, number: int) -> None:
        assert put(self.users[user], number)

    @rule(user=st.integers(0, 1), number=st.integers(0, 60))
    def touch(self, user: int, number: int) -> None:
        self.users[user].touch([key(number)], time.time_ns())

    @rule(user=st.integers(0, 1), number=st.integers(0, 60))
    def delete(self, user: int, number: int) -> None:
        self.users[user].delete([key(number)])

    @rule(number=st.integers(0, 60))
    def remove(self, number: int) -> None:
        Path(self.users[0]._folder.path(key(number))).unlink(missing_ok=True)

    @rule(user=st.integers(0, 1))
    def collect(self, user: int) -> None:
        self.users[user].collect()

    @rule(user=st.integers(0, 1))
    def lose(self, user: int) -> None:
        for name in index.INDEX_FILES:
            (self.folder / name).unlink(missing_ok=True)

    @invariant()
    def sizes_are_right(self) -> None:
        there = truth(self.folder)
        assert [user.size() for user in self.users] == [there] * 2
        assert there[1] <= 30 * self.size
        count = disk_usage.DiskUsage(str(self.folder / "usage"), lambda _: None).read()
        assert count is None or count.total >= there[1]


@pytest.mark.scenario
def test_sizes_and_budgets_hold_after_any_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    monkeypatch.setenv("KVPACK_TEST_FOLDER", str(tmp_path))
    run_state_machine_as_test(IndexMachine, settings=settings(max_examples=12, stateful_step_count=40, deadline=None))


def _stat(folder: Path) -> dict[str, Any]:
    summary = summarize(opened(folder))
    return {"chunks": summary.identities(), "kinds": summary.kinds, "not read": (summary.unreadable, summary.undecryptable)}


def test_only_new_headers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    for seed in range(3):
        save(store, prompt(3, seed=seed))
    other = open_store(tmp_path, kvpack.Identity("other", "kivi-4"))
    save(other, prompt(2))
    (tmp_path / "0" / "0").mkdir(parents=True, exist_ok=True)
    (tmp_path / "0" / "0" / ("00" * 32)).write_bytes(HEAD + bytes(100))
    expected = _stat(tmp_path)
    assert [(model["name"], recipe, counts["entries"]) for model, recipe, counts in expected["chunks"]] == [
        ("model", store.identity.recipe, 9),
        ("other", other.identity.recipe, 2),
    ]
    assert expected["not read"] == (1, 0)
    read: list[bytes] = []
    real = Directory.peek
    monkeypatch.setattr(Directory, "peek", lambda self, key, **given: read.append(key) or real(self, key, **given))
    assert _stat(tmp_path) == expected
    # What cannot be read is looked at each time: it may be in a while.
    assert read == [bytes(32)]
    # A writer says what it puts.
    save(store, prompt(1, seed=9))
    read.clear()
    assert _stat(tmp_path)["chunks"][0][2]["entries"] == 10
    assert read == [bytes(32)]
    read.clear()
    store.collect()
    assert set(read) <= {bytes(32)}
    for name in index.INDEX_FILES:
        (tmp_path / name).unlink(missing_ok=True)
    monkeypatch.setattr(directory, "MIN_ENTRIES", 100)
    assert _stat(tmp_path)["chunks"][0][2]["entries"] == 10


def test_encrypted_entries_are_not_described(tmp_path: Path) -> None:
    save(open_store(tmp_path, encryption=KEYS), prompt(3))
    assert _stat(tmp_path)["not read"] == (3, 3)
    summary = summarize(opened(tmp_path), cipher=Cipher(KEYS, IDENTITY.tenant))
    assert summary.identities()[0][2]["entries"] == 3
    assert opened(tmp_path).read_descriptions().totals == []


def test_no_round_removes_too_many_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large eviction takes several rounds, between which other processes can proceed."""
    size = 100 + len(HEAD)
    indexed(tmp_path)
    monkeypatch.setattr(eviction, "_MAX_PER_ROUND", 3)
    small, rounds = opened(tmp_path, max_bytes=8 * size), []
    real = eviction.Evictor._remove_batch
    monkeypatch.setattr(eviction.Evictor, "_remove_batch", lambda self, keys, before: rounds.append(len(keys)) or real(self, keys, before))
    assert put(small, 50)
    assert truth(tmp_path) == (8, 8 * size)
    assert max(rounds) == 3
    assert sum(rounds) == 13


def test_space_is_freed_before_it_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process waits for a round. The one whose entry leaves little room makes more, and others use the remaining room."""
    size = 100 + len(HEAD)
    backend = indexed(tmp_path, max_bytes=40 * size)
    monkeypatch.setattr(eviction, "_LOW_FRACTION", 4)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("a writer waits"))
    for number in range(20, 50):
        assert put(backend, number)
    assert 28 < truth(tmp_path)[0] <= 30
    other = opened(tmp_path, max_bytes=40 * size)
    with other._evictor._try_lock() as held:
        assert held
        for number in range(50, 60):
            assert put(backend, number)
    assert 38 < truth(tmp_path)[0] <= 40
    assert put(backend, 60)
    assert 28 < truth(tmp_path)[0] <= 30


def test_impossible_evictions_are_not_retried_for_every_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, rounds = 100 + len(HEAD), []
    backend = indexed(tmp_path, max_bytes=40 * size)
    monkeypatch.setattr(eviction, "_LOW_FRACTION", 4)
    monkeypatch.setattr(eviction.Evictor, "_remove", lambda *given: rounds.append(given) or 0)
    for number in range(20, 39):
        assert put(backend, number)
    assert len(rounds) == 1


def test_a_fault_during_early_eviction_does_not_affect_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 100 + len(HEAD)
    backend = indexed(tmp_path, max_bytes=40 * size)
    monkeypatch.setattr(eviction, "_LOW_FRACTION", 4)

    def failing(*given: Any, **more: Any) -> None:
        raise OSError(errno.EIO, "no round")

    monkeypatch.setattr(eviction.Evictor, "_try_round", failing)
    for number in range(20, 40):
        assert put(backend, number)
    assert truth(tmp_path)[0] == 40
    count = backend._usage.read()
    assert count is not None
    assert count.total == 40 * size


def test_a_round_does_not_list_all_entries_while_others_change_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a folder cannot be marked as listed, it stays stale, but known entries can still be evicted."""
    size = 100 + len(HEAD)
    backend = indexed(tmp_path, max_bytes=20 * size)
    other = opened(tmp_path)
    backend._folder.remove(backend._folder.path(key(0)))
    monkeypatch.setattr(eviction.Evictor, "_evict", lambda *given: pytest.fail("all entries were listed"))
    with other._index._transaction():
        assert not backend._index.refresh()
        assert put(backend, 21)
    assert truth(tmp_path)[0] <= 20
    assert backend.size() == truth(tmp_path)


def test_changes_missed_by_a_busy_index_are_indexed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders need not be listed, because each user remembers its own changes."""
    backend = indexed(tmp_path)
    monkeypatch.setattr(index.Index, "_refresh_folder", lambda *given, **more: pytest.fail("a folder was listed"))
    other = opened(tmp_path)
    with other._index._transaction():
        assert put(backend, 21)
        assert put(backend, 28)
        assert backend.delete([key(3), key(4)]) == {key(3), key(4)}
        assert put(backend, 4, 300)
    assert put(backend, 22)
    assert opened(tmp_path).size() == backend.size() == truth(tmp_path)
    used = backend._index.least_recently_used(100, (-1, -1), 2**62)
    rows = {index_tables.key_from_row(number, rest): size for number, rest, size, _ in used}
    assert rows == {bytes.fromhex(path.name): path.stat().st_size for path in tmp_path.glob("?/?/*")}
    with other._index._transaction():
        assert put(backend, 23)
    backend.close()
    assert other.size() == truth(tmp_path)


def test_a_folder_changed_before_a_missed_change_is_indexed_is_listed(tmp_path: Path) -> None:
    backend, listed = indexed(tmp_path), []
    other = opened(tmp_path)
    with other._index._transaction():
        assert put(backend, 21)
    unaware(other, 28)
    assert put(backend, 22)
    real = backend._index._refresh_folder
    backend._index._refresh_folder = lambda folder, **more: listed.append(folder) or real(folder, **more)  # type: ignore[method-assign]
    assert backend.size() == truth(tmp_path)
    assert listed == [0]


def test_a_folder_changed_during_listing_is_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, changes = indexed(tmp_path), iter(range(21, 70, 7))
    real = index.Index._list_folder

    def changing(self: index.Index, folder: int) -> Any:
        found = real(self, folder)
        if self is backend._index and (number := next(changes, None)) is not None:
            unaware(backend, number)
        return found

    unaware(backend, 14)
    backend._folder.remove(backend._folder.path(key(7)))
    monkeypatch.setattr(index.Index, "_list_folder", changing)
    # A round leaves it for later.
    assert not backend._index.refresh(10.0)
    assert backend._index.exists
    while next(changes, None) is not None:
        pass
    assert backend._index.refresh()
    assert backend.size() == truth(tmp_path)


def test_a_round_evicts_before_it_lists_changes_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, entries = 100 + len(HEAD), []
    # One entry of a few is little here.
    monkeypatch.setattr(eviction, "_LOST_FRACTION", 1)
    backend = indexed(tmp_path, max_bytes=20 * size)
    unaware(opened(tmp_path), 21)
    real = backend._index._refresh_folder

    def counted(folder: int, *, wait: bool) -> bool:
        entries.append(truth(tmp_path)[0])
        return real(folder, wait=wait)

    backend._index._refresh_folder = counted  # type: ignore[method-assign]
    assert put(backend, 22)
    assert len(entries) == 1
    assert entries[0] < 21
    assert backend.size() == truth(tmp_path)


def test_relisting_a_folder_rewrites_only_wrong_rows(tmp_path: Path) -> None:
    backend = indexed(tmp_path)
    (connection,) = [backend._index._open()]
    assert connection is not None
    os.utime(backend._folder.path(key(7)), ns=(5, 5))
    backend._folder.remove(backend._folder.path(key(14)))
    unaware(backend, 21)
    before = connection.total_changes
    assert backend._index.refresh()
    # Of the folder of the keys 0, 7, 14 and 21: one row each is removed, corrected and added, and the folder's own is replaced.
    assert connection.total_changes - before == 4
    assert backend.size() == truth(tmp_path)
    assert backend._index.least_recently_used(1, (-1, -1), 2**62)[0][3] == 5
