"""The canonical text of recipes, which is equal for recipes that select the same codecs (spec/store.md, Recipes).

Separately for keys and values, the rules of a recipe are reduced to one codec for all layers, and overrides for ranges of layers. A range
counts from the first layer or from the last. Only ranges of the same kind are compared, because the overlap of different kinds depends on
the number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

FIRST, LAST, BOTH = range(3)
"""Ways to number the layers of a range: from the first layer, from the last layer, or with one end from each."""


class LayerRange(NamedTuple):
    """A range of layers, from ``begin`` to ``end`` inclusive.

    ``counts`` is FIRST, LAST or BOTH. ``end`` may be infinity if layers are counted from the first, and ``begin`` may be minus infinity if
    they are counted from the last.
    """

    counts: int
    begin: float
    end: float

    @classmethod
    def from_item(cls, first: int, last: int) -> LayerRange | None:
        """Return the range for layers ``first`` to ``last``, as numbered in a recipe, or None if it covers all layers."""
        if first >= 0 and last >= -1:
            result = cls(FIRST, first, last if last >= 0 else math.inf)
            return None if result.is_all else result
        return cls(LAST, first or -math.inf, last) if last < 0 and first <= 0 else cls(BOTH, first, last)

    def __str__(self) -> str:
        first, last = 0 if self.begin == -math.inf else int(self.begin), -1 if self.end == math.inf else int(self.end)
        return str(first) if first == last else f"{first}-{last}"

    @property
    def is_all(self) -> bool:
        return (self.begin, self.end) in ((0, math.inf), (-math.inf, -1))

    def may_overlap(self, other: LayerRange) -> bool:
        """Return True if the ranges overlap for at least one number of layers."""
        return self.counts != other.counts or self.counts == BOTH or (self.begin <= other.end and other.begin <= self.end)

    def subtract(self, other: LayerRange) -> list[LayerRange]:
        """Return the parts of this range that may be outside ``other``, depending on the number of layers."""
        if self.counts != other.counts:
            return [self]
        if self.counts == BOTH:
            return [] if self == other else [self]
        parts = (self.begin, min(self.end, other.begin - 1)), (max(self.begin, other.end + 1), self.end)
        return [LayerRange(self.counts, begin, end) for begin, end in parts if begin <= end and begin < math.inf and end > -math.inf]


class CodecText(NamedTuple):
    """The canonical text of a codec: ``text`` with all options, and ``plain`` without the options for raw tokens.

    ``raw`` is the value of a ``raw=`` clause with the same options for raw tokens. It is empty if no token is kept raw, and None for a
    lossless codec.
    """

    text: str
    plain: str
    raw: str | None


class LayerOverride(NamedTuple):
    """Ranges of layers with a codec other than the default one."""

    ranges: tuple[LayerRange, ...]
    codec: CodecText

    @property
    def layers(self) -> str:
        """The layer ranges as written in a recipe."""
        return ",".join(map(str, self.ranges))


LayerRanges = tuple[tuple[int, int], ...] | None
"""Layers that a rule covers, as (first, last) pairs, or None for all layers."""


def canonical_text(rules: Sequence[tuple[str, LayerRanges, dict[str, CodecText]]], window: int) -> str:
    """Return the canonical text of a recipe with these ``rules`` and a raw tail of ``window`` tokens.

    Each rule is a tuple of sides ("k", "v" or "kv"), layers, and codecs by side. Later rules take precedence.
    """
    result = {side: _reduce_rules([(items, codecs[side]) for sides, items, codecs in rules if side in sides]) for side in "kv"}
    (k, k_overrides), (v, v_overrides) = result["k"], result["v"]
    clauses = [("kv", k)] if k == v else [("k", k), ("v", v)]
    clauses += [(f"layers={override.layers}:{sides}", override.codec) for sides, override in _merge_sides(k_overrides, v_overrides)]
    kept = {codec.raw for _, codec in clauses if codec.raw is not None}
    raw = kept.pop() if len(kept) == 1 else ""
    texts = [f"{sides}={codec.plain if raw else codec.text}" for sides, codec in clauses]
    return ";".join([*texts, *([f"raw={raw}"] if raw else []), *([f"tail={window}"] if window else [])])


def _reduce_rules(rules: Sequence[tuple[LayerRanges, CodecText]]) -> tuple[CodecText, list[LayerOverride]]:
    """Reduce the rules for keys, or for values, to a default codec and a list of overrides in order."""
    ranges: list[tuple[LayerRange | None, CodecText]] = []
    for items, codec in rules:
        ranges += [(LayerRange.from_item(*item), codec) for item in items or ((0, -1),)]
    while True:
        last = max(number for number, (layers, _) in enumerate(ranges) if layers is None)
        base = ranges[last][1]
        overrides = _layer_overrides([(layers, codec) for layers, codec in ranges[last + 1 :] if layers is not None], base)
        # Joined ranges may overlap fewer others, or cover all layers.
        joined = ((layers, override.codec) for override in overrides for layers in override.ranges)
        reduced = [(None, base), *((None if layers.is_all else layers, codec) for layers, codec in joined)]
        if reduced == ranges:
            return base, overrides
        ranges = reduced


def _layer_overrides(rules: Sequence[tuple[LayerRange, CodecText]], base: CodecText) -> list[LayerOverride]:
    """Return the overrides of the codec ``base``, without redundant ones. Their order depends only on their effect.

    A rule is redundant if later rules replace it, or if its codec is ``base``.
    """
    remaining: list[tuple[LayerRange, CodecText]] = []
    for items, codec in reversed(rules):
        parts = [items]
        for later, _ in remaining:
            parts = [uncovered for part in parts for uncovered in part.subtract(later)]
        remaining += ((part, codec) for part in reversed(parts))
    remaining.reverse()
    ordered: list[tuple[LayerRange, CodecText]] = []
    # A rule stays after earlier rules that may overlap it and select another codec.
    before = [
        {earlier for earlier, (items, codec) in enumerate(remaining[:number]) if codec != its_codec and items.may_overlap(its_items)}
        for number, (its_items, its_codec) in enumerate(remaining)
    ]
    waiting = set(range(len(remaining)))
    while waiting:
        free = [number for number in waiting if not before[number] & waiting]
        plain = [number for number in free if remaining[number][1] == base and not before[number]]
        if plain:
            waiting.difference_update(plain)
            before = [numbers - set(plain) for numbers in before]
            continue
        previous = ordered[-1][1] if ordered else None
        chosen = min(free, key=lambda number: (remaining[number][1] != previous, remaining[number][1].text, remaining[number][0]))
        waiting.remove(chosen)
        ordered.append(remaining[chosen])
    return _group_rules(ordered)


def _group_rules(rules: Iterable[tuple[LayerRange, CodecText]]) -> list[LayerOverride]:
    """Combine consecutive rules that have the same codec, and join their adjacent ranges."""
    groups: list[tuple[list[LayerRange], CodecText]] = []
    for items, codec in rules:
        if groups and groups[-1][1] == codec:
            groups[-1][0].append(items)
        else:
            groups.append(([items], codec))
    return [LayerOverride(tuple(_join_ranges(sorted(ranges))), codec) for ranges, codec in groups]


def _join_ranges(ranges: Sequence[LayerRange]) -> list[LayerRange]:
    joined = list(ranges[:1])
    for before, after in pairwise(ranges):
        if after.counts == before.counts != BOTH and after.begin == joined[-1].end + 1:
            joined[-1] = joined[-1]._replace(end=after.end)
        else:
            joined.append(after)
    return joined


def _merge_sides(k: Sequence[LayerOverride], v: Sequence[LayerOverride]) -> list[tuple[str, LayerOverride]]:
    """Return (sides, override) pairs in order. If the order allows it, an override that keys and values share becomes one for "kv"."""
    result: list[tuple[str, LayerOverride]] = []
    remaining = list(v)
    for override in k:
        if override in remaining:
            index = remaining.index(override)
            result += [*(("v", other) for other in remaining[:index]), ("kv", override)]
            remaining = remaining[index + 1 :]
        else:
            result.append(("k", override))
    return [*result, *(("v", other) for other in remaining)]
