"""Totals of a location by model and recipe. In an indexed folder and on Redis, only the headers of new entries are read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .backend import MAX_ENTRY_BYTES, Backend, StoredEntry
from .catalog import Catalog, read_catalog
from .directory import Directory
from .entry_descriptions import OTHER_KINDS, chunk_description, kind_description
from .redis import Redis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import TypeIs

    from kvpack.file.atomic import Progress

    from .encryption import Cipher


@dataclass
class Summary:
    """The totals of a location: entries, bytes and tokens by model and recipe, other entries by kind, and unreadable entries."""

    chunks: dict[tuple[tuple[tuple[str, str], ...], str], Counter[str]] = field(default_factory=dict)
    kinds: dict[str, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in OTHER_KINDS})
    unreadable: int = 0
    undecryptable: int = 0

    @property
    def count(self) -> int:
        """Total number of entries, readable or not."""
        counts = [*self.chunks.values(), *self.kinds.values()]
        return self.unreadable + sum(count["entries"] for count in counts)

    def identities(self) -> list[tuple[dict[str, str], str, Counter[str]]]:
        """Return (model, recipe, counts of entries, bytes and tokens) for each model and recipe."""
        return [(dict(model), recipe, count) for (model, recipe), count in sorted(self.chunks.items())]

    def add(self, description: dict[str, Any], entries: int, size: int) -> None:
        """Add ``entries`` entries, with ``size`` bytes in total, to the totals. ``description`` describes all of them."""
        if description["kind"] != "chunk":
            self.kinds[description["kind"]].update(entries=entries, bytes=size)
            return
        identity = (tuple(sorted(description["model"].items())), description["recipe"])
        self.chunks.setdefault(identity, Counter()).update(entries=entries, bytes=size, tokens=entries * description["tokens"])


def summarize(
    backend: Backend, progress: Progress | None = None, cipher: Cipher | None = None, *, max_entry_bytes: int = MAX_ENTRY_BYTES
) -> Summary:
    """Return the totals of a location. See ``read_catalog`` for the parameters."""
    summary = Summary()
    # Descriptions ignore encryption keys and size limits, so they are not used with either.
    known = backend.read_descriptions() if _has_descriptions(backend) and cipher is None and max_entry_bytes == MAX_ENTRY_BYTES else None
    for text, entries, size in known.totals if known is not None else ():
        summary.add(json.loads(text), entries, size)
    listed = None if known is None else known.missing
    catalog = read_catalog(backend, progress, cipher, max_entry_bytes=max_entry_bytes, listed=listed)
    for text, _, size in _described_entries(catalog):
        summary.add(json.loads(text), 1, size)
    summary.unreadable, summary.undecryptable = len(catalog.unreadable), len(catalog.undecryptable)
    if known is not None and _has_descriptions(backend):
        backend.set_descriptions([(key, text) for text, key, _ in _described_entries(catalog)])
    return summary


def add_missing_descriptions(backend: Backend) -> Sequence[StoredEntry] | None:
    """Add missing descriptions of entries. Returns all entries that are not described as chunks, states or pages.

    Returns None if the location does not store descriptions.
    """
    if not _has_descriptions(backend) or (known := backend.read_descriptions()) is None:
        return None
    backend.set_descriptions([(key, text) for text, key, _ in _described_entries(read_catalog(backend, listed=known.missing))])
    known = backend.read_descriptions(listed_kind="bases")
    return None if known is None else known.missing


def _has_descriptions(backend: Backend) -> TypeIs[Directory | Redis]:
    return isinstance(backend, Directory | Redis)


def _described_entries(catalog: Catalog) -> list[tuple[str, bytes, int]]:
    """Return (description, key, size in bytes) for each readable entry."""
    result: list[tuple[str, bytes, int]] = []
    for entry in catalog.entries.values():
        result.append((chunk_description(tuple(entry.model.items()), entry.recipe, entry.tokens), entry.stored.key, entry.stored.size))
    for kind, stored in (
        *(("pages", page) for page in catalog.pages.values()),
        *(("states", states.stored) for states in catalog.states.values()),
        *(("bases", basis.stored) for basis in catalog.bases.values()),
    ):
        result.append((kind_description(kind), stored.key, stored.size))
    return result
