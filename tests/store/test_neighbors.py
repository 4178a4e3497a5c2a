"""A store with neighbors: other users, root, other PID namespaces, and files that have an entry's name but are no entries."""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import xxhash

from kvpack import cli
from kvpack.formats.errors import InvalidParameter
from kvpack.store import directory, trust
from kvpack.store.backend import FoundEntry
from kvpack.store.entries import FEATURE
from support.file_parts import edit
from support.parts import Parts
from support.store_caches import CHUNK, cache, entry_of, is_same_prefix, open_store, prompt, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOBODY, ANOTHER = 65534, 65533
TESTS = Path(__file__).parents[1]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="acting as another user needs root")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder that every user can access, for the stores of several users."""
    with open_to_all(tmp_path):
        yield tmp_path


class open_to_all:
    """A context in which every user may traverse the folders above ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._modes: list[tuple[Path, int]] = []

    def __enter__(self) -> None:
        for folder in (self._path, *self._path.parents):
            status = folder.stat()
            if status.st_uid == os.geteuid() and not status.st_mode & stat.S_IXOTH:
                self._modes.append((folder, stat.S_IMODE(status.st_mode)))
                folder.chmod(stat.S_IMODE(status.st_mode) | stat.S_IXOTH)

    def __exit__(self, *_: object) -> None:
        for folder, mode in self._modes:
            folder.chmod(mode)


