"""Sizes of files of another length than the window that was packed, in which headers and raw tokens have another share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvpack.cache.cache import side_entry
from kvpack.file import container
from kvpack.file.header import LayerEntry, SideEntry, layout_bytes, side_tensors

if TYPE_CHECKING:
    from kvpack.cache.cache import Cache
    from kvpack.cache.side import Side
    from kvpack.formats.base import Codec


def file_bytes_at(cache: Cache, tokens: int) -> int:
    """Return the size in bytes of the file of ``cache`` if it had ``tokens`` tokens, with as many entries (such as raw tokens) per token.
    """
    if tokens == cache.tokens:
        return cache.nbytes
    contents = cache.contents
    layers = [
        LayerEntry(**{name: _resize(side, contents.codecs[side.codec], tokens) for name, side in layer.sides()})
        for layer in contents.layers
    ]
    return container.file_size(replace(contents, layers=tuple(layers)))


def stream_bytes_at(side: Side, tokens: int) -> int:
    """Return the size in bytes of the streams of ``side`` if it had ``tokens`` tokens."""
    entry = side_entry(side, 0)
    if tokens != side.tokens:
        entry = _resize(entry, side.codec, tokens)
    return sum(map(layout_bytes, side_tensors(side.codec, entry).values()))


def _resize(side: SideEntry, codec: Codec, tokens: int) -> SideEntry:
    """Return the header entry of ``side`` for ``tokens`` tokens that are packed at once."""
    tail = tokens % side.window if side.window else 0
    runs = (tokens - tail,) if tokens > tail else ()
    ordinary, resized = (codec.default_entry_counts(side.batch, side.heads, count) for count in (side.packed, sum(runs)))
    entries = {
        name: resized[name] + round((count - ordinary[name]) * sum(runs) / max(1, side.packed)) for name, count in side.entries
    }
    return replace(side, runs=runs, tail=tail, entries=tuple(entries.items()))
