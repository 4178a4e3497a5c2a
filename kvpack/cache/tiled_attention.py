"""Attention by PyTorch operations: packed pages are decoded tile by tile, with FlashAttention's online softmax."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvpack.coding.blocks import for_each_block
from kvpack.formats.products import plain_product
from kvpack.runtime.modes import float32_no_grad

from .side import sequences_at_once, tokens_at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .side import Side

TILES_AT_A_TIME = 8
"""Tiles that one thread attends in turn with PyTorch operations; the results of these parts are merged for any number of threads."""


def attend_chunk(
    q: torch.Tensor,
    k: Side,
    v: Side,
    position: int,
    causal: bool,
    softcap: float | None,
    sliding_window: int | None,
    sink_logits: torch.Tensor | None,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of scaled float32 queries ``[batch, q_head, q_len, dim]``, the first of which is at ``position``.

    The other arguments are those of ``kvpack.attend``. On the CPU every thread attends to part of the tokens.
    """
    batch, q_heads, q_len, _ = q.shape
    if (at_once := sequences_at_once(k, v)) < batch:
        result = []
        for first in range(0, batch, at_once):
            batch_rows = slice(first, min(first + at_once, batch))
            keys, values = (side.select(range(batch_rows.start, batch_rows.stop)) for side in (k, v))
            length, start = (given if given is None else given[batch_rows] for given in (lengths, starts))
            result.append(attend_chunk(q[batch_rows], keys, values, position, causal, softcap, sliding_window, sink_logits, length, start))
        return torch.cat(result)
    rows = q_heads // k.heads * q_len
    begin, end = _visible(position, q_len, k.tokens, causal, sliding_window) if lengths is None else (0, k.tokens)
    if starts is not None and starts.device.type == "cpu":
        begin = max(begin, int(starts.min()))
    token_group = max(k.codec.token_group, v.codec.token_group)
    per_tile = tokens_at_once(batch * k.heads * max(k.dim, v.dim, rows), max(64, token_group), token_group, q.device)
    k, v = _merge_short_pages(k, per_tile), _merge_short_pages(v, per_tile)
    tiles = [(start, stop) for start, stop in k.tiles(per_tile, [*v.boundaries, begin, end]) if start < end and stop > begin]
    # The position of each row's query: rows are head-major inside a group, so positions repeat for each query head.
    positions = (position + torch.arange(q_len, device=q.device)).repeat(q_heads // k.heads)
    # For each sequence: its tokens, and how far its queries are before those of a full-length sequence.
    lengths, starts = (None if given is None else given.to(q.device)[:, None, None, None] for given in (lengths, starts))
    mask = partial(
        _hide, positions=positions, tokens=k.tokens, causal=causal, sliding_window=sliding_window, lengths=lengths, starts=starts
    )
    clear = partial(_without_hidden, lengths=lengths, starts=starts)
    parts: dict[int, _Part] = {}

    def attend_part(first: int, last: int) -> None:
        parts[first] = _attend_tiles(q.reshape(batch, k.heads, rows, k.dim), k, v, tiles[first:last], softcap, mask, clear)

    blocks = [(first, min(first + TILES_AT_A_TIME, len(tiles))) for first in range(0, len(tiles), TILES_AT_A_TIME)]
    if q.requires_grad:
        for block in blocks:
            attend_part(*block)
    else:
        with float32_no_grad(q.device):
            for_each_block(attend_part, blocks, q.device)
    if sink_logits is not None:
        sinks = sink_logits.to(q.device, torch.float32).reshape(k.heads, -1).repeat_interleave(q_len, 1)[None, :, :, None]
        largest = sinks.expand(batch, -1, -1, -1)
        parts[-1] = _Part(
            largest,
            (largest > -torch.inf).to(torch.float32),
            torch.zeros(batch, k.heads, rows, v.dim, dtype=torch.float32, device=q.device),
        )
    out = _merged([parts[first] for first in sorted(parts)], (batch, k.heads, rows, v.dim), q.device)
    return out.reshape(batch, q_heads, q_len, v.dim)


class _Part(NamedTuple):
    """Attention over some tokens: the largest score and the total weight of each row, ``[batch, kv_head, row, 1]``, and its sum of values.
    """

    largest: torch.Tensor
    total: torch.Tensor
    out: torch.Tensor


def _merged(parts: Sequence[_Part], shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Divide the sums of values, ``shape``, by the total weight; zeros for rows that see no token."""
    if not parts:
        return torch.zeros(shape, dtype=torch.float32, device=device)
    largest = torch.stack([part.largest for part in parts]).amax(0)
    shift = _finite_shift(largest)
    weights = [torch.exp(part.largest - shift) for part in parts]
    out = torch.stack([part.out * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
    total = torch.stack([part.total * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
    return out / torch.where(total > 0, total, 1)


def _finite_shift(largest: torch.Tensor) -> torch.Tensor:
    """Return the shift of the scores: 0 for a row that has seen no token, whose maximum is -inf, so that exp returns 0 instead of NaN."""
    return torch.where(torch.isinf(largest), 0.0, largest)


def _merge_short_pages(side: Side, per_tile: int) -> Side:
    """Merge the pages of ``side`` if most are smaller than half a tile: tiles end at page ends, and short tiles are no faster."""
    return side.merged() if 2 * side.packed_tokens < per_tile * len(side.runs) else side


def _attend_tiles(
    raw_q: torch.Tensor,
    k: Side,
    v: Side,
    tiles: Sequence[tuple[int, int]],
    softcap: float | None,
    mask: Callable[[torch.Tensor, int, int], None],
    clear: Callable[[torch.Tensor, int, int], torch.Tensor],
) -> _Part:
    batch, heads, rows, _ = raw_q.shape
    largest = torch.full((batch, heads, rows, 1), -torch.inf, dtype=torch.float32, device=raw_q.device)
    total = torch.zeros_like(largest)
    # A page's values are summed in its coded frame, and only the sum is mapped to the original frame.
    out = torch.zeros(batch, heads, rows, v.dim, dtype=torch.float32, device=raw_q.device)
    page_sum, summed_page = torch.zeros_like(out), None
    page_q, queried_page = raw_q, None
    for start, stop in tiles:
        keys, page = k.frame(start, stop)
        if page is not queried_page:
            page_q, queried_page = raw_q if page is None else page.query(raw_q), page
        scores = plain_product(page_q, keys.transpose(-1, -2))
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        mask(scores, start, stop)
        new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        shift = _finite_shift(new_largest)
        weights = torch.exp(scores - shift)
        kept = torch.exp(largest - shift)
        values, page = v.frame(start, stop)
        if page is not summed_page:
            out.add_(page_sum if summed_page is None else summed_page.original(page_sum))
            page_sum, summed_page = torch.zeros_like(out), page
        out.mul_(kept)
        page_sum.mul_(kept).add_(plain_product(weights, clear(values, start, stop)))
        total = total * kept + weights.sum(-1, keepdim=True)
        largest = new_largest
    out.add_(page_sum if summed_page is None else summed_page.original(page_sum))
    return _Part(largest, total, out)


def _hide(
    scores: torch.Tensor,
    start: int,
    stop: int,
    *,
    positions: torch.Tensor,
    tokens: int,
    causal: bool,
    sliding_window: int | None,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> None:
    """Mask the scores of tokens ``[start, stop)`` that queries at ``positions`` do not see."""
    if starts is not None:
        scores.masked_fill_(torch.arange(start, stop, device=scores.device) < starts, -torch.inf)
    if lengths is None:
        _mask(scores, positions, start, stop, causal, sliding_window)
        return
    query_positions = positions[:, None] - (tokens - lengths)
    _mask_each(scores, query_positions, lengths, torch.arange(start, stop, device=scores.device), causal, sliding_window)


def _without_hidden(
    values: torch.Tensor, start: int, stop: int, *, lengths: torch.Tensor | None, starts: torch.Tensor | None
) -> torch.Tensor:
    """Return the values of tokens ``[start, stop)``, with 0 for tokens that a sequence hides.

    Raw values may be NaN, and 0 times NaN is NaN.
    """
    tokens = torch.arange(start, stop, device=values.device)[:, None]
    if starts is not None:
        values = values.masked_fill(tokens < starts, 0)
    return values if lengths is None else values.masked_fill(tokens >= lengths, 0)


def _visible(position: int, q_len: int, tokens: int, causal: bool, sliding_window: int | None) -> tuple[int, int]:
    """Return the range of tokens seen by at least one query of the chunk."""
    end = min(tokens, position + q_len) if causal else tokens
    begin = max(0, position - sliding_window + 1) if sliding_window else 0
    return begin, end


def _mask(scores: torch.Tensor, positions: torch.Tensor, start: int, stop: int, causal: bool, sliding_window: int | None) -> None:
    tokens = torch.arange(start, stop, device=scores.device)
    if causal and stop > int(positions[0]) + 1:
        scores.masked_fill_(tokens > positions[:, None], -torch.inf)
    if sliding_window is not None:
        scores.masked_fill_(tokens <= positions[:, None] - sliding_window, -torch.inf)


def _mask_each(
    scores: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    causal: bool,
    sliding_window: int | None,
) -> None:
    """Mask ``[batch, head, row, token]`` by each sequence's ``positions`` ``[batch, 1, row, 1]`` and ``lengths`` ``[batch, 1, 1, 1]``."""
    hidden = tokens >= lengths
    if causal:
        hidden = hidden | (tokens > positions)
    if sliding_window is not None:
        hidden = hidden | (tokens <= positions - sliding_window)
    scores.masked_fill_(hidden, -torch.inf)
