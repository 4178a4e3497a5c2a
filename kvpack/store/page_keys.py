"""The names of pages in a store: of the namespace, the engine's key and the description that their rows contain (spec/row.md, Entries)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvpack.file.row import FRAME_BYTES, check_row
from kvpack.formats.errors import InvalidHeader
from kvpack.identity.identity import length_prefixed

if TYPE_CHECKING:
    from .backend import Data

DOMAIN = b"kvpack-page 2"


def page_key(namespace: bytes, key: bytes, description: bytes) -> bytes:
    """The name of the entry with the row of ``namespace`` and ``key``, 32 bytes each: pages of other shapes have other names."""
    return hashlib.sha256(b"".join(map(length_prefixed, (DOMAIN, namespace, key, description)))).digest()


def check_page(name: bytes, data: Data) -> None:
    """Check a row that is the whole entry ``name``.

    Raises NotKvpack, UnsupportedVersion, Truncated, DigestMismatch and InvalidHeader.
    """
    where = f"entry {name.hex()}"
    row = memoryview(data)
    frame = check_row(row, where)
    if frame.length != len(data):
        raise InvalidHeader(f"{where}: has {len(data)} bytes, its row {frame.length}")
    description = bytes(row[FRAME_BYTES : FRAME_BYTES + frame.description_bytes])
    if (found := page_key(frame.namespace, frame.key, description)) != name:
        raise InvalidHeader(f"{where}: holds the page {found.hex()}")
