"""Prepared attention calls: everything that is the same for all queries of one shape over one layer is computed once.

A call then needs two allocations and usually three launches. The first rotates the queries into the coded frames. The second is the split
kernel. The third merges the partial results and rotates the sums back. A raw tail adds another launch of the split kernel.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.key_mean import KeyMean
from kvpack.formats.qjl import Qjl
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.kernels.cuda import attend_scalar
from kvpack.kernels.gpu import gpu
from kvpack.kernels.tables import shared_table
from kvpack.kernels.tiles import device_tables, frame_columns
from kvpack.kernels.triton_internals import CachedLaunch, LaunchChain

from . import merge, rotation, split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.formats.base import Codec
    from kvpack.kernels.cuda.attend_scalar import ScalarKernel

    from .plan import Launch
    from .segments import Frame

    _LaunchTensors = tuple[CachedLaunch, Sequence[tuple[int | torch.Tensor, int]]]

MIN_ROWS, MAX_ROWS = 8, 16
"""Minimum and maximum number of query rows per program. Rows are the short side of its matrix products."""

MERGE_PARTS, MERGE_COLUMNS = 512, 32
"""Maximum number of parts that a program of ``merge.merge`` loads together, and number of columns that it merges."""

MAX_PARTS = 32
"""Maximum number of parts that one warp merges, with 4 columns per lane."""

MAX_ROTATED_ROWS = 64
"""Maximum number of query rows, over all sequences, for which the merge also rotates, row by row."""

ROTATED_ROWS = (1024, 64), (512, 16)
"""Minimum numbers of padded rows at which a program of ``rotate_queries`` covers several sequences, and the rows of such a program."""

ROW_VALUES, ROW_CHANNELS, ROW_WARPS = 1 << 15, 32, 8
"""Limits of a program of ``merge.merge_originals``: values in registers (parts times columns), channels written, and warps."""

ORDERED_ROWS, ORDERED_PARTS, ORDERED_WARP_PARTS = 256, 512, 32
"""Limits of ``merge.merge_originals`` without a rotation: maximum query rows, maximum parts loaded together, and parts per warp."""

SCRATCH, QUERY, OUT, LENGTHS, STARTS, SINKS, MAPPED = range(7)
"""Indices of a call's tensors in the arguments of launches.

