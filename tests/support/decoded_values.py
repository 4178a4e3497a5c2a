"""Compare the values of two decoders, which must be equal, or within the specification's tolerance where it gives one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy
import torch

if TYPE_CHECKING:
    from kvpack.cache.cache import Cache


def assert_within(values: list[float], expected: list[float], tolerances: list[float]) -> None:
    a, b, allowed = (numpy.array(x, numpy.float64) for x in (values, expected, tolerances))
    assert a.shape == b.shape == allowed.shape
    # The order of binary32 sums determines which of them are finite; raw values may have any bits.
    exact = allowed == 0
    assert ((a == b) | (numpy.isnan(a) & numpy.isnan(b)))[exact].all()
    compared = numpy.isfinite(a) & numpy.isfinite(b) & ~exact
    excess = numpy.abs(a[compared] - b[compared]) - allowed[compared]
    assert not len(excess) or excess.max() <= 0, f"a value is {excess.max():.3g} above its tolerance"


def assert_same_cache(file: Any, cache: Cache) -> None:
    """Assert that ``file``, as read by the second decoder, and ``cache`` have the same values, within the specification's tolerance."""
    assert (file.start, file.recipe, file.model) == (cache.start, cache.recipe, dict(cache.model))
    assert file.starts == [cache.positions(number)[0] for number in range(len(cache))]
    for layer, expected in zip(file.layers, cache, strict=True):
        assert [name for name, side in layer.items() if side] == list(expected.sides)
        for name, side in expected.sides.items():
            values = side.unpack(torch.float32)
            assert layer[name].shape == values.shape
            assert_within(layer[name].values, values.flatten().tolist(), layer[name].tolerances)
