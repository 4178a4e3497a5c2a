"""A system fault or a kill at any step costs at most a miss, and the store is intact afterwards."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack.file import atomic
from kvpack.store import directory
from support.faulty_os import CHANGES, ERRORS, OPERATIONS, STRIDE, FaultyOs, open_files
from support.store_caches import CHUNK, cache, entries, is_same_prefix, open_store, prompt
from support.store_stress import FORK

if TYPE_CHECKING:
    from collections.abc import Iterator

ENTRY_BYTES = 8320
BUDGET = 4 * ENTRY_BYTES
PROMPTS = {seed: prompt(3, first=1, seed=seed) for seed in (1, 2)}
WHOLE = {seed: cache(len(ids), seed=0) for seed, ids in PROMPTS.items()}
"""Both prompts share a chunk, so they are saved with the same values."""


def use(store: kvpack.Store) -> None:
    """Perform all operations of a store, with eviction, and check the caches that it loads."""
    for seed, ids in PROMPTS.items():
        assert store.save(ids, WHOLE[seed]) <= 3 * CHUNK
        n, found = store.load(ids)
        assert found is None if n == 0 else is_same_prefix(found, WHOLE[seed])
    store.pin(PROMPTS[1])
    assert store.match(PROMPTS[1]) <= 3 * CHUNK
    store.unpin(PROMPTS[1])
    store.delete(PROMPTS[2], start=2 * CHUNK)
    store.collect()
    store.stats()


def check(folder: Path) -> int:
    """Check that a store is intact: entries are right, no other files remain, and it works. Return the number of tokens found."""
    store = open_store(folder, max_bytes=BUDGET, durable=True)
    store.collect()
    assert not os.path.isdir(folder / "unfinished") or os.listdir(folder / "unfinished") == []
    assert sum(os.stat(path).st_size for path in entries(folder)) <= BUDGET
    total = 0
    for seed, ids in PROMPTS.items():
        n, found = store.load(ids)
        assert found is None if n == 0 else is_same_prefix(found, WHOLE[seed])
        total += n
    assert store.counters()["damaged_entries"] == 0
    assert store.counters()["faults"] == {}
    assert store.save(PROMPTS[1], WHOLE[1]) == 3 * CHUNK
    return total


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a store's folder, in memory if possible, because many steps would wait for the disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as parent:
        yield Path(parent) / "store"


def run_with_fault(folder: Path, fault: FaultyOs, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Use a store with one fault and check it. Return True if the fault occurred."""
    shutil.rmtree(folder, ignore_errors=True)
    before = open_files()
    with monkeypatch.context() as patch:
        fault.install(patch)
        try:
            store = open_store(folder, max_bytes=BUDGET, durable=True, min_free=1)
        except kvpack.formats.errors.InvalidParameter:
            # A folder that cannot be reached is no place for a store, which is told when it is opened.
            if fault.code != errno.EACCES:
                raise
        else:
            use(store)
    # Files that an earlier test left to the garbage collector may close meanwhile.
    assert open_files() <= before, "a descriptor is left open"
    check(folder)
    return fault.calls >= fault.number


