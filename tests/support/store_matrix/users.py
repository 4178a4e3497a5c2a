"""Involve a second user: root, or a neighbor who owns the folder, writes arbitrary data, or truncates loaded files.

For folders, the tests must run as root, because they switch between two unprivileged users. A server does not need users, because all of
its clients have the same rights.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import kvpack
from kvpack.cli import main as command_line
from support.store_matrix import planted
from support.store_matrix.cells import Cell, fork, read_notes
from support.store_matrix.kinds import BUDGET, KEYS, Place, all_paths
from support.store_matrix.oracle import CHUNK, BrokenGuarantee, check, chunks, compare, nonzero_counters, packed_prompt, prepare, prompt
from support.store_matrix.uses import (
    PINNED_PROMPTS,
    check_intact,
    check_usable,
    perform_each_operation,
    perform_random_operation,
    save_and_pin,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.store_matrix.cells import Note

ALICE, BOB = 54_321, 54_322
MAX_GROWTH = 64 * 2**20
"""Largest amount of memory in bytes that a planted entry may take."""
VICTIM = (0, 2)
"""The prompt (identity, number) of which one chunk is replaced by planted objects."""


def check_users(place: Place, cell: Cell, count: int, seed: int = 0) -> None:
    """Plant ``count`` objects in turn, and let root and another user do whatever their rights permit."""
    prepare()
    planted.prepare(*VICTIM)
    if place.server is not None:
        for number in range(count):
            on_server = planted.ON_SERVERS[(seed * count + number) % len(planted.ON_SERVERS)]
            with cell.recording_problems(f"planting with another client: {on_server.__name__}"):
                _check_planted_by_client(place, cell, on_server)
            cell.report_done()
    if not place.folders:
        return
    if os.geteuid():
        cell.skipped = "running as two users requires root"
        return
    # Import lazily imported modules now, because the two users may not be able to read their files.
    place.clear()
    perform_each_operation(place)
    _check_commands(place)
    os.chmod(place.root, 0o755)
    for number in range(count):
        plant = planted.IN_FOLDERS[(seed * count + number) % len(planted.IN_FOLDERS)]
        for folder in range(len(place.folders)):
            _check_own_folder(place, cell, plant, folder)
            _check_shared_folder(place, cell, plant, folder)
            cell.report_done(2)
    _check_root_collects(place, cell, seed)
    _check_other_folder(place, cell)
    cell.report_done(2)


def _run_as(uid: int, place: Place, cell: Cell, what: str, work: Callable[[Note], None]) -> None:
    """Do ``work`` as the user ``uid``, and record failures."""

    def become(note: Note) -> None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        os.umask(0o022)
        try:
            work(note)
        except BaseException as error:
            raise BrokenGuarantee(f"{what}: {type(error).__name__}: {error}") from error

    notes = str(place.root / "notes")
    Path(notes).touch()
    os.chmod(notes, 0o666)
    _, status = os.waitpid(fork(become, notes), 0)
    read_notes(notes, cell)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):
        cell.problem(f"{what}: the process exited with code {code}")


def _empty_place(place: Place, uid: int, mode: int = 0o700) -> Place:
    """Return the place with empty folders that belong to ``uid``."""
    place.clear()
    for folder in place.folders:
        os.mkdir(folder, mode)
        os.chown(folder, uid, uid)
        os.chmod(folder, mode)
    return replace(place, budget=None)


def _check_own_folder(place: Place, cell: Cell, plant: planted.Plant, folder: int) -> None:
    """Check an object that root or a fault has put in the user's own folder under the name of an entry."""
    own = _empty_place(place, ALICE)
    what = f"{plant.__name__} in the user's own folder"
    _run_as(ALICE, own, cell, what, lambda note: save_and_pin(own))

    def meet(note: Note) -> None:
        with _limit_growth():
            _use_planted(own)
            _check_commands(own)
        # Entries that another key may decrypt also stay (spec/store.md, Encrypted entries).
        if plant not in planted.KEPT_PLANTS and not (own.kind.encrypted and plant is planted.another_entry):
            with own.open(VICTIM[0]) as store:
                check_usable(store, *VICTIM)
        for who, number in PINNED_PROMPTS:
            with own.open(who) as store:
                if check(store, who, number) != chunks(number):
                    raise BrokenGuarantee(f"an intact entry was removed; the store's counters are {nonzero_counters(store)}")

    _run_as(ALICE, own, cell, what, lambda note: plant(_victim_path(own, folder), own.folders[folder]))
    _run_as(ALICE, own, cell, what, meet)


def _check_shared_folder(place: Place, cell: Cell, plant: planted.Plant, folder: int) -> None:
    """Check that a world-writable folder with an object planted by another user is refused, or works correctly."""
    shared = _empty_place(place, ALICE, 0o777)

    def prepare_folder(note: Note) -> None:
        os.umask(0)
        path = _victim_path(shared, folder)
        os.makedirs(os.path.dirname(path), 0o777, exist_ok=True)
        plant(path, shared.folders[folder])

    def meet(note: Note) -> None:
        try:
            shared.open(VICTIM[0]).close()
        except kvpack.KvpackError:
            note("refused", 1)
            return
        with _limit_growth():
            _use_planted(shared)

    what = f"{plant.__name__} in a shared folder"
    _run_as(BOB, shared, cell, what, prepare_folder)
    _run_as(ALICE, shared, cell, what, meet)


def _use_planted(place: Place) -> None:
    """Use the prompt with the planted object.

    Loads must be correct or misses, and chunks that are reported as saved must be found.
    """
    who, number = VICTIM
    with place.open(who) as store:
        store.match(prompt(number))
        check(store, who, number)
        store.pin(prompt(number))
        store.unpin(prompt(number))
        saved = store.save(prompt(number), packed_prompt(who, number)) // CHUNK
        found = check(store, who, number)
        if found < saved:
            raise BrokenGuarantee(f"save reports {saved} chunks of {chunks(number)}, and {found} are found: {nonzero_counters(store)}")
        store.stats()
        store.collect()
        check(store, who, number)


