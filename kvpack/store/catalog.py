"""Reads the headers of a location's entries, and lists its prefixes, identities, bases and unreadable entries.

Does not import torch.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpack.file.row import FRAME_BYTES, KEY_AT, is_row_start, read_frame, row_namespace
from kvpack.formats.errors import InvalidHeader, InvalidParameter, KvpackError, MissingFile, Undecryptable

from .backend import MAX_ENTRY_BYTES, Backend, Data, StoredEntry, batches
from .encryption import Cipher, decrypt_entry
from .entries import FEATURE, ChunkFields, check_entry, open_entry
from .entry_kind import FRONT_BYTES, check_size
from .header_template import HeaderTemplates
from .keys import ID_BYTES, check_basis, check_page, chunk_key
from .state_entries import StateFields, is_states

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvpack.file.atomic import Progress



_ENTRIES_AT_ONCE = 256
"""Maximum number of entries per request, whether they are read completely or only their fronts."""
_BYTES_AT_ONCE = 16 * 2**20
"""Maximum total size of the entries in one request, in bytes. A larger entry is requested separately."""


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """An entry that contains one chunk of a prefix, with fields of its header. ``start`` is the position of the chunk's first token."""

    stored: StoredEntry
    fields: ChunkFields
    model: Mapping[str, str]
    recipe: str
    start: int

    @property
    def tokens(self) -> int:
        return len(self.fields.ids) // ID_BYTES


@dataclass(frozen=True)
class StatesEntry:
    """An entry with the states after a chunk.

    ``chunk`` is the chunk's key, and ``position`` is the number of tokens before the states.
    """

    stored: StoredEntry
    chunk: bytes
    recipe: str
    position: int


@dataclass(frozen=True)
class BasisEntry:
    """An entry with a basis. ``digest`` is the basis's SHA-256, and ``model`` is the model of the basis."""

    stored: StoredEntry
    digest: bytes
    model: Mapping[str, str]


@dataclass(frozen=True)
class Prefix:
    """A stored prefix: the entries of its chain, first chunk first. ``is_complete`` is False if the first chunks are missing."""

    entries: tuple[ChunkEntry, ...]

    @property
    def key(self) -> bytes:
        return self.entries[-1].stored.key

    @property
    def is_complete(self) -> bool:
        return self.entries[0].start == 0

    @property
    def tokens(self) -> int:
        return sum(entry.tokens for entry in self.entries)

    @property
    def size(self) -> int:
        return sum(entry.stored.size for entry in self.entries)


