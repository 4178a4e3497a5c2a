"""Texts by which an index describes entries (spec/store.md, Index)."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgpack

from kvpack.file.row import begins_row
from kvpack.formats.errors import KvpackError

from .entries import FEATURE, ChunkFields
from .entry_kind import FRONT_BYTES
from .keys import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence


def kind_text(kind: str) -> str:
    """Return the index text of entries that are not chunks: pages, states or bases."""
    return json.dumps({"kind": kind})


@lru_cache
def chunk_text(model: tuple[tuple[str, str], ...], recipe: str, tokens: int) -> str:
    """Return the index text of chunks."""
    return json.dumps({"kind": "chunk", "model": dict(model), "recipe": recipe, "tokens": tokens}, sort_keys=True)


def entry_text(pieces: Sequence[memoryview]) -> str | None:
    """Return the index text of an entry created by this process from ``pieces``; None if they do not show it, as when encrypted."""
    if begins_row(bytes(pieces[0][:FRONT_BYTES])):
        return kind_text("pages")
    if len(pieces) < 2:
        return None
    try:
        # Of a file, the text and then the header (container.py): its checks are for those whom its writer does not trust.
        header: Any = msgpack.unpackb(pieces[1])
        feature = header["ignorable"][FEATURE]
        return chunk_text(tuple(header["model"].items()), header["recipe"], len(ChunkFields.of(feature, "").ids) // ID_BYTES)
    except (ValueError, KeyError, TypeError, msgpack.UnpackException, KvpackError):
        return None
