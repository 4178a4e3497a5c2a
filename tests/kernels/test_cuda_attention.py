"""Tests of attention in CUDA C++, compared with fp64 attention over the decoded values.

On a CUDA device, NVRTC compiles it. With Triton's interpreter, the same source is compiled for the CPU (support/host_kernels.py).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvpack import Layer
from support import host_kernels
from support.interpreter import DEVICE, INTERPRETED, needs_loaded_bounds
from support.random_sides import TOLERANCE, check_attention, codecs, exact_attention, random_side

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvpack.cache.side import Side

pytestmark = [
    needs_loaded_bounds,
    pytest.mark.kernels,
    pytest.mark.skipif(INTERPRETED and host_kernels.COMPILER is None, reason="g++ is not installed"),
    pytest.mark.usefixtures("uninitialized_is_poisoned", "cuda_kernels"),
]

SIDES = {
    "2 bits, means of 4 bits": ("scalar:b=2,mean=64,mean_bits=4,norm=log8", "scalar:b=2"),
    "3 bits": ("scalar:b=3", "scalar:b=3,norm=log8"),
    "4 bits, means": ("scalar:b=4,mean=128", "scalar:b=4,norm=log8"),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def cuda_kernels(monkeypatch: pytest.MonkeyPatch, compiled: Path) -> None:
    """Use kernels in CUDA C++ for short layers, too."""
    from kvpack.kernels.cuda import attend_scalar

    monkeypatch.setattr(attend_scalar, "MIN_TOKENS", dict.fromkeys(attend_scalar.MIN_TOKENS, 0))
    monkeypatch.setattr(attend_scalar, "_load_kernel", lru_cache(attend_scalar._load_kernel.__wrapped__))
    if INTERPRETED:
        host_kernels.run_on_cpu(monkeypatch, compiled)


def layer_of(name: str, runs: tuple[int, ...], tail: int, batch: int = 1) -> Layer:
    k, v = codecs(*SIDES[name], (128, 128))
    return Layer(random_side(k, 2 // batch, runs, tail, 1, batch), random_side(v, 2 // batch, runs, tail, 2, batch))


def replaced_launches(layer: Layer, q_heads: int, **options: Any) -> list[bool]:
    """Return for each launch of an attention call whether it is in CUDA C++."""
    from kvpack.kernels.attend import attention
    from kvpack.kernels.attend.prepared import AttendOptions

    q = torch.zeros(layer.k.batch, q_heads, 1, 128, device=DEVICE)  # type: ignore[union-attr]
    sides: list[Side] = [side.to(DEVICE) for side in layer.sides.values()]
    return [launch.kernel is not None for launch in attention.prepare(q, Layer(*sides), AttendOptions(1.0, **options)).launches]


@pytest.mark.parametrize("name", SIDES)
def test_few_query_rows_agree_with_exact_attention(name: str) -> None:
    """Programs have several tiles per warp, and the last one ends inside a tile."""
    tokens = 333 if INTERPRETED else 40_007
    layer = layer_of(name, (tokens,), 0)
    assert replaced_launches(layer, 8) == [True]
    check_attention(layer, 8)


def test_a_raw_tail_has_a_launch_of_its_own() -> None:
    layer = layer_of("4 bits, means", (256,), 9)
    assert replaced_launches(layer, 6) == [True, False]
    check_attention(layer, 6)


@pytest.mark.parametrize("lengths", [[140, 3], [0, 144]], ids=["long and short", "one is empty"])
def test_sequences_may_be_shorter(lengths: list[int]) -> None:
    layer = layer_of("3 bits", (144,), 0, batch=2)
    check_attention(layer, 1, lengths=lengths)


def test_new_tensors_may_be_on_another_device_by_default() -> None:
    layer = layer_of("3 bits", (144,), 0)
    with torch.device("meta"):
        assert replaced_launches(layer, 2) == [True]


def test_launches_stay_the_same_while_a_layer_grows() -> None:
    from kvpack.kernels.attend.growing import GrowingCall
    from kvpack.kernels.attend.prepared import AttendOptions

    k, v = codecs(*SIDES["3 bits"], (128, 128))
    q = torch.randn(1, 4, 1, 128, generator=torch.Generator().manual_seed(3))
    call, repeat = None, None
    for runs in ((64,), (64, 48)):
        layer = Layer(random_side(k, 1, runs, 9, 1), random_side(v, 1, runs, 9, 2))
        there = layer.to(DEVICE)
        lengths = torch.tensor([sum(runs) + 9], dtype=torch.int32, device=DEVICE)
        if call is None:
            call = GrowingCall(q.to(DEVICE), there, AttendOptions(128**-0.5))
            assert [launch.kernel is not None for launch in call._launches] == [True, False]
        else:
            assert not call.refresh(there)
        found = call(q.to(DEVICE), lengths)
        expected = exact_attention(q, layer)
        assert (found.cpu() - expected).norm() / expected.norm() < TOLERANCE
        if not INTERPRETED:
            repeat = repeat or CapturedCall(partial(call, q.to(DEVICE)), lengths)
            assert (repeat(lengths).cpu() - expected).norm() / expected.norm() < TOLERANCE


class CapturedCall:
    """A CUDA graph of ``call(lengths)``."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor], lengths: torch.Tensor) -> None:
        self.call, self.lengths, self.graph = call, lengths.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = call(self.lengths)

    def __call__(self, lengths: torch.Tensor) -> torch.Tensor:
        self.lengths.copy_(lengths)
        self.graph.replay()
        return self.out


def test_other_calls_use_triton() -> None:
    layer = layer_of("3 bits", (160,), 0)
    assert (
        replaced_launches(layer, 10)
        == replaced_launches(layer, 8, sliding_window=100)
        == replaced_launches(layer, 8, softcap=30.0)
        == [False]
    )
    check_attention(layer, 8, softcap=30.0)


@pytest.mark.skipif(INTERPRETED, reason="a failure of NVRTC shows only on a device")
def test_triton_replaces_kernels_that_nvrtc_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.cuda import nvrtc

    monkeypatch.setattr(nvrtc, "_library", partial(ctypes.CDLL, "no-such-library.so"))
    layer = layer_of("3 bits", (4000,), 0)
    assert replaced_launches(layer, 8) == [False]
    check_attention(layer, 8)
