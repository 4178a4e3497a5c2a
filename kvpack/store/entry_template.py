"""Read entries with the same layout fast: only the first header is parsed.

A chunk's header differs from the next chunk's in its digests, its start and the feature that names it. A template is built from an entry
that was read and checked in full. Another entry matches it if every other byte before its payload is the same; its tensors then have the
same offsets as in the first entry.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

import msgpack
import torch
import xxhash

from kvpack.cache.cache import Cache
from kvpack.cache.layer import Layer
from kvpack.cache.packed_runs import PackedRun
from kvpack.cache.side import Side
from kvpack.coding.encoding import TORCH_DTYPES
from kvpack.file.front import DIGEST_PLACE, pack_header
from kvpack.formats.base import DTYPE_BYTES
from kvpack.formats.raw_positions import POSITIONS, VALUES
from kvpack.runtime.modes import float32_no_grad

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.file.container import File
    from kvpack.file.header import Header, SideEntry

StreamView = tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""Name, dtype, shape, strides and first element (of the file as an array of that dtype)."""


_RAW_STREAMS = {POSITIONS, VALUES}
"""The streams with a row per entry that entries which match may have: as many rows, at other tokens. Most chunks have none."""


@dataclass(frozen=True)
class SideTemplate:
    """The part of a side that all entries matching a template share."""

    entry: SideEntry
    streams: tuple[StreamView, ...]
    template: Side

    def side(self, arrays: Mapping[torch.dtype, torch.Tensor]) -> Side:
        """Return the side of an entry; ``arrays`` contains all of its bytes by dtype."""
        streams = {name: torch.as_strided(arrays[dtype], shape, strides, first) for name, dtype, shape, strides, first in self.streams}
        return Side(
            self.template.codec, (PackedRun(self.template.codec, self.entry.runs[0], streams),), self.template.tail, self.template.window
        )


@dataclass(frozen=True)
class EntryTemplate:
    """The bytes that entries have in common, and the offsets of their tensors."""

    size: int
    text: bytes
    header: torch.Tensor
    fixed: torch.Tensor
    start_place: slice
    feature_place: slice
    payload: int
    recipe: str
    model: Mapping[str, str]
    plans: tuple[tuple[SideTemplate | None, SideTemplate | None], ...]

    @classmethod
    def of(cls, file: File, feature: str, cache: Cache) -> Self | None:
        """Build the template of a file with one run per side, as a chunk has, and without filters; None for any other."""
        header = file.header
        if any(tensor.filter != "none" for tensor in header.tensors):
            return None
        plans = []
        for index, layer in enumerate(header.layers):
            sides = dict(layer.sides())
            if any(len(entry.runs) != 1 or entry.tail or not dict(entry.entries).keys() <= _RAW_STREAMS for entry in sides.values()):
                return None
            plans.append(tuple(_side_template(file, index, name, sides[name], cache) if name in sides else None for name in ("k", "v")))
        packed = pack_header(header)
        digests = tuple(dataclasses.replace(tensor, digest=_invert_bits(tensor.digest)) for tensor in header.tensors)
        without_digests = _differing_bytes(packed, pack_header(dataclasses.replace(header, tensors=digests)))
        feature_bytes = header.ignorable[feature]
        other = {**header.ignorable, feature: _invert_bits(feature_bytes)}
        feature_at = int(_differing_bytes(packed, pack_header(dataclasses.replace(header, ignorable=other))).nonzero()[0])
        start_place = _start_place(header, packed)
        fixed = ~without_digests
        fixed[start_place] = fixed[feature_at : feature_at + len(feature_bytes)] = False
        return cls(
            size=file.size,
            text=file.front.text,
            header=_byte_tensor(packed)[fixed],
            fixed=fixed,
            start_place=start_place,
            feature_place=slice(feature_at, feature_at + len(feature_bytes)),
            payload=len(file.front.text) + min((place.begin for place in file.front.places.values()), default=len(packed)),
            recipe=header.recipe,
            model=MappingProxyType(dict(header.model)),
            plans=tuple(plans),  # type: ignore[arg-type]
        )

    def feature(self, data: memoryview, start: int) -> bytes | None:
        """Return the feature of a matching entry whose first token is ``start``; None if ``data`` does not match."""
        if len(data) != self.size:
            return None
        header_end = len(self.text) + len(self.fixed)
        header = bytes(data[len(self.text) : header_end])
        text = bytearray(data[: len(self.text)])
        digest = xxhash.xxh3_128_hexdigest(header).encode()
        if text[DIGEST_PLACE] != digest:
            return None
        text[DIGEST_PLACE] = self.text[DIGEST_PLACE]
        if text != self.text or header[self.start_place] != msgpack.packb(start):
            return None
        if any(data[header_end : self.payload]) or not torch.equal(_byte_tensor(header)[self.fixed], self.header):
            return None
        return header[self.feature_place]

    def cache(self, data: memoryview, start: int) -> Cache:
        """Return the cache of a matching entry as views of it."""
        with float32_no_grad(torch.device("cpu")):
            dtypes = {dtype for sides in self.plans for plan in sides if plan for _, dtype, *_ in plan.streams}
            arrays = {dtype: torch.frombuffer(data, dtype=dtype, count=self.size // dtype.itemsize) for dtype in dtypes}
            layers = tuple(Layer(*(plan.side(arrays) if plan is not None else None for plan in sides)) for sides in self.plans)
        return Cache(layers, self.recipe, self.model, start)


def _side_template(file: File, index: int, name: str, entry: SideEntry, cache: Cache) -> SideTemplate:
    streams = []
    for stream, layout in file.header.streams[entry].items():
        place = file.front.places[f"{index}.{name}.{stream}"]
        first = (len(file.front.text) + place.begin) // DTYPE_BYTES[layout.dtype]
        streams.append((stream, TORCH_DTYPES[layout.dtype], layout.shape, layout.strides, first))
    return SideTemplate(entry, tuple(streams), cache[index].sides[name])


def _start_place(header: Header, packed: bytes) -> slice:
    """Return the position of the start in the header, found by encoding another start of the same length."""
    other = header.start ^ 1
    last = int(_differing_bytes(packed, pack_header(dataclasses.replace(header, start=other))).nonzero()[-1])
    length = len(msgpack.packb(header.start))
    return slice(last - length + 1, last + 1)


def _invert_bits(data: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in data)


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _differing_bytes(first: bytes, other: bytes) -> torch.Tensor:
    return _byte_tensor(first) != _byte_tensor(other)
