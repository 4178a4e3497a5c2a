"""Remove entries of older layouts: their keys cover less of the identity, so no store looks for them any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpack.file import container
from kvpack.formats.errors import KvpackError

from .backend import MAX_ENTRY_BYTES
from .encryption import in_clear
from .entries import FEATURE, is_old

if TYPE_CHECKING:
    from .backend import Backend, Stored
    from .counters import Counters
    from .encryption import Cipher

_FRONT_BYTES = 2**16
"""The first bytes of an entry are searched for the name of its feature, which is nearly always there, without parsing its header."""


def reclaim(backend: Backend, counters: Counters, cipher: Cipher | None = None, *, max_entry_bytes: int = MAX_ENTRY_BYTES) -> None:
    """Remove the entries with an intact header of an older layout, and their pins.

    All other entries stay: those of a newer layout, unreadable ones, those larger than ``max_entry_bytes``, and encrypted ones that
    ``cipher`` does not decrypt.
    """
    old = [stored for stored in backend.list() if 0 < stored.size <= max_entry_bytes and _is_old(backend, stored, cipher)]
    pinned = backend.pinned() if old else set()
    for stored in old:
        if stored.key in pinned:
            backend.unpin([stored.key])
        if backend.delete([stored.key]):
            counters.add("reclaimed_entries")
            counters.add("reclaimed_bytes", stored.size)


def _is_old(backend: Backend, stored: Stored, cipher: Cipher | None) -> bool:
    try:
        data = backend.peek(stored.key, front=True)
        if data is None:
            return False
        data = in_clear(stored.key, data, cipher)
        if FEATURE.encode() in bytes(memoryview(data)[:_FRONT_BYTES]):
            return False
        with container.open_bytes(data, where=f"entry {stored.key.hex()}") as file:
            return is_old(file)
    except (KvpackError, OSError, MemoryError):
        return False
