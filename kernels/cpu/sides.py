"""Segments of a side for C: for each run of packed tokens its position, and the address and strides of every stream.

They are cached with the stretches that they describe, so that the side of a growing cache describes only its new pages.
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
from kvpack.formats.side_cars import WithSideCars

from . import codecs, library

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .codecs import Described

    Integers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

RAW_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_TORCH = {"U8": torch.uint8, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


class Stretch(Protocol):
    """Consecutive runs of packed tokens with their ``ends``; streams contain the rows of one run after another."""

    @property
    def codec(self) -> Codec: ...
    @property
    def ends(self) -> Integers: ...
    @property
    def streams(self) -> Mapping[str, torch.Tensor]: ...


class Frame(Protocol):
    """The coded frame of some tokens."""

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """Map queries ``[batch, kv_head, row, dim]`` for products with keys in the coded frame."""

    def original(self, sums: torch.Tensor) -> torch.Tensor:
        """Map sums ``[batch, kv_head, row, dim]`` of values from the coded frame to the original frame."""


class Pages(Protocol):
    """The pages of a side; each is a ``Frame``."""

    @property
    def stretches(self) -> Sequence[Stretch]: ...
    def __getitem__(self, index: int) -> Any: ...
    def __len__(self) -> int: ...


class Side(Protocol):
    """The keys or the values of a layer: pages, then a raw tail ``[batch, kv_head, token, dim]``."""

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
    """Tokens [start, stop) of one side that share a codec and a coded frame; a ``frame`` of None means the original frame.

    ``address`` is the address of ``segments``.
    """

    start: int
    stop: int
    codec: Codec
    segments: Integers
    address: int
    frame: Frame | None

    def struct(self, described: Described) -> library.SideArgument:
        """Return the part as a C struct, which refers to memory of this object and of ``described``."""
        return library.SideArgument(ctypes.pointer(described.struct), self.address, len(self.segments))

    def described(self) -> Described:
        """Return the C description of the codec, which is not cached here because sides are many and tables large."""
        result = codecs.described(self.codec)
        assert result is not None
        return result


MAX_FRAMES = 64
"""Above this number of coded frames in a side, each with queries and sums of its own, torch attends."""

_stretches: WeakKeyDictionary[Any, tuple[Integers, Any] | None] = WeakKeyDictionary()


def parts_of(side: Side) -> list[SidePart] | None:
    """Return the parts of a side: its pages, then its tail; None if C does not support its codec, side-cars or strides."""
    parts: list[SidePart] = []
    packed = side.packed_tokens
    if packed:
        of_pages = _packed(side)
        if of_pages is None:
            return None
        parts += of_pages
    if side.tail.shape[2]:
        row = _strides(side.tail)
        if row is None:
            return None
        segments = numpy.array([[packed, side.tail.shape[2], *row]], numpy.int64)
        tail = _raw(side.codec.dim, side.tail.dtype)
        parts.append(SidePart(packed, packed + side.tail.shape[2], tail, segments, segments.ctypes.data, None))
    return parts


def _packed(side: Side) -> list[SidePart] | None:
    codec = side.codec
    framed = _framed(codec)
    described = codecs.described(codec)
    if described is None or (framed and len(side.runs) > MAX_FRAMES):
        return None
    tables = []
    first = 0
    for stretch in side.runs.stretches:
        if stretch not in _stretches:
            _stretches[stretch] = _segments(stretch, described, side.tail.shape[0], side.heads)
        result = _stretches[stretch]
        if result is None:
            return None
        table = result[0].copy()
        table[:, 0] += first
        tables.append(table)
        first += int(stretch.ends[-1])
    segments = numpy.concatenate(tables)
    segments = segments[segments[:, 1] > 0]
    if not framed:
        return [SidePart(0, side.packed_tokens, codec, segments, segments.ctypes.data, None if _keeps_frame(codec) else side.runs[0])]
    edges = [0, *numpy.cumsum(segments[:, 1]).tolist()]
    parts = []
    for number, page in enumerate(page for page in side.runs if page.tokens):
        own = segments[number : number + 1]
        parts.append(SidePart(edges[number], edges[number + 1], codec, own, own.ctypes.data, page))
    return parts


def _framed(codec: Codec) -> bool:
    """Return True if each page may have its own coded frame, from channel maps or from basis rows in the cache."""
    if isinstance(codec.family, Klt) and codec.family.rows != "basis":
        return True
    return isinstance(codec, WithSideCars) and codec.maps_by_run


@cache
def _raw(dim: int, dtype: torch.dtype) -> Raw:
    return Raw(dim, RAW_DTYPES[dtype])


def _keeps_frame(codec: Codec) -> bool:
    """Return True if coded values are in the original frame, so that queries and sums are the same as for raw tails."""
    kind = type(codec)
    return kind.query is Codec.query and kind.original is Codec.original and codec.rotation.kind == "none"


def _segments(stretch: Stretch, described: Described, batch: int, heads: int) -> tuple[Integers, Any] | None:
    """Return the table of a stretch's runs, from its first token on, and the tensors created for it."""
    counts = numpy.diff(stretch.ends, prepend=0)
    streams, codec = dict(stretch.streams), stretch.codec
    if codecs.ENTRY in described.streams:
        raw = _raw_tokens(stretch, batch)
        if raw is None:
            return None
        streams |= raw
    if codecs.FIRST in described.streams:
        outliers = _outliers(stretch)
        if outliers is None:
            return None
        streams |= outliers
    if codecs.TABLE in described.streams:
        streams[codecs.TABLE] = _scale_tables(streams["scale_range"])
    if codecs.PLACES in described.streams:
        streams[codecs.PLACES] = _chunk_places(streams)
    if codecs.BASIS in described.streams:
        streams[codecs.BASIS] = _basis_numbers(codec, streams, batch, heads, len(counts))
    layouts = codec.layout(batch, heads, int(stretch.ends[-1]))
    table = numpy.empty((len(counts), 2 + 4 * len(described.streams)), numpy.int64)
    table[:, 0], table[:, 1] = stretch.ends - counts, counts
    for number, name in enumerate(described.streams):
        stream = streams[name]
        if name == codecs.TABLE:
            rows, shape = numpy.arange(len(counts)), torch.Size((batch, heads, len(counts), 256, 2))
        elif name == codecs.BASIS:
            rows, shape = numpy.arange(len(counts)), stream.shape
        elif name == codecs.PLACES:
            per_run = -(-counts // codec.token_group)
            rows, shape = numpy.cumsum(per_run) - per_run, torch.Size((batch, heads, int(per_run.sum()), 2))
        elif name == codecs.ENTRY:
            rows, shape = stretch.ends - counts, torch.Size((batch, 1, int(stretch.ends[-1])))
        elif name == codecs.FIRST:
            rows, shape = stretch.ends - counts, torch.Size((batch, heads, int(stretch.ends[-1]) + 1))
        elif name in (codecs.ENTRIES, codecs.CHUNKS) or (name in layouts and layouts[name].per == "entry"):
            rows, shape = numpy.zeros_like(counts), stream.shape
        else:
            layout = layouts[name]
            per_run = numpy.ones_like(counts) if layout.per == "run" else -(-counts // layout.tokens_per_row)
            rows = numpy.cumsum(per_run) - per_run
            shape = torch.Size((*layout.shape[:2], int(per_run.sum()), *layout.shape[3:]))
            if stream.dtype != _TORCH[layout.dtype]:
                return None
        strides = _strides(stream)
        if stream.shape != shape or strides is None:
            return None
        address, *steps = strides
        column = 2 + 4 * number
        table[:, column] = address + rows * steps[2]
        table[:, column + 1 : column + 4] = steps
        if shape[1] == 1:
            table[:, column + 2] = 0
        if name == codecs.BASIS or (name in layouts and layouts[name].per == "run"):
            # Every token has the row of its run.
            table[:, column + 3] = 0
    return table, streams


def _basis_numbers(codec: Codec, streams: Mapping[str, torch.Tensor], batch: int, heads: int, runs: int) -> torch.Tensor:
    """Return the stream ``codecs.BASIS``, for each run or shared by all."""
    codec = codec.family
    assert isinstance(codec, Klt)
    if "rows" not in streams:
        return codecs.basis_numbers(codec, codec.source_for(heads))[:, :, None].expand(batch, heads, runs, -1)
    result = [codecs.basis_numbers(codec, BasisRows(streams["rows"][:, :, run])) for run in range(runs)]
    return torch.stack(result, 2).contiguous()


def _chunk_places(streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the stream ``codecs.PLACES``; words are ordered by chunk, then sequence, then head."""
    counts = streams["word_counts"].view(torch.int16).to(torch.int64).bitwise_and(0xFFFF).permute(2, 0, 1)
    firsts = counts.flatten().cumsum(0).view(counts.shape) - counts
    words = torch.full_like(firsts, streams["words"].shape[2])
    return torch.stack([firsts, words], -1).permute(1, 2, 0, 3).contiguous()


def _raw_tokens(stretch: Stretch, batch: int) -> dict[str, torch.Tensor] | None:
    """Return the streams ``codecs.ENTRY`` and ``codecs.ENTRIES``; None if C cannot use them, or flags and raw tokens disagree."""
    codec = stretch.codec
    assert isinstance(codec, WithSideCars)
    if len(stretch.ends) > 1 and _framed(codec):
        # Each run has a coded frame of its own.
        return None
    numbers = torch.full((batch, 1, int(stretch.ends[-1])), -1, dtype=torch.int32, device="cpu")
    entries, first = [], 0
    # Where several have a token, it is that of the last.
    for tokens in codec.kept_tokens:
        (token, sequence), kept = tokens.token_positions(stretch.streams), tokens.kept_values(stretch.streams)
        if len(token) != len(kept):
            return None
        numbers[sequence, 0, token] = torch.arange(first, first + len(kept), dtype=torch.int32, device="cpu")
        entries.append(codec.to_coded_frame(kept, sequence, stretch.streams))
        first += len(kept)
    return {codecs.ENTRY: numbers, codecs.ENTRIES: torch.cat(entries).transpose(0, 1)[None].contiguous()}


def _outliers(stretch: Stretch) -> dict[str, torch.Tensor] | None:
    """Return the streams ``codecs.FIRST`` and ``codecs.CHUNKS``; None if flags and outliers disagree."""
    codec = stretch.codec
    assert isinstance(codec, WithSideCars)
    (outliers,) = codec.frame_parts
    assert isinstance(outliers, Outliers)
    flags, values = outliers.flags(stretch.streams), stretch.streams[VALUES][0, 0]
    counts = flags.sum(3)
    if int(counts.sum()) != len(values):
        return None
    batch, heads, tokens, chunks = flags.shape
    # Outliers are stored by token, sequence, head and chunk; here those of a head follow each other.
    places = flags.permute(2, 0, 1, 3).nonzero()
    token, sequence, head, chunk = places.unbind(1)
    order = torch.argsort(((sequence * heads + head) * tokens + token) * chunks + chunk)
    numbered = torch.cat([values.view(torch.int16), chunk[:, None].to(torch.int16)], 1)[order]
    ends = counts.flatten().cumsum(0).view(batch, heads, tokens)
    first = torch.cat([ends[:, :, :1] - counts[:, :, :1], ends], 2)
    return {codecs.FIRST: first.contiguous(), codecs.CHUNKS: numbered[None, None].contiguous()}


def _strides(stream: torch.Tensor) -> tuple[int, int, int, int] | None:
    """Return the address, and the bytes per batch, head and row; None unless the remaining axes are contiguous."""
    expected = 1
    for size, stride in zip(reversed(stream.shape[3:]), reversed(stream.stride()[3:]), strict=True):
        if size > 1 and stride != expected:
            return None
        expected *= size
    batch, head, row = (stride * stream.element_size() for stride in stream.stride()[:3])
    return stream.data_ptr(), batch, head, row


def _scale_tables(ranges: torch.Tensor) -> torch.Tensor:
    """Return the binary16 pair of each byte for every run's range: ``[batch, kv_head, run, 256, 2]``."""
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")[:, None].expand(256, 2)
    batch, heads, runs, _ = ranges.shape
    every = codes.expand(batch, heads, 1, 256, 2)
    tables: Iterable[torch.Tensor] = (scale_range.decode_pairs(every, ranges[:, :, run : run + 1]) for run in range(runs))
    return torch.cat(list(tables), 2).contiguous()
