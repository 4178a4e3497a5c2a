"""The required feature ``hidden-tokens``: tokens to which no query may attend (spec/container.md, Hidden tokens)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from kvpack.formats.errors import InvalidHeader, LimitExceeded

from .limits import MAX_BINARY_BYTES

FEATURE = "hidden-tokens"

_RECORD = struct.Struct("<IQQ")
_PLACE = f"ignorable[{FEATURE!r}]"


class HiddenRange(NamedTuple):
    """Positions ``[start, stop)`` of sequence ``row`` that an attention mask hides."""

    row: int
    start: int
    stop: int


def list_features(hidden: Iterable[HiddenRange]) -> tuple[tuple[str, ...], dict[str, bytes]]:
    """Return the ``required`` and ``ignorable`` features of a file with these hidden ranges. Raises LimitExceeded if there are too many."""
    data = b"".join(_RECORD.pack(*token_range) for token_range in hidden)
    if len(data) > MAX_BINARY_BYTES:
        raise LimitExceeded(
            f"the attention mask hides {len(data) // _RECORD.size} ranges of tokens, but a file can have at most "
            f"{MAX_BINARY_BYTES // _RECORD.size}: save fewer sequences per file, such as cache.select(range(1000))"
        )
    return ((FEATURE,), {FEATURE: data}) if data else ((), {})


def parse_hidden_ranges(data: bytes, batch: int, start: int, stop: int) -> tuple[HiddenRange, ...]:
    """Parse the feature's data. Returns the hidden ranges. The file has ``batch`` sequences and positions ``[start, stop)``."""
    if not data or len(data) % _RECORD.size:
        raise InvalidHeader(f"{_PLACE} has {len(data)} bytes, expected a positive multiple of {_RECORD.size}")
    hidden = tuple(HiddenRange(*record) for record in _RECORD.iter_unpack(data))
    last = HiddenRange(-1, 0, 0)
    for number, token_range in enumerate(hidden):
        where = f"{_PLACE}: record {number}"
        if token_range.row >= batch:
            raise InvalidHeader(f"{where} refers to sequence {token_range.row}, but the file has {batch} sequences")
        if not start <= token_range.start < token_range.stop <= stop:
            positions = f"[{token_range.start}:{token_range.stop}]"
            raise InvalidHeader(f"{where} covers positions {positions}, expected a range within [{start}:{stop}]")
        if token_range.row < last.row or (token_range.row == last.row and token_range.start <= last.stop):
            before = tuple(last)
            raise InvalidHeader(f"{where} is {tuple(token_range)} after {before}, expected ascending ranges at least one token apart")
        last = token_range
    return hidden