From MAPPED on, the tensors are the queries for pages that transform values, followed by the sums.
"""

LOG2_E = math.log2(math.e)
UNLIMITED = 1 << 30
"""Number of tokens that no layer reaches, for calls without a window or a causal mask."""


class QueryShape(NamedTuple):
    """Shape of a call's queries, and the number of KV heads of the layer (``heads``)."""

    batch: int
    q_heads: int
    q_len: int
    dim: int
    heads: int

    @property
    def rows(self) -> int:
        """Number of query rows per KV head: ``q_len`` rows for each query head that shares it."""
        return self.q_heads // self.heads * self.q_len

    @property
    def block(self) -> int:
        return min(MAX_ROWS, max(MIN_ROWS, next_power_of_two(self.rows)))

    @property
    def sequences(self) -> int:
        """Number of sequences as kernels count them: one per batch entry and KV head."""
        return self.batch * self.heads

    @property
    def padded(self) -> int:
        """Number of query rows per KV head, rounded up to whole blocks."""
        return -(-self.rows // self.block) * self.block


class AttendOptions(NamedTuple):
    """Options of a ``kvpack.attend`` call.

    ``lengths``, ``starts`` and ``sink_logits`` are True if the call passes these arguments.
    """

    scale: float
    causal: bool = True
    softcap: float | None = None
    sliding_window: int | None = None
    lengths: bool = False
    sink_logits: bool = False
    starts: bool = False


def supports_scalar_kernel(shape: QueryShape, options: AttendOptions) -> bool:
    """Return True if ``attend_scalar`` may attend: few query rows, which all see the same tokens, to the end or the sequence's length."""
    same_tokens = shape.q_len == 1 or not options.causal
    return shape.rows <= attend_scalar.MAX_ROWS and same_tokens and not (options.softcap or options.sliding_window or options.starts)


class PreparedCall:
    """A prepared attention call: all launches over one layer for queries of ``shape`` and ``dtype``.

    ``launches`` with the same value frame must be adjacent. ``position`` is the position of the first query in a sequence of full length.
    ``masked`` contains a flag per launch: True if it reads the sequence lengths. ``cut`` is True if the device skips tokens before each
    sequence's window or start. ``dual`` is as in ``frame_columns.loader``.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        shape: QueryShape,
        dtype: torch.dtype,
        options: AttendOptions,
        position: int,
        dual: int,
        dim_v: int,
        masked: Sequence[bool],
        cut: bool = False,
    ) -> None:
        device = launches[0].work.device
        self.launches, self.shape, self.dtype, self.options, self.dim_v = launches, shape, dtype, options, dim_v
        self._dual, self._device, self._dependent = dual, device, gpu(device).overlaps_launches
        self._overlap = {"launch_pdl": True} if self._dependent else {}
        parts = sum(launch.parts for launch in launches)
        self._parts, self._columns = parts, max(launch.constants["V"].columns for launch in launches)
        rows = shape.sequences * shape.padded
        scratch = _ScratchAllocator()
        self._largest, self._total = scratch.allocate(rows * parts), scratch.allocate(rows * parts)
        self._sums = scratch.allocate(rows * parts * self._columns)
        self._k_frames = list(dict.fromkeys(launch.k for launch in launches))
        # The buffers of plain frames are adjacent: one launch rotates the query into all of them.
        unfolded = [frame for frame in self._k_frames if frame.query_codec is None]
        self._factors = {frame: factors for frame in unfolded if (factors := frame.channel_factors) is not None}
        self._mapped_frames = [frame for frame in unfolded if frame not in self._factors]
        frames = (*self._plain_frames(), *unfolded)
        self._rotated_offsets = {frame: scratch.allocate(rows * sum(map(len, self._frame_columns(frame)))) for frame in frames}
        # Rotations preserve a query's norm, but value transforms change it, so their frames have their own scales.
        self._scales = dict.fromkeys(self._plain_frames(), scratch.allocate(rows)) | {frame: scratch.allocate(rows) for frame in unfolded}
        self._v_frames: dict[Frame, tuple[int, int]] = {}
        stop = 0
        for launch in launches:
            start, stop = stop, stop + launch.parts
            self._v_frames[launch.v] = (self._v_frames.get(launch.v, (start,))[0], stop)
        unmapped = all(frame.page is None for frame in self._v_frames)
        self._merges_originals = unmapped and len(self._v_frames) <= 2
        self._rotated = not all(
            frame_columns.is_in_order(frame.codec, frame_columns.columns(frame.codec, dual)) for frame in self._v_frames
        )
        self._few_rows = shape.sequences * shape.rows <= (MAX_ROTATED_ROWS if self._rotated else ORDERED_ROWS)
        self._mean_products = [scratch.allocate(rows * launch.work.shape[0] * _global_mean_pages(launch)) for launch in launches]
        self._scratch = scratch.size
        sequence = self._prepare_rotations()
        self._rotations = len(sequence)
        sequence += self._prepare_splits(position, masked, cut or options.starts)
        if not self._merges_originals:
            sequence += self._prepare_frame_merges()
        else:
            sequence += [self._prepare_merge()] if self._few_rows else self._prepare_products()
        self._chain = LaunchChain(sequence)

    def __call__(
        self,
        q: torch.Tensor,
        sink_logits: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of ``q`` ``[batch, q_head, q_len, dim]``: ``[batch, q_head, q_len, dim_v]`` of the same dtype.

        ``sink_logits`` are floating point ``[q_head]``; ``lengths`` and ``starts`` are integers ``[batch]``.
        """
        return self._run(self._call_tensors(q.contiguous(), sink_logits, lengths, starts), 0)

    @property
    def runs_only_kernels(self) -> bool:
        """True if a call consists only of kernels.

        False if PyTorch operations, which depend on modes such as autocast, apply value maps.
        """
        return not self._mapped_frames and all(frame.page is None for frame in self._v_frames)

    def after_rotation(self, q: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Run the call once with ``q``, and return a function that repeats it without rotating ``q`` again. Benchmarks use it."""
        tensors = self._call_tensors(q.contiguous(), None, None, None)
        self._chain(tensors)
        return lambda: self._run(tensors, self._rotations)

    def _call_tensors(
        self, q: torch.Tensor, sink_logits: torch.Tensor | None, lengths: torch.Tensor | None, starts: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Return the tensors of a call as a list, indexed by the constants ``SCRATCH`` to ``MAPPED``."""
        shape, device = self.shape, self._device
        scratch = torch.empty(self._scratch, dtype=torch.float32, device=device)
        tensors = [scratch, q]
        if self._merges_originals:
            # The output has the shape of the queries, except for the values' dim.
            out = torch.empty_like(q) if self.dim_v == shape.dim else q.new_empty(*q.shape[:3], self.dim_v)
            tensors.append(out)
        else:
            # No launch uses OUT here: the merges write to the sums below.
            tensors.append(scratch)
        tensors.append(scratch if lengths is None else lengths.to(device, torch.int32))
        tensors.append(scratch if starts is None else starts.to(device, torch.int32))
        tensors.append(scratch if sink_logits is None else sink_logits.to(device, torch.float32) * LOG2_E)
        for frame in self._mapped_frames:
            tensors.append(_page_query(q.view(shape.batch, shape.heads, -1, shape.dim), frame).contiguous())
        if not self._merges_originals:
            for frame in self._v_frames:
                dims = shape.batch, shape.heads, shape.rows, frame_columns.frame_dim(frame.codec)
                # The merges write only channels that have columns.
                covered = len({*frame_columns.columns(frame.codec, self._dual)} - {-1}) == dims[3]
                tensors.append((torch.empty if covered else torch.zeros)(dims, dtype=torch.float32, device=device))
        elif not self._few_rows:
            columns = sum(len(frame_columns.columns(frame.codec, self._dual)) for frame in self._v_frames)
            tensors.append(torch.empty(shape.sequences * shape.rows, columns, dtype=torch.float32, device=device))
        return tensors

    def _run(self, tensors: list[torch.Tensor], first_launch: int) -> torch.Tensor:
        """Run all launches but the first ``first_launch``, and return the attention output."""
        self._chain(tensors, first_launch)
        if self._merges_originals:
            return tensors[OUT]
        shape = self.shape
        sums = dict(zip(self._v_frames, tensors[MAPPED + len(self._mapped_frames) :], strict=True))
        return self._sum_frames(sums).reshape(shape.batch, shape.q_heads, shape.q_len, self.dim_v)

    def _sum_frames(self, sums: dict[Frame, torch.Tensor]) -> torch.Tensor:
        """Rotate the ``sums`` of each frame to the original frame, and return their total, ``[batch, kv_head, row, dim]``."""
        out = None
        for index, (frame, merged) in enumerate(sums.items(), 1):
            if frame.page is not None:
                original = frame.page.original(_add_signs(merged, frame.codec))
                out = original if out is None else out + original
            elif frame.codec.rotation.kind == "none" and len(sums) == 1 and merged.shape[3] == frame.codec.dim:
                out = merged
            else:
                out = self._rotate_back(merged, frame.codec, out, self.dtype if index == len(sums) else torch.float32)
        assert out is not None
        return out.to(self.dtype)

    def _rotate_back(self, sums: torch.Tensor, codec: Codec, addend: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        frame_dim, dim, matrices = sums.shape[3], codec.dim, frame_columns.frame_matrix(codec, str(sums.device))
        sequences = 1 if matrices.shape[0] == 1 else sums.shape[0] * sums.shape[1]
        count = math.prod(sums.shape[:3]) // sequences
        out = torch.empty(*sums.shape[:3], dim, dtype=dtype, device=sums.device)
        rotation.rotate_sums[(sequences * -(-count // 16), -(-dim // frame_columns.BLOCK_COLUMNS))](
            out, sums, matrices, sums if addend is None else addend, count, -(-count // 16), matrices.shape[0],
            DIM=dim, FRAME_DIM=frame_dim, BLOCK_DIM=rotation.sums_block_dim(frame_dim), ROWS=16,
            BLOCK_COLUMNS=frame_columns.BLOCK_COLUMNS, ADD=addend is not None, DEPENDENT=self._dependent, **self._overlap,
        )  # fmt: skip
        return out

    def _plain_frames(self) -> list[Frame]:
        """Return the key frames for which a single cached matrix maps the queries."""
        return [frame for frame in self._k_frames if frame.query_codec is not None]

    def _frame_columns(self, frame: Frame) -> list[tuple[int, ...]]:
        """Return the channel of each column of queries rotated into ``frame``, in the order of the key loader.

        If pages have means, a second tuple lists all channels in order, for the query that means are multiplied by.
        """
        columns = [frame_columns.key_columns(frame.codec, self._dual)]
        if frame.codec.sidecar(KeyMean) is not None:
            columns.append(tuple(range(frame.codec.dim)))
        return columns

    def _prepare_rotations(self) -> list[_LaunchTensors]:
        """Return the launches that rotate queries: one for all plain key frames, and one for each frame whose page applies value maps."""
        queries = [(QUERY, self._plain_frames())] if self._plain_frames() else []
        queries += [(QUERY, [frame]) for frame in self._factors]
        queries += [(MAPPED + index, [frame]) for index, frame in enumerate(self._mapped_frames)]
        result: list[_LaunchTensors] = []
        for query, frames in queries:
            factors = self._factors.get(frames[0])
            codecs = tuple(
                (frame.query_codec or frame.codec, columns, index > 0)
                for frame in frames
                for index, columns in enumerate(self._frame_columns(frame))
            )
            matrix, blocks = frame_columns.query_matrix(codecs, str(self._device))
            shape, options = self.shape, self.options
            score_factor = options.scale / options.softcap if options.softcap else options.scale * LOG2_E
            count = shape.sequences * shape.padded
            rows = shape.block
            if matrix.shape[0] == 1:
                rows = next((rows for least, rows in ROTATED_ROWS if count >= least), rows)
            launch = CachedLaunch(
                rotation.rotate_queries,
                (-(-count // rows), blocks.shape[0], 1),
                (score_factor, shape.rows, shape.padded, shape.sequences, matrix.shape[2], matrix.shape[0]),
                {
                    "DIM": shape.dim, "BLOCK_DIM": rotation.query_block_dim(shape.dim), "ROWS": rows,
                    "BLOCK_COLUMNS": frame_columns.BLOCK_COLUMNS, "SCALED": factors is not None,
                    "HALVES": any(halves for _, _, halves in codecs), "DEPENDENT": self._dependent,
                    "EARLY": self.launches[0].balanced,
                },
                self._overlap,
            )  # fmt: skip
            rotated, scales = (SCRATCH, self._rotated_offsets[frames[0]]), (SCRATCH, self._scales[frames[0]])
            result.append((launch, [rotated, scales, (query, 0), (matrix, 0), (blocks, 0), (blocks if factors is None else factors, 0)]))
        return result

    def _prepare_splits(self, position: int, masked: Sequence[bool], cut: bool) -> list[_LaunchTensors]:
        shape, options = self.shape, self.options
        iota = device_tables.counting_tensor(str(self._device))
        # Without starts, the kernel's ``starts`` argument is the constant None.
        no_starts = () if options.starts else (None,)
        row_blocks = shape.padded // shape.block
        result: list[_LaunchTensors] = []
        start = 0
        for launch, lengths, products in zip(self.launches, masked, self._mean_products, strict=True):
            if launch.kernel is not None:
                result.append(self._prepare_scalar(launch, launch.kernel, start, position, lengths))
                start += launch.parts
                continue
            items = launch.work.shape[0]
            rows = 2 * max(MIN_ROWS // 2, next_power_of_two(shape.rows)) if launch.dual or launch.constants["V"].paired else shape.block
            tables, means = launch.constants["TABLES"].nbytes, launch.constants["K"].means
            declares_memory = tables or launch.constants["PATCHES"] or (means and launch.constants["FAST"])
            run = CachedLaunch(
                split.attend_split,
                (items * row_blocks * shape.sequences, 1, 1),
                (
                    *no_starts, (options.softcap or 1.0) * LOG2_E, items, shape.heads, row_blocks, shape.rows, start, self._parts,
                    position, shape.q_len, 0 if options.causal else UNLIMITED, options.sliding_window or UNLIMITED,
                ),
                {
                    **launch.constants, "SOFTCAP": options.softcap is not None, "ROWS": rows, "BLOCK": shape.block,
                    "COLUMNS": self._columns, "LENGTHS": lengths, "CUT": cut, "DEPENDENT": self._dependent, "FIRST": start == 0,
                },
                {"num_warps": launch.shape.warps, **self._overlap},
                partial(shared_table.allow_tables, table_bytes=tables) if declares_memory else None,
            )  # fmt: skip
            mean_q = self._rotated_offsets[launch.k] + shape.sequences * shape.padded * launch.constants["K"].columns
            arguments: list[tuple[int | torch.Tensor, int]] = [
                *self._part_locations, (SCRATCH, self._rotated_offsets[launch.k]), (SCRATCH, self._scales[launch.k]), (SCRATCH, products),
                (SCRATCH, mean_q if means else 0), (launch.work, 0), (iota, 0), (launch.tables[0], 0), (launch.tables[1], 0),
                (LENGTHS if options.lengths else launch.work, 0),
            ]  # fmt: skip
            result.append((run, [*arguments, (STARTS, 0)] if options.starts else arguments))
            start += launch.parts
        return result

    def _prepare_scalar(self, launch: Launch, kernel: ScalarKernel, start: int, position: int, lengths: bool) -> _LaunchTensors:
        """Return the launch of ``kernel`` for ``launch``, whose partial results begin with part ``start``."""
        shape, k = self.shape, launch.constants["K"]
        rotated = self._rotated_offsets[launch.k]
        run = kernel.launch(
            launch.work.shape[0] * shape.sequences, k.means.pages if k.means else 0, self._dependent,
            (
                launch.work.shape[0], shape.heads, shape.rows, shape.padded, start, self._parts, self._columns, k.columns,
                min(UNLIMITED, position + shape.q_len), int(lengths), int(start == 0),
            ),
        )  # fmt: skip
        mean_q = rotated + shape.sequences * shape.padded * k.columns if k.means else 0
        return run, [
            *self._part_locations, (SCRATCH, rotated), (SCRATCH, self._scales[launch.k]), (SCRATCH, mean_q), (launch.work, 0),
            (kernel.constants, 0), (LENGTHS if lengths else launch.work, 0),
        ]  # fmt: skip

    @property
    def _part_locations(self) -> list[tuple[int, int]]:
        """Locations of partial results: of the sums, the largest scores and the totals, as (tensor index, element offset) pairs."""
        return [(SCRATCH, self._sums), (SCRATCH, self._largest), (SCRATCH, self._total)]

    def _prepare_merge(self) -> _LaunchTensors:
        shape = self.shape
        codecs = tuple((frame.codec, frame_columns.columns(frame.codec, self._dual)) for frame in self._v_frames)
        widths = tuple(len(columns) for _, columns in codecs)
        block_columns = next_power_of_two(max(widths)) if self._rotated else ROW_CHANNELS
        matrix = frame_columns.value_matrix(codecs, block_columns, str(self._device))
        # The loads of one block are in flight together.
        max_parts = ROW_VALUES // block_columns if self._rotated else ORDERED_PARTS
        block_parts = max(1, min(max_parts, max(ORDERED_WARP_PARTS, next_power_of_two(self._parts))))
        middle = next(iter(self._v_frames.values()))[1]
        launch = CachedLaunch(
            merge.merge_originals,
            (shape.sequences * shape.rows, -(-self.dim_v // ROW_CHANNELS), 1),
            (self._parts, middle, shape.rows, shape.padded, shape.heads, shape.q_len, matrix.shape[0]),
            {
                "SINK_LOGITS": self.options.sink_logits, "COLUMNS": self._columns, "WIDTHS": widths, "DIM": self.dim_v,
                "BLOCK_PARTS": block_parts, "BLOCK_COLUMNS": block_columns, "BLOCK_DIM": ROW_CHANNELS, "ROTATED": self._rotated,
                "DEPENDENT": self._dependent,
            },
            {"num_warps": ROW_WARPS if self._rotated else min(ROW_WARPS, block_parts // ORDERED_WARP_PARTS), **self._overlap},
        )  # fmt: skip
        return launch, [(OUT, 0), *self._part_locations, (matrix, 0), (SINKS, 0)]

    def _prepare_frame_merges(self) -> list[_LaunchTensors]:
        """Return one launch of ``merge.merge`` per value frame, which writes the sums in that frame."""
        first = MAPPED + len(self._mapped_frames)
        result = []
        for tensor_index, (frame, (start, stop)) in enumerate(self._v_frames.items(), first):
            channels = tuple(frame_columns.columns(frame.codec, self._dual))
            result.append(self._merge_into(tensor_index, [channels], frame_columns.frame_dim(frame.codec), start, stop, stop))
        return result

    def _prepare_products(self) -> list[_LaunchTensors]:
        """Return two launches: one merges the columns of all frames, and one multiplies them by the matrix from columns to channels."""
        shape, sums = self.shape, MAPPED + len(self._mapped_frames)
        codecs = tuple((frame.codec, frame_columns.columns(frame.codec, self._dual)) for frame in self._v_frames)
        matrix = frame_columns.value_matrix(codecs, 1, str(self._device))
        channels, stop = [], 0
        for _, columns in codecs:
            channels.append(tuple(range(stop, stop + len(columns))))
            stop += len(columns)
        middle = next(iter(self._v_frames.values()))[1]
        sequences = 1 if matrix.shape[0] == 1 else shape.sequences
        count = shape.sequences * shape.rows // sequences
        launch = CachedLaunch(
            rotation.rotate_sums,
            (sequences * -(-count // 16), -(-self.dim_v // frame_columns.BLOCK_COLUMNS), 1),
            (count, -(-count // 16), matrix.shape[0]),
            {
                "DIM": self.dim_v, "FRAME_DIM": stop, "BLOCK_DIM": rotation.sums_block_dim(stop), "ROWS": 16,
                "BLOCK_COLUMNS": frame_columns.BLOCK_COLUMNS, "ADD": False, "DEPENDENT": self._dependent,
            },
            self._overlap,
        )  # fmt: skip
        merged = self._merge_into(sums, channels, stop, 0, middle, self._parts)
        return [merged, (launch, [(OUT, 0), (sums, 0), (matrix, 0), (sums, 0)])]

    def _merge_into(
        self, out: int, channels_of_frames: list[tuple[int, ...]], dim: int, start: int, middle: int, stop: int
    ) -> _LaunchTensors:
        """Return a launch of ``merge.merge`` that writes ``dim`` channels to tensor ``out`` of the call.

        It merges parts ``[start, middle)`` of the first frame and parts ``[middle, stop)`` of the second frame. ``channels_of_frames``
        contains, for each frame, the channel of each column.
        """
        shape = self.shape
        block_parts = min(MERGE_PARTS, next_power_of_two(self._parts))
        fits_warp = block_parts <= MAX_PARTS
        block_columns = 128 if fits_warp else MERGE_COLUMNS
        channels = _column_channels(tuple(channels_of_frames), dim, block_columns, str(self._device))
        second_block = -(-len(channels_of_frames[0]) // block_columns)
        launch = CachedLaunch(
            merge.merge,
            (shape.sequences * shape.rows, channels.numel() // block_columns, 1),
            (self._parts, start, middle, stop, second_block, shape.rows, shape.padded, shape.heads, shape.q_len),
            {
                "SINK_LOGITS": self.options.sink_logits, "COLUMNS": self._columns, "DIM": dim, "BLOCK_PARTS": block_parts,
                "BLOCK_COLUMNS": block_columns, "DEPENDENT": self._dependent,
            },
            {"num_warps": 1 if fits_warp else 4, **self._overlap},
        )  # fmt: skip
        return launch, [(out, 0), *self._part_locations, (channels, 0), (SINKS, 0)]


class _ScratchAllocator:
    """Allocates parts of one scratch buffer. Sizes and offsets are in elements."""

    def __init__(self) -> None:
        self.size = 0

    def allocate(self, elements: int) -> int:
        first = self.size
        self.size += elements
        return first


def _global_mean_pages(launch: Launch) -> int:
    """Return how many pages' products each program of ``launch`` stores in global memory. It is 0 if shared memory is used."""
    means = launch.constants["K"].means
    return 0 if means is None or launch.constants["FAST"] else means.pages


def _page_query(q: torch.Tensor, frame: Frame) -> torch.Tensor:
    """Apply the value maps of the page of ``frame`` to ``q``, to match the coded keys."""
    assert frame.page is not None
    assert isinstance(frame.page.codec, CodecWithSidecars)
    return frame.page.codec.map_query(q.to(torch.float32), frame.page.streams)


def _add_signs(sums: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Return ``sums`` with the sums of QJL signs, which are its last columns, rotated to the codec's frame and added to the others.

    Without signs, ``sums`` is returned unchanged.
    """
    qjl = codec.sidecar(Qjl)
    return sums if qjl is None else sums[..., : codec.dim] + qjl.rotation.inverse(sums[..., codec.dim :])


@lru_cache(maxsize=256)
def _column_channels(channels_of_frames: tuple[tuple[int, ...], ...], missing: int, block: int, device: str) -> torch.Tensor:
    """Return the channel of each column of all frames, int32 ``[column]``. Each frame is padded to whole blocks of ``block`` columns.

    Columns without a channel are -1 in ``channels_of_frames`` and ``missing`` in the result.
    """
    parts = []
    for channels in channels_of_frames:
        result = torch.tensor([channel if channel >= 0 else missing for channel in channels], dtype=torch.int32, device="cpu")
        parts.append(torch.nn.functional.pad(result, (0, -result.numel() % block), value=missing))
    return torch.cat(parts).to(device)
