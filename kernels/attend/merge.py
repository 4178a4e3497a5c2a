"""Kernels that merge the partial results of ``split``, as in flash decoding: a sum weighted by log-sum-exps."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .softmax import NO_SCORE


@triton.jit
def _add_parts(largest_score: tl.tensor, weight_sum: tl.tensor, part_largest: tl.tensor, weight: tl.tensor) -> tl.tuple:
    """Add partial results to the running softmax of a query row.

    Returns the row's new largest score and weight sum, and the factors to apply to its earlier sums and to the partial sums.
    """
    new_largest = tl.maximum(largest_score, tl.max(part_largest, 0))
    rescale = tl.exp2(largest_score - new_largest)
    part_scale = tl.exp2(part_largest - new_largest)
    return new_largest, weight_sum * rescale + tl.sum(weight * part_scale, 0), rescale, part_scale


@triton.jit
def _add_sink(largest_score: tl.tensor, weight_sum: tl.tensor, sink: tl.tensor) -> tl.tuple:
    """Add a head's sink logit to a row's softmax. Returns the sum of weights, and the factor that rescales the earlier sums."""
    new_largest = tl.maximum(largest_score, sink)
    rescale = tl.exp2(largest_score - new_largest)
    return weight_sum * rescale + tl.exp2(sink - new_largest), rescale


@triton.jit(do_not_specialize=["parts", "first_part", "second_part", "last_part", "second_block", "rows", "padded", "heads", "q_len"])
def merge(
    out: tl.tensor,
    sums: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    channels: tl.tensor,
    sink_logits: tl.tensor,
    parts: tl.tensor,
    first_part: tl.tensor,
    second_part: tl.tensor,
    last_part: tl.tensor,
    second_block: tl.tensor,
    rows: tl.tensor,
    padded: tl.tensor,
    heads: tl.tensor,
    q_len: tl.tensor,
    SINK_LOGITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Merge the partial results of one query row into ``out``, float32 ``[batch, head, row, DIM]``.

    Each partial result is scaled by its largest score, and the sum is divided by the total weight. Column blocks before ``second_block``
    sum parts ``[first_part, second_part)``; later blocks sum parts ``[second_part, last_part)``. ``channels``, int32, is the channel of
    each column, or ``DIM`` for columns without a channel; it is padded to whole blocks. ``sink_logits``, float32
    ``[kv_head, query head of the KV head]``, are base-2 logarithms of weights without values; they are read only with ``SINK_LOGITS``. A
    row that attends to no token gets zeros.
    """
    program = tl.program_id(0)
    row = (program // rows * padded + program % rows).to(tl.int64) * parts
    block = tl.program_id(1)
    block_column = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    # No kernel writes the matrix, so it may be loaded before the kernels that this one depends on have ended.
    channel = tl.load(channels + block_column)
    column = block_column - tl.where(block < second_block, 0, second_block) * BLOCK_COLUMNS
    first_part = tl.where(block < second_block, first_part, second_part)
    last_part = tl.where(block < second_block, second_part, last_part)
    if DEPENDENT:
        # The next kernel may begin, and waits until this one has ended.
        gdc_launch_dependents()
        gdc_wait()
    part = tl.arange(0, BLOCK_PARTS)
    largest_score = tl.full((), NO_SCORE, tl.float32)
    weight_sum = tl.zeros((), tl.float32)
    value = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    for begin in range(0, parts, BLOCK_PARTS):
        index = begin + part
        in_frame = (index >= first_part) & (index < last_part)
        loaded = tl.load(sums + (row + index)[:, None] * COLUMNS + column[None, :], in_frame[:, None] & (channel < DIM)[None, :], 0.0)
        part_largest = tl.load(largest + row + index, index < parts, NO_SCORE)
        weight = tl.load(total + row + index, index < parts, 0.0)
        largest_score, weight_sum, rescale, part_scale = _add_parts(largest_score, weight_sum, part_largest, weight)
        value = value * rescale + tl.sum(loaded * part_scale[:, None], 0)
    if SINK_LOGITS:
        sink = tl.load(sink_logits + program // rows % heads * (rows // q_len) + program % rows // q_len)
        weight_sum, rescale = _add_sink(largest_score, weight_sum, sink)
        value = value * rescale
    mean = value / tl.where(weight_sum > 0, weight_sum, 1.0)
    tl.store(out + program.to(tl.int64) * DIM + channel, mean, channel < DIM)


@triton.jit(do_not_specialize=["parts", "second_part", "rows", "padded", "heads", "q_len", "matrices"])
def merge_originals(
    out: tl.tensor,
    sums: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    matrix: tl.tensor,
    sink_logits: tl.tensor,
    parts: tl.tensor,
    second_part: tl.tensor,
    rows: tl.tensor,
    padded: tl.tensor,
    heads: tl.tensor,
    q_len: tl.tensor,
    matrices: tl.tensor,
    SINK_LOGITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTHS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Merge one query row as ``merge`` does, and rotate it to the original frame: ``out`` is ``[batch, head, row, DIM]``.

    The values have one or two coded frames: parts ``[0, second_part)`` have ``WIDTHS[0]`` columns of the first frame, and later parts have
    ``WIDTHS[1]`` columns of the second frame. ``matrix``, float32 ``[matrices, frame, BLOCK_COLUMNS, DIM]``, comes from
    ``frame_columns.value_matrix``, padded to ``BLOCK_COLUMNS``. Without ``ROTATED``, columns are channels, and ``matrix`` is not read. A
    program writes ``BLOCK_DIM`` channels.
    """
    FRAME_WIDTHS: tl.constexpr = WIDTHS
    FRAMES: tl.constexpr = len(FRAME_WIDTHS) if ROTATED else 1
    program = tl.program_id(0)
    row = (program // rows * padded + program % rows).to(tl.int64) * parts
    channel = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)  # [channel]
    part = tl.arange(0, BLOCK_PARTS)  # [part]
    column = tl.arange(0, BLOCK_COLUMNS)  # [column]
    if ROTATED:
        # No kernel writes the matrices, so they may be loaded before the kernels that this one depends on have ended.
        matrix += (program // rows % matrices).to(tl.int64) * (FRAMES * BLOCK_COLUMNS * DIM)
        first_weights = tl.load(matrix + column[:, None] * DIM + channel[None, :], (channel < DIM)[None, :], 0.0)
        if FRAMES > 1:
            second_address = matrix + (BLOCK_COLUMNS + column[:, None]) * DIM + channel[None, :]
            second_weights = tl.load(second_address, (channel < DIM)[None, :], 0.0)
    else:
        column += tl.program_id(1) * BLOCK_COLUMNS
    if DEPENDENT:
        gdc_wait()
    largest_score = tl.full((), NO_SCORE, tl.float32)
    weight_sum = tl.zeros((), tl.float32)
    first_value = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    second_value = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    # The parts of most rows fit one block, so all of its loads are in flight at once.
    for begin in range(0, parts, BLOCK_PARTS):
        index = begin + part
        mask = (index < parts)[:, None] & (column < COLUMNS)[None, :]
        if FRAMES > 1:
            width = tl.where(index < second_part, FRAME_WIDTHS[0], FRAME_WIDTHS[1])
            mask = mask & (column[None, :] < width[:, None])
        loaded = tl.load(sums + (row + index)[:, None] * COLUMNS + column[None, :], mask, 0.0)
        part_largest = tl.load(largest + row + index, index < parts, NO_SCORE)
        weight = tl.load(total + row + index, index < parts, 0.0)
        largest_score, weight_sum, rescale, part_scale = _add_parts(largest_score, weight_sum, part_largest, weight)
        if FRAMES > 1:
            second_value = second_value * rescale + tl.sum(loaded * tl.where(index < second_part, 0.0, part_scale)[:, None], 0)
            part_scale = tl.where(index < second_part, part_scale, 0.0)
        first_value = first_value * rescale + tl.sum(loaded * part_scale[:, None], 0)
    if ROTATED:
        product = first_value[:, None] * first_weights
        if FRAMES > 1:
            product += second_value[:, None] * second_weights
        mean = tl.sum(product, 0)
    else:
        mean = first_value
    if SINK_LOGITS:
        sink = tl.load(sink_logits + program // rows % heads * (rows // q_len) + program % rows // q_len)
        weight_sum, rescale = _add_sink(largest_score, weight_sum, sink)
        mean = mean * rescale
    tl.store(out + program.to(tl.int64) * DIM + channel, mean / tl.where(weight_sum > 0, weight_sum, 1.0), channel < DIM)
