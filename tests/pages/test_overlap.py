"""Strided memory that overlaps is detected from its strides, with the same result as comparing every pair of values."""

from __future__ import annotations

import random
import time
from itertools import combinations, pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpack.pages.buffer import Strided, find_overlap, overlaps, overlaps_itself

AXES = st.lists(st.tuples(st.integers(2, 4), st.integers(0, 40)), max_size=3).map(tuple)
TENSORS = st.builds(Strided, st.integers(0, 80), st.sampled_from((1, 2, 4)), AXES)


def places(x: Strided) -> list[int]:
    steps = product(*(range(0, size * stride, stride) if stride else [0] * size for size, stride in x.axes))
    return sorted(x.begin + sum(step) for step in steps)


def overlap_alone(x: Strided) -> bool:
    return any(after - before < x.item for before, after in pairwise(places(x)))


def overlap(x: Strided, y: Strided) -> bool:
    return any(abs(p - q) < x.item for p in places(x) for q in places(y))


@given(TENSORS, TENSORS)
@settings(max_examples=40)
def test_overlap_of_two_tensors_is_decided_correctly(x: Strided, y: Strided) -> None:
    y = y._replace(item=x.item)
    assert overlaps_itself(x) == overlap_alone(x)
    assert overlaps(x, y) == overlaps(y, x) == overlap(x, y)


@given(TENSORS, st.lists(st.integers(0, 90), max_size=4), st.booleans())
@settings(max_examples=40)
def test_overlap_of_many_tensors_is_decided_correctly(x: Strided, begins: list[int], alike: bool) -> None:
    tensors = [x, *(x._replace(begin=begin, axes=x.axes if alike else x.axes[:1]) for begin in begins)]
    expected = any(map(overlap_alone, tensors)) or any(overlap(*pair) for pair in combinations(tensors, 2))
    assert (find_overlap(tensors) is not None) == expected


@given(TENSORS, st.integers(1, 3), st.integers(0, 60), st.integers(1, 60))
@settings(max_examples=40)
def test_layers_and_sides_in_one_pool_do_not_overlap(x: Strided, layers: int, step: int, side: int) -> None:
    tensors = [x._replace(begin=x.begin + layer * step + first) for first in (0, side) for layer in range(layers)]
    expected = any(map(overlap_alone, tensors)) or any(overlap(*pair) for pair in combinations(tensors, 2))
    assert (find_overlap(tensors) is not None) == expected


def test_large_pools_are_decided_quickly() -> None:
    layers, page = 80, 8 * 16 * 128 * 2
    axes = ((100_000, 2 * layers * page), (8, 16 * 128 * 2), (16, 128 * 2), (128, 2))
    pool = [Strided((2 * layer + side) * page, 2, axes) for side in (0, 1) for layer in range(layers)]
    begun = time.process_time()
    assert find_overlap(pool) is None
    assert time.process_time() - begun < 0.1
    random.Random(0).shuffle(pool)
    last = max(pool, key=lambda one: one.begin)
    moved = [one._replace(begin=one.begin + 2) if one is pool[7] and one is not last else one for one in pool]
    assert find_overlap(moved) is not None


def test_the_search_is_bounded() -> None:
    """Many similar strides with many values each give more combinations than the search tries."""
    axes = tuple((1000, 100_000 + number) for number in range(40))
    begun = time.process_time()
    assert overlaps_itself(Strided(0, 1, axes))
    assert time.process_time() - begun < 2
