"""Segments of a layer: runs of consecutive tokens with one tile loader for keys and one for values.

In this file, a side is a layer's keys or its values, and a page is one packed part of a side.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kvpack.formats import channel_scale
from kvpack.formats.channel_scale import ChannelScale
from kvpack.formats.group import Group
from kvpack.formats.klt import Klt
from kvpack.formats.minifloat import Minifloat
from kvpack.formats.outliers import VALUES as OUTLIERS
from kvpack.formats.outliers import Outliers
from kvpack.formats.raw import Raw
from kvpack.formats.sidecars import CodecWithSidecars
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
"""Possible sizes of the token blocks that are decoded beforehand because they contain raw tokens, and the limit for the larger size.

The smaller size is used if the larger one would decode more tokens than the limit, and more than half of the page.
"""

MAX_HALF_ERROR = 2**-11
"""Maximum relative error, in the 2-norm, of rounding to float16 without overflow or underflow."""

MAX_DECODED_VALUES = 1 << 22
"""Maximum number of values to decode together (16 MiB in float32). At least one block of tokens is always decoded."""

_side_segments: WeakKeyDictionary[Side, SideSegments] = WeakKeyDictionary()
_decoded_blocks: WeakKeyDictionary[PackedRun, dict[tuple[int, int, torch.dtype | None], torch.Tensor]] = WeakKeyDictionary()


class SideSegment(NamedTuple):
    """Consecutive tokens of a layer's keys or values that share a codec: a page, a part of a page, or the raw tail."""

    codec: Codec
    first: int
    tokens: int
    streams: Mapping[str, torch.Tensor]
    frame_page: PackedRun | None = None
    """The page whose channel scales or order ``frame`` includes, if any."""
    exact: bool = True
    """True if tile loaders can decode the segment accurately enough."""
    page: PackedRun | None = None
    """The page that contains the tokens, starting at token ``start`` of the page, or None for the raw tail."""
    start: int = 0
    raw: bool = False
    """True if the segment contains raw tokens, and must therefore be decoded beforehand (``decode_segments``)."""

    @property
    def frame(self) -> Frame:
        """Frame of this segment's queries (if it contains keys) or sums (if it contains values)."""
        return Frame(self.codec, self.frame_page)


class SideSegments(NamedTuple):
    """All segments of a layer's keys or values, and their common properties.

    ``supported`` is True if every segment has an accurate tile loader. ``outliers`` is True if any segment has outliers.
    """

    segments: list[SideSegment]
    supported: bool
    outliers: bool


class Frame(NamedTuple):
    """A codec's coded frame.

    If it also depends on stored channel scales or a stored channel order, ``page`` is the page that stores them.
    """

    codec: Codec
    page: PackedRun | None

    @property
    def query_codec(self) -> Codec | None:
        """Codec whose cached matrix maps queries to this frame, or None if the page's value maps must be applied first.

        A balanced frame is part of the matrix if it is the page's only value map.
        """
        if self.page is None:
            return self.codec
        assert isinstance(self.page.codec, CodecWithSidecars)
        balanced = self.page.codec.folded_frame
        if balanced is None:
            return None
        return CodecWithSidecars(self.codec.without_sidecars, (balanced, *self.codec.sidecars))

    @property
    def channel_factors(self) -> torch.Tensor | None:
        """Channel scales of the page, float32 ``[batch, kv_head, 1, dim]``, or None unless they are the page's only value map."""
        if self.page is None:
            return None
        assert isinstance(self.page.codec, CodecWithSidecars)
        if [type(value_map) for value_map in self.page.codec.value_maps] != [ChannelScale]:
            return None
        return channel_scale.factors(self.page.streams).contiguous()

    def matches(self, other: Frame) -> bool:
        """Return True if both frames use the same matrices for queries and sums, even if their pages differ."""
        return self == other or (self.query_codec is not None and self.query_codec == other.query_codec)


class Segment(NamedTuple):
    """Consecutive tokens of a layer, from one key segment and one value segment."""

    first: int
    tokens: int
    k: SideSegment
    v: SideSegment


def side_segments(side: Side) -> SideSegments:
    """Return the segments of ``side``, which end with its tail as a segment of raw values. They are cached with the side."""
    if side not in _side_segments:
        result, first = [], 0
        for page in side.runs:
            result += _page_segments(page, first, side.tail.dtype, side.runs[0])
            first += page.tokens
        if side.tail.shape[2]:
            result.append(SideSegment(Raw(side.dim, RAW_DTYPES[side.tail.dtype]), first, side.tail.shape[2], {"values": side.tail}))
        supported = all(segment.exact and loaders.find_tiles(segment.codec) is not None for segment in result)
        outliers = any(segment.codec.sidecar(Outliers) is not None for segment in result)
        _side_segments[side] = SideSegments(result, supported, outliers)
    return _side_segments[side]


