"""The locks of a cache. One lets one thread at a time run a forward pass over the cache, or read or change all layers. The other is held by
the thread that generates into the cache.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, Self

from kvpack.formats.errors import InvalidParameter

_SECONDS = 1.0
"""Interval in seconds at which a waiting thread checks that the owner of the lock is alive."""


class CacheLock:
    """A reentrant lock. If the thread that holds it has ended, other threads can acquire it.

    A thread may end without releasing the lock, for example in the middle of a pass.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)()

    def __reduce__(self) -> NoReturn:
        raise InvalidParameter("a Chat cannot be pickled: write it with chat.save(path) and read it with Chat.load(path, model, tokenizer)")

    @property
    def is_own(self) -> bool:
        """True if the calling thread holds the lock."""
        return self._owner == threading.get_ident()

    @property
    def is_taken(self) -> bool:
        """True if another thread holds the lock."""
        return self._owner is not None and not self.is_own and self._owner in sys._current_frames()

    def acquire(self) -> bool:
        """Acquire the lock. Returns False if the calling thread already holds it."""
        thread = threading.get_ident()
        if self._owner == thread:
            return False
        with self._changed:
            while self.is_taken:
                self._changed.wait(_SECONDS)
            self._owner = thread
        return True

    def release(self) -> None:
        """Release the lock if the calling thread holds it."""
        with self._changed:
            if self.is_own:
                self._owner = None
                self._changed.notify()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Return a context manager that holds the lock. If the calling thread already holds it, the context manager does nothing."""
        hold = self.acquire()
        try:
            yield
        finally:
            if hold:
                self.release()
