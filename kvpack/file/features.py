"""Storage of ignorable features that are too large for one entry, as several entries ``name.0``, ``name.1`` and so on."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, takewhile

from .limits import MAX_BINARY_BYTES


def split(name: str, data: bytes) -> dict[str, bytes]:
    """Split ``data`` into features of at most ``MAX_BINARY_BYTES`` bytes, by name. No data gives no features."""
    return {f"{name}.{number}": data[at : at + MAX_BINARY_BYTES] for number, at in enumerate(range(0, len(data), MAX_BINARY_BYTES))}


def join_features(ignorable: Mapping[str, bytes], name: str) -> bytes:
    """Join the features into which ``split`` has divided data, up to the first one that is missing."""
    names = takewhile(ignorable.__contains__, (f"{name}.{number}" for number in count()))
    return b"".join(ignorable[feature] for feature in names)
