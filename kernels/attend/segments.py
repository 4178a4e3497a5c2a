"""Segments of a layer: consecutive tokens of one side with one tile loader, cut at the boundaries of both sides."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kvpack.formats.group import Group
from kvpack.formats.klt import Klt
from kvpack.formats.minifloat import Minifloat
from kvpack.formats.outliers import VALUES as OUTLIERS
from kvpack.formats.outliers import Outliers
from kvpack.formats.raw import Raw
from kvpack.formats.side_cars import WithSideCars
from kvpack.kernels.loaders import minifloat
from kvpack.kernels.loaders import outliers as tiles_outliers
from kvpack.kernels.tiles import loaders

from . import outlier_entries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpack.formats.base import Codec
    from kvpack.kernels.tiles.layers import PackedRun, Side

RAW_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

RAW_TOKENS, MAX_RAW_TOKENS = (64, 16), 4096
"""Tokens that are decoded together if one of them is raw; fewer if a page would have more than this many (or half of it)."""

HALF_ERROR = 2**-11
"""Relative error of binary16 values in the 2-norm, if none overflows or underflows."""

_side_segments: WeakKeyDictionary[Side, SideSegments] = WeakKeyDictionary()
_parts: WeakKeyDictionary[PackedRun, dict[tuple[int, int, torch.dtype], torch.Tensor]] = WeakKeyDictionary()


class SideSegment(NamedTuple):
    """Consecutive tokens of one side that one codec stores: a page, or the raw tail."""

    codec: Codec
    first: int
    tokens: int
    streams: Mapping[str, torch.Tensor]
    framed_by: PackedRun | None = None
    """The page of ``frame``."""
    exact: bool = True
    """True if the segment's loader, if it has one, is exact enough."""
    page: PackedRun | None = None
    """The page that its tokens are of, from ``start`` on; None for the raw tail."""
    start: int = 0
    raw: bool = False
    """True if some tokens of the segment are raw: it is decoded first (``decoded``)."""

    @property
    def frame(self) -> Frame:
        """Frame of the queries and of the sums of values."""
        return Frame(self.codec, self.framed_by)


class SideSegments(NamedTuple):
    """Segments of a side with the properties that every call needs; cached, because there may be hundreds.

    ``supported``: each has a tile loader that is exact enough. ``outliers``: some loader reads outliers.
    """

    segments: list[SideSegment]
    supported: bool
    outliers: bool


class Frame(NamedTuple):
    """A codec's coded frame; ``page`` is its page if pages have channel scales or their own order."""

    codec: Codec
    page: PackedRun | None

    @property
    def query_codec(self) -> Codec | None:
        """Codec whose frame one cached matrix maps queries to: with the page's balanced frame, if that is its only map.

        It is None if the maps of the page are applied first.
        """
        if self.page is None:
            return self.codec
        assert isinstance(self.page.codec, WithSideCars)
        balanced = self.page.codec.folded_frame
        if balanced is None:
            return None
        family, others = (self.codec.codec, self.codec.side_cars) if isinstance(self.codec, WithSideCars) else (self.codec, ())
        return WithSideCars(family, (balanced, *others))

    def matches(self, other: Frame) -> bool:
        """Return True if queries and sums need the same matrices, whichever the pages."""
        return self == other or (self.query_codec is not None and self.query_codec == other.query_codec)


class Segment(NamedTuple):
    """Consecutive tokens of a layer inside one segment of each side."""

    first: int
    tokens: int
    k: SideSegment
    v: SideSegment


def of_side(side: Side) -> SideSegments:
    """Return the segments of the pages of ``side``, with its tail as one of raw values; cached with the side."""
    if side not in _side_segments:
        result, first = [], 0
        for page in side.runs:
            result += _segments_of(page, first, side.tail.dtype, side.runs[0])
            first += page.tokens
        if side.tail.shape[2]:
            result.append(SideSegment(Raw(side.dim, RAW_DTYPES[side.tail.dtype]), first, side.tail.shape[2], {"values": side.tail}))
        supported = all(segment.exact and loaders.tiles_of(segment.codec) is not None for segment in result)
        outliers = any(segment.codec.side_car(Outliers) is not None for segment in result)
        _side_segments[side] = SideSegments(result, supported, outliers)
    return _side_segments[side]


