"""Determines the kind of an entry from its size and first bytes (spec/store.md, Entries and Encrypted entries)."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from kvpack.file.front import is_file_start
from kvpack.file.header import DIGEST_BYTES
from kvpack.file.row import is_row_start
from kvpack.formats.errors import DigestMismatch, InvalidHeader, InvalidPayload, LimitExceeded, NotConsecutive, NotKvpack, Truncated

from .backend import MAX_ENTRY_BYTES

VERSION = 1
"""Version of encrypted entries that this version of kvpack writes."""
MAGIC = b"kvpack-encrypted 1\n"
"""First bytes of an encrypted entry."""
MAX_ID_BYTES = 255
NONCE_BYTES, TAG_BYTES = 12, 16
FRONT_BYTES = 512
"""Number of bytes at the beginning of an entry that are read to determine its kind."""

_ENCRYPTED = re.compile(rb"kvpack-encrypted ([1-9][0-9]{0,8})\n")


class EntryKind(enum.Enum):
    """The kind of an entry, according to its size and first bytes."""

    READABLE = enum.auto()
    """It begins like an entry that this store can read."""
    FOREIGN = enum.auto()
    """Another store may be able to read it: its encryption key is not available, or a later version encrypted it."""
    JUNK = enum.auto()
    """No store can read it, so a good entry may replace it."""


@dataclass(frozen=True)
class EntryFormat:
    """The format of a store's entries.

    ``max_bytes`` is the maximum size of an entry. Entries are encrypted with one of ``key_ids``, or unencrypted if that is None.
    """

    max_bytes: int = MAX_ENTRY_BYTES
    key_ids: frozenset[bytes] | None = None

    def kind(self, first_bytes: bytes | memoryview, size: int) -> EntryKind:
        """Return the kind of an entry of ``size`` bytes.

        ``first_bytes`` contains at least ``FRONT_BYTES`` bytes, or the whole entry if it is smaller.
        """
        front = bytes(first_bytes[:FRONT_BYTES])
        if size > self.max_bytes:
            return EntryKind.JUNK
        version = encrypted_version(front)
        if version is None:
            return EntryKind.READABLE if self.key_ids is None and (is_file_start(front) or is_row_start(front)) else EntryKind.JUNK
        if version > VERSION:
            return EntryKind.FOREIGN
        name = key_id(front)
        if name is None or size < encrypted_bytes(name, 0):
            return EntryKind.JUNK
        return EntryKind.READABLE if self.key_ids is not None and name in self.key_ids else EntryKind.FOREIGN


UNENCRYPTED = EntryFormat()
"""The format of unencrypted entries."""


def check_size(where: str, size: int, max_bytes: int) -> None:
    """Raise LimitExceeded if an entry of ``size`` bytes is larger than ``max_bytes``."""
    if size > max_bytes:
        raise LimitExceeded(f"{where} has {size} bytes, but max_entry_bytes is {max_bytes}")


def encrypted_version(first_bytes: bytes | memoryview) -> int | None:
    """Return the version of the encryption format, or None if the entry is not encrypted."""
    match = _ENCRYPTED.match(bytes(first_bytes[:FRONT_BYTES]))
    return int(match[1]) if match else None


def key_id(first_bytes: bytes | memoryview) -> bytes | None:
    """Return the id of the key that encrypts an entry.

    Returns None unless ``first_bytes`` contains a whole id in version 1 of the encryption format.
    """
    front = bytes(first_bytes[:FRONT_BYTES])
    if not front.startswith(MAGIC) or len(front) == len(MAGIC):
        return None
    start = len(MAGIC) + 1
    name = front[start : start + front[len(MAGIC)]]
    return name if len(name) == front[len(MAGIC)] else None


def encrypted_bytes(name: bytes, size: int) -> int:
    """Return the size of an entry of ``size`` bytes after encryption. ``name`` is the encryption key's id."""
    return len(MAGIC) + 1 + len(name) + NONCE_BYTES + size + TAG_BYTES + DIGEST_BYTES


DAMAGE = (DigestMismatch, InvalidHeader, InvalidPayload, NotKvpack, Truncated, NotConsecutive)
"""Errors from the checks that every complete entry must pass: digest, header, payload, magic, length, and position in the chain."""


def means_damage(error: BaseException) -> bool:
    """Return True if ``error``, raised while checking a complete entry, means that no reader can use the entry.

    If the cause may be the reader, such as a lack of memory, a codec or a key, another reader may succeed.
    """
    return isinstance(error, DAMAGE)
