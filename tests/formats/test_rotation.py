"""Tests of Hadamard matrices of every supported order, and of rotations by them."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpack.formats.base import MAX_DIM
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.generator import signs
from kvpack.formats.rotation import KINDS, Rotation, hadamard
from support.error_bounds import ROTATION_TOLERANCE

ORDERS = sorted(m << k for m in (1, 12, 20, 28) for k in range(11) if m << k <= MAX_DIM)
HEAD_DIMS = [64, 80, 96, 112, 128, 192, 256]


def paley(order: int) -> numpy.ndarray:
    """Return the Paley construction of order 12, 20 or 28, computed with Euler's criterion and block matrices."""
    prime = 13 if order == 28 else order - 1
    power = [[pow(i - j, (prime - 1) // 2, prime) for j in range(prime)] for i in range(prime)]
    jacobsthal = numpy.array([[-1 if p == prime - 1 else p for p in row] for row in power])
    border = numpy.ones((1, prime), int)
    if order == 28:
        conference = numpy.block([[numpy.zeros((1, 1), int), border], [border.T, jacobsthal]])
        return numpy.kron(conference, [[1, 1], [1, -1]]) + numpy.kron(numpy.eye(14, dtype=int), [[1, -1], [-1, -1]])
    return numpy.eye(order, dtype=int) + numpy.block([[numpy.zeros((1, 1), int), border], [-border.T, jacobsthal]])


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_hadamard_matrices_are_orthogonal_and_match_their_definition(order: int) -> None:
    matrix = numpy.array(hadamard(order), dtype=numpy.float64)
    assert set(numpy.unique(matrix)) <= {-1.0, 1.0}
    assert numpy.array_equal(matrix @ matrix.T, order * numpy.eye(order))
    factor = next(m for m in (12, 20, 28, 1) if order % m == 0 and (order // m).bit_count() == 1)
    expected = paley(factor) if factor > 1 else numpy.ones((1, 1))
    while len(expected) < order:
        expected = numpy.kron([[1, 1], [1, -1]], expected)
    assert numpy.array_equal(matrix, expected)


@pytest.mark.parametrize("order", [order for order in range(-2, MAX_DIM + 2) if order not in ORDERS and order % 37 in (0, 3, 36)], ids=str)
def test_unsupported_orders_are_refused(order: int) -> None:
    with pytest.raises(InvalidParameter, match=rf"no Hadamard rotation for {order} channels, expected 2\^k, or 2\^k times 12, "):
        hadamard(order)
    with pytest.raises(InvalidParameter, match=f"for {order} channels"):
        Rotation("signed-hadamard", order)
    assert Rotation("none", order).kind == "none"


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="rotation_kind is 'fourier', expected one of none, hadamard, signed-hadamard"):
        Rotation("fourier", 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", HEAD_DIMS, ids=str)
def test_rotations_follow_the_formula_and_are_reversible(kind: str, dim: int) -> None:
    rotation = Rotation(kind, dim, seed=1234567)
    x = torch.randn(2, 3, 5, dim, generator=torch.Generator().manual_seed(dim))
    formula = torch.eye(dim, dtype=torch.float64)
    if kind != "none":
        sign = torch.tensor(signs(1234567, dim) if kind == "signed-hadamard" else [1] * dim)
        formula = torch.tensor(hadamard(dim)).double() @ torch.diag(sign.double()) / dim**0.5
    exact = torch.einsum("ij,...j->...i", formula, x.double())
    tolerance = ROTATION_TOLERANCE * x.norm(dim=-1, keepdim=True)
    u = rotation.forward(x)
    assert u.dtype == torch.float32
    assert ((u - exact).abs() <= tolerance).all()
    assert ((rotation.inverse(exact.float()) - x).abs() <= tolerance).all()
    assert torch.equal(rotation.matrix().double(), formula.float().double())


@pytest.mark.parametrize("dim", [80, 192, 256, 768, 1024], ids=str)
def test_the_tolerance_holds_for_the_worst_inputs(dim: int) -> None:
    rotation = Rotation("hadamard", dim)
    exact = torch.tensor(hadamard(dim)).double() / dim**0.5
    # Rows of the rotation: all products of one sum are equal, so that no rounding cancels another's.
    rows = rotation.matrix() * 1.37
    assert (rotation.forward(rows) - rows.double() @ exact.T).abs().max() <= ROTATION_TOLERANCE * 1.37
    assert (rotation.inverse(rows.T) - rows.T.double() @ exact).abs().max() <= ROTATION_TOLERANCE * 1.37


@settings(max_examples=12)
@given(st.integers(0, 2**64 - 1), st.sampled_from(HEAD_DIMS))
def test_a_signed_rotation_is_a_plain_one_of_signed_values(seed: int, dim: int) -> None:
    x = torch.randn(4, dim, generator=torch.Generator().manual_seed(seed % 2**32))
    flipped = x * torch.tensor(signs(seed, dim))
    assert torch.allclose(Rotation("signed-hadamard", dim, seed).forward(x), Rotation("hadamard", dim).forward(flipped), atol=1e-5)


def test_rotating_empty_tensors_gives_empty_tensors() -> None:
    rotation = Rotation("hadamard", 80)
    assert rotation.inverse(rotation.forward(torch.zeros(1, 2, 0, 80))).shape == (1, 2, 0, 80)
