"""The fast search: TurboAngle's early boost (Sec. 3.2), with three to five recipes within a budget of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpack.formats.errors import InvalidParameter

from .allocation import Allocation, uniform
from .search import Measurement, Search, best

if TYPE_CHECKING:
    from collections.abc import Iterator

EARLY_LAYERS = 4
"""Number of first layers that the first attempts boost. Later attempts boost twice and four times as many."""

MAX_MEASUREMENTS = 5
"""Maximum number of recipes that are measured."""

Rungs = dict[str, list[str]]


def fast_search(search: Search) -> tuple[Measurement, Measurement | None]:
    """Return the best recipe, and the best uniform one. Recipes encode keys or values more finely in early layers.

    A boost of 4 layers is tried for keys and for values. The better of the two is then extended to 8 and 16 layers as long as that helps. A
    boost uses the finest codec that the budget allows. Raises InvalidParameter for an impossible budget.
    """
    rungs = {side: search.common_candidates(side) for side in "kv"}
    for side, codecs in rungs.items():
        if not codecs:
            tensors = "keys" if side == "k" else "values"
            raise InvalidParameter(f"no candidate can encode {tensors} in all layers: add one that can with --candidate")
    baselines = [allocation for allocation in _baselines(search, rungs) if search.fits(allocation)]
    if not baselines:
        raise InvalidParameter(_too_small(search, rungs))
    plain = search.measure("uniform", baselines[0])
    layers = len(search.priced.places) // 2
    early = EARLY_LAYERS if layers >= 2 * EARLY_LAYERS else max(1, layers // 2)
    first = {side: _boost_early_layers(search, rungs, baselines, side, early) for side in "kv"}
    tried = [search.measure(f"first {early} of {side}", allocation) for side, allocation in first.items() if allocation is not None]
    if tried:
        leading = best(tried)
        side = leading.role[-1]
        for more in (2 * early, 4 * early):
            allocation = _boost_early_layers(search, rungs, baselines, side, more) if more < layers else None
            if allocation is None:
                break
            tried.append(search.measure(f"first {more} of {side}", allocation))
            if best(tried) is not tried[-1]:
                break
    return best([plain, *tried]), plain


def _baselines(search: Search, rungs: Rungs) -> Iterator[Allocation]:
    """Yield uniform allocations from most bytes to fewest. Keys are as fine as values, or one step finer because they matter more."""
    k, v = rungs["k"], rungs["v"]
    for total in range(len(k) + len(v) - 2, -1, -1):
        # If keys or values have no finer candidates left, only the other ones continue.
        finer = min(max(-(-total // 2), total - len(v) + 1), len(k) - 1)
        yield uniform(search.priced.places, k[finer], v[total - finer])


def _boost_early_layers(search: Search, rungs: Rungs, baselines: list[Allocation], side: str, early: int) -> Allocation | None:
    """Return the largest baseline that leaves room for a boost, with the finest codec that fits for ``side`` of the ``early`` layers."""
    for baseline in baselines:
        current = rungs[side].index(baseline[0, side])
        for codec in reversed(rungs[side][current + 1 :]):
            allocation = baseline | {(layer, side): codec for layer in range(early)}
            if search.fits(allocation):
                return allocation
    return None


def _too_small(search: Search, rungs: Rungs) -> str:
    smallest = search.priced.file_bytes(uniform(search.priced.places, rungs["k"][0], rungs["v"][0]))
    bits = 8 / search.priced.values()
    return (
        f"the smallest uniform recipe of the candidates takes {smallest:,} bytes per window, {smallest * bits:.3f} bits per value, "
        f"but the budget is {search.budget:,} bytes, {search.budget * bits:.3f} bits per value: raise --bits"
    )
