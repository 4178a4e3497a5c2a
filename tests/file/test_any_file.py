"""Change any part of a valid file, repair its digests, and check that both readers accept it or both refuse it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.file_mutator import Vocabulary, mutate_file
from fuzz.oracles import check_container, compare_container
from fuzz.seeds import kvpack_files
from fuzz.value_oracles import check_values, compare_values
from support.file_parts import file_of, random_side
from support.strategies import codecs

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

    from kvpack.cache.side import Side
    from kvpack.formats.base import Codec

pytestmark = pytest.mark.scenario

MAX_DIM = 64
VOCABULARY = Vocabulary.of(kvpack_files())
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@st.composite
def files(draw: DrawFn) -> bytes:
    """Return a valid file of up to three layers with arbitrary codecs, sidecars, runs, tails, sequences, heads, and positions."""
    layers = [draw(_layers()) for _ in range(draw(st.integers(0, 3)))]
    return file_of(*layers, skipped=tuple(draw(st.integers(0, 9)) if any(layer) else 0 for layer in layers))


@st.composite
def _layers(draw: DrawFn) -> tuple[Side | None, Side | None]:
    batch, tail = draw(st.integers(1, 2)), draw(st.integers(0, 2))
    fitting = {side: codecs(side=side, bounded=False).filter(lambda made: made.dim <= MAX_DIM and not made.bases_needed) for side in "kv"}
    chosen = [draw(fitting[side]) if draw(st.booleans()) else None for side in "kv"]
    # Both sides have the same runs; a codec that encodes tokens one by one has one run.
    many = all(codec is None or _has_runs(codec) for codec in chosen)
    runs = tuple(draw(st.lists(st.integers(1, 9), max_size=3 if many else 1)))
    k, v = (
        None
        if codec is None
        else random_side(codec, runs, tail, batch, draw(st.integers(1, 2)), draw(st.sampled_from(("bf16", "fp16", "fp32"))))
        for codec in chosen
    )
    return k, v


def _has_runs(codec: Codec) -> bool:
    return codec.group_tokens > 1 or any(layout.per == "run" for layout in codec.layout(1, 1, 0).values())


@settings(max_examples=12, deadline=None, suppress_health_check=SLOW)
@given(data=files())
def test_valid_files_are_accepted_by_both_readers_with_equal_values(data: bytes) -> None:
    assert check_container(data)
    assert check_values(data)
    compare_values(data)


@settings(max_examples=12, deadline=None, suppress_health_check=SLOW)
@given(data=files(), seed=st.integers(0, 2**32))
def test_changed_files_are_treated_alike_by_both_readers(data: bytes, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(6):
        data = mutate_file(data, VOCABULARY, source, 1 << 16)
        check_container(data)
        compare_container(data)