def _segments_of(page: PackedRun, first: int, dtype: torch.dtype, first_page: PackedRun) -> list[SideSegment]:
    """Return one segment, or several if there are raw tokens: segments with raw tokens are ``raw``, in the frame of the others.

    Pages whose maps do not depend on the run use the frame of the side's ``first_page``. Pages with a basis are in the original frame, in
    ``dtype``, like the raw tail, because tiles have no room for columns without codes.
    """
    codec = page.codec
    if not isinstance(codec, WithSideCars):
        return [_whole_page(codec, first, page, page.streams, None)]
    frame = (page if codec.maps_by_run else first_page) if codec.value_maps else None
    if not codec.kept_tokens:
        return [_part(page, first, 0, page.tokens, frame)]
    kept = {token for tokens in codec.kept_tokens for token in tokens.token_positions(page.streams)[0].tolist()}
    for size in (math.lcm(tokens, codec.family.token_group) for tokens in RAW_TOKENS):
        flagged = sorted({token // size for token in kept})
        if len(flagged) * size <= max(MAX_RAW_TOKENS, page.tokens // 2):
            break
    else:
        return [SideSegment(codec, first, page.tokens, page.streams)]
    edges = sorted({0, page.tokens, *(min(edge * size, page.tokens) for block in flagged for edge in (block, block + 1))})
    result = {start: _part(page, first, start, stop, frame) for start, stop in pairwise(edges) if start // size not in flagged}
    coded = next(iter(result.values()), None)
    held = codec.codec if coded is None else coded.codec
    for start, stop in pairwise(edges):
        if start not in result and isinstance(codec.codec, Klt):
            values = _decoded_part(page, start, stop, dtype)
            raw = Raw(codec.dim, RAW_DTYPES[dtype])
            result[start] = SideSegment(raw, first + start, stop - start, {"values": values}, page=page, start=start)
        elif start not in result:
            result[start] = SideSegment(held, first + start, stop - start, {}, frame, page=page, start=start, raw=True)
    return [result[start] for start in edges[:-1]]


def _decoded_part(page: PackedRun, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Return tokens ``[start, stop)`` of a page in the original frame; cached with the page, which survives when a cache grows."""
    kept = _parts.setdefault(page, {})
    if (start, stop, dtype) not in kept:
        kept[start, stop, dtype] = page.decode(start, stop).to(dtype)
    return kept[start, stop, dtype]


def _part(page: PackedRun, first: int, start: int, stop: int, frame: PackedRun | None) -> SideSegment:
    """Return tokens ``[start, stop)`` of a page with side-cars; loaders apply means, outliers and signs, queries and sums the rest."""
    assert isinstance(page.codec, WithSideCars)
    streams = page.streams if (start, stop) == (0, page.tokens) else page.rows(start, stop)
    segment = _whole_page(page.codec.codec, first + start, page, streams, frame)._replace(tokens=stop - start, start=start)
    tiles = loaders.tiles_of(segment.codec)
    # One that no loader knows stays, and leaves the page to torch.
    loaded = (*page.codec.page_vectors, *page.codec.frame_parts, *page.codec.sketches)
    outliers: Mapping[str, torch.Tensor] = {}
    if page.codec.side_car(Outliers) is not None and tiles is not None:
        result = outlier_entries.of_page(page, start, stop)
        if result is None:
            return segment._replace(exact=False)
        if result:
            outliers = {**result, tiles_outliers.COLUMNS: tiles_outliers.columns_of(tiles, str(page.streams[OUTLIERS].device))}
    if not outliers:
        loaded = tuple(side_car for side_car in loaded if type(side_car) is not Outliers)
    codec = WithSideCars(segment.codec, loaded) if loaded else segment.codec
    return segment._replace(codec=codec, streams={**segment.streams, **outliers})


def part_of(segment: SideSegment, start: int, stop: int) -> SideSegment:
    """Return tokens ``[start, stop)`` of a page segment with a row loader; ``start`` must be a multiple of the codec's token group."""
    page = segment.page
    if page is None or stop - start == segment.tokens:
        return segment
    if type(segment.codec) is Raw:
        return segment._replace(
            first=segment.first + start,
            tokens=stop - start,
            streams={"values": segment.streams["values"][:, :, start:stop]},
            start=segment.start + start,
        )
    if isinstance(page.codec, WithSideCars):
        return _part(page, segment.first - segment.start, segment.start + start, segment.start + stop, segment.framed_by)
    part = page.slice(start, stop)
    return _whole_page(page.codec, segment.first + start, part, part.streams, None)


def _whole_page(codec: Codec, first: int, page: PackedRun, streams: Mapping[str, torch.Tensor], frame: PackedRun | None) -> SideSegment:
    if type(codec) is Group:
        # Scales of 8 bits are few: they are looked up once.
        codec, streams = codec.with_fp16_scales(streams)
    exact = True
    if type(codec) is Klt:
        codec = codec.with_basis_rows(streams)
    if type(codec) is Minifloat:
        codec, streams = codec.with_wide_run_scale(streams)
        exact = minifloat.is_exact(codec, streams)
    return SideSegment(codec, first, page.tokens, streams, frame, exact, page=page)


def decoded(found: Sequence[Segment], columns: tuple[int, ...], side: str) -> list[Segment]:
    """Return segments with the tokens of a ``side`` (k or v) decoded, in its coded frame and in the order of ``columns``
    (``frame_columns.columns``).

    They are binary16, as tiles are, unless some value is too large or too small for it.
    """
    tensors = []
    for segment in found:
        own = segment.k if side == "k" else segment.v
        assert own.page is not None
        start = own.start + segment.first - own.first
        values = own.page.frame(start, start + segment.tokens)
        dim = values.shape[3]
        order = torch.tensor([channel if 0 <= channel < dim else dim for channel in columns], dtype=torch.int64, device=values.device)
        tensors.append(torch.nn.functional.pad(values, (0, 1))[..., order])
    halves = [values.to(torch.float16) for values in tensors]
    fit = all((half - values).norm() <= HALF_ERROR * values.norm() for half, values in zip(halves, tensors, strict=True))
    codec = Raw(len(columns), "fp16" if fit else "fp32")
    own_segments = [
        SideSegment(codec, segment.first, segment.tokens, {"values": values})
        for segment, values in zip(found, halves if fit else tensors, strict=True)
    ]
    both = zip(found, own_segments, strict=True)
    return [segment._replace(k=own) if side == "k" else segment._replace(v=own) for segment, own in both]


def of_layer(k: Sequence[SideSegment], v: Sequence[SideSegment], begin: int, end: int) -> list[Segment]:
    """Return the segments of tokens ``[begin, end)`` of a layer whose sides have segments ``k`` and ``v``."""
    edges = sorted({begin, end, *(edge for own in (*k, *v) for edge in (own.first, own.first + own.tokens) if begin < edge < end)})

    firsts = [[own.first for own in part] for part in (k, v)]

    def holding(part: Sequence[SideSegment], firsts: list[int], token: int) -> SideSegment:
        return part[bisect_right(firsts, token) - 1]

    return [Segment(first, last - first, holding(k, firsts[0], first), holding(v, firsts[1], first)) for first, last in pairwise(edges)]
