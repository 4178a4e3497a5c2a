"""Attention of many queries over dense keys and values: FlashAttention's online softmax, and the merge of partial results.

Source: FlashAttention (Dao et al. 2022), including its log-sum-exp merge of partial results.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.kernels.gpu import gpu
from kvpack.kernels.triton_internals import CachedLaunch

LOG2_E = tl.constexpr(math.log2(math.e))

MERGED_ROWS = 16
"""Number of query rows that one program merges."""


class FlashBlock(NamedTuple):
    """Launch shape of ``_attend``: the query rows and tokens of a score tile, and the warps and pipeline stages of a program."""

    rows: int
    tokens: int
    warps: int
    stages: int


def block_shape(dim: int, max_shared_bytes: int) -> FlashBlock:
    """Return a launch shape for head dims up to ``dim``, a power of two, that needs at most ``max_shared_bytes`` bytes of shared memory.

    A program keeps its queries in shared memory, and one tile of keys and one of values per pipeline stage.
    """
    if dim <= 64:
        return FlashBlock(128, 64, 4, 3)
    block = FlashBlock(128, 64, 8, 3) if dim <= 128 else FlashBlock(64, 32, 8, 2)
    fitting = (max_shared_bytes // (2 * dim) - block.rows) // (2 * block.tokens)
    return block._replace(stages=max(1, min(block.stages, fitting)))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    first_token: int,
    tokens: int,
    remaining_queries: int,
    causal: bool,
    softcap: float | None,
    sliding_window: int | None,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None = None,
    outputs: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of ``q`` ``[batch, q_head, query, dim]`` over 16-bit ``k`` and ``v`` ``[batch, kv_head, token, dim]``.

    ``k`` and ``v`` begin at token ``first_token`` of a layer with ``tokens`` tokens. The first query is ``remaining_queries - 1`` positions
    before the layer's last token. ``lengths`` and ``starts``, int32 ``[batch]`` on the device, are each sequence's length and the first
    token that its queries attend to. Channels must be contiguous.

    Returns the output, float32 ``[batch, q_head, query, dim]``, and the natural log-sum-exp of the scores ``[batch, q_head, query]``. A
    query that attends to no token gets zeros and minus infinity. Unless ``outputs`` is None, both are written to that pair of tensors.
    """
    if outputs is None:
        sums = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float32, device=q.device)
        outputs = sums, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    out, lse = outputs
    launch = _attend_launch(
        q.shape, (k.shape[1], k.shape[2], v.shape[3]), (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]), scale, first_token, tokens,
        remaining_queries, causal, softcap, sliding_window, None if lengths is None else lengths.dtype,
        None if starts is None else starts.dtype, q.dtype, q.device,
    )  # fmt: skip
    extra = () if starts is None else ((starts, 0),)
    launch((out, 0), (lse, 0), (q, 0), (k, 0), (v, 0), (lse if lengths is None else lengths, 0), *extra)
    return out, lse


@lru_cache(maxsize=256)
def _attend_launch(
    shape: tuple[int, ...],
    kv_shape: tuple[int, int, int],
    strides: tuple[int, ...],
    scale: float,
    first_token: int,
    tokens: int,
    remaining_queries: int,
    causal: bool,
    softcap: float | None,
    sliding_window: int | None,
    lengths: torch.dtype | None,
    starts: torch.dtype | None,
    dtype: torch.dtype,
    device: torch.device,
) -> CachedLaunch:
    """Return the compiled launch of ``_attend`` for queries of ``shape``. ``kv_shape`` is (KV heads, tokens, value channels)."""
    batch, heads, queries, dim = shape
    kv_heads, count, v_dim = kv_shape
    pads = max(16, next_power_of_two(dim)), max(16, next_power_of_two(v_dim))
    block = block_shape(max(pads), gpu(device).shared_bytes)
    rows = min(block.rows, max(16, next_power_of_two(queries)))
    return CachedLaunch(
        _attend,
        (triton.cdiv(queries, rows), heads, batch),
        (
            *(() if starts is not None else (None,)), *strides, scale, softcap or 1.0, queries, heads, heads // kv_heads, first_token,
            count, tokens, remaining_queries, sliding_window or 0,
        ),
        {
            "CAUSAL": causal, "WINDOW": sliding_window is not None, "SOFTCAP": softcap is not None, "LENGTHS": lengths is not None,
            "DIM": dim, "V_DIM": v_dim, "PAD": pads[0], "V_PAD": pads[1], "ROWS": rows, "TOKENS": block.tokens,
            "WIDE": gpu(device).interpreted,
        },
        {"num_warps": block.warps, "num_stages": block.stages},
    )  # fmt: skip


