"""Changes of a model that caches share. A change is undone when no cache needs it anymore."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Generic, Self, TypeVar

CHANGES_LOCK = threading.RLock()
"""Lock of all changes, because one thread may release the last cache of a model while another creates the next."""


class ModelChange:
    """A change of one module, which the constructor of a subclass makes and ``undo`` reverts."""

    def __init__(self, module: Any) -> None:
        self.module = weakref.ref(module)

    def undo(self) -> None:
        """Revert the change."""
        raise NotImplementedError


Change = TypeVar("Change", bound=ModelChange)


class Lease(Generic[Change]):
    """An object that keeps ``change`` in effect for as long as something references it. Copies of a cache share it."""

    def __init__(self, change: Change) -> None:
        self.change = change

    def __deepcopy__(self, memo: object) -> Self:
        return self


_IN_EFFECT: dict[tuple[type, int], tuple[Any, weakref.ref[Any]]] = {}
"""The changes in effect with a reference to their leases, keyed by their type and the id of their module."""


def is_changed(kind: type[ModelChange], module: Any) -> bool:
    """Return True if a change of this kind is in effect in ``module``."""
    entry = _IN_EFFECT.get((kind, id(module)))
    # The module of this change may have been deleted and its id reused.
    return entry is not None and entry[0].module() is module


def lease(kind: type[Change], module: Any) -> Lease[Change]:
    """Return the lease on the change ``kind(module)``, making the change if it is not in effect yet."""
    key = kind, id(module)
    with CHANGES_LOCK:
        known = is_changed(kind, module)
        held = _IN_EFFECT[key][1]() if known else None
        if held is None:
            # If another thread has dropped the last lease, and waits for the lock to undo the change, the change stays.
            held = Lease(_IN_EFFECT[key][0] if known else kind(module))
            _IN_EFFECT[key] = held.change, weakref.ref(held)
            weakref.finalize(held, _end_change, key, held.change)
        return held


def _end_change(key: tuple[type, int], change: ModelChange) -> None:
    with CHANGES_LOCK:
        entry = _IN_EFFECT.get(key)
        if entry is None or entry[0] is not change:
            change.undo()
        elif entry[1]() is None:
            del _IN_EFFECT[key]
            change.undo()
