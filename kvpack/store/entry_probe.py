"""Check by the front of some bytes that they are an entry, before counting them as stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpack.file import container
from kvpack.file.row import begins_row
from kvpack.formats.errors import InvalidHeader, KvpackError, Undecryptable

from .encryption import decrypted_entry
from .entries import check_entry, open_entry
from .entry_kind import FRONT_BYTES, Kind
from .faults import is_damage
from .keys import check_basis, check_page
from .state_entries import StatesFields, is_states

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .backend import Data
    from .encryption import Cipher
    from .entry_kind import Form

_MAX_KEYS = 65_536


def check_front(key: bytes, data: Data, cipher: Cipher | None, extra_check: Callable[[container.File], None] | None = None) -> None:
    """Raise the errors of reading unless the front of ``data``, decrypted with ``cipher`` if given, belongs to the entry ``key``.

    Without a cipher an encrypted entry raises Undecryptable once its digest matches. ``extra_check`` adds checks for the file of a chunk.
    """
    decrypted = decrypted_entry(key, data, cipher)
    if begins_row(bytes(memoryview(decrypted)[:FRONT_BYTES])):
        check_page(key, decrypted)
        return
    with open_entry(decrypted, key) as file:
        if file.header.is_basis:
            check_basis(key, decrypted, cipher)
            return
        has_states = is_states(file)
        named_key = StatesFields.of(file).key if has_states else check_entry(file, None, None, None).key
        if named_key != key:
            raise InvalidHeader(f"{file.where}: its header names the key {named_key.hex()}")
        if extra_check is not None and not has_states:
            extra_check(file)


def kind_of(key: bytes, data: Data, form: Form) -> Kind:
    """Return the kind of ``data``, all bytes of the entry ``key``, for a store with this form."""
    kind = form.kind(memoryview(data)[:FRONT_BYTES], len(data))
    if kind is not Kind.READABLE:
        return kind
    try:
        check_front(key, data, None)
    except Undecryptable:
        # The entry is complete, and encrypted like the store's entries.
        return kind
    except KvpackError as error:
        return Kind.JUNK if is_damage(error) else Kind.FOREIGN
    return kind


class KeySet:
    """Keys of entries that were already examined and need no second look."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, keys: Sequence[bytes]) -> None:
        """Remember ``keys``; beyond a limit the oldest ones are forgotten."""
        if len(self._keys) > _MAX_KEYS:
            self._keys = set()
        self._keys.update(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget ``keys``."""
        if self._keys:
            self._keys.difference_update(keys)
