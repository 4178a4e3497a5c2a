"""Tile loader of the klt codec for heads with their own widths (spec/codecs/klt.md).

The codes of all heads of a token are one row of bytes. Heads have different bit positions and widths. So that one launch can handle all
heads, these are not compile-time constants, but stored after each head's table: for each column, the bit at which its code begins, the
code's mask, and the index of its table's first entry. Columns without codes have a zero mask and a zero entry. For each column and token,
the two bytes that contain the code are loaded, and then the entry.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.basis import BasisRows
from kvpack.formats.klt import CODES, HEAD_RUN_COLUMNS, Klt
from kvpack.kernels.bitpack.streams import Stream
from kvpack.kernels.bitpack.tile_layout import broadcast_columns, broadcast_tokens
from kvpack.kernels.bitpack.token_factors import load_factor, read_factor

from .tiles import Tiles

COLUMNS = tl.constexpr(16)
"""Number of columns per tile: the inner dimension of one matrix instruction."""

_MASK_BITS, _MASK = tl.constexpr(8), tl.constexpr(255)
"""Number of low bits of a column's number that contain the mask of the column's code, and these bits' mask. The higher bits are the first
entry.
"""


class KltHeadsConstants(NamedTuple):
    """Compile-time constants of a klt codec: bytes per row, table ``entries`` per head, the tiles, and whether there are gains.

    After the table entries come, for each tile, the bit offset of each column's code, the code's mask, and the index of its first table
    entry.
    """

    row_bytes: int
    entries: int
    steps: int
    gain: bool


def tiles(codec: Klt, source: BasisRows, unit: float) -> Tiles:
    """Return the tile loader of ``codec``. Its tables contain the entries of ``source``, multiplied by ``unit``."""
    tables, numbers, steps = _build_tables(codec, source, unit)
    entries = tables.shape[1]
    constants = KltHeadsConstants(codec.row_bytes, entries, len(steps), codec.gain != "none")
    streams = (Stream(CODES, 8, codec.row_bytes), *((Stream("gain", 16, 1),) if constants.gain else ()))
    table = torch.cat([tables, numbers], 1).contiguous().view(torch.float16).view(len(tables), -1, 2)
    channels = tuple(tuple(c if c < codec.dim else -1 for c in range(COLUMNS.value * step, COLUMNS.value * (step + 1))) for step in steps)
    return Tiles(
        load, decode, factor if constants.gain else None, constants, len(steps), channels, streams, table, entries=entries,
        load_columns=load_columns, offset=True,
    )  # fmt: skip


def _build_tables(codec: Klt, source: BasisRows, unit: float) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return the table entries and the constants of each head, each int32 ``[head, integer]``, and the indices of the tiles with codes.

    The constants are the bit offsets of all columns, then their masks, then their first table entries.
    """
    heads, places = codec.fixed_heads or 1, {}
    for part in codec.runs:
        for head, run, own in zip(part.heads, part.runs, part.byte_positions, strict=True):
            places[head, run] = own[0], part.width
    steps = sorted({run * HEAD_RUN_COLUMNS // COLUMNS.value for _, run in places})
    tables, numbers = [], []
    for sequence, head in product(range(len(source.rows)), range(heads)):
        # A column without codes has entry 0.
        entries, at = [torch.zeros(1, dtype=torch.float32, device="cpu")], 1
        first: dict[tuple[int, int], int] = {}
        begins, masks = [], []
        for step in steps:
            for run in range(COLUMNS.value // HEAD_RUN_COLUMNS * step, COLUMNS.value // HEAD_RUN_COLUMNS * (step + 1)):
                byte, width = places.get((head, run), (0, 0))
                if width and (run // 2, width) not in first:
                    entries.append(source.head_tables((head,), (run,), width)[sequence, 0] * unit)
                    first[run // 2, width], at = at, at + (1 << width)
                mask = first.get((run // 2, width), 0) << _MASK_BITS.value | (1 << width) - 1
                begins += [8 * byte + width * column for column in range(HEAD_RUN_COLUMNS)]
                masks += [mask] * HEAD_RUN_COLUMNS
        tables.append(torch.cat(entries))
        numbers.append([*begins, *masks])
    most = max(map(len, tables))
    padded = torch.stack([torch.nn.functional.pad(table, (0, most - len(table))) for table in tables])
    bits = padded.to(torch.float16).view(torch.int16).to(torch.int32) & 0xFFFF
    return bits | bits << 16, torch.tensor(numbers, dtype=torch.int32, device="cpu"), steps


@triton.jit
def load_columns(table: tl.tensor, rows: tl.tuple, CONSTANTS: tl.constexpr, TOKENS: tl.constexpr) -> tl.tuple:
    """Load the bit offset, mask and first table entry of each column, int32 ``[1, column]`` for each tile."""
    STEPS: tl.constexpr = CONSTANTS.steps
    begin = table.to(tl.pointer_type(tl.int32)) + CONSTANTS.entries
    result = ()
    for number in tl.static_range(2 * STEPS):
        result = result + (tl.load(begin + number * COLUMNS + tl.arange(0, COLUMNS))[None, :],)
    return result


@triton.jit
def load(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    CONSTANTS: tl.constexpr,
    MASKED: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tuple:
    """Return pointers to the rows of ``token`` ``[warp, token]``, and the gains (``token_factors``).

    An invalid token gets the row of a valid token.
    """
    row = token
    if MASKED:
        row = tl.where(valid, token, 0)
    loaded = (pointers[0] + (first + row).to(tl.int64) * CONSTANTS.row_bytes,)
    if CONSTANTS.gain:
        loaded = loaded + load_factor(pointers[1], first, token, valid, 16, MASKED, MODE.fast)
    return loaded


@triton.jit
def decode(
    loaded: tl.tuple, column_fields: tl.tuple, table: tl.tensor, STEP: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tuple:
    """Return the table entries of the codes of step ``STEP`` as one float16 tile, ``[warp, token, column]`` or transposed."""
    STEPS: tl.constexpr = CONSTANTS.steps
    LAST: tl.constexpr = CONSTANTS.row_bytes - 1
    begin = broadcast_columns(column_fields[STEP], MODE.transposed)
    mask = broadcast_columns(column_fields[STEPS + STEP], MODE.transposed)
    row = broadcast_tokens(loaded[0], MODE.transposed)
    byte = begin // 8
    # The next byte may belong to another token or be past the end, but then the code does not need it.
    low = tl.load(row + byte).to(tl.int32) & 0xFF
    high = tl.load(row + tl.minimum(byte + 1, LAST)).to(tl.int32) & 0xFF
    code = ((low | high << 8) >> begin % 8) & (mask & _MASK)
    return (tl.load(table + 2 * ((mask >> _MASK_BITS) + code)),)


@triton.jit
def factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the gains, float32 ``[warp, token]``."""
    return read_factor(loaded, 1, 16, FAST)
