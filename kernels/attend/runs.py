"""The runs of tokens of a layer: what one codec stores and one loader takes, and where those of keys and values meet."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kvpack.formats.group import Group
from kvpack.formats.outliers import VALUES as OUTLIERS
from kvpack.formats.outliers import Outliers
from kvpack.formats.raw import Raw
from kvpack.formats.side_cars import WithSideCars
from kvpack.kernels.loaders import loaders, outlier_entries
from kvpack.kernels.loaders import outliers as tiles_outliers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpack.cache.pages import Page
    from kvpack.cache.side import Side
    from kvpack.formats.base import Codec

RAW_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

RAW_TOKENS, MOST_RAW_TOKENS = 64, 4096
"""Tokens that are decoded together where one of them is raw, and of a page at most (or a sixteenth of it)."""

HALF_ERROR = 2**-11
"""Of binary16 values in the 2-norm, where none is too large or too small."""

_runs: WeakKeyDictionary[Side, SideRuns] = WeakKeyDictionary()


class Run(NamedTuple):
    """Consecutive tokens of one side that one codec stores: a page, or the raw tail."""

    codec: Codec
    first: int
    tokens: int
    streams: Mapping[str, torch.Tensor]
    page: Page | None = None
    exact: bool = True
    """Whether its loader, if there is one, is exact enough."""
    whole: Page | None = None
    """The page that its tokens are of, from ``start`` on; None for the raw tail."""
    start: int = 0
    raw: bool = False
    """Whether some of its tokens are raw: it is attended decoded (``decoded``)."""

    @property
    def frame(self) -> Frame:
        """What queries and sums of values go through."""
        return Frame(self.codec, self.page)


class SideRuns(NamedTuple):
    """The runs of a side, and what every call asks of all of them: kept, for there may be hundreds.

    ``supported``: each has a tile loader that is exact enough. ``outliers``: some loader takes outliers.
    """

    runs: list[Run]
    supported: bool
    outliers: bool


class Frame(NamedTuple):
    """A codec's coded frame; ``page`` where each run has channel scales or an order of its own, whose page it is then."""

    codec: Codec
    page: Page | None


class Segment(NamedTuple):
    """Consecutive tokens of a layer inside one run of each side."""

    first: int
    tokens: int
    k: Run
    v: Run


def of_side(side: Side) -> SideRuns:
    """The pages of ``side`` and its tail, which is a run of raw values; kept with the side."""
    if side not in _runs:
        found, first = [], 0
        for page in side.pages:
            found += _runs_of(page, first)
            first += page.tokens
        if side.tail.shape[2]:
            found.append(Run(Raw(side.dim, RAW_DTYPES[side.tail.dtype]), first, side.tail.shape[2], {"values": side.tail}))
        supported = all(run.exact and loaders.tiles_of(run.codec) is not None for run in found)
        outliers = any(run.codec.side_car(Outliers) is not None for run in found)
        _runs[side] = SideRuns(found, supported, outliers)
    return _runs[side]


