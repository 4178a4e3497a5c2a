"""Opens the backend of a ``Store`` or ``PageStore``, with the cipher of its entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvpack.formats.errors import InvalidType
from kvpack.identity.identity import Identity

from .encryption import Cipher
from .entry_kind import EntryFormat
from .locations import open_backend

if TYPE_CHECKING:
    from .backend import Backend
    from .counters import Counters
    from .options import StoreOptions


class OpenedBackend(NamedTuple):
    """An open backend with its cipher, or None if entries are not encrypted.

    With ``check_values``, every load must check values against the codecs' rules, in addition to digests.
    """

    backend: Backend
    cipher: Cipher | None
    check_values: bool


def open_for_identity(
    location: Any, identity: Identity, counters: Counters, options: StoreOptions, *, skip_sweep: bool = False
) -> OpenedBackend:
    """Open ``location`` for entries of ``identity``. With ``skip_sweep``, opening does not change the location.

    If the option ``check_values`` is not set, values are checked only if other users may write unencrypted entries. Raises
    InvalidParameter, and the backend's errors.
    """
    cipher = None if options.encryption is None else Cipher(options.encryption, identity.tenant)
    form = EntryFormat(options.max_entry_bytes, None if cipher is None else cipher.key_ids)
    backend = open_backend(location, counters, form, options, skip_sweep=skip_sweep)
    trusted = backend.is_private or cipher is not None
    return OpenedBackend(backend, cipher, not trusted if options.check_values is None else options.check_values)


def check_identity(identity: Any) -> None:
    if not isinstance(identity, Identity):
        raise InvalidType(f"identity is of type {type(identity).__name__}, expected a kvpack.Identity")
