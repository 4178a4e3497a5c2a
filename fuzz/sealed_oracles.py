"""Checks of the encrypted entries of a store, which anyone may have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fuzz.byte_mutator import mutate_bytes
from kvpack.formats.errors import KvpackError
from kvpack.identity.identity import length_prefixed
from kvpack.store.encryption import MAGIC, Cipher
from kvpack.store.keys import KEY_BYTES

if TYPE_CHECKING:
    import random

_SEALED_KEY, _TENANT, _NAME = bytes(range(16)), "tenant", b"id"


def seal(plain: bytes) -> bytes:
    """Return an encrypted entry with a fixed nonce, so that seeds are the same in every run."""
    head = MAGIC + bytes([len(_NAME)]) + _NAME
    associated = b"".join(map(length_prefixed, (head, bytes(KEY_BYTES), _TENANT.encode())))
    nonce = bytes(12)
    data = head + nonce + AESGCM(_SEALED_KEY).encrypt(nonce, plain, associated)
    return data + xxhash.xxh3_128_digest(data)


SEALED = {seal(plain): plain for plain in (b"", b"x", bytes(100))}


def mutate_sealed(data: bytes, source: random.Random, max_bytes: int) -> bytes:
    """Return a mutated encrypted entry, usually with a correct digest."""
    if source.random() < 0.1:
        return mutate_bytes(data, source, max_bytes)
    body = mutate_bytes(data[:-16], source, max_bytes - 16)
    return body + xxhash.xxh3_128_digest(body)


def check_sealed(data: bytes) -> bool:
    """Check that an entry that decrypts has the contents that were encrypted."""
    try:
        plain = Cipher({_NAME.decode(): _SEALED_KEY}, _TENANT).decrypt(bytes(KEY_BYTES), data)
    except KvpackError:
        return False
    assert SEALED.get(data) == bytes(plain), "an entry that was never encrypted was decrypted"
    return True
