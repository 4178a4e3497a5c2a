"""The canonical text of a recipe: one text for all recipes that give every layer and side the same codec (spec/store.md, Recipes).

A recipe's rules become, for each side, a codec for all layers and exceptions from it. Ranges that count from the first layer are compared
with each other, and so are ranges that count from the last; which layers have one of each kind depends on the number of layers.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FIRST, LAST, BOTH = range(3)
"""From where a range counts both of its ends: the first layer, the last layer, or one end from each."""


class Range(NamedTuple):
    """Layers ``begin`` to ``end``, both included.

    A range that counts from the first layer may end at infinity, one that counts from the last may begin at minus infinity.
    """

    counts: int
    begin: float
    end: float

    @classmethod
    def of_item(cls, first: int, last: int) -> Range | None:
        """Return the range of a recipe's item; None for all layers."""
        if first >= 0 and last >= -1:
            result = cls(FIRST, first, last if last >= 0 else math.inf)
            return None if result.is_all else result
        return cls(LAST, first or -math.inf, last) if last < 0 and first <= 0 else cls(BOTH, first, last)

    def __str__(self) -> str:
        first, last = 0 if self.begin == -math.inf else int(self.begin), -1 if self.end == math.inf else int(self.end)
        return str(first) if first == last else f"{first}-{last}"

    @property
    def is_all(self) -> bool:
        """True if the range covers all layers."""
        return (self.begin, self.end) in ((0, math.inf), (-math.inf, -1))

    def may_meet(self, other: Range) -> bool:
        """Return True if both ranges may cover the same layer."""
        return self.counts != other.counts or self.counts == BOTH or (self.begin <= other.end and other.begin <= self.end)

    def without(self, other: Range) -> list[Range]:
        """Return the parts of the range that ``other`` does not cover, as far as the number of layers does not matter."""
        if self.counts != other.counts:
            return [self]
        if self.counts == BOTH:
            return [] if self == other else [self]
        parts = (self.begin, min(self.end, other.begin - 1)), (max(self.begin, other.end + 1), self.end)
        return [Range(self.counts, begin, end) for begin, end in parts if begin <= end and begin < math.inf and end > -math.inf]


class Spelled(NamedTuple):
    """A codec as a clause spells it: ``text`` has all of its options, ``plain`` those that are not in a ``raw`` clause.

    ``raw`` is the value of the clause for the other options, empty if no token is kept raw, and None for a lossless codec.
    """

    text: str
    plain: str
    raw: str | None


class Exceptions(NamedTuple):
    """Layers, as ranges, with the same ``codec``."""

    ranges: tuple[Range, ...]
    codec: Spelled

    @property
    def layers(self) -> str:
        """The ranges as a recipe lists them."""
        return ",".join(map(str, self.ranges))


Items = tuple[tuple[int, int], ...] | None
"""The layers of a rule, as (first, last); None for all."""


def canonical_text(rules: Sequence[tuple[str, Items, dict[str, Spelled]]], window: int) -> str:
    """Return the canonical text of rules (sides, items, codec of each side) with a raw tail of ``window`` tokens.

    Later rules take precedence.
    """
    result = {side: _side([(items, codecs[side]) for sides, items, codecs in rules if side in sides]) for side in "kv"}
    (k, k_exceptions), (v, v_exceptions) = result["k"], result["v"]
    clauses = [("kv", k)] if k == v else [("k", k), ("v", v)]
    clauses += [(f"layers={one.layers}:{sides}", one.codec) for sides, one in _merged_sides(k_exceptions, v_exceptions)]
    kept = {codec.raw for _, codec in clauses if codec.raw is not None}
    raw = kept.pop() if len(kept) == 1 else ""
    texts = [f"{sides}={codec.plain if raw else codec.text}" for sides, codec in clauses]
    return ";".join([*texts, *([f"raw={raw}"] if raw else []), *([f"tail={window}"] if window else [])])


def _side(rules: Sequence[tuple[Items, Spelled]]) -> tuple[Spelled, list[Exceptions]]:
    """Return the codec of all layers of one side, and the exceptions in order."""
    ranges: list[tuple[Range | None, Spelled]] = []
    for items, codec in rules:
        ranges += [(Range.of_item(*item), codec) for item in items or ((0, -1),)]
    while True:
        last = max(number for number, (one, _) in enumerate(ranges) if one is None)
        base = ranges[last][1]
        exceptions = _exceptions([(one, codec) for one, codec in ranges[last + 1 :] if one is not None], base)
        # Ranges that were joined may be in the way of fewer others, or cover all layers.
        again = [(None, base), *((None if one.is_all else one, of.codec) for of in exceptions for one in of.ranges)]
        if again == ranges:
            return base, exceptions
        ranges = again


def _exceptions(rules: Sequence[tuple[Range, Spelled]], base: Spelled) -> list[Exceptions]:
    """Return ``rules`` without those that later rules replace or that repeat ``base``, in an order that depends only on their effect."""
    left: list[tuple[Range, Spelled]] = []
    for items, codec in reversed(rules):
        parts = [items]
        for later, _ in left:
            parts = [rest for part in parts for rest in part.without(later)]
        left += ((part, codec) for part in reversed(parts))
    left.reverse()
    ordered: list[tuple[Range, Spelled]] = []
    # A rule stays behind those before it that may cover one of its layers and have another codec.
    before = [{i for i, (items, codec) in enumerate(left[:j]) if codec != of and items.may_meet(it)} for j, (it, of) in enumerate(left)]
    waiting = set(range(len(left)))
    while waiting:
        free = [number for number in waiting if not before[number] & waiting]
        plain = [number for number in free if left[number][1] == base and not before[number]]
        if plain:
            waiting.difference_update(plain)
            before = [numbers - set(plain) for numbers in before]
            continue
        newest = ordered[-1][1] if ordered else None
        chosen = min(free, key=lambda number: (left[number][1] != newest, left[number][1].text, left[number][0]))
        waiting.remove(chosen)
        ordered.append(left[chosen])
    return _grouped(ordered)


def _grouped(rules: Iterable[tuple[Range, Spelled]]) -> list[Exceptions]:
    """Combine neighboring rules with the same codec, and join ranges that touch."""
    groups: list[tuple[list[Range], Spelled]] = []
    for items, codec in rules:
        if groups and groups[-1][1] == codec:
            groups[-1][0].append(items)
        else:
            groups.append(([items], codec))
    return [Exceptions(tuple(_joined(sorted(ranges))), codec) for ranges, codec in groups]


def _joined(ranges: Sequence[Range]) -> list[Range]:
    joined = list(ranges[:1])
    for before, after in pairwise(ranges):
        if after.counts == before.counts != BOTH and after.begin == joined[-1].end + 1:
            joined[-1] = joined[-1]._replace(end=after.end)
        else:
            joined.append(after)
    return joined


def _merged_sides(k: Sequence[Exceptions], v: Sequence[Exceptions]) -> list[tuple[str, Exceptions]]:
    """Return the exceptions of both sides, each with its sides; equal ones are combined if the order on each side allows it."""
    result: list[tuple[str, Exceptions]] = []
    rest = list(v)
    for exception in k:
        if exception in rest:
            place = rest.index(exception)
            result += [*(("v", other) for other in rest[:place]), ("kv", exception)]
            rest = rest[place + 1 :]
        else:
            result.append(("k", exception))
    return [*result, *(("v", other) for other in rest)]
