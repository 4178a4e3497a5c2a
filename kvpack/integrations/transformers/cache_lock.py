"""The lock of a cache: one thread at a time runs a forward pass over it, or reads or changes all its layers."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

_SECONDS = 1.0
"""Seconds after which a waiting thread checks that the thread with the lock is alive."""


class CacheLock:
    """A lock that a thread acquires once, and that can be acquired again if a thread ended without releasing it, as within a pass."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)()

    def take(self) -> bool:
        """Wait for the turn; False if the calling thread has it already."""
        mine = threading.get_ident()
        if self._owner == mine:
            return False
        with self._changed:
            while self._owner is not None and self._owner in sys._current_frames():
                self._changed.wait(_SECONDS)
            self._owner = mine
        return True

    def give_back(self) -> None:
        """Let another thread have the turn, if the calling one has it."""
        with self._changed:
            if self._owner == threading.get_ident():
                self._owner = None
                self._changed.notify()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The turn within a ``with`` block, if the calling thread does not have it already."""
        taken = self.take()
        try:
            yield
        finally:
            if taken:
                self.give_back()
