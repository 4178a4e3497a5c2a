"""Finds, loads and saves states after chunks of a prefix, for models with recurrent and convolution layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvpack.formats.errors import NotConsecutive
from kvpack.identity.identity import states_key

from . import state_entries
from .entry_kind import check_size
from .loading import FAULTS, Loader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpack.cache.cache import Cache
    from kvpack.cache.states import States, StatesAt

    from .backend import Backend
    from .counters import Counters
    from .encryption import Cipher
    from .entries import EntryReader


_CHUNKS_PER_REQUEST = 64
"""Number of chunks per request when searching for states. The search starts at the end of the prefix."""


class PrefixStates:
    """The stored states of one identity's prefixes. A prefix is identified by the keys of its chunks."""

    def __init__(self, backend: Backend, loader: Loader, cipher: Cipher | None, counters: Counters, reader: EntryReader) -> None:
        self._backend, self._loader, self._cipher, self._counters, self._reader = backend, loader, cipher, counters, reader

    def resumable_prefix(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return the keys of the longest stored prefix from which a model can resume, because states follow its last chunk."""
        for stop in range(len(keys), 0, -_CHUNKS_PER_REQUEST):
            start = max(0, stop - _CHUNKS_PER_REQUEST)
            result = self._backend.contains_many([states_key(key) for key in keys[start:stop]])
            if any(result):
                return keys[: start + max(at for at, is_present in enumerate(result, 1) if is_present)]
        return []

    def load(self, keys: Sequence[bytes]) -> Cache | None:
        """Return the cache of the longest stored prefix that ends with states, or None if there is none."""
        from kvpack.cache.states import with_states

        while keys := self.resumable_prefix(keys[: self._backend.count_present(keys)]):
            tokens = len(keys) * self._reader.chunk
            result = self._loader.load_states(keys[-1], tokens)
            if result is None:
                keys = keys[:-1]
                continue
            states, entry = result
            cache = self._loader.load(keys, (states_key(keys[-1]), entry))
            if cache is None or cache.tokens < tokens:
                keys = keys[: 0 if cache is None else cache.tokens // self._reader.chunk]
            elif len(states) == len(cache):
                return replace(cache, layers=with_states(cache.layers, states))
            else:
                error = NotConsecutive(f"the prefix has {len(cache)} layers, but its states have {len(states)}")
                self._counters.fault("load", error)
                keys = keys[:-1]
        return None

    def save(self, states: StatesAt, chain: Sequence[bytes], indices_by_position: Mapping[int, int], now_ns: int) -> int:
        """Store ``states``, keyed by position, after chunks that are already stored. Returns the last position with stored states.

        ``indices_by_position`` maps positions, in ascending order, to indices in ``chain``, where states directly follow their chunk.
        """
        can_open = self._loader.can_open_states([chain[place - 1] for place in indices_by_position.values()])
        last = 0
        for (position, place), is_stored in zip(indices_by_position.items(), can_open, strict=True):
            if is_stored or self._put(states[position], chain[: place + 1], position, now_ns):
                last = position
        return last

    def _put(self, states: States, chain: Sequence[bytes], position: int, now_ns: int) -> bool:
        """Store ``states`` under the last key of ``chain``. Returns True on success.

        The key before it is that of the chunk that ends at the states' position.
        """
        chunk, key = chain[-2:]
        try:
            pieces = state_entries.to_pieces(states, chunk, position, self._reader.model, self._reader.recipe)
            if self._cipher is not None:
                pieces = self._cipher.encrypt(key, pieces)
            check_size(f"the states of {key.hex()}", sum(map(len, pieces)), self._reader.max_bytes)
        except FAULTS as error:
            self._counters.fault("encode", error)
            return False
        return self._backend.put(chain, pieces, now_ns)
