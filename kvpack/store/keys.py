"""The names of chunks: SHA-256 over length-prefixed fields, chained by the parent's name (spec/store.md, Keys)."""

from __future__ import annotations

import array
import hashlib
import sys
from typing import TYPE_CHECKING, Any

from kvpack.formats.arguments import items
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.lazy import numpy
from kvpack.identity.identity import length_prefixed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KEY_BYTES = 32
ID_BYTES = 4
"""A token id is stored as an unsigned 32-bit integer, little-endian."""

MAX_INPUT_BYTES = 64
"""Maximum number of bytes of a digest of the inputs besides token ids that a chunk's values depend on."""

_MAX_ID = 2**32 - 1


def token_bytes(token_ids: Any) -> bytes:
    """Token ids, a list or an array ``[token]`` or ``[1, token]`` of integers, as they are hashed and stored.

    Raises InvalidParameter for anything else, and for an id below 0 or above 2^32 - 1.
    """
    if isinstance(token_ids, (list, tuple)) and not (token_ids and isinstance(token_ids[0], (list, tuple))):
        return _listed(token_ids)
    try:
        # Tensors without values, or in a form that no array has, fail here.
        if hasattr(token_ids, "detach"):
            token_ids = token_ids.detach().cpu()
        ids = numpy.asarray(token_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidParameter(f"token_ids of type {type(token_ids).__name__} are not an array of integers: {error}") from None
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidParameter(f"token_ids are {ids.dtype} {list(ids.shape)}, expected integers [token] or [1, token]")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= _MAX_ID:
        raise InvalidParameter(f"token_ids are from {ids.min()} to {ids.max()}, expected integers from 0 to {_MAX_ID}")
    data: bytes = ids.astype("<u4").tobytes()
    return data


def _listed(token_ids: list[int] | tuple[int, ...]) -> bytes:
    try:
        ids = array.array("I", token_ids)
    except (TypeError, OverflowError) as error:
        raise InvalidParameter(f"token_ids hold a value that is not an integer from 0 to {_MAX_ID}: {error}") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def check_inputs(inputs: Any, ids: bytes, chunk: int) -> list[bytes]:
    """The digest of every whole chunk of ``ids``, empty if its token ids determine the chunk.

    ``inputs`` has one digest per chunk, and optionally one for the tokens after the last whole chunk. Raises InvalidParameter for
    another number of digests, and for anything except bytes, at most 64.
    """
    tokens = len(ids) // ID_BYTES
    whole, begun = tokens // chunk, -(-tokens // chunk)
    if inputs is None:
        return [b""] * whole
    inputs = items(inputs, "inputs", "digests (bytes), one for each chunk")
    if len(inputs) not in (whole, begun):
        raise InvalidParameter(
            f"inputs has {len(inputs)} digests, {tokens} token ids in chunks of {chunk} need {whole}: one for each chunk, b'' where "
            "its token ids determine it"
        )
    for number, digest in enumerate(inputs):
        if not isinstance(digest, bytes) or len(digest) > MAX_INPUT_BYTES:
            found = f"{len(digest)} bytes" if isinstance(digest, bytes) else f"of type {type(digest).__name__}"
            raise InvalidParameter(f"inputs[{number}] is {found}, the limit is {MAX_INPUT_BYTES} bytes: give a digest")
    return list(inputs[:whole])


def chunk_keys(root: bytes, ids: bytes, chunk: int, inputs: Sequence[bytes] | None = None) -> list[bytes]:
    """The key of every whole chunk of ``chunk`` tokens of ``ids`` (as ``token_bytes`` returns them), first chunk first.

    ``root`` is the digest of the identity: the parent of the first chunk. ``inputs`` are as for ``check_inputs``. Raises as it does.
    """
    return [key for key, _, _, _ in chained(root, ids, chunk, check_inputs(inputs, ids, chunk))]


Link = tuple[bytes, bytes, bytes, bytes]
"""A chunk's key, its parent's key, its token ids, and the digest of its other inputs."""


def chained(root: bytes, ids: bytes, chunk: int, inputs: Sequence[bytes]) -> Iterator[Link]:
    """The link of every whole chunk; ``inputs`` has one digest per chunk."""
    parent, size = root, chunk * ID_BYTES
    for start, digest in zip(range(0, len(ids) - size + 1, size), inputs, strict=True):
        part = ids[start : start + size]
        key = chunk_key(parent, part, digest)
        yield key, parent, part, digest
        parent = key


def chunk_key(parent: bytes, ids: bytes, inputs: bytes) -> bytes:
    """The key of one chunk."""
    fields = length_prefixed(parent) + length_prefixed(ids)
    return hashlib.sha256(fields + length_prefixed(inputs) if inputs else fields).digest()
