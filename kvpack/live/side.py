"""One *side* of a live layer (its keys or its values): packed runs, the last of which grows in place, and a raw tail buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from kvpack.cache.packed_runs import PackedRun, PackedRuns
from kvpack.cache.side import Side
from kvpack.coding.encoding import TORCH_DTYPES, encode
from kvpack.coding.token_errors import collect_poor_fits, warn_of_poor_fits
from kvpack.formats.base import Codec
from kvpack.runtime.modes import float32_no_grad

GROWTH = 16
"""A new page has room for one token per ``GROWTH`` packed tokens, which limits unused memory."""

MIN_WINDOWS = 8
"""Minimum number of windows that fit in a new page."""


@dataclass
class OpenPage:
    """A packed run that is still being filled. It has room for ``capacity`` tokens. The first ``filled`` tokens are final."""

    codec: Codec
    capacity: int
    streams: Mapping[str, torch.Tensor]
    filled: int = 0

    @staticmethod
    def allocate(codec: Codec, batch: int, heads: int, capacity: int, device: torch.device) -> OpenPage:
        layout = codec.layout(batch, heads, capacity)
        streams = {name: torch.zeros(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device=device) for name, entry in layout.items()}
        return OpenPage(codec, capacity, streams)

    def append(self, streams: Mapping[str, torch.Tensor], start: int, tokens: int) -> None:
        """Append tokens ``[start, start + tokens)`` of ``streams``. ``start`` and ``tokens`` must be multiples of the token group."""
        for name, entry in self.codec.row_layouts.items():
            row, first, count = self.filled // entry.tokens_per_row, start // entry.tokens_per_row, -(-tokens // entry.tokens_per_row)
            self.streams[name][:, :, row : row + count] = streams[name][:, :, first : first + count]
        self.filled += tokens

    @property
    def page(self) -> PackedRun:
        """The tokens written so far, as views that later tokens do not change."""
        layout = self.codec.row_layouts
        rows = {name: -(-self.filled // entry.tokens_per_row) for name, entry in layout.items()}
        return PackedRun(self.codec, self.filled, {name: stream[:, :, : rows[name]] for name, stream in self.streams.items()})


@lru_cache(maxsize=256)
def _has_token_rows(codec: Codec) -> bool:
    return all(entry.per == "token" for entry in codec.row_layouts.values())


class SideState(NamedTuple):
    """A snapshot of a side's runs and buffers, with the number of tokens in each open page."""

    runs: PackedRuns
    unfinished: torch.Tensor
    open: tuple[OpenPage, ...]
    filled: tuple[int, ...]
    joined: PackedRuns | None
    tail: torch.Tensor


