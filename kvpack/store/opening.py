"""What a store of chunks and one of pages open alike: a backend, the cipher of its entries, and how far their values are trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .encryption import Cipher
from .forms import Form
from .locations import open_backend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .backend import Backend
    from .counters import Counters
    from .identity import Identity


class Opened(NamedTuple):
    """``check_values``: whether the rules of the codecs are checked on every load, and not digests alone."""

    backend: Backend
    cipher: Cipher | None
    check_values: bool


def opened(
    location: Any,
    identity: Identity,
    counters: Counters,
    max_entry_bytes: int,
    encryption: Mapping[str, bytes] | None,
    check_values: bool | None,
    **options: Any,
) -> Opened:
    """Open ``location`` for entries of ``identity``, with ``options`` of ``open_backend``.

    Values are checked where users other than this one may write unencrypted entries, unless ``check_values`` says otherwise.
    Raises InvalidParameter, and the errors of the backend.
    """
    cipher = None if encryption is None else Cipher(encryption, identity.tenant)
    backend = open_backend(location, counters, Form(max_entry_bytes, None if cipher is None else cipher.key_ids), **options)
    trusted = backend.private or cipher is not None
    return Opened(backend, cipher, not trusted if check_values is None else check_values)
