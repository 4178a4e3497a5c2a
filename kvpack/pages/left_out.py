"""Counting of raw tokens that do not fit into an engine's pages. A single warning is issued if they cost precision."""

from __future__ import annotations

import warnings
from threading import Lock
from typing import TYPE_CHECKING

from kvpack.errors import KvpackWarning
from kvpack.formats.group import PER_HEAD

if TYPE_CHECKING:
    from .geometry import PageGeometry


class LeftOutTokens:
    """Counts tokens that should have been kept raw, but for which a page had no room. Safe to use from any thread.

    A token of low norm is harmless, because only its own error grows. A token is ``costly`` in two cases: tokens or heads that share scales
    with it lose precision, because its norm is high or a shared scale does not fit it; or it loses precision itself, because a map, a mean
    or its own scale does not fit it.
    """

    def __init__(self, geometry: PageGeometry) -> None:
        self._tokens = geometry.tokens
        self._lock, self._has_warned = Lock(), False
        self.count = self.costly = 0

    def add(self, count: int, costly: int) -> None:
        """Add the counts of one page, without warning."""
        with self._lock:
            self.count += count
            self.costly += costly

    def warn(self, costly: int) -> None:
        """Issue a KvpackWarning about ``costly`` tokens, unless one has been issued already."""
        with self._lock:
            if self._has_warned or not costly:
                return
            self._has_warned = True
        warnings.warn(
            f"in pages of {self._tokens} tokens, {costly} tokens that differ too much from the others have no room among the raw tokens: "
            "they, or tokens and heads that share scales with them, lose precision. To avoid this, use larger pages, of 64 tokens or more, "
            f"with raw=0,0.6,4 in the recipe, or write token_scale=fp16{PER_HEAD} for the group codec and per=token for minifloat, and "
            "omit mean= and channel_scale=. This warning is issued once; "
            "PageCodec.raw_tokens_left_out keeps counting",
            KvpackWarning,
            stacklevel=3,
        )
