"""Loads a prefix: fetches, decrypts, checks and joins its entries. If a check fails, the copy in the next tier is tried.

Only entries that pass all checks are recorded as used and copied to faster tiers.
"""

from __future__ import annotations

import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from kvpack.formats.errors import KvpackError, Undecryptable
from kvpack.identity.identity import states_key
from kvpack.runtime.threads import in_parallel

from . import state_entries
from .encryption import Cipher, decrypt_entry
from .entry_kind import means_damage
from .entry_probe import KeySet, check_front
from .windows import SlidingWindows

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from kvpack.cache.cache import Cache
    from kvpack.cache.states import States

    from .backend import Backend, Data, FoundEntry
    from .counters import Counters
    from .entries import EntryReader

FAULTS = (KvpackError, OSError, MemoryError, RuntimeError)
"""Errors that an entry may cause, including torch's out-of-memory errors. Each is counted, and the entry counts as missing."""

_FRONTS_AT_ONCE, _ENCRYPTED_AT_ONCE = 64, 8
"""Maximum number of fronts in memory, first of unencrypted and then of encrypted entries.

A front may keep a file open. The front of an encrypted entry is the whole entry.
"""
_FIRST_PART, _PART_BYTES = 8, 64 * 2**20
"""Number of entries that are read first, and approximate size in bytes of each later part."""


