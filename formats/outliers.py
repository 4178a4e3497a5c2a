"""outliers: chunks of four values that are far larger than the others, stored as they are (spec/side-cars.md).

Source: HQMQ Sec. 3, median-multiplier outlier extraction (Med3x at a multiplier of 3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .base import Layout, check_finite, stored_norm
from .columns import Columns
from .errors import InvalidParameter, InvalidPayload
from .lazy import numpy, torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FLAGS, VALUES = "outlier_flags", "outliers"
CHUNK = 4


@dataclass(frozen=True)
class Outliers:
    """Chunks of the coded frame whose norm is above ``multiplier`` times the median of their head are stored in binary16."""

    dim: int
    fields: int
    multiplier: int = field(default=3, compare=False)

    def __post_init__(self) -> None:
        if self.dim % CHUNK:
            raise InvalidParameter(f"side-car outliers takes a head dim of whole chunks of {CHUNK} channels, found {self.dim}")
        _ = self.packing

    def params(self) -> dict[str, Any]:
        return {"fields": self.fields}

    @cached_property
    def packing(self) -> Columns:
        return Columns(self.dim // CHUNK, (2,), self.fields)

    def layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        """The planes of ``outlier_flags``, a flag a chunk, and ``outliers``, the flagged ones by token, sequence, head and chunk."""
        planes = {
            f"{FLAGS}.{plane}": Layout("U16", (batch, heads, tokens, words)) for plane, words in enumerate(self.packing.planes)
        }
        return planes | {VALUES: Layout("F16", (1, 1, 0, CHUNK), per="entry")}

    def threshold(self, blocks: Iterator[torch.Tensor]) -> torch.Tensor:
        """The norm ``[kv_head, 1, 1]`` above which a chunk of the coded frame is an outlier."""
        norms = torch.cat([_norms(_chunks(block)).transpose(0, 1).flatten(1) for block in blocks], 1)
        return (self.multiplier * norms.median(1).values)[:, None, None]

    def encode(self, u: torch.Tensor, threshold: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """``u`` ``[batch, kv_head, token, dim]`` with zeros for its outliers, and the streams that hold them.

        Raises OutOfRange when one does not fit binary16.
        """
        chunks = _chunks(u)
        flagged = _norms(chunks) > threshold
        values = stored_norm(chunks.permute(2, 0, 1, 3, 4)[flagged.permute(2, 0, 1, 3)], "F16", "outlier")
        planes = {f"{FLAGS}.{plane}": words for plane, words in enumerate(self.packing.pack([flagged.to(torch.int32)]))}
        rest = chunks.masked_fill(flagged[..., None], 0.0).flatten(3)
        return rest, planes | {VALUES: values[None, None]}

    def put(self, frame: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """``frame`` ``[batch, kv_head, token, dim]``, float32, with the outliers in their places."""
        chunks = _chunks(frame).clone()
        chunks.permute(2, 0, 1, 3, 4)[self.flags(streams).permute(2, 0, 1, 3)] = streams[VALUES][0, 0].to(torch.float32)
        return chunks.flatten(3)

    def flags(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Which chunks are outliers, bool ``[batch, kv_head, token, chunk]``."""
        (flags,) = self.packing.unpack([streams[f"{FLAGS}.{plane}"] for plane in range(len(self.packing.planes))])
        return flags != 0

    def check(self, arrays: Mapping[str, numpy.ndarray[Any, Any]], where: str) -> None:
        """Raise InvalidPayload for spare bits, flags that are more or fewer than the outliers, and values that no writer makes."""
        planes = [arrays[f"{FLAGS}.{plane}"] for plane in range(len(self.packing.planes))]
        self.packing.check(planes, f"{where}.{FLAGS}")
        values = arrays[VALUES]
        # One bit a chunk: every set bit of every plane is a flag.
        flags = sum(int(numpy.unpackbits(plane.view(numpy.uint8)).sum(dtype=numpy.int64)) for plane in planes)
        if flags != values.shape[2]:
            raise InvalidPayload(f"{where}.{FLAGS}: {flags} chunks are flagged, {where}.{VALUES} holds {values.shape[2]}")
        check_finite(f"{where}.{VALUES}", values, "outliers")


def _chunks(u: torch.Tensor) -> torch.Tensor:
    """``[batch, kv_head, token, chunk, 4]``."""
    return u.reshape(*u.shape[:-1], u.shape[-1] // CHUNK, CHUNK)


def _norms(chunks: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(chunks, dim=-1)
    return norms
