"""Locks that a forked child can acquire even if a thread of its parent held them."""

from __future__ import annotations

import os
import threading
import weakref


class Lock:
    """A lock like ``threading.Lock``, but free in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _ALL.add(self)

    def acquire(self) -> None:
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_ALL: weakref.WeakSet[Lock] = weakref.WeakSet()


def _replace_locks() -> None:
    for lock in _ALL:
        lock._lock = threading.Lock()


os.register_at_fork(after_in_child=_replace_locks)
