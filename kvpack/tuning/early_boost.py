"""The fast search: TurboAngle's early boost (Sec. 3.2), with three to five recipes within a budget of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpack.formats.errors import InvalidParameter

from .allocation import Allocation, uniform
from .search import Measurement, Search, best

if TYPE_CHECKING:
    from collections.abc import Iterator

EARLY = 4
"""The first layers that are boosted; then twice and four times as many."""

RUNS = 5
"""Maximum number of recipes that are measured."""

Rungs = dict[str, list[str]]


def fast(search: Search) -> tuple[Measurement, Measurement | None]:
    """Return the best of the uniform recipe and those whose early layers have finer keys, or finer values; and the uniform one.

    The boost of 4 layers is tried on keys and on values; the better side is then boosted in 8 and in 16 layers as long as that helps. A
    boost uses the finest codec that the budget allows in that many layers. Raises InvalidParameter for an impossible budget.
    """
    rungs = {side: search.everywhere(side) for side in "kv"}
    for side, codecs in rungs.items():
        if not codecs:
            raise InvalidParameter(f"no candidate can encode {side} in all layers, which a uniform recipe needs: add one with --candidate")
    baselines = [allocation for allocation in _baselines(search, rungs) if search.fits(allocation)]
    if not baselines:
        raise InvalidParameter(_too_small(search, rungs))
    plain = search.measure("uniform", baselines[0])
    layers = len(search.priced.places) // 2
    early = EARLY if layers >= 2 * EARLY else max(1, layers // 2)
    first = {side: _boosted(search, rungs, baselines, side, early) for side in "kv"}
    tried = [search.measure(f"first {early} of {side}", allocation) for side, allocation in first.items() if allocation is not None]
    if tried:
        leading = best(tried)
        side = leading.what[-1]
        for more in (2 * early, 4 * early):
            allocation = _boosted(search, rungs, baselines, side, more) if more < layers else None
            if allocation is None:
                break
            tried.append(search.measure(f"first {more} of {side}", allocation))
            if best(tried) is not tried[-1]:
                break
    return best([plain, *tried]), plain


def _baselines(search: Search, rungs: Rungs) -> Iterator[Allocation]:
    """Yield uniform allocations from most bytes to fewest: keys as fine as values, or one step finer, because keys matter more."""
    k, v = rungs["k"], rungs["v"]
    for total in range(len(k) + len(v) - 2, -1, -1):
        # Where one side has no rungs left, the other goes on.
        finer = min(max(-(-total // 2), total - len(v) + 1), len(k) - 1)
        yield uniform(search.priced.places, k[finer], v[total - finer])


def _boosted(search: Search, rungs: Rungs, baselines: list[Allocation], side: str, early: int) -> Allocation | None:
    """Return the largest baseline that leaves room for a boost, with the finest codec that fits on ``side`` of the ``early`` layers."""
    for baseline in baselines:
        held = rungs[side].index(baseline[0, side])
        for codec in reversed(rungs[side][held + 1 :]):
            allocation = baseline | {(layer, side): codec for layer in range(early)}
            if search.fits(allocation):
                return allocation
    return None


def _too_small(search: Search, rungs: Rungs) -> str:
    smallest = search.priced.file_bytes(uniform(search.priced.places, rungs["k"][0], rungs["v"][0]))
    bits = 8 / search.priced.values()
    return (
        f"the smallest uniform recipe of the candidates takes {smallest:,} bytes per window, {smallest * bits:.3f} bits per value; "
        f"the budget is {search.budget:,} bytes, {search.budget * bits:.3f} bits per value"
    )
