"""A call of attention, prepared: everything that is the same for every query of a shape over one layer is done once.

What is left for a call are two allocations and, in the common case, three launches: queries into the coded frames, one split kernel
for all packed tokens and one for a raw tail, and the merge, which rotates its result back.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.qjl import Qjl
from kvpack.formats.side_cars import WithSideCars
from kvpack.kernels.tables import shared_table
from kvpack.kernels.triton_insides import CachedLaunch

from . import device_tables, merge, plan, rotation, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.base import Codec

    from .plan import Launch
    from .segments import Frame

FEWEST_ROWS, MOST_ROWS = 8, 16
"""Query rows of one program: the rows of a block are the short side of the matrix products."""

MERGE_PARTS, MERGE_COLUMNS = 512, 32
"""Parts of one program of the merge at most, and its columns."""

FEW_PARTS = 32
"""Up to which one warp merges them: its lanes then have columns of their own, 4 each."""

FEW_ROWS = 256
"""Rows of all sequences up to which the merge also rotates, row by row; products of many rows are faster on the matrix units."""

ROW_PARTS, ROW_COLUMNS, ROW_CHANNELS, ROW_WARPS = 256, 128, 64, 8
"""Such a program's parts at once at most, its columns at once, the channels that it writes, and its warps."""

ORDERED_PARTS, ORDERED_CHANNELS, ORDERED_WARP_PARTS = 512, 32, 32
"""The first and third of these where columns are channels, and nothing is rotated; and the parts of each warp, of which no more are."""

LOG2_E = math.log2(math.e)
EVERYTHING = 1 << 30
"""A window, or a look ahead, beyond any token."""


