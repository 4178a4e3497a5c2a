"""Decoding of a layer's keys or values to a scratch buffer, for attention with many queries.

If all packed tokens share one tile loader, they are decoded to the coded frame, in the loader's column order: only queries and sums of
values are multiplied by a cached matrix, once (OCTOPUS Eq. 13).
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvpack.formats.products import product
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.kernels.decode import sides, tiles
from kvpack.kernels.decode.rows import PackedPart
from kvpack.kernels.tiles import frame_columns

from . import layer_sharing, segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpack.formats.base import Codec
    from kvpack.kernels.tiles.layers import PackedRun, Side

    TensorFunction = Callable[[torch.Tensor], torch.Tensor]

DECODED_BYTES = 64 << 20
"""Maximum bytes of float32 values that PyTorch decodes together if there is no fused kernel."""

ALIGNMENT = 64
"""Block sizes are multiples of this many elements."""


class DecodedFrame(NamedTuple):
    """Frame of decoded keys or values: the coded frame of ``codec``, or the original frame if ``codec`` is None.

    ``page`` is the page that stores the value maps of this frame, or None if there are none.
    """

    codec: Codec | None = None
    page: PackedRun | None = None

    @property
    def is_original(self) -> bool:
        """True if columns are the channels of the original frame, in order."""
        return self.codec is None or (self.page is None and _is_in_order(self.codec))

    def columns(self, dim: int) -> int:
        """Return the number of columns in this frame for a head dim of ``dim``."""
        return dim if self.codec is None else len(frame_columns.columns(self.codec, 0))

    def query_map(self, heads: int, dtype: torch.dtype, device: torch.device) -> tuple[TensorFunction, float]:
        """Return a function that maps queries to this frame, and a factor for their scores.

        Queries are 16-bit ``[batch, q_head, query, dim]``. ``heads`` is the number of KV heads.
        """
        if self.codec is not None and self.page is not None:
            return partial(_page_queries, self.codec, self.page, heads), 1.0
        matrix, factor = (None, 1.0) if self.codec is None else _column_matrix(self.codec, dtype, str(device))
        return _with_contiguous_channels if matrix is None else lambda q: torch.matmul(q, matrix), factor

    def sum_map(self, heads: int, dtype: torch.dtype, device: torch.device) -> TensorFunction:
        """Return a function that maps sums of values from this frame to the original frame, in ``dtype``.

        Sums are float32 ``[batch, q_head, query, column]``. ``heads`` is the number of KV heads.
        """
        if self.codec is not None and self.page is not None:
            return partial(_page_originals, self.codec, self.page, heads, dtype)
        matrix = None if self.codec is None else _value_matrix(self.codec, str(device))
        return lambda sums: (sums if matrix is None else product(sums, matrix)).to(dtype)

    def map_values(self, x: torch.Tensor) -> torch.Tensor:
        """Map 16-bit values ``[batch, kv_head, token, dim]`` from the original frame to this one."""
        if self.codec is None:
            return x
        if self.page is not None:
            assert isinstance(self.page.codec, CodecWithSidecars)
            mapped = x.to(torch.float32)
            for value_map in self.page.codec.value_maps:
                mapped = value_map.forward(mapped, self.page.streams)
            turned = torch.nn.functional.pad(self.codec.rotation.forward(mapped), (0, 1))
            return turned.index_select(3, _column_channels(self.codec, str(x.device))).to(x.dtype)
        matrix, factor = _column_matrix(self.codec, x.dtype, str(x.device))
        if matrix is None:
            return x
        # The factor is applied before the product is rounded.
        return torch.addmm(matrix[0], x.reshape(-1, x.shape[3]), matrix, beta=0, alpha=factor).view(*x.shape[:3], -1)

    def store_function(
        self, batch: int, heads: int, dtype: torch.dtype, device: torch.device
    ) -> Callable[[torch.Tensor, torch.Tensor], object]:
        """Return a function (x, out) that maps values ``x`` ``[batch, kv_head, token, dim]`` to this frame and stores them in ``out``."""
        matrix = None
        if self.codec is not None and self.page is None:
            matrix, factor = _column_matrix(self.codec, dtype, str(device))
        if matrix is None or batch != 1:
            return lambda x, out: out.copy_(self.map_values(x))
        by_head = matrix.expand(heads, *matrix.shape)

        def store(x: torch.Tensor, out: torch.Tensor) -> None:
            sequence = out[0]
            torch.baddbmm(sequence, x[0], by_head, beta=0, alpha=factor, out=sequence)

        return store


def _with_contiguous_channels(q: torch.Tensor) -> torch.Tensor:
    return q if q.stride(3) == 1 else q.contiguous()


def _page_queries(codec: Codec, page: PackedRun, heads: int, q: torch.Tensor) -> torch.Tensor:
    grouped = q.reshape(q.shape[0], heads, -1, q.shape[3]).to(torch.float32)
    turned = torch.nn.functional.pad(page.codec.query(grouped, page.streams), (0, 1))
    return turned.index_select(3, _column_channels(codec, str(q.device))).to(q.dtype).view(*q.shape[:3], -1)


def _page_originals(codec: Codec, page: PackedRun, heads: int, dtype: torch.dtype, sums: torch.Tensor) -> torch.Tensor:
    columns = _column_channels(codec, str(sums.device))
    coded = sums.new_zeros(*sums.shape[:3], codec.dim + 1).index_copy_(3, columns, sums)[..., : codec.dim]
    grouped = coded.reshape(sums.shape[0], heads, -1, codec.dim)
    return page.original(grouped).view(*sums.shape[:3], -1).to(dtype)


@lru_cache(maxsize=256)
def _channels(codec: Codec) -> torch.Tensor:
    """Return the channel of each column of the codec's tiles, int64 ``[column]``. Columns without a channel get the head dim."""
    channels = [channel if channel >= 0 else codec.dim for channel in frame_columns.columns(codec, 0)]
    return torch.tensor(channels, dtype=torch.int64, device="cpu")


