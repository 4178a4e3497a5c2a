"""C descriptions of a side (a layer's keys or values): the position of each page, and the addresses and strides of its streams.

Descriptions are cached with the packed tokens they describe, so that a growing cache describes only its new pages.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy
import torch

from kvpack.formats import scale_range
from kvpack.formats.base import Codec
from kvpack.formats.basis import BasisRows
from kvpack.formats.klt import Klt
from kvpack.formats.outliers import VALUES, Outliers
from kvpack.formats.raw import Raw
from kvpack.formats.sidecars import CodecWithSidecars

from . import codecs, library

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .codecs import CodecDescription

    Integers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

RAW_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_TORCH_DTYPES = {"U8": torch.uint8, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


class Stretch(Protocol):
    """Consecutive pages whose streams are concatenated. ``ends`` contains the number of tokens up to the end of each page."""

    @property
    def codec(self) -> Codec: ...
    @property
    def ends(self) -> Integers: ...
    @property
    def streams(self) -> Mapping[str, torch.Tensor]: ...


class CodedFrame(Protocol):
    """Coded frame of some tokens, with a map of queries into the frame and a map of sums out of it."""

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """Map queries ``[batch, kv_head, row, dim]`` to this frame, so that they can be multiplied by coded keys."""

    def original(self, sums: torch.Tensor) -> torch.Tensor:
        """Map sums of values ``[batch, kv_head, row, dim]`` from this frame to the original frame."""


class Side(Protocol):
    """The keys or the values of a layer: packed pages followed by a raw tail ``[batch, kv_head, token, dim]``."""

    @property
    def codec(self) -> Codec: ...
    @property
    def runs(self) -> Any: ...
    @property
    def tail(self) -> torch.Tensor: ...
    @property
    def tokens(self) -> int: ...
    @property
    def packed_tokens(self) -> int: ...
    @property
    def heads(self) -> int: ...


class SidePart(NamedTuple):
    """Tokens ``[start, stop)`` of a layer's keys or values that share a codec and a coded frame. ``frame`` is None for the original frame.

    ``segments`` is the C table of the pages (see ``_segment_table``), and ``address`` is its address.
    """

    start: int
    stop: int
    codec: Codec
    segments: Integers
    address: int
    frame: CodedFrame | None

    def to_struct(self, description: CodecDescription) -> library.SideArgument:
        return library.SideArgument(ctypes.pointer(description.struct), self.address, len(self.segments))

    def describe(self) -> CodecDescription:
        """Return the C description of the codec. It is not stored here, because there are many parts, and tables are large."""
        result = codecs.describe(self.codec)
        assert result is not None
        return result


MAX_FRAMES = 64
"""Maximum number of coded frames per side. Each needs its own queries and sums; PyTorch handles sides with more frames."""

_stretches: WeakKeyDictionary[Any, tuple[Integers, Any] | None] = WeakKeyDictionary()


def side_parts(side: Side) -> list[SidePart] | None:
    """Return the parts of ``side``: its pages, then its tail.

    Returns None if the C kernels do not support the codec, sidecars or strides.
    """
    parts: list[SidePart] = []
    packed = side.packed_tokens
    if packed:
        packed_parts = _packed_parts(side)
        if packed_parts is None:
            return None
        parts += packed_parts
    if side.tail.shape[2]:
        row = _address_and_strides(side.tail)
        if row is None:
            return None
        segments = numpy.array([[packed, side.tail.shape[2], *row]], numpy.int64)
        tail = _raw_codec(side.codec.dim, side.tail.dtype)
        parts.append(SidePart(packed, packed + side.tail.shape[2], tail, segments, segments.ctypes.data, None))
    return parts


def _packed_parts(side: Side) -> list[SidePart] | None:
    codec = side.codec
    has_page_frames = _has_page_frames(codec)
    description = codecs.describe(codec)
    if description is None or (has_page_frames and len(side.runs) > MAX_FRAMES):
        return None
    tables = []
    first = 0
    for stretch in side.runs.stretches:
        if stretch not in _stretches:
            _stretches[stretch] = _segment_table(stretch, description, side.tail.shape[0], side.heads)
        result = _stretches[stretch]
        if result is None:
            return None
        table = result[0].copy()
        table[:, 0] += first
        tables.append(table)
        first += int(stretch.ends[-1])
    segments = numpy.concatenate(tables)
    segments = segments[segments[:, 1] > 0]
    if not has_page_frames:
        return [
            SidePart(0, side.packed_tokens, codec, segments, segments.ctypes.data, None if _is_in_original_frame(codec) else side.runs[0])
        ]
    edges = [0, *numpy.cumsum(segments[:, 1]).tolist()]
    parts = []
    for index, page in enumerate(page for page in side.runs if page.tokens):
        segment = segments[index : index + 1]
        parts.append(SidePart(edges[index], edges[index + 1], codec, segment, segment.ctypes.data, page))
    return parts


def _has_page_frames(codec: Codec) -> bool:
    """Return True if pages may have different coded frames, because each stores its own value maps or basis rows."""
    if isinstance(codec.without_sidecars, Klt) and codec.without_sidecars.rows != "basis":
        return True
    return isinstance(codec, CodecWithSidecars) and codec.has_maps_per_run


@cache
def _raw_codec(dim: int, dtype: torch.dtype) -> Raw:
    return Raw(dim, RAW_DTYPES[dtype])


def _is_in_original_frame(codec: Codec) -> bool:
    """Return True if coded values are in the original frame, so that queries and sums need no map."""
    kind = type(codec)
    return kind.query is Codec.query and kind.original is Codec.original and codec.rotation.kind == "none"


def _segment_table(stretch: Stretch, description: CodecDescription, batch: int, heads: int) -> tuple[Integers, Any] | None:
    """Return the C table of a stretch's pages, and the streams to which it points. Returns None if a stream is not supported.

    Each row, int64, contains the first token of a page within the stretch, its number of tokens, and four numbers per stream: an address,
    and strides in bytes per batch entry, head and stream row.
    """
    counts = numpy.diff(stretch.ends, prepend=0)
    streams, codec = dict(stretch.streams), stretch.codec
    if codecs.RAW_ENTRY in description.streams:
        raw = _raw_token_streams(stretch, batch)
        if raw is None:
            return None
        streams |= raw
    if codecs.OUTLIER_FIRST in description.streams:
        outliers = _outlier_streams(stretch)
        if outliers is None:
            return None
        streams |= outliers
    if codecs.SCALE_TABLE in description.streams:
        streams[codecs.SCALE_TABLE] = _scale_tables(streams["scale_range"])
    if codecs.CHUNK_RANGES in description.streams:
        streams[codecs.CHUNK_RANGES] = _chunk_ranges(streams)
    if codecs.BASIS in description.streams:
        streams[codecs.BASIS] = _basis_numbers(codec, streams, batch, heads, len(counts))
    layouts = codec.layout(batch, heads, int(stretch.ends[-1]))
    table = numpy.empty((len(counts), 2 + 4 * len(description.streams)), numpy.int64)
    table[:, 0], table[:, 1] = stretch.ends - counts, counts
    for index, name in enumerate(description.streams):
        stream = streams[name]
        if name == codecs.SCALE_TABLE:
            rows, shape = numpy.arange(len(counts)), torch.Size((batch, heads, len(counts), 256, 2))
        elif name == codecs.BASIS:
            rows, shape = numpy.arange(len(counts)), stream.shape
        elif name == codecs.CHUNK_RANGES:
            per_run = -(-counts // codec.group_tokens)
            rows, shape = numpy.cumsum(per_run) - per_run, torch.Size((batch, heads, int(per_run.sum()), 2))
        elif name == codecs.RAW_ENTRY:
            rows, shape = stretch.ends - counts, torch.Size((batch, 1, int(stretch.ends[-1])))
        elif name == codecs.OUTLIER_FIRST:
            rows, shape = stretch.ends - counts, torch.Size((batch, heads, int(stretch.ends[-1]) + 1))
        elif name in (codecs.RAW_ENTRIES, codecs.OUTLIER_CHUNKS) or (name in layouts and layouts[name].per == "entry"):
            rows, shape = numpy.zeros_like(counts), stream.shape
        else:
            layout = layouts[name]
            per_run = numpy.ones_like(counts) if layout.per == "run" else -(-counts // layout.tokens_per_row)
            rows = numpy.cumsum(per_run) - per_run
            shape = torch.Size((*layout.shape[:2], int(per_run.sum()), *layout.shape[3:]))
            if stream.dtype != _TORCH_DTYPES[layout.dtype]:
                return None
        strides = _address_and_strides(stream)
        if stream.shape != shape or strides is None:
            return None
        address, *steps = strides
        column = 2 + 4 * index
        table[:, column] = address + rows * steps[2]
        table[:, column + 1 : column + 4] = steps
        if shape[1] == 1:
            table[:, column + 2] = 0
        if name == codecs.BASIS or (name in layouts and layouts[name].per == "run"):
            # All tokens of a page share one row.
            table[:, column + 3] = 0
    return table, streams


def _basis_numbers(codec: Codec, streams: Mapping[str, torch.Tensor], batch: int, heads: int, runs: int) -> torch.Tensor:
    """Return the derived stream ``codecs.BASIS`` of ``runs`` pages, which share one basis unless each stores its own."""
    codec = codec.without_sidecars
    assert isinstance(codec, Klt)
    if "rows" not in streams:
        return codecs.basis_numbers(codec, codec.source_for(heads))[:, :, None].expand(batch, heads, runs, -1)
    result = [codecs.basis_numbers(codec, BasisRows(streams["rows"][:, :, run])) for run in range(runs)]
    return torch.stack(result, 2).contiguous()


def _chunk_ranges(streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the derived stream ``codecs.CHUNK_RANGES``, for words that are ordered by chunk, sequence and head."""
    counts = streams["word_counts"].view(torch.int16).to(torch.int64).bitwise_and(0xFFFF).permute(2, 0, 1)
    firsts = counts.flatten().cumsum(0).view(counts.shape) - counts
    words = torch.full_like(firsts, streams["words"].shape[2])
    return torch.stack([firsts, words], -1).permute(1, 2, 0, 3).contiguous()


