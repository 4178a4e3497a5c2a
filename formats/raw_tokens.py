"""raw_tokens: some tokens stored unquantized, in every head (spec/side-cars.md).

Attention sinks and tokens of low norm are few, but they degrade the groups that contain them. Source: OScaR Sec. 3.1, after OTT.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from .errors import InvalidParameter, InvalidPayload
from .lazy import numpy, torch
from .raw import DTYPES
from .raw_positions import gather_raw_values, replace_tokens
from .sidecar import RawTokenSidecar, RunStep
from .streams import Layout
from .value_blocks import first_index, value_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .base import Codec
    from .options import Options
    from .runs import Run
    from .value_blocks import Array

FLAGS, VALUES = "raw_token_flags", "raw_tokens"

_MAX_RAW_TOKENS = 1 << 16


@dataclass(frozen=True)
class RawTokens(RawTokenSidecar):
    """Sidecar that stores some tokens as ``dtype``: the ``first`` tokens, and the ``low_norm`` tokens with the smallest norms.

    Tokens of low norm are chosen only in the first run.
    """

    name: ClassVar[str] = "raw_tokens"
    words: ClassVar[tuple[str, ...]] = ("raw_tokens", "sinks", "low_norm_tokens")

    dim: int
    dtype: str
    first: int = field(default=0, compare=False)
    low_norm: int = field(default=0, compare=False)

    @classmethod
    def from_options(cls, dim: int, side: str, options: Options) -> Self | None:
        dtype = options.choice("raw_tokens", "", tuple(DTYPES), omitted="bf16")
        first = options.integer("sinks", 0, 1, _MAX_RAW_TOKENS)
        low_norm = options.integer("low_norm_tokens", 0, 1, _MAX_RAW_TOKENS)
        if not (first or low_norm):
            if dtype:
                raise InvalidParameter(
                    f"codec {options.codec}: raw_tokens={dtype} has no effect without sinks=<count> or low_norm_tokens=<count>: "
                    "add one of them, or omit raw_tokens="
                )
            return None
        return cls(dim, dtype or "bf16", first, low_norm)

    def layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        """Return the layouts of ``raw_token_flags``, 1 for a raw token, and of ``raw_tokens``, ordered by token and sequence."""
        return {
            FLAGS: Layout("U8", (batch, 1, tokens)),
            VALUES: Layout(DTYPES[self.dtype], (1, 1, 0, heads, self.dim), per="entry", batch_axis=None),
        }

    def entries(self, streams: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {VALUES: streams[FLAGS][:, 0].T.to(torch.int64)}

    def default_entry_counts(self, batch: int, heads: int, tokens: int) -> dict[str, int]:
        return {VALUES: batch * min(tokens, self.first + self.low_norm)}

    def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None, codec: Codec) -> RunStep:
        chosen = self.choose(run, continues=previous is not None)
        return RunStep({}, lambda block, start: self.encode(block, chosen[:, start : start + block.shape[2]], codec.group_tokens))

    def choose(self, run: Run, continues: bool) -> torch.Tensor:
        """Return a mask of the tokens of a run to keep raw, bool ``[batch, token]``.

        No token is chosen if the run ``continues`` another.
        """
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

    def encode(self, x: torch.Tensor, chosen: torch.Tensor, group_tokens: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Replace the ``chosen`` tokens of ``x`` ``[batch, kv_head, token, dim]`` (see ``replace_tokens``).

        Returns the new values, and the streams that store the tokens. Raises ValueTooLarge if a value does not fit the dtype.
        """
        token, sequence = chosen.T.nonzero().unbind(1)
        values = gather_raw_values(x, token, sequence, self.dtype, "choose a wider dtype for raw_tokens")
        flags = chosen.to(torch.uint8)[:, None]
        return replace_tokens(x, token, sequence, chosen, group_tokens), {FLAGS: flags, VALUES: values[None, None]}

    def token_positions(self, streams: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        token, sequence = streams[FLAGS][:, 0].T.nonzero().unbind(1)
        return token, sequence

    def kept_values(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return streams[VALUES][0, 0].to(torch.float32)

    def check(self, arrays: Mapping[str, Array], where: str) -> None:
        """Raise InvalidPayload for a flag above 1, or if the number of flagged tokens is not the number of raw tokens."""
        flags, rows = arrays[FLAGS], arrays[VALUES].shape[2]
        count = 0
        for first, block in value_blocks(flags):
            if block.max() > 1:
                at = first_index(block > 1, first, flags.shape)
                raise InvalidPayload(f"{where}.{FLAGS}: the value at {at} is {block[(block > 1).argmax()]}, expected 0 or 1")
            count += int(block.sum(dtype=numpy.int64))
        if count != rows:
            raise InvalidPayload(f"{where}.{FLAGS}: {count} tokens are flagged, but {where}.{VALUES} has {rows} tokens")
