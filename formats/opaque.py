"""opaque: bytes of an engine's slots that must be stored unchanged (spec/row.md, Opaque bytes). It is used in rows, never in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .base import MAX_DIM
from .errors import InvalidType
from .family import CodecFamily
from .lazy import torch
from .parameter_checks import check_range
from .streams import Layout


@dataclass(frozen=True)
class Opaque(CodecFamily):
    """Codec that stores ``dim`` bytes per token and head unchanged, as values from 0 to 255."""

    id: ClassVar[str] = "opaque"

    dim: int

    def __post_init__(self) -> None:
        check_range(self.id, "dim", self.dim, 1, MAX_DIM)

    @property
    def nominal_bits(self) -> float:
        return 8.0

    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        return {"bytes": Layout("U8", (batch, heads, tokens, self.dim))}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the bytes ``x``, uint8 ``[batch, kv_head, token, dim]``, unchanged. Raises InvalidType for any other dtype."""
        if x.dtype != torch.uint8:
            raise InvalidType(f"codec opaque: the dtype is {x.dtype}, expected torch.uint8: view the engine's slot as bytes")
        return {"bytes": x}

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return streams["bytes"].to(torch.float32)
