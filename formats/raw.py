"""raw: values stored as fp32, fp16 or bf16 (spec/codecs/raw.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from .base import MAX_DIM
from .errors import ValueTooLarge
from .family import CodecFamily, in_range, one_of
from .lazy import torch
from .streams import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import Options

DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}

TORCH_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Name of the torch dtype for each stored dtype."""

EXACT_DTYPES = {"bf16": ("bf16",), "fp16": ("fp16",), "fp32": ("bf16", "fp16", "fp32")}
"""For each stored dtype, the dtypes whose values it represents exactly."""


@dataclass(frozen=True)
class Raw(CodecFamily):
    """Codec that stores values as ``dtype`` (bf16, fp16 or fp32), including NaN and infinity."""

    id: ClassVar[str] = "raw"

    dim: int = field(metadata=in_range(1, MAX_DIM))
    dtype: str = field(metadata=one_of(DTYPES))

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        dtype = cls.option(options, "dtype", "bf16", omitted=None)
        options.finish()
        return cls(dim, dtype)

    @property
    def nominal_bits(self) -> float:
        return 32.0 if self.dtype == "fp32" else 16.0

    @property
    def exact_dtype(self) -> str:
        return self.dtype

    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        return {"values": Layout(DTYPES[self.dtype], (batch, heads, tokens, self.dim))}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Round ``x`` of any float dtype to ``dtype``, with ties to even. Values that already have that dtype keep their bits.

        Raises ValueTooLarge if a finite value would become infinity.
        """
        return {"values": round_to_dtype(x, self.dtype)}

    def stored_values(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return streams["values"]

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return streams["values"].to(torch.float32)

    def finite_streams(self) -> list[str]:
        """Return an empty list, because any stored bytes are valid."""
        return []


def round_to_dtype(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round ``x`` of any float dtype to ``dtype``, with ties to even. Values that already have that dtype keep their bits.

    Raises ValueTooLarge if a finite value would become infinity.
    """
    values = x.to(getattr(torch, TORCH_DTYPE_NAMES[dtype]))
    # Only a conversion can make values infinite. The sum is one cheap pass; every value is checked only if it is not finite.
    if values.dtype != x.dtype and not torch.isfinite(values.sum()):
        lost = torch.nonzero(torch.isinf(values) & torch.isfinite(x)).tolist()
        if lost:
            value, largest = x[tuple(lost[0])].item(), torch.finfo(values.dtype).max
            raise ValueTooLarge(
                f"the value at {lost[0]} is {value:.6g}, but the largest {dtype} value is {largest:.6g}: choose a wider "
                "dtype"
            )
    return values
