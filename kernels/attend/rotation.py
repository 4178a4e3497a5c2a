"""Kernels that rotate queries into coded frames, and sums of values back to the original frame, with matrices of ``frame_columns``."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvpack.formats.columns import next_power_of_two

MAX_CHANNELS = 128
"""Maximum number of channels per matrix product in ``rotate_sums``."""


@triton.jit
def load_matrix_columns(matrix: tl.tensor, column: tl.tensor, COLUMNS: tl.tensor, dim: tl.tensor, BLOCK_DIM: tl.constexpr) -> tl.tensor:
    """Load the columns with the indices ``column`` from a float32 matrix ``[dim, COLUMNS]``, transposed to ``[column, BLOCK_DIM]``.

    Channels past ``dim`` are 0.
    """
    channel = tl.arange(0, BLOCK_DIM)
    mask = (channel < dim)[None, :] & (column < COLUMNS)[:, None]
    return tl.load(matrix + channel[None, :] * COLUMNS + column[:, None], mask, 0.0)


@triton.jit(do_not_specialize=["rows", "padded", "sequences", "matrix_columns", "matrices"])
def rotate_queries(
    rotated: tl.tensor,
    scales: tl.tensor,
    q: tl.tensor,
    matrix: tl.tensor,
    blocks: tl.tensor,
    factors: tl.tensor,
    score_factor: tl.tensor,
    rows: tl.tensor,
    padded: tl.tensor,
    sequences: tl.tensor,
    matrix_columns: tl.tensor,
    matrices: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    HALVES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Rotate queries ``q`` ``[sequence, row, DIM]`` into all frames of ``matrix`` and ``blocks`` (``frame_columns.query_matrix``).

    A sequence is one batch entry and one KV head. The normalized queries are written to ``rotated`` as float32 ``[sequence, column, padded
    row]``, one frame after another, padded with zeros to ``padded`` rows. With ``HALVES``, the frames that ``blocks`` marks are instead
    written as float16 ``[sequence, half, padded row, column]``, high halves first. The norms of the queries times ``score_factor`` are
    written to ``scales``, float32 ``[sequence, padded row]``. With ``SCALED``, queries are first multiplied by ``factors``, float32
    ``[sequence, DIM]``.

    A program processes ``ROWS`` padded rows; if there are several matrices, these rows belong to one sequence. With ``EARLY``, the next
    kernel may begin while this one runs.
    """
    block = blocks + tl.program_id(1) * 4
    first = tl.load(block)
    columns = tl.load(block + 1)
    columns_before = tl.load(block + 2)
    padded_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sequence = (padded_row // padded).to(tl.int64)
    row = padded_row % padded
    column = first + tl.arange(0, BLOCK_COLUMNS)
    matrix += (tl.program_id(0) * ROWS // padded % matrices).to(tl.int64) * DIM * matrix_columns
    # No kernel writes the matrix, so it may be loaded before the previous kernel ends. Its blocks are contiguous, so these loads do not
    # depend on ``blocks``.
    matrix_column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    weights = load_matrix_columns(matrix, matrix_column, matrix_columns, DIM, BLOCK_DIM)
    channel = tl.arange(0, BLOCK_DIM)
    mask = (channel < DIM)[:, None] & ((row < rows) & (sequence < sequences))[None, :]
    if SCALED:
        factor = tl.load(factors + sequence[None, :] * DIM + channel[:, None], mask, 0.0)
    if DEPENDENT:
        gdc_wait()
        if EARLY:
            # Others would be distributed unevenly: fp8 at shape B took 76.8 us instead of 71.7.
            gdc_launch_dependents()
    values = tl.load(q + (sequence * rows + row)[None, :] * DIM + channel[:, None], mask, 0.0).to(tl.float32)
    if SCALED:
        values = values * factor
    # Divide by the largest value first, so that squares neither overflow nor underflow.
    largest = tl.maximum(tl.max(tl.abs(values), 0), 1.1754943508222875e-38)
    values = values / largest[None, :]
    length = tl.maximum(tl.sqrt(tl.sum(values * values, 0)), 1.0)
    values = values / length[None, :]
    product = tl.dot(weights, values, input_precision="tf32x3")
    valid = (column < columns)[:, None] & (sequence < sequences)[None, :]
    rotated += columns_before * sequences * padded
    if HALVES:
        # A comparison of tensors, because Triton 3.9's interpreter broadcasts the result of a scalar one as an integer.
        halves = tl.broadcast_to(tl.load(block + 3), (1, 1)) > 0
        high = product.to(tl.float16)
        at = rotated.to(tl.pointer_type(tl.float16)) + ((sequence * 2 * padded + row) * columns)[None, :] + column[:, None]
        tl.store(at, high, valid & halves)
        tl.store(at + padded * columns, (product - high.to(tl.float32)).to(tl.float16), valid & halves)
        valid = valid & ~halves
    tl.store(rotated + ((sequence * columns)[None, :] + column[:, None]) * padded + row[None, :], product, valid)
    if tl.program_id(1) == 0:
        tl.store(scales + padded_row, length * largest * score_factor, sequence < sequences)


@triton.jit(do_not_specialize=["count", "row_blocks", "matrices"])
def rotate_sums(
    out: tl.tensor,
    sums: tl.tensor,
    matrix: tl.tensor,
    addend: tl.tensor,
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
    """Rotate float32 ``sums`` ``[sequence, row, FRAME_DIM]`` from a coded frame to the original frame, ``out`` ``[sequence, row, DIM]``.

    With ``ADD``, ``addend`` is added. A sequence has ``count`` rows in ``row_blocks`` blocks, and uses one of the ``matrices`` matrices
    (``frame_columns.frame_matrix``). If there is only one matrix, all rows may be passed as one sequence.
    """
    sequence = (tl.program_id(0) // row_blocks).to(tl.int64)
    sequence_row = tl.program_id(0) % row_blocks * ROWS + tl.arange(0, ROWS)
    row = sequence * count + sequence_row
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    channel = tl.arange(0, BLOCK_DIM)
    matrix += sequence % matrices * FRAME_DIM * DIM
    # No kernel writes the matrix, so its first part may be loaded before the previous kernel ends.
    weights = load_matrix_columns(matrix, column, DIM, FRAME_DIM, BLOCK_DIM)
    if DEPENDENT:
        gdc_wait()
    product = tl.zeros((BLOCK_COLUMNS, ROWS), tl.float32)
    # Operands of longer products would not fit in a warp's registers.
    for begin in tl.static_range(0, FRAME_DIM, BLOCK_DIM):
        if begin > 0:
            weights = load_matrix_columns(matrix + begin * DIM, column, DIM, FRAME_DIM - begin, BLOCK_DIM)
        mask = (channel < FRAME_DIM - begin)[:, None] & (sequence_row < count)[None, :]
        values = tl.load(sums + row[None, :] * FRAME_DIM + begin + channel[:, None], mask, 0.0)
        product = tl.dot(weights, values, product, input_precision="tf32x3")
    offset = row[None, :] * DIM + column[:, None]
    valid = (column < DIM)[:, None] & (sequence_row < count)[None, :]
    if ADD:
        product += tl.load(addend + offset, valid, 0.0)
    tl.store(out + offset, product, valid)


def sums_block_dim(dim: int) -> int:
    """Return the number of channels per matrix product in ``rotate_sums``, a power of two."""
    return min(MAX_CHANNELS, query_block_dim(dim))


def query_block_dim(dim: int) -> int:
    """Return the number of channels per matrix product in ``rotate_queries``, a power of two of at least 16."""
    return max(16, next_power_of_two(dim))
