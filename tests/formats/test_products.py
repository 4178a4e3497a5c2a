"""Decoded values are within the spec's tolerance (rule front-8), whatever the process's precision of matrix products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack.coding.bases import Basis
from kvpack.formats import products
from support.interpreter import DEVICE
from support.klt_bases import random_basis

if TYPE_CHECKING:
    from collections.abc import Iterator

RECIPES = [
    "octopus-3",
    "kv=octahedral:b=3,arrangement=direct",
    "kv=scalar:b=3",
    "turboangle-k8v4",
    "hqmq-s24-r3",
    "polarquant-3",
    "oscar-2",
]
TOLERANCE = 2**-16
"""Error bound for a value after rotation and multiplication by norms. The bound of the rotation itself is 2^-18."""

pytestmark = pytest.mark.filterwarnings("ignore:Please use the new API settings")


@pytest.fixture(params=["high", "medium"])
def _reduced(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_float32_matmul_precision(request.param)
    yield
    torch.set_float32_matmul_precision("highest")


def test_default_precision_gives_exact_products() -> None:
    assert not products.may_round_factors("cpu")
    assert not products.may_round_factors("cuda")


@pytest.mark.usefixtures("_reduced")
def test_reduced_precision_is_detected() -> None:
    assert products.may_round_factors("cpu")
    assert products.may_round_factors("cuda")


def test_backend_settings_are_detected() -> None:
    matmul: Any = torch.backends.cuda.matmul
    before = getattr(matmul, "fp32_precision", None)
    if before is None:
        pytest.skip("this PyTorch version has one setting for all backends")
    matmul.fp32_precision = "tf32"
    try:
        assert products.may_round_factors("cuda")
    finally:
        matmul.fp32_precision = before


def test_the_legacy_tf32_setting_is_detected() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert products.may_round_factors("cuda")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("_reduced")
@pytest.mark.parametrize("rows", [1, 40])
def test_a_product_equals_the_rounded_binary64_product(rows: int) -> None:
    x = torch.randn(2, 3, rows, 24, generator=torch.Generator().manual_seed(0))
    matrix = torch.randn(3, 24, 20, generator=torch.Generator().manual_seed(1))
    assert torch.equal(products.product(x, matrix), (x.double() @ matrix.double()).float())


def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make float32 matrix products round their factors to 11 bits, as TF32 does."""
    multiply = torch.Tensor.__matmul__

    def short(x: Any) -> Any:
        return (x.contiguous().view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32) if x.dtype == torch.float32 else x

    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda x, y: multiply(short(x), short(y)))


@pytest.mark.usefixtures("_reduced")
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_do_not_depend_on_the_precision_of_products(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACK_KERNELS", "torch")
    basis = Basis.from_bytes(random_basis({(0, side): (2, 64) for side in "kv"}, 1))
    pairs = [tuple(torch.randn(2, 1, 2, 70, 64, generator=torch.Generator().manual_seed(0)))]
    torch.set_float32_matmul_precision("highest")
    packed = kvpack.pack(pairs, kvpack.Recipe(recipe, basis))
    expected = packed[0].unpack(torch.float32)
    torch.set_float32_matmul_precision("high")
    _rounding(monkeypatch)
    assert (torch.eye(2) @ torch.full((2, 2), 1 + 2**-15) == 1).all()
    for found, value in zip(packed[0].unpack(torch.float32), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=TOLERANCE, atol=TOLERANCE)
    again = kvpack.pack(pairs, kvpack.Recipe(recipe, basis))
    for found, value in zip(again[0].unpack(torch.float32), expected, strict=True):
        assert (found - value).abs().gt(TOLERANCE).float().mean() < 1e-3


@pytest.mark.kernels
@pytest.mark.usefixtures("_reduced")
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_on_a_device_do_not_depend_on_the_precision_either(recipe: str) -> None:
    basis = Basis.from_bytes(random_basis({(0, side): (2, 64) for side in "kv"}, 1))
    pairs = [tuple(torch.randn(2, 1, 2, 70, 64, generator=torch.Generator().manual_seed(0)))]
    packed = kvpack.pack(pairs, kvpack.Recipe(recipe, basis))
    there = kvpack.pack([tuple(x.to(DEVICE) for x in pair) for pair in pairs], kvpack.Recipe(recipe, basis))
    for found, same, value in zip(*(x[0].unpack(torch.float32) for x in (packed.to(DEVICE), there, packed)), strict=True):
        torch.testing.assert_close(found.cpu(), value, rtol=2**-10, atol=2**-10)
        # A code next to a bound may be another one there, and changes all values of its token.
        assert (same.cpu() - value).abs().amax(-1).gt(2**-9).float().mean() < 2e-2