def _raw_token_streams(stretch: Stretch, batch: int) -> dict[str, torch.Tensor] | None:
    """Return the derived streams ``codecs.RAW_ENTRY`` and ``codecs.RAW_ENTRIES``.

    Returns None if the C kernels cannot use them, or if the number of flags differs from the number of raw tokens.
    """
    codec = stretch.codec
    assert isinstance(codec, CodecWithSidecars)
    if len(stretch.ends) > 1 and _has_page_frames(codec):
        # Each page has its own coded frame.
        return None
    entry_indices = torch.full((batch, 1, int(stretch.ends[-1])), -1, dtype=torch.int32, device="cpu")
    entries, first = [], 0
    # If several sidecars store a token, the last one's value counts.
    for tokens in codec.raw_token_sidecars:
        (token, sequence), values = tokens.token_positions(stretch.streams), tokens.kept_values(stretch.streams)
        if len(token) != len(values):
            return None
        entry_indices[sequence, 0, token] = torch.arange(first, first + len(values), dtype=torch.int32, device="cpu")
        entries.append(codec.to_coded_frame(values, sequence, stretch.streams))
        first += len(values)
    return {codecs.RAW_ENTRY: entry_indices, codecs.RAW_ENTRIES: torch.cat(entries).transpose(0, 1)[None].contiguous()}