class LiveSide:
    """The keys or the values of a live layer. They continue an immutable ``side`` and share its runs.

    The tail is a buffer ``[batch, kv_head, room, dim]``. It begins with the newest ``raw_tokens`` tokens of the immutable side's tail. The
    layer counts its tokens. Tokens are encoded ``window`` at a time, a multiple of the codec's token group. Older tokens of the immutable
    side's tail are ``unfinished``: the layer's other side has already packed them, but here they stay raw until they fill a token group.
    """

    def __init__(self, side: Side, window: int, room: int, raw_tokens: int, in_place: bool) -> None:
        self.codec, self.window = side.codec, window
        self._runs: PackedRuns = side.runs
        self._given_window = side.window
        older = side.tail.shape[2] - raw_tokens
        self.unit = window if side.window else self.codec.group_tokens
        """Raw tokens are encoded in multiples of this number of tokens."""
        # Leave inference mode, because tensors created in it can be written only in it.
        with float32_no_grad(side.device):
            self.tail = torch.zeros(side.batch, side.heads, room, side.dim, dtype=side.tail.dtype, device=side.device)
            if raw_tokens:
                self.tail[:, :, :raw_tokens] = side.tail[:, :, older:]
            self.unfinished = side.tail[:, :, :older].clone()
        # Streams with a row per entry or run have sizes that depend on the values. Such runs are joined instead of filled.
        self._in_place = in_place and _has_token_rows(side.codec)
        self._open: list[OpenPage] = []
        self._joined: PackedRuns | None = None
        self._has_warned = False
        self.packed_tokens = self._runs.tokens

    @property
    def batch(self) -> int:
        return self.tail.shape[0]

    @property
    def heads(self) -> int:
        return self.tail.shape[1]

    @property
    def dim(self) -> int:
        return self.tail.shape[3]

    @property
    def nbytes(self) -> int:
        packed = sum(stream.nbytes for stretch in self._runs.stretches for stream in stretch.streams.values())
        filled = sum(stream.nbytes for page in self._open for stream in page.streams.values())
        return packed + filled + self.unfinished.nbytes + self.tail.nbytes

    @property
    def older_tokens(self) -> int:
        """Number of packed and unfinished tokens, which precede the tail."""
        return self.packed_tokens + self.unfinished.shape[2]

    def side(self, tokens: int) -> Side:
        """Return the current keys or values with the first ``tokens`` tokens of the tail, as views."""
        return self.with_tail(self.tail[:, :, :tokens])

    def with_tail(self, tail: torch.Tensor) -> Side:
        """Return the current keys or values with ``tail`` as their tail."""
        return Side(self.codec, self.runs, self.with_unfinished(tail), self._given_window)

    def without_tokens(self, batch: int) -> Side:
        """Return a side for ``batch`` sequences with the same codec but no tokens."""
        return Side(self.codec, PackedRuns(), self.tail.new_empty(batch, self.heads, 0, self.dim), self._given_window)

    def with_unfinished(self, x: torch.Tensor) -> torch.Tensor:
        """Return the unfinished tokens followed by ``x``, ``[batch, kv_head, token, dim]``."""
        if not self.unfinished.shape[2]:
            return x
        with float32_no_grad(x.device):
            return torch.cat([self.unfinished, x], 2)

    def freeze(self, tokens: int, packed: bool, where: str, position: int, norms: Mapping[str, torch.Tensor]) -> Side:
        """Return an immutable side that ends with the first ``tokens`` tokens of the tail.

        With ``packed=True``, the tail is packed in whole token groups or, if the recipe sets a window, in whole windows. For ``position``
        and ``norms`` of the tokens after the packed ones, and for errors, see ``encode``.
        """
        raw = self.with_unfinished(self.tail[:, :, :tokens])
        whole = raw.shape[2] // self.unit * self.unit if packed else 0
        side = Side(self.codec, self.runs, raw[:, :, whole:].clone(), self._given_window)
        if not whole:
            return side
        streams = self.encode(raw[:, :, :whole], where, position, norms)
        return replace(side, runs=self.runs.append(PackedRun(self.codec, whole, streams)))

    def encode(self, x: torch.Tensor, where: str, position: int, norms: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Encode ``x``, ``[batch, kv_head, token, dim]``, the whole token groups after the packed tokens. Returns the streams.

        ``position`` is the position of the first token. If known, ``norms`` contains the norms of keys and of values from this token on,
        each ``[batch, kv_head, token]``. Raises InvalidParameter or ValueTooLarge, with ``where`` in the message. A warning about lost
        precision is issued only once.
        """
        runs, raw, chosen_by = self.runs, self.codec.raw_positions, None
        if raw is not None and "k" in norms:
            known = {name: part[:, :, : x.shape[2]] for name, part in norms.items()}
            chosen_by = raw.selection_norms(known["k"], known.get("v"))
        with float32_no_grad(x.device), collect_poor_fits() as poor_fits:
            before = runs[len(runs) - 1].streams if len(runs) else None
            streams = encode(self.codec, x, where, before, position, chosen_by)
        if poor_fits and not self._has_warned:
            self._has_warned = True
            warn_of_poor_fits(poor_fits)
        return streams

    def add(self, streams: Mapping[str, torch.Tensor], tokens: int) -> None:
        """Append ``tokens`` tokens, encoded in ``streams``."""
        self._joined = None
        before = self.packed_tokens
        with float32_no_grad(self.tail.device):
            if not self._in_place:
                self._runs = self._runs.append(PackedRun(self.codec, tokens, streams))
                self.packed_tokens = before + tokens
                return
            start = 0
            while start < tokens:
                if not self._open or self._open[-1].filled == self._open[-1].capacity:
                    if not self._open and tokens - start > MIN_WINDOWS * self.window:
                        # The first tokens of a prompt become one run without spare capacity.
                        self._runs = self._runs.append(PackedRun(self.codec, tokens, streams))
                        self.packed_tokens = before + tokens
                        return
                    self._open.append(OpenPage.allocate(self.codec, self.batch, self.heads, self._capacity(), self.tail.device))
                page = self._open[-1]
                count = min(tokens - start, page.capacity - page.filled)
                page.append(streams, start, count)
                start += count
                self.packed_tokens = before + start

    @property
    def state(self) -> SideState:
        """A snapshot for ``restore``, without the values in the tail buffer."""
        filled = tuple(page.filled for page in self._open)
        return SideState(self._runs, self.unfinished, tuple(self._open), filled, self._joined, self.tail)

    def restore(self, state: SideState) -> None:
        self._runs, self._open, self._joined, self.tail = state.runs, list(state.open), state.joined, state.tail
        self.unfinished = state.unfinished
        for page, filled in zip(state.open, state.filled, strict=True):
            page.filled = filled
        self.packed_tokens = state.runs.tokens + sum(state.filled)

    def keep(self, start: int, stop: int) -> None:
        """Drop all tokens before the tail except ``[start, stop)``. Unless this range is empty, ``start`` must begin a token group."""
        runs, packed = self.runs, self.packed_tokens
        self._open, self._joined = [], None
        self._runs = runs.slice(min(start, packed), min(stop, packed))
        self.packed_tokens = self._runs.tokens
        self.unfinished = self.unfinished[:, :, max(0, start - packed) : max(0, stop - packed)]

    def replace_unfinished(self, unfinished: torch.Tensor) -> None:
        with float32_no_grad(self.tail.device):
            self.unfinished = unfinished.clone()

    def select(self, indices: torch.Tensor) -> None:
        """Keep the sequences at ``indices`` of the batch, int64 ``[row]``, in that order."""
        side = self.side(0).select(indices)
        self._runs, self._open, self._joined = side.runs, [], None
        with float32_no_grad(self.tail.device):
            rows = indices.to(self.tail.device)
            self.tail, self.unfinished = (x.index_select(0, rows) for x in (self.tail, self.unfinished))

    def widen(self, dtype: torch.dtype) -> None:
        """Convert the tail to a dtype that represents its values and all values of ``dtype`` exactly."""
        with float32_no_grad(self.tail.device):
            wide = torch.promote_types(self.tail.dtype, dtype)
            self.tail, self.unfinished = self.tail.to(wide), self.unfinished.to(wide)

    def _capacity(self) -> int:
        """Return the capacity, in tokens, of the next page."""
        windows = max(MIN_WINDOWS, self.packed_tokens // (GROWTH * self.window))
        return windows * self.window

    @property
    def runs(self) -> PackedRuns:
        """The packed tokens as runs. Until they change, this is always the same object, because kernels cache tables for it."""
        if self._joined is None:
            self._joined = PackedRuns((*self._runs.stretches, *(page.page.stretch for page in self._open if page.filled)))
        return self._joined
