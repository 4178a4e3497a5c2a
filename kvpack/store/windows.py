"""The part of a prefix within sliding windows: layers load no older chunks, and chunks that a layer has dropped are not saved."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvpack.formats.errors import InvalidParameter, KvpackWarning

if TYPE_CHECKING:
    from kvpack.cache.cache import Cache


@dataclass(frozen=True)
class Windows:
    """The sliding windows of a model's layers, None for a layer without one, and the tokens of a chunk."""

    layers: tuple[int | None, ...]
    chunk: int

    def first_chunk(self, chunks: int) -> int:
        """Return the first of ``chunks`` chunks that any layer attends to after them: 0 if a layer has no window."""
        if not self.layers or None in self.layers:
            return 0
        return min(self._first_token(chunks * self.chunk, window) for window in self.layers if window is not None) // self.chunk

    def crop(self, cache: Cache) -> Cache:
        """Return ``cache`` with only the chunks of each layer that are within its window after the last token."""
        # A chain that begins with a later chunk is a prefix whose layers have skipped the others.
        skipped = cache.start
        layers = [replace(layer, skipped=skipped) if layer.sides else layer for layer in cache]
        cache = replace(cache, layers=tuple(layers), start=0)
        for number, (layer, window) in enumerate(zip(cache, self.layers, strict=False)):
            first = 0 if window is None else self._first_token(cache.tokens, window)
            if layer.sides and first > layer.skipped:
                sides = {name: side.slice(first - layer.skipped, side.tokens) for name, side in layer.sides.items()}
                layers[number] = replace(layer, k=sides.get("k"), v=sides.get("v"), skipped=first)
        return replace(cache, layers=tuple(layers))

    def _first_token(self, tokens: int, window: int) -> int:
        """Return the first token of the first chunk that token ``tokens`` attends to."""
        return max(0, tokens - window + 1) // self.chunk * self.chunk


def check_complete(cache: Cache, stored: int) -> None:
    """Check that every layer still contains the tokens after the first ``stored``, which are already stored.

    Raises InvalidParameter if nothing is stored. If only later chunks are missing, they may have been evicted, and a KvpackWarning is
    issued.
    """
    for number, layer in enumerate(cache):
        if layer.skipped > stored and layer.tokens:
            first, last = cache.positions(number)
            text = (
                f"layers[{number}] holds {layer.tokens} of {cache.tokens} tokens, positions {first} to {last}, but the store has the first "
                f"{stored}: a sliding window has dropped tokens in between. Compute the prompt with kvpack.prefill, or into a "
                "KvpackCache(..., keep_all=True), whose layers keep all tokens"
            )
            if not stored:
                raise InvalidParameter(text)
            warnings.warn(text, KvpackWarning, stacklevel=4)
            return