def _runs_of(page: Page, first: int) -> list[Run]:
    """One run, or with raw tokens several: those of the tiles that hold such tokens are ``raw``, in the frame of the others."""
    codec = page.codec
    if not isinstance(codec, WithSideCars):
        return [_run(codec, first, page, None)]
    frame = page if codec.value_maps else None
    if not codec.kept_tokens:
        return [_part(page, first, 0, page.tokens, frame)]
    size = math.lcm(RAW_TOKENS, codec.token_group)
    flagged = sorted(
        {token // size for tokens in codec.kept_tokens for token in tokens.flags(page.streams).any(0).nonzero()[:, 0].tolist()}
    )
    if len(flagged) * size > max(MOST_RAW_TOKENS, page.tokens // 16):
        return [Run(codec, first, page.tokens, page.streams)]
    edges = sorted({0, page.tokens, *(min(edge * size, page.tokens) for tile in flagged for edge in (tile, tile + 1))})
    found = {start: _part(page, first, start, stop, frame) for start, stop in pairwise(edges) if start // size not in flagged}
    coded = next(iter(found.values()), None)
    held = codec.codec if coded is None else coded.codec
    for start, stop in pairwise(edges):
        if start not in found:
            found[start] = Run(held, first + start, stop - start, {}, frame, whole=page, start=start, raw=True)
    return [found[start] for start in edges[:-1]]


def _part(page: Page, first: int, start: int, stop: int, frame: Page | None) -> Run:
    """Tokens ``[start, stop)`` of a page with side-cars: a loader takes outliers and signs, and the others are of queries and sums."""
    assert isinstance(page.codec, WithSideCars)
    run = _run(page.codec.codec, first + start, page.slice(start, stop), frame)._replace(whole=page, start=start)
    tiles = loaders.tiles_of(run.codec)
    # One that no loader knows stays, and leaves the page to torch.
    loaded = (*page.codec.frame_parts, *page.codec.sketches)
    outliers: Mapping[str, torch.Tensor] = {}
    if page.codec.side_car(Outliers) is not None and tiles is not None:
        found = outlier_entries.of_page(page, start, stop)
        if found is None:
            return run._replace(exact=False)
        if found:
            outliers = {**found, tiles_outliers.COLUMNS: tiles_outliers.columns_of(tiles, str(page.streams[OUTLIERS].device))}
    if not outliers:
        loaded = tuple(side_car for side_car in loaded if type(side_car) is not Outliers)
    codec = WithSideCars(run.codec, loaded) if loaded else run.codec
    return run._replace(codec=codec, streams={**run.streams, **outliers})


def _run(codec: Codec, first: int, page: Page, frame: Page | None) -> Run:
    streams = page.streams
    if type(codec) is Group:
        # Scales of 8 bits are few: they are looked up once.
        codec, streams = codec.with_pairs(streams)
    return Run(codec, first, page.tokens, streams, frame, whole=page)


def decoded(found: Sequence[Segment], columns: tuple[int, ...], side: str) -> list[Segment]:
    """Segments with the tokens of a ``side`` (k or v) decoded, in its coded frame and in the order of ``columns`` (``plan.columns``).

    In binary16, as tiles are, unless some value is too large or too small for it.
    """
    tensors = []
    for segment in found:
        run = segment.k if side == "k" else segment.v
        assert run.whole is not None
        start = run.start + segment.first - run.first
        values = run.whole.frame(start, start + segment.tokens)
        dim = values.shape[3]
        order = torch.tensor([channel if 0 <= channel < dim else dim for channel in columns], device=values.device)
        tensors.append(torch.nn.functional.pad(values, (0, 1))[..., order])
    halves = [values.to(torch.float16) for values in tensors]
    fit = all((half - values).norm() <= HALF_ERROR * values.norm() for half, values in zip(halves, tensors, strict=True))
    codec = Raw(len(columns), "fp16" if fit else "fp32")
    runs = [
        Run(codec, segment.first, segment.tokens, {"values": values})
        for segment, values in zip(found, halves if fit else tensors, strict=True)
    ]
    return [segment._replace(k=run) if side == "k" else segment._replace(v=run) for segment, run in zip(found, runs, strict=True)]


def segments(k: Sequence[Run], v: Sequence[Run], begin: int, end: int) -> list[Segment]:
    edges = sorted({begin, end, *(edge for run in (*k, *v) for edge in (run.first, run.first + run.tokens) if begin < edge < end)})

    firsts = [[run.first for run in found] for found in (k, v)]

    def holding(found: Sequence[Run], firsts: list[int], token: int) -> Run:
        return found[bisect_right(firsts, token) - 1]

    return [Segment(first, last - first, holding(k, firsts[0], first), holding(v, firsts[1], first)) for first, last in pairwise(edges)]
