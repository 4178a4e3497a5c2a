"""Orthogonal rotations of the channels of a head, by Hadamard matrices for all common head dims (spec/packing.md, Rotation)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from .columns import is_power_of_two
from .errors import InvalidParameter
from .generator import signs
from .lazy import torch
from .products import product
from .tables import MAX_CACHED_TABLES, cache_per_device

KINDS = ("none", "hadamard", "signed-hadamard")
PALEY_ORDERS = (12, 20, 28)


@lru_cache(maxsize=1)
def hadamard(order: int) -> tuple[tuple[int, ...], ...]:
    """Return the Hadamard matrix of ``order``, with entries +1 and -1: the product of a Sylvester matrix and a Paley matrix.

    The order must be 2^k, or 2^k times 12, 20 or 28.
    """
    paley = _paley_order(order)
    rows = _paley_matrix(paley)
    while len(rows) < order:
        rows = (*(row + row for row in rows), *(row + tuple(-value for value in row) for row in rows))
    return rows


def check_order(order: int) -> None:
    """Raise InvalidParameter unless ``hadamard`` supports ``order``."""
    _paley_order(order)


def _paley_order(order: int) -> int:
    """Return the order of the Paley factor of ``hadamard(order)``, which is 1 for a power of two."""
    for paley in (1, *PALEY_ORDERS):
        if order > 0 and order % paley == 0 and is_power_of_two(order // paley):
            return paley
    raise InvalidParameter(f"there is no Hadamard rotation for {order} channels, expected 2^k, or 2^k times 12, 20 or 28")


def _paley_matrix(order: int) -> tuple[tuple[int, ...], ...]:
    if order == 1:
        return ((1,),)
    if order == 28:
        return _paley_second(13)
    return _paley_first(order - 1)


def _quadratic_character(prime: int) -> list[int]:
    squares = {i * i % prime for i in range(1, prime)}
    return [0] + [1 if i in squares else -1 for i in range(1, prime)]


def _paley_first(prime: int) -> tuple[tuple[int, ...], ...]:
    """Return Paley's first construction for a ``prime`` = 3 mod 4: I + S with S = [[0, 1], [-1, Q]] and Q_ij = chi(i - j)."""
    chi = _quadratic_character(prime)
    rows = [(1,) * (prime + 1)]
    rows += [(-1, *(chi[(i - j) % prime] + (i == j) for j in range(prime))) for i in range(prime)]
    return tuple(rows)


def _paley_second(prime: int) -> tuple[tuple[int, ...], ...]:
    """Return Paley's second construction for a ``prime`` = 1 mod 4, from C = [[0, 1], [1, Q]] with Q_ij = chi(i - j).

    Each entry c = +1 or -1 of C becomes c x [[1, 1], [1, -1]], and 0 becomes [[1, -1], [-1, -1]].
    """
    chi = _quadratic_character(prime)
    conference = [[0, *[1] * prime], *([1, *(chi[(i - j) % prime] for j in range(prime))] for i in range(prime))]
    blocks = {0: ((1, -1), (-1, -1)), 1: ((1, 1), (1, -1)), -1: ((-1, -1), (-1, 1))}
    return tuple(tuple(value for entry in row for value in blocks[entry][half]) for row in conference for half in (0, 1))


@dataclass(frozen=True)
class Rotation:
    """An orthogonal rotation u = H diag(s) x / sqrt(dim) of the channels of a head; H is a Hadamard matrix.

    Attributes:
        kind: "none" for the identity, "hadamard" (s = 1) or "signed-hadamard" (signs s drawn from ``seed``).
        dim: Head dim.
        seed: Seed of the signs, 0 to 2^64 - 1.

    Raises:
        InvalidParameter: The kind is unknown, or there is no Hadamard matrix for the head dim.

    Source: spec/packing.md, Rotation.

    >>> rotation = kvpack.formats.rotation.Rotation("signed-hadamard", 64)
    >>> x = torch.randn(10, 64)
    >>> torch.allclose(rotation.inverse(rotation.forward(x)), x, atol=1e-5)
    True
    """

    kind: str
    dim: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidParameter(f"rotation_kind is {self.kind!r}, expected one of {', '.join(KINDS)}")
        if self.kind != "none":
            check_order(self.dim)

    def matrix(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the matrix R, where u = R x, float32 ``[dim, dim]``."""
        return _rotation_matrix(self.kind, self.dim, self.seed, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate float32 ``[..., dim]`` into the coded frame."""
        return x if self.kind == "none" else product(x.reshape(-1, self.dim), self.matrix(x.device).T).view(x.shape)

    def inverse(self, u: torch.Tensor) -> torch.Tensor:
        """Rotate float32 ``[..., dim]`` back to the original frame."""
        return u if self.kind == "none" else product(u.reshape(-1, self.dim), self.matrix(u.device)).view(u.shape)


@lru_cache(maxsize=MAX_CACHED_TABLES)
def cached_rotation(kind: str, dim: int, seed: int = 0) -> Rotation:
    """Return the rotation with these parameters, which all codecs share. Raises InvalidParameter if there is no such rotation."""
    return Rotation(kind, dim, seed)


@cache_per_device
def _rotation_matrix(kind: str, dim: int, seed: int) -> torch.Tensor:
    if kind == "none":
        return torch.eye(dim, dtype=torch.float32)
    matrix = torch.tensor(hadamard(dim), dtype=torch.float32)
    if kind == "signed-hadamard":
        matrix *= torch.tensor(signs(seed, dim), dtype=torch.float32)
    # Every entry is plus or minus one quotient, rounded once.
    return matrix.mul_(1 / math.sqrt(dim))
