"""Rotate queries into the coded frames and sums of values out of them, by products with the cached matrices of ``frame_columns``."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvpack.formats.columns import next_power_of_two

MAX_CHANNELS = 128
"""Maximum number of channels of sums that a product computes at once."""


@triton.jit
def load_weights(matrix: tl.tensor, column: tl.tensor, COLUMNS: tl.tensor, dim: tl.tensor, BLOCK_DIM: tl.constexpr) -> tl.tensor:
    """Load the columns of a matrix ``[dim, COLUMNS]``, float32 ``[column, dim]``, to multiply rows ``[dim, row]`` by."""
    channel = tl.arange(0, BLOCK_DIM)
    mask = (channel < dim)[None, :] & (column < COLUMNS)[:, None]
    return tl.load(matrix + channel[None, :] * COLUMNS + column[:, None], mask, 0.0)


@triton.jit(do_not_specialize=["rows", "padded", "sequences", "matrix_columns", "matrices"])
def rotate_queries(
    turned: tl.tensor,
    scales: tl.tensor,
    q: tl.tensor,
    matrix: tl.tensor,
    blocks: tl.tensor,
    per_score: tl.tensor,
    rows: tl.tensor,
    padded: tl.tensor,
    sequences: tl.tensor,
    matrix_columns: tl.tensor,
    matrices: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write queries in the frames of ``matrix`` and ``blocks`` (``query_matrix``), and the factors of their scores.

    ``q`` is ``[sequence, row, DIM]``; a sequence is one batch entry and one KV head. Outputs are float32 ``[sequence, column, padded row]``
    for each frame, one after another, divided by the length of each query, so that none is above 1; and float32 ``[sequence, padded row]``,
    that length times ``per_score``. Rows are padded with zeros to ``padded``.

    A program processes ``ROWS`` padded rows, of one sequence if there is more than one matrix. With ``EARLY``, the next kernel may begin
    while this one runs.
    """
    block = blocks + tl.program_id(1) * 3
    first = tl.load(block)
    columns = tl.load(block + 1)
    before = tl.load(block + 2)
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sequence = (number // padded).to(tl.int64)
    row = number % padded
    column = first + tl.arange(0, BLOCK_COLUMNS)
    matrix += (tl.program_id(0) * ROWS // padded % matrices).to(tl.int64) * DIM * matrix_columns
    # No kernel writes the matrix, so it may be loaded before the previous kernel ends. Its blocks are contiguous, so that no load
    # waits for a table of their places.
    place = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    weights = load_weights(matrix, place, matrix_columns, DIM, BLOCK_DIM)
    if DEPENDENT:
        # Nothing releases the kernel that attends before this one ends: fp8 at B took 76.8 us with a release here, and 71.7 without.
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    channel = tl.arange(0, BLOCK_DIM)
    mask = (channel < DIM)[:, None] & ((row < rows) & (sequence < sequences))[None, :]
    values = tl.load(q + (sequence * rows + row)[None, :] * DIM + channel[:, None], mask, 0.0).to(tl.float32)
    # Over the largest value first: squares neither overflow nor vanish.
    largest = tl.maximum(tl.max(tl.abs(values), 0), 1.1754943508222875e-38)
    values = values / largest[None, :]
    length = tl.maximum(tl.sqrt(tl.sum(values * values, 0)), 1.0)
    values = values / length[None, :]
    found = tl.dot(weights, values, input_precision="tf32x3")
    at = (before * sequences + (sequence * columns)[None, :] + column[:, None]) * padded + row[None, :]
    tl.store(turned + at, found, (column < columns)[:, None] & (sequence < sequences)[None, :])
    if tl.program_id(1) == 0:
        tl.store(scales + number, length * largest * per_score, sequence < sequences)


@triton.jit(do_not_specialize=["count", "row_blocks", "matrices"])
def rotate_sums(
    out: tl.tensor,
    sums: tl.tensor,
    matrix: tl.tensor,
    before: tl.tensor,
    count: tl.tensor,
    row_blocks: tl.tensor,
    matrices: tl.tensor,
    DIM: tl.constexpr,
    FRAME_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Rotate float32 sums ``[sequence, row, FRAME_DIM]`` from a coded frame to ``out`` ``[sequence, row, DIM]`` in the original one.

    ``before`` is added with ``ADD``. A sequence has ``count`` rows in ``row_blocks`` blocks, and uses one of the ``matrices``
    (``frame_matrix``); if there is only one, all rows may be passed as one sequence.
    """
    sequence = (tl.program_id(0) // row_blocks).to(tl.int64)
    own = tl.program_id(0) % row_blocks * ROWS + tl.arange(0, ROWS)
    row = sequence * count + own
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    channel = tl.arange(0, BLOCK_DIM)
    matrix += sequence % matrices * FRAME_DIM * DIM
    if DEPENDENT:
        gdc_wait()
    found = tl.zeros((BLOCK_COLUMNS, ROWS), tl.float32)
    # Operands of longer products do not fit the registers of a warp.
    for begin in range(0, FRAME_DIM, BLOCK_DIM):
        weights = load_weights(matrix + begin * DIM, column, DIM, FRAME_DIM - begin, BLOCK_DIM)
        mask = (channel < FRAME_DIM - begin)[:, None] & (own < count)[None, :]
        values = tl.load(sums + row[None, :] * FRAME_DIM + begin + channel[:, None], mask, 0.0)
        found = tl.dot(weights, values, found, input_precision="tf32x3")
    at = row[None, :] * DIM + column[:, None]
    real = (column < DIM)[:, None] & (own < count)[None, :]
    if ADD:
        found += tl.load(before + at, real, 0.0)
    tl.store(out + at, found, real)


def sums_block(dim: int) -> int:
    """Return the number of channels of sums that one product computes."""
    return min(MAX_CHANNELS, query_block(dim))


def query_block(dim: int) -> int:
    """Return the number of channels of a query per product, a power of two."""
    return max(16, next_power_of_two(dim))
