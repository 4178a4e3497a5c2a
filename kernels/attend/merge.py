"""The merge of the partial results of ``split``: flash decoding's sum over parts with a log-sum-exp."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_wait

from .softmax import UNSEEN


@triton.jit(do_not_specialize=["parts", "first_part", "last_part", "rows", "padded", "heads", "q_len"])
def merge(
    out: tl.tensor,
    sums: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    channels: tl.tensor,
    sink_logits: tl.tensor,
    parts: tl.tensor,
    first_part: tl.tensor,
    last_part: tl.tensor,
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
    """Sum parts ``[first_part, last_part)`` of one row, weighted by all parts' largest scores and over all parts' weights.

    ``out`` is float32 ``[batch, head, row, DIM]``; ``channels`` int32 is the channel of each of a whole number of blocks of columns,
    DIM for none. Most rows have parts for one block, whose loads then wait together. ``sink_logits`` float32 ``[head, query head of it]``,
    read if ``SINK_LOGITS``, are base-2 logarithms of weights that no value has. A row that sees no token is 0.
    """
    program = tl.program_id(0)
    row = (program // rows * padded + program % rows).to(tl.int64) * parts
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    # No kernel writes it: it is there when the others end.
    channel = tl.load(channels + column)
    if DEPENDENT:
        gdc_wait()
    part = tl.arange(0, BLOCK_PARTS)
    most = tl.full((), UNSEEN, tl.float32)
    weight_sum = tl.zeros((), tl.float32)
    value = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    for begin in range(0, parts, BLOCK_PARTS):
        number = begin + part
        mine = (number >= first_part) & (number < last_part)
        loaded = tl.load(sums + (row + number)[:, None] * COLUMNS + column[None, :], mine[:, None] & (column < COLUMNS)[None, :], 0.0)
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


@triton.jit(do_not_specialize=["parts", "second_part", "rows", "padded", "heads", "q_len", "matrices", "matrix_columns"])
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
    matrix_columns: tl.tensor,
    SINK_LOGITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTHS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """``merge`` of one row in every frame, and the sums' rotation to the original frame: ``out`` is ``[batch, head, row, DIM]``.

    There are one or two frames of values: parts ``[0, second_part)`` have the ``WIDTHS[0]`` columns of the first, and all others
    ``WIDTHS[1]``. ``matrix`` is float32 ``[matrices, matrix_columns, DIM]``, each frame padded to whole ``BLOCK_COLUMNS``
    (``rotation.value_matrix``). A program writes ``BLOCK_DIM`` channels.
    """
    FRAME_WIDTHS: tl.constexpr = WIDTHS
    program = tl.program_id(0)
    row = (program // rows * padded + program % rows).to(tl.int64) * parts
    channel = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)  # [channel]
    part = tl.arange(0, BLOCK_PARTS)  # [part]
    matrix += (program // rows % matrices).to(tl.int64) * matrix_columns * DIM
    if DEPENDENT:
        gdc_wait()
    most = tl.full((BLOCK_PARTS,), UNSEEN, tl.float32)
    for begin in range(0, parts, BLOCK_PARTS):
        most = tl.maximum(most, tl.load(largest + row + begin + part, begin + part < parts, UNSEEN))
    top = tl.max(most, 0)
    weight_sum = tl.zeros((), tl.float32)
    if SINK_LOGITS:
        sequence = program // rows
        sink = tl.load(sink_logits + sequence % heads * (rows // q_len) + program % rows // q_len)
        top = tl.maximum(top, sink)
        weight_sum += tl.exp2(sink - top)
    found = tl.zeros((BLOCK_DIM,), tl.float32)
    before = 0
    for frame in tl.static_range(len(FRAME_WIDTHS)):
        first = second_part if frame else 0
        last = parts if frame == len(FRAME_WIDTHS) - 1 else second_part
        for block in tl.static_range((FRAME_WIDTHS[frame] + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS):
            column = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)  # [column]
            weights = tl.load(matrix + (before + column)[:, None] * DIM + channel[None, :], (channel < DIM)[None, :], 0.0)
            value = tl.zeros((BLOCK_COLUMNS,), tl.float32)
            for begin in range(first, last, BLOCK_PARTS):
                number = begin + part
                mine = number < last
                own = tl.load(
                    sums + (row + number)[:, None] * COLUMNS + column[None, :], mine[:, None] & (column < FRAME_WIDTHS[frame])[None, :], 0.0
                )
                kept = tl.exp2(tl.load(largest + row + number, mine, UNSEEN) - top)
                if block == 0:
                    weight_sum += tl.sum(tl.load(total + row + number, mine, 0.0) * kept, 0)
                value += tl.sum(own * kept[:, None], 0)
            found += tl.sum(value[:, None] * weights, 0)
        before += (FRAME_WIDTHS[frame] + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS * BLOCK_COLUMNS
    mean = found / tl.where(weight_sum > 0, weight_sum, 1.0)
    tl.store(out + program.to(tl.int64) * DIM + channel, mean, channel < DIM)
