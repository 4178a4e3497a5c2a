"""raw_tokens: some tokens kept as they are, in every head (spec/side-cars.md).

Attention sinks and tokens of low norm are few, and spoil the groups that they are in. Source: OScaR Sec. 3.1, after OTT.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .base import Layout
from .errors import InvalidPayload, OutOfRange
from .lazy import functional, numpy, torch
from .raw import DTYPES
from .value_blocks import first_place, value_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .base import Run
    from .value_blocks import Array

FLAGS, VALUES = "raw_token_flags", "raw_tokens"


@dataclass(frozen=True)
class RawTokens:
    """Tokens of a side stored as ``dtype``: the ``first`` ones of it, and the ``low_norm`` ones with the least norm in its first run."""

    dim: int
    dtype: str
    first: int = field(default=0, compare=False)
    low_norm: int = field(default=0, compare=False)

    def layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        """``raw_token_flags``, 1 for a raw token, and ``raw_tokens``, the raw ones by token and sequence."""
        return {
            FLAGS: Layout("U8", (batch, 1, tokens)),
            VALUES: Layout(DTYPES[self.dtype], (1, 1, 0, heads, self.dim), per="entry", batch_axis=None),
        }

    def choose(self, run: Run, continues: bool) -> torch.Tensor:
        """Which tokens of a run to keep raw, bool ``[batch, token]``: none where it ``continues`` another."""
        batch, _, tokens, _ = run.shape
        chosen = torch.zeros(batch, tokens, dtype=torch.bool, device=run.device)
        if continues:
            return chosen
        chosen[:, : self.first] = True
        if self.low_norm:
            norms = torch.cat([torch.linalg.vector_norm(block, dim=(1, 3), dtype=torch.float64) for block in run.blocks()], 1)
            least = norms.topk(min(self.low_norm, tokens), 1, largest=False).indices
            chosen.scatter_(1, least, True)
        return chosen

    def encode(self, x: torch.Tensor, chosen: torch.Tensor, token_group: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """``x`` ``[batch, kv_head, token, dim]`` without the ``chosen`` tokens, and the streams that hold these.

        In their place is the mean of the others of their token group, which widens no group, or zero where there are none.
        Raises OutOfRange when a value does not fit the dtype.
        """
        rest = torch.where(chosen[:, None, :, None], _means(x, ~chosen, token_group), x) if chosen.any() else x
        exact = x.permute(2, 0, 1, 3)[chosen.T]
        values = exact.to({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.dtype])
        if torch.isinf(values).any():
            entry, head, channel = torch.nonzero(torch.isinf(values))[0].tolist()
            token, batch = torch.nonzero(chosen.T)[entry].tolist()
            raise OutOfRange(
                f"the raw token at batch {batch}, head {head}, token {token} is {exact[entry, head, channel].item():.6g} at channel "
                f"{channel}, the largest {self.dtype} is {torch.finfo(values.dtype).max:.6g}; choose a wider dtype for raw_tokens"
            )
        flags = chosen.to(torch.uint8)[:, None]
        return rest, {FLAGS: flags, VALUES: values[None, None]}

    def put(self, values: torch.Tensor, raw: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """``values`` ``[batch, kv_head, token, dim]`` with ``raw`` ones, ``[entry, kv_head, dim]``, in their places."""
        result = values.clone()
        result.permute(2, 0, 1, 3)[(streams[FLAGS] != 0)[:, 0].T] = raw
        return result

    def check(self, arrays: Mapping[str, Array], where: str) -> None:
        """Raise InvalidPayload for a flag above 1, and flags that are more or fewer than the raw tokens, whose values may be any."""
        flags, rows = arrays[FLAGS], arrays[VALUES].shape[2]
        count = 0
        for first, block in value_blocks(flags):
            if block.max() > 1:
                at = first_place(block > 1, first, flags.shape)
                raise InvalidPayload(f"{where}.{FLAGS}: the value at {at} is {block[(block > 1).argmax()]}, expected 0 or 1")
            count += int(block.sum(dtype=numpy.int64))
        if count != rows:
            raise InvalidPayload(f"{where}.{FLAGS}: {count} tokens are flagged, {where}.{VALUES} holds {rows}")


def _means(x: torch.Tensor, kept: torch.Tensor, token_group: int) -> torch.Tensor:
    """For each token of ``x`` the mean of the ``kept`` tokens, bool ``[batch, token]``, of its token group."""
    batch, heads, tokens, dim = x.shape
    groups, spare = -(-tokens // token_group), -tokens % token_group
    of_groups = functional.pad(x.masked_fill(~kept[:, None, :, None], 0.0), (0, 0, 0, spare))
    counts = functional.pad(kept.to(torch.int64), (0, spare)).reshape(batch, groups, token_group).sum(2)
    # In binary64 no sum overflows.
    sums = of_groups.reshape(batch, heads, groups, token_group, dim).sum(3, dtype=torch.float64)
    means = (sums / counts.clamp_min(1)[:, None, :, None]).to(torch.float32)
    return means.repeat_interleave(token_group, 2)[:, :, :tokens]
