"""The runs of tokens of a layer: what one codec stores and one loader takes, and where those of keys and values meet."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kvpack.formats.group import Group
from kvpack.formats.raw import Raw
from kvpack.formats.raw_tokens import FLAGS
from kvpack.formats.side_cars import WithSideCars

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpack.cache import Page, Side
    from kvpack.formats.base import Codec

RAW_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

RAW_TOKENS, MOST_RAW_TOKENS = 64, 4096
"""Tokens that are decoded together where one of them is raw, and of a page at most (or a sixteenth of it)."""

_runs: WeakKeyDictionary[Side, list[Run]] = WeakKeyDictionary()


class Run(NamedTuple):
    """Consecutive tokens of one side that one codec stores: a page, or the raw tail."""

    codec: Codec
    first: int
    tokens: int
    streams: Mapping[str, torch.Tensor]
    page: Page | None = None

    @property
    def frame(self) -> Frame:
        """What queries and sums of values go through."""
        return Frame(self.codec, self.page)


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


def of_side(side: Side) -> list[Run]:
    """The pages of ``side`` and its tail, which is a run of raw values; kept with the side."""
    if side not in _runs:
        found, first = [], 0
        for page in side.pages:
            found += _runs_of(page, first)
            first += page.tokens
        if side.tail.shape[2]:
            found.append(Run(Raw(side.dim, RAW_DTYPES[side.tail.dtype]), first, side.tail.shape[2], {"values": side.tail}))
        _runs[side] = found
    return _runs[side]


def _runs_of(page: Page, first: int) -> list[Run]:
    """One run, or with raw tokens several: the tiles that hold such tokens are decoded once, and are raw."""
    codec = page.codec
    if not isinstance(codec, WithSideCars):
        return [_run(codec, first, page, None)]
    if codec.outliers is not None:
        # No loader takes it.
        return [Run(codec, first, page.tokens, page.streams)]
    turned = (codec.channel_scale, codec.channel_order, codec.block_rotation)
    frame = page if any(side_car is not None for side_car in turned) else None
    if codec.raw_tokens is None:
        return [_run(_loaded(codec), first, page, frame)]
    size = math.lcm(RAW_TOKENS, codec.token_group)
    flagged = sorted({token // size for token in (page.streams[FLAGS] != 0).any(0)[0].nonzero()[:, 0].tolist()})
    if len(flagged) * size > max(MOST_RAW_TOKENS, page.tokens // 16):
        return [Run(codec, first, page.tokens, page.streams)]
    edges = sorted({0, page.tokens, *(min(edge * size, page.tokens) for tile in flagged for edge in (tile, tile + 1))})
    found = []
    for start, stop in pairwise(edges):
        if start // size in flagged:
            found.append(Run(Raw(page.codec.dim, "fp32"), first + start, stop - start, {"values": page.decode(start, stop)}))
        else:
            found.append(_run(_loaded(codec), first + start, page.slice(start, stop), frame))
    return found


def _loaded(codec: WithSideCars) -> Codec:
    """The codec of which a loader takes rows: the others of its side-cars are of queries, of sums or of tokens."""
    return codec.codec if codec.qjl is None else WithSideCars(codec.codec, qjl=codec.qjl)


def _run(codec: Codec, first: int, page: Page, frame: Page | None) -> Run:
    streams = page.streams
    inner = codec.codec if isinstance(codec, WithSideCars) else codec
    if type(inner) is Group:
        # Scales of 8 bits are few: they are looked up once.
        inner, streams = inner.with_pairs(streams)
        codec = replace(codec, codec=inner) if isinstance(codec, WithSideCars) else inner
    return Run(codec, first, page.tokens, streams, frame)


def segments(k: Sequence[Run], v: Sequence[Run], begin: int, end: int) -> list[Segment]:
    edges = sorted({begin, end, *(edge for run in (*k, *v) for edge in (run.first, run.first + run.tokens) if begin < edge < end)})

    def holding(found: Sequence[Run], token: int) -> Run:
        return next(run for run in found if run.first <= token < run.first + run.tokens)

    return [Segment(first, last - first, holding(k, first), holding(v, first)) for first, last in pairwise(edges)]
