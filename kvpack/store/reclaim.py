"""Removes the bases that no entry needs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvpack.formats.errors import KvpackError, Undecryptable

from .backend import MAX_ENTRY_BYTES, Backend, Data, StoredEntry
from .catalog import read_fronts
from .encryption import Cipher, decrypt_entry
from .entries import FEATURE, open_entry
from .entry_kind import check_size
from .faults import means_damage
from .keys import check_basis
from .summary import describe_new

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .counters import Counters

_FRONT_BYTES = 2**16
"""Number of bytes in which the name of a chunk's feature is searched. A match avoids parsing the header."""

GRACE_NS = 3600 * 10**9
"""Time in nanoseconds for which an unneeded basis is kept after its last use, because its writer may be about to put the first chunk."""


def reclaim(backend: Backend, counters: Counters, cipher: Cipher | None = None, *, max_entry_bytes: int = MAX_ENTRY_BYTES) -> None:
    """Remove bases that no entry has needed for an hour.

    Nothing is removed if some entry is unreadable, is larger than ``max_entry_bytes``, or cannot be decrypted with ``cipher``.
    """
    fronts = read_fronts(backend, _candidates(backend, cipher), max_entry_bytes)
    bases = [stored for stored, front in fronts if front is not None and _is_basis(stored, front, cipher)]
    to_remove = _unused_bases(backend, bases, cipher, max_entry_bytes)
    removed = backend.delete([stored.key for stored in to_remove]) if to_remove else set()
    counters.add("reclaimed_entries", len(removed))
    counters.add("reclaimed_bytes", sum(stored.size for stored in to_remove if stored.key in removed))


def _candidates(backend: Backend, cipher: Cipher | None) -> Iterable[StoredEntry]:
    """Return all entries except those described as chunks, states or pages. Any of them may be a basis."""
    described = describe_new(backend) if cipher is None else None
    return backend.list() if described is None else described


def _is_basis(stored: StoredEntry, front: Data, cipher: Cipher | None) -> bool:
    try:
        data = decrypt_entry(stored.key, front, cipher)
        if FEATURE.encode() in bytes(memoryview(data)[:_FRONT_BYTES]):
            return False
        with open_entry(data, stored.key) as file:
            return file.header.is_basis
    except (KvpackError, OSError, MemoryError):
        return False


def _unused_bases(backend: Backend, bases: Sequence[StoredEntry], cipher: Cipher | None, max_entry_bytes: int) -> list[StoredEntry]:
    """Return those ``bases`` that no entry needs and that have not been used for an hour.

    Returns none if some entry cannot be read.
    """
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
    # Look up the last uses again, because reading the entries may have taken long.
    used = {stored.key: stored.used_ns for stored in backend.list()} if idle else {}
    return [stored for stored in bases if stored.key in idle and 0 < used.get(stored.key, 0) < limit]


def _basis_digest(backend: Backend, stored: StoredEntry, cipher: Cipher | None) -> str | None:
    """Return the SHA-256 of a stored basis in hexadecimal, as in recipes. Returns None if the basis is damaged or cannot be read."""
    try:
        data = backend.peek(stored.key)
        return None if data is None else check_basis(stored.key, decrypt_entry(stored.key, data, cipher), cipher).hex()
    except (KvpackError, OSError, MemoryError):
        return None


def _recipe_of(stored: StoredEntry, front: Data | None, cipher: Cipher | None, max_entry_bytes: int) -> str | None:
    """Return the recipe of an entry, or None if it is unknown.

    Returns an empty string if the entry is damaged, or if it cannot need an unencrypted basis.
    """
    try:
        check_size(f"entry {stored.key.hex()}", stored.size, max_entry_bytes)
        if front is None:
            return None
        with open_entry(decrypt_entry(stored.key, front, cipher), stored.key) as file:
            return file.header.recipe
    except Undecryptable:
        # An encrypted entry needs only the basis that is encrypted with the same key.
        return ""
    except KvpackError as error:
        return "" if means_damage(error) else None
    except (OSError, MemoryError):
        return None
