"""The part of a file that ``load`` reads: some of its layers, and a range of their tokens."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex

from kvpack.formats.errors import InvalidType, OutOfBounds

if TYPE_CHECKING:
    from kvpack.file.header import Header

Layers = slice | SupportsIndex | Iterable[SupportsIndex]
Tokens = SupportsIndex | Sequence[SupportsIndex]


@dataclass(frozen=True)
class CachePart:
    """Part of a cache with ``tokens`` tokens: tokens ``[start, stop)`` of the layers in ``layer_indices``, in ascending order."""

    layer_indices: tuple[int, ...]
    start: int
    stop: int
    tokens: int

    @property
    def has_all_tokens(self) -> bool:
        return (self.start, self.stop) == (0, self.tokens)

    @classmethod
    def from_arguments(cls, header: Header, layers: Layers | None, tokens: Tokens | None) -> CachePart:
        """Return the part of a file that the arguments of ``load`` select. None selects all layers or all tokens.

        Raises InvalidParameter for other values, and OutOfBounds if the file lacks a layer or a token.
        """
        count = len(header.layers)
        layer_indices = tuple(range(count)) if layers is None else _layer_indices(layers, count)
        ends = [header.starts[number] - header.start + side.tokens for number in layer_indices for _, side in header.layers[number].sides()]
        last = max(ends, default=0)
        start, stop = (0, last) if tokens is None else _token_range(tokens)
        if not 0 <= start <= stop <= last:
            raise OutOfBounds(f"tokens [{start}:{stop}] are out of range: the cache has {last} tokens")
        return cls(layer_indices, start, stop, last)


def _layer_indices(layers: Layers, count: int) -> tuple[int, ...]:
    if isinstance(layers, slice):
        return tuple(sorted(range(count)[layers]))
    items = [layers] if isinstance(layers, SupportsIndex) else layers
    try:
        if isinstance(items, str | bytes):
            raise TypeError
        numbers = [operator.index(number) for number in items]
    except TypeError:
        raise InvalidType(
            f"layers is {layers!r:.80}, expected an integer, a list of integers or a slice, such as layers=[0, 1] or layers=slice(16, 32)"
        ) from None
    for number in numbers:
        if not -count <= number < count:
            raise OutOfBounds(f"layer {number} is out of range: the cache has {count} layers")
    return tuple(sorted({number % count for number in numbers}))


def _token_range(tokens: Tokens) -> tuple[int, int]:
    try:
        if isinstance(tokens, bool | str | bytes):
            raise TypeError
        if isinstance(tokens, SupportsIndex):
            return 0, operator.index(tokens)
        start, stop = (operator.index(position) for position in tokens)
    except (TypeError, ValueError):
        raise InvalidType(
            f"tokens is {tokens!r:.80}, expected a number of tokens or a pair, such as tokens=4096 or tokens=(1024, 4096)"
        ) from None
    return start, stop
