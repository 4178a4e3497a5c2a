"""channel_order: a permutation of a head's channels that spreads large ones over the blocks of a rotation (spec/side-cars.md).

A block rotation evens out the channels within each block. If the large channels are spread over all blocks, it evens out all channels.
Source: RotateKV, outlier-aware rotation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .block_rotation import read_block_size
from .errors import InvalidParameter, InvalidPayload
from .lazy import numpy, torch
from .sidecar import ValueMap, parse_choice
from .streams import Layout
from .value_blocks import first_index, row_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import Options
    from .runs import Run
    from .value_blocks import Array

STREAM = "channel_order"
DTYPES = {"u8": "U8", "u16": "U16"}
_MAX_OF_U8 = 256


@dataclass(frozen=True)
class ChannelOrder(ValueMap):
    """Sidecar that permutes channels: mapped channel i is channel ``channel_order[i]`` of the head. The order is stored as ``dtype``.

    Large channels are spread over blocks of ``size`` channels. Raises InvalidParameter if ``dtype`` cannot number ``dim`` channels.
    """

    name: ClassVar[str] = "channel_order"
    words: ClassVar[tuple[str, ...]] = ("channel_order",)

    dim: int
    dtype: str
    size: int = field(default=1, compare=False)

    def __post_init__(self) -> None:
        if self.dtype == "u8" and self.dim > _MAX_OF_U8:
            raise InvalidParameter(
                f"sidecar {STREAM} with dtype u8 can index at most {_MAX_OF_U8} channels, but the head dim is {self.dim}: use {STREAM}=u16"
            )

    @classmethod
    def from_options(cls, dim: int, side: str, options: Options) -> Self | None:
        dtype = options.choice("channel_order", "", tuple(DTYPES))
        if not dtype:
            return None
        size = read_block_size(options)
        if not size:
            message = f"channel_order={dtype} has no effect without block_rotation=<size>: add that, or omit channel_order="
            raise InvalidParameter(f"codec {options.codec}: {message}")
        return cls(dim, dtype, size)

    @classmethod
    def from_params(cls, dim: int, value: Any) -> Self:
        return cls(dim, parse_choice(cls.name, value, DTYPES))

    def params(self) -> str:
        return self.dtype

    def layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        return {STREAM: Layout(DTYPES[self.dtype], (batch, heads, 1, self.dim), per="run")}

    def measure(self, run: Run) -> dict[str, torch.Tensor]:
        """Choose the run's order ``[batch, kv_head, 1, dim]``: channels sorted by norm, distributed over the blocks in a zigzag."""
        batch, heads = run.shape[:2]
        size = torch.zeros(batch, heads, 1, self.dim, dtype=torch.float64, device=run.device)
        for block in run.blocks():
            size = torch.hypot(size, torch.linalg.vector_norm(block, dim=2, keepdim=True, dtype=torch.float64))
        # Each round assigns a channel to every block.
        rounds = size.argsort(dim=-1, descending=True, stable=True).reshape(batch, heads, 1, self.size, self.dim // self.size)
        rounds[..., 1::2, :] = rounds[..., 1::2, :].flip(-1)
        return {STREAM: rounds.transpose(-1, -2).flatten(-2).to(torch.uint8 if self.dtype == "u8" else torch.uint16)}

    def forward(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return ``x`` ``[batch, kv_head, row, dim]`` with its channels in the stored order."""
        return x.gather(-1, _stored_order(streams).expand(x.shape))

    def inverse(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return ``x`` ``[batch, kv_head, row, dim]`` with its channels in the original order."""
        return x.gather(-1, _stored_order(streams).argsort(-1).expand(x.shape))

    def check(self, arrays: Mapping[str, Array], where: str) -> None:
        """Raise InvalidPayload unless every row lists each channel exactly once."""
        orders = arrays[STREAM]
        for first, (rows,) in row_blocks(orders):
            wrong = (numpy.sort(rows, -1) != numpy.arange(self.dim)).any(-1)
            if wrong.any():
                at = first_index(wrong, first, orders.shape[:-1])
                raise InvalidPayload(f"{where}.{STREAM}: the row at {at} must list each of the {self.dim} channels exactly once")


def _stored_order(streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return streams[STREAM].to(torch.int64)
