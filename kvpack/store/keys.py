"""The names of chunks: SHA-256 over length-prefixed fields, chained by the parent's (spec/store.md, Keys)."""

from __future__ import annotations

import array
import hashlib
import sys
from typing import TYPE_CHECKING, Any

from kvpack.formats.errors import InvalidParameter
from kvpack.formats.lazy import numpy

from .identity import length_prefixed

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY_BYTES = 32
ID_BYTES = 4
"""A token id is stored as an unsigned 32-bit integer, little-endian."""

_MAX_ID = 2**32 - 1


def token_bytes(token_ids: Any) -> bytes:
    """Token ids, a list or an array ``[token]`` or ``[1, token]`` of integers, as they are hashed and stored.

    Raises InvalidParameter for anything else, and for an id below 0 or above 2^32 - 1.
    """
    if isinstance(token_ids, (list, tuple)) and not (token_ids and isinstance(token_ids[0], (list, tuple))):
        return _listed(token_ids)
    if hasattr(token_ids, "detach"):
        token_ids = token_ids.detach().cpu()
    try:
        ids = numpy.asarray(token_ids)
    except (TypeError, ValueError) as error:
        raise InvalidParameter(f"token_ids of type {type(token_ids).__name__} are no array of integers: {error}") from None
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidParameter(f"token_ids are {ids.dtype} {list(ids.shape)}, expected integers [token] or [1, token]")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= _MAX_ID:
        raise InvalidParameter(f"token_ids are from {ids.min()} to {ids.max()}, allowed are integers from 0 to {_MAX_ID}")
    data: bytes = ids.astype("<u4").tobytes()
    return data


def _listed(token_ids: list[int] | tuple[int, ...]) -> bytes:
    try:
        ids = array.array("I", token_ids)
    except (TypeError, OverflowError) as error:
        raise InvalidParameter(f"token_ids hold what is no integer from 0 to {_MAX_ID}: {error}") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def chunk_keys(root: bytes, ids: bytes, chunk: int) -> list[bytes]:
    """The key of every whole chunk of ``chunk`` tokens of ``ids`` (of ``token_bytes``), first chunk first.

    ``root`` is the digest of the identity: the parent of the first.
    """
    return [key for key, _, _ in chained(root, ids, chunk)]


def chained(root: bytes, ids: bytes, chunk: int) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(key, parent's key, token ids) of every whole chunk."""
    parent, size = root, chunk * ID_BYTES
    head = KEY_BYTES.to_bytes(8, "little")
    for start in range(0, len(ids) - size + 1, size):
        part = ids[start : start + size]
        key = hashlib.sha256(head + parent + length_prefixed(part)).digest()
        yield key, parent, part
        parent = key
