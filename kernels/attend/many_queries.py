"""attend of many queries: blocks of tokens are decoded to a bounded scratch of the queries' dtype and attended there.

Queries and sums of values go through the rotation of the codec once, where a side has one frame (OCTOPUS Eq. 13), and blocks are
merged by their log-sum-exp. What no fused kernel decodes, torch decodes.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from kvpack.formats.columns import next_power_of_two

from . import flash, scratch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .layers import Layer, Side

DTYPES = (torch.bfloat16, torch.float16)

MOST_DIM = 256
"""Head dims above this are left to torch: a tile of ``flash`` would not fit a multiprocessor."""

SCRATCH_BYTES = 256 << 20
"""Bytes of keys and values decoded at once: 65,536 tokens of eight heads of 128 channels. A smaller scratch costs more launches."""

FEWEST_TOKENS = 256
"""Tokens of a block, however many sequences there are."""

MOST_QUERIES = 1 << 13
"""Queries that share a pass over the tokens: their sums are binary32. Decoding again takes a hundredth of attending as many."""

ROWS_OF_A_PROGRAM = 128
"""Rows of a query that a program of cuDNN's or FlashAttention's takes."""

MOST_PEERS = 256
"""Shapes for which it is kept which library attends them: asking takes longer than attending a few queries."""

FEWEST_SPLIT_TOKENS, MOST_SPLITS = 1024, 16
"""Tokens of a part of a block, and parts, of which there are several where there are fewer programs than multiprocessors."""


_peers: dict[Any, str | None] = {}


def supports(q: torch.Tensor, layer: Layer) -> bool:
    """Whether the layer is attended by decoding to a scratch: queries have 16 bits, as it has, and head dims are not too large."""
    k, v = layer.k, layer.v
    assert k is not None
    assert v is not None
    return q.device == k.device == v.device and q.dtype in DTYPES and max(k.dim, v.dim) <= MOST_DIM


def attend(
    q: torch.Tensor,
    layer: Layer,
    scale: float,
    causal: bool = True,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sink_logits: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """``kvpack.attend`` on checked input, with its arguments, over a layer that ``supports`` takes.

    Decoded keys and values, and rotated queries, are rounded to the queries' dtype: the result is as exact as attention over an
    unpacked layer. Memory beyond the output is bounded: ``SCRATCH_BYTES``, and sums of ``MOST_QUERIES`` queries.
    """
    with torch.cuda.device(q.device) if q.device.type == "cuda" else nullcontext():
        lengths, starts = (None if given is None else given.to(q.device, torch.int32) for given in (lengths, starts))
        call = _Call(layer, q.shape[2], scale, causal, softcap, sliding_window, lengths, starts)
        if q.shape[2] <= MOST_QUERIES:
            return call.attended(q, 0, sink_logits)
        out = torch.empty(*q.shape[:3], call.v.dim, dtype=q.dtype, device=q.device)
        for first in range(0, q.shape[2], MOST_QUERIES):
            out[:, :, first : first + MOST_QUERIES] = call.attended(q[:, :, first : first + MOST_QUERIES], first, sink_logits)
        return out


def _held(side: Side | None) -> Side:
    assert side is not None
    return side


class _Call:
    """One call of ``attend``, for each of its blocks of queries."""

    def __init__(
        self,
        layer: Layer,
        q_len: int,
        scale: float,
        causal: bool,
        softcap: float | None,
        sliding_window: int | None,
        lengths: torch.Tensor | None,
        starts: torch.Tensor | None,
    ) -> None:
        self.k, self.v = _held(layer.k), _held(layer.v)
        self.k_frame, self.v_frame = scratch.frame_of(self.k), scratch.frame_of(self.v)
        self.q_len = q_len
        self.scale, self.causal, self.softcap, self.sliding_window = scale, causal, softcap, sliding_window
        self.lengths, self.starts = lengths, starts
        token_bytes = 2 * self.k.batch * self.k.heads * (self.k.dim + self.v.dim)
        self.block_tokens = max(FEWEST_TOKENS, SCRATCH_BYTES // token_bytes // FEWEST_TOKENS * FEWEST_TOKENS)

    def attended(self, q: torch.Tensor, first_query: int, sink_logits: torch.Tensor | None) -> torch.Tensor:
        """The result for queries ``[batch, q_head, query, dim]`` from query ``first_query`` of the call on."""
        sums, lse = self._sums(q, first_query)
        if sink_logits is not None:
            # A sink is one more weight, without a value.
            sink = sink_logits.to(q.device, torch.float32)[None, :, None]
            sums *= torch.where(lse > -torch.inf, torch.sigmoid(lse - sink), 0.0)[..., None]
        return self.v_frame.original(sums, self.v.heads, q.dtype)

    def _sums(self, q: torch.Tensor, first_query: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of values, float32 ``[batch, q_head, query, column]`` in the frame of values, and log-sum-exps of scores."""
        turned, factor = self.k_frame.queries(q, self.k.heads)
        scale = self.scale * factor
        columns = self.v.dim if self.v_frame.codec is None else self.v_frame.columns
        sums = torch.empty(*q.shape[:3], columns, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        position = self.k.tokens - self.q_len + first_query
        empty = True
        plain = all(given is None for given in (self.softcap, self.sliding_window, self.lengths, self.starts))
        if plain and self.causal and position <= 0:
            # No part has all queries.
            sums.zero_()
            lse.fill_(-torch.inf)
            empty = False
        for start, stop in self._blocks(position, q.shape[2]):
            keys = scratch.decoded(self.k, self.k_frame, start, stop, q.dtype)
            values = scratch.decoded(self.v, self.v_frame, start, stop, q.dtype)
            if not plain:
                self._add(sums, lse, turned, keys, values, scale, start, self.q_len - first_query, empty)
            else:
                seen = max(0, min(stop, position) - start) if self.causal else stop - start
                if seen:
                    _add_seen(sums, lse, turned, keys[:, :, :seen], values[:, :, :seen], scale, empty)
                if start + seen < stop:
                    _add_own(sums, lse, turned, keys[:, :, seen:], values[:, :, seen:], scale, start + seen - position)
            empty = False
        return sums, lse

    def _blocks(self, position: int, queries: int) -> Iterator[tuple[int, int]]:
        """The blocks of tokens that some query sees; those of several sequences are cut where the first query is."""
        end = min(self.k.tokens, position + queries) if self.causal else self.k.tokens
        begin = max(0, position - self.sliding_window + 1) if self.sliding_window else 0
        if self.lengths is not None:
            # Each sequence has its own place for the queries.
            begin, end = 0, self.k.tokens
        cut = self.causal and begin < position < end and (self.k.batch > 1 or end - begin > self.block_tokens)
        edges = sorted({begin, end, *([position] if cut else [])})
        for first, last in pairwise(edges):
            for start in range(first, last, self.block_tokens):
                yield start, min(start + self.block_tokens, last)

    def _add(
        self,
        sums: torch.Tensor,
        lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        start: int,
        behind: int,
        empty: bool,
    ) -> None:
        part, part_lse = flash.attend(
            q, k, v, scale=scale, first=start, tokens=self.k.tokens, behind=behind, causal=self.causal, softcap=self.softcap,
            sliding_window=self.sliding_window, lengths=self.lengths, starts=self.starts,
        )  # fmt: skip
        flash.merge(sums, lse, part, part_lse, first=empty)


def _add_own(sums: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, ahead: int) -> None:
    """Add a block of tokens, the first of which is ``ahead`` of the first query: each query sees those up to its own."""
    tokens, queries = k.shape[2], q.shape[2]
    # Queries from the block's first token on: as many as tokens see a triangle, and those after them see all.
    own, after = slice(ahead, ahead + tokens), slice(ahead + tokens, queries)
    part, part_lse = dense(q[:, :, own], k, v, scale, True)
    flash.merge(sums[:, :, own], lse[:, :, own], part, part_lse)
    if ahead + tokens < queries:
        part, part_lse = dense(q[:, :, after], k, v, scale, False)
        flash.merge(sums[:, :, after], lse[:, :, after], part, part_lse)


def _add_seen(sums: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, empty: bool) -> None:
    """Add a block of tokens that every query sees: the query heads of a KV head are rows of one, and the block is split in parts."""
    batch, heads, tokens, _ = k.shape
    rows = q.shape[1] // heads * q.shape[2]
    q, sums, lse = q.reshape(batch, heads, rows, -1), sums.view(batch, heads, rows, -1), lse.view(batch, heads, rows)
    splits = _splits(batch * heads * -(-rows // ROWS_OF_A_PROGRAM), tokens, q.device)
    whole = tokens // splits * splits
    part, part_lse = dense(
        q.repeat_interleave(splits, 0) if splits > 1 else q,
        _split(k[:, :, :whole], splits), _split(v[:, :, :whole], splits), scale, False,
    )  # fmt: skip
    flash.merge(sums, lse, part, part_lse, splits, empty)
    if whole < tokens:
        part, part_lse = dense(q, k[:, :, whole:], v[:, :, whole:], scale, False)
        flash.merge(sums, lse, part, part_lse)


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _splits(programs: int, tokens: int, device: torch.device) -> int:
    """The parts of a block of tokens, a power of two, so that there are about as many programs as multiprocessors."""
    most = max(1, tokens // FEWEST_SPLIT_TOKENS)
    return min(next_power_of_two(max(1, _multiprocessors(device) // programs)), 1 << (most.bit_length() - 1), MOST_SPLITS)


def _split(x: torch.Tensor, splits: int) -> torch.Tensor:
    """``[batch, head, token, dim]`` with each sequence as ``splits`` sequences, a view where the head is the outermost axis in memory."""
    batch, heads, tokens, dim = x.shape
    # An axis of which every block of a side has one stride is cut without a copy.
    parts = x.view(batch, heads, splits, tokens // splits, dim)
    return parts.transpose(1, 2).reshape(batch * splits, heads, tokens // splits, dim)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over dense keys and values and its natural log-sum-exp, by cuDNN or FlashAttention where they take it.

    With ``causal`` there are as many queries as tokens.
    """
    peer = _peer(q, k, v, causal)
    if peer == "cudnn":
        found: Any = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    elif peer == "flash":
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    else:
        return flash.attend(
            q, k, v, scale=scale, first=0, tokens=k.shape[2], behind=q.shape[2], causal=causal, softcap=None, sliding_window=None,
            lengths=None,
        )  # fmt: skip
    return found[0], found[1].reshape(q.shape[:3])


def _peer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> str | None:
    """The library that attends these: cuDNN was the fastest on an H200."""
    if q.device.type != "cuda" or k.shape[3] != v.shape[3] or k.shape[3] % 8 or k.shape[2] < q.shape[2] * causal:
        return None
    switches: Any = torch.backends.cuda
    allowed = switches.cudnn_sdp_enabled(), switches.flash_sdp_enabled()
    asked = (*((x.shape, x.stride()) for x in (q, k, v)), q.dtype, q.device, causal, allowed)
    if asked not in _peers:
        if len(_peers) >= MOST_PEERS:
            _peers.clear()
        _peers[asked] = _found_peer(q, k, v, causal)
    return _peers[asked]


def _found_peer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> str | None:
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
    if torch.cuda.get_device_capability(q.device) >= (9, 0) and torch.backends.cuda.can_use_cudnn_attention(parameters):
        return "cudnn"
    return "flash" if torch.backends.cuda.can_use_flash_attention(parameters) else None