def merge(sums: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, splits: int = 1, first: bool = False) -> None:
    """Merge partial attention results over ``splits`` token ranges into ``sums`` and ``lse``, in place.

    ``sums`` is float32 ``[batch, head, row, dim]``, and ``lse`` is ``[batch, head, row]``. ``part`` ``[batch * splits, head, row, dim]``
    and ``part_lse`` ``[batch * splits, head, row]`` are the results of ``attend``. Only the channels must be contiguous. If ``sums`` and
    ``lse`` are contiguous, one head of ``part`` may contain the rows of several heads of ``sums``. With ``first``, the previous contents of
    ``sums`` and ``lse`` are ignored.
    """
    batch, heads, rows, dim = part.shape[0] // splits, *part.shape[1:]
    own: tuple[int, ...] = (heads * rows * dim, rows * dim, dim, heads * rows, rows, 1)
    if sums.shape[1] == heads:
        own = (*sums.stride()[:3], *lse.stride())
    strides = (*own, *part.stride()[:3], *part_lse.stride())
    launch = _merge_launch((batch, heads, rows, dim), strides, part.dtype, part.device, splits, first)
    launch((sums, 0), (lse, 0), (part, 0), (part_lse, 0))


@lru_cache(maxsize=256)
def _merge_launch(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, splits: int, first: bool
) -> CachedLaunch:
    """Return the compiled launch of ``_merge`` for partial results of ``shape`` and ``dtype``."""
    batch, heads, rows, dim = shape
    constants = {"SPLITS": splits, "DIM": dim, "PAD": next_power_of_two(dim), "ROWS": MERGED_ROWS, "FIRST": first}
    return CachedLaunch(_merge, (triton.cdiv(rows, MERGED_ROWS), heads, batch), (*strides, rows), constants, {})


