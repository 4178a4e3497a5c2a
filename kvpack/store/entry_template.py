"""A fast path for entries with the same layout, which parses only the first header.

The headers of two chunks differ only in the digests, the start and the feature that names the chunk. A template is built from an entry
that has been read and checked in full. Another entry matches the template if all other bytes before its payload are the same. Its tensors
then have the same offsets.
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
from kvpack.file.front import DIGEST_SLICE, pack_header
from kvpack.formats.base import DTYPE_BYTES
from kvpack.formats.raw_positions import POSITIONS, VALUES
from kvpack.runtime.modes import float32_no_grad

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.file.container import File
    from kvpack.file.header import Header, SideEntry

StreamView = tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""A stream's name, dtype, shape, strides and offset, in elements of the dtype from the beginning of the file."""


_RAW_STREAMS = {POSITIONS, VALUES}
"""The optional streams that matching entries may have, for raw tokens. Their sizes must be the same, but not their contents."""


@dataclass(frozen=True)
class SideTemplate:
    """The parts of one layer's keys or values that all entries matching a template have in common."""

    entry: SideEntry
    streams: tuple[StreamView, ...]
    template: Side

    def side(self, arrays: Mapping[torch.dtype, torch.Tensor]) -> Side:
        """Return the keys or values of a matching entry. ``arrays`` has the entry's bytes as a tensor of each dtype."""
        streams = {name: torch.as_strided(arrays[dtype], shape, strides, first) for name, dtype, shape, strides, first in self.streams}
        return Side(
            self.template.codec, (PackedRun(self.template.codec, self.entry.runs[0], streams),), self.template.tail, self.template.window
        )


@dataclass(frozen=True)
class EntryTemplate:
    """The bytes that matching entries have in common, and the offsets of their tensors."""

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
        """Build a template from the file of a chunk and its cache.

        Returns None unless the file has one packed run per side, without a raw tail, and no filters.
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
        if text[DIGEST_SLICE] != digest:
            return None
        text[DIGEST_SLICE] = self.text[DIGEST_SLICE]
        if text != self.text or header[self.start_place] != msgpack.packb(start):
            return None
        if any(data[header_end : self.payload]) or not torch.equal(_byte_tensor(header)[self.fixed], self.header):
            return None
        return header[self.feature_place]

    def cache(self, data: memoryview, start: int) -> Cache:
        """Return the cache of a matching entry, as views of ``data``."""
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
    """Return the bytes of the packed header that encode the start, found by packing the header with another start of the same length."""
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
