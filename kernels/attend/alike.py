"""Layers that lie alike: what a call of many queries prepares for one holds for the others of a model, but for addresses."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy

from kvpack.formats.klt import Klt
from kvpack.formats.minifloat import Minifloat
from kvpack.formats.side_cars import WithSideCars
from kvpack.kernels.decode.tiles import FIRST_ADDRESS

from . import segments
from .work import STREAM_INTEGERS

if TYPE_CHECKING:
    from kvpack.kernels.loaders.tiles import Tiles

    from .layers import Layer, Side

    Integers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

MOST_PAGES = 64
"""Pages of a side up to which it is compared with those of other layers."""

ALIGNED = 16
"""Bytes up to which kernels are told how streams are aligned."""

_OF_VALUES = (WithSideCars, Klt, Minifloat)
"""Codecs of which what is prepared depends on values."""


def kind_of(layer: Layer) -> Hashable | None:
    """What is equal for layers that differ in addresses alone; None for one that is not compared."""
    kinds = []
    for side in (layer.k, layer.v):
        assert side is not None
        pages = side.pages
        if not 0 < len(pages) <= MOST_PAGES:
            return None
        kind: list[Hashable] = [side.tail.shape, side.tail.dtype, side.tail.device]
        for page in pages:
            if isinstance(page.codec, _OF_VALUES):
                return None
            kind += [page.codec, page.tokens]
            kind += [(name, x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNED) for name, x in page.streams.items()]
        kinds.append(tuple(kind))
    return tuple(kinds)


def is_plain(side: Side) -> bool:
    """Whether kernels read the streams of the pages as they are."""
    for segment in segments.of_side(side).segments:
        if segment.page is None:
            continue
        streams = segment.page.streams
        as_they_are = all(x is streams[name] for name, x in segment.streams.items())
        if not as_they_are or segment.raw or not segment.exact or segment.framed_by is not None:
            return False
    return True


def bases_of(side: Side, tiles: Tiles) -> Integers:
    """The addresses of the streams of each page, ``[page, stream]``."""
    return numpy.array([[page.streams[stream.name].data_ptr() for stream in tiles.streams] for page in side.pages], dtype=numpy.int64)


def pages_of(side: Side, tokens: Integers) -> Integers:
    """The number of the page that holds each of ``tokens``."""
    ends = numpy.cumsum([page.tokens for page in side.pages])
    return numpy.searchsorted(ends, tokens, "right")


def moved(rows: Integers, bases: Integers) -> Integers:
    """``rows`` of work whose addresses are ``bases`` ``[row, stream]`` further."""
    result = rows.copy()
    result[:, FIRST_ADDRESS.value :: STREAM_INTEGERS.value] += bases
    return result
