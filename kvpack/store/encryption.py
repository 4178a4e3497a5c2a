"""AES-GCM encryption of entries. Without the key, readers of the location learn only sizes and times, and cannot forge entries.

The layout of an encrypted entry:

    kvpack-encrypted 1\\n, length of the key's id in 1 byte, the id, a nonce of 12 bytes, the ciphertext with its tag of 16 bytes,
    the XXH3-128 of all bytes before it

The associated data includes the entry's key and the tenant (spec/store.md, Encrypted entries), so an entry cannot be moved to another key.

Each line of a key file contains one key: its id, followed by its hexadecimal digits.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from kvpack.file.front import check_digest
from kvpack.file.header import DIGEST_BYTES
from kvpack.file.user_files import read_text_and_mode
from kvpack.formats.errors import InvalidParameter, LimitExceeded, MissingPackage, NotKvpack, Truncated, Undecryptable, UnsupportedVersion
from kvpack.identity.identity import length_prefixed

from .backend import Data
from .entry_kind import FRONT_BYTES, MAGIC, MAX_ID_BYTES, NONCE_BYTES, TAG_BYTES, VERSION, encrypted_bytes, encrypted_version, key_id

KEY_SIZES = (16, 24, 32)
MAX_PLAIN_BYTES = 2**31 - 1
_SPARE_BYTES = 15
"""Number of extra bytes that the cryptography package needs in an output buffer: one block minus one byte."""


def decrypt_entry(key: bytes, data: Data, cipher: Cipher | None) -> Data:
    """Decrypt ``data``, the entry stored under ``key``. Without a cipher, an unencrypted entry is returned unchanged.

    Raises the same errors as ``Cipher.decrypt``, including NotKvpack if there is a cipher but the entry is not encrypted.
    """
    if cipher is not None:
        return cipher.decrypt(key, data)
    if encrypted_version(memoryview(data)[:FRONT_BYTES]) is None:
        return data
    name, _ = _check_head(f"entry {key.hex()}", memoryview(data))
    raise Undecryptable(
        f"entry {key.hex()} is encrypted with the key {format_key_id(name)}, but no keys were passed: pass encryption= (in commands, "
        "--key-file)"
    )


def format_key_id(name: bytes) -> str:
    """Format the id of an encryption key for a message. The id may come from an untrusted entry."""
    return repr(name.decode("utf-8", "backslashreplace"))


class Cipher:
    """An AES-GCM cipher. ``keys`` maps ids to keys of 16, 24 or 32 bytes. The first key encrypts, and all keys decrypt."""

    def __init__(self, keys: Mapping[str, bytes], tenant: str) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher as Engine
            from cryptography.hazmat.primitives.ciphers import algorithms, modes
        except ImportError:
            raise MissingPackage("encrypted entries need the cryptography package: pip install 'kvpack[encryption]'") from None
        if not isinstance(keys, Mapping) or not keys:
            kind = "an empty map" if isinstance(keys, Mapping) else f"of type {type(keys).__name__}"
            raise InvalidParameter(f"encryption is {kind}, expected at least one key, as in {{'id': key}}")
        self._invalid_tag = InvalidTag
        # Not AESGCM: out of memory, its own allocation panics, which no "except Exception" catches.
        self._engine: Any = lambda key, nonce, tag=None: Engine(algorithms.AES(key), modes.GCM(nonce, tag))
        self._keys: dict[bytes, bytes] = {}
        for name, key in keys.items():
            if not isinstance(key, bytes) or len(key) not in KEY_SIZES:
                found = f"has {len(key)} bytes" if isinstance(key, bytes) else f"is of type {type(key).__name__}"
                raise InvalidParameter(f"the encryption key {name!r} {found}, expected 16, 24 or 32 bytes")
            self._keys[_encode_id(name)] = key
        self.tenant = tenant.encode("utf-8", "surrogatepass")

    @property
    def key_ids(self) -> frozenset[bytes]:
        """The ids of all encryption keys."""
        return frozenset(self._keys)

    @property
    def ids(self) -> tuple[bytes, ...]:
        """The ids of all encryption keys, in order. New entries are encrypted with the first key."""
        return tuple(self._keys)

    def encrypt(self, key: bytes, pieces: Sequence[memoryview]) -> list[memoryview]:
        """Encrypt the entry ``key`` with the first encryption key. Returns the result as consecutive byte buffers.

        Raises LimitExceeded if the entry is too large, and MemoryError.
        """
        size = sum(map(len, pieces))
        if size > MAX_PLAIN_BYTES:
            raise LimitExceeded(f"the entry has {size} bytes, but at most {MAX_PLAIN_BYTES} can be encrypted")
        name, secret = next(iter(self._keys.items()))
        nonce = os.urandom(NONCE_BYTES)
        head = MAGIC + bytes([len(name)]) + name
        encryptor = self._engine(secret, nonce).encryptor()
        encryptor.authenticate_additional_data(self._associated_data(head, key))
        sealed = bytearray(size + _SPARE_BYTES)
        with memoryview(sealed) as view:
            at = 0
            for piece in pieces:
                at += encryptor.update_into(piece, view[at:])
        encryptor.finalize()
        del sealed[size:]
        front, end = head + nonce, encryptor.tag
        digest = xxhash.xxh3_128(front)
        digest.update(sealed)
        digest.update(end)
        return [memoryview(front), memoryview(sealed), memoryview(end + digest.digest())]

    def decrypt(self, key: bytes, data: Data) -> bytearray:
        """Decrypt the entry stored under ``key``. Memory is allocated only after every check that needs no encryption key.

        Raises NotKvpack if the entry is not encrypted, UnsupportedVersion if a later version encrypted it, Truncated or DigestMismatch if
        it is damaged, and Undecryptable if no available key can decrypt it.
        """
        view = memoryview(data)
        where = f"entry {key.hex()}"
        name, end = _check_head(where, view)
        secret = self._keys.get(name)
        if secret is None:
            available = ", ".join(map(format_key_id, self._keys))
            raise Undecryptable(
                f"{where} is encrypted with the key {format_key_id(name)}, which is not one of the available keys ({available}): add it"
            )
        nonce, tag_at = bytes(view[end : end + NONCE_BYTES]), len(view) - DIGEST_BYTES - TAG_BYTES
        sealed = view[end + NONCE_BYTES : tag_at]
        decryptor = self._engine(secret, nonce, bytes(view[tag_at:-DIGEST_BYTES])).decryptor()
        decryptor.authenticate_additional_data(self._associated_data(bytes(view[:end]), key))
        plain = bytearray(len(sealed) + _SPARE_BYTES)
        decryptor.update_into(sealed, plain)
        try:
            decryptor.finalize()
        except self._invalid_tag:
            raise Undecryptable(
                f"{where}: its authentication tag does not match: it was encrypted with a different key that has the same id, "
                f"{format_key_id(name)}, or it was copied from another entry or tenant"
            ) from None
        del plain[len(sealed) :]
        return plain

    def _associated_data(self, head: bytes, key: bytes) -> bytes:
        return b"".join(map(length_prefixed, (head, key, self.tenant)))


def _check_head(where: str, view: memoryview) -> tuple[bytes, int]:
    """Check the digest of an encrypted entry. Returns the id of its encryption key and the offset of its nonce."""
    version = encrypted_version(view[:FRONT_BYTES])
    if version is None:
        raise NotKvpack(f"{where} is not encrypted, but a store with encryption keys reads only encrypted entries")
    if version > VERSION:
        raise UnsupportedVersion(
            f"{where} has version {version} of the encryption format, but this version of kvpack reads version {VERSION}: upgrade kvpack"
        )
    # If the entry is damaged, no key can decrypt it. Otherwise, another store may have its key.
    check_digest(where, view[:-DIGEST_BYTES], bytes(view[-DIGEST_BYTES:]))
    name = key_id(view[:FRONT_BYTES])
    if name is None or len(view) < encrypted_bytes(name, 0):
        raise Truncated(f"{where} is truncated: its {len(view)} bytes end before its ciphertext and tag are complete")
    if len(view) > encrypted_bytes(name, MAX_PLAIN_BYTES):
        raise LimitExceeded(f"{where} has {len(view)} bytes, but at most {encrypted_bytes(name, MAX_PLAIN_BYTES)} can be decrypted")
    return name, len(MAGIC) + 1 + len(name)


def _encode_id(name: Any) -> bytes:
    """Encode the id of an encryption key as it is stored in entries. Raises InvalidParameter if it is invalid."""
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name.encode()) <= MAX_ID_BYTES:
        raise InvalidParameter(f"the id of an encryption key is {name!r}, expected 1 to {MAX_ID_BYTES} bytes of printable text")
    return name.encode()


MAX_BYTES = 2**20
"""Maximum size of a key file in bytes."""


def read_key_file(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the encryption keys in a file by id. The first key encrypts.

    Each line is "ID HEXADECIMAL-DIGITS", and # begins a comment. Raises MissingFile, LimitExceeded, and InvalidParameter if a line is
    invalid, an id is repeated, or users other than the owner may access the file.
    """
    text, mode = read_text_and_mode(path, MAX_BYTES, "a key file")
    where = os.fsdecode(path)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidParameter(f"{where} has mode {mode:04o}, but only its owner may access a key file: run chmod 600")
    keys: dict[str, bytes] = {}
    lines: dict[str, int] = {}
    for line_number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        # Messages do not quote the line, because it may contain the secret.
        try:
            name, digits = words
            key = bytes.fromhex(digits)
        except ValueError:
            raise InvalidParameter(f"{where}: line {line_number}: expected an id and a hexadecimal key") from None
        if name in keys:
            raise InvalidParameter(
                f"{where}: line {line_number} repeats the id {name!r} of line {lines[name]}: use another id for one of the keys"
            )
        keys[name], lines[name] = key, line_number
    if not keys:
        raise InvalidParameter(f"{where}: has no keys, expected an id and a hexadecimal key per line")
    return keys
