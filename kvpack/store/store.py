"""``Store``: packed prefixes that processes share, split into chunks of tokens. Each chunk is one entry."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Self, Unpack

from kvpack.coding.recipes import basis_digest, parse_recipe
from kvpack.formats.arguments import as_integer, checked_device, describe
from kvpack.formats.errors import InvalidParameter
from kvpack.identity.identity import Identity, states_key
from kvpack.identity.rope import longest_sequence

from .backend import BATCH_BYTES, BATCH_ENTRIES, batches
from .bases import StoredBasis
from .cache_checks import check_cache, check_groups, check_ids, check_length, loaded_inputs, require_input_digests, usable_states
from .catalog import read_catalog
from .chunk_sizes import ChunkSizeSearch
from .counters import Counters, log, with_labels
from .entries import EntryReader, check_decoded_size, to_pieces
from .entry_kind import check_size
from .keys import ID_BYTES, ChunkLink, check_inputs, chunk_keys, chunk_links, token_bytes
from .leases import Leases
from .loading import FAULTS, Loader
from .locations import check_identity, open_for_identity
from .options import StoreKeywords, StoreOptions, check_count
from .pins import PIN_SECONDS, make_pin_terms, validate_owner
from .prefix_states import PrefixStates
from .removal import chain_keys, reclaim, remove, unpin_chains
from .tiers import Tiers, prometheus_text
from .windows import SlidingWindows, check_complete

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from kvpack.cache.cache import Cache
    from kvpack.cache.states import StatesAt
    from kvpack.coding.bases import Basis

CHUNK_TOKENS = 256


class Store:
    """A prefix store: packed prefixes of one identity, shared by every process that opens the same location.

    Prefixes are stored in chunks. Faults such as full disks, dead servers and damaged entries count as misses in ``stats``. The store
    never returns wrong data. Once it is open, faults do not raise errors.

    Args:
        location: A folder, created with the first entry (in /dev/shm, entries are in memory); ``"memory://"``; the URL of a Redis or Valkey
            server (redis://, rediss://, unix://); an object store, by URL (s3://, gs://, az://) or as an object of ``obstore.store``; or a
            list of these as *tiers*, fastest first, such as ``["memory://", "/var/cache/kvpack", "s3://..."]``. Use ``Tier`` to set the
            options of one location. Hits in a slower tier are verified and copied up. Saves go to every tier.
        identity: Everything that the values depend on, except the tokens. The basis of its recipe is stored before the first chunk. If the
            recipe needs a basis but does not contain it, the store's copy is used. Without a copy, nothing is loaded or saved.
        chunk: Tokens per chunk, a multiple of the recipe's token groups.
        lease: Maximum number of seconds that other workers wait for a missing chunk. A ``load`` that does not find the whole prefix leases
            the first missing chunk. Other workers that request the chunk wait until this store saves it or is closed, so that a prefix is
            computed only once. Choose the time that the longest prompt takes. If the holder dies, the others wait at most ``lease``
            seconds, and in a folder not at all. By default, nobody waits.
        max_bytes: Budget for the entries of all writers at the location. The least recently used entries are evicted first. In folders,
            sizes are rounded up to disk blocks. While another store uses the folder with a larger budget, this store evicts nothing.
        ttl: Seconds after which an entry expires unless a store saves or loads it. The ``ttl`` of the last user applies. Pinned entries do
            not expire. ``save`` and ``collect`` remove expired entries from folders and object stores.
        min_free: Number of bytes to leave free on a folder's disk.
        durable: Force a folder's entries to disk before ``save`` returns.
        trusted_group: Number or name of a group whose members may write to the folder, and are trusted with its contents. Otherwise, a
            folder that others may write to is refused, and another user's folder is only read, by copying files (spec/store.md, Trust).
        timeout: Maximum number of seconds per request. Defaults to 1 for Redis and 5 for object stores.
        storage_options: Settings of obstore by name, such as endpoint. Other settings come from environment variables.
        write_back: Write all tiers except the first in the background. ``close`` and the end of the program wait for them, until Ctrl-C.
        encryption: AES keys of 16, 24 or 32 bytes by id. Entries are encrypted with the first key and read with any of them. An unencrypted
            entry counts as damaged. An entry with an unknown key is kept, but does not count as stored.
        check_values: Check the rules of the codecs, not only digests, on every load. By default, they are checked if other users may write
            unencrypted entries.
        max_entry_bytes: Maximum size of an entry, and of the values of one of its layers at 16 bits each. Larger entries are neither saved
            nor read.

    Raises:
        InvalidParameter: An argument is invalid, such as a chunk that is not a multiple of the recipe's token groups.

    >>> store = kvpack.Store("store", kvpack.Identity("llama", "octopus-3"), chunk=32)
    >>> store.save(list(range(64)), kvpack.pack(past, "octopus-3"))
    64
    >>> tokens, cache = store.load(list(range(64)) + [1, 2])
    >>> tokens, cache.tokens
    (64, 64)
    """

    def __init__(
        self,
        location: Any,
        identity: Identity,
        *,
        chunk: int = CHUNK_TOKENS,
        lease: float | None = None,
        **options: Unpack[StoreKeywords],
    ) -> None:
        check_identity(identity)
        store_options = StoreOptions(**options)
        check_count("chunk", chunk, 1)
        check_groups(identity, chunk)
        recipe = parse_recipe(identity.recipe)
        named, given = basis_digest(recipe), identity.basis
        self.location, self.identity, self.chunk = location, identity, chunk
        self._max_entry_bytes = store_options.max_entry_bytes
        self._counters = Counters()
        self._backend, self._cipher, checked = open_for_identity(location, identity, self._counters, store_options)
        self._chunk_size_search = ChunkSizeSearch(self._backend, self._counters, location, identity.root, chunk)
        self._leases = None if lease is None else Leases(self._backend, self._counters, lease)
        self._root = identity.root
        self._model = identity.header_model
        self._max_sequence = longest_sequence(identity.rope)
        self._stored_basis = None
        if named is not None:
            backend_arguments = self._backend, self._cipher, self._counters, store_options.max_entry_bytes
            self._stored_basis = StoredBasis(named, self._model, *backend_arguments, given, identity.digests)
        self._has_logged_short_prefix = False
        self._leading_keys = [] if self._stored_basis is None else self._stored_basis.keys
        self._reader = EntryReader(
            self._model, identity.recipe, chunk, check_values=checked, basis=given, max_bytes=store_options.max_entry_bytes
        )
        self._loader = Loader(
            self._backend, self._reader, self._cipher, self._counters, self._leading_keys, SlidingWindows(identity.windows, chunk)
        )
        self._states = None
        if identity.keeps_states:
            self._states = PrefixStates(self._backend, self._loader, self._cipher, self._counters, self._reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release connections and leases. Loaded caches stay valid, and entries are kept."""
        if self._leases is not None:
            self._leases.close()
        self._backend.close()

    def keys(self, token_ids: Any, *, inputs: Sequence[bytes] | None = None) -> list[bytes]:
        """Return the keys of a prefix's whole chunks, first chunk first (spec/store.md). Raises InvalidParameter for invalid ids or
        ``inputs``.

        ``inputs`` contains one digest (at most 64 bytes) per chunk. It covers everything else that the chunk depends on, such as images or
        embeddings, and is b"" if the ids determine the chunk. The digest is part of the chunk's key, and so affects all later keys. All
        methods accept ``inputs`` in this form.
        """
        return chunk_keys(self._root, token_bytes(token_ids), self.chunk, inputs)

    def match(self, token_ids: Any, *, inputs: Sequence[bytes] | None = None) -> int:
        """Return the length in tokens of the longest stored prefix, a multiple of ``chunk``, without loading it.

        For a model that keeps states, only prefixes with stored states count. As in all methods, ``token_ids`` is a list or an integer
        array ``[token]`` or ``[1, token]``. Raises InvalidParameter for invalid ids or ``inputs``.
        """
        ids = token_bytes(token_ids)
        keys = chunk_keys(self._root, ids, self.chunk, inputs)
        readable = self._has_fixed_frequencies(ids) and (self._stored_basis is None or self._stored_basis.is_available())
        faults = self._counters.fault_count
        count = len(self._resumable_keys(keys)) if readable else 0
        if not count and self._counters.fault_count == faults:
            self._chunk_size_search.search(ids, inputs[0] if inputs else b"")
        return self.chunk * count

    def load(
        self, token_ids: Any, *, device: torch.device | str = "cpu", inputs: Sequence[bytes] | None = None
    ) -> tuple[int, Cache | None]:
        """Load the longest stored prefix. Returns its length in tokens and its cache, or (0, None) if nothing is stored.

        Every digest is checked. The cache's pages are views of mapped files, or copies on ``device``. Pass all ids except the last, because
        a model needs a token to continue from. For a layer with a sliding window (``Identity.windows``), only the chunks within the window
        are loaded. For layers that keep states, the states after the prefix's last token are loaded. Raises InvalidParameter for invalid
        ids or ``inputs``.
        """
        ids = token_bytes(token_ids)
        digests = check_inputs(inputs, ids, self.chunk)
        if str(device) != "cpu":
            device = checked_device(device)
        keys = chunk_keys(self._root, ids, self.chunk, digests)
        self._counters.add("loads")
        self._counters.add("load_tokens", len(keys) * self.chunk)
        faults = self._counters.fault_count
        with self._counters.time_operation("load"):
            cache = self._load(keys) if self._has_fixed_frequencies(ids) else None
        if cache is None and self._counters.fault_count == faults:
            self._chunk_size_search.search(ids, digests[0] if digests else b"")
        if cache is not None and str(device) != "cpu":
            cache = self._move_cache(cache, device)
        if cache is None:
            return 0, None
        self._counters.add("hit_tokens", cache.tokens)
        self._counters.add("hit_chunks", cache.tokens // self.chunk)
        return cache.tokens, replace(cache, inputs=loaded_inputs(ids[: cache.tokens * ID_BYTES], digests, self.chunk))

    def _resumable_keys(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return the keys of the longest stored prefix from which a model can continue."""
        keys = keys[: self._backend.count_present(keys)]
        return keys if self._states is None else self._states.resumable_prefix(keys)

    def save(self, token_ids: Any, cache: Cache, *, inputs: Sequence[bytes] | None = None) -> int:
        """Store every whole packed chunk of the prefix in ``cache``. Returns the number of tokens now stored.

        ``cache`` is a packed cache that starts at the first token, or an object with such a cache as ``packed``. Tokens of a raw tail are
        not stored. ``token_ids`` must have one id per token of the cache. If their lengths differ, truncate the longer one, for example
        with ``token_ids[:-1]`` if the newest token has no key yet. A cache that contains all of its own ids (``Cache.inputs``) is stored up
        to the shorter length.

        For layers that keep states, ``cache`` must have states at the end of some chunk (see ``kvpack.prefill`` and
        ``KvpackCache.snapshot_states``). Chunks after the last such state are not stored.

        Raises InvalidParameter if the number of ids is wrong, if they differ from the cache's own, or if the cache has another recipe or
        model, does not start at position 0, has several sequences, or lacks states. Also raises it in the following cases:

        - A sliding window has dropped tokens whose chunks are not stored. ``KvpackCache(..., keep_all=True)`` keeps all tokens.
        - The cache depends on more than token ids (``Cache.inputs``), but ``inputs`` is missing.
        - The cache is so long that the model's RoPE uses other frequencies than for shorter sequences. ``match`` and ``load`` find nothing
          for such ids.
        """
        cache = getattr(cache, "packed", cache)
        check_cache(cache, self.identity)
        ids = token_bytes(token_ids)
        digests = check_inputs(inputs, ids, self.chunk)
        check_ids(cache, ids)
        check_length(cache, self._max_sequence)
        requested = chunk_keys(self._root, ids, self.chunk, digests)
        packed = min((layer.skipped + side.packed_tokens for layer in cache for side in layer.sides.values()), default=0)
        states: StatesAt = {}
        if self._states is not None:
            states = usable_states(cache, self.chunk, packed)
            packed = max(states, default=0)
        ids = ids[: packed * ID_BYTES]
        digests = digests[: len(ids) // ID_BYTES // self.chunk]
        require_input_digests(cache, digests, self.chunk)
        self._loader.require_shape_of(cache)
        if not requested:
            self._log_short_prefix(cache.tokens)
            return 0
        self._counters.add("saves")
        try:
            with self._counters.time_operation("save"):
                if self._stored_basis is None or not digests:
                    return self._save(cache, ids, digests, states)
                # Store the basis before the chunks, and again after them in case another writer has evicted it since.
                if not self._stored_basis.put(time.time_ns()):
                    return 0
                self._reader.basis = self._stored_basis.get()
                stored = self._save(cache, ids, digests, states)
                return stored if self._stored_basis.put(time.time_ns()) else 0
        finally:
            if self._leases is not None:
                self._leases.release(requested)

    def _log_short_prefix(self, tokens: int) -> None:
        """Log a warning, once per store, that a prefix is shorter than one chunk and is never stored."""
        if not self._has_logged_short_prefix:
            self._has_logged_short_prefix = True
            log.warning(
                "nothing was stored: the prefix has %d tokens (in a chat: prompt and reply), but only whole chunks of %d are stored: "
                "pass a smaller chunk= to store shorter prefixes (logged once)",
                tokens,
                self.chunk,
            )

    def _save(self, cache: Cache, ids: bytes, digests: Sequence[bytes], states: StatesAt) -> int:
        """Store the whole chunks of ``ids``, and the ``states`` after some of them. Returns the number of tokens now stored."""
        if states:
            from kvpack.cache.cache import without_states

            cache = without_states(cache)
        links = list(chunk_links(self._root, ids, self.chunk, digests))
        keys = [link[0] for link in links]
        present_count = self._backend.count_present(keys)
        readable = dict(enumerate(self._loader.can_open(keys[:present_count], range(present_count))))
        stored = sum(takewhile(bool, readable.values()))
        if stored < len(links):
            check_complete(cache, stored * self.chunk)
        self._counters.add("present_chunks", sum(readable.values()))
        if self._cipher is not None:
            # Also check entries after a missing one: only decrypting an encrypted entry shows whether it can be read here.
            later = range(present_count + 1, len(keys))
            held = [n for n, present in zip(later, self._backend.contains_many(keys[present_count + 1 :]), strict=True) if present]
            readable |= zip(held, self._loader.can_open([keys[n] for n in held], held), strict=True)
        # An entry that only other stores may be able to read is kept. No chunk after it is stored, because lookups would not find it.
        unreadable = [index for index, is_readable in readable.items() if not is_readable]
        still_present = zip(unreadable, self._backend.contains_many([keys[index] for index in unreadable]), strict=True)
        end = next((index for index, present in still_present if present), len(links))
        # Ancestors must be evicted last, so their use is recorded first.
        now = time.time_ns()
        chain, places = self._chain(keys, states)
        self._backend.touch(chain[: places[stored]], now)
        for batch in self._batches([n for n in range(stored, end) if not readable.get(n, False)], links, cache):
            put = self._backend.put_all(chain, {places[index]: pieces for index, pieces in batch.items()}, now)
            readable |= zip(batch, put, strict=True)
            if not all(put):
                break
        stored = sum(takewhile(bool, (readable.get(index, False) for index in range(end))))
        if self._states is None:
            return stored * self.chunk
        # The states after a chunk are the last entry before the next chunk.
        ends = {position: places[position // self.chunk] - 1 for position in sorted(states) if position <= stored * self.chunk}
        return self._states.save(states, chain, ends, now)

    def _chain(self, keys: Sequence[bytes], states: StatesAt) -> tuple[list[bytes], list[int]]:
        """Return the keys of all entries of a prefix, and the indices of its chunks in this list, followed by the length of the list.

        States follow their chunk. They are therefore evicted after the next chunk, but before their own chunk.
        """
        chain, places = [*self._leading_keys], []
        for index, key in enumerate(keys, 1):
            places.append(len(chain))
            chain += [key, states_key(key)] if index * self.chunk in states else [key]
        return chain, [*places, len(chain)]

    def _batches(self, indices: Sequence[int], links: Sequence[ChunkLink], cache: Cache) -> Iterator[dict[int, list[memoryview]]]:
        """Encode the entries of chunks, and yield them in batches, one per request. Stops at the first chunk that cannot be encoded."""

        def encode_entries() -> Iterator[tuple[tuple[int, list[memoryview]], int]]:
            for index in indices:
                pieces = self._pieces(cache, index, links[index])
                if pieces is None:
                    return
                yield (index, pieces), sum(map(len, pieces))

        return map(dict, batches(encode_entries(), BATCH_ENTRIES, BATCH_BYTES))

    def _pieces(self, cache: Cache, index: int, link: ChunkLink) -> list[memoryview] | None:
        """Return the entry of chunk ``index`` as byte buffers. If the chunk cannot be encoded, count a fault and return None."""
        key, parent, chunk_ids, digest = link
        try:
            chunk = cache[:, index * self.chunk : (index + 1) * self.chunk]
            chunk = replace(chunk, model=self._model, recipe=self.identity.recipe, inputs=None, metadata={}, position_offsets=None)
            check_decoded_size(chunk, key, self._max_entry_bytes)
            pieces = to_pieces(chunk, key, parent, chunk_ids, digest)
            if self._cipher is not None:
                pieces = self._cipher.encrypt(key, pieces)
            check_size(f"the chunk of {key.hex()}", sum(map(len, pieces)), self._max_entry_bytes)
        except FAULTS as error:
            # For example, the chunk begins inside a token group of a cache that was packed in parts.
            self._counters.fault("encode", error)
            return None
        return pieces

    def pin(self, token_ids: Any, *, inputs: Sequence[bytes] | None = None, owner: str | None = None, seconds: int = PIN_SECONDS) -> int:
        """Protect the longest stored prefix from eviction by any process. Returns its length in tokens.

        The pin lasts until ``unpin`` or ``delete``, but at most ``seconds`` seconds (by default, a day). It belongs to ``owner`` (by
        default, this host and process), and replaces the owner's earlier pin of the prefix. Raises InvalidParameter for an invalid
        argument.
        """
        terms = make_pin_terms(owner, seconds)
        keys = self.keys(token_ids, inputs=inputs)
        usable = self._resumable_keys(keys)
        before = [key for key in self._leading_keys if self._backend.count_present([key])]
        return len(usable) * self.chunk if usable and self._backend.pin([*before, *self._add_states_key(usable)], terms) else 0

    def unpin(self, token_ids: Any, *, inputs: Sequence[bytes] | None = None, owner: str | None = None) -> bool:
        """Remove the pin that ``owner`` (None for all owners) has set on a prefix. Returns True if it was pinned.

        Raises InvalidParameter for an invalid argument.
        """
        keys, owner = self.keys(token_ids, inputs=inputs), validate_owner(owner)
        pinned = {pin.key for pin in self._backend.pins() if owner in (None, pin.owner)}
        chains = (self._add_states_key(keys[:count]) for count in range(len(keys), 0, -1))
        return any(chain[-1] in pinned and self._backend.unpin(chain, owner) for chain in chains)

    def _add_states_key(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys of a prefix's chunks. For a model that keeps states, add the key of the states after the last chunk."""
        return list(keys) if self._states is None else [*keys, states_key(keys[-1])]

    def delete(self, token_ids: Any, *, start: int = 0, inputs: Sequence[bytes] | None = None) -> int:
        """Remove a prefix's stored chunks from token ``start`` on, along with their pins. Returns how many chunks were removed.

        Longer prefixes that continue these chunks are no longer found or pinned, and are evicted when room is needed.
        """
        start = as_integer(start, "start")
        if start < 0:
            raise InvalidParameter(f"start is {describe(start)}, expected a non-negative token position")
        keys = self.keys(token_ids, inputs=inputs)
        removed = keys[-(-start // self.chunk) :]
        unpin_chains(self._backend, set(removed))
        after = [] if self._states is None else map(states_key, removed)
        count = len(self._backend.delete([*removed, *after]) & set(removed))
        self._counters.add("deleted_entries", count)
        return count

    def clear(self) -> int:
        """Remove every stored prefix of this identity, along with its pins. Returns how many entries were removed.

        Reads the header of every entry. Chunks with a missing ancestor are found neither by this method nor by ``load``. They are
        eventually evicted.
        """
        catalog = read_catalog(self._backend, cipher=self._cipher, max_entry_bytes=self._max_entry_bytes)
        keys = chain_keys(catalog, [self._root])
        keys |= {catalog.states[key].stored.key for key in keys & set(catalog.states)}
        return remove(self._backend, self._counters, keys, pinned=True)

    def basis(self) -> Basis | None:
        """Return the recipe's basis, from the identity or the store. Returns None if neither has it, or if the recipe needs no basis."""
        return None if self._stored_basis is None else self._stored_basis.get()

    def collect(self) -> None:
        """Remove files of dead writers, and bases that no entry has needed for an hour.

        Then recount the remaining entries, and evict entries until the rest fits the budget.
        """
        reclaim(self._backend, self._counters, self._cipher, max_entry_bytes=self._max_entry_bytes)
        self._backend.collect()

    def counters(self) -> dict[str, Any]:
        """Return the counters of this store since it was opened, by name. ``faults`` is a dict keyed by operation and reason."""
        return self._counters.as_dict()

    def stats(self) -> dict[str, Any]:
        """Return ``counters``, plus the ``entries`` and ``bytes`` stored at its location.

        The location is listed to count them. In a folder, only subfolders that have changed since the last count are listed. A store with
        tiers also returns ``tiers``, a list of each tier's stats.
        """
        entries, size = self._backend.size()
        tiers = {"tiers": self._backend.stats()} if isinstance(self._backend, Tiers) else {}
        return {**self.counters(), "entries": entries, "bytes": size, **tiers}

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """Return ``stats`` in Prometheus' text format. Every metric has ``labels``, which default to the identity's model."""
        entries, size = self._backend.size()
        gauges = {
            "entries": ("Number of entries in the store.", entries),
            "bytes": ("Total size in bytes of the entries in the store.", size),
        }
        text = prometheus_text(self._counters, self._backend, gauges)
        return with_labels(text, {"model": self.identity.model} if labels is None else labels)

    def _load(self, keys: Sequence[bytes]) -> Cache | None:
        """Return the cache of the longest stored prefix. If other workers are computing the next chunks, wait for them first."""

        def load() -> Cache | None:
            result = self._loader.load if self._states is None else self._states.load
            return result(keys) if self._has_basis(keys) else None

        return load() if self._leases is None else self._leases.load(keys, load, self.chunk)

    def _has_basis(self, keys: Sequence[bytes]) -> bool:
        """Return True if the first entry exists and the recipe's basis, if any, is available.

        If necessary, the basis is read from the store.
        """
        if self._stored_basis is None or self._reader.basis is not None:
            return True
        if not self._backend.count_present(keys[:1]):
            return False
        self._reader.basis = self._stored_basis.get()
        if self._reader.basis is None:
            self._stored_basis.record_missing("load")
        return self._reader.basis is not None

    def _has_fixed_frequencies(self, ids: bytes) -> bool:
        """Return True if RoPE uses the same frequencies for ``ids`` plus one token as for any shorter sequence."""
        return self._max_sequence is None or len(ids) // ID_BYTES < self._max_sequence

    def _move_cache(self, cache: Cache, device: torch.device | str) -> Cache | None:
        """Return the cache on ``device``. If the device lacks memory, count a fault and return None."""
        import torch

        try:
            # Every chunk is a separate run, and kernels prepare, decode and copy each run separately.
            return replace(cache, layers=tuple(layer.merged().to(device) for layer in cache.layers))
        except (MemoryError, torch.OutOfMemoryError) as error:
            self._counters.fault("load", error)
            return None
