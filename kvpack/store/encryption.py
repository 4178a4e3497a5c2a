"""Entries encrypted with AES-GCM: whoever reads the folder or the server without the key learns sizes and times, and can forge nothing.

    kvpack-encrypted 1\\n, length of the key's id in 1 byte, the id, a nonce of 12 bytes, the ciphertext with its tag of 16 bytes,
    the XXH3-128 of all before it

The associated data is the format, the entry's key and the tenant (spec/store.md, Encrypted entries), so an entry cannot
take the place of another.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any

import xxhash

from kvpack.formats.errors import InvalidParameter, KvpackError, LimitExceeded, MissingFile, Undecryptable

from ..header import DIGEST_BYTES
from ..json_header import check_digest
from .identity import length_prefixed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .backend import Data

MAGIC = b"kvpack-encrypted 1\n"
KEY_SIZES = (16, 24, 32)
MAX_ID_BYTES = 255
MAX_PLAIN_BYTES = 2**31 - 1
_NONCE_BYTES, _TAG_BYTES = 12, 16


def read_key_file(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """The keys in a file of lines "ID HEXADECIMAL-DIGITS", the one that encrypts first; # begins a comment.

    Raises MissingFile, and InvalidParameter for a file that others than its owner may read or a line that is no key.
    """
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = file.read().splitlines()
    except OSError as error:
        raise MissingFile(f"{os.fspath(path)}: could not be read: {error.strerror or error}") from None
    except ValueError:
        raise InvalidParameter(f"{os.fspath(path)}: is no text of keys") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidParameter(f"{os.fspath(path)}: has the mode {stat.S_IMODE(mode):04o}, expected 0600: keys are for their owner alone")
    keys: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        # The line is not shown: it is, or nearly is, a secret.
        try:
            name, digits = words
            keys[name] = bytes.fromhex(digits)
        except ValueError:
            raise InvalidParameter(f"{os.fspath(path)}: line {number} is no ID and key in hexadecimal digits") from None
    return keys


def in_clear(key: bytes, data: Data, cipher: Cipher | None) -> Data:
    """The entry ``key`` as it is, or decrypted where it is encrypted. Raises Undecryptable and DigestMismatch."""
    if bytes(data[: len(MAGIC)]) != MAGIC:
        return data
    if cipher is not None:
        return cipher.decrypt(key, data)
    check_digest(f"entry {key.hex()}", memoryview(data)[:-DIGEST_BYTES], bytes(data[-DIGEST_BYTES:]))
    raise Undecryptable(f"entry {key.hex()}: is encrypted, and no key was given")


class Cipher:
    """AES-GCM with the keys in ``keys`` by id, of 16, 24 or 32 bytes; the first one encrypts, all decrypt.

    To rotate, put a new key first and keep the old ones for as long as their entries are wanted.
    Raises InvalidParameter for keys that cannot be, KvpackError without the package cryptography.
    """

    def __init__(self, keys: Mapping[str, bytes], tenant: str) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise KvpackError("encrypted entries need the package cryptography: pip install 'kvpack[encryption]'") from None
        if not keys:
            raise InvalidParameter("encryption is an empty map, expected at least one key by its id")
        self._invalid = InvalidTag
        self._keys: dict[bytes, Any] = {}
        for name, key in keys.items():
            if not isinstance(name, str) or not 1 <= len(name.encode("utf-8", "surrogatepass")) <= MAX_ID_BYTES:
                raise InvalidParameter(f"the id of an encryption key is {name!r}, expected 1 to {MAX_ID_BYTES} bytes of text")
            if not isinstance(key, bytes) or len(key) not in KEY_SIZES:
                size = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
                raise InvalidParameter(f"the encryption key {name!r} is of {size}, expected 16, 24 or 32 bytes")
            self._keys[name.encode("utf-8", "surrogatepass")] = AESGCM(key)
        self._tenant = tenant.encode("utf-8", "surrogatepass")

    def encrypt(self, key: bytes, pieces: Sequence[memoryview]) -> list[memoryview]:
        """The entry ``key`` encrypted with the first key. Raises LimitExceeded for 2 GiB or more."""
        plain = b"".join(pieces)
        if len(plain) > MAX_PLAIN_BYTES:
            raise LimitExceeded(f"the entry has {len(plain)} bytes, allowed to encrypt are at most {MAX_PLAIN_BYTES}")
        name, cipher = next(iter(self._keys.items()))
        nonce = os.urandom(_NONCE_BYTES)
        head = MAGIC + bytes([len(name)]) + name
        front, sealed = head + nonce, cipher.encrypt(nonce, plain, self._associated(head, key))
        digest = xxhash.xxh3_128(front)
        digest.update(sealed)
        return [memoryview(front), memoryview(sealed), memoryview(digest.digest())]

    def decrypt(self, key: bytes, data: Data) -> bytearray:
        """The entry ``key`` in memory of its own.

        Raises Undecryptable when it is not encrypted or no key at hand opens it, DigestMismatch when it is damaged.
        """
        view = memoryview(data)
        where = f"entry {key.hex()}"
        if bytes(view[: len(MAGIC)]) != MAGIC or len(view) < len(MAGIC) + 1:
            raise Undecryptable(f"{where}: is not encrypted, and the store takes encrypted entries alone")
        # A damaged entry is worth nothing to anybody; one of another key is.
        check_digest(where, view[:-DIGEST_BYTES], bytes(view[-DIGEST_BYTES:]))
        end = len(MAGIC) + 1 + view[len(MAGIC)]
        name = bytes(view[len(MAGIC) + 1 : end])
        cipher = self._keys.get(name)
        if cipher is None:
            raise Undecryptable(f"{where}: is encrypted with the key {name!r}, at hand are {', '.join(map(repr, self._keys))}")
        if len(view) < end + _NONCE_BYTES + _TAG_BYTES + DIGEST_BYTES:
            raise Undecryptable(f"{where}: ends within its nonce or its tag")
        nonce, sealed = bytes(view[end : end + _NONCE_BYTES]), view[end + _NONCE_BYTES : -DIGEST_BYTES]
        try:
            return bytearray(cipher.decrypt(nonce, sealed, self._associated(bytes(view[:end]), key)))
        except self._invalid:
            raise Undecryptable(f"{where}: its tag does not agree: another key under the id {name!r}, or another entry") from None

    def _associated(self, head: bytes, key: bytes) -> bytes:
        return b"".join(map(length_prefixed, (head, key, self._tenant)))
