"""Selects entries to remove from a store, by model, recipe, age or tenant, and bases that no entry needs. Reads only headers.

Entries do not contain their tenant. They are found by the roots of their chains, whose hashes include the tenant.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpack.coding.recipes import canonical_recorded_text
from kvpack.formats.errors import KvpackError, Undecryptable
from kvpack.identity.identity import Identity, states_key

from .backend import MAX_ENTRY_BYTES, Backend, Data, StoredEntry
from .catalog import Catalog, ChunkEntry, read_fronts
from .encryption import Cipher, decrypt_entry
from .entries import FEATURE, open_entry
from .entry_kind import check_size, means_damage
from .keys import check_basis
from .summary import add_missing_descriptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .counters import Counters


@dataclass(frozen=True)
class EntryFilter:
    """Selects entries by ``model``, canonical ``recipe``, ``tenant``, and last use before ``used_before_ns``.

    A field that is None matches every entry.
    """

    model: str | None = None
    recipe: str | None = None
    tenant: str | None = None
    used_before_ns: int | None = None

    def keys(self, catalog: Catalog) -> set[bytes]:
        """Return the keys of matching chunks and of the states after them. A filter with only an age also matches serving engines' pages.
        """
        candidates = catalog.entries.keys() if self.tenant is None else _tenant_keys(catalog, self.tenant)
        selected = {key for key in candidates if self._matches(catalog.entries[key])}
        selected |= {catalog.states[key].stored.key for key in selected & set(catalog.states)}
        if self.model is self.recipe is self.tenant is None and self.used_before_ns is not None:
            selected |= {key for key, page in catalog.pages.items() if page.used_ns < self.used_before_ns}
        return selected

    def _matches(self, entry: ChunkEntry) -> bool:
        # Older entries may name a preset.
        return (
            self.model in (None, entry.model.get("name", ""))
            and (self.recipe is None or self.recipe == canonical_recorded_text(entry.recipe))
            and (self.used_before_ns is None or entry.stored.used_ns < self.used_before_ns)
        )


def chain_keys(catalog: Catalog, roots: Iterable[bytes]) -> set[bytes]:
    """Return the keys of all chunks that descend from one of ``roots``, with no ancestor missing."""
    children = defaultdict(list)
    for key, entry in catalog.entries.items():
        children[entry.fields.parent].append(key)
    result: set[bytes] = set()
    ends = list(roots)
    while ends:
        new = [key for key in children.pop(ends.pop(), ()) if key not in result]
        result.update(new)
        ends += new
    return result


def root_keys(identity: Identity) -> tuple[bytes, bytes]:
    """Return the parent keys of the first chunks of ``identity``: for models without states, and with states."""
    return identity.digest, states_key(identity.digest)


def remove(backend: Backend, counters: Counters, keys: Iterable[bytes], *, pinned: bool) -> int:
    """Remove the entries of ``keys``. Returns how many were removed.

    Pinned entries are removed, with their pins, only if ``pinned`` is True.
    """
    to_remove = set(keys)
    if pinned:
        unpin_chains(backend, to_remove)
    else:
        to_remove -= backend.pinned_keys()
    count = len(backend.delete(sorted(to_remove)))
    counters.add("deleted_entries", count)
    return count


def unpin_chains(backend: Backend, keys: set[bytes]) -> None:
    """Remove the pins of chains that contain any of the missing ``keys``. After a missing entry, the rest of a chain is unreachable."""
    for pin in backend.pins():
        if not keys.isdisjoint(pin.chain):
            backend.unpin([pin.key])


def _tenant_keys(catalog: Catalog, tenant: str) -> set[bytes]:
    identities = {(tuple(sorted(entry.model.items())), entry.recipe) for entry in catalog.entries.values() if entry.start == 0}
    named = [Identity.from_header(dict(model), recipe, tenant) for model, recipe in identities]
    return chain_keys(catalog, (root for identity in named for root in root_keys(identity)))


_FRONT_BYTES = 2**16
"""Number of bytes to search for the name of a chunk's feature. A match avoids parsing the header."""

GRACE_NS = 3600 * 10**9
"""Time in nanoseconds to keep an unneeded basis after its last use. Its writer may be about to put the first chunk."""


def reclaim(backend: Backend, counters: Counters, cipher: Cipher | None = None, *, max_entry_bytes: int = MAX_ENTRY_BYTES) -> None:
    """Remove bases that no entry has needed for an hour.

    Removes nothing if some entry is unreadable, is larger than ``max_entry_bytes``, or cannot be decrypted with ``cipher``.
    """
    fronts = read_fronts(backend, _possible_bases(backend, cipher), max_entry_bytes)
    bases = [stored for stored, front in fronts if front is not None and _is_basis(stored, front, cipher)]
    to_remove = _unused_bases(backend, bases, cipher, max_entry_bytes)
    removed = backend.delete([stored.key for stored in to_remove]) if to_remove else set()
    counters.add("reclaimed_entries", len(removed))
    counters.add("reclaimed_bytes", sum(stored.size for stored in to_remove if stored.key in removed))


def _possible_bases(backend: Backend, cipher: Cipher | None) -> Iterable[StoredEntry]:
    """Return all entries that may be a basis, because they are not described as chunks, states or pages."""
    described = add_missing_descriptions(backend) if cipher is None else None
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
    """Return the ``bases`` that no entry needs and that have not been used for an hour.

    Returns an empty list if some entry cannot be read.
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
        recipe = _entry_recipe(stored, front, cipher, max_entry_bytes)
        idle = {} if recipe is None else {key: digest for key, digest in idle.items() if digest not in recipe}
        if not idle:
            return []
    # Look up the last uses again, because reading the entries may have taken a long time.
    used = {stored.key: stored.used_ns for stored in backend.list()} if idle else {}
    return [stored for stored in bases if stored.key in idle and 0 < used.get(stored.key, 0) < limit]


def _basis_digest(backend: Backend, stored: StoredEntry, cipher: Cipher | None) -> str | None:
    """Return the SHA-256 of a stored basis in hexadecimal, as in recipes. Returns None if the basis is damaged or cannot be read."""
    try:
        data = backend.peek(stored.key)
        return None if data is None else check_basis(stored.key, decrypt_entry(stored.key, data, cipher), cipher).hex()
    except (KvpackError, OSError, MemoryError):
        return None


def _entry_recipe(stored: StoredEntry, front: Data | None, cipher: Cipher | None, max_entry_bytes: int) -> str | None:
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
