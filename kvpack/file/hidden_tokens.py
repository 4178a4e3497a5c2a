"""The required feature ``hidden-tokens``: the tokens that no query may attend to (spec/container.md, Hidden tokens)."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from kvpack.formats.errors import InvalidHeader, LimitExceeded

from .limits import MAX_BINARY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

FEATURE = "hidden-tokens"
"""The name of the feature in ``required``, and of its entry in ``ignorable``."""

_RECORD = struct.Struct("<IQQ")
_PLACE = f"ignorable[{FEATURE!r}]"


class Hidden(NamedTuple):
    """The positions ``[start, stop)`` of sequence ``row`` that an attention mask hides."""

    row: int
    start: int
    stop: int


def features_of(hidden: Iterable[Hidden]) -> tuple[tuple[str, ...], dict[str, bytes]]:
    """Return ``required`` and ``ignorable`` for a file with hidden tokens. Raises LimitExceeded for more than an entry can list."""
    data = b"".join(_RECORD.pack(*stretch) for stretch in hidden)
    if len(data) > MAX_BINARY_BYTES:
        raise LimitExceeded(
            f"the attention mask hides {len(data) // _RECORD.size} ranges of tokens, the limit is {MAX_BINARY_BYTES // _RECORD.size}: "
            "save fewer sequences in a file, such as cache.select(range(1000))"
        )
    return ((FEATURE,), {FEATURE: data}) if data else ((), {})


def hidden_tokens(data: bytes, batch: int, start: int, stop: int) -> tuple[Hidden, ...]:
    """Return the hidden tokens in the entry ``data`` of a file with ``batch`` sequences and the range ``[start, stop)``.

    Raises InvalidHeader, which names the record.
    """
    if not data or len(data) % _RECORD.size:
        raise InvalidHeader(f"{_PLACE} has {len(data)} bytes, expected {_RECORD.size} for each range, and at least one range")
    hidden = tuple(Hidden(*record) for record in _RECORD.iter_unpack(data))
    last = Hidden(-1, 0, 0)
    for number, stretch in enumerate(hidden):
        where = f"{_PLACE}: record {number}"
        if stretch.row >= batch:
            raise InvalidHeader(f"{where} names sequence {stretch.row}, but the file has {batch} sequences")
        if not start <= stretch.start < stretch.stop <= stop:
            raise InvalidHeader(f"{where} covers positions {stretch.start} to {stretch.stop}, expected a range within {start} to {stop}")
        if stretch.row < last.row or (stretch.row == last.row and stretch.start <= last.stop):
            before = tuple(last)
            raise InvalidHeader(f"{where} is {tuple(stretch)} after {before}, expected ascending ranges with tokens between them")
        last = stretch
    return hidden