@lru_cache(maxsize=256)
def _column_channels(codec: Codec, device: str) -> torch.Tensor:
    with torch.inference_mode(False):
        return _channels(codec).to(device)


@lru_cache(maxsize=256)
def _column_matrix(codec: Codec, dtype: torch.dtype, device: str) -> tuple[torch.Tensor | None, float]:
    """Return the signs of the matrix from channels to columns, ``[dim, column]`` in ``dtype``, and the magnitude of its nonzero entries.

    The signs are None if the matrix is the identity.
    """
    with torch.inference_mode(False):
        signs, size = frame_columns.column_signs(codec)
        return (None, 1.0) if _is_in_order(codec) else (signs.T.contiguous().to(dtype).to(device), size)


@lru_cache(maxsize=256)
def _value_matrix(codec: Codec, device: str) -> torch.Tensor | None:
    return None if _is_in_order(codec) else frame_columns.value_matrix(((codec, frame_columns.columns(codec, 0)),), 1, device)[0]


def _is_in_order(codec: Codec) -> bool:
    return codec.rotation.kind == "none" and frame_columns.columns(codec, 0) == tuple(range(codec.dim))


def decoded_frame(side: Side) -> DecodedFrame:
    """Return the frame that ``side`` is decoded to: the coded frame if all packed tokens share one and a tile loader decodes them.

    Otherwise, return the original frame.
    """
    packed = [segment for segment in segments.side_segments(side).segments if segment.page is not None]
    loader = tiles.find_loader(packed[0].codec) if packed else None
    # Offsets that all tokens share, such as a mean, are not in any column.
    if loader is None or loader.offset:
        return DecodedFrame()
    first = packed[0].frame
    if any(segment.raw or not segment.exact or (segment is not packed[0] and segment.frame != first) for segment in packed):
        return DecodedFrame()
    return DecodedFrame(*first)


