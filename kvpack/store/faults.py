"""Which errors say that an entry's bytes are damaged: such an entry is removed, and every other one that cannot be read stays."""

from __future__ import annotations

from kvpack.formats.errors import DigestMismatch, InvalidHeader, InvalidPayload, NotConsecutive, NotKvpack, Truncated

DAMAGE = (DigestMismatch, InvalidHeader, InvalidPayload, NotKvpack, Truncated, NotConsecutive)
"""What a check says of bytes that were read whole: digest, header, payload, magic, length, and a header that continues no ancestor's."""


def is_damage(error: BaseException) -> bool:
    """Whether ``error``, raised by a check of an entry that was read whole, says that the entry is good for nobody.

    What the reader lacks is no damage: memory, a descriptor, an answer of the disk, a newer version, a codec, a key, a higher
    limit. Another reader may have it.
    """
    return isinstance(error, DAMAGE)
