"""Remove entries of older layouts, whose keys cover less of the identity so that no store looks for them, and unused bases."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvpack.formats.errors import KvpackError, Undecryptable

from .backend import MAX_ENTRY_BYTES
from .catalog import read_fronts
from .directory import Directory
from .encryption import decrypted_entry
from .entries import FEATURE, is_old, open_entry
from .entry_kind import check_size
from .faults import is_damage
from .keys import check_basis
from .summary import describe_new

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .backend import Backend, Data, StoredEntry
    from .counters import Counters
    from .encryption import Cipher

_FRONT_BYTES = 2**16
"""The first bytes of an entry are searched for the name of its feature, which is nearly always there, without parsing its header."""

GRACE_NS = 3600 * 10**9
"""Nanoseconds that a basis without entries stays after its last use, because its writer may be about to put the first chunk."""


def reclaim(backend: Backend, counters: Counters, cipher: Cipher | None = None, *, max_entry_bytes: int = MAX_ENTRY_BYTES) -> None:
    """Remove intact entries of older layouts, their pins, and bases that no entry has needed for an hour.

    All other entries stay: those of a newer layout, unreadable ones, those larger than ``max_entry_bytes``, and encrypted ones that
    ``cipher`` does not decrypt.
    """
    to_remove, bases = [], []
    for stored, front in read_fronts(backend, _candidates(backend, cipher), max_entry_bytes):
        if front is not None:
            kind = _kind_of(stored, front, cipher)
            to_remove += [stored] if kind == "old" else []
            bases += [stored] if kind == "basis" else []
    to_remove += _unused_bases(backend, bases, cipher, max_entry_bytes)
    pinned = backend.pinned() if to_remove else set()
    for stored in to_remove:
        if stored.key in pinned:
            backend.unpin([stored.key])
    removed = backend.delete([stored.key for stored in to_remove]) if to_remove else set()
    counters.add("reclaimed_entries", len(removed))
    counters.add("reclaimed_bytes", sum(stored.size for stored in to_remove if stored.key in removed))


def _candidates(backend: Backend, cipher: Cipher | None) -> Iterable[StoredEntry]:
    """Return every entry that may need collection: all except those that the folder's index lists as chunks, states or pages."""
    if cipher is None and isinstance(backend, Directory) and backend.described() is not None:
        describe_new(backend)
        return backend.undescribed(also="bases")
    return backend.list()


def _kind_of(stored: StoredEntry, front: Data, cipher: Cipher | None) -> str:
    """Return the kind of an entry to inspect, "old" or "basis"; "" for any other."""
    try:
        data = decrypted_entry(stored.key, front, cipher)
        if FEATURE.encode() in bytes(memoryview(data)[:_FRONT_BYTES]):
            return ""
        with open_entry(data, stored.key) as file:
            return "basis" if file.header.is_basis else "old" if is_old(file) else ""
    except (KvpackError, OSError, MemoryError):
        return ""


def _unused_bases(backend: Backend, bases: Sequence[StoredEntry], cipher: Cipher | None, max_entry_bytes: int) -> list[StoredEntry]:
    """Return the ``bases`` that no entry needs and that have not been used for an hour; none if an entry is unreadable."""
    limit = time.time_ns() - GRACE_NS
    idle = {
        stored.key: digest
        for stored in bases
        if 0 < stored.used_ns < limit and (digest := _basis_digest(backend, stored, cipher)) is not None
    }
    known = {stored.key for stored in bases}
    others = (stored for stored in backend.list() if stored.size and stored.key not in known)
    for stored, front in read_fronts(backend, others, max_entry_bytes) if idle else ():
        recipe = _recipe_of(stored, front, cipher, max_entry_bytes)
        idle = {} if recipe is None else {key: digest for key, digest in idle.items() if digest not in recipe}
        if not idle:
            return []
    # As it is now: the entries took their time to look at.
    used = {stored.key: stored.used_ns for stored in backend.list()} if idle else {}
    return [stored for stored in bases if stored.key in idle and 0 < used.get(stored.key, 0) < limit]


def _basis_digest(backend: Backend, stored: StoredEntry, cipher: Cipher | None) -> str | None:
    """Return the SHA-256 of a basis as recipes name it; None for one that is damaged or cannot be read."""
    try:
        data = backend.peek(stored.key)
        return None if data is None else check_basis(stored.key, decrypted_entry(stored.key, data, cipher), cipher).hex()
    except (KvpackError, OSError, MemoryError):
        return None


def _recipe_of(stored: StoredEntry, front: Data | None, cipher: Cipher | None, max_entry_bytes: int) -> str | None:
    """Return the recipe of an entry: "" if it cannot be read with these keys, None if that cannot be determined."""
    try:
        check_size(f"entry {stored.key.hex()}", stored.size, max_entry_bytes)
        if front is None:
            return None
        with open_entry(decrypted_entry(stored.key, front, cipher), stored.key) as file:
            return file.header.recipe
    except Undecryptable:
        # It needs the basis that is encrypted with its own key.
        return ""
    except KvpackError as error:
        return "" if is_damage(error) else None
    except (OSError, MemoryError):
        return None
