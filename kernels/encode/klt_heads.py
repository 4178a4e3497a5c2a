"""Encode klt on the GPU where each head has its own widths (spec/codecs/klt.md); ``formats/klt.py`` is the oracle.

As for shared widths (``klt.py``), widths are data to the kernels, here for each head and column. The kernel there writes a byte per column,
and another packs the codes of all heads of a token into one row of bytes.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats.klt import CODES, HEAD_RUN_COLUMNS
from kvpack.kernels.bitpack.columns import launch

from .klt import COLUMNS, OnDevice, in_parts, kept_rows, levels_of
from .klt import encode as encode_shared
from .rows import moved, origin_of

if TYPE_CHECKING:
    from kvpack.formats.basis import BasisRows
    from kvpack.formats.klt import Klt

    from .kernel import Output

BLOCK_BYTES = 1024

_PACKING_WARPS = 4

_OF_COLUMN, _OF_BYTE = tl.constexpr(2), tl.constexpr(4)

_SHORT = tl.constexpr(HEAD_RUN_COLUMNS)


def encode(codec: Klt, x: torch.Tensor, output: Output) -> bool:
    """Encode as ``klt.encode`` does, for shared widths and for widths of heads."""
    if codec.fixed_heads is None:
        return encode_shared(codec, x, output)
    if codec.rows != "basis" or x.shape[1] != codec.fixed_heads:
        return False
    source = codec.source_for(x.shape[1])
    resident = kept_rows(codec, source, x, _made)
    if resident is None:
        return False
    batch, heads, tokens, _ = x.shape
    levels, origins = levels_of(x, output, resident), output.origins
    launch(
        _pack, batch * -(-tokens * codec.row_bytes // BLOCK_BYTES), x.device,
        levels, output.streams[CODES], resident.places, None if origins is None else origins.table, tokens, heads, levels.shape[3],
        codec.row_bytes, BLOCK_BYTES=BLOCK_BYTES, warps=_PACKING_WARPS,
    )  # fmt: skip
    return True


def _made(codec: Klt, source: BasisRows, padded_dim: int) -> OnDevice | None:
    """Build the rows on the device; None unless the level of a value is its code in every table."""
    heads, tiles = codec.fixed_heads or 1, -(-codec.dim // COLUMNS.value)
    if len(source.rows) != 1:
        return None
    numbers = torch.zeros(heads, tiles, _OF_COLUMN.value, COLUMNS.value, dtype=torch.int32, device="cpu")
    places = torch.zeros(codec.row_bytes, _OF_BYTE.value, dtype=torch.int32, device="cpu")
    tables: list[list[torch.Tensor]] = [[torch.zeros(2, dtype=torch.float32, device="cpu")] for _ in range(heads)]
    for part in codec.runs:
        for head, run, own in zip(part.heads, part.runs, part.places, strict=True):
            table = source.head_tables((head,), (run,), part.width)[0, 0].cpu()
            if not (table[1:] >= table[:-1]).all():
                return None
            first = HEAD_RUN_COLUMNS * run % COLUMNS.value
            columns = numbers[head, run * HEAD_RUN_COLUMNS // COLUMNS.value, :, first : first + part.columns]
            columns[0], columns[1] = part.width, sum(map(len, tables[head]))
            tables[head] += [table, (table[1:] + table[:-1]) / 2, table[:1]]
            for number, byte in enumerate(own):
                places[byte] = torch.tensor([head, HEAD_RUN_COLUMNS * run, part.width, 8 * number], dtype=torch.int32, device="cpu")
    joined = [torch.cat(table) for table in tables]
    most = max(map(len, joined))
    rows = _in_tiles(torch.cat([source.mean[0], source.weights[0].square()], 1).cpu(), tiles)
    rows[:, :, 1] *= numbers[:, :, 0] > 0
    return OnDevice(
        in_parts(_in_tiles(source.inverse[0].cpu(), tiles), padded_dim),
        rows.contiguous(),
        torch.stack([torch.nn.functional.pad(table, (0, most - len(table))) for table in joined]),
        numbers,
        places,
    )


def _in_tiles(rows: torch.Tensor, tiles: int) -> torch.Tensor:
    """Reshape ``[head, row, column]`` to ``[head, tile, row, COLUMNS]``, with zeros after the last column."""
    padded = torch.nn.functional.pad(rows, (0, COLUMNS.value * tiles - rows.shape[-1]))
    return padded.view(*rows.shape[:2], tiles, COLUMNS.value).transpose(1, 2)


@triton.jit(do_not_specialize=["tokens", "heads", "stored", "row_bytes"])
def _pack(
    levels: tl.tensor,
    codes: tl.tensor,
    places: tl.tensor,
    origins: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    stored: tl.tensor,
    row_bytes: tl.tensor,
    BLOCK_BYTES: tl.constexpr,
) -> None:
    """Write ``BLOCK_BYTES`` bytes of ``codes``, uint8 ``[batch, token, row_bytes]``, from ``levels`` ``[batch, head, token, stored]``."""
    blocks = tl.cdiv(tokens.to(tl.int64) * row_bytes, BLOCK_BYTES)
    program = tl.program_id(0).to(tl.int64)
    batch = program // blocks
    place = program % blocks * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    token = place // row_bytes
    valid = token < tokens
    numbers = places + place % row_bytes * _OF_BYTE
    head = tl.load(numbers)
    column = tl.load(numbers + 1)
    width = tl.load(numbers + 2)
    begin = tl.load(numbers + 3)
    levels += ((batch * heads + head) * tokens + token) * stored + column
    byte = tl.zeros((BLOCK_BYTES,), tl.int32)
    for number in tl.static_range(_SHORT):
        # The bit of the byte where the code begins; it may be in a byte before this one, or behind it.
        shift = number * width - begin
        here = valid & (shift < 8) & (shift + width > 0)
        level = tl.load(levels + number, here, 0).to(tl.int32)
        byte |= (level << tl.maximum(tl.minimum(shift, 8), 0)) >> tl.maximum(-shift, 0)
    if origins is not None:
        codes = moved(codes, origin_of(origins, batch, 1).streams)
    else:
        place += batch * tokens * row_bytes
    tl.store(codes + place, (byte & 0xFF).to(tl.uint8), valid)
