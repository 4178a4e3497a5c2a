"""Unpacking of the klt codec: attention's tile loader decodes columns, and matrix products map them to channels, block by block."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, TypeGuard

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.klt import Klt
from kvpack.kernels.bitpack.columns import launch
from kvpack.kernels.tiles import frame_columns

from . import tiles
from .decode import FUSED_DTYPES, supports_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.base import Codec

    from .rows import PackedPart

MAX_TILE_BYTES = 64 << 20
"""Maximum number of bytes of decoded columns in memory."""

ROWS, SPAN, CHANNELS, WARPS = 128, 512, 128, 8
"""Launch shape of ``_to_original``: tokens per product, tokens per program, maximum channels, and warps."""

_MATRIX_PARTS = tl.constexpr(2)
"""Number of float16 parts into which matrix entries are split. Their sum is accurate to 2^-22 (relative) or 2^-25 (absolute)."""


def supports(codec: Codec, out: torch.Tensor) -> TypeGuard[Klt]:
    """Return True if ``unpack`` can decode ``codec`` into ``out``. Codecs whose basis rows are stored in the cache are not supported."""
    return (
        isinstance(codec, Klt)
        and codec.rows == "basis"
        and out.dtype in FUSED_DTYPES
        and supports_output(out)
        and tiles.find_loader(codec) is not None
    )


def unpack(codec: Klt, packed: Sequence[PackedPart], out: torch.Tensor) -> None:
    """Decode the consecutive pages ``packed`` into ``out`` ``[batch, kv_head, token, dim]``, in the original frame.

    Table entries are rounded to float16, and the results to the dtype of ``out``.
    """
    batch, heads, _, dim = out.shape
    work = tiles.build_work(codec, packed, batch, heads, out.device)
    if not work.blocks * batch * heads:
        return
    matrix, means = _column_matrix(codec, str(out.device))
    columns = matrix.shape[2]
    tokens_at_once = MAX_TILE_BYTES // (2 * columns * batch * heads)
    for blocks, start, stop in work.parts(tokens_at_once):
        tokens = stop - start
        values = torch.empty(batch, heads, tokens, columns, dtype=torch.float16, device=out.device)
        factors = None if codec.gain == "none" else torch.empty(batch, heads, tokens, dtype=torch.float32, device=out.device)
        tiles.decode(codec, work, values, blocks, factors)
        channels = min(CHANNELS, matrix.shape[3])
        launch(
            _to_original, batch * heads * -(-tokens // SPAN) * (matrix.shape[3] // channels), out.device,
            out, *out.stride()[:3], start, tokens, heads, values, factors, matrix, means, columns, len(matrix), DIM=dim,
            PADDED_DIM=matrix.shape[3], CHANNELS=channels, PADDED_COLUMNS=max(16, next_power_of_two(columns)), ROWS=ROWS, SPAN=SPAN,
            warps=WARPS, fusion=True,
        )  # fmt: skip


@lru_cache(maxsize=256)
def _column_matrix(codec: Klt, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices from columns to channels, and the means to add to the products.

    A matrix is split into float16 parts that add up to it: ``[matrix, part, column, padded dim]``. The means are ``[matrix, padded dim]``.
    """
    matrix = frame_columns.value_matrix(((codec, frame_columns.columns(codec, 0)),), 1, "cpu")
    with torch.inference_mode(False), torch.device("cpu"):
        matrix = torch.nn.functional.pad(matrix, (0, max(16, next_power_of_two(codec.dim)) - codec.dim))
        # The last row is the mean token.
        remainder, parts = matrix[:, :-1], []
        for _ in range(_MATRIX_PARTS.value):
            parts.append(remainder.to(torch.float16))
            remainder = remainder - parts[-1].to(torch.float32)
        return torch.stack(parts, 1).contiguous().to(device), matrix[:, -1].contiguous().to(device)


@triton.jit(do_not_specialize=["start", "tokens", "heads", "columns", "matrices"])
def _to_original(
    out: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    start: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    values: tl.tensor,
    factors: tl.tensor,
    matrix: tl.tensor,
    means: tl.tensor,
    columns: tl.tensor,
    matrices: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Map ``SPAN`` tokens of one head from columns to ``CHANNELS`` channels, apply their factors, and add the mean.

    ``values`` is float16 ``[batch, kv_head, token, column]``; ``factors`` is float32 ``[batch, kv_head, token]`` or None. Both begin with
    token ``start`` of ``out``.
    """
    channel = tl.program_id(0) % (PADDED_DIM // CHANNELS) * CHANNELS + tl.arange(0, CHANNELS)
    program = tl.program_id(0) // (PADDED_DIM // CHANNELS)
    blocks = tl.cdiv(tokens, SPAN)
    sequence = (program // blocks).to(tl.int64)
    first = program % blocks * SPAN
    column = tl.arange(0, PADDED_COLUMNS)
    matrix_index = sequence % matrices
    address = matrix + matrix_index * _MATRIX_PARTS * columns * PADDED_DIM + column[:, None] * PADDED_DIM + channel[None, :]
    upper = tl.load(address, column[:, None] < columns, 0.0)
    lower = tl.load(address + columns * PADDED_DIM, column[:, None] < columns, 0.0)
    mean = tl.load(means + matrix_index * PADDED_DIM + channel)[None, :]
    out += sequence // heads * batch_stride + sequence % heads * head_stride + channel[None, :]
    for offset in range(0, SPAN, ROWS):
        token = first + offset + tl.arange(0, ROWS)[:, None]
        row = sequence * tokens + token
        tile = tl.load(values + row * columns + column[None, :], (token < tokens) & (column[None, :] < columns), 0.0)
        # Add the smaller products first.
        value = tl.dot(tile, lower)
        value = tl.dot(tile, upper, value)
        if factors is not None:
            value *= tl.load(factors + row, token < tokens, 0.0)
        value = (value + mean).to(out.dtype.element_ty)
        tl.store(out + (start + token).to(tl.int64) * token_stride, value, (token < tokens) & (channel < DIM)[None, :])
