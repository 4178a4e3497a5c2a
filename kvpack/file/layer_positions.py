"""The required feature ``layer-positions``: the first position of each layer (spec/container.md, Layer positions)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvpack.formats.errors import InvalidHeader

from .checks import Rule, check
from .limits import MAX_TOKENS

FEATURE = "layer-positions"
START_BYTES = 8
"""Size of a position in bytes: unsigned, little-endian."""


class HasSides(Protocol):
    """Protocol of layers. ``k`` or ``v`` is None if absent."""

    @property
    def k(self) -> object: ...

    @property
    def v(self) -> object: ...


def list_features(start: int, starts: Sequence[int]) -> tuple[tuple[str, ...], dict[str, bytes]]:
    """Return the ``required`` and ``ignorable`` features of a file that starts at position ``start``.

    ``starts`` contains the first position of each layer.
    """
    for number, first in enumerate(starts):
        check(f"the first position of layers[{number}]", first, Rule(int, MAX_TOKENS, start))
    if all(first == start for first in starts):
        return (), {}
    return (FEATURE,), {FEATURE: b"".join(first.to_bytes(START_BYTES, "little") for first in starts)}


def parse_layer_starts(data: bytes, start: int, layers: Sequence[HasSides]) -> tuple[int, ...]:
    """Parse the feature's data. Returns the first position of each layer. Raises InvalidHeader or LimitExceeded."""
    if len(data) != START_BYTES * len(layers):
        raise InvalidHeader(f"ignorable[{FEATURE!r}] has {len(data)} bytes, expected {START_BYTES * len(layers)} for {len(layers)} layers")
    starts = tuple(int.from_bytes(data[at : at + START_BYTES], "little") for at in range(0, len(data), START_BYTES))
    for number, (first, layer) in enumerate(zip(starts, layers, strict=True)):
        _check_start(number, first, start, layer)
    if all(first == start for first in starts):
        raise InvalidHeader(f"{FEATURE} is present, but every layer starts at {start}, the file's start: omit the feature")
    return starts


def _check_start(layer_index: int, first: int, start: int, layer: HasSides) -> None:
    check(f"ignorable[{FEATURE!r}][{layer_index}]", first, Rule(int, MAX_TOKENS, start))
    if first != start and layer.k is None and layer.v is None:
        raise InvalidHeader(f"ignorable[{FEATURE!r}][{layer_index}] is {first}, expected the file's start {start} for an empty layer")