class user:
    """A context that runs its block as another user."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> None:
        os.setegid(self._number)
        os.seteuid(self._number)

    def __exit__(self, *_: object) -> None:
        os.seteuid(0)
        os.setegid(0)


def folder_of(shared: Path, number: int, mode: int = 0o755) -> Path:
    folder = shared / f"of-{number}"
    folder.mkdir()
    os.chown(folder, number, number)
    folder.chmod(mode)
    return folder


def let_all_read(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        os.chmod(parent, 0o755)
        for name in names:
            os.chmod(os.path.join(parent, name), 0o644)


JUNK: dict[str, Callable[[str], Any]] = {
    "nothing": lambda path: Path(path).write_bytes(b""),
    "zeros": lambda path: Path(path).write_bytes(bytes(8320)),
    "junk": lambda path: Path(path).write_bytes(os.urandom(8320)),
    "a text": lambda path: Path(path).write_text("not an entry"),
    "another safetensors file": lambda path: Path(path).write_bytes((2).to_bytes(8, "little") + b"{}"),
    "only a beginning": lambda path: os.truncate(path, 4000),
    "a folder": lambda path: (os.unlink(path), os.mkdir(path)),
    "a full folder": lambda path: (os.unlink(path), os.mkdir(path), Path(path, "something").write_bytes(b"mine")),
    "a link to nothing": lambda path: (os.unlink(path), os.symlink("/nowhere", path)),
    "a link to another entry": lambda path: (os.rename(path, f"{path}.real"), os.symlink(f"{path}.real", path)),
    "a FIFO": lambda path: (os.unlink(path), os.mkfifo(path)),
}


@pytest.mark.scenario
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("what", JUNK)
@pytest.mark.parametrize("encrypted", [False, True])
def test_invalid_entries_are_replaced_by_save(what: str, number: int, encrypted: bool, tmp_path: Path) -> None:
    """No load is needed first, anywhere in the chain. ``save`` reports only chunks that a load then finds."""
    if encrypted:
        pytest.importorskip("cryptography")
    options = {"encryption": {"k": bytes(32)}} if encrypted else {}
    ids = prompt(3)
    whole = save(open_store(tmp_path, **options), ids)
    JUNK[what](entry_of(open_store(tmp_path), ids, number))
    store = open_store(tmp_path, **options)
    if what != "only a beginning":
        assert store.match(ids) == number * CHUNK
    assert store.save(ids, whole) == 3 * CHUNK
    n, found = open_store(tmp_path, **options).load(ids)
    assert n == 3 * CHUNK
    assert is_same_prefix(found, whole)


@pytest.mark.parametrize("what", JUNK)
def test_invalid_entries_after_a_gap_are_replaced_too(what: str, tmp_path: Path) -> None:
    ids = prompt(3)
    whole = save(open_store(tmp_path), ids)
    store = open_store(tmp_path)
    JUNK[what](entry_of(store, ids, 2))
    os.unlink(entry_of(store, ids, 0))
    assert store.save(ids, whole) == 3 * CHUNK
    assert is_same_prefix(store.load(ids)[1], whole)


def test_an_entry_under_another_name_is_replaced(tmp_path: Path) -> None:
    store, ids, others = open_store(tmp_path), prompt(2), prompt(2, seed=5)
    whole = save(store, ids)
    save(store, others)
    os.replace(entry_of(store, others, 1), entry_of(store, ids, 1))
    again = open_store(tmp_path)
    assert again.save(ids, whole) == 2 * CHUNK
    assert is_same_prefix(again.load(ids)[1], whole)


def test_objects_larger_than_entries_are_replaced(tmp_path: Path) -> None:
    ids = prompt(2)
    whole = save(open_store(tmp_path), ids)
    os.truncate(entry_of(open_store(tmp_path), ids, 1), 2**31)
    os.unlink(entry_of(open_store(tmp_path), ids, 0))
    store = open_store(tmp_path)
    assert store.save(ids, whole) == 2 * CHUNK
    assert is_same_prefix(store.load(ids)[1], whole)


def test_unreplaceable_entries_are_not_reported_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ids = open_store(tmp_path), prompt(3)
    whole = save(store, ids)
    path = entry_of(store, ids, 1)
    os.unlink(path)
    os.mkdir(path)
    monkeypatch.setattr(directory.Directory, "_remove_junk", lambda self, path: None)
    again = open_store(tmp_path)
    assert again.save(ids, whole) == again.match(ids) == again.load(ids)[0] == CHUNK


@pytest.mark.parametrize("other", ["good", "missing", "damaged"])
def test_a_front_damaged_in_one_tier_is_replaced_by_save(other: str, tmp_path: Path) -> None:
    ids, folders = prompt(3), [tmp_path / "a", tmp_path / "b"]
    whole = save(open_store(folders), ids)
    for folder in folders if other == "damaged" else folders[:1]:
        with open(entry_of(open_store(folder), ids, 1), "r+b") as file:
            file.seek(5000)
            file.write(b"damage")
    if other == "missing":
        os.unlink(entry_of(open_store(folders[1]), ids, 1))
    store = open_store(folders)
    assert store.save(ids, whole) == 3 * CHUNK
    again = open_store(folders)
    assert is_same_prefix(again.load(ids)[1], whole)
    assert again.load(ids)[0] == 3 * CHUNK
    assert again.counters()["damaged_entries"] == 0


def test_a_nonempty_folder_with_an_entrys_name_loses_nothing(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(1)
    whole = save(store, ids)
    JUNK["a full folder"](entry_of(store, ids, 0))
    assert store.save(ids, whole) == CHUNK
    assert [path.read_bytes() for path in (tmp_path / "unfinished").glob("*/something")] == [b"mine"]


def test_an_entry_of_a_later_version_is_neither_stored_nor_replaced(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(3)
    whole = save(store, ids)
    path = Path(entry_of(store, ids, 1))
    parts = Parts.of(path.read_bytes())
    edit("required", ["of-a-later-version"])(parts)
    later = parts.joined()
    path.write_bytes(later)
    again = open_store(tmp_path)
    assert again.save(ids, whole) == CHUNK
    assert path.read_bytes() == later


def test_an_encrypting_writer_replaces_unencrypted_entries(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    ids = prompt(2)
    whole = save(open_store(tmp_path), ids)
    secret = open_store(tmp_path, encryption={"k": bytes(32)})
    assert secret.save(ids, whole) == 2 * CHUNK
    assert is_same_prefix(secret.load(ids)[1], whole)
    plain = open_store(tmp_path)
    assert plain.save(ids, whole) == 0
    assert secret.load(ids)[0] == 2 * CHUNK


def test_a_valid_entry_that_replaced_a_damaged_one_is_kept(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(1)
    whole = save(store, ids)
    (key,) = store.keys(ids)
    store._backend.discard(key, FoundEntry(b"what was read before another process put this one", 0))
    assert is_same_prefix(store.load(ids)[1], whole)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("", "is empty"),
        ("file://", "is empty"),
        ("a\0b", "cannot contain a zero byte"),
        (5, "is of type int"),
        (None, "is of type NoneType"),
        ("{file}", "is not a folder"),
        ("{file}/below", "cannot be a store: Not a directory"),
        ("/" + "x" * 300, "cannot be a store: File name too long"),
        ("{loop}", "cannot be a store: Too many levels"),
    ],
)
def test_locations_that_cannot_be_folders_are_refused(location: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    if isinstance(location, str):
        location = location.format(file=tmp_path / "file", loop=tmp_path / "loop") if "{" in location else location
    with pytest.raises(InvalidParameter, match=message):
        open_store(location)


@as_root
@pytest.mark.parametrize("below", ["", "store"])
def test_unreachable_folders_are_refused(below: str, shared: Path) -> None:
    closed = folder_of(shared, ANOTHER, 0o700)
    with user(NOBODY), pytest.raises(InvalidParameter, match="cannot be a store: Permission denied"):
        open_store(closed / below)


@as_root
def test_another_users_folder_is_read_with_care(shared: Path) -> None:
    """Entries that another user may change are copied, and their values are checked.

    The user's own entries are mapped without these checks.
    """
    folder, ids = folder_of(shared, ANOTHER), prompt(3)
    with user(ANOTHER):
        mine = open_store(folder)
        whole = save(mine, ids)
        assert mine._backend.is_private
        assert not mine._reader.check_values
    let_all_read(folder)
    for number in (NOBODY, 0):
        with user(number):
            theirs = open_store(folder)
            assert not theirs._backend.is_private
            assert theirs._reader.check_values
            n, found = theirs.load(ids)
            assert n == theirs.match(ids) == 3 * CHUNK
            assert is_same_prefix(found, whole)
            with open("/proc/self/maps") as maps:
                assert str(folder) not in maps.read()
            assert theirs.counters()["faults"] == {}
    with user(NOBODY):
        other = prompt(1, seed=1)
        assert theirs.save(other, cache(len(other))) == 0
        assert theirs.save(ids, whole) == 3 * CHUNK
        assert theirs.pin(ids) == theirs.delete(ids) == 0
        theirs.collect()
        assert open_store(folder).load(ids)[0] == 3 * CHUNK


@as_root
def test_a_path_of_maximum_length_works_for_readers(shared: Path) -> None:
    """An entry has the longest path in a store, so if it fits, all other paths do."""
    longest = 4095 - len("/3/f/") - 64
    path = str(shared)
    while len(path) < longest:
        part = min(200, longest - len(path) - 1)
        part -= longest - len(path) - 1 - part == 1
        path += "/" + "d" * part
        os.mkdir(path)
    assert len(path) == longest
    os.chown(path, ANOTHER, ANOTHER)
    ids = prompt(2)
    with user(ANOTHER):
        whole = save(open_store(path, max_bytes=10**6), ids)
    for parent, _, names in os.walk(path):
        os.chmod(parent, 0o755)
        for name in names:
            os.chmod(os.path.join(parent, name), 0o644)
    with user(NOBODY):
        store = open_store(path, max_bytes=10**6)
        n, found = store.load(ids)
        assert n == store.match(ids) == 2 * CHUNK
        assert is_same_prefix(found, whole)
        assert store.counters()["faults"] == {}


@as_root
def test_bad_values_in_another_users_folder_are_refused(shared: Path) -> None:
    """The owner of the folder may plant NaN scales with correct digests."""
    folder, ids = folder_of(shared, ANOTHER), prompt(1)
    with user(ANOTHER):
        save(open_store(folder), ids)
    path = Path(entry_of(open_store(folder), ids, 0))
    parts = Parts.of(path.read_bytes())
    number = parts.tensor("0.k.scales")
    parts.tensors[number] = numpy.full(len(parts.tensors[number]) // 2, numpy.nan, numpy.float16).tobytes()
    data, named = parts.joined(), parts.header["ignorable"][FEATURE]
    payload = xxhash.xxh3_128_digest(data[data.index(parts.tensors[0]) :])
    parts.header["ignorable"][FEATURE] = named[:64] + payload + named[80:]
    path.write_bytes(parts.joined())
    os.chown(path, ANOTHER, ANOTHER)
    let_all_read(folder)
    with user(NOBODY):
        store = open_store(folder)
        assert store.load(ids) == (0, None)
        assert list(store.counters()["faults"]) == ["load InvalidPayload"]
        assert store.save(ids, cache(len(ids))) == 0, "an entry that cannot be loaded was reported as stored"


@as_root
@pytest.mark.parametrize("what", ["file", "folder", "mode of a file", "mode of a folder"])
def test_files_and_subfolders_of_others_are_ignored(what: str, shared: Path) -> None:
    folder, ids = folder_of(shared, ANOTHER, 0o700), prompt(1)
    with user(ANOTHER):
        whole = save(open_store(folder), ids)
    path = entry_of(open_store(folder), ids, 0)
    place = path if "file" in what else os.path.dirname(path)
    if "mode" in what:
        os.chmod(place, 0o777)
    else:
        os.chown(place, NOBODY, NOBODY)
        let_all_read(folder)
        folder.chmod(0o755)
    with user(ANOTHER):
        store = open_store(folder)
        assert store.match(ids) == 0
        assert store.load(ids) == (0, None)
        assert store.counters()["faults"]["get EPERM"] == 1
        # In a folder of one's own a file can be replaced; a subfolder of others cannot be trusted with one.
        stored = CHUNK if "file" in what else 0
        assert store.save(ids, whole) == store.match(ids) == store.load(ids)[0] == stored


@as_root
def test_files_written_by_root_belong_to_the_stores_owner(shared: Path) -> None:
    folder, ids = folder_of(shared, NOBODY, 0o700), prompt(2)
    with open_store(folder, max_bytes=10**6) as store:
        store.collect()
        whole = save(store, ids)
        store.pin(ids[:CHUNK])
        store.collect()
        assert store.counters()["faults"] == {}
    owners = {(parent, name): os.lstat(os.path.join(parent, name)) for parent, dirs, names in os.walk(folder) for name in (*dirs, *names)}
    assert len(owners) > 8
    assert {status.st_uid for status in owners.values()} == {NOBODY}
    assert {status.st_gid for status in owners.values()} == {NOBODY}
    with user(NOBODY):
        mine = open_store(folder, max_bytes=10**6)
        assert is_same_prefix(mine.load(ids)[1], whole)
        other = prompt(2, seed=1)
        save(mine, other)
        assert mine.unpin(ids[:CHUNK])
        assert mine.delete(ids) == 2
        mine.collect()
        assert mine.counters()["faults"] == {}


@as_root
def test_a_store_previously_used_by_root_is_repaired(shared: Path) -> None:
    """An earlier version that ran as root left a file that the owner may remove."""
    folder, ids = folder_of(shared, NOBODY, 0o700), prompt(2)
    with user(NOBODY):
        save(open_store(folder, max_bytes=10**6), ids)
    for name in ("lock", "usage"):
        os.chown(folder / name, 0, 0)
    with user(NOBODY):
        store = open_store(folder, max_bytes=10**6)
        save(store, prompt(2, seed=1))
        store.collect()
        assert store.counters()["faults"] == {}


@as_root
def test_root_follows_no_links_of_an_owner(shared: Path) -> None:
    target = shared / "of-root"
    for number, (name, plant) in enumerate(itertools.product(("usage", "lock"), (os.symlink, os.link))):
        folder = folder_of(shared, NOBODY - number, 0o700)
        target.write_bytes(b"root's")
        plant(target, folder / name)
        store = open_store(folder, max_bytes=10**6)
        store.collect()
        assert store.save(prompt(1), cache(37)) == 0
        assert target.read_bytes() == b"root's"
        assert target.stat().st_uid == 0


NAMESPACE = """
import json, os, sys
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from support.store_caches import CHUNK, cache, open_store, prompt
store = open_store(sys.argv[1])
whole = cache(2 * CHUNK + 5)
replace = os.replace
def wait(source, target):
    os.replace = replace
    print("written", flush=True)
    sys.stdin.readline()
    replace(source, target)