@triton.jit
def _widen(values: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    if WIDE:
        values = values.to(tl.float32)
    return values


@triton.jit(do_not_specialize=["queries", "first_token", "count", "tokens", "remaining_queries", "window"])
def _attend(
    out: tl.tensor,
    lse: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    lengths: tl.tensor,
    starts: tl.tensor | None,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    q_row: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    k_token: tl.tensor,
    v_batch: tl.tensor,
    v_head: tl.tensor,
    v_token: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    queries: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    first_token: tl.tensor,
    count: tl.tensor,
    tokens: tl.tensor,
    remaining_queries: tl.tensor,
    window: tl.tensor,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LENGTHS: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Compute attention of ``ROWS`` queries of one head over ``count`` tokens. Scores are computed in tiles ``[row, token]``, in base 2.

    With ``WIDE``, tiles are converted to float32, because the interpreter cannot multiply bfloat16.
    """
    head = tl.program_id(1)
    batch = tl.program_id(2)
    begin_row = tl.program_id(0) * ROWS
    row = begin_row + tl.arange(0, ROWS)
    channel = tl.arange(0, PAD)
    v_channel = tl.arange(0, V_PAD)
    length = tokens
    if LENGTHS:
        length = tl.load(lengths + batch)
    # Position in the sequence of this block's first query, and of each query: [row].
    block_position = length - remaining_queries + begin_row
    query_position = length - remaining_queries + row
    # Skip tiles that no query of the block sees; the mask in the loop hides other tokens.
    begin = 0
    end = tl.minimum(count, length - first_token)
    if CAUSAL:
        end = tl.minimum(end, block_position + ROWS - first_token)
    if WINDOW:
        begin = tl.maximum(0, block_position - window + 1 - first_token) // TOKENS * TOKENS
    if starts is not None:
        start_token = tl.load(starts + batch)
        begin = tl.maximum(begin, (start_token - first_token) // TOKENS * TOKENS)
    q_address = q + batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + row.to(tl.int64)[:, None] * q_row + channel[None, :]
    valid_row = (row < queries)[:, None]
    query = _widen(tl.load(q_address, valid_row & (channel < DIM)[None, :], 0.0), WIDE)
    k_base = k + batch.to(tl.int64) * k_batch + (head // group).to(tl.int64) * k_head
    v_base = v + batch.to(tl.int64) * v_batch + (head // group).to(tl.int64) * v_head
    # The online softmax stays in registers, in float32, for the whole loop: maximum and total [row], sums [row, channel].
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    value = tl.zeros((ROWS, V_PAD), tl.float32)
    # Keys are loaded as [channel, token] and values as [token, channel], so that neither product needs a transpose.
    # Triton's pipeline copies the tiles of the next stages to shared memory while the matrix units work on this one.
    for start in range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        in_range = token < end
        keys = tl.load(k_base + token.to(tl.int64)[None, :] * k_token + channel[:, None], in_range[None, :] & (channel < DIM)[:, None], 0.0)
        scores = tl.dot(query, _widen(keys, WIDE)) * scale
        if SOFTCAP:
            # This form of tanh may overflow to infinity, but never yields NaN.
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores / softcap * (2.0 * LOG2_E))))
        scores = scores * LOG2_E
        token_position = first_token + token[None, :]
        visible = in_range[None, :] & valid_row
        if CAUSAL:
            visible = visible & (token_position <= query_position[:, None])
        if WINDOW:
            visible = visible & (token_position > query_position[:, None] - window)
        if starts is not None:
            visible = visible & (token_position >= start_token)
        scores = tl.where(visible, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no token yet has the maximum -inf: shift it by 0 so that exp2 gives 0, not NaN.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(largest - shift)
        total = total * rescale + tl.sum(weights, 1)
        values = tl.load(
            v_base + token.to(tl.int64)[:, None] * v_token + v_channel[None, :], in_range[:, None] & (v_channel < V_DIM)[None, :], 0.0
        )
        value = value * rescale[:, None] + tl.dot(_widen(weights.to(values.dtype), WIDE), _widen(values, WIDE))
        largest = new_largest
    offset = (batch.to(tl.int64) * heads + head) * queries + row
    safe = tl.where(total > 0, total, 1.0)
    tl.store(out + offset[:, None] * V_DIM + v_channel[None, :], value / safe[:, None], valid_row & (v_channel < V_DIM)[None, :])
    tl.store(lse + offset, tl.where(total > 0, (largest + tl.log2(safe)) / LOG2_E, float("-inf")), row < queries)


@triton.jit(do_not_specialize=["rows"])
def _merge(
    sums: tl.tensor,
    lse: tl.tensor,
    part: tl.tensor,
    part_lse: tl.tensor,
    sums_batch: tl.tensor,
    sums_head: tl.tensor,
    sums_row: tl.tensor,
    lse_batch: tl.tensor,
    lse_head: tl.tensor,
    lse_row: tl.tensor,
    part_batch: tl.tensor,
    part_head: tl.tensor,
    part_row: tl.tensor,
    part_lse_batch: tl.tensor,
    part_lse_head: tl.tensor,
    part_lse_row: tl.tensor,
    rows: tl.tensor,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    channel = tl.arange(0, PAD)[None, :]
    valid = row < rows
    mask = valid[:, None] & (channel < DIM)
    sums_address = sums + batch * sums_batch + head * sums_head + row[:, None] * sums_row + channel
    lse_address = lse + batch * lse_batch + head * lse_head + row * lse_row
    if FIRST:
        value = tl.zeros((ROWS, PAD), tl.float32)
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
    else:
        value = tl.load(sums_address, mask, 0.0)
        largest = tl.load(lse_address, valid, float("-inf"))
    total = tl.where(largest == float("-inf"), 0.0, 1.0)
    for split in tl.static_range(SPLITS):
        part_index = batch * SPLITS + split
        part_lse_value = tl.load(part_lse + part_index * part_lse_batch + head * part_lse_head + row * part_lse_row, valid, float("-inf"))
        part_value = tl.load(part + part_index * part_batch + head * part_head + row[:, None] * part_row + channel, mask, 0.0).to(
            tl.float32
        )
        new_largest = tl.maximum(largest, part_lse_value)
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        rescale = tl.exp2((largest - shift) * LOG2_E)
        weight = tl.exp2((part_lse_value - shift) * LOG2_E)
        # A partial result without visible tokens has weight 0, but its values are undefined, and 0 times NaN is NaN.
        value = value * rescale[:, None] + tl.where((weight > 0)[:, None], part_value * weight[:, None], 0.0)
        total = total * rescale + weight
        largest = new_largest
    safe = tl.where(total > 0, total, 1.0)
    tl.store(sums_address, value / safe[:, None], mask)
    tl.store(lse_address, largest + tl.log2(safe) / LOG2_E, valid)
