"""Merge the partial results of ``split``: flash decoding's sum over parts with a log-sum-exp."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .softmax import UNSEEN


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
    """Sum the parts of one row, weighted by their largest scores and divided by the total weight.

    In blocks of columns before ``second_block``, parts ``[first_part, second_part)`` are summed, in the others those up to ``last_part``.
    ``out`` is float32 ``[batch, head, row, DIM]``; ``channels`` int32 is the channel of each column, in whole blocks, and DIM for no
    channel. Most rows have parts for one block, whose loads then overlap. ``sink_logits`` float32 ``[head, query head of it]``, read if
    ``SINK_LOGITS``, are base-2 logarithms of weights without a value. A row that sees no token is 0.
    """
    program = tl.program_id(0)
    row = (program // rows * padded + program % rows).to(tl.int64) * parts
    block = tl.program_id(1)
    place = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    # No kernel writes the matrix, so it may be loaded before the kernels that this one depends on have ended.
    channel = tl.load(channels + place)
    column = place - tl.where(block < second_block, 0, second_block) * BLOCK_COLUMNS
    first_part = tl.where(block < second_block, first_part, second_part)
    last_part = tl.where(block < second_block, second_part, last_part)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    part = tl.arange(0, BLOCK_PARTS)
    most = tl.full((), UNSEEN, tl.float32)
    weight_sum = tl.zeros((), tl.float32)
    value = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    for begin in range(0, parts, BLOCK_PARTS):
        number = begin + part
        mine = (number >= first_part) & (number < last_part)
        loaded = tl.load(sums + (row + number)[:, None] * COLUMNS + column[None, :], mine[:, None] & (channel < DIM)[None, :], 0.0)
        top = tl.load(largest + row + number, number < parts, UNSEEN)
        weight = tl.load(total + row + number, number < parts, 0.0)
        new_most = tl.maximum(most, tl.max(top, 0))
        rescale = tl.exp2(most - new_most)
        kept = tl.exp2(top - new_most)
        weight_sum = weight_sum * rescale + tl.sum(weight * kept, 0)
        value = value * rescale + tl.sum(loaded * kept[:, None], 0)
        most = new_most
    if SINK_LOGITS:
        sequence = program // rows
        sink = tl.load(sink_logits + sequence % heads * (rows // q_len) + program % rows // q_len)
        new_most = tl.maximum(most, sink)
        rescale = tl.exp2(most - new_most)
        weight_sum = weight_sum * rescale + tl.exp2(sink - new_most)
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
    """Run ``merge`` for one row in every frame, and rotate the sums to the original frame: ``out`` is ``[batch, head, row, DIM]``.

    There are one or two frames of values: parts ``[0, second_part)`` have the ``WIDTHS[0]`` columns of the first, all others ``WIDTHS[1]``.
    ``matrix`` is float32 ``[matrices, frame, BLOCK_COLUMNS, DIM]``, each frame padded to ``BLOCK_COLUMNS``
    (``frame_columns.value_matrix``); without ``ROTATED`` it is not read, and columns are channels. A program writes ``BLOCK_DIM`` channels.
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
            at = matrix + (BLOCK_COLUMNS + column[:, None]) * DIM + channel[None, :]
            second_weights = tl.load(at, (channel < DIM)[None, :], 0.0)
    else:
        column += tl.program_id(1) * BLOCK_COLUMNS
    if DEPENDENT:
        gdc_wait()
    most = tl.full((), UNSEEN, tl.float32)
    weight_sum = tl.zeros((), tl.float32)
    first_value = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    second_value = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    # The parts of most rows fit one block: all of its loads are then in flight together.
    for begin in range(0, parts, BLOCK_PARTS):
        number = begin + part
        mine = (number < parts)[:, None] & (column < COLUMNS)[None, :]
        if FRAMES > 1:
            width = tl.where(number < second_part, FRAME_WIDTHS[0], FRAME_WIDTHS[1])
            mine = mine & (column[None, :] < width[:, None])
        loaded = tl.load(sums + (row + number)[:, None] * COLUMNS + column[None, :], mine, 0.0)
        top = tl.load(largest + row + number, number < parts, UNSEEN)
        weight = tl.load(total + row + number, number < parts, 0.0)
        new_most = tl.maximum(most, tl.max(top, 0))
        rescale = tl.exp2(most - new_most)
        kept = tl.exp2(top - new_most)
        weight_sum = weight_sum * rescale + tl.sum(weight * kept, 0)
        if FRAMES > 1:
            second_value = second_value * rescale + tl.sum(loaded * tl.where(number < second_part, 0.0, kept)[:, None], 0)
            kept = tl.where(number < second_part, kept, 0.0)
        first_value = first_value * rescale + tl.sum(loaded * kept[:, None], 0)
        most = new_most
    if ROTATED:
        found = first_value[:, None] * first_weights
        if FRAMES > 1:
            found += second_value[:, None] * second_weights
        mean = tl.sum(found, 0)
    else:
        mean = first_value
    if SINK_LOGITS:
        sequence = program // rows
        sink = tl.load(sink_logits + sequence % heads * (rows // q_len) + program % rows // q_len)
        new_most = tl.maximum(most, sink)
        rescale = tl.exp2(most - new_most)
        weight_sum = weight_sum * rescale + tl.exp2(sink - new_most)
        mean = mean * rescale
    tl.store(out + program.to(tl.int64) * DIM + channel, mean / tl.where(weight_sum > 0, weight_sum, 1.0), channel < DIM)
