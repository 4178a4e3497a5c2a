"""Global floating-point modes hardly matter: flushing subnormal numbers changes no bit.

Products with reduced precision change results no more than another order of sums does.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvpack
from kvpack.formats.quaternion import _codebook_search
from kvpack.runtime.modes import float32_no_grad, flushes_subnormals, without_autocast

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = torch.device("cpu")
Values = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
RECIPES = [
    "raw",
    "octopus-3",
    "octopus-qjl-2",
    "oscar-2",
    "oscar-2-u8",
    "kivi-4;tail=32",
    "int-4-med3",
    "turboangle-k8v4",
    "kv=scalar:b=3",
    "kv=angle:n=48,norm=log4",
    "hqmq-s24-r3",
    "polarquant-3",
    "fp8",
    "nvfp4",
    "lossless",
]
SCALES = {"scales that binary16 holds as subnormals": 1e-3, "subnormal values": 1e-37}
FLUSHED = [
    (recipe, scale, ("cpu", "torch")[(number + at) % 2]) for number, recipe in enumerate(RECIPES) for at, scale in enumerate(SCALES)
]
"""Every recipe with every scale, and with both kinds of kernels."""


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def values(scale: float) -> Values:
    k, v = torch.randn(2, 1, 2, 140, 64, generator=torch.Generator().manual_seed(0)) * scale
    return k, v, torch.randn(1, 2, 3, 64, generator=torch.Generator().manual_seed(1))


def results(recipe: str, given: Values, path: Path) -> tuple[bytes, list[torch.Tensor]]:
    """Return a cache's file, its decoded values, its attention output, and its continuation."""
    k, v, q = given
    if recipe == "lossless":
        k, v = k.bfloat16(), v.bfloat16()
    kvpack.save(kvpack.pack([(k, v)], recipe), path)
    cache = kvpack.load(path)
    live = kvpack.LiveCache.of(cache)
    live.update(0, k, v)
    longer = cache.append([(k, v)])
    found = [*cache[0].unpack(torch.float32), *longer[0].unpack(torch.float32), *live.freeze()[0].unpack(torch.float32)]
    return path.read_bytes(), [*found, kvpack.attend(q, cache[0]), live.attend(0, q)]


def bits(found: list[torch.Tensor]) -> list[bytes]:
    return [x.contiguous().view(torch.uint8).numpy().tobytes() for x in found]


@pytest.fixture(params=["cpu", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KVPACK_KERNELS", request.param)
    return request.param


@pytest.mark.scenario
@pytest.mark.parametrize(("recipe", "scale", "kernels"), FLUSHED, indirect=["kernels"])
def test_flushing_subnormals_does_not_change_a_bit(recipe: str, scale: str, kernels: str, tmp_path: Path) -> None:
    given = values(SCALES[scale])
    file, found = results(recipe, given, tmp_path / "a")
    with flushed():
        other, again = results(recipe, given, tmp_path / "b")
        assert flushes_subnormals(), "the caller's mode was not restored"
    assert other == file
    assert bits(again) == bits(found)


@pytest.mark.scenario
@pytest.mark.parametrize(("recipe", "name"), [(recipe, "medium") for recipe in RECIPES] + [(recipe, "high") for recipe in RECIPES[::4]])
def test_reduced_precision_does_not_round_factors(recipe: str, name: str, kernels: str, tmp_path: Path) -> None:
    """8-bit factors would be off by 2^-9, but binary32 sums are only off by 2^-20."""
    k, v, q = values(1.0)
    _, found = results(recipe, (k, v, q), tmp_path / "a")
    with precision(name):
        _, again = results(recipe, (k, v, q), tmp_path / "b")
        assert torch.get_float32_matmul_precision() == name
        read = kvpack.load(tmp_path / "a")[0].unpack(torch.float32)
    for x, y in zip(found[:2], read, strict=True):
        assert (x - y).norm() <= 2**-20 * x.norm(), "a file decoded to different values"
    for x, y, original in zip(found[:2], again[:2], (k, v), strict=True):
        # A value between two codes may be rounded to either, which is as near.
        error, other = (x - original).norm(), (y - original).norm()
        assert abs(error - other) <= 1e-3 * error + 1e-6 * original.norm()
    cache = kvpack.load(tmp_path / "a")
    attended = kvpack.attend(q, cache[0])
    with precision(name):
        assert (kvpack.attend(q, cache[0]) - attended).norm() <= 2**-18 * attended.norm()


class Products(TorchDispatchMode):
    """Collects the float32 matrix products whose factors PyTorch may round, depending on the process's settings."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear"} and args[0].dtype == torch.float32:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.scenario
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_float32_product_uses_reduced_precision(recipe: str, kernels: str, tmp_path: Path) -> None:
    """Some machines do not round factors, so the test looks for the products themselves."""
    given = values(1.0)
    with precision("medium"), Products() as products:
        results(recipe, given, tmp_path / "a")
    assert products.found == []
    with Products() as products:
        results(recipe, given, tmp_path / "a")
    assert products.found or kernels == "cpu" or recipe in ("raw", "lossless"), "no products were recorded"


def test_the_quaternion_search_does_not_use_reduced_precision() -> None:
    planes = [torch.randn(4000, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    search = _codebook_search(0, 24)
    expected = search.search_products(planes)
    with precision("medium"), Products() as products:
        found = search.search_products(planes)
    assert products.found == []
    assert (found == expected).float().mean() > 0.999


def test_subnormals_are_kept_only_in_the_calling_thread_and_only_temporarily() -> None:
    states: list[bool] = []
    inside, go_on = threading.Event(), threading.Event()

    def other_thread() -> None:
        torch.set_flush_denormal(True)
        inside.wait(60)
        states.append(flushes_subnormals())
        go_on.set()

    thread = threading.Thread(target=other_thread)
    thread.start()
    with flushed():
        for modes in (float32_no_grad, without_autocast):
            with modes(CPU):
                assert not flushes_subnormals()
                inside.set()
                assert go_on.wait(60)
            assert flushes_subnormals()
            with pytest.raises(KeyError), modes(CPU):
                raise KeyError
            assert flushes_subnormals()
    thread.join()
    assert states == [True], "the mode of another thread was changed"
    assert not flushes_subnormals()
    with float32_no_grad(CPU):
        assert not flushes_subnormals()
    assert not flushes_subnormals(), "a mode was left set that the caller had not set"
