"""The merge of the partial results of ``split``: flash decoding's sum over parts with a log-sum-exp."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

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
    ROTATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """``merge`` of one row in every frame, and the sums' rotation to the original frame: ``out`` is ``[batch, head, row, DIM]``.

    There are one or two frames of values: parts ``[0, second_part)`` have the ``WIDTHS[0]`` columns of the first, and all others
    ``WIDTHS[1]``. ``matrix`` is float32 ``[matrices, matrix_columns, DIM]``, each frame padded to whole ``BLOCK_COLUMNS``
    (``rotation.value_matrix``); without ``ROTATED`` it is not read, and columns are channels. A program writes ``BLOCK_DIM`` channels.
    """
    FRAME_WIDTHS: tl.constexpr = WIDTHS
    FRAMES: tl.constexpr = len(FRAME_WIDTHS)
    program = tl.program_id(0)
    row = (program // rows * padded + program % rows).to(tl.int64) * parts
    channel = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)  # [channel]
    part = tl.arange(0, BLOCK_PARTS)  # [part]
    if ROTATED:
        column = tl.arange(0, BLOCK_COLUMNS)  # [column]
        matrix += (program // rows % matrices).to(tl.int64) * matrix_columns * DIM
        # No kernel writes them: they are there when the others end.
        weights = _weights(matrix, column, channel, DIM)
    else:
        column = channel
    if DEPENDENT:
        gdc_wait()
    most = tl.full((), UNSEEN, tl.float32)
    weight_sum = tl.zeros((), tl.float32)
    if SINK_LOGITS:
        sink = tl.load(sink_logits + program // rows % heads * (rows // q_len) + program % rows // q_len)
        most = tl.maximum(most, sink)
        weight_sum += tl.exp2(sink - most)
    found = tl.zeros((BLOCK_DIM,), tl.float32)
    before = 0
    for frame in tl.static_range(FRAMES):
        WIDTH: tl.constexpr = FRAME_WIDTHS[frame]
        BLOCKS: tl.constexpr = (WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS if ROTATED else 1
        first = second_part if frame else 0
        last = parts if frame == FRAMES - 1 else second_part
        values = ()
        for _ in tl.static_range(BLOCKS):
            values = values + (tl.zeros(column.shape, tl.float32),)
        for begin in range(first, last, BLOCK_PARTS):
            number = begin + part
            mine = number < last
            # All loads before what waits for one of them.
            loaded = ()
            for block in tl.static_range(BLOCKS):
                own = (column + block * BLOCK_COLUMNS)[None, :]
                loaded = loaded + (tl.load(sums + (row + number)[:, None] * COLUMNS + own, mine[:, None] & (own < WIDTH), 0.0),)
            top = tl.load(largest + row + number, mine, UNSEEN)
            weight = tl.load(total + row + number, mine, 0.0)
            new_most = tl.maximum(most, tl.max(top, 0))
            rescale = tl.exp2(most - new_most)
            kept = tl.exp2(top - new_most)
            weight_sum = weight_sum * rescale + tl.sum(weight * kept, 0)
            found = found * rescale
            added = ()
            for block in tl.static_range(BLOCKS):
                added = added + (values[block] * rescale + tl.sum(loaded[block] * kept[:, None], 0),)
            values = added
            most = new_most
        for block in tl.static_range(BLOCKS):
            if ROTATED:
                if frame + block > 0:
                    weights = _weights(matrix, before + block * BLOCK_COLUMNS + column, channel, DIM)
                found += tl.sum(values[block][:, None] * weights, 0)
            else:
                found += values[block]
        before += BLOCKS * BLOCK_COLUMNS
    mean = found / tl.where(weight_sum > 0, weight_sum, 1.0)
    tl.store(out + program.to(tl.int64) * DIM + channel, mean, channel < DIM)


@triton.jit
def _weights(matrix: tl.tensor, column: tl.tensor, channel: tl.tensor, DIM: tl.constexpr) -> tl.tensor:
    """Rows of the matrix, ``[column, channel]``."""
    return tl.load(matrix + column[:, None] * DIM + channel[None, :], (channel < DIM)[None, :], 0.0)