class Loader:
    """Loads the chains of one identity. Chunks outside all sliding ``windows`` are skipped. ``leading_keys`` precede every chain."""

    def __init__(
        self,
        backend: Backend,
        reader: EntryReader,
        cipher: Cipher | None,
        counters: Counters,
        leading_keys: Sequence[bytes] = (),
        windows: SlidingWindows | None = None,
    ) -> None:
        self._backend, self._reader, self._cipher, self._counters, self._before = backend, reader, cipher, counters, leading_keys
        self._windows = SlidingWindows((), reader.chunk) if windows is None else windows
        self._readable_keys, self._suspect_keys = KeySet(), KeySet()

    def require_shape_of(self, cache: Cache) -> None:
        """From now on, reject entries with a different shape than ``cache``, which the model produced."""
        if self._reader.require_shape_of(cache):
            self._readable_keys = KeySet()

    def load(self, keys: Sequence[bytes], states_entry: tuple[bytes, FoundEntry] | None = None) -> Cache | None:
        """Return the cache of the longest stored prefix of the chain ``keys``, or None if nothing is stored. Every digest is checked.

        ``states_entry`` is the key and the entry of the states after the chain. Their use is recorded with the chain's.
        """
        whole = len(keys)
        if self._windows.first_chunk(len(keys)):
            # No layer attends to the first chunks. They must be present, but are not read.
            keys = keys[: self._backend.count_present(keys)]
        while keys:
            first = self._windows.first_chunk(len(keys))
            chunks, result = self._read_chain(keys, first)
            cache = self._join(chunks, keys[first:], result)
            count = first + len(chunks)
            if first and cache is not None and len(cache) > len(self._windows.layers):
                # Layers that the identity does not list attend to all tokens.
                self._windows = SlidingWindows((*self._windows.layers, None), self._windows.chunk)
            if self._windows.first_chunk(count) < first:
                # The windows of a shorter prefix reach back to earlier chunks.
                keys = keys[:count]
                continue
            if cache is not None:
                self._mark_readable(keys[first:count])
                chain, entries = [*self._before, *keys[:count]], result[: len(chunks)]
                if states_entry is not None and count == whole:
                    chain, entries = [*chain, states_entry[0]], [*entries, states_entry[1]]
                self._backend.accept(chain, entries, time.time_ns())
                cache = self._windows.crop(cache)
            return cache
        return None

    def _read_chain(self, keys: Sequence[bytes], first: int) -> tuple[list[Cache], list[FoundEntry]]:
        """Read the chunks of a chain, starting with chunk ``first``, up to the first invalid or missing entry.

        Returns their caches and entries.
        """
        chunks: list[Cache] = []
        result: list[FoundEntry] = []
        after_tier = -1
        while first + len(chunks) < len(keys):
            with closing(self._find_batches(keys[first + len(chunks) :], after_tier)) as parts:
                for part, entries in parts:
                    read_chunks, error = self._read(entries, part, first + len(chunks))
                    chunks += read_chunks
                    result += entries[: len(read_chunks)]
                    if error is not None or len(entries) < len(part):
                        break
            if error is None:
                break
            # A slower tier may have a good copy of the bad entry.
            bad = entries[len(read_chunks)]
            self._reject(part[len(read_chunks)], bad, error)
            after_tier = bad.tier
        return chunks, result

    def _find_batches(self, keys: Sequence[bytes], after_tier: int) -> Generator[tuple[Sequence[bytes], list[FoundEntry]], None, None]:
        """Yield consecutive slices of ``keys``, each with its entries.

        The first key is searched for only in tiers slower than ``after_tier``. On a local disk, the next slice is read while the caller
        checks the current one. A server receives a single request.
        """
        if not self._backend.is_private or len(keys) <= _FIRST_PART:
            yield keys, self._backend.find(keys, after_tier=after_tier)
            return
        entries = self._backend.find(keys[:_FIRST_PART], after_tier=after_tier)
        yield keys[:_FIRST_PART], entries
        size = sum(len(entry.data) for entry in entries) // _FIRST_PART
        count = max(_FIRST_PART, _PART_BYTES // max(1, size))
        parts = [keys[begin : begin + count] for begin in range(_FIRST_PART, len(keys), count)]
        with closing(in_parallel(self._backend.find, parts, 1, 1)) as found:
            yield from zip(parts, found, strict=True)

    def load_states(self, chunk: bytes, position: int) -> tuple[States, FoundEntry] | None:
        """Return the states stored after a chunk, with the entry that contains them, or None if there is no readable entry.

        ``chunk`` is the chunk's key, and ``position`` is the end of the chunk.
        """
        key, after_tier = states_key(chunk), -1
        while entries := self._backend.find([key], after_tier=after_tier):
            try:
                decrypted = decrypt_entry(key, entries[0].data, self._cipher)
                return state_entries.read(decrypted, chunk, position, self._reader.model, self._reader.recipe), entries[0]
            except FAULTS as error:
                self._reject(key, entries[0], error)
                after_tier = entries[0].tier
        return None

    def can_open_states(self, chunks: Sequence[bytes]) -> list[bool]:
        """Return a bool for each chunk key in ``chunks``: True if the states after the chunk are stored with a readable front."""
        keys = [states_key(chunk) for chunk in chunks]
        present = self._backend.contains_many(keys)
        result = [is_present and key in self._readable_keys for key, is_present in zip(keys, present, strict=True)]
        requested = [at for at, is_present in enumerate(present) if is_present and not result[at]]
        for at, data in zip(requested, self._backend.peek_many([keys[at] for at in requested], front=True), strict=True):
            with suppress(*FAULTS):
                if data is not None:
                    check_front(keys[at], data, self._cipher)
                    result[at] = True
        self._mark_readable([key for key, opens in zip(keys, result, strict=True) if opens])
        return result

    def can_open(self, keys: Sequence[bytes], chunk_indices: Sequence[int]) -> list[bool]:
        """Return a bool for each of ``keys``: True if this process can read its entry. All entries must exist.

        ``chunk_indices`` contains the index of each chunk. Each front is read only once. Damaged entries are removed.
        """
        result = [key in self._readable_keys for key in keys]
        requested = [at for at, key in enumerate(keys) if not result[at] and key not in self._suspect_keys]
        at_once = _FRONTS_AT_ONCE if self._cipher is None else _ENCRYPTED_AT_ONCE
        for begin in range(0, len(requested), at_once):
            part = requested[begin : begin + at_once]
            for at, data in zip(part, self._backend.peek_many([keys[at] for at in part], front=True), strict=True):
                result[at] = data is not None and self._can_open(keys[at], chunk_indices[at], data)
        self._mark_readable([keys[at] for at in requested if result[at]])
        return result

    def _can_open(self, key: bytes, chunk_index: int, data: Data) -> bool:
        try:
            check_front(key, data, self._cipher, self._reader.check_shape)
        except FAULTS:
            # The front may not be enough to decide.
            return self._can_read(key, chunk_index)
        return True

    def _mark_readable(self, keys: Sequence[bytes]) -> None:
        self._readable_keys.add(keys)
        self._suspect_keys.remove(keys)

    def _can_read(self, key: bytes, chunk_index: int) -> bool:
        after_tier = -1
        while entries := self._backend.find([key], after_tier=after_tier):
            _, error = self._read(entries, [key], chunk_index)
            if error is None:
                return True
            self._reject(key, entries[0], error)
            after_tier = entries[0].tier
        return False

    def _read(self, entries: Sequence[FoundEntry], keys: Sequence[bytes], first: int) -> tuple[list[Cache], Exception | None]:
        """Return the caches of ``entries`` up to the first invalid entry, and the error of that entry.

        ``first`` is the index of the first chunk.
        """
        decrypted: list[Data] = []
        refused: Exception | None = None
        for key, entry in zip(keys, entries, strict=False):
            try:
                decrypted.append(decrypt_entry(key, entry.data, self._cipher))
            except FAULTS as error:
                refused = error
                break
        chunks: list[Cache] = []
        try:
            chunks.extend(self._reader.read(decrypted, keys, first=first))
        except FAULTS as error:
            return chunks, error
        return chunks, refused

    def _join(self, chunks: list[Cache], keys: Sequence[bytes], entries: Sequence[FoundEntry]) -> Cache | None:
        """Join ``chunks`` into one cache. Returns None if the list is empty.

        A chunk that does not continue the previous one is dropped, along with all later chunks.
        """
        from kvpack.cache.cache import concat

        refused: Exception | None = None
        while chunks:
            try:
                cache = concat(chunks)
                break
            except FAULTS as error:
                refused = error
                chunks.pop()
        else:
            cache = None
        if refused is not None:
            # The chunk is intact but does not continue the previous ones, or memory ran out.
            self._reject(keys[len(chunks)], entries[len(chunks)], refused)
        return cache

    def _reject(self, key: bytes, entry: FoundEntry, error: Exception) -> None:
        self._readable_keys.remove([key])
        if reject_entry(self._backend, self._counters, key, entry, error):
            # An entry that is still present could not be removed, or is another tier's copy, which may be damaged too.
            update_suspects = self._suspect_keys.add if self._backend.count_present([key]) else self._suspect_keys.remove
            update_suspects([key])


def reject_entry(backend: Backend, counters: Counters, key: bytes, entry: FoundEntry, error: Exception) -> bool:
    """Count a miss for an entry that could not be used. A damaged entry is removed. Returns True if it is damaged.

    An entry that is not damaged is kept, because other stores may be able to read it.
    """
    counters.fault("load", error)
    if isinstance(error, Undecryptable):
        counters.add("undecryptable_entries")
        return False
    if not means_damage(error):
        counters.add("unreadable_entries")
        return False
    counters.add("damaged_entries")
    backend.discard(key, entry)
    return True