@pytest.mark.scenario
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_fault_raises_an_error_or_does_harm(operation: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th call of every operation fails, once or permanently, for every small n and at growing intervals."""
    reached, number, tried = True, 1, 0
    while reached:
        code = ERRORS[tried % len(ERRORS)]
        sticky = tried // len(ERRORS) % 2 == 1 or tried % 3 == 2
        reached = run_with_fault(folder, FaultyOs((operation,), number, code, sticky), monkeypatch)
        tried += 1
        number += 1 if number < 4 else number
    assert tried > 3


@pytest.mark.scenario
@pytest.mark.parametrize("operation", ["pwrite", "writev", "pread"])
def test_short_writes_and_reads_lose_nothing(operation: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the first calls processes fewer bytes than requested, in some cases all later ones do too. The rest follows."""
    for number, sticky in [(number, False) for number in (1, 2, 3, 5, 8, 11)] + [(1, True), (4, True)]:
        fault = FaultyOs((operation,), number, sticky=sticky, short=True)
        run_with_fault(folder, fault, monkeypatch)
        shutil.rmtree(folder)
        with monkeypatch.context() as patch:
            FaultyOs((operation,), number, sticky=sticky, short=True).install(patch)
            store = open_store(folder, durable=True)
            for seed, ids in PROMPTS.items():
                assert store.save(ids, WHOLE[seed]) == 3 * CHUNK
                assert is_same_prefix(store.load(ids)[1], WHOLE[seed])
            assert store.counters()["faults"] == {}


@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
def test_a_system_that_refuses_everything_causes_misses(code: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with_fault(folder, FaultyOs(OPERATIONS, 1, code, sticky=True), monkeypatch)
    with monkeypatch.context() as patch:
        store = open_store(folder)
        FaultyOs(OPERATIONS, 1, code, sticky=True).install(patch)
        assert store.load(PROMPTS[1]) == (0, None)
        assert store.save(PROMPTS[2], WHOLE[2]) == store.match(PROMPTS[2])
        faults = store.counters()["faults"]
    assert faults[f"get {errno.errorcode[code]}"] == 1


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "no memory"), ValueError("mmap length"), MemoryError()], ids=repr)
def test_a_file_that_cannot_be_mapped_is_a_miss(error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(folder)
    store.save(PROMPTS[1], WHOLE[1])

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(directory, "map_file", refuse)
        assert store.load(PROMPTS[1]) == (0, None)
    assert store.load(PROMPTS[1])[0] == 3 * CHUNK


def _used_until_killed(folder: Path, fault: FaultyOs) -> None:
    patch = pytest.MonkeyPatch()
    fault.install(patch)
    use(open_store(folder, max_bytes=BUDGET, durable=True))


@pytest.mark.scenario
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_any_step_of_put_and_evict_leaves_a_consistent_store(moment: str, folder: Path) -> None:
    number, found = {"before": 1, "after": STRIDE // 2 + 1}[moment], []
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        child = FORK.Process(target=_used_until_killed, args=(folder, FaultyOs(CHANGES, number, death=moment)))
        child.start()
        child.join(600)
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        found.append(check(folder))
        number += STRIDE
    assert number > 60
    # Early kills leave nothing, later ones what was finished.
    assert found[0] == 0
    assert max(found) >= 3 * CHUNK


def test_a_read_only_folder_can_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writable = open_store(folder)
    writable.save(PROMPTS[1], WHOLE[1])
    assert writable.pin(PROMPTS[1], owner="earlier") == 3 * CHUNK
    changes = ("pwrite", "ftruncate", "writev", "fsync", "replace", "unlink", "mkdir", "utime")
    FaultyOs(changes, 1, errno.EROFS, sticky=True).install(monkeypatch)
    store = open_store(folder, max_bytes=BUDGET)
    for _ in range(2):
        n, found = store.load(PROMPTS[1])
        assert n == store.match(PROMPTS[1]) == 3 * CHUNK
        assert is_same_prefix(found, WHOLE[1])
    assert store.save(PROMPTS[2], WHOLE[2]) == CHUNK
    assert store.pin(PROMPTS[1]) == 0
    assert not store.unpin(PROMPTS[1])
    assert store.delete(PROMPTS[1]) == 0
    assert set(store.counters()["faults"]) == {f"{what} EROFS" for what in ("touch", "put", "pin", "unpin", "delete")}


def test_a_removed_folder_is_a_miss(folder: Path) -> None:
    store = open_store(folder, max_bytes=BUDGET)
    store.save(PROMPTS[1], WHOLE[1])
    shutil.rmtree(folder)
    assert store.load(PROMPTS[1]) == (0, None)
    assert store.save(PROMPTS[1], WHOLE[1]) == 3 * CHUNK
    assert store.load(PROMPTS[1])[0] == 3 * CHUNK


VARIANTS = ("as it is", "leaves unfinished files", "raises")
FULL_DISK = """
import json, os, subprocess, sys
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
import kvpack.store, support.store_caches
# One process after another: they share what is imported, and nothing else.
for variant in sys.argv[3:]:
    place = os.path.join(sys.argv[1], variant)
    os.mkdir(place)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k,mode=700", "none", place], check=True)
    child = os.fork()
    if not child:
        sys.stdout = open(place + ".out", "w")
        sys.stderr = open(place + ".err", "w")
        break
    os.waitpid(child, 0)
else:
    sys.exit()
if variant == "leaves unfinished files":
    from kvpack.file import atomic
    atomic.os = type("Os", (), {"__getattr__": lambda self, name: getattr(os, name), "unlink": lambda self, path: None})()
elif variant == "raises":
    from kvpack.store.counters import Counters
    Counters.fault = lambda self, operation, error: (_ for _ in ()).throw(error)
from support.store_caches import CHUNK, cache, entries, is_same_prefix, open_store, prompt
folder = os.path.join(place, "store")
store = open_store(folder)
seed, saved = 0, []
while True:
    ids = prompt(2, seed=seed)
    whole = cache(len(ids), seed=seed)
    if store.save(ids, whole) < 2 * CHUNK:
        break
    saved.append((ids, whole))
    seed += 1
right = sum(store.load(ids)[0] == 2 * CHUNK and is_same_prefix(store.load(ids)[1], whole) for ids, whole in saved)
left = os.listdir(os.path.join(folder, "unfinished"))
# Two prompts make room for one: what the store writes to find its entries takes room, too.
for old, _ in saved[:2]:
    store.delete(old)
again = store.save(ids, whole)
print(json.dumps([len(saved), right, left, store.counters()["faults"], again, store.load(ids)[0]]))
"""


@pytest.fixture(scope="module")
def full_disks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run each variant of the program on its own full disk, and return a folder with their output and errors."""
    folder = tmp_path_factory.mktemp("disks")
    command = ["unshare", "--map-root-user", "--mount"] if os.geteuid() else ["unshare", "--mount"]
    (folder / "try").mkdir()
    if subprocess.run([*command, "mount", "-t", "tmpfs", "none", folder / "try"], capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here: neither root nor user namespaces are allowed")
    script = [sys.executable, "-c", FULL_DISK, folder, Path(__file__).parents[1], *VARIANTS]
    subprocess.run([*command, *script], check=True)
    return folder


def on_a_full_disk(folder: Path, variant: str = "as it is") -> list[Any]:
    errors = (folder / f"{variant}.err").read_text()
    assert "Traceback" not in errors, errors
    found: list[Any] = json.loads((folder / f"{variant}.out").read_text())
    return found


def check_full_disk(saved: int, right: int, left: list[str], faults: dict[str, int], again: int, loaded: int) -> None:
    assert saved == right > 20
    assert left == []
    assert set(faults) == {"put ENOSPC"}
    assert (again, loaded) == (2 * CHUNK, 2 * CHUNK)


@pytest.mark.scenario
def test_a_full_disk_is_a_miss(full_disks: Path) -> None:
    check_full_disk(*on_a_full_disk(full_disks))


@pytest.mark.scenario
@pytest.mark.parametrize(("variant", "seen"), [("leaves unfinished files", r"\.tmp'\] == \[\]"), ("raises", "No space left on device")])
def test_errors_on_a_full_disk_are_noticed(variant: str, seen: str, full_disks: Path) -> None:
    with pytest.raises(AssertionError, match=seen):
        check_full_disk(*on_a_full_disk(full_disks, variant))


@pytest.mark.parametrize("mutant", ["in place", "no clean-up", "raises", "believes short writes"])
def test_violations_of_these_rules_are_noticed(mutant: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = directory.write_file

    def write_in_place(path: str, pieces: Any, *, complete: Any, **_: Any) -> int:
        descriptor = directory.os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for piece in pieces:
            directory.os.writev(descriptor, [piece])
        complete(descriptor)
        directory.os.close(descriptor)
        return 0

    def leave_behind(path: str, *args: Any, unfinished: str, **options: Any) -> int:
        Path(unfinished, f".kvpack-{os.getpid()}-left.tmp").write_bytes(b"left")
        return real(path, *args, unfinished=unfinished, **options)

    if mutant == "believes short writes":
        monkeypatch.setattr("kvpack.file.atomic._write_all", lambda descriptor, pieces, _: atomic.os.writev(descriptor, pieces))
        with pytest.raises(AssertionError):
            test_short_writes_and_reads_lose_nothing("writev", folder, monkeypatch)
        return
    if mutant == "raises":
        monkeypatch.setattr("kvpack.store.counters.Counters.fault", lambda self, operation, error: (_ for _ in ()).throw(error))
        with pytest.raises(OSError, match="Input/output"):
            run_with_fault(folder, FaultyOs(("open",), 3, errno.EIO), monkeypatch)
        return
    if mutant == "no clean-up":
        monkeypatch.setattr(directory, "write_file", leave_behind)
        with pytest.raises(AssertionError, match="unfinished"):
            run_with_fault(folder, FaultyOs(("open",), 10**9), monkeypatch)
        return
    monkeypatch.setattr(directory, "write_file", write_in_place)
    with pytest.raises(AssertionError):
        test_a_kill_at_any_step_of_put_and_evict_leaves_a_consistent_store("before", folder)
