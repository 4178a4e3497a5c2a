"""The keys of bases in a store: of the SHA-256 of their file (spec/store.md, Bases)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvpack.formats.errors import DigestMismatch
from kvpack.identity.identity import length_prefixed

if TYPE_CHECKING:
    from .backend import Data
    from .encryption import Cipher

DOMAIN = b"kvpack-basis 1"


def basis_keys(digest: bytes, cipher: Cipher | None) -> list[bytes]:
    """The keys of the entries that may contain the basis with SHA-256 ``digest``, the one to write first."""
    if cipher is None:
        return [digest]
    # One entry for each encryption key: one that is no longer at hand must not take the place of a readable one.
    return [hashlib.sha256(b"".join(map(length_prefixed, (DOMAIN, digest, name, cipher.tenant)))).digest() for name in cipher.ids]


def check_basis(key: bytes, data: Data, cipher: Cipher | None) -> bytes:
    """Return the SHA-256 of a basis that is the whole decrypted entry ``key``. Raises DigestMismatch if the key belongs to another
    basis.
    """
    digest = hashlib.sha256(data).digest()
    if key not in basis_keys(digest, cipher):
        raise DigestMismatch(f"entry {key.hex()}: damaged: holds a basis with the SHA-256 {digest.hex()}, which has another key")
    return digest
