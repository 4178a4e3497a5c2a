"""The parts of a prefix that sliding windows need. Older chunks are not loaded. Chunks that a layer has dropped are not saved."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvpack.formats.errors import InvalidParameter, KvpackWarning

if TYPE_CHECKING:
    from kvpack.cache.cache import Cache


@dataclass(frozen=True)
class SlidingWindows:
    """The sliding windows of a model's layers. ``layers`` contains each window in tokens (None for full attention).

    ``chunk`` is the number of tokens per chunk.
    """

    layers: tuple[int | None, ...]
    chunk: int

    def first_chunk(self, chunks: int) -> int:
        """Return the index of the first chunk that any layer needs for the token after the first ``chunks`` chunks."""
        if not self.layers or None in self.layers:
            return 0
        return min(self._first_token(chunks * self.chunk, window) for window in self.layers if window is not None) // self.chunk

    def crop(self, cache: Cache) -> Cache:
        """Return ``cache`` without the chunks, in each layer, that the next token does not attend to."""
        # If only later chunks were loaded, the cache is a prefix whose layers have skipped the earlier tokens.
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
        """Return the first token of the first chunk that the token at position ``tokens`` attends to."""
        return max(0, tokens - window + 1) // self.chunk * self.chunk


def check_complete(cache: Cache, stored: int) -> None:
    """Check that every layer still has all tokens after the first ``stored`` tokens, which are already in the store.

    If tokens are missing and nothing is stored, raises InvalidParameter. If something is stored, issues a KvpackWarning instead, because
    the missing chunks may have been stored earlier and then evicted.
    """
    for number, layer in enumerate(cache):
        if layer.skipped > stored and layer.tokens:
            first, last = cache.positions(number)
            text = (
                f"layers[{number}] holds {layer.tokens} of {cache.tokens} tokens, positions {first} to {last - 1}, but the store has the "
                f"first {stored} tokens: a sliding window has dropped tokens in between. Run the prompt through kvpack.prefill, or with a "
                "KvpackCache(..., keep_all=True), whose layers keep all tokens"
            )
            if not stored:
                raise InvalidParameter(text)
            warnings.warn(text, KvpackWarning, stacklevel=4)
            return
