"""Use two PID namespaces, like containers that share a folder but cannot see each other's processes."""

from __future__ import annotations

import ctypes
import os
import random
import time
from typing import TYPE_CHECKING, Any

from support.faulty_os import store_modules
from support.store_matrix.cells import Cell, describe_error, fork, read_notes
from support.store_matrix.kinds import Place
from support.store_matrix.oracle import (
    CHUNK,
    IDENTITIES,
    PROMPTS,
    BrokenGuarantee,
    check,
    chunks,
    nonzero_counters,
    packed_prompt,
    prepare,
    prompt,
)
from support.store_matrix.uses import ALL_PROMPTS, check_intact

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.store_matrix.cells import Note

CLONE_NEWPID, CLONE_NEWUSER = 0x20000000, 0x10000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def check_namespaces(place: Place, cell: Cell, count: int, seed: int = 0) -> None:
    """Save ``count`` times in each of two namespaces while another one opens, reads and collects. Every saved chunk must be found."""
    if reason := _obstacle():
        cell.skipped = reason
        return
    prepare()
    place.budget = None
    notes, stop = str(place.root / "notes"), place.root / "stop"
    looker = fork(_run_in_pid_namespace(1, lambda note: _act_as_other_container(place, stop, random.Random(seed), note)), notes)
    writers = [fork(_run_in_pid_namespace(2 + who, lambda note, who=who: _save(place, who, count, note)), notes) for who in (0, 1)]
    try:
        for process in writers:
            _wait(process, cell)
    finally:
        stop.touch()
        _wait(looker, cell)
        stop.unlink()
        read_notes(notes, cell)
    with cell.recording_problems("checking the store afterward"):
        saved = [(who, number) for who in (0, 1) for number in range(min(count, PROMPTS))]
        cell.counts["chunks_left"] += check_intact(place, saved, read=ALL_PROMPTS)
    cell.report_done(2 * count)


def _wait(process: int, cell: Cell) -> None:
    _, status = os.waitpid(process, 0)
    if code := os.waitstatus_to_exitcode(status):
        cell.problem(f"a process in another PID namespace exited with code {code}")


def _act_as_other_container(place: Place, stop: Path, choice: random.Random, note: Note) -> None:
    """Act as another container that opens the store, looks up prompts, and collects garbage."""
    while not stop.exists():
        with place.open(3) as store:
            store.collect()
            check(store, 3, choice.randrange(PROMPTS))
            store.stats()
        note("looks", 1)


def _save(place: Place, who: int, count: int, note: Note) -> None:
    for module in store_modules():
        if vars(module).get("os") is os:
            vars(module)["os"] = _SlowOs()
    stores = [place.open(identity) for identity in range(len(IDENTITIES))]
    for number in range(count):
        saved = number % PROMPTS
        if number >= PROMPTS:
            # From then on, delete existing entries and save them again.
            stores[who].delete(prompt(saved))
        whole = chunks(saved)
        tokens = stores[who].save(prompt(saved), packed_prompt(who, saved))
        found = check(stores[who], who, saved)
        if tokens != whole * CHUNK or found != whole or stores[who].counters()["faults"]:
            of = f"{tokens} of {whole * CHUNK} tokens were saved, and {found} chunks were found"
            note(f"problem: save {number}: {of}: {nonzero_counters(stores[who])}", 1)
        else:
            note("saves", 1)
    for store in stores:
        store.close()


class _SlowOs:
    """A replacement for the module ``os`` with a slow disk, so that other processes run while files are unfinished."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def replace(self, *paths: str) -> None:
        time.sleep(0.002)
        os.replace(*paths)


def _run_in_pid_namespace(number: int, work: Callable[[Note], None]) -> Callable[[Note], None]:
    """Return a function that runs ``work`` as process ``number`` of a new PID namespace, where other process ids are unknown."""

    def start(note: Note, number: int = number) -> None:
        if number:
            _run_in_child(lambda: start(note, number - 1), note)
        else:
            work(note)

    def begin(note: Note) -> None:
        _unshare()
        start(note)

    return begin


def _run_in_child(work: Callable[[], None], note: Note) -> None:
    """Do ``work`` in a child process and wait for it."""
    process = os.fork()
    if process:
        _, status = os.waitpid(process, 0)
        if code := os.waitstatus_to_exitcode(status):
            raise BrokenGuarantee(f"the child process exited with code {code}")
        return
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:
        note(f"problem: in another namespace: {describe_error(error)}", 1)
    finally:
        os._exit(code)


def _unshare() -> None:
    # Root does not need a separate user namespace.
    flags = CLONE_NEWPID if os.geteuid() == 0 else CLONE_NEWPID | CLONE_NEWUSER
    if _LIBC.unshare(flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _obstacle() -> str:
    """Return the reason why this machine does not permit namespaces, or an empty string if it does."""
    process = os.fork()
    if not process:
        try:
            _unshare()
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"this machine does not allow PID namespaces: {os.strerror(code)}" if code else ""
