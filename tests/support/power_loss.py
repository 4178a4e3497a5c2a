"""Emulate a disk that loses power.

The module records a store's changes, and generates folders that a crash between two of them may leave.

A file's bytes are safe once the file is synced, and its name is safe once its folder is synced. Each other change may or may not survive
the crash, independently, and bytes may be zeros or truncated. This covers everything that POSIX allows, and more than journaling file
systems do.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from support.faulty_os import store_modules

if TYPE_CHECKING:
    import random

    import pytest


@dataclass
class Step:
    """One change: its operation, its path, and its data or second path."""

    operation: str
    path: str
    more: Any = None


@dataclass
class RecordingOs:
    """Replaces the module ``os`` in the store. It makes every call, and records changes below ``root`` in ``steps``."""

    root: str
    steps: list[Step] = field(default_factory=list)
    _paths: dict[int, str] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _record(self, operation: str, path: str, more: Any = None) -> None:
        if path == self.root or path.startswith(f"{self.root}/"):
            self.steps.append(Step(operation, path, more))

    def open(self, path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        there = os.path.exists(path)
        descriptor = os.open(path, flags, *args, **kwargs)
        self._paths[descriptor] = path
        if flags & os.O_CREAT and not there:
            self._record("create", path)
        return descriptor

    def pwrite(self, descriptor: int, data: Any, at: int) -> int:
        written = os.pwrite(descriptor, data, at)
        self._record("write at", self._paths[descriptor], (at, bytes(data)[:written]))
        return written

    def ftruncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)
        self._record("truncate", self._paths[descriptor], size)

    def writev(self, descriptor: int, pieces: Any) -> int:
        written = os.writev(descriptor, pieces)
        self._record("write", self._paths[descriptor], b"".join(pieces)[:written])
        return written

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        self._record("sync", self._paths[descriptor])

    def replace(self, old: str, new: str) -> None:
        os.replace(old, new)
        self._record("rename", old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)
        self._record("unlink", path)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)
        self._record("mkdir", path)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace ``os`` in every module of the store."""
        for module in store_modules():
            if vars(module).get("os") is os:
                monkeypatch.setattr(module, "os", self)


@dataclass
class _File:
    current: bytes = b""
    safe: bytes | None = None
    end: int = 0
    """Offset of the next write without an explicit offset."""

    def write(self, at: int, data: bytes) -> None:
        self.current = self.current[:at].ljust(at, b"\0") + data + self.current[at + len(data) :]


class Disk:
    """The state of the disk after some steps, from which random crashes are generated."""

    def __init__(self, root: str, steps: list[Step]) -> None:
        self._root = root
        # What each name refers to after each change (None: a folder). A change is safe once its folder is synced.
        self._changes: list[tuple[str, Step, _File | None, bool]] = []
        names: dict[str, _File | None] = {}
        for step in steps:
            folder = os.path.dirname(step.path)
            if step.operation == "create":
                names[step.path] = _File()
                self._changes.append((folder, step, names[step.path], False))
            elif step.operation == "write":
                file = names[step.path]
                assert file is not None
                file.write(file.end, step.more)
                file.end += len(step.more)
            elif step.operation in ("write at", "truncate"):
                file = names[step.path]
                assert file is not None
                if step.operation == "truncate":
                    file.current = file.current[: step.more].ljust(step.more, b"\0")
                else:
                    file.write(*step.more)
            elif step.operation == "sync":
                self._sync(step.path, names.get(step.path))
            elif step.operation == "mkdir":
                names[step.path] = None
                self._changes.append((folder, step, None, False))
            elif step.operation == "rename":
                names[step.more] = names.pop(step.path)
                self._changes.append((os.path.dirname(step.more), step, names[step.more], False))
            else:
                self._changes.append((folder, step, names.pop(step.path, None), False))

    def _sync(self, path: str, file: _File | None) -> None:
        if file is not None:
            file.safe = file.current
        else:
            self._changes = [(folder, step, file, safe or folder == path) for folder, step, file, safe in self._changes]

    def crash(self, target: str, choice: random.Random | None, *, names_survive: bool = False) -> None:
        """Write the files that survive a crash to ``target``.

        ``choice`` selects them at random. If it is None, as few files as possible survive or, with ``names_survive``, all names with as few
        bytes as possible.
        """
        there: dict[str, _File | None] = {self._root: None}
        for _, step, file, safe in self._changes:
            if not (safe or names_survive or (choice is not None and choice.random() < 0.5)):
                continue
            if step.operation == "unlink":
                there.pop(step.path, None)
            elif step.operation == "rename":
                there.pop(step.path, None)
                there[step.more] = file
            else:
                there[step.path] = file
        for path in sorted(there, key=len):
            if os.path.dirname(path) not in there and path != self._root:
                continue
            new = target + path[len(self._root) :]
            if path == self._root:
                os.makedirs(new, mode=0o700)
            elif there[path] is None and os.path.isdir(os.path.dirname(new)):
                os.mkdir(new, mode=0o700)
            elif there[path] is not None and os.path.isdir(os.path.dirname(new)):
                with open(os.open(new, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as written:
                    written.write(_surviving_bytes(there[path], choice))


def _surviving_bytes(file: _File | None, choice: random.Random | None) -> bytes:
    """Return the bytes of a file that survive a crash."""
    assert file is not None
    if file.safe is not None and file.safe == file.current:
        return file.current
    safe = file.safe or b""
    if choice is None:
        return safe
    kept = file.current[: choice.randint(min(len(safe), len(file.current)), len(file.current))]
    return choice.choice([safe, file.current, kept, kept + bytes(len(file.current) - len(kept))])
