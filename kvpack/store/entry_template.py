"""A fast path for reading entries with the same layout. Only the first header is parsed.

A template is built from an entry that has been read and checked in full. Entries with the same front have the same tensor offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

import torch

from kvpack.cache.cache import Cache
from kvpack.cache.layer import Layer
from kvpack.cache.packed_runs import PackedRun, PackedRuns
from kvpack.cache.side import Side
from kvpack.coding.encoding import TORCH_DTYPES
from kvpack.file.container import File
from kvpack.file.header import SideEntry
from kvpack.formats.raw_positions import POSITIONS, VALUES
from kvpack.formats.streams import DTYPE_BYTES
from kvpack.runtime.modes import float32_no_grad

from .header_template import HeaderTemplate

StreamView = tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""A stream's name, dtype, shape, strides, and offset from the beginning of the file in elements of the dtype."""


_RAW_STREAMS = {POSITIONS, VALUES}
"""Optional streams of raw tokens. Matching entries may have different contents, but not different sizes."""


@dataclass(frozen=True)
class SideTemplate:
    """The part of a template for one layer's keys or values."""

    entry: SideEntry
    streams: tuple[StreamView, ...]
    template: Side

    def side(self, arrays: Mapping[torch.dtype, torch.Tensor]) -> Side:
        """Return the keys or values of a matching entry. ``arrays`` views the entry's bytes as one tensor per dtype."""
        streams = {name: torch.as_strided(arrays[dtype], shape, strides, first) for name, dtype, shape, strides, first in self.streams}
        run = PackedRun(self.template.codec, self.entry.runs[0], streams)
        return Side(self.template.codec, PackedRuns.from_runs([run]), self.template.tail, self.template.window)


@dataclass(frozen=True)
class EntryTemplate:
    """The layout that all matching entries share: the leading bytes up to the first tensor, and the offsets of the tensors."""

    front: HeaderTemplate
    recipe: str
    model: Mapping[str, str]
    plans: tuple[tuple[SideTemplate | None, SideTemplate | None], ...]

    @classmethod
    def from_file(cls, file: File, feature: str, cache: Cache) -> Self | None:
        """Build a template from a chunk's file and its cache.

        Returns None unless each side is one packed run without a raw tail, and no tensor is compressed.
        """
        header = file.header
        if any(tensor.filter != "none" for tensor in header.tensors):
            return None
        plans = []
        for index, layer in enumerate(header.layers):
            sides = dict(layer.sides())
            if any(len(entry.runs) != 1 or entry.tail or not dict(entry.entries).keys() <= _RAW_STREAMS for entry in sides.values()):
                return None
            plans.append(tuple(_side_template(file, index, name, sides[name], cache) if name in sides else None for name in ("k", "v")))
        return cls(HeaderTemplate.from_file(file, feature), header.recipe, MappingProxyType(dict(header.model)), tuple(plans))  # type: ignore[arg-type]

    def feature(self, data: memoryview, start: int) -> bytes | None:
        """Return the feature of ``data`` if it matches this template and begins at position ``start``, or None otherwise."""
        found = self.front.match(data)
        return found[1] if found is not None and found[0] == start else None

    def cache(self, data: memoryview, start: int) -> Cache:
        """Return the cache of a matching entry, as views of ``data``."""
        with float32_no_grad(torch.device("cpu")):
            dtypes = {dtype for sides in self.plans for plan in sides if plan for _, dtype, *_ in plan.streams}
            arrays = {dtype: torch.frombuffer(data, dtype=dtype, count=self.front.size // dtype.itemsize) for dtype in dtypes}
            layers = tuple(Layer(*(plan.side(arrays) if plan is not None else None for plan in sides)) for sides in self.plans)
        return Cache(layers, self.recipe, self.model, start)


def _side_template(file: File, index: int, name: str, entry: SideEntry, cache: Cache) -> SideTemplate:
    streams = []
    for stream, layout in file.header.streams[entry].items():
        place = file.front.places[f"{index}.{name}.{stream}"]
        first = (len(file.front.text) + place.begin) // DTYPE_BYTES[layout.dtype]
        streams.append((stream, TORCH_DTYPES[layout.dtype], layout.shape, layout.strides, first))
    return SideTemplate(entry, tuple(streams), cache[index].sides[name])
