"""Sizes of files that are longer than the packed window, so that headers and raw tokens take up a smaller share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvpack.cache.cache import side_entry
from kvpack.file import container
from kvpack.file.header import Contents, LayerEntry, SideEntry, layout_bytes, list_features, side_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.cache.cache import Cache
    from kvpack.cache.side import Side
    from kvpack.formats.base import Codec


@dataclass(frozen=True)
class FileLength:
    """The number of tokens in a file. A layer with a sliding window, from ``windows``, has at most as many tokens as its window."""

    tokens: int
    windows: Sequence[int | None]

    def in_layer(self, layer: int) -> int:
        return min(self.tokens, self.windows[layer] or self.tokens)

    def values(self, cache: Cache) -> int:
        """Return the number of values in a file of this length with the layers of ``cache``."""
        sides = [(number, side) for number, layer in enumerate(cache) for side in layer.sides.values()]
        return sum(side.batch * side.heads * side.dim * self.in_layer(number) for number, side in sides)

    def file_bytes(self, cache: Cache) -> int:
        """Return the size in bytes of a file of this length, with as many entries (such as raw tokens) per token as ``cache`` has."""
        contents = cache.contents
        layers = []
        for number, layer in enumerate(contents.layers):
            sides = {name: self._resize(side, contents.codecs[side.codec], number) for name, side in layer.sides()}
            layers.append(LayerEntry(sides.get("k"), sides.get("v")))
        required = list_features(contents.codecs)
        return container.file_size(Contents(codecs=contents.codecs, layers=tuple(layers), recipe=cache.recipe, required=required))

    def stream_bytes(self, side: Side, layer: int) -> int:
        """Return the size in bytes of the streams of ``side`` in a file of this length."""
        return sum(map(layout_bytes, side_tensors(side.codec, self._resize(side_entry(side, 0), side.codec, layer)).values()))

    def _resize(self, side: SideEntry, codec: Codec, layer: int) -> SideEntry:
        """Return the header entry of ``side`` in ``layer`` for tokens that are packed at once."""
        tokens = self.in_layer(layer)
        if tokens == side.tokens:
            return side
        tail = tokens % side.window if side.window else 0
        packed = tokens - tail
        ordinary, resized = (codec.default_entry_counts(side.batch, side.heads, count) for count in (side.packed, packed))
        entries = {
            name: resized[name] + round((count - ordinary[name]) * packed / max(1, side.packed)) for name, count in side.entries
        }
        return replace(side, runs=(packed,) if packed else (), tail=tail, entries=tuple(entries.items()))