@dataclass(frozen=True)
class Catalog:
    """The entries of a location, by kind and key.

    ``entries`` are the readable chunks. ``unreadable`` maps every other entry to its error: Undecryptable if only the encryption key is
    missing. ``pages`` are serving engines' pages. ``states`` are keyed by the chunk that precedes them.
    """

    entries: Mapping[bytes, ChunkEntry]
    unreadable: Mapping[bytes, KvpackError]
    pages: Mapping[bytes, StoredEntry] = field(default_factory=dict)
    bases: Mapping[bytes, BasisEntry] = field(default_factory=dict)
    states: Mapping[bytes, StatesEntry] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of readable and unreadable entries."""
        return len(self.entries) + len(self.unreadable) + len(self.pages) + len(self.bases) + len(self.states)

    def count_dependents(self, digest: bytes) -> int:
        """Return the number of chunks and states whose recipe names the basis with SHA-256 ``digest``."""
        recipes = (entry.recipe for entries in (self.entries, self.states) for entry in entries.values())
        return sum(digest.hex() in recipe for recipe in recipes)

    @property
    def undecryptable(self) -> list[bytes]:
        """Keys of the entries that no available encryption key can decrypt."""
        return [key for key, error in self.unreadable.items() if isinstance(error, Undecryptable)]

    def prefixes(self) -> list[Prefix]:
        """Return one prefix for every chunk that is the last of its chain, most recently used first."""
        parents = {entry.fields.parent for entry in self.entries.values()}
        leaves = [entry for key, entry in self.entries.items() if key not in parents]
        return [self.prefix(leaf.stored.key) for leaf in sorted(leaves, key=lambda entry: -entry.stored.used_ns)]

    def prefix(self, key: bytes) -> Prefix:
        """Return the prefix that ends with the chunk ``key``."""
        chain: list[ChunkEntry] = []
        entry = self.entries.get(key)
        while entry is not None:
            chain.insert(0, entry)
            # Positions must decrease along a chain, so a corrupt chain cannot loop forever.
            parent = self.entries.get(entry.fields.parent)
            entry = parent if parent is not None and parent.start < entry.start else None
        return Prefix(tuple(chain))

    def truncate_to_states(self, prefix: Prefix) -> tuple[Prefix, StatesEntry | None]:
        """Truncate ``prefix`` after its last chunk that has states. Returns the new prefix and these states.

        If no chunk has states, returns the whole prefix and None.
        """
        for count in range(len(prefix.entries), 0, -1):
            if (states := self.states.get(prefix.entries[count - 1].stored.key)) is not None:
                return Prefix(prefix.entries[:count]), states
        return prefix, None

    def find(self, text: str) -> Prefix:
        """Return the prefix whose last key starts with the hexadecimal digits ``text``.

        Raises InvalidParameter unless exactly one key starts with them. If that key's entry is unreadable, raises the entry's error.
        """
        keys = [key for key in (*self.entries, *self.unreadable) if key.hex().startswith(text.lower())]
        if len(keys) == 1 and text and keys[0] in self.unreadable:
            raise self.unreadable[keys[0]]
        if len(keys) != 1 or not text:
            if not keys or not text:
                raise InvalidParameter(f"no stored key starts with {text!r}: kvpack store ls lists the keys")
            raise InvalidParameter(f"{len(keys)} stored keys start with {text!r}: pass more digits")
        return self.prefix(keys[0])


def read_catalog(
    backend: Backend,
    progress: Progress | None = None,
    cipher: Cipher | None = None,
    *,
    max_entry_bytes: int = MAX_ENTRY_BYTES,
    listed: Sequence[StoredEntry] | None = None,
) -> Catalog:
    """Read the headers of all entries at a location, or only of the entries ``listed``.

    ``progress`` is called with the number of entries read so far and the total. Entries larger than ``max_entry_bytes`` are unreadable.
    With ``cipher``, so are unencrypted entries and entries that it cannot decrypt.
    """
    entries: dict[bytes, ChunkEntry] = {}
    unreadable: dict[bytes, KvpackError] = {}
    pages: dict[bytes, StoredEntry] = {}
    bases: dict[bytes, BasisEntry] = {}
    states: dict[bytes, StatesEntry] = {}
    templates: HeaderTemplates[ChunkEntry] = HeaderTemplates()
    listed = list(backend.list()) if listed is None else listed
    for index, (stored, front) in enumerate(read_fronts(backend, listed, max_entry_bytes)):
        try:
            data = _decrypt(stored, front, cipher, max_entry_bytes)
            if is_row_start(bytes(memoryview(data)[:FRONT_BYTES])):
                pages[stored.key] = stored
                continue
            if (chunk := _chunk_from_template(templates, stored, data)) is not None:
                entries[stored.key] = chunk
                continue
            with open_entry(data, stored.key) as file:
                if file.header.is_basis:
                    whole = _read(backend, stored, cipher, max_entry_bytes)
                    bases[stored.key] = BasisEntry(stored, check_basis(stored.key, whole, cipher), dict(file.header.model))
                    continue
                header = file.header
                if is_states(file):
                    named_states = StateFields.from_file(file)
                    _check_key(file.where, named_states.key, stored)
                    states[named_states.chunk_key] = StatesEntry(stored, named_states.chunk_key, header.recipe, header.start)
                    continue
                fields = check_entry(file, None, None, None, max_entry_bytes)
                _check_key(file.where, fields.key, stored)
                entries[stored.key] = ChunkEntry(stored, fields, header.model, header.recipe, header.start)
                templates.add(file, FEATURE, entries[stored.key])
        except _EntryGone:
            continue
        except KvpackError as error:
            unreadable[stored.key] = error
        except MemoryError:
            unreadable[stored.key] = _out_of_memory_error(stored)
        if progress:
            progress(index + 1, len(listed))
    return Catalog(entries, unreadable, pages, bases, states)


def _chunk_from_template(templates: HeaderTemplates[ChunkEntry], stored: StoredEntry, data: Data) -> ChunkEntry | None:
    """Return the chunk in ``data`` if its header matches the header of an earlier chunk. Otherwise, return None.

    Raises InvalidHeader if the header contains a different key.
    """
    if (known := templates.match(memoryview(data))) is None:
        return None
    like, start, feature = known
    where = f"entry {stored.key.hex()}"
    fields = ChunkFields.from_bytes(feature, where)
    if len(fields.ids) != len(like.fields.ids):
        return None
    _check_key(where, fields.key, stored)
    return ChunkEntry(stored, fields, like.model, like.recipe, start)


def corrected_times(catalog: Catalog) -> dict[bytes, int]:
    """Return corrected last-use times by key.

    An entry needs one if it seems less recently used than an entry that depends on it. Chunks and states depend on the preceding chunk, and
    on the basis that their recipe names.
    """
    used = {key: entry.stored.used_ns for key, entry in catalog.entries.items()}
    listed = dict(used)
    for chunk, states in catalog.states.items():
        if chunk in used:
            used[chunk] = max(used[chunk], states.stored.used_ns + 1)
    for key, entry in sorted(catalog.entries.items(), key=lambda item: -item[1].start):
        parent = entry.fields.parent
        if parent in used:
            used[parent] = max(used[parent], used[key] + 1)
    for key, basis in catalog.bases.items():
        listed[key] = basis.stored.used_ns
        dependents_used = [used[user] + 1 for user, entry in catalog.entries.items() if basis.digest.hex() in entry.recipe]
        used[key] = max([basis.stored.used_ns, *dependents_used])
    return {key: time_ns for key, time_ns in used.items() if time_ns != listed[key]}


def _check_key(where: str, named_key: bytes, stored: StoredEntry) -> None:
    if named_key != stored.key:
        raise InvalidHeader(f"{where}: its header names the key {named_key.hex()}, expected {stored.key.hex()}")


def verify(
    backend: Backend, progress: Progress | None = None, cipher: Cipher | None = None, *, max_entry_bytes: int = MAX_ENTRY_BYTES
) -> Iterator[tuple[StoredEntry, KvpackError | None]]:
    """Check every entry completely. Yields each entry and its error, or None if the entry is valid.

    Checks every byte and the rules of the codecs. The key must follow from the parent, the token ids and the other inputs. If ``cipher``
    cannot decrypt an entry, only the entry's digest is checked, and the error is Undecryptable. With ``cipher``, the error of an
    unencrypted entry is NotKvpack. Entries larger than ``max_entry_bytes`` are not read.
    """
    listed = list(backend.list())
    for index, (stored, entry) in enumerate(_read_contents(backend, listed, max_entry_bytes)):
        try:
            data = _decrypt(stored, entry, cipher, max_entry_bytes)
            if is_row_start(bytes(memoryview(data)[:FRONT_BYTES])):
                check_page(stored.key, data)
                yield stored, None
                continue
            with open_entry(data, stored.key) as file:
                if file.header.is_basis:
                    check_basis(stored.key, data, cipher)
                elif is_states(file):
                    _check_key(file.where, StateFields.from_file(file).key, stored)
                else:
                    fields = check_entry(file, None, None, None, max_entry_bytes)
                    key = chunk_key(fields.parent, fields.ids, fields.inputs)
                    if not fields.key == key == stored.key:
                        raise InvalidHeader(
                            f"{file.where} names the key {fields.key.hex()}, but its parent, ids and inputs give {key.hex()}"
                        )
                file.verify()
        except _EntryGone:
            continue
        except KvpackError as error:
            yield stored, error
        except MemoryError:
            yield stored, _out_of_memory_error(stored)
        else:
            yield stored, None
        if progress:
            progress(index + 1, len(listed))


def row_keys(
    backend: Backend, namespace: bytes, cipher: Cipher | None = None, *, max_entry_bytes: int = MAX_ENTRY_BYTES
) -> Iterator[bytes]:
    """Yield the keys of all page rows in ``namespace``. Unreadable entries are skipped."""
    for stored, front in read_fronts(backend, list(backend.list()), max_entry_bytes):
        with suppress(_EntryGone, KvpackError, MemoryError):
            data = _decrypt(stored, front, cipher, max_entry_bytes)
            if row_namespace(bytes(memoryview(data)[:KEY_AT])) == namespace:
                yield stored.key


def row_descriptions(backend: Backend, namespace: bytes, cipher: Cipher | None = None) -> set[bytes]:
    """Return the descriptions of all page rows in ``namespace``, one for each page shape. Unreadable entries are skipped."""
    result: set[bytes] = set()
    for stored, front in read_fronts(backend, list(backend.list()), MAX_ENTRY_BYTES):
        with suppress(_EntryGone, KvpackError, MemoryError):
            row, where = memoryview(_decrypt(stored, front, cipher, MAX_ENTRY_BYTES)), f"entry {stored.key.hex()}"
            if is_row_start(bytes(row[:FRONT_BYTES])) and (frame := read_frame(row, where)).namespace == namespace:
                result.add(bytes(row[FRAME_BYTES : FRAME_BYTES + frame.description_bytes]))
    return result


def read_fronts(backend: Backend, listed: Iterable[StoredEntry], max_entry_bytes: int) -> Iterator[tuple[StoredEntry, Data | None]]:
    """Yield each entry of ``listed`` with its front, as returned by ``Backend.peek``. Fronts are requested in batches.

    The front is None if the entry is empty, is larger than ``max_entry_bytes``, or no longer exists.
    """
    return _read_contents(backend, listed, max_entry_bytes, front=True)


def _read_contents(
    backend: Backend, listed: Iterable[StoredEntry], max_entry_bytes: int, *, front: bool = False
) -> Iterator[tuple[StoredEntry, Data | None]]:
    """Yield each entry of ``listed`` with its bytes or its front. Each batch is released before the next one is requested."""
    sizes = ((stored, stored.size if 0 < stored.size <= max_entry_bytes else 0) for stored in listed)
    for batch in batches(sizes, _ENTRIES_AT_ONCE, _BYTES_AT_ONCE):
        yield from _peek_all(backend, batch, max_entry_bytes, front)


def _peek_all(
    backend: Backend, listed: Sequence[StoredEntry], max_entry_bytes: int, front: bool
) -> Iterator[tuple[StoredEntry, Data | None]]:
    # Checked before any byte is fetched or mapped: others may have written the entries.
    keys = [stored.key for stored in listed if 0 < stored.size <= max_entry_bytes]
    result = dict(zip(keys, backend.peek_many(keys, front=front) if keys else (), strict=True))
    for stored in listed:
        yield stored, result.pop(stored.key, None)


class _EntryGone(Exception):
    """Raised if a listed entry no longer exists. Also raised if the backend failed to return it, which it counts as a fault."""


def _read(backend: Backend, stored: StoredEntry, cipher: Cipher | None, max_entry_bytes: int) -> Data:
    # Checked before any byte is fetched or mapped: others may have written the entry.
    fits = 0 < stored.size <= max_entry_bytes
    return _decrypt(stored, backend.peek(stored.key) if fits else None, cipher, max_entry_bytes)


def _decrypt(stored: StoredEntry, data: Data | None, cipher: Cipher | None, max_entry_bytes: int) -> Data:
    """Decrypt ``data``, an entry or its front."""
    check_size(f"entry {stored.key.hex()}", stored.size, max_entry_bytes)
    if data is None and stored.size:
        raise _EntryGone
    return decrypt_entry(stored.key, b"" if data is None else data, cipher)


def _out_of_memory_error(stored: StoredEntry) -> KvpackError:
    return MissingFile(f"entry {stored.key.hex()}: not enough memory to read its {stored.size} bytes")