def _outlier_streams(stretch: Stretch) -> dict[str, torch.Tensor] | None:
    """Return the derived streams ``codecs.OUTLIER_FIRST`` and ``codecs.OUTLIER_CHUNKS``.

    Returns None if the number of flagged chunks differs from the number of stored chunks.
    """
    codec = stretch.codec
    assert isinstance(codec, CodecWithSidecars)
    (outliers,) = codec.frame_parts
    assert isinstance(outliers, Outliers)
    flags, values = outliers.flags(stretch.streams), stretch.streams[VALUES][0, 0]
    counts = flags.sum(3)
    if int(counts.sum()) != len(values):
        return None
    batch, heads, tokens, chunks = flags.shape
    # Outliers are stored by token, sequence, head and chunk; sort them by sequence and head first.
    places = flags.permute(2, 0, 1, 3).nonzero()
    token, sequence, head, chunk = places.unbind(1)
    order = torch.argsort(((sequence * heads + head) * tokens + token) * chunks + chunk)
    entries = torch.cat([values.view(torch.int16), chunk[:, None].to(torch.int16)], 1)[order]
    ends = counts.flatten().cumsum(0).view(batch, heads, tokens)
    first = torch.cat([ends[:, :, :1] - counts[:, :, :1], ends], 2)
    return {codecs.OUTLIER_FIRST: first.contiguous(), codecs.OUTLIER_CHUNKS: entries[None, None].contiguous()}


def _address_and_strides(stream: torch.Tensor) -> tuple[int, int, int, int] | None:
    """Return the address of ``stream``, and its strides in bytes per batch entry, head and row. Returns None if rows are not contiguous."""
    expected = 1
    for size, stride in zip(reversed(stream.shape[3:]), reversed(stream.stride()[3:]), strict=True):
        if size > 1 and stride != expected:
            return None
        expected *= size
    batch, head, row = (stride * stream.element_size() for stride in stream.stride()[:3])
    return stream.data_ptr(), batch, head, row


def _scale_tables(ranges: torch.Tensor) -> torch.Tensor:
    """Return the scale and center that each scale byte stands for, for every page's range: float16 ``[batch, kv_head, run, 256, 2]``."""
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")[:, None].expand(256, 2)
    batch, heads, runs, _ = ranges.shape
    all_codes = codes.expand(batch, heads, 1, 256, 2)
    tables: Iterable[torch.Tensor] = (scale_range.decode_pairs(all_codes, ranges[:, :, run : run + 1]) for run in range(runs))
    return torch.cat(list(tables), 2).contiguous()