class DecodedBlock:
    """Tokens ``[start, stop)`` of keys or values. Launches are prepared once, and each call decodes the block again."""

    def __init__(self, side: Side, frame: DecodedFrame, start: int, stop: int, dtype: torch.dtype) -> None:
        self._frame, self._dtype, self._stop = frame, dtype, stop
        self._first = _group_start(side, start)
        self._skipped, tokens, width = start - self._first, stop - self._first, frame.columns(side.dim)
        self._packed = side.tokens - side.tail.shape[2]
        self._shape = side.batch, side.heads, tokens, width
        self._strides = tokens * width, side.batch * tokens * width, width, 1
        # Rounded up, so that the next tensor in the scratch buffer has the same alignment.
        self.elements = -(-side.heads * self._strides[1] // ALIGNMENT) * ALIGNMENT
        self._table_at = 0
        self._decoding = None
        if frame.codec is not None and self._first < self._packed:
            work = _work_table(side, frame.codec, self._first, min(stop, self._packed))
            self._decoding = tiles.prepare(frame.codec, work, self._shape, self._strides, dtype)
        self._begin = max(self._first, self._packed)
        self._raw = side.batch, side.heads, stop - self._begin, width
        self._raw_at = (self._begin - self._first) * width
        self._store = frame.store_function(side.batch, side.heads, dtype, side.device)

    def make_template(self, side: Side, values: bool, tables: layer_sharing.WorkTables) -> DecodedBlock | None:
        """Return a block that decodes any side of the same kind as ``side``, or None if sides of this kind cannot share one.

        The block's work table is added to ``tables``: as a table of values if ``values`` is True, otherwise as a table of keys.
        """
        block = object.__new__(DecodedBlock)
        block.__dict__.update(self.__dict__)
        if self._decoding is not None:
            work = self._decoding.work
            if work.copied or not layer_sharing.reads_stored_streams(side):
                return None
            block._table_at = tables.add(values, work.rows, self._first + work.rows[:, 2])
            block._decoding = self._decoding._replace(work=work._replace(table=work.table.new_empty(0), keep_alive=()))
        return block

    def decode(self, side: Side, tables: tuple[torch.Tensor, int] | None, scratch: torch.Tensor, offset: int) -> None:
        """Decode the block from ``side`` into ``scratch``, beginning at element ``offset``.

        ``tables`` are the layer's shared work tables (``WorkTables.bind``), or None if the block has its own.
        """
        if self._decoding is not None:
            self._decoding(scratch, offset, table=None if tables is None else (tables[0], tables[1] + self._table_at))
            if self._stop <= self._packed:
                return
        if self._frame.codec is None:
            out = scratch.as_strided(self._shape, self._strides, offset)
            for first, last in sides.unpack_into(side, self._first, self._stop, out):
                for begin, end, source in _decode_in_parts(side, first, last):
                    out[:, :, begin - self._first : end - self._first] = source
        else:
            tail, begin, stop = side.tail, self._begin - self._packed, self._stop - self._packed
            if begin or stop < tail.shape[2]:
                tail = tail[:, :, begin:stop]
            self._store(tail.to(self._dtype), scratch.as_strided(self._raw, self._strides, offset + self._raw_at))

    def tokens(self, scratch: torch.Tensor, offset: int, start: int, stop: int, splits: int = 1) -> torch.Tensor:
        """Return tokens ``[start, stop)`` of the block, which was decoded into ``scratch`` at element ``offset``.

        The shape is ``[batch * splits, kv_head, token / splits, channel or column]``. The result is a view, unless several sequences are
        split and only some of their tokens are requested.
        """
        batch, heads, tokens, width = self._shape
        by_batch, by_head, by_token, _ = self._strides
        first, count = offset + (self._skipped + start) * by_token, (stop - start) // splits
        if batch == 1 or splits * count == tokens:
            by_split = count * by_token if splits > 1 else by_batch
            return scratch.as_strided((batch * splits, heads, count, width), (by_split, by_head, by_token, 1), first)
        shape, strides = (batch, splits, heads, count, width), (by_batch, count * by_token, by_head, by_token, 1)
        return scratch.as_strided(shape, strides, first).reshape(batch * splits, heads, count, width)


def _work_table(side: Side, codec: Codec, start: int, stop: int) -> tiles.PageTable:
    """Build the work table for ``tiles.decode`` to decode the packed tokens ``[start, stop)`` of ``side``."""
    parts = []
    for segment in segments.side_segments(side).segments:
        begin, end = max(start, segment.first), min(stop, segment.first + segment.tokens)
        if begin < end:
            sliced = segments.slice_segment(segment, begin - segment.first, end - segment.first)
            parts.append(PackedPart(sliced.streams, end - begin, begin - start))
    return tiles.build_work(codec, parts, side.batch, side.heads, side.device)


def _group_start(side: Side, token: int) -> int:
    """Return the first token of the token group that contains ``token``."""
    first = 0
    for page in side.runs:
        if first <= token < first + page.tokens:
            return token - (token - first) % page.codec.group_tokens
        first += page.tokens
    return token


def _decode_in_parts(side: Side, start: int, stop: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Decode tokens ``[start, stop)`` with PyTorch, at most ``DECODED_BYTES`` bytes at a time.

    Yields (start, stop, values) for each part.
    """
    first = 0
    max_tokens = max(1, DECODED_BYTES // (4 * side.batch * side.heads * side.dim))
    for page in side.runs:
        # Token groups are decoded whole.
        step = max(page.codec.group_tokens, max_tokens // page.codec.group_tokens * page.codec.group_tokens)
        last = min(stop, first + page.tokens)
        for begin in range(max(start, first), last, step):
            end = min(begin + step, last)
            yield begin, end, page.decode(begin - first, end - first)
        first += page.tokens
    if stop > max(start, first):
        begin = max(start, first)
        yield begin, stop, side.tail[:, :, begin - first : stop - first]
