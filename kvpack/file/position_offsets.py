"""The required feature ``position-offsets``: rotary positions minus token indices (spec/container.md, Position offsets)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvpack.formats.errors import InvalidHeader

from .checks import Rule, check
from .limits import MAX_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .layer_states import StateEntry

FEATURE = "position-offsets"
OFFSET_BYTES = 8
"""Size of an offset in bytes: two's complement, little-endian."""


class HasTokens(Protocol):
    """Anything that has a batch size and a number of tokens, such as a layer's keys or values."""

    @property
    def batch(self) -> int: ...

    @property
    def tokens(self) -> int: ...


class HasSides(Protocol):
    def sides(self) -> Iterator[tuple[str, HasTokens]]: ...


def list_features(offsets: Sequence[int] | None) -> tuple[tuple[str, ...], dict[str, bytes]]:
    """Return the ``required`` and ``ignorable`` features of a file with one offset per sequence, or None if they are unknown."""
    if offsets is None:
        return (), {}
    return (FEATURE,), {FEATURE: b"".join(offset.to_bytes(OFFSET_BYTES, "little", signed=True) for offset in offsets)}


def parse_position_offsets(
    data: bytes, layers: Sequence[HasSides], starts: Sequence[int], states: Iterable[StateEntry], start: int
) -> tuple[int, ...]:
    """Parse the feature's data. Returns the offset of each sequence. Raises InvalidHeader or LimitExceeded."""
    if not data or len(data) % OFFSET_BYTES:
        raise InvalidHeader(
            f"ignorable[{FEATURE!r}] has {len(data)} bytes, expected a positive multiple of {OFFSET_BYTES}"
        )
    offsets = tuple(int.from_bytes(data[at : at + OFFSET_BYTES], "little", signed=True) for at in range(0, len(data), OFFSET_BYTES))
    sides = [(f"layers[{number}].{name}", first, side) for number, first in enumerate(starts) for name, side in layers[number].sides()]
    batches = {where: side.batch for where, _, side in sides} | {state.where: state.shape[0] for state in states}
    for where, batch in batches.items():
        if batch != len(offsets):
            raise InvalidHeader(f"ignorable[{FEATURE!r}] has offsets for {len(offsets)} sequences, but {where} has {batch}")
    stop = max((first + side.tokens for _, first, side in sides), default=start)
    for number, offset in enumerate(offsets):
        check(f"{stop} + ignorable[{FEATURE!r}][{number}]", stop + offset, Rule(int, MAX_TOKENS))
    return offsets
