"""Ignorable features whose data does not fit one entry: ``name.0``, ``name.1`` and so on, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .limits import MAX_BINARY_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping


def split(name: str, data: bytes) -> dict[str, bytes]:
    """``data`` as features of at most ``MAX_BINARY_BYTES`` bytes each; no data gives none."""
    return {f"{name}.{number}": data[at : at + MAX_BINARY_BYTES] for number, at in enumerate(range(0, len(data), MAX_BINARY_BYTES))}


def joined(ignorable: Mapping[str, bytes], name: str) -> bytes:
    """The data of the features that ``split`` makes."""
    count = sum(feature.startswith(f"{name}.") for feature in ignorable)
    return b"".join(ignorable.get(f"{name}.{number}", b"") for number in range(count))
