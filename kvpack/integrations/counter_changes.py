"""Conversion of a store's counters to increments, which serving engines add to their own counters."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpack.store.page_store import PageStore


class CounterChanges:
    """Tracks the counters of a store, and returns by how much they have increased."""

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._before: Counter[tuple[str, ...]] = Counter()

    def pop_increments(self) -> Counter[tuple[str, ...]]:
        """Return the increments since the last call, keyed by (name,) and by ("faults", operation, reason)."""
        now: Counter[tuple[str, ...]] = Counter()
        for name, count in self._store.counters().items():
            if isinstance(count, dict):
                now.update({(name, *both.partition(" ")[::2]): kind_count for both, kind_count in count.items()})
            else:
                now[(name,)] = count
        added, self._before = now - self._before, now
        return added
