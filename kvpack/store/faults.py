"""Errors that mean an entry is damaged. Such an entry is removed; any other unreadable entry stays."""

from __future__ import annotations

from kvpack.formats.errors import DigestMismatch, InvalidHeader, InvalidPayload, NotConsecutive, NotKvpack, Truncated

DAMAGE = (DigestMismatch, InvalidHeader, InvalidPayload, NotKvpack, Truncated, NotConsecutive)
"""Errors of checks on completely read bytes: digest, header, payload, magic, length, and a header that does not continue its parent's."""


def is_damage(error: BaseException) -> bool:
    """Return True if ``error``, raised by a check of a completely read entry, means that no reader can use the entry.

    A failure on the reader's side is not damage: lack of memory or descriptors, a disk error, or a missing version, codec, key or limit.
    Another reader may succeed.
    """
    return isinstance(error, DAMAGE)