def _page_segments(page: PackedRun, first: int, dtype: torch.dtype, first_page: PackedRun) -> list[SideSegment]:
    """Return the segments of ``page``: one, or several if the page has raw tokens. Segments of raw tokens are marked ``raw``.

    Raw segments use the frame of the other segments. In codec klt, however, tiles have no room for columns without codes, so raw segments
    are decoded to ``dtype`` in the original frame, like the raw tail. If value maps are equal on all pages, segments use the frame of
    ``first_page``.
    """
    codec = page.codec
    if not isinstance(codec, CodecWithSidecars):
        return [_page_segment(codec, first, page, page.streams, None)]
    frame = (page if codec.has_maps_per_run else first_page) if codec.value_maps else None
    if not codec.raw_token_sidecars:
        return [_segment_with_sidecars(page, first, 0, page.tokens, frame)]
    raw_tokens = {token for tokens in codec.raw_token_sidecars for token in tokens.token_positions(page.streams)[0].tolist()}
    for size in (math.lcm(tokens, codec.without_sidecars.group_tokens) for tokens in RAW_TOKENS):
        flagged = sorted({token // size for token in raw_tokens})
        if len(flagged) * size <= max(MAX_RAW_TOKENS, page.tokens // 2):
            break
    else:
        return [SideSegment(codec, first, page.tokens, page.streams)]
    edges = sorted({0, page.tokens, *(min(edge * size, page.tokens) for block in flagged for edge in (block, block + 1))})
    result = {
        start: _segment_with_sidecars(page, first, start, stop, frame) for start, stop in pairwise(edges) if start // size not in flagged
    }
    coded_segment = next(iter(result.values()), None)
    raw_codec = codec.codec if coded_segment is None else coded_segment.codec
    for start, stop in pairwise(edges):
        if start not in result and isinstance(codec.codec, Klt):
            (values,) = _decode_blocks(page, [(start, stop)], dtype)
            raw = Raw(codec.dim, RAW_DTYPES[dtype])
            result[start] = SideSegment(raw, first + start, stop - start, {"values": values}, page=page, start=start)
        elif start not in result:
            result[start] = SideSegment(raw_codec, first + start, stop - start, {}, frame, page=page, start=start, raw=True)
    return [result[start] for start in edges[:-1]]


def _segment_with_sidecars(page: PackedRun, first: int, start: int, stop: int, frame: PackedRun | None) -> SideSegment:
    """Return the segment of tokens ``[start, stop)`` of a page with sidecars.

    The segment's codec keeps the sidecars that tile loaders support: means, outliers and signs. The other sidecars are applied to queries
    and sums.
    """
    assert isinstance(page.codec, CodecWithSidecars)
    streams = page.streams if (start, stop) == (0, page.tokens) else page.rows(start, stop, entries=False)
    segment = _page_segment(page.codec.codec, first + start, page, streams, frame)._replace(tokens=stop - start, start=start)
    tiles = loaders.find_tiles(segment.codec)
    # Sidecars that no loader supports stay in the codec, so that PyTorch handles the page.
    sidecars = (*page.codec.page_vectors, *page.codec.frame_parts, *page.codec.sketches)
    outliers: Mapping[str, torch.Tensor] = {}
    if page.codec.sidecar(Outliers) is not None and tiles is not None:
        entries = outlier_entries.page_entries(page, start, stop)
        if entries is None:
            return segment._replace(exact=False)
        if entries:
            outliers = {**entries, tiles_outliers.COLUMNS: tiles_outliers.column_stream(tiles, str(page.streams[OUTLIERS].device))}
    if not outliers:
        sidecars = tuple(sidecar for sidecar in sidecars if type(sidecar) is not Outliers)
    codec = CodecWithSidecars(segment.codec.without_sidecars, sidecars) if sidecars else segment.codec
    return segment._replace(codec=codec, streams={**segment.streams, **outliers})


def slice_segment(segment: SideSegment, start: int, stop: int) -> SideSegment:
    """Return tokens ``[start, stop)`` of ``segment``. ``start`` must be a multiple of the codec's token group."""
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
    if isinstance(page.codec, CodecWithSidecars):
        return _segment_with_sidecars(page, segment.first - segment.start, segment.start + start, segment.start + stop, segment.frame_page)
    part = page.slice(start, stop)
    return _page_segment(page.codec, segment.first + start, part, part.streams, None)


def _page_segment(codec: Codec, first: int, page: PackedRun, streams: Mapping[str, torch.Tensor], frame: PackedRun | None) -> SideSegment:
    if type(codec) is Group:
        # 8-bit scales index a small table, so they are looked up once here.
        codec, streams = codec.with_fp16_scales(streams)
    exact = True
    if type(codec) is Klt:
        codec = codec.with_basis_rows(streams)
    if type(codec) is Minifloat:
        codec, streams = codec.with_wide_run_scale(streams)
        exact = minifloat.is_exact(codec, streams)
    return SideSegment(codec, first, page.tokens, streams, frame, exact, page=page)


def decode_segments(to_decode: Sequence[Segment], columns: tuple[int, ...], side: str) -> list[Segment]:
    """Decode one side ("k" or "v") of the segments to the coded frame. Returns segments that contain the decoded values.

    ``columns`` is the column order (``frame_columns.columns``). Values are float16, as in tiles, or float32 if some are too large or too
    small.
    """
    both = [(segment.k, segment.v) if side == "k" else (segment.v, segment.k) for segment in to_decode]
    # Decode all that the pages of both sides share, even if the layer segment is shorter, so that every call decodes the same tokens.
    firsts = [max(own.first, other.first) for own, other in both]
    blocks: dict[PackedRun, list[tuple[int, int]]] = {}
    for (own, other), first in zip(both, firsts, strict=True):
        assert own.page is not None
        start, last = own.start + first - own.first, min(own.first + own.tokens, other.first + other.tokens)
        blocks.setdefault(own.page, []).append((start, start + last - first))
    values = [values for page, ranges in blocks.items() for values in _decode_blocks(page, ranges)]
    fits_half = all(value.dtype == torch.float16 for value in values)
    codec = Raw(len(columns), "fp16" if fits_half else "fp32")
    dim = values[0].shape[3]
    order = torch.tensor([channel if 0 <= channel < dim else dim for channel in columns], dtype=torch.int64, device=values[0].device)
    result = []
    for segment, value, first in zip(to_decode, values, firsts, strict=True):
        start = segment.first - first
        part = value[:, :, start : start + segment.tokens].to(torch.float16 if fits_half else torch.float32)
        part = torch.nn.functional.pad(part, (0, 1)).index_select(3, order)
        decoded = SideSegment(codec, segment.first, segment.tokens, {"values": part})
        result.append(segment._replace(k=decoded) if side == "k" else segment._replace(v=decoded))
    return result


def _decode_blocks(page: PackedRun, blocks: Sequence[tuple[int, int]], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Decode the ascending token ranges ``blocks`` of ``page`` to the original frame in ``dtype``, or to the coded frame without ``dtype``.

    In the coded frame, a block is float16, or float32 if float16 is not accurate enough. Blocks are cached with the page, because a page
    outlives the layer object of a growing layer.
    """
    cached = _decoded_blocks.setdefault(page, {})
    missing = [block for block in blocks if (*block, dtype) not in cached]
    # Streams of entries, and streams that several heads share, have fewer rows than there are heads.
    sequences = max(stream.shape[0] * stream.shape[1] for stream in page.streams.values())
    # Decoding the tokens between two blocks takes less time than the launches of a second call.
    limit = MAX_DECODED_VALUES // (sequences * page.codec.dim)
    while missing:
        first = missing[0][0]
        together = [block for block in missing if block[1] - first <= limit] or missing[:1]
        decode = page.decode_frame if dtype is None else page.decode
        values = decode(first, together[-1][1])
        exact = [values[:, :, start - first : stop - first] for start, stop in together]
        rounded = [block.to(dtype or torch.float16) for block in exact]
        if dtype is None:
            pairs = list(zip(rounded, exact, strict=True))
            fits = torch.stack([(half - block).norm() <= MAX_HALF_ERROR * block.norm() for half, block in pairs]).tolist()
            rounded = [half if fit else block.clone() for (half, block), fit in zip(pairs, fits, strict=True)]
        cached |= {(*block, dtype): part for block, part in zip(together, rounded, strict=True)}
        missing = missing[len(together) :]
    return [cached[*block, dtype] for block in blocks]


def layer_segments(k: Sequence[SideSegment], v: Sequence[SideSegment], begin: int, end: int) -> list[Segment]:
    """Return the segments of tokens ``[begin, end)``.

    A new segment begins wherever a key segment of ``k`` or a value segment of ``v`` begins.
    """
    edges = sorted(
        {begin, end, *(edge for segment in (*k, *v) for edge in (segment.first, segment.first + segment.tokens) if begin < edge < end)}
    )

    firsts = [[segment.first for segment in segments] for segments in (k, v)]

    def segment_at(segments: Sequence[SideSegment], firsts: list[int], token: int) -> SideSegment:
        return segments[bisect_right(firsts, token) - 1]

    return [
        Segment(first, last - first, segment_at(k, firsts[0], first), segment_at(v, firsts[1], first)) for first, last in pairwise(edges)
    ]
