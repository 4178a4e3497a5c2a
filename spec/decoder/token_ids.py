"""Token ids (spec/container.md, Token ids)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import count, takewhile

from .conventions import word32, word64

ID_BYTES = 4


def take_inputs(data: bytes) -> tuple[list[int], list[tuple[int, str]]] | None:
    """Return the ids of ``inputs``, and the inputs that ids do not determine, each with the position of its first token.

    Returns None if the bytes do not have the format of the page.
    """
    at = 8 + ID_BYTES * word64(data, 0)
    if len(data) < 8 or at > len(data):
        return None
    ids, undetermined = unpack_ids(data[8:at]), []
    while at < len(data):
        position, size = word64(data, at), word32(data, at + 8)
        text = data[at + 12 : at + 12 + size]
        if not size or len(text) < size:
            return None
        try:
            undetermined.append((position, text.decode()))
        except UnicodeDecodeError:
            return None
        at += 12 + size
    return ids, undetermined


def take_token_ids(ignorable: Mapping[str, bytes], sequences: int, tokens: int) -> list[list[int]]:
    """Return the known ids of the first tokens of each sequence, for a file with this number of ``sequences`` and ``tokens``."""
    inputs = take_inputs(ignorable.get("inputs", b""))
    shared = inputs[0] if inputs else []
    data = join_numbered(ignorable, "token-ids")
    if len(data) % ID_BYTES == 0 and unpack_ids(data)[: len(shared)] == shared:
        shared = unpack_ids(data)
    known = [shared] * sequences
    data = join_numbered(ignorable, "row-ids")
    n = word64(data, 4)
    if len(data) == 12 + ID_BYTES * n * sequences and word32(data, 0) == sequences:
        ids = unpack_ids(data[12:])
        known = [shared + ids[n * row : n * row + n] for row in range(sequences)]
    return [row[:tokens] for row in known]


def join_numbered(ignorable: Mapping[str, bytes], name: str) -> bytes:
    """Join the data of numbered features, which "count from 0 up to the first that is missing"."""
    names = takewhile(ignorable.__contains__, (f"{name}.{number}" for number in count()))
    return b"".join(ignorable[feature] for feature in names)


def unpack_ids(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // ID_BYTES}I", data))
