"""block_rotation: a Hadamard rotation of every block of channels in a head (spec/side-cars.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .base import MAX_DIM
from .errors import InvalidParameter
from .rotation import Rotation, cached_rotation, check_order
from .sidecar import ValueMap

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from .options import Options


@dataclass(frozen=True)
class BlockRotation(ValueMap):
    """Sidecar that rotates every block of ``size`` neighboring channels by a Hadamard matrix.

    Raises InvalidParameter for a size that does not divide ``dim`` or has no Hadamard matrix.
    """

    name: ClassVar[str] = "block_rotation"
    words: ClassVar[tuple[str, ...]] = ("block_rotation",)

    dim: int
    size: int

    def __post_init__(self) -> None:
        if self.size < 2 or self.dim % self.size:
            raise InvalidParameter(f"block_rotation is {self.size}, expected a divisor of the head dim {self.dim} that is at least 2")
        check_order(self.size)

    @classmethod
    def from_options(cls, dim: int, side: str, options: Options) -> Self | None:
        size = read_block_size(options)
        return cls(dim, size) if size else None

    @classmethod
    def from_params(cls, dim: int, value: Any) -> Self:
        if type(value) is not int:
            raise InvalidParameter(f"sidecar block_rotation is {value!r}, expected an integer")
        return cls(dim, value)

    def params(self) -> int:
        return self.size

    @property
    def _rotation(self) -> Rotation:
        return cached_rotation("hadamard", self.size)

    def forward(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._rotation.forward(self._blocks(x)).reshape(x.shape)

    def inverse(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._rotation.inverse(self._blocks(x)).reshape(x.shape)

    def _blocks(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:-1], self.dim // self.size, self.size)


def read_block_size(options: Options) -> int:
    """Return the block size that a recipe requests, or 0 if it requests none. Raises InvalidParameter if it is out of range."""
    return options.integer("block_rotation", 0, 2, MAX_DIM)
