"""outliers: chunks of four values that are far larger than the rest, stored in float16 (spec/side-cars.md).

Source: HQMQ Sec. 3, median-multiplier outlier extraction (Med3x with a multiplier of 3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from .columns import Columns, default_fields
from .errors import InvalidParameter, InvalidPayload, ValueTooLarge
from .lazy import numpy, torch
from .sidecar import FramePart, RunStep, parse_map
from .streams import HALF_LIMIT, Layout
from .value_blocks import check_finite, value_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import Options
    from .runs import Run
    from .value_blocks import Array

FLAGS, VALUES = "outlier_flags", "outliers"
CHUNK = 4

_MIN_NORM = 2.0**-13
"""Minimum norm of an outlier. Below 2^-14, float16 has less and less precision, so the codec encodes smaller chunks."""

_MAX_MULTIPLIER = 1000


@dataclass(frozen=True)
class Outliers(FramePart):
    """Sidecar that stores outliers in float16: chunks of the coded frame with a norm above ``multiplier`` times the median of their head.

    The median does not count zero chunks, because padding would lower it.
    """

    name: ClassVar[str] = "outliers"
    words: ClassVar[tuple[str, ...]] = ("outliers",)

    dim: int
    fields: int
    multiplier: int = field(default=3, compare=False)

    def __post_init__(self) -> None:
        if self.dim % CHUNK:
            raise InvalidParameter(f"sidecar outliers: dim is {self.dim}, expected a multiple of {CHUNK}")
        _ = self.packing

    @classmethod
    def from_options(cls, dim: int, side: str, options: Options) -> Self | None:
        multiplier = options.integer("outliers", 0, 1, _MAX_MULTIPLIER)
        return cls(dim, default_fields(max(1, dim // CHUNK), (2,)), multiplier) if multiplier else None

    @classmethod
    def from_params(cls, dim: int, value: Any) -> Self:
        return cls(dim, **parse_map(cls.name, value, {"fields": int}))

    def params(self) -> dict[str, Any]:
        return {"fields": self.fields}

    @property
    def nominal_bits(self) -> float:
        return 1 / CHUNK

    @cached_property
    def packing(self) -> Columns:
        return Columns(self.dim // CHUNK, (2,), self.fields)

    def layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        """Return the layouts of ``outlier_flags``, one flag per chunk, and of ``outliers``, the flagged chunks.

        The flagged chunks are ordered by token, sequence, head and chunk.
        """
        planes = {f"{FLAGS}.{plane}": Layout("U16", (batch, heads, tokens, words)) for plane, words in enumerate(self.packing.planes)}
        return planes | {VALUES: Layout("F16", (1, 1, 0, CHUNK), per="entry", batch_axis=None)}

    def entries(self, streams: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {VALUES: self.flags(streams).sum((1, 3)).T}

    def default_entry_counts(self, batch: int, heads: int, tokens: int) -> dict[str, int]:
        return {VALUES: 0}

    def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None) -> RunStep:
        threshold = self.threshold(run)
        return RunStep({}, lambda block, _: self.encode(block, threshold))

    def threshold(self, run: Run) -> torch.Tensor:
        """Return the norm ``[kv_head, 1, 1]`` above which a chunk of the coded frame is an outlier."""
        norms = torch.cat([_chunk_norms(_as_chunks(block)).transpose(0, 1).flatten(1) for block in run.blocks()], 1)
        if not norms.shape[1]:
            return norms.new_full((norms.shape[0], 1, 1), torch.inf)
        median = norms.masked_fill(norms == 0, torch.nan).nanmedian(1).values
        return (self.multiplier * median).clamp_min(_MIN_NORM)[:, None, None]

    def encode(self, u: torch.Tensor, threshold: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Split off the outliers of ``u`` ``[batch, kv_head, token, dim]``. Returns ``u`` with zeros for them, and their streams.

        Raises ValueTooLarge if an outlier does not fit in float16.
        """
        chunks = _as_chunks(u)
        flagged = _chunk_norms(chunks) > threshold
        values = chunks.permute(2, 0, 1, 3, 4)[flagged.permute(2, 0, 1, 3)]
        if not (values.abs() < HALF_LIMIT).all():
            _reject_too_large(chunks, flagged)
        planes = {f"{FLAGS}.{plane}": words for plane, words in enumerate(self.packing.pack([flagged.to(torch.int32)]))}
        without_outliers = chunks.masked_fill(flagged[..., None], 0.0).flatten(3)
        return without_outliers, planes | {VALUES: values.to(torch.float16)[None, None]}

    def put(self, frame: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Put the outliers back into ``frame``, float32 ``[batch, kv_head, token, dim]``."""
        chunks = _as_chunks(frame).clone()
        chunks.permute(2, 0, 1, 3, 4)[self.flags(streams).permute(2, 0, 1, 3)] = streams[VALUES][0, 0].to(torch.float32)
        return chunks.flatten(3)

    def flags(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a mask of the outlier chunks, bool ``[batch, kv_head, token, chunk]``."""
        (flags,) = self.packing.unpack([streams[f"{FLAGS}.{plane}"] for plane in range(len(self.packing.planes))])
        return flags != 0

    def check(self, arrays: Mapping[str, Array], where: str) -> None:
        """Raise InvalidPayload if a spare bit is set, the flags do not match the number of outliers, or an outlier is not finite."""
        planes = [arrays[f"{FLAGS}.{plane}"] for plane in range(len(self.packing.planes))]
        self.packing.check(planes, f"{where}.{FLAGS}")
        values = arrays[VALUES]
        # There is one bit per chunk, so every set bit of every plane is a flag.
        blocks = (block for plane in planes for _, block in value_blocks(plane))
        flags = sum(int(numpy.unpackbits(block.view(numpy.uint8)).sum(dtype=numpy.int64)) for block in blocks)
        if flags != values.shape[2]:
            raise InvalidPayload(f"{where}.{FLAGS}: {flags} chunks are flagged, but {where}.{VALUES} has {values.shape[2]} chunks")
        check_finite(f"{where}.{VALUES}", values, "outliers")


def _reject_too_large(chunks: torch.Tensor, flagged: torch.Tensor) -> NoReturn:
    """Raise ValueTooLarge for the first outlier that does not fit in float16."""
    batch, head, token, chunk, k = torch.nonzero(flagged[..., None] & ~(chunks.abs() < HALF_LIMIT))[0].tolist()
    raise ValueTooLarge(
        f"the outlier at batch {batch}, head {head}, token {token}, channel {CHUNK * chunk + k} of the coded frame is "
        f"{chunks[batch, head, token, chunk, k].item():.6g}, but the largest float16 value is 65504: scale the input, or omit outliers "
        "from the recipe"
    )


def _as_chunks(u: torch.Tensor) -> torch.Tensor:
    return u.reshape(*u.shape[:-1], u.shape[-1] // CHUNK, CHUNK)


def _chunk_norms(chunks: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(chunks, dim=-1)
    return norms
