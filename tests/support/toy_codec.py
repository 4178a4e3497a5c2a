"""A codec that consists of this file and one row of ``formats.CODECS``.

It has 8-bit codes that are scaled by the largest value of their token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from kvpack.formats.base import MAX_DIM
from kvpack.formats.columns import Columns, default_fields
from kvpack.formats.family import CodecFamily, in_range
from kvpack.formats.parameter_checks import Fields, check_fields
from kvpack.formats.streams import Layout
from kvpack.formats.token_norms import stored_norm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.formats.options import Options

LARGEST_CODE = 127


@dataclass(frozen=True)
class Largest(CodecFamily):
    """Codec that decodes a code to (code - 127) / 127 * largest. There is one ``largest`` per token and head."""

    id: ClassVar[str] = "largest"

    dim: int = field(metadata=in_range(1, MAX_DIM))
    fields: Fields

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self.id, self.fields, ("codes",))
        self.packings()

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        options.finish()
        return cls(dim, (("codes", default_fields(dim, (256,))),))

    @property
    def nominal_bits(self) -> float:
        return 8.0

    def packings(self) -> dict[str, Columns]:
        return {"codes": Columns(self.dim, (256,), dict(self.fields)["codes"])}

    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        return {"largest": Layout("F32", (batch, heads, tokens))}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        largest = stored_norm(x.abs().amax(-1), "F32", "largest value of a token")
        step = largest[..., None] / LARGEST_CODE
        codes = (x / torch.where(step > 0, step, 1.0)).round() + LARGEST_CODE
        return self.pack("codes", codes) | {"largest": largest}

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        (codes,) = digits
        return (codes - LARGEST_CODE) * (streams["largest"][..., None] / LARGEST_CODE)