os.replace = wait
saved = sum(store.save(prompt(2, seed=seed), whole) for seed in range(60))
print(json.dumps([saved, store.counters()["faults"]]))
"""


def in_a_namespace() -> list[str]:
    command = ["unshare", "--pid", "--fork", "--mount-proc"]
    if os.geteuid():
        command.insert(1, "--map-root-user")
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not allow PID namespaces")
    return command


@pytest.mark.scenario
def test_writers_in_another_pid_namespace_lose_nothing(tmp_path: Path) -> None:
    script = [sys.executable, "-c", NAMESPACE, str(tmp_path), str(TESTS)]
    opened = 0
    with subprocess.Popen([*in_a_namespace(), *script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        # The first entry is written and not yet in its place when the first of the others sweeps.
        assert child.stdout.readline() == "written\n"
        open_store(tmp_path).collect()
        child.stdin.write("\n")
        child.stdin.flush()
        while child.poll() is None:
            open_store(tmp_path).collect()
            opened += 1
        saved, faults = json.loads(child.stdout.readline())
    assert opened > 3
    assert (saved, faults) == (60 * 2 * CHUNK, {})


def test_reading_does_not_remove_unfinished_files(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(1)
    save(store, ids)
    left = [tmp_path / "unfinished" / name for name in (".kvpack-999999999-aa-locked.tmp", ".kvpack-999999999-bb.tmp")]
    for path in left:
        path.write_bytes(b"part")
        os.utime(path, (time.time() - 10**6,) * 2)
    for action in ("ls", "stat", "verify"):
        assert cli.main(["store", action, str(tmp_path), "--json"]) == 0
        assert all(path.exists() for path in left)
    assert cli.main(["store", "gc", str(tmp_path), "--json"]) == 0
    assert [path.exists() for path in left] == [False, True]


@pytest.mark.scenario
def test_violations_of_these_rules_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store without locks loses entries that it is writing while other stores open it."""
    monkeypatch.setattr("kvpack.store.eviction.remove_abandoned", lambda path, old: os.unlink(path) or True)
    with pytest.raises(AssertionError):
        test_writers_in_another_pid_namespace_lose_nothing(tmp_path)