class Shape(NamedTuple):
    """The queries of a call: ``q_len`` of each of the ``q_heads``, of ``dim`` channels, for ``batch`` sequences of ``heads`` KV heads."""

    batch: int
    q_heads: int
    q_len: int
    dim: int
    heads: int

    @property
    def rows(self) -> int:
        """The query rows of one KV head."""
        return self.q_heads // self.heads * self.q_len

    @property
    def block(self) -> int:
        """The query rows of one program."""
        return min(MOST_ROWS, max(FEWEST_ROWS, next_power_of_two(self.rows)))

    @property
    def sequences(self) -> int:
        """Sequences of the batch times KV heads."""
        return self.batch * self.heads

    @property
    def padded(self) -> int:
        """Rows in whole blocks."""
        return -(-self.rows // self.block) * self.block


class Options(NamedTuple):
    """What ``kvpack.attend`` is asked for. ``lengths``, ``starts`` and ``sink_logits``: whether calls give them."""

    scale: float
    causal: bool = True
    softcap: float | None = None
    sliding_window: int | None = None
    lengths: bool = False
    sink_logits: bool = False
    starts: bool = False


class Prepared:
    """``launches`` over one layer for queries of ``shape`` and ``dtype``; the value frames of ``launches`` lie side by side.

    ``position`` is that of the first query in a sequence of all tokens. ``masked`` tells for each launch whether it reads the lengths
    of sequences, ``cut`` whether tokens before a sequence's windows are skipped on the device, as they are where it has a start.
    ``dual``: launches may hold two tokens per row.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        shape: Shape,
        dtype: torch.dtype,
        options: Options,
        position: int,
        dual: bool,
        dim_v: int,
        masked: Sequence[bool],
        cut: bool = False,
    ) -> None:
        device = launches[0].work.device
        self.launches, self.shape, self.dtype, self.options, self.dim_v = launches, shape, dtype, options, dim_v
        self._dual, self._device, self._dependent = dual, device, plan.overlaps(device)
        self._overlap = {"launch_pdl": True} if self._dependent else {}
        parts = sum(launch.parts for launch in launches)
        self._parts, self._columns = parts, max(launch.constants["V"].columns for launch in launches)
        rows = shape.sequences * shape.padded
        places = _Places()
        self._scales = places.take(rows)
        self._largest, self._total = places.take(rows * parts), places.take(rows * parts)
        self._sums = places.take(rows * parts * self._columns)
        self._k_frames = list(dict.fromkeys(launch.k for launch in launches))
        # The plain frames lie side by side: one launch rotates the query into all of them.
        framed = [frame for frame in self._k_frames if frame.page is not None]
        self._turned = {frame: places.take(rows * len(plan.columns(frame.codec, dual))) for frame in (*self._plain(), *framed)}
        self._v_frames: dict[Frame, tuple[int, int]] = {}
        stop = 0
        for launch in launches:
            start, stop = stop, stop + launch.parts
            self._v_frames[launch.v] = (self._v_frames.get(launch.v, (start,))[0], stop)
        own_channels = all(frame.page is None for frame in self._v_frames)
        self._merges_originals = own_channels and len(self._v_frames) <= 2 and shape.sequences * shape.rows <= FEW_ROWS
        self._scratch = places.taken
        self._rotations = self._prepared_rotations()
        self._splits = self._prepared_splits(position, masked, cut or options.starts)
        self._merge = self._prepared_merge() if self._merges_originals else None
        self._merges = {} if self._merges_originals else {frame: self._frame_merge(frame) for frame in self._v_frames}

    def __call__(
        self,
        q: torch.Tensor,
        sink_logits: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with ``q`` ``[batch, q_head, q_len, dim]``: ``[batch, q_head, q_len, dim_v]`` of the same dtype.

        ``sink_logits`` are floating point ``[q_head]``, ``lengths`` and ``starts`` integers ``[batch]``.
        """
        if lengths is not None:
            lengths = lengths.to(self._device, torch.int32)
        if starts is not None:
            starts = starts.to(self._device, torch.int32)
        scratch = self.rotated(q)
        self.attended(scratch, lengths, starts)
        return self.merged(scratch, sink_logits)

    @property
    def plain(self) -> bool:
        """Whether a call is kernels alone: no page maps its values by torch operations, which depend on the caller's modes."""
        return all(frame.page is None for frame in (*self._k_frames, *self._v_frames))

    def rotated(self, q: torch.Tensor) -> torch.Tensor:
        """The scratch memory of one call, with the query in every frame of the keys."""
        scratch = torch.empty(self._scratch, dtype=torch.float32, device=self._device)
        q = q.contiguous()
        for frame, launch, matrix, blocks in self._rotations:
            first = self._turned[self._first_plain if frame is None else frame]
            own = q if frame is None else _inner(q.view(self.shape.batch, self.shape.heads, -1, self.shape.dim), frame).contiguous()
            launch((scratch, first), (scratch, self._scales), (own, 0), (matrix, 0), (blocks, 0))
        return scratch

    def attended(self, scratch: torch.Tensor, lengths: torch.Tensor | None = None, starts: torch.Tensor | None = None) -> None:
        """Run the split kernels over what ``rotated`` gave: partial results of every launch."""
        numbers = device_tables.numbers(str(self._device))
        given = () if starts is None else ((starts, 0),)
        for launch, run in zip(self.launches, self._splits, strict=True):
            run(
                (scratch, self._sums), (scratch, self._largest), (scratch, self._total), (scratch, self._turned[launch.k]),
                (scratch, self._scales), (launch.work, 0), (numbers, 0), (launch.tables[0], 0), (launch.tables[1], 0),
                (launch.work if lengths is None else lengths, 0), *given,
            )  # fmt: skip

    def merged(self, scratch: torch.Tensor, sink_logits: torch.Tensor | None = None) -> torch.Tensor:
        """The result of the partial results in ``scratch``."""
        shape = self.shape
        if sink_logits is not None:
            sink_logits = sink_logits.to(self._device, torch.float32) * LOG2_E
        sinks = (scratch if sink_logits is None else sink_logits, 0)
        if self._merge is not None:
            out = torch.empty(shape.batch, shape.q_heads, shape.q_len, self.dim_v, dtype=self.dtype, device=self._device)
            run, matrix = self._merge
            run((out, 0), (scratch, self._sums), (scratch, self._largest), (scratch, self._total), (matrix, 0), sinks)
            return out
        sums = {}
        for frame, (run, channels) in self._merges.items():
            frame_dim = plan.frame_dim(frame.codec)
            sums[frame] = torch.empty(shape.batch, shape.heads, shape.rows, frame_dim, dtype=torch.float32, device=self._device)
            run((sums[frame], 0), (scratch, self._sums), (scratch, self._largest), (scratch, self._total), (channels, 0), sinks)
        return self._originals(sums).reshape(shape.batch, shape.q_heads, shape.q_len, self.dim_v)

    def _originals(self, sums: dict[Frame, torch.Tensor]) -> torch.Tensor:
        """The sums of all frames together, ``[batch, kv_head, row, dim]`` in the original frame."""
        out = None
        for number, (frame, merged) in enumerate(sums.items(), 1):
            if frame.page is not None:
                original = frame.page.original(_with_signs(merged, frame.codec))
                out = original if out is None else out + original
            elif frame.codec.rotation.kind == "none" and len(sums) == 1 and merged.shape[3] == frame.codec.dim:
                out = merged
            else:
                out = self._rotated_back(merged, frame.codec, out, self.dtype if number == len(sums) else torch.float32)
        assert out is not None
        return out.to(self.dtype)

    def _rotated_back(self, sums: torch.Tensor, codec: Codec, before: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        frame_dim, dim, matrices = sums.shape[3], codec.dim, rotation.frame_matrix(codec, str(sums.device))
        sequences = 1 if matrices.shape[0] == 1 else sums.shape[0] * sums.shape[1]
        count = math.prod(sums.shape[:3]) // sequences
        out = torch.empty(*sums.shape[:3], dim, dtype=dtype, device=sums.device)
        rotation.rotate_sums[(sequences * -(-count // 16), -(-dim // rotation.BLOCK_COLUMNS))](
            out, sums, matrices, sums if before is None else before, count, -(-count // 16), matrices.shape[0],
            DIM=dim, FRAME_DIM=frame_dim, BLOCK_DIM=rotation.query_block(frame_dim), ROWS=16,
            BLOCK_COLUMNS=rotation.BLOCK_COLUMNS, ADD=before is not None, DEPENDENT=self._dependent, **self._overlap,
        )  # fmt: skip
        return out

    def _plain(self) -> list[Frame]:
        """The frames of keys whose queries differ by a rotation only."""
        return [frame for frame in self._k_frames if frame.page is None]

    @property
    def _first_plain(self) -> Frame:
        return self._plain()[0]

    def _prepared_rotations(self) -> list[tuple[Frame | None, CachedLaunch, torch.Tensor, torch.Tensor]]:
        """A launch for all plain frames (None), and one for each frame of a page that maps its values."""
        plain = self._plain()
        found: list[tuple[Frame | None, CachedLaunch, torch.Tensor, torch.Tensor]] = []
        for own, frames in ((None, plain), *((frame, [frame]) for frame in self._k_frames if frame.page is not None)):
            if not frames:
                continue
            codecs = tuple((frame.codec, plan.columns(frame.codec, self._dual)) for frame in frames)
            matrix, blocks = rotation.query_matrix(codecs, str(self._device))
            shape, options = self.shape, self.options
            per_score = options.scale / options.softcap if options.softcap else options.scale * LOG2_E
            row_blocks = shape.padded // shape.block
            launch = CachedLaunch(
                rotation.rotate_queries,
                (shape.sequences * row_blocks, blocks.shape[0], 1),
                (per_score, shape.rows, row_blocks, matrix.shape[2], matrix.shape[0]),
                {
                    "DIM": shape.dim, "BLOCK_DIM": rotation.query_block(shape.dim), "ROWS": shape.block,
                    "BLOCK_COLUMNS": rotation.BLOCK_COLUMNS, "DEPENDENT": self._dependent,
                },
                self._overlap,
            )  # fmt: skip
            found.append((own, launch, matrix, blocks))
        return found

    def _prepared_splits(self, position: int, masked: Sequence[bool], cut: bool) -> list[CachedLaunch]:
        shape, options = self.shape, self.options
        # Without starts, the place of their pointer is a constant.
        no_starts = () if options.starts else (None,)
        row_blocks = shape.padded // shape.block
        found, start = [], 0
        for launch, lengths in zip(self.launches, masked, strict=True):
            items = launch.work.shape[0]
            rows = 2 * max(FEWEST_ROWS // 2, next_power_of_two(shape.rows)) if launch.dual else shape.block
            tables = launch.constants["TABLES"].nbytes
            found.append(
                CachedLaunch(
                    split.attend_split,
                    (items * row_blocks * shape.sequences, 1, 1),
                    (
                        *no_starts, (options.softcap or 1.0) * LOG2_E, items, shape.heads, row_blocks, shape.rows, start, self._parts,
                        position, shape.q_len, 0 if options.causal else EVERYTHING, options.sliding_window or EVERYTHING,
                    ),
                    {
                        **launch.constants, "SOFTCAP": options.softcap is not None, "ROWS": rows, "BLOCK": shape.block,
                        "COLUMNS": self._columns, "LENGTHS": lengths, "CUT": cut, "DEPENDENT": self._dependent, "FIRST": start == 0,
                    },
                    {"num_warps": launch.shape.warps, **self._overlap},
                    partial(shared_table.allow, table_bytes=tables) if tables or launch.constants["PATCHES"] else None,
                )
            )  # fmt: skip
            start += launch.parts
        return found

    def _prepared_merge(self) -> tuple[CachedLaunch, torch.Tensor]:
        shape = self.shape
        codecs = tuple((frame.codec, plan.columns(frame.codec, self._dual)) for frame in self._v_frames)
        matrix = rotation.value_matrix(codecs, ROW_COLUMNS, str(self._device))
        rotated = not all(rotation.in_order(codec, columns) for codec, columns in codecs)
        most_parts, channels = (ROW_PARTS, ROW_CHANNELS) if rotated else (ORDERED_PARTS, ORDERED_CHANNELS)
        if rotated:
            most_parts //= next_power_of_two(-(-self._columns // ROW_COLUMNS))
        # Loads of one block wait together.
        block_parts = min(most_parts, max(ORDERED_WARP_PARTS, next_power_of_two(self._parts)))
        second = next(iter(self._v_frames.values()))[1]
        launch = CachedLaunch(
            merge.merge_originals,
            (shape.sequences * shape.rows, -(-self.dim_v // channels), 1),
            (self._parts, second, shape.rows, shape.padded, shape.heads, shape.q_len, matrix.shape[0], matrix.shape[1]),
            {
                "SINK_LOGITS": self.options.sink_logits, "COLUMNS": self._columns, "WIDTHS": tuple(len(columns) for _, columns in codecs),
                "DIM": self.dim_v, "BLOCK_PARTS": block_parts, "BLOCK_COLUMNS": ROW_COLUMNS, "BLOCK_DIM": channels,
                "ROTATED": rotated, "DEPENDENT": self._dependent,
            },
            {"num_warps": ROW_WARPS if rotated else min(ROW_WARPS, block_parts // ORDERED_WARP_PARTS), **self._overlap},
        )  # fmt: skip
        return launch, matrix

    def _frame_merge(self, frame: Frame) -> tuple[CachedLaunch, torch.Tensor]:
        shape, (start, stop) = self.shape, self._v_frames[frame]
        block_parts = min(MERGE_PARTS, next_power_of_two(self._parts))
        few = block_parts <= FEW_PARTS
        block_columns = 128 if few else MERGE_COLUMNS
        channels = _channels(frame.codec, self._dual, block_columns, str(self._device))
        launch = CachedLaunch(
            merge.merge,
            (shape.sequences * shape.rows, channels.numel() // block_columns, 1),
            (self._parts, start, stop, shape.rows, shape.padded, shape.heads, shape.q_len),
            {
                "SINK_LOGITS": self.options.sink_logits, "COLUMNS": self._columns, "DIM": plan.frame_dim(frame.codec),
                "BLOCK_PARTS": block_parts, "BLOCK_COLUMNS": block_columns, "DEPENDENT": self._dependent,
            },
            {"num_warps": 1 if few else 4, **self._overlap},
        )  # fmt: skip
        return launch, channels


class _Places:
    """Places in one scratch memory, in elements."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, elements: int) -> int:
        """The first of ``elements`` more."""
        first = self.taken
        self.taken += elements
        return first


def _inner(q: torch.Tensor, frame: Frame) -> torch.Tensor:
    """The query as the codec alone takes it: with the channel scales of the frame's page, in its order."""
    assert frame.page is not None
    assert isinstance(frame.page.codec, WithSideCars)
    return frame.page.codec.inner_query(q.to(torch.float32), frame.page.streams)


def _with_signs(sums: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Sums in ``codec``'s frame together with those of its signs, if it has any."""
    qjl = codec.side_car(Qjl)
    return sums if qjl is None else sums[..., : codec.dim] + qjl.rotation.inverse(sums[..., codec.dim :])


@lru_cache(maxsize=256)
def _channels(codec: Codec, dual: bool, block: int, device: str) -> torch.Tensor:
    """The channel of each column, int32, up to whole ``block``s; columns without one have the channel after the last."""
    none = plan.frame_dim(codec)
    channels = torch.tensor([channel if channel >= 0 else none for channel in plan.columns(codec, dual)], dtype=torch.int32)
    return torch.nn.functional.pad(channels, (0, -channels.numel() % block), value=none).to(device)
