"""Share prepared calls among layers of the same kind: calls of many queries are prepared once per model, except for addresses."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy
import torch

from kvpack.formats.klt import Klt
from kvpack.formats.minifloat import Minifloat
from kvpack.formats.side_cars import WithSideCars
from kvpack.kernels.decode import tiles
from kvpack.kernels.decode.tiles import FIRST_ADDRESS
from kvpack.kernels.tiles.work import STREAM_INTEGERS

from . import segments

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from kvpack.kernels.tiles.layers import Layer, PackedRun, Side

    Integers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

MAX_KINDS = 256
"""Kinds of pages that are known at most."""

MAX_PAGES = 64
"""Pages of a side up to which it is compared with those of other layers."""

ALIGNED = 16
"""Bytes up to which kernels are told how streams are aligned."""

_ALIGNED_INTEGERS = ALIGNED // 8
"""Integers of which a table has whole multiples, so that the one behind it is aligned."""

_OF_VALUES = (WithSideCars, Klt, Minifloat)
"""Codecs whose preparation depends on values."""


class _Pages(NamedTuple):
    """The kind number of pages, equal for pages that differ only in addresses, and the addresses of all streams, page by page."""

    kind: int
    addresses: tuple[int, ...]


_known: WeakKeyDictionary[Sequence[PackedRun], _Pages | None] = WeakKeyDictionary()
"""Kinds of the pages seen so far; None for pages that are not compared."""

_kinds: dict[tuple[Hashable, ...], int] = {}
_numbers = count()

_together: WeakKeyDictionary[Sequence[PackedRun], list[tuple[ref[Sequence[PackedRun]], ref[Sequence[PackedRun]]]]] = WeakKeyDictionary()
"""Kinds of the keys and the values of all layers of a model, by the pages of the keys."""


def warm_up(layers: Iterable[tuple[Sequence[PackedRun], Sequence[PackedRun]]]) -> None:
    """Inspect the pages of all ``layers`` of a model at once, which is faster than inspecting each one between other work."""
    all_of_them = []
    for k, v in layers:
        _known_pages(k)
        _known_pages(v)
        all_of_them.append((ref(k), ref(v)))
        _together[k] = all_of_them


def _known_pages(pages: Sequence[PackedRun]) -> _Pages | None:
    if pages not in _known:
        _known[pages] = _look_at(pages)
    return _known[pages]


def _look_at(pages: Sequence[PackedRun]) -> _Pages | None:
    if not 0 < len(pages) <= MAX_PAGES:
        return None
    kind: list[Hashable] = [len(pages)]
    addresses: list[int] = []
    for page in pages:
        if isinstance(page.codec, _OF_VALUES):
            return None
        kind += [page.codec, page.tokens]
        for name, x in page.streams.items():
            address = x.data_ptr()
            kind += [name, x.dtype, x.shape, x.stride(), address % ALIGNED]
            addresses.append(address)
    key = tuple(kind)
    if key not in _kinds:
        if len(_kinds) >= MAX_KINDS:
            _kinds.clear()
        _kinds[key] = next(_numbers)
    return _Pages(_kinds[key], tuple(addresses))


def kind_of(layer: Layer) -> Hashable | None:
    """Return a key that is equal for layers that differ only in addresses; None for a layer that is not compared."""
    kind: list[Hashable] = []
    for side in (layer.k, layer.v):
        assert side is not None
        if (pages := _known_pages(side.runs)) is None:
            return None
        tail = side.tail
        kind += [pages.kind, tail.shape, tail.dtype, tail.device]
    return tuple(kind)


class Tables:
    """The work tables of a call's blocks, one after another, for any layer like ``layer``."""

    def __init__(self, layer: Layer) -> None:
        assert layer.k is not None
        assert layer.v is not None
        self._ends, self._streams, first = [], [], 0
        for side in (layer.k, layer.v):
            loader, numbers = tiles.loader_of(side.runs[0].codec), []
            for page in side.runs:
                # Each page may have its streams in an order of its own.
                places = {name: first + place for place, name in enumerate(page.streams)}
                numbers.append([] if loader is None else [places[stream.name] for stream in loader.streams])
                first += len(places)
            self._ends.append(numpy.cumsum([page.tokens for page in side.runs]))
            # The numbers of the streams that the loader reads, among all of a layer: ``[page, stream]``.
            self._streams.append(numpy.array(numbers, numpy.int64))
        self._own = _addresses(layer.k.runs, layer.v.runs)
        self._rows = numpy.zeros(0, numpy.int64)
        """All tables, without the addresses of streams."""
        self._places = self._sources = self._rows
        """Position of each address in the tables, and the number of its stream among all streams of a layer."""
        self._made: WeakKeyDictionary[Sequence[PackedRun], tuple[ref[Sequence[PackedRun]], torch.Tensor, int]] = WeakKeyDictionary()

    def add(self, values: bool, rows: Integers, tokens: Integers) -> int:
        """Add the table ``rows`` of the layer's keys or ``values`` and return its offset; ``tokens`` are the first tokens of the rows."""
        sources = self._streams[values][numpy.searchsorted(self._ends[values], tokens, "right")]
        at, (pages, width) = len(self._rows), rows.shape
        columns = FIRST_ADDRESS.value + STREAM_INTEGERS.value * numpy.arange(sources.shape[1])
        places = width * numpy.arange(pages)[:, None] + columns
        table = numpy.zeros(-(-rows.size // _ALIGNED_INTEGERS) * _ALIGNED_INTEGERS, numpy.int64)
        table[: rows.size] = rows.ravel()
        table[places] -= self._own[sources]
        self._rows = numpy.concatenate([self._rows, table])
        self._places = numpy.concatenate([self._places, at + places.ravel()])
        self._sources = numpy.concatenate([self._sources, sources.ravel()])
        return at

    def of(self, layer: Layer, device: torch.device) -> tuple[torch.Tensor, int]:
        """Return the tables for ``layer``, int64 ``[integer]`` on ``device``, and their offset.

        They are built for all known layers of the same kind together.
        """
        assert layer.k is not None
        assert layer.v is not None
        k, v = layer.k.runs, layer.v.runs
        table = self._made.get(k)
        if table is None or table[0]() is not v:
            kinds = _kinds_of(k, v)
            others = ((first(), other()) for first, other in _together.get(k, ()))
            like = [(k, v), *((x, y) for x, y in others if x is not None and y is not None and x is not k and _kinds_of(x, y) == kinds)]
            rows = numpy.tile(self._rows, (len(like), 1))
            rows[:, self._places] += numpy.stack([_addresses(*pages) for pages in like])[:, self._sources]
            tables = torch.from_numpy(rows.ravel()).to(device, non_blocking=True)
            for number, (x, y) in enumerate(like):
                self._made[x] = ref(y), tables, number * len(self._rows)
            table = self._made[k]
        return table[1:]


def _kinds_of(k: Sequence[PackedRun], v: Sequence[PackedRun]) -> tuple[int, int] | None:
    """Return the kinds of a layer's pages, or None if they are not compared."""
    known = _known_pages(k), _known_pages(v)
    return None if known[0] is None or known[1] is None else (known[0].kind, known[1].kind)


def _addresses(k: Sequence[PackedRun], v: Sequence[PackedRun]) -> Integers:
    """Return the addresses of all page streams of a compared layer: keys first, then values."""
    known = _known_pages(k), _known_pages(v)
    assert known[0] is not None
    assert known[1] is not None
    return numpy.array(known[0].addresses + known[1].addresses, numpy.int64)


def is_plain(side: Side) -> bool:
    """Return True if kernels read the page streams without conversion."""
    for segment in segments.of_side(side).segments:
        if segment.page is None:
            continue
        streams = segment.page.streams
        as_they_are = all(x is streams[name] for name, x in segment.streams.items())
        if not as_they_are or segment.raw or not segment.exact or segment.framed_by is not None:
            return False
    return True
