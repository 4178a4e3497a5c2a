"""qjl: a sketch of a codec's error, stored as its norm and the signs of its coordinates after a second rotation (spec/side-cars.md).

The sketch makes inner products with a query unbiased. Source: OCTOPUS Sec. 3.6 and App. C.15, after QJL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .columns import Columns, default_fields
from .errors import InvalidParameter
from .lazy import torch
from .parameter_checks import check_choice, check_range
from .rotation import Rotation, cached_rotation
from .sidecar import ResidualSketch, parse_map
from .streams import NORMS, Layout
from .token_norms import stored_norm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import Options
    from .value_blocks import Array

SIGNS, NORM = "qjl_signs", "qjl_norm"
DEFAULT_SEED = 1
"""Default seed. It differs from the default seed of rotations, so that the two rotations are independent."""


@dataclass(frozen=True)
class Qjl(ResidualSketch):
    """Sidecar that stores the norm of the residual as ``norm``, and its signs after a signed Hadamard rotation with ``seed``."""

    name: ClassVar[str] = "qjl"
    words: ClassVar[tuple[str, ...]] = ("qjl", "qjl_seed")

    dim: int
    seed: int
    norm: str
    fields: int

    def __post_init__(self) -> None:
        check_range("qjl", "seed", self.seed, 0, 2**64 - 1)
        check_choice("qjl", "norm", self.norm, tuple(NORMS))
        _ = self.rotation, self.packing

    @classmethod
    def from_options(cls, dim: int, side: str, options: Options) -> Self | None:
        norm = options.choice("qjl", "", tuple(NORMS))
        seed = options.integer("qjl_seed", -1, 0, 2**64 - 1, omitted=str(DEFAULT_SEED))
        if not norm:
            if seed >= 0:
                raise InvalidParameter(
                    f"codec {options.codec}: qjl_seed={seed} has no effect without qjl=fp16: add qjl=fp16, or omit qjl_seed="
                )
            return None
        return cls(dim, DEFAULT_SEED if seed < 0 else seed, norm, default_fields(dim, (2,)))

    @classmethod
    def from_params(cls, dim: int, value: Any) -> Self:
        return cls(dim, **parse_map(cls.name, value, {"seed": int, "norm": str, "fields": int}))

    def params(self) -> dict[str, Any]:
        return {"seed": self.seed, "norm": self.norm, "fields": self.fields}

    @property
    def nominal_bits(self) -> float:
        return 1.0

    @property
    def rotation(self) -> Rotation:
        """Second rotation, called R' in the paper."""
        return cached_rotation("signed-hadamard", self.dim, self.seed)

    @cached_property
    def packing(self) -> Columns:
        return Columns(self.dim, (2,), self.fields)

    def layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        planes = {f"{SIGNS}.{plane}": Layout("U16", (batch, heads, tokens, words)) for plane, words in enumerate(self.packing.planes)}
        return planes | {NORM: Layout(NORMS[self.norm], (batch, heads, tokens))}

    def encode(self, residual: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode residuals ``[batch, kv_head, token, dim]`` to streams. Raises ValueTooLarge if a norm does not fit its stored dtype."""
        norm = torch.linalg.vector_norm(residual, dim=-1, dtype=torch.float64).to(torch.float32)
        negative = (self.rotation.forward(residual) < 0).to(torch.int32)
        planes = {f"{SIGNS}.{plane}": words for plane, words in enumerate(self.packing.pack([negative]))}
        return planes | {NORM: stored_norm(norm, NORMS[self.norm], "norm of a residual")}

    def check(self, arrays: Mapping[str, Array], where: str) -> None:
        """Raise InvalidPayload if a spare bit is set or a norm is not finite."""
        self.packing.check([arrays[f"{SIGNS}.{plane}"] for plane in range(len(self.packing.planes))], f"{where}.{SIGNS}")
        super().check(arrays, where)

    def put(self, frame: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return frame + self.correction(streams)

    def correction(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the estimated residuals, float32 ``[batch, kv_head, token, dim]`` (OCTOPUS Sec. 3.6)."""
        (negative,) = self.packing.unpack([streams[f"{SIGNS}.{plane}"] for plane in range(len(self.packing.planes))])
        size = streams[NORM].to(torch.float32) * math.sqrt(math.pi / (2 * self.dim))
        return self.rotation.inverse((1 - 2 * negative).to(torch.float32)) * size[..., None]
