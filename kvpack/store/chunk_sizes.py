"""Finds entries stored with other chunk sizes. Lookups never find them, because their keys differ."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from .backend import Backend
from .counters import Counters
from .keys import ID_BYTES, chunk_key
from .redaction import redacted_location

log = logging.getLogger("kvpack.store")

SIZES = sorted({2**power for power in range(14)} | {*range(16, 513, 16)} | {*range(100, 1001, 100)})
"""Chunk sizes to search for, in tokens."""
MAX_SEARCHES = 3
"""Maximum number of searches for other chunk sizes after failed lookups. Each search may cost a request."""


def stored_chunk_sizes(backend: Backend, root: bytes, ids: bytes, inputs: bytes = b"", sizes: Sequence[int] = SIZES) -> list[int]:
    """Return the chunk sizes with which the first chunk of ``ids`` is stored. Only ``sizes`` are tried.

    ``inputs`` is the digest of that chunk's other inputs.
    """
    possible = [size for size in sizes if size * ID_BYTES <= len(ids)]
    present = backend.contains_many([chunk_key(root, ids[: size * ID_BYTES], inputs) for size in possible])
    return [size for size, is_present in zip(possible, present, strict=True) if is_present]


class ChunkSizeSearch:
    """After failed lookups, searches for the same tokens in chunks of other sizes, until some are found."""

    def __init__(self, backend: Backend, counters: Counters, location: Any, root: bytes, chunk: int) -> None:
        self._backend, self._counters, self._location, self._root, self._chunk = backend, counters, location, root, chunk
        self._tries_left = MAX_SEARCHES

    def search(self, ids: bytes, inputs: bytes) -> None:
        """Count and log entries of ``ids`` in chunks of a different size. ``inputs`` is the digest of the first chunk's other inputs."""
        sizes = [size for size in SIZES if size != self._chunk]
        if not self._tries_left or len(ids) < sizes[0] * ID_BYTES:
            return
        self._tries_left -= 1
        result = stored_chunk_sizes(self._backend, self._root, ids, inputs, sizes)
        if result:
            self._tries_left = 0
            self._counters.add("other_chunks")
            log.warning(
                "%s: nothing is stored for these tokens in chunks of %d, but entries in chunks of %d exist: open the store with chunk=%d",
                redacted_location(self._location),
                self._chunk,
                result[0],
                result[0],
            )
