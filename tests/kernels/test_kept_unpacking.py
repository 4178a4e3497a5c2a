"""Prepared decoding is cached with a side, so later calls do little more than launch kernels.

interpreter.py describes which process runs which of these tests.
"""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack.cache.packed_runs import PackedRuns
from support.caches import random_pairs
from support.interpreter import DEVICE
from support.random_sides import codecs, random_side

if TYPE_CHECKING:

    from kvpack.cache.side import Side

CODECS = [
    "group:b=4,g=32",
    "group:b=3,g=32,rotation=hadamard,token_scale=fp16",
    "scalar:b=3",
    "octahedral:b=3",
    "octahedral:b=4,arrangement=direct",
    "minifloat:element=e4m3",
]


def a_side(codec: str, runs: tuple[int, ...] = (128, 70), seed: int = 1) -> Side:
    made, _ = codecs(codec, codec, (64, 64))
    return random_side(made, 2, runs, 0, seed).to(DEVICE)


def unpacked_side(side: Side, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    from kvpack.kernels.decode import sides

    out = torch.full((side.batch, side.heads, side.tokens, side.dim), torch.nan, dtype=dtype, device=DEVICE)
    assert sides.unpack_into(side, 0, side.tokens, out) == []
    return out


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("codec", CODECS)
def test_later_calls_build_no_tables(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    side = a_side(codec)
    first = unpacked_side(side)
    narrow = unpacked_side(side, torch.float16)

    def refuse(*_: Any) -> None:
        raise AssertionError("a table was made")

    monkeypatch.setattr(torch, "from_numpy", refuse)
    assert torch.equal(unpacked_side(side), first)
    assert torch.equal(unpacked_side(side, torch.float16), narrow)


@pytest.mark.kernels
@pytest.mark.parametrize("codec", CODECS)
def test_cached_launches_are_released_with_the_side(codec: str) -> None:
    from kvpack.kernels.decode import sides

    side = a_side(codec)
    unpacked_side(side)
    (kept,) = sides._cached[side].values()
    left = weakref.ref(kept)
    del kept, side
    assert left() is None


@pytest.mark.kernels
@pytest.mark.parametrize("codec", CODECS)
def test_copies_of_streams_are_not_cached(codec: str) -> None:
    from kvpack.kernels.decode import sides

    side = a_side(codec, (128,))
    expected = unpacked_side(side)
    page = side.runs[0]
    # Rows of every second place in memory.
    apart = {name: torch.stack([stream, stream], 3)[:, :, :, 0] for name, stream in page.streams.items()}
    side = replace(side, runs=PackedRuns.from_runs([replace(page, streams=apart)]))
    assert torch.equal(unpacked_side(side), expected)
    assert side not in sides._cached


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("codec", ["group:b=4,g=32", "octahedral:b=3"])
def test_sides_with_equal_shapes_are_distinguished(codec: str) -> None:
    some = [a_side(codec, seed=seed) for seed in range(3)]
    for side in (*some, *some):
        error = (unpacked_side(side).float() - side.to("cpu").unpack(torch.float32).to(DEVICE)).norm()
        assert error < 2.0**-6 * side.to("cpu").unpack(torch.float32).norm()
        assert torch.equal(unpacked_side(side.prefix(128)), unpacked_side(side)[:, :, :128])


@pytest.mark.kernels
def test_a_live_cache_unpacks_its_current_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACK_KERNELS", "triton")
    live = kvpack.LiveCache("kv=group:b=4,g=32;tail=32", layers=1)
    given = random_pairs(1, 160, dims=(64, 64))[0]
    for start in range(0, 160, 40):
        live.update(0, *(x[:, :, start : start + 40].to(DEVICE) for x in given))
        live.roll()
        for _ in range(2):
            for found, x in zip(live.unpack(0, torch.bfloat16), given, strict=True):
                assert found is not None
                assert found.shape[2] == start + 40
                assert (found.cpu().float() - x[:, :, : start + 40].float()).norm() < 0.2 * x[:, :, : start + 40].float().norm()


@pytest.mark.cuda
@pytest.mark.parametrize("codec", CODECS)
def test_cached_launches_work_with_streams_threads_and_graphs(codec: str) -> None:
    side = a_side(codec, (4096, 70))
    expected = unpacked_side(a_side(codec, (4096, 70)))
    # The first call on another stream than the later ones, with the device busy on both.
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1 << 22)  # type: ignore[no-untyped-call]
        there = side.unpack(torch.bfloat16)
    found = side.unpack(torch.bfloat16)
    torch.cuda.synchronize()
    assert torch.equal(there, expected)
    assert torch.equal(found, expected)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(x, expected) for x in pool.map(lambda _: side.unpack(torch.bfloat16), range(16)))
    graph, out = torch.cuda.CUDAGraph(), torch.zeros_like(expected)
    with torch.cuda.graph(graph):
        side.unpack_into(out)
    graph.replay()
    assert torch.equal(out, expected)
