"""Sharing of prepared calls between layers of the same kind, whose calls differ only in stream addresses."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy
import torch

from kvpack.formats.klt import Klt
from kvpack.formats.minifloat import Minifloat
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.kernels.decode import tiles
from kvpack.kernels.decode.tiles import FIRST_ADDRESS
from kvpack.kernels.tiles.layers import Layer, PackedRun, Side, keys_and_values
from kvpack.kernels.tiles.work import STREAM_INTEGERS

from . import segments

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence


    Integers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

MAX_KINDS = 256
"""Maximum number of distinct page kinds to cache."""

MAX_PAGES = 64
"""Maximum number of pages of keys, and of values, for which layers share calls."""

ALIGNMENT = 16
"""Alignment in bytes. Layers of the same kind have equal stream addresses modulo this number, because kernels are compiled for it."""

_ALIGNMENT_INTEGERS = ALIGNMENT // 8
"""Tables are padded to multiples of this many int64 values, so that the next table is aligned."""

_VALUE_DEPENDENT_CODECS = (CodecWithSidecars, Klt, Minifloat)
"""Codecs whose prepared calls depend on stored values, so layers cannot share them."""


class _PageListKey(NamedTuple):
    """Key of the pages of a layer's keys or values: the id of their ``kind``, and the addresses of all streams, page by page.

    The kind covers everything that prepared calls depend on, except the addresses. Layers whose pages have the same kind share calls.
    """

    kind: int
    addresses: tuple[int, ...]


_page_kinds: WeakKeyDictionary[Sequence[PackedRun], _PageListKey | None] = WeakKeyDictionary()
"""Kinds of the page lists seen so far. The kind is None if pages are not shared."""

_kinds: dict[tuple[Hashable, ...], int] = {}
_next_kind = count()

_model_layers: WeakKeyDictionary[Sequence[PackedRun], list[tuple[ref[Sequence[PackedRun]], ref[Sequence[PackedRun]]]]] = WeakKeyDictionary()
"""Key pages and value pages of all layers of a model, looked up by the key pages of any of its layers."""


def warm_up(layers: Iterable[tuple[Sequence[PackedRun], Sequence[PackedRun]]]) -> None:
    """Classify the pages of all ``layers`` of a model together, which is faster than one layer at a time.

    Each element of ``layers`` is a pair: the layer's key pages and its value pages.
    """
    model_layers = []
    for k, v in layers:
        _page_list_key(k)
        _page_list_key(v)
        model_layers.append((ref(k), ref(v)))
        _model_layers[k] = model_layers


def _page_list_key(pages: Sequence[PackedRun]) -> _PageListKey | None:
    if pages not in _page_kinds:
        _page_kinds[pages] = _make_page_list_key(pages)
    return _page_kinds[pages]


def _make_page_list_key(pages: Sequence[PackedRun]) -> _PageListKey | None:
    if not 0 < len(pages) <= MAX_PAGES:
        return None
    kind: list[Hashable] = [len(pages)]
    addresses: list[int] = []
    for page in pages:
        if isinstance(page.codec, _VALUE_DEPENDENT_CODECS):
            return None
        kind += [page.codec, page.tokens]
        for name, x in page.streams.items():
            address = x.data_ptr()
            kind += [name, x.dtype, x.shape, x.stride(), address % ALIGNMENT]
            addresses.append(address)
    key = tuple(kind)
    if key not in _kinds:
        if len(_kinds) >= MAX_KINDS:
            _kinds.clear()
        _kinds[key] = next(_next_kind)
    return _PageListKey(_kinds[key], tuple(addresses))


def kind_key(layer: Layer) -> Hashable | None:
    """Return a key that is equal for all layers that can share prepared calls with ``layer``. Returns None if none can."""
    kind: list[Hashable] = []
    for side in (layer.k, layer.v):
        assert side is not None
        if (pages := _page_list_key(side.runs)) is None:
            return None
        tail = side.tail
        kind += [pages.kind, tail.shape, tail.dtype, tail.device]
    return tuple(kind)


class WorkTables:
    """The work tables of all token blocks of a call, concatenated. They fit every layer of the same kind as ``layer``.

    Tables store stream indices instead of addresses; ``bind`` inserts the addresses of a particular layer.
    """

    def __init__(self, layer: Layer) -> None:
        self._ends, self._streams, first = [], [], 0
        for side in keys_and_values(layer):
            loader, indices = tiles.find_loader(side.runs[0].codec), []
            for page in side.runs:
                # Each page may have its streams in a different order.
                stream_indices = {name: first + index for index, name in enumerate(page.streams)}
                indices.append([] if loader is None else [stream_indices[stream.name] for stream in loader.streams])
                first += len(stream_indices)
            self._ends.append(numpy.cumsum([page.tokens for page in side.runs]))
            # Indices of the streams that the loader reads, among all streams of a layer: ``[page, stream]``.
            self._streams.append(numpy.array(indices, numpy.int64))
        self._source_addresses = _stream_addresses(*(side.runs for side in keys_and_values(layer)))
        self._rows = numpy.zeros(0, numpy.int64)
        """All work tables, with 0 in place of stream addresses."""
        self._address_positions = self._stream_indices = self._rows
        """Position of each address in the tables, and the index of its stream among all streams of a layer."""
        self._device_tables: WeakKeyDictionary[Sequence[PackedRun], tuple[ref[Sequence[PackedRun]], torch.Tensor, int]] = (
            WeakKeyDictionary()
        )

    def add(self, values: bool, rows: Integers, tokens: Integers) -> int:
        """Append a work table, of values if ``values`` is True, otherwise of keys. Returns its offset, in int64 elements.

        ``rows`` is the table, with the addresses of the original layer. ``tokens`` is the first token of each row.
        """
        streams = self._streams[values][numpy.searchsorted(self._ends[values], tokens, "right")]
        offset, (pages, width) = len(self._rows), rows.shape
        columns = FIRST_ADDRESS.value + STREAM_INTEGERS.value * numpy.arange(streams.shape[1])
        positions = width * numpy.arange(pages)[:, None] + columns
        table = numpy.zeros(-(-rows.size // _ALIGNMENT_INTEGERS) * _ALIGNMENT_INTEGERS, numpy.int64)
        table[: rows.size] = rows.ravel()
        table[positions] -= self._source_addresses[streams]
        self._rows = numpy.concatenate([self._rows, table])
        self._address_positions = numpy.concatenate([self._address_positions, offset + positions.ravel()])
        self._stream_indices = numpy.concatenate([self._stream_indices, streams.ravel()])
        return offset

    def bind(self, layer: Layer, device: torch.device) -> tuple[torch.Tensor, int]:
        """Return the work tables of ``layer`` in an int64 tensor on ``device``, and the index of their first element in it.

        The tables of all layers of the same model and kind are built and copied together.
        """
        k, v = (side.runs for side in keys_and_values(layer))
        table = self._device_tables.get(k)
        if table is None or table[0]() is not v:
            kinds = _kind_ids(k, v)
            others = ((first(), other()) for first, other in _model_layers.get(k, ()))
            layers = [(k, v), *((x, y) for x, y in others if x is not None and y is not None and x is not k and _kind_ids(x, y) == kinds)]
            rows = numpy.tile(self._rows, (len(layers), 1))
            rows[:, self._address_positions] += numpy.stack([_stream_addresses(*pages) for pages in layers])[:, self._stream_indices]
            tables = torch.from_numpy(rows.ravel()).to(device, non_blocking=True)
            for index, (x, y) in enumerate(layers):
                self._device_tables[x] = ref(y), tables, index * len(self._rows)
            table = self._device_tables[k]
        return table[1:]


def _kind_ids(k: Sequence[PackedRun], v: Sequence[PackedRun]) -> tuple[int, int] | None:
    """Return the kind ids of a layer's key pages ``k`` and value pages ``v``, or None if the layer cannot share calls."""
    known = _page_list_key(k), _page_list_key(v)
    return None if known[0] is None or known[1] is None else (known[0].kind, known[1].kind)


def _stream_addresses(k: Sequence[PackedRun], v: Sequence[PackedRun]) -> Integers:
    """Return the addresses of all page streams of a layer, first of keys, then of values. The layer must be able to share calls."""
    known = _page_list_key(k), _page_list_key(v)
    assert known[0] is not None
    assert known[1] is not None
    return numpy.array(known[0].addresses + known[1].addresses, numpy.int64)


def reads_stored_streams(side: Side) -> bool:
    """Return True if kernels read the pages of ``side`` from the stored streams, without converted copies."""
    for segment in segments.side_segments(side).segments:
        if segment.page is None:
            continue
        streams = segment.page.streams
        unconverted = all(x is streams[name] for name, x in segment.streams.items())
        if not unconverted or segment.raw or not segment.exact or segment.frame_page is not None:
            return False
    return True
