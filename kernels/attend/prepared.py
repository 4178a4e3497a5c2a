"""A prepared attention call: everything that is the same for all queries of one shape over one layer is done once.

Each call then needs two allocations and, in the common case, three launches: rotate the queries into the coded frames, run split kernels
for the packed tokens and for a raw tail, and merge, which rotates the result back.
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
from kvpack.kernels.tiles import device_tables, frame_columns
from kvpack.kernels.triton_internals import CachedLaunch, LaunchChain

from . import means, merge, plan, rotation, split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.formats.base import Codec

    from .plan import Launch
    from .segments import Frame

    _Placed = tuple[CachedLaunch, Sequence[tuple[int | torch.Tensor, int]]]

MIN_ROWS, MAX_ROWS = 8, 16
"""Query rows of one program: the rows of a block are the short side of the matrix products."""

MERGE_PARTS, MERGE_COLUMNS = 512, 32
"""Parts of one program of the merge at most, and its columns."""

MAX_PARTS = 32
"""Up to which one warp merges them: its lanes then have columns of their own, 4 each."""

MAX_ROTATED_ROWS = 64
"""Rows of all sequences up to which the merge also rotates, row by row: of 256 it took 26 us on an H200, a merge and products of 768 10."""

MANY_ROWS, ROTATED_ROWS = 1024, 64
"""Padded rows from which a program rotates queries of several sequences, and how many of their rows."""

ROW_VALUES, ROW_CHANNELS, ROW_WARPS = 1 << 15, 32, 8
"""Columns of all parts that such a program has in registers at once, the channels that it writes, and its warps."""

ORDERED_ROWS, ORDERED_PARTS, ORDERED_WARP_PARTS = 256, 512, 32
"""Maximum number of rows, and of parts at once, if columns are channels and nothing is rotated; and the parts of each warp."""

SCRATCH, QUERY, OUT, LENGTHS, STARTS, SINKS, OWN = range(7)
"""The tensors of a call, in the order in which launches number them; from OWN on the queries of pages that map their values, and sums."""

LOG2_E = math.log2(math.e)
EVERYTHING = 1 << 30
"""A window, or a look ahead, beyond any token."""


class QueryShape(NamedTuple):
    """Shape of a call's queries: ``q_len`` queries of ``q_heads`` heads with ``dim`` channels, for ``batch`` sequences of ``heads`` KV
    heads."""

    batch: int
    q_heads: int
    q_len: int
    dim: int
    heads: int

    @property
    def rows(self) -> int:
        """Query rows of one KV head."""
        return self.q_heads // self.heads * self.q_len

    @property
    def block(self) -> int:
        """Query rows of one program."""
        return min(MAX_ROWS, max(MIN_ROWS, next_power_of_two(self.rows)))

    @property
    def sequences(self) -> int:
        """Sequences of the batch times KV heads."""
        return self.batch * self.heads

    @property
    def padded(self) -> int:
        """Rows, rounded up to whole blocks."""
        return -(-self.rows // self.block) * self.block


class Options(NamedTuple):
    """The options of a ``kvpack.attend`` call. ``lengths``, ``starts`` and ``sink_logits`` are True if calls pass them."""

    scale: float
    causal: bool = True
    softcap: float | None = None
    sliding_window: int | None = None
    lengths: bool = False
    sink_logits: bool = False
    starts: bool = False


class Prepared:
    """``launches`` over one layer for queries of ``shape`` and ``dtype``; the value frames of ``launches`` are side by side.

    ``position`` is the position of the first query in a sequence of full length. ``masked`` says for each launch whether it reads the
    lengths of sequences, and ``cut`` whether the device skips tokens before a sequence's windows, as it does for a sequence with a start.
    ``dual``: launches may use two tokens per row.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        shape: QueryShape,
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
        self._largest, self._total = places.take(rows * parts), places.take(rows * parts)
        self._sums = places.take(rows * parts * self._columns)
        self._k_frames = list(dict.fromkeys(launch.k for launch in launches))
        # The plain frames are side by side: one launch rotates the query into all of them.
        self._own_queries = [frame for frame in self._k_frames if frame.query_codec is None]
        own_last = (*self._plain(), *self._own_queries)
        self._turned = {frame: places.take(rows * len(frame_columns.columns(frame.codec, dual))) for frame in own_last}
        # Maps of values change the length of a query, which rotations keep.
        self._scales = dict.fromkeys(self._plain(), places.take(rows)) | {frame: places.take(rows) for frame in self._own_queries}
        self._v_frames: dict[Frame, tuple[int, int]] = {}
        stop = 0
        for launch in launches:
            start, stop = stop, stop + launch.parts
            self._v_frames[launch.v] = (self._v_frames.get(launch.v, (start,))[0], stop)
        own_channels = all(frame.page is None for frame in self._v_frames)
        self._merges_originals = own_channels and len(self._v_frames) <= 2
        self._rotated = not all(frame_columns.in_order(frame.codec, frame_columns.columns(frame.codec, dual)) for frame in self._v_frames)
        self._few_rows = shape.sequences * shape.rows <= (MAX_ROTATED_ROWS if self._rotated else ORDERED_ROWS)
        self._mean_products = [places.take(0 if launch.means is None else rows * launch.means.pages) for launch in launches]
        self._scratch = places.taken
        launches_of = [*self._prepared_rotations(), *self._prepared_means()]
        self._rotations = len(launches_of)
        launches_of += self._prepared_splits(position, masked, cut or options.starts)
        if not self._merges_originals:
            launches_of += self._prepared_frame_merges()
        else:
            launches_of += [self._prepared_merge()] if self._few_rows else self._prepared_products()
        self._chain = LaunchChain(launches_of)

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
        return self._run(self._given(q.contiguous(), sink_logits, lengths, starts), 0)

    @property
    def plain(self) -> bool:
        """True if a call runs only kernels: no page maps its values by torch operations, which depend on the caller's modes."""
        return not self._own_queries and all(frame.page is None for frame in self._v_frames)

    def after_rotation(self, q: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that runs the launches after the rotation of ``q``, without lengths, starts or sinks: split kernels and merge.
        """
        given = self._given(q.contiguous(), None, None, None)
        self._chain(given)
        return lambda: self._run(given, self._rotations)

    def _given(
        self, q: torch.Tensor, sink_logits: torch.Tensor | None, lengths: torch.Tensor | None, starts: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Return the tensors of a call, in the order of SCRATCH and those after it."""
        shape, device = self.shape, self._device
        scratch = torch.empty(self._scratch, dtype=torch.float32, device=device)
        given = [scratch, q]
        if self._merges_originals:
            # The shape of the queries is that of the result, except for the values' dim.
            out = torch.empty_like(q) if self.dim_v == shape.dim else q.new_empty(*q.shape[:3], self.dim_v)
            given.append(out)
        else:
            # The merges add nothing to what is there.
            given.append(scratch)
        given.append(scratch if lengths is None else lengths.to(device, torch.int32))
        given.append(scratch if starts is None else starts.to(device, torch.int32))
        given.append(scratch if sink_logits is None else sink_logits.to(device, torch.float32) * LOG2_E)
        for frame in self._own_queries:
            given.append(_inner(q.view(shape.batch, shape.heads, -1, shape.dim), frame).contiguous())
        if not self._merges_originals:
            for frame in self._v_frames:
                dims = shape.batch, shape.heads, shape.rows, frame_columns.frame_dim(frame.codec)
                # The merges write channels that have columns.
                covered = len({*frame_columns.columns(frame.codec, self._dual)} - {-1}) == dims[3]
                given.append((torch.empty if covered else torch.zeros)(dims, dtype=torch.float32, device=device))
        elif not self._few_rows:
            columns = sum(len(frame_columns.columns(frame.codec, self._dual)) for frame in self._v_frames)
            given.append(torch.empty(shape.sequences * shape.rows, columns, dtype=torch.float32, device=device))
        return given

    def _run(self, given: list[torch.Tensor], first: int) -> torch.Tensor:
        """Run all launches from number ``first`` on and return the result."""
        self._chain(given, first)
        if self._merges_originals:
            return given[OUT]
        shape = self.shape
        sums = dict(zip(self._v_frames, given[OWN + len(self._own_queries) :], strict=True))
        return self._originals(sums).reshape(shape.batch, shape.q_heads, shape.q_len, self.dim_v)

    def _originals(self, sums: dict[Frame, torch.Tensor]) -> torch.Tensor:
        """Return the sums of all frames, ``[batch, kv_head, row, dim]`` in the original frame."""
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
        frame_dim, dim, matrices = sums.shape[3], codec.dim, frame_columns.frame_matrix(codec, str(sums.device))
        sequences = 1 if matrices.shape[0] == 1 else sums.shape[0] * sums.shape[1]
        count = math.prod(sums.shape[:3]) // sequences
        out = torch.empty(*sums.shape[:3], dim, dtype=dtype, device=sums.device)
        rotation.rotate_sums[(sequences * -(-count // 16), -(-dim // frame_columns.BLOCK_COLUMNS))](
            out, sums, matrices, sums if before is None else before, count, -(-count // 16), matrices.shape[0],
            DIM=dim, FRAME_DIM=frame_dim, BLOCK_DIM=rotation.sums_block(frame_dim), ROWS=16,
            BLOCK_COLUMNS=frame_columns.BLOCK_COLUMNS, ADD=before is not None, DEPENDENT=self._dependent, **self._overlap,
        )  # fmt: skip
        return out

    def _plain(self) -> list[Frame]:
        """Return the key frames that queries reach by a cached matrix alone."""
        return [frame for frame in self._k_frames if frame.query_codec is not None]

    def _prepared_rotations(self) -> list[_Placed]:
        """Return one launch for all plain frames, and one for each frame of a page that maps its values and so needs its own queries."""
        plain = [(QUERY, self._plain())] if self._plain() else []
        result: list[_Placed] = []
        for query, frames in (*plain, *((OWN + number, [frame]) for number, frame in enumerate(self._own_queries))):
            codecs = tuple((frame.query_codec or frame.codec, frame_columns.columns(frame.codec, self._dual)) for frame in frames)
            matrix, blocks = frame_columns.query_matrix(codecs, str(self._device))
            shape, options = self.shape, self.options
            per_score = options.scale / options.softcap if options.softcap else options.scale * LOG2_E
            count = shape.sequences * shape.padded
            rows = ROTATED_ROWS if matrix.shape[0] == 1 and count >= MANY_ROWS else shape.block
            launch = CachedLaunch(
                rotation.rotate_queries,
                (-(-count // rows), blocks.shape[0], 1),
                (per_score, shape.rows, shape.padded, shape.sequences, matrix.shape[2], matrix.shape[0]),
                {
                    "DIM": shape.dim, "BLOCK_DIM": rotation.query_block(shape.dim), "ROWS": rows,
                    "BLOCK_COLUMNS": frame_columns.BLOCK_COLUMNS, "DEPENDENT": self._dependent, "EARLY": self.launches[0].fills,
                },
                self._overlap,
            )  # fmt: skip
            turned, scales = (SCRATCH, self._turned[frames[0]]), (SCRATCH, self._scales[frames[0]])
            result.append((launch, [turned, scales, (query, 0), (matrix, 0), (blocks, 0)]))
        return result

    def _prepared_means(self) -> list[_Placed]:
        """Return, for each launch whose keys have means, a launch that multiplies queries by the means of its pages."""
        shape = self.shape
        result: list[_Placed] = []
        for launch, place in zip(self.launches, self._mean_products, strict=True):
            if launch.means is not None:
                run, columns = means.launch_of(
                    launch.means, launch.k.codec, self._dual, shape.heads, shape.sequences, shape.padded, shape.block, self._dependent,
                    self.launches[0].fills,
                )  # fmt: skip
                turned = (SCRATCH, self._turned[launch.k])
                result.append((run, [(SCRATCH, place), turned, (launch.means.table, 0), (columns, 0)]))
        return result

    def _prepared_splits(self, position: int, masked: Sequence[bool], cut: bool) -> list[_Placed]:
        shape, options = self.shape, self.options
        numbers = device_tables.numbers(str(self._device))
        # Without starts, the place of their pointer is a constant.
        no_starts = () if options.starts else (None,)
        row_blocks = shape.padded // shape.block
        result: list[_Placed] = []
        start = 0
        for launch, lengths, products in zip(self.launches, masked, self._mean_products, strict=True):
            items = launch.work.shape[0]
            rows = 2 * max(MIN_ROWS // 2, next_power_of_two(shape.rows)) if launch.dual else shape.block
            tables = launch.constants["TABLES"].nbytes
            run = CachedLaunch(
                split.attend_split,
                (items * row_blocks * shape.sequences, 1, 1),
                (
                    *no_starts, (options.softcap or 1.0) * LOG2_E, items, shape.heads, row_blocks, shape.rows, start, self._parts,
                    position, shape.q_len, 0 if options.causal else EVERYTHING, options.sliding_window or EVERYTHING,
                    0 if launch.means is None else launch.means.pages,
                ),
                {
                    **launch.constants, "SOFTCAP": options.softcap is not None, "ROWS": rows, "BLOCK": shape.block,
                    "COLUMNS": self._columns, "LENGTHS": lengths, "CUT": cut, "DEPENDENT": self._dependent, "FIRST": start == 0,
                },
                {"num_warps": launch.shape.warps, **self._overlap},
                partial(shared_table.allow, table_bytes=tables) if tables or launch.constants["PATCHES"] else None,
            )  # fmt: skip
            places: list[tuple[int | torch.Tensor, int]] = [
                *self._partials, (SCRATCH, self._turned[launch.k]), (SCRATCH, self._scales[launch.k]), (SCRATCH, products),
                (launch.work, 0), (numbers, 0), (launch.tables[0], 0), (launch.tables[1], 0),
                (LENGTHS if options.lengths else launch.work, 0),
            ]  # fmt: skip
            result.append((run, [*places, (STARTS, 0)] if options.starts else places))
            start += launch.parts
        return result

    @property
    def _partials(self) -> list[tuple[int, int]]:
        """Places of the partial results in the scratch: sums, largest scores and totals."""
        return [(SCRATCH, self._sums), (SCRATCH, self._largest), (SCRATCH, self._total)]

    def _prepared_merge(self) -> _Placed:
        shape = self.shape
        codecs = tuple((frame.codec, frame_columns.columns(frame.codec, self._dual)) for frame in self._v_frames)
        widths = tuple(len(columns) for _, columns in codecs)
        block_columns = next_power_of_two(max(widths)) if self._rotated else ROW_CHANNELS
        matrix = frame_columns.value_matrix(codecs, block_columns, str(self._device))
        # Loads of one block wait together.
        most_parts = ROW_VALUES // block_columns if self._rotated else ORDERED_PARTS
        block_parts = max(1, min(most_parts, max(ORDERED_WARP_PARTS, next_power_of_two(self._parts))))
        second = next(iter(self._v_frames.values()))[1]
        launch = CachedLaunch(
            merge.merge_originals,
            (shape.sequences * shape.rows, -(-self.dim_v // ROW_CHANNELS), 1),
            (self._parts, second, shape.rows, shape.padded, shape.heads, shape.q_len, matrix.shape[0]),
            {
                "SINK_LOGITS": self.options.sink_logits, "COLUMNS": self._columns, "WIDTHS": widths, "DIM": self.dim_v,
                "BLOCK_PARTS": block_parts, "BLOCK_COLUMNS": block_columns, "BLOCK_DIM": ROW_CHANNELS, "ROTATED": self._rotated,
                "DEPENDENT": self._dependent,
            },
            {"num_warps": ROW_WARPS if self._rotated else min(ROW_WARPS, block_parts // ORDERED_WARP_PARTS), **self._overlap},
        )  # fmt: skip
        return launch, [(OUT, 0), *self._partials, (matrix, 0), (SINKS, 0)]

    def _prepared_frame_merges(self) -> list[_Placed]:
        """Return a merge for each value frame, whose sums are in the order of the pages' queries."""
        first = OWN + len(self._own_queries)
        result = []
        for number, (frame, (start, stop)) in enumerate(self._v_frames.items(), first):
            channels = tuple(frame_columns.columns(frame.codec, self._dual))
            result.append(self._merge_into(number, [channels], frame_columns.frame_dim(frame.codec), start, stop, stop))
        return result

    def _prepared_products(self) -> list[_Placed]:
        """Return a merge of all frames' columns side by side, and their product with the matrix that maps them to channels."""
        shape, sums = self.shape, OWN + len(self._own_queries)
        codecs = tuple((frame.codec, frame_columns.columns(frame.codec, self._dual)) for frame in self._v_frames)
        matrix = frame_columns.value_matrix(codecs, 1, str(self._device))
        places, stop = [], 0
        for _, columns in codecs:
            places.append(tuple(range(stop, stop + len(columns))))
            stop += len(columns)
        second = next(iter(self._v_frames.values()))[1]
        sequences = 1 if matrix.shape[0] == 1 else shape.sequences
        count = shape.sequences * shape.rows // sequences
        launch = CachedLaunch(
            rotation.rotate_sums,
            (sequences * -(-count // 16), -(-self.dim_v // frame_columns.BLOCK_COLUMNS), 1),
            (count, -(-count // 16), matrix.shape[0]),
            {
                "DIM": self.dim_v, "FRAME_DIM": stop, "BLOCK_DIM": rotation.sums_block(stop), "ROWS": 16,
                "BLOCK_COLUMNS": frame_columns.BLOCK_COLUMNS, "ADD": False, "DEPENDENT": self._dependent,
            },
            self._overlap,
        )  # fmt: skip
        merged = self._merge_into(sums, places, stop, 0, second, self._parts)
        return [merged, (launch, [(OUT, 0), (sums, 0), (matrix, 0), (sums, 0)])]

    def _merge_into(self, out: int, places: list[tuple[int, ...]], dim: int, first: int, second: int, last: int) -> _Placed:
        """Return a merge of parts ``[first, second)``, and of a second frame ``[second, last)``; columns go to their place in ``dim`` of
        ``out``."""
        shape = self.shape
        block_parts = min(MERGE_PARTS, next_power_of_two(self._parts))
        few = block_parts <= MAX_PARTS
        block_columns = 128 if few else MERGE_COLUMNS
        channels = _channels(tuple(places), dim, block_columns, str(self._device))
        second_block = -(-len(places[0]) // block_columns)
        launch = CachedLaunch(
            merge.merge,
            (shape.sequences * shape.rows, channels.numel() // block_columns, 1),
            (self._parts, first, second, last, second_block, shape.rows, shape.padded, shape.heads, shape.q_len),
            {
                "SINK_LOGITS": self.options.sink_logits, "COLUMNS": self._columns, "DIM": dim, "BLOCK_PARTS": block_parts,
                "BLOCK_COLUMNS": block_columns, "DEPENDENT": self._dependent,
            },
            {"num_warps": 1 if few else 4, **self._overlap},
        )  # fmt: skip
        return launch, [(out, 0), *self._partials, (channels, 0), (SINKS, 0)]


class _Places:
    """Allocates offsets in one scratch buffer, in elements."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, elements: int) -> int:
        """Return the offset of the next ``elements`` elements."""
        first = self.taken
        self.taken += elements
        return first


def _inner(q: torch.Tensor, frame: Frame) -> torch.Tensor:
    """Return the query in the codec's own frame: scaled and ordered by the page of the frame."""
    assert frame.page is not None
    assert isinstance(frame.page.codec, WithSideCars)
    return frame.page.codec.inner_query(q.to(torch.float32), frame.page.streams)


def _with_signs(sums: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Join the sums in ``codec``'s frame with those of its signs, if it has any."""
    qjl = codec.side_car(Qjl)
    return sums if qjl is None else sums[..., : codec.dim] + qjl.rotation.inverse(sums[..., codec.dim :])


@lru_cache(maxsize=256)
def _channels(places: tuple[tuple[int, ...], ...], none: int, block: int, device: str) -> torch.Tensor:
    """Return the channel of each column of each frame, int32, padded to whole blocks; ``none`` for columns without one (-1 in ``places``).
    """
    parts = []
    for channels in places:
        result = torch.tensor([channel if channel >= 0 else none for channel in channels], dtype=torch.int32, device="cpu")
        parts.append(torch.nn.functional.pad(result, (0, -result.numel() % block), value=none))
    return torch.cat(parts).to(device)
