"""Checks the first bytes of stored data before it counts as the entry of its key."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpack.file import container
from kvpack.file.row import is_row_start
from kvpack.formats.errors import InvalidHeader, KvpackError, Undecryptable

from .backend import Data
from .encryption import Cipher, decrypt_entry
from .entries import check_entry, open_entry
from .entry_kind import FRONT_BYTES, EntryFormat, EntryKind, means_damage
from .keys import check_basis, check_page
from .state_entries import StateFields, is_states

_MAX_KEYS = 65_536


def check_front(key: bytes, data: Data, cipher: Cipher | None, extra_check: Callable[[container.File], None] | None = None) -> None:
    """Raise an error unless ``data`` looks like the beginning of the entry ``key``. A ``cipher``, if any, decrypts ``data`` first.

    Without a cipher, an encrypted entry with a valid digest raises Undecryptable. ``extra_check`` is called with a chunk's open file.
    """
    decrypted = decrypt_entry(key, data, cipher)
    if is_row_start(bytes(memoryview(decrypted)[:FRONT_BYTES])):
        check_page(key, decrypted)
        return
    with open_entry(decrypted, key) as file:
        if file.header.is_basis:
            check_basis(key, decrypted, cipher)
            return
        has_states = is_states(file)
        named_key = StateFields.from_file(file).key if has_states else check_entry(file, None, None, None).key
        if named_key != key:
            raise InvalidHeader(f"{file.where}: its header names the key {named_key.hex()}, expected {key.hex()}")
        if extra_check is not None and not has_states:
            extra_check(file)


def probe_kind(key: bytes, data: Data, entry_format: EntryFormat) -> EntryKind:
    """Return the kind of ``data``, the complete entry ``key``, in a store that uses ``entry_format``."""
    kind = entry_format.kind(memoryview(data)[:FRONT_BYTES], len(data))
    if kind is not EntryKind.READABLE:
        return kind
    try:
        check_front(key, data, None)
    except Undecryptable:
        # The entry is complete, and encrypted like the store's entries.
        return kind
    except KvpackError as error:
        return EntryKind.JUNK if means_damage(error) else EntryKind.FOREIGN
    return kind


class KeySet:
    """A bounded set of keys whose entries have already been examined."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, keys: Sequence[bytes]) -> None:
        """Add ``keys``. If the set is full, all earlier keys are dropped first."""
        if len(self._keys) > _MAX_KEYS:
            self._keys = set()
        self._keys.update(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        if self._keys:
            self._keys.difference_update(keys)
