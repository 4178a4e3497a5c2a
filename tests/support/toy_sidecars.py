"""Two sidecars, a ``FramePart`` and a ``ValueMap``, which consist of this file and one row each of ``formats.SIDECARS``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from kvpack.formats.errors import InvalidParameter
from kvpack.formats.sidecar import FramePart, RunStep, ValueMap, parse_choice
from kvpack.formats.streams import Layout
from kvpack.formats.token_norms import stored_norm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.formats.options import Options
    from kvpack.formats.runs import Run


@dataclass(frozen=True)
class TokenMean(FramePart):
    """Sidecar that subtracts the mean of each token's values in the coded frame, and stores it in binary16."""

    name: ClassVar[str] = "token_mean"
    words: ClassVar[tuple[str, ...]] = ("token_mean",)

    dim: int
    dtype: str

    @classmethod
    def from_options(cls, dim: int, side: str, options: Options) -> Self | None:
        dtype = options.choice("token_mean", "", ("fp16",))
        return cls(dim, dtype) if dtype else None

    @classmethod
    def from_params(cls, dim: int, value: Any) -> Self:
        return cls(dim, parse_choice(cls.name, value, {"fp16": "F16"}))

    def params(self) -> str:
        return self.dtype

    def layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        return {self.name: Layout("F16", (batch, heads, tokens))}

    def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None) -> RunStep:
        return RunStep({}, lambda block, _: self.encode(block))

    def encode(self, u: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return ``u`` ``[batch, kv_head, token, dim]`` minus its means, and the stream of the means."""
        mean = stored_norm(u.mean(-1), "F16", "mean of a token")
        return u - mean.to(torch.float32)[..., None], {self.name: mean}

    def put(self, frame: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return frame + streams[self.name].to(torch.float32)[..., None]


@dataclass(frozen=True)
class Multiples(ValueMap):
    """Sidecar that multiplies channel j by 1 + j mod ``period``: a linear map that is not orthogonal and has no streams."""

    name: ClassVar[str] = "multiples"
    words: ClassVar[tuple[str, ...]] = ("multiples",)

    dim: int
    period: int

    @classmethod
    def from_options(cls, dim: int, side: str, options: Options) -> Self | None:
        period = options.integer("multiples", 0, 2, 8)
        return cls(dim, period) if period else None

    @classmethod
    def from_params(cls, dim: int, value: Any) -> Self:
        if type(value) is not int or not 2 <= value <= 8:
            raise InvalidParameter(f"sidecar multiples is {value!r}, expected an integer from 2 to 8")
        return cls(dim, value)

    def params(self) -> int:
        return self.period

    def forward(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return x * self._factors(x)

    def inverse(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return x / self._factors(x)

    def query(self, q: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return q / self._factors(q)

    def _factors(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.dim, device=x.device) % self.period + 1.0
