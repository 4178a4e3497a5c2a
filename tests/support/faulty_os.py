"""Emulate a faulty system: the n-th call of an operation fails with an errno, or ends the process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kvpack.store

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import pytest

CHANGES = ("open", "pwrite", "ftruncate", "writev", "fsync", "replace", "unlink", "mkdir", "utime", "close")
"""Operations whose effects other processes can see. A kill between two of them has the same effect as one right after the first."""
OPERATIONS = (*CHANGES, "pread", "stat", "fstat", "scandir", "statvfs")
OTHER_OPERATIONS = ("flock", "mmap")
"""Operations that the store calls in modules other than ``os``. The built-in ``open`` counts as "open"."""
SOCKET_OPERATIONS = ("connect", "sendall", "recv")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EMFILE, errno.EINTR, errno.ESTALE)
STRIDE = int(os.environ.get("KVPACK_KILL_STRIDE", "14"))
"""Number of operations between the points at which a process is killed. A value of 1 tries all points."""


@dataclass
class FaultyOs:
    """Replaces the module ``os`` in the store with one in which the ``number``-th call of ``operations`` (counted from 1) fails.

    All other calls pass through. The faulty call raises OSError(``code``), as do all later ones if ``sticky``. With ``short``, it writes or
    reads fewer bytes than requested instead. With ``death``, it ends the process by SIGKILL, "before" or "after" the call.
    """

    operations: tuple[str, ...]
    number: int
    code: int = 0
    sticky: bool = False
    death: str = ""
    short: bool = False
    calls: int = field(default=0, init=False)
    counts: Counter[str] = field(default_factory=Counter, init=False)

    def __getattr__(self, name: str) -> Any:
        return self.faulty(name, getattr(os, name))

    def faulty(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``real`` with the fault if ``name`` is one of ``operations``, else ``real`` itself."""
        if name not in self.operations:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.counts[name] += 1
            hit = self.calls == self.number or (self.sticky and self.calls > self.number)
            if not hit:
                return real(*args, **kwargs)
            if self.short:
                return _transfer_half(name, real, *args)
            if self.death == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.death == "after":
                with contextlib.suppress(OSError):
                    real(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "close":
                # A failing close has still closed the file.
                real(*args, **kwargs)
            raise OSError(self.code, os.strerror(self.code))

        return call

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace ``os`` and the other system modules in every module of the store, and sockets everywhere."""
        for module in store_modules():
            known = vars(module)
            if known.get("os") is os:
                monkeypatch.setattr(module, "os", self)
            if known.get("fcntl") is fcntl:
                monkeypatch.setattr(module, "fcntl", _Fcntl(self))
            if "map_file" in known:
                monkeypatch.setattr(module, "map_file", self.faulty("mmap", known["map_file"]))
            if "open" in self.operations:
                monkeypatch.setattr(module, "open", self.faulty("open", open), raising=False)
        for name in set(SOCKET_OPERATIONS) & set(self.operations):
            monkeypatch.setattr(socket.socket, name, self.faulty(name, getattr(socket.socket, name)), raising=False)


@dataclass
class _Fcntl:
    """Replaces the module ``fcntl`` in the store."""

    system: FaultyOs

    def __getattr__(self, name: str) -> Any:
        return self.system.faulty(name, getattr(fcntl, name)) if name == "flock" else getattr(fcntl, name)


def open_files() -> set[str]:
    """Return the open file descriptors of this process, each with its target."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue
    return found


def store_modules() -> list[ModuleType]:
    """Return the modules of the store that make system calls."""
    return [module for name, module in sys.modules.items() if name == "kvpack.file.atomic" or name.startswith(f"{kvpack.store.__name__}.")]


def _transfer_half(name: str, real: Any, descriptor: int, argument: Any, *rest: Any) -> Any:
    """Call a read or write function with half of its bytes, but at least one."""
    if name == "writev":
        data = b"".join(argument)
        return os.write(descriptor, data[: max(1, len(data) // 2)])
    if name == "pwrite":
        return os.pwrite(descriptor, argument[: max(1, len(argument) // 2)], *rest)
    return real(descriptor, max(1, argument // 2), *rest)
