"""Selects the entries to remove from a store by model, recipe, age or tenant, based on their headers.

Entries do not contain their tenant. They are found by the roots of their chains, whose hashes include the tenant.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpack.coding.recipes import canonical_recorded_text
from kvpack.identity.identity import Identity, states_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .backend import Backend
    from .catalog import Catalog, ChunkEntry
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
        """Return the keys of matching chunks and of the states after them. A filter by age alone also matches serving engines' pages."""
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
    """Return the keys of all chunks that descend from one of ``roots``. No ancestor may be missing."""
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


def roots_of(identity: Identity) -> tuple[bytes, bytes]:
    """Return the two keys that first chunks of ``identity`` may have as their parent: for models without states, and with states."""
    return identity.digest, states_key(identity.digest)


def remove(backend: Backend, counters: Counters, keys: Iterable[bytes], *, pinned: bool) -> int:
    """Remove the entries of ``keys`` and return how many were removed.

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
    """Remove the pins of chains that contain any of the missing ``keys``. The rest of a chain is unreachable once an entry is missing."""
    for pin in backend.pins():
        if not keys.isdisjoint(pin.chain):
            backend.unpin([pin.key])


def _tenant_keys(catalog: Catalog, tenant: str) -> set[bytes]:
    identities = {(tuple(sorted(entry.model.items())), entry.recipe) for entry in catalog.entries.values() if entry.start == 0}
    named = [Identity.of_header(dict(model), recipe, tenant) for model, recipe in identities]
    return chain_keys(catalog, (root for identity in named for root in roots_of(identity)))
