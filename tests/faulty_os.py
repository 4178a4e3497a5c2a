"""``os`` with faults: the n-th call of an operation fails with an errno, or ends the process."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpack import atomic
from kvpack.store import directory, eviction, pins, reading, trust, usage

if TYPE_CHECKING:
    import pytest

CHANGES = ("open", "pwrite", "ftruncate", "writev", "fsync", "replace", "unlink", "mkdir", "utime", "close")
"""Operations that change what another process sees; a kill between two of them is the same as one just after the first."""
OPERATIONS = (*CHANGES, "pread", "stat", "fstat", "scandir", "statvfs")


@dataclass
class FaultyOs:
    """The module ``os`` for the store: everything passes, but for the ``number``-th call of ``operations`` (counted from 1).

    That one raises OSError(``code``), as do all later ones when ``sticky``; with ``short`` it writes or reads fewer bytes than it was asked
    to; with ``death`` it ends the process by SIGKILL, "before" or "after" the call.
    """

    operations: tuple[str, ...]
    number: int
    code: int = 0
    sticky: bool = False
    death: str = ""
    short: bool = False
    calls: int = field(default=0, init=False)

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.operations:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            hit = self.calls == self.number or (self.sticky and self.calls > self.number)
            if not hit:
                return real(*args, **kwargs)
            if self.short:
                return _short(name, real, *args)
            if self.death == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.death == "after":
                with contextlib.suppress(OSError):
                    real(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "close":
                # A close that fails has closed all the same.
                real(*args, **kwargs)
            raise OSError(self.code, os.strerror(self.code))

        return call

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in the place of ``os`` in every module of the store."""
        for module in (atomic, directory, eviction, pins, reading, trust, usage):
            monkeypatch.setattr(module, "os", self)


def _short(name: str, real: Any, descriptor: int, what: Any, *rest: Any) -> Any:
    """The call for half of what it was asked to write or read, or one byte of that."""
    if name == "writev":
        data = b"".join(what)
        return os.write(descriptor, data[: max(1, len(data) // 2)])
    if name == "pwrite":
        return os.pwrite(descriptor, what[: max(1, len(what) // 2)], *rest)
    return real(descriptor, max(1, what // 2), *rest)
