"""JSON texts that describe entries. They are stored in a folder's index and on Redis (spec/notes.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack

from kvpack.file.row import is_row_start
from kvpack.formats.errors import KvpackError

from .backend import StoredEntry
from .entries import FEATURE, ChunkFields
from .entry_kind import FRONT_BYTES
from .keys import ID_BYTES

OTHER_KINDS = ("pages", "states", "bases")
"""Kinds of entries other than chunks."""


class Descriptions(NamedTuple):
    """A location's totals by description, as (text, number of entries, bytes), and the entries that must be inspected."""

    totals: Sequence[tuple[str, int, int]]
    missing: Sequence[StoredEntry]


def kind_description(kind: str) -> str:
    """Return the description of an entry that is not a chunk. ``kind`` is one of ``OTHER_KINDS``."""
    return json.dumps({"kind": kind})


@lru_cache
def chunk_description(model: tuple[tuple[str, str], ...], recipe: str, tokens: int) -> str:
    """Return the description of a chunk of ``tokens`` tokens."""
    return json.dumps({"kind": "chunk", "model": dict(model), "recipe": recipe, "tokens": tokens}, sort_keys=True)


def parse_description(text: str) -> dict[str, Any] | None:
    """Parse the description of an entry. Returns None if ``text`` is not a description."""
    try:
        about: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(about, dict) or about.get("kind") in OTHER_KINDS:
        return about if isinstance(about, dict) else None
    model, recipe, tokens = about.get("model"), about.get("recipe"), about.get("tokens")
    is_model = isinstance(model, dict) and all(isinstance(value, str) for value in model.values())
    is_chunk = about.get("kind") == "chunk" and is_model and isinstance(recipe, str) and type(tokens) is int and tokens >= 0
    return about if is_chunk else None


def entry_description(pieces: Sequence[memoryview]) -> str | None:
    """Return the description of an entry that this process wrote, or None if ``pieces`` hide it because they are encrypted."""
    if is_row_start(bytes(pieces[0][:FRONT_BYTES])):
        return kind_description("pages")
    if len(pieces) < 2:
        return None
    try:
        # The pieces of a file are its fixed text, its header and its tensors. This process wrote them, so they need no checks.
        header: Any = msgpack.unpackb(pieces[1])
        feature = header["ignorable"][FEATURE]
        return chunk_description(tuple(header["model"].items()), header["recipe"], len(ChunkFields.from_bytes(feature, "").ids) // ID_BYTES)
    except (ValueError, KeyError, TypeError, msgpack.UnpackException, KvpackError):
        return None
