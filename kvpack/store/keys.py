"""The keys of entries.

A chunk's key is the SHA-256 of length-prefixed fields, including its parent's key (spec/store.md, Keys). A page's key covers its namespace,
the engine's key and the description (spec/row.md, Entries). The key of a basis covers the SHA-256 of its file (spec/store.md, Bases).
"""

from __future__ import annotations

import array
import hashlib
import sys
from typing import TYPE_CHECKING, Any

from kvpack.file.row import FRAME_BYTES, check_row
from kvpack.formats.arguments import as_list
from kvpack.formats.errors import DigestMismatch, InvalidHeader, InvalidParameter
from kvpack.formats.lazy import numpy
from kvpack.identity.identity import length_prefixed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .backend import Data
    from .encryption import Cipher

BASIS_DOMAIN = b"kvpack-basis 1"
PAGE_DOMAIN = b"kvpack-page 2"

KEY_BYTES = 32
ID_BYTES = 4
"""Size in bytes of a token id, which is stored as an unsigned little-endian 32-bit integer."""

MAX_INPUT_BYTES = 64
"""Maximum size, in bytes, of a digest of a chunk's other inputs, which are all inputs except the token ids."""

_MAX_ID = 2**32 - 1


def token_bytes(token_ids: Any) -> bytes:
    """Return token ids as the bytes that are hashed and stored. ``token_ids`` is a list or an integer array ``[token]`` or ``[1, token]``.

    Raises InvalidParameter for any other argument, and for an id outside 0 to 2^32 - 1.
    """
    if isinstance(token_ids, (list, tuple)) and not (token_ids and isinstance(token_ids[0], (list, tuple))):
        return _pack_list(token_ids)
    try:
        # Meta tensors, and tensors in layouts that NumPy does not support, raise an error here.
        if hasattr(token_ids, "detach"):
            token_ids = token_ids.detach().cpu()
        ids = numpy.asarray(token_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidParameter(f"token_ids is a {type(token_ids).__name__}, expected an array of integers: {error}") from None
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    # An empty list or tensor has a floating-point dtype by default.
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidParameter(
            f"token_ids has dtype {ids.dtype} and shape {list(ids.shape)}, expected integers of shape [token] or [1, token], such as "
            "tokenizer(text)['input_ids']"
        )
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= _MAX_ID:
        raise InvalidParameter(f"token_ids ranges from {ids.min()} to {ids.max()}, expected integers from 0 to {_MAX_ID}")
    data: bytes = ids.astype("<u4").tobytes()
    return data


def _pack_list(token_ids: list[int] | tuple[int, ...]) -> bytes:
    try:
        ids = array.array("I", token_ids)
    except (TypeError, OverflowError) as error:
        raise InvalidParameter(f"token_ids contains a value that is not an integer from 0 to {_MAX_ID}: {error}") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def check_inputs(inputs: Any, ids: bytes, chunk: int) -> list[bytes]:
    """Check ``inputs``, the digests of the chunks' other inputs. Returns one digest for each whole chunk of ``ids``.

    A digest is b"" if its chunk depends only on token ids. Raises InvalidParameter or InvalidType.
    """
    tokens = len(ids) // ID_BYTES
    whole_chunks, started_chunks = tokens // chunk, -(-tokens // chunk)
    if inputs is None:
        return [b""] * whole_chunks
    inputs = as_list(inputs, "inputs", "digests (bytes), one for each chunk")
    if len(inputs) not in (whole_chunks, started_chunks):
        raise InvalidParameter(
            f"inputs has {len(inputs)} digests, expected {whole_chunks} for {tokens} token ids in chunks of {chunk}: pass one for "
            "each chunk, or b'' if the chunk depends only on token ids"
        )
    for index, digest in enumerate(inputs):
        if not isinstance(digest, bytes) or len(digest) > MAX_INPUT_BYTES:
            actual = f"{len(digest)} bytes" if isinstance(digest, bytes) else f"of type {type(digest).__name__}"
            raise InvalidParameter(f"inputs[{index}] is {actual}, expected a digest of at most {MAX_INPUT_BYTES} bytes")
    return list(inputs[:whole_chunks])


def chunk_keys(root: bytes, ids: bytes, chunk: int, inputs: Sequence[bytes] | None = None) -> list[bytes]:
    """Return the key of each whole chunk of ``chunk`` tokens in ``ids``, first chunk first.

    ``root``, the identity's digest, is the parent of the first chunk. ``ids`` come from ``token_bytes``. For ``inputs`` and the errors, see
    ``check_inputs``.
    """
    return [key for key, _, _, _ in chunk_links(root, ids, chunk, check_inputs(inputs, ids, chunk))]


ChunkLink = tuple[bytes, bytes, bytes, bytes]
"""A chunk's key, its parent's key, its token ids, and the digest of its other inputs."""


def chunk_links(root: bytes, ids: bytes, chunk: int, inputs: Sequence[bytes]) -> Iterator[ChunkLink]:
    """Yield a link for each whole chunk. ``inputs`` contains one digest per chunk."""
    parent, size = root, chunk * ID_BYTES
    for start, digest in zip(range(0, len(ids) - size + 1, size), inputs, strict=True):
        chunk_ids = ids[start : start + size]
        key = chunk_key(parent, chunk_ids, digest)
        yield key, parent, chunk_ids, digest
        parent = key


def chunk_key(parent: bytes, ids: bytes, inputs: bytes) -> bytes:
    """Return a chunk's key. ``parent`` is the preceding chunk's key, and ``inputs`` is the digest of all inputs except ``ids``."""
    fields = length_prefixed(parent) + length_prefixed(ids)
    return hashlib.sha256(fields + length_prefixed(inputs) if inputs else fields).digest()


def basis_keys(digest: bytes, cipher: Cipher | None) -> list[bytes]:
    """Return the keys of the entries that may contain the basis with SHA-256 ``digest``. A new entry gets the first key."""
    if cipher is None:
        return [digest]
    # Each encryption key has its own entry, so that an entry whose encryption key is lost does not block a readable one.
    return [hashlib.sha256(b"".join(map(length_prefixed, (BASIS_DOMAIN, digest, name, cipher.tenant)))).digest() for name in cipher.ids]


def check_basis(key: bytes, data: Data, cipher: Cipher | None) -> bytes:
    """Check that ``data``, the decrypted entry ``key``, is the basis that belongs to this key. Returns its SHA-256.

    Raises DigestMismatch for a different basis.
    """
    digest = hashlib.sha256(data).digest()
    if key not in basis_keys(digest, cipher):
        raise DigestMismatch(f"entry {key.hex()} is damaged: its basis has the SHA-256 {digest.hex()}, which belongs to another key")
    return digest


def page_key(namespace: bytes, key: bytes, description: bytes) -> bytes:
    """Return the key of a page's entry. ``namespace`` and the engine's ``key`` are 32 bytes each. ``description`` includes the shape."""
    return hashlib.sha256(b"".join(map(length_prefixed, (PAGE_DOMAIN, namespace, key, description)))).digest()


def check_page(name: bytes, data: Data) -> None:
    """Check that ``data``, the decrypted entry ``name``, is the page row that belongs to this key.

    Raises InvalidHeader for a different page.
    """
    where = f"entry {name.hex()}"
    row = memoryview(data)
    frame = check_row(row, where)
    if frame.length != len(data):
        raise InvalidHeader(f"{where} has {len(data)} bytes, but its header declares a row of {frame.length} bytes")
    description = bytes(row[FRAME_BYTES : FRAME_BYTES + frame.description_bytes])
    if (actual := page_key(frame.namespace, frame.key, description)) != name:
        raise InvalidHeader(f"{where} contains page {actual.hex()}, expected {name.hex()}")
