"""Attention with PyTorch operations. Packed tokens are decoded tile by tile, with FlashAttention's online softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from kvpack.coding.blocks import for_each_block
from kvpack.formats.products import plain_product
from kvpack.runtime.modes import float32_no_grad, is_traced

from .side import Side, sequences_at_once, tokens_at_once

TILES_AT_A_TIME = 8
"""Number of tiles per part. Each thread processes one part at a time. It is fixed, so that outputs do not depend on the thread count."""


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
    """Return attention outputs ``[batch, q_head, q_len, dim]`` for scaled float32 queries of the same shape.

    The first query is at ``position``. For the other arguments, see ``kvpack.attend``. On the CPU, threads process different
    parts of the tokens.
    """
    batch, q_heads, q_len, _ = q.shape
    if (at_once := sequences_at_once(k, v)) < batch:
        result = []
        for first in range(0, batch, at_once):
            batch_rows = slice(first, min(first + at_once, batch))
            keys, values = (side.select(range(batch_rows.start, batch_rows.stop)) for side in (k, v))
            length, start = (limit if limit is None else limit[batch_rows] for limit in (lengths, starts))
            result.append(attend_chunk(q[batch_rows], keys, values, position, causal, softcap, sliding_window, sink_logits, length, start))
        return torch.cat(result)
    rows = q_heads // k.heads * q_len
    begin, end = _visible_range(position, q_len, k.tokens, causal, sliding_window) if lengths is None else (0, k.tokens)
    if starts is not None and starts.device.type == "cpu":
        begin = max(begin, int(starts.min()))
    group_tokens = max(k.codec.group_tokens, v.codec.group_tokens)
    per_tile = tokens_at_once(batch * k.heads * max(k.dim, v.dim, rows), max(64, group_tokens), group_tokens, q.device)
    k, v = _merge_short_runs(k, per_tile), _merge_short_runs(v, per_tile)
    tiles = [(start, stop) for start, stop in k.tiles(per_tile, [*v.boundaries, begin, end]) if start < end and stop > begin]
    # Position of each row's query. The rows of a KV head are ordered by query head, so positions repeat.
    positions = (position + torch.arange(q_len, device=q.device)).repeat(q_heads // k.heads)
    # The number of tokens in each sequence, and its first visible token.
    lengths, starts = (None if limit is None else limit.to(q.device)[:, None, None, None] for limit in (lengths, starts))
    mask = partial(
        _hide_tokens, positions=positions, tokens=k.tokens, causal=causal, sliding_window=sliding_window, lengths=lengths, starts=starts
    )
    clear = partial(_zero_hidden, lengths=lengths, starts=starts)
    parts: dict[int, _PartialSum] = {}

    def attend_part(first: int, last: int) -> None:
        parts[first] = _attend_tiles(q.reshape(batch, k.heads, rows, k.dim), k, v, tiles[first:last], softcap, mask, clear)

    blocks = [(first, min(first + TILES_AT_A_TIME, len(tiles))) for first in range(0, len(tiles), TILES_AT_A_TIME)]
    if is_traced(q, sink_logits):
        for block in blocks:
            attend_part(*block)
    else:
        with float32_no_grad(q.device):
            for_each_block(attend_part, blocks, q.device)
    if sink_logits is not None:
        sinks = sink_logits.to(q.device, torch.float32).reshape(k.heads, -1).repeat_interleave(q_len, 1)[None, :, :, None]
        largest = sinks.expand(batch, -1, -1, -1)
        parts[-1] = _PartialSum(
            largest,
            (largest > -torch.inf).to(torch.float32),
            torch.zeros(batch, k.heads, rows, v.dim, dtype=torch.float32, device=q.device),
        )
    out = _combine([parts[first] for first in sorted(parts)], (batch, k.heads, rows, v.dim), q.device)
    return out.reshape(batch, q_heads, q_len, v.dim)


class _PartialSum(NamedTuple):
    """Attention over some of the tokens, before normalization.

    ``largest`` is the largest score, and ``total`` is the sum of the weights, both ``[batch, kv_head, row, 1]``. ``out`` is the weighted
    sum of values.
    """

    largest: torch.Tensor
    total: torch.Tensor
    out: torch.Tensor


def _combine(parts: Sequence[_PartialSum], shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Add up partial sums, and divide the result by the total weight. Queries that attend to no token get zeros."""
    if not parts:
        return torch.zeros(shape, dtype=torch.float32, device=device)
    largest = torch.stack([part.largest for part in parts]).amax(0)
    shift = _finite_shift(largest)
    weights = [torch.exp(part.largest - shift) for part in parts]
    out = torch.stack([part.out * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
    total = torch.stack([part.total * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
    return out / torch.where(total > 0, total, 1)


def _finite_shift(largest: torch.Tensor) -> torch.Tensor:
    """Return the amount to subtract from scores before exp: ``largest``, or 0 if ``largest`` is -inf.

    If a query attends to no token, its weights are then 0 instead of NaN.
    """
    return torch.where(torch.isinf(largest), 0.0, largest)


def _merge_short_runs(side: Side, per_tile: int) -> Side:
    """Merge the runs of ``side`` if they are shorter than half a tile on average.

    A tile never extends beyond a run, and short tiles are slow.
    """
    return side.merged() if 2 * side.packed_tokens < per_tile * len(side.runs) else side


def _attend_tiles(
    raw_q: torch.Tensor,
    k: Side,
    v: Side,
    tiles: Sequence[tuple[int, int]],
    softcap: float | None,
    mask: Callable[[torch.Tensor, int, int], None],
    clear: Callable[[torch.Tensor, int, int], torch.Tensor],
) -> _PartialSum:
    batch, heads, rows, _ = raw_q.shape
    largest = raw_q.new_full((batch, heads, rows, 1), -torch.inf)
    total = torch.zeros_like(largest)
    # Values are summed in a run's rotated frame, and only the sum is rotated back.
    out = raw_q.new_zeros((batch, heads, rows, v.dim))
    run_sum, summed_run = torch.zeros_like(out), None
    run_q, queried_run = raw_q, None
    for start, stop in tiles:
        keys, run = k.decode_frame(start, stop)
        if run is not queried_run:
            run_q, queried_run = raw_q if run is None else run.query(raw_q), run
        scores = plain_product(run_q, keys.transpose(-1, -2))
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        mask(scores, start, stop)
        new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        shift = _finite_shift(new_largest)
        weights = torch.exp(scores - shift)
        rescale = torch.exp(largest - shift)
        values, run = v.decode_frame(start, stop)
        if run is not summed_run:
            out.add_(run_sum if summed_run is None else summed_run.original(run_sum))
            run_sum, summed_run = torch.zeros_like(out), run
        out.mul_(rescale)
        run_sum.mul_(rescale).add_(plain_product(weights, clear(values, start, stop)))
        total = total * rescale + weights.sum(-1, keepdim=True)
        largest = new_largest
    out.add_(run_sum if summed_run is None else summed_run.original(run_sum))
    return _PartialSum(largest, total, out)


def _hide_tokens(
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
    """Set scores to -inf, in place, for each token of ``[start, stop)`` that is masked for the query at each of ``positions``."""
    if starts is not None:
        scores.masked_fill_(torch.arange(start, stop, device=scores.device) < starts, -torch.inf)
    if lengths is None:
        _mask_by_position(scores, positions, start, stop, causal, sliding_window)
        return
    query_positions = positions[:, None] - (tokens - lengths)
    _mask_by_sequence(scores, query_positions, lengths, torch.arange(start, stop, device=scores.device), causal, sliding_window)


def _zero_hidden(values: torch.Tensor, start: int, stop: int, *, lengths: torch.Tensor | None, starts: torch.Tensor | None) -> torch.Tensor:
    """Return the values of tokens ``[start, stop)``, with zeros for tokens outside a sequence's range.

    Hidden raw values may be NaN, and a weight of 0 times NaN is NaN.
    """
    tokens = torch.arange(start, stop, device=values.device)[:, None]
    if starts is not None:
        values = values.masked_fill(tokens < starts, 0)
    return values if lengths is None else values.masked_fill(tokens >= lengths, 0)


def _visible_range(position: int, q_len: int, tokens: int, causal: bool, sliding_window: int | None) -> tuple[int, int]:
    end = min(tokens, position + q_len) if causal else tokens
    begin = max(0, position - sliding_window + 1) if sliding_window else 0
    return begin, end


def _mask_by_position(
    scores: torch.Tensor, positions: torch.Tensor, start: int, stop: int, causal: bool, sliding_window: int | None
) -> None:
    tokens = torch.arange(start, stop, device=scores.device)
    if causal and stop > int(positions[0]) + 1:
        scores.masked_fill_(tokens > positions[:, None], -torch.inf)
    if sliding_window is not None:
        scores.masked_fill_(tokens <= positions[:, None] - sliding_window, -torch.inf)


def _mask_by_sequence(
    scores: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    causal: bool,
    sliding_window: int | None,
) -> None:
    """Set scores ``[batch, head, row, token]`` to -inf, in place, for tokens that are masked for the queries of a sequence.

    ``positions``, ``[batch, 1, row, 1]``, are the positions of the queries. ``lengths``, ``[batch, 1, 1, 1]``, are the lengths of the
    sequences.
    """
    hidden = tokens >= lengths
    if causal:
        hidden = hidden | (tokens > positions)
    if sliding_window is not None:
        hidden = hidden | (tokens <= positions - sliding_window)
    scores.masked_fill_(hidden, -torch.inf)