@as_root
def test_a_missing_owner_check_is_noticed(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust.Trust, "_check", lambda self, path, status: None)
    with pytest.raises(AssertionError):
        test_files_and_subfolders_of_others_are_ignored("file", shared)


SPELLINGS = {
    "short": lambda name: name[:-1],
    "long": lambda name: name + "0",
    "upper case": lambda name: name.upper(),
    "spaces": lambda name: " ".join(name[at : at + 2] for at in range(0, len(name), 2)),
    "a space after it": lambda name: name + " ",
    "a space before it": lambda name: " " + name,
    "a dot before it": lambda name: "." + name[1:],
    "other digits": lambda name: "\u0663" * 64,
    "0x": lambda name: "0x" + name[2:],
    "no hexadecimal": lambda name: "z" * 64,
    "one byte": lambda name: "ab",
    "a line break": lambda name: name + "\n",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_misspelled_names_are_not_entries(spelling: str, tmp_path: Path) -> None:
    """They are not listed or evicted, and do not count toward the budget."""
    store, ids = open_store(tmp_path), prompt(2)
    whole = save(store, ids)
    entry = Path(entry_of(store, ids, 0))
    stats = store.stats()
    other = entry.parent / SPELLINGS[spelling](entry.name)
    other.write_bytes(b"x" * 10**6)
    # A right name in the folder of another.
    moved = next(path for path in (tmp_path / f"{first:x}" / "0" for first in range(16)) if path != entry.parent)
    moved.mkdir(parents=True, exist_ok=True)
    moved.chmod(0o700)
    (moved / entry.name).write_bytes(b"x" * 10**6)
    again = open_store(tmp_path, max_bytes=stats["bytes"])
    assert (again.stats()["entries"], again.stats()["bytes"]) == (2, stats["bytes"])
    assert len({entry.key for entry in again._backend.list()}) == len(list(again._backend.list())) == 2
    again.collect()
    assert is_same_prefix(again.load(ids)[1], whole)
    assert again.counters()["faults"] == {}
    small = open_store(tmp_path, max_bytes=1)
    small.collect()
    assert small.stats()["entries"] == 0
    assert other.exists()


def test_a_pin_of_a_terabyte_is_a_fault_and_is_not_read(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(2)
    save(store, ids)
    store.pin(ids)
    with open(tmp_path / "holds" / ("0" * 64), "wb") as file:
        file.truncate(2**40)
    small = open_store(tmp_path, max_bytes=1)
    small.collect()
    assert small.counters()["faults"] == {"pinned LimitExceeded": 1}
    assert small.stats()["entries"] == 2, "the other pins were ignored"
