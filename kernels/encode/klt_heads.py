"""Encoder of the klt codec on the GPU for heads with their own widths (spec/codecs/klt.md).

Widths are run-time data, per head and column. The kernel of ``klt.py`` writes a byte per column, and a kernel here packs the codes of all
heads of a token into one row of bytes.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats.klt import CODES, HEAD_RUN_COLUMNS, Klt
from kvpack.kernels.bitpack.columns import launch

from .klt import COLUMNS, DeviceBasis, cached_basis, compute_levels, split_matrix
from .klt import encode as encode_shared
from .rows import load_origin, move_pointer

if TYPE_CHECKING:
    from kvpack.formats.basis import BasisRows

    from .kernel import Output

BLOCK_BYTES = 1024

_PACKING_WARPS = 4

_COLUMN_INTEGERS, _BYTE_INTEGERS = tl.constexpr(2), tl.constexpr(4)

_RUN_COLUMNS = tl.constexpr(HEAD_RUN_COLUMNS)


def encode(codec: Klt, x: torch.Tensor, output: Output) -> bool:
    """Encode ``x`` as ``klt.encode`` does. Widths may be shared by all heads or differ between heads."""
    if codec.fixed_heads is None:
        return encode_shared(codec, x, output)
    if codec.rows != "basis" or x.shape[1] != codec.fixed_heads:
        return False
    source = codec.source_for(x.shape[1])
    basis = cached_basis(codec, source, x, _build_basis)
    if basis is None:
        return False
    batch, heads, tokens, _ = x.shape
    levels, origins = compute_levels(x, output, basis), output.origins
    launch(
        _pack, batch * -(-tokens * codec.row_bytes // BLOCK_BYTES), x.device,
        levels, output.streams[CODES], basis.byte_entries, None if origins is None else origins.table, tokens, heads, levels.shape[3],
        codec.row_bytes, BLOCK_BYTES=BLOCK_BYTES, warps=_PACKING_WARPS,
    )  # fmt: skip
    return True


def _build_basis(codec: Klt, source: BasisRows, padded_dim: int) -> DeviceBasis | None:
    heads, tiles = codec.fixed_heads or 1, -(-codec.dim // COLUMNS.value)
    if len(source.rows) != 1:
        return None
    numbers = torch.zeros(heads, tiles, _COLUMN_INTEGERS.value, COLUMNS.value, dtype=torch.int32, device="cpu")
    byte_entries = torch.zeros(codec.row_bytes, _BYTE_INTEGERS.value, dtype=torch.int32, device="cpu")
    tables: list[list[torch.Tensor]] = [[torch.zeros(2, dtype=torch.float32, device="cpu")] for _ in range(heads)]
    for part in codec.runs:
        for head, run, byte_positions in zip(part.heads, part.runs, part.byte_positions, strict=True):
            table = source.head_tables((head,), (run,), part.width)[0, 0].cpu()
            if not (table[1:] >= table[:-1]).all():
                return None
            first = HEAD_RUN_COLUMNS * run % COLUMNS.value
            columns = numbers[head, run * HEAD_RUN_COLUMNS // COLUMNS.value, :, first : first + part.columns]
            columns[0], columns[1] = part.width, sum(map(len, tables[head]))
            tables[head] += [table, (table[1:] + table[:-1]) / 2, table[:1]]
            for index, byte in enumerate(byte_positions):
                byte_entries[byte] = torch.tensor([head, HEAD_RUN_COLUMNS * run, part.width, 8 * index], dtype=torch.int32, device="cpu")
    joined = [torch.cat(table) for table in tables]
    max_entries = max(map(len, joined))
    rows = _tile_columns(torch.cat([source.mean[0], source.weights[0].square()], 1).cpu(), tiles)
    rows[:, :, 1] *= numbers[:, :, 0] > 0
    return DeviceBasis(
        split_matrix(_tile_columns(source.inverse[0].cpu(), tiles), padded_dim),
        rows.contiguous(),
        torch.stack([torch.nn.functional.pad(table, (0, max_entries - len(table))) for table in joined]),
        numbers,
        byte_entries,
    )


def _tile_columns(rows: torch.Tensor, tiles: int) -> torch.Tensor:
    """Reshape ``[head, row, column]`` to ``[head, tile, row, COLUMNS]``. A partial tile is padded with zeros."""
    padded = torch.nn.functional.pad(rows, (0, COLUMNS.value * tiles - rows.shape[-1]))
    return padded.view(*rows.shape[:2], tiles, COLUMNS.value).transpose(1, 2)


@triton.jit(do_not_specialize=["tokens", "heads", "stored", "row_bytes"])
def _pack(
    levels: tl.tensor,
    codes: tl.tensor,
    byte_entries: tl.tensor,
    origins: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    stored: tl.tensor,
    row_bytes: tl.tensor,
    BLOCK_BYTES: tl.constexpr,
) -> None:
    """Pack ``levels`` ``[batch, head, token, stored]`` into ``BLOCK_BYTES`` bytes of ``codes``, uint8 ``[batch, token, row_bytes]``."""
    blocks = tl.cdiv(tokens.to(tl.int64) * row_bytes, BLOCK_BYTES)
    program = tl.program_id(0).to(tl.int64)
    batch = program // blocks
    position = program % blocks * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    token = position // row_bytes
    valid = token < tokens
    entry = byte_entries + position % row_bytes * _BYTE_INTEGERS
    head = tl.load(entry)
    column = tl.load(entry + 1)
    width = tl.load(entry + 2)
    begin = tl.load(entry + 3)
    levels += ((batch * heads + head) * tokens + token) * stored + column
    byte = tl.zeros((BLOCK_BYTES,), tl.int32)
    for code in tl.static_range(_RUN_COLUMNS):
        # Bit where the code begins, relative to this byte; it may be in an earlier or a later byte.
        shift = code * width - begin
        overlaps = valid & (shift < 8) & (shift + width > 0)
        level = tl.load(levels + code, overlaps, 0).to(tl.int32)
        byte |= (level << tl.maximum(tl.minimum(shift, 8), 0)) >> tl.maximum(-shift, 0)
    if origins is not None:
        codes = move_pointer(codes, load_origin(origins, batch, 1).streams)
    else:
        position += batch * tokens * row_bytes
    tl.store(codes + position, (byte & 0xFF).to(tl.uint8), valid)
