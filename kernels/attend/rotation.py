"""Queries into a codec's frame and sums of values out of it: one launch each, products with a kept matrix.

The matrix holds the rotation and the order of columns of a tile loader (OCTOPUS Eq. 13: the query is rotated, not the keys).
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_wait

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.qjl import Qjl

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

BLOCK_COLUMNS = 32
"""Columns of one program."""


def queries(
    q: torch.Tensor, codec: Codec, channels: tuple[int, ...], block: int, per_score: float, dependent: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries ``[batch, head, row, dim]`` in ``codec``'s frame, and what their scores are to be multiplied by.

    Returns float32 ``[batch, head, column, padded row]`` over the length of each query, so that none is above 1, and float32
    ``[batch, head, padded row]``: that length times ``per_score``. Column c holds channel ``channels[c]``, none where that is -1;
    rows are padded with zeros to whole blocks of ``block``. Channels from dim on are those of qjl's rotation.
    ``dependent``: the kernel may begin while the one before it ends.
    """
    batch, heads, rows, dim = q.shape
    blocks = -(-rows // block)
    turned = torch.empty(batch, heads, len(channels), blocks * block, dtype=torch.float32, device=q.device)
    scales = torch.empty(batch, heads, blocks * block, dtype=torch.float32, device=q.device)
    options = {"launch_pdl": True} if dependent else {}
    _queries[(batch * heads * blocks, triton.cdiv(len(channels), BLOCK_COLUMNS))](
        turned, scales, q.contiguous(), _columns(codec, channels, str(q.device)), per_score, rows, blocks, len(channels),
        DIM=dim, BLOCK_DIM=max(16, next_power_of_two(dim)), ROWS=block, BLOCK_COLUMNS=BLOCK_COLUMNS, DEPENDENT=dependent, **options,
    )  # fmt: skip
    return turned, scales


def originals(sums: torch.Tensor, codec: Codec, before: torch.Tensor | None, dtype: torch.dtype, dependent: bool) -> torch.Tensor:
    """Sums ``[batch, head, row, frame dim]`` float32 in ``codec``'s frame, in the original one, plus ``before`` if there is one.

    A frame of twice the head dim is followed by that of qjl.
    """
    batch, heads, rows, frame_dim = sums.shape
    dim = codec.dim
    out = torch.empty(batch, heads, rows, dim, dtype=dtype, device=sums.device)
    options = {"launch_pdl": True} if dependent else {}
    count = batch * heads * rows
    _originals[(triton.cdiv(count, 16), triton.cdiv(dim, BLOCK_COLUMNS))](
        out, sums, _back(codec, str(sums.device)), sums if before is None else before, count,
        DIM=dim, FRAME_DIM=frame_dim, BLOCK_DIM=max(16, next_power_of_two(frame_dim)), ROWS=16,
        BLOCK_COLUMNS=BLOCK_COLUMNS, ADD=before is not None, DEPENDENT=dependent, **options,
    )  # fmt: skip
    return out


@lru_cache(maxsize=256)
def _columns(codec: Codec, channels: tuple[int, ...], device: str) -> torch.Tensor:
    """float32 ``[dim, column]``: what each channel of a query adds to each column."""
    with torch.inference_mode(False):
        turned = codec.rotation.forward(torch.eye(codec.dim))
        if qjl := codec.side_car(Qjl):
            turned = torch.cat([turned, qjl.rotation.forward(turned)], 1)
        # Column -1 is that of no channel.
        return torch.nn.functional.pad(turned, (0, 1))[:, list(channels)].contiguous().to(device)


@lru_cache(maxsize=256)
def _back(codec: Codec, device: str) -> torch.Tensor:
    with torch.inference_mode(False):
        frame = torch.eye(codec.dim)
        if qjl := codec.side_car(Qjl):
            frame = torch.cat([frame, qjl.rotation.inverse(frame)])
        return codec.rotation.inverse(frame).contiguous().to(device)


@triton.jit
def _products(
    rows: tl.tensor, matrix: tl.tensor, column: tl.tensor, COLUMNS: tl.tensor, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
) -> tl.tensor:
    """``rows`` ``[dim, row]`` times the matrix's columns: float32 ``[column, row]``."""
    channel = tl.arange(0, BLOCK_DIM)
    mask = (channel < DIM)[None, :] & (column < COLUMNS)[:, None]
    weights = tl.load(matrix + channel[None, :] * COLUMNS + column[:, None], mask, 0.0)
    return tl.dot(weights, rows, input_precision="tf32x3")


@triton.jit(do_not_specialize=["rows", "blocks"])
def _queries(
    turned: tl.tensor,
    scales: tl.tensor,
    q: tl.tensor,
    matrix: tl.tensor,
    per_score: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    columns: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        gdc_wait()
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK_DIM)
    mask = (channel < DIM)[:, None] & (row < rows)[None, :]
    values = tl.load(q + (sequence * rows + row)[None, :] * DIM + channel[:, None], mask, 0.0).to(tl.float32)
    # Over the largest value first: squares neither overflow nor vanish.
    largest = tl.maximum(tl.max(tl.abs(values), 0), 1.1754943508222875e-38)
    values = values / largest[None, :]
    length = tl.maximum(tl.sqrt(tl.sum(values * values, 0)), 1.0)
    values = values / length[None, :]
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    found = _products(values, matrix, column, columns, DIM, BLOCK_DIM)
    padded = blocks * ROWS
    at = (sequence * columns + column[:, None]) * padded + row[None, :]
    tl.store(turned + at, found, (column < columns)[:, None])
    if tl.program_id(1) == 0:
        tl.store(scales + sequence * padded + row, length * largest * per_score)


@triton.jit(do_not_specialize=["count"])
def _originals(
    out: tl.tensor,
    sums: tl.tensor,
    matrix: tl.tensor,
    before: tl.tensor,
    count: tl.tensor,
    DIM: tl.constexpr,
    FRAME_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    if DEPENDENT:
        gdc_wait()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    channel = tl.arange(0, BLOCK_DIM)
    mask = (channel < FRAME_DIM)[:, None] & (row < count)[None, :]
    values = tl.load(sums + row[None, :] * FRAME_DIM + channel[:, None], mask, 0.0)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    found = _products(values, matrix, column, DIM, FRAME_DIM, BLOCK_DIM)
    at = row[None, :] * DIM + column[:, None]
    real = (column < DIM)[:, None] & (row < count)[None, :]
    if ADD:
        found += tl.load(before + at, real, 0.0)
    tl.store(out + at, found, real)
