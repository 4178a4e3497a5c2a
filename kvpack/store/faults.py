"""The errors which mean that an entry is damaged. Damaged entries are removed. Entries that are unreadable for other reasons are kept."""

from __future__ import annotations

from kvpack.formats.errors import DigestMismatch, InvalidHeader, InvalidPayload, NotConsecutive, NotKvpack, Truncated

DAMAGE = (DigestMismatch, InvalidHeader, InvalidPayload, NotKvpack, Truncated, NotConsecutive)
"""Errors of the checks that a completely read entry must pass: digest, header, payload, magic, length, and position in the chain."""


def means_damage(error: BaseException) -> bool:
    """Return True if ``error``, raised by the check of a completely read entry, means that no reader can use the entry.

    The entry is not damaged if the reader lacks memory, descriptors, a codec, a key or a newer version, or if its disk fails. Another
    reader may then succeed.
    """
    return isinstance(error, DAMAGE)
