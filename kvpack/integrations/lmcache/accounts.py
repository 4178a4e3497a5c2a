"""The sizes that LMCache was told: its quotas delete by these bytes, and the store evicts without asking it."""

from __future__ import annotations

from itertools import islice
from threading import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

LOOKED_AT = 4
"""Objects that are looked up with each stored one; LMCache then overestimates the stored objects by at most about a seventh."""


class Accounts:
    """Reports stored and deleted objects to the listeners of ``adapter``, each once, with the same size.

    ``there`` says of each object whether it is stored, and yes where it cannot tell. Safe to use from any thread.
    """

    def __init__(self, adapter: Any, there: Callable[[list[Any]], list[bool]]) -> None:
        self._adapter, self._there = adapter, there
        self._told: dict[Any, int] = {}
        # A listener may delete what it is told of.
        self._lock = RLock()

    def stored(self, sizes: Mapping[Any, int]) -> None:
        """Report objects that were not there before; an object that was already reported changes nothing."""
        with self._lock:
            new = {key: size for key, size in sizes.items() if key not in self._told}
            self._told |= new
            if new:
                self._adapter._notify_keys_stored([*new], [*new.values()])

    def deleted(self, keys: Iterable[Any]) -> None:
        """Report the ``keys`` that are gone, including those that another process stored."""
        with self._lock:
            asked = [*keys]
            gone = [key for key, there in zip(asked, self._there(asked), strict=True) if not there]
            if gone:
                self._adapter._notify_keys_deleted(gone, [self._told.pop(key, 0) for key in gone])

    def missed(self, keys: Iterable[Any]) -> None:
        """Report those of ``keys`` that were reported as stored and are gone."""
        with self._lock:
            self.deleted([key for key in keys if key in self._told])

    def look(self, count: int) -> None:
        """Look up ``count`` of the reported objects, in turn, and report those that are gone."""
        with self._lock:
            chosen = list(islice(self._told, count))
            for key in chosen:
                self._told[key] = self._told.pop(key)
            self.deleted(chosen)