def _check_commands(place: Place) -> None:
    """Check that ``kvpack store ls``, ``stat`` and ``verify`` exit with a code and without a traceback for every folder."""
    options = ["--json"]
    if place.kind.encrypted:
        path = f"{place.folders[0]}/keys"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.writelines(f"{name} {key.hex()}\n" for name, key in KEYS.items())
        options += ["--key-file", path, "--tenant", "tenant"]
    for folder in place.folders:
        for action in ("ls", "stat", "verify"):
            with _discard_output():
                command_line(["store", action, folder, *options])
    if place.kind.encrypted:
        os.unlink(path)


def _check_root_collects(place: Place, cell: Cell, seed: int) -> None:
    """Let root collect garbage in a user's folder. The remaining files must still belong to the user, and the store must work."""
    own = replace(_empty_place(place, ALICE), budget=BUDGET)

    def use(note: Note) -> None:
        stores = [own.open(who) for who in range(3)]
        choice = random.Random(seed)
        for _ in range(20):
            perform_random_operation(own, stores, choice, [])
        for store in stores:
            store.close()
        check_intact(own, read=(1, 3))

    _run_as(ALICE, own, cell, "before root", lambda note: save_and_pin(own))
    _run_as(ALICE, own, cell, "before root", use)
    with cell.recording_problems("root in a user's folder"), _discard_output():
        for folder in own.folders:
            for words in (["ls"], ["stat"], ["verify"], ["gc"], ["gc", "--max-bytes", str(BUDGET // 2)]):
                command_line(["store", words[0], folder, *words[1:], "--json"])
    foreign = own.foreign_paths(ALICE)
    if foreign:
        cell.problem(f"root left files that it owns in a user's folder: {foreign}")
    _run_as(ALICE, own, cell, "after root", use)


def _check_other_folder(place: Place, cell: Cell) -> None:
    """Check that another user's folder of mode 0755 is refused, or that loaded data stays the same when its owner changes the files."""
    his = _empty_place(place, BOB, 0o755)

    def readable(note: Note) -> None:
        save_and_pin(his)
        for path in all_paths(his.folders):
            if not path.rpartition("/")[2].startswith("."):
                os.chmod(path, 0o755)

    def cut(note: Note) -> None:
        for path in all_paths(his.folders):
            if os.path.isfile(path) and len(os.path.basename(path)) == 64:
                with open(path, "r+b") as file:
                    file.write(bytes(os.stat(path).st_size))
                    file.truncate(100)

    go, done = str(place.root / "go"), str(place.root / "done")
    for path in (go, done):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.mkfifo(path)
        os.chmod(path, 0o666)

    def hold(note: Note) -> None:
        loaded = []
        try:
            stores = [his.open(who) for who, _ in PINNED_PROMPTS]
            loaded = [(who, number, *store.load(prompt(number))) for store, (who, number) in zip(stores, PINNED_PROMPTS, strict=True)]
        except kvpack.KvpackError:
            note("refused", 1)
        finally:
            with open(go, "w"), open(done):
                pass
        for answer in loaded:
            note("hits", compare(*answer) > 0)

    _run_as(BOB, his, cell, "a neighbor", readable)
    notes = str(place.root / "notes-2")

    def neighbor(note: Note) -> None:
        with open(go):
            pass
        os.setuid(BOB)
        try:
            cut(note)
        finally:
            with open(done, "w"):
                pass

    process = fork(neighbor, notes)
    _run_as(ALICE, his, cell, "reading another user's folder while its files are truncated", hold)
    os.waitpid(process, 0)
    read_notes(notes, cell)


def _victim_path(place: Place, folder: int) -> str:
    """Return the path of the second chunk of ``VICTIM`` in one of the folders."""
    name = planted.keys(*VICTIM)[1].hex()
    return f"{place.folders[folder]}/{name[0]}/{name[1]}/{name}"


def _check_planted_by_client(place: Place, cell: Cell, plant: planted.OnServer) -> None:
    """Check an object that another client of the server has planted.

    Loads are correct or misses, and after ``collect`` everything works.
    """
    place.clear()
    own = replace(place, budget=BUDGET)
    save_and_pin(own)
    who, number = VICTIM
    with own.open(who) as store:
        store.save(prompt(number), packed_prompt(who, number))
    plant(own.client(), planted.keys(*VICTIM)[1])
    with _limit_growth():
        _use_planted(own)
        with own.open(3) as store:
            store.stats()
            list(store._backend.list())
    cell.counts["chunks_left"] += check_intact(own, PINNED_PROMPTS if own.survives_server else (), damage_allowed=True, read=(0, 2, 5))


@contextlib.contextmanager
def _discard_output() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _limit_growth() -> Iterator[None]:
    """Raise Wrong if the block takes more memory than the test should need.

    Pages of files do not count, because a forked process maps PyTorch's library code only when it calls it.
    """
    before = _largest_bytes() - _file_bytes()
    yield
    grown = _largest_bytes() - _file_bytes() - before
    if grown > MAX_GROWTH:
        raise BrokenGuarantee(f"{grown:,} bytes of memory were allocated, but the limit is {MAX_GROWTH:,}")


def _largest_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _file_bytes() -> int:
    """Return how many bytes of mapped files are in this process's memory, or 0 if the system does not report it."""
    with contextlib.suppress(OSError):
        found = re.search(rb"^RssFile:\s+(\d+) kB", Path("/proc/self/status").read_bytes(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    return 0
