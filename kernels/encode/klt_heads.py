"""Encode klt on the GPU where each head has its own widths (spec/codecs/klt.md); ``formats/klt.py`` is the oracle.

As for shared widths (``klt.py``), widths are data to the kernels, here for each head and column: one kernel writes a byte per column, and
another packs the codes of all heads of a token into one row of bytes.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
from triton import language as tl

from kvpack.formats.basis import LARGEST_GAIN
from kvpack.formats.klt import CODES, HEAD_RUN_COLUMNS
from kvpack.kernels.bitpack.columns import launch, tile_origin

from .columns import WARPS
from .klt import BLOCK_TOKENS, COLUMNS, PARTS, PARTS_OF, gain_of, split
from .klt import encode as encode_shared
from .rows import LARGEST_SQUARE, block_tokens, flag_unless, input_of, load_rows, moved, origin_of

if TYPE_CHECKING:
    from kvpack.formats.basis import BasisRows
    from kvpack.formats.klt import Klt

    from .kernel import Output

BLOCK_BYTES = 1024

_PACKING_WARPS = 4

_OF_COLUMN, _OF_BYTE = tl.constexpr(2), tl.constexpr(4)

_WIDEST, _SHORT = tl.constexpr(8), tl.constexpr(HEAD_RUN_COLUMNS)


class OnDevice(NamedTuple):
    """The rows of a basis in device memory, as the kernels read them, for some widths; tiles have ``COLUMNS`` columns in order.

    ``matrix``, bfloat16 ``[kv_head, tile, part, padded dim, COLUMNS]``, is what channels add to columns; the sum of its parts is float32.
    ``columns``, float32 ``[kv_head, tile, 2, COLUMNS]``, has means, and the squares of weights, 0 for columns without codes. ``tables``,
    float32 ``[kv_head, entry]``, has for each table its entries, the bounds between these, and a value. ``numbers``, int32
    ``[kv_head, tile, _OF_COLUMN, COLUMNS]``, are the widths of columns and the first entries of their tables. ``places``, int32
    ``[byte, _OF_BYTE]``, are for each byte of a row its head, the first column of its run, the width and the first bit in the run.
    """

    matrix: torch.Tensor
    columns: torch.Tensor
    tables: torch.Tensor
    numbers: torch.Tensor
    places: torch.Tensor


_KEPT: WeakKeyDictionary[BasisRows, dict[tuple[bytes, int, str], OnDevice | None]] = WeakKeyDictionary()


def encode(codec: Klt, x: torch.Tensor, output: Output) -> bool:
    """Encode as ``klt.encode`` does, for shared widths and for widths of heads."""
    if codec.fixed_heads is None:
        return encode_shared(codec, x, output)
    if codec.rows != "basis" or x.shape[1] != codec.fixed_heads:
        return False
    source = codec.source_for(x.shape[1])
    streams, _, flag, origins = output
    arguments, constants = input_of(x, origins)
    there = _on_device(codec, source, constants["PADDED_DIM"], x.device)
    if there is None:
        return False
    del constants["PARTS"]
    batch, heads, tokens, _ = x.shape
    tiles = there.matrix.shape[1]
    levels = torch.empty(batch, heads, tokens, COLUMNS.value * tiles, dtype=torch.uint8, device=x.device)
    block = block_tokens(x, BLOCK_TOKENS)
    launch(
        _encode, batch * heads * -(-tokens // block), x.device,
        *arguments, *there[:4], levels, streams.get("gain"), flag, tiles, there.tables.shape[1],
        **constants, PARTS_OF_ROWS=PARTS_OF[x.dtype], LARGEST=LARGEST_SQUARE, LARGEST_GAIN=LARGEST_GAIN, BLOCK_TOKENS=block,
        warps=WARPS, fusion=True,
    )  # fmt: skip
    launch(
        _pack, batch * -(-tokens * codec.row_bytes // BLOCK_BYTES), x.device,
        levels, streams[CODES], there.places, None if origins is None else origins.table, tokens, heads, COLUMNS.value * tiles,
        codec.row_bytes, BLOCK_BYTES=BLOCK_BYTES, warps=_PACKING_WARPS,
    )  # fmt: skip
    return True


def _on_device(codec: Klt, source: BasisRows, padded_dim: int, device: torch.device) -> OnDevice | None:
    """Return the device copies, which live as long as ``source``; None if the level of a value is not its code in every table."""
    kept = _KEPT.setdefault(source, {})
    key = codec.widths, padded_dim, str(device)
    if key not in kept:
        # Tensors made in inference mode could not be used with autograd later; the caller's default device may be another.
        with torch.inference_mode(False), torch.device("cpu"):
            made = _made(codec, source, padded_dim)
            kept[key] = made and OnDevice(*(part.to(device) for part in made))
    return kept[key]


def _made(codec: Klt, source: BasisRows, padded_dim: int) -> OnDevice | None:
    heads, tiles = codec.fixed_heads or 1, -(-codec.dim // COLUMNS.value)
    if len(source.rows) != 1:
        return None
    numbers = torch.zeros(heads, tiles, _OF_COLUMN.value, COLUMNS.value, dtype=torch.int32, device="cpu")
    places = torch.zeros(codec.row_bytes, _OF_BYTE.value, dtype=torch.int32, device="cpu")
    tables: list[list[torch.Tensor]] = [[torch.zeros(2, dtype=torch.float32, device="cpu")] for _ in range(heads)]
    for part in codec.runs:
        for head, run, own in zip(part.heads, part.runs, part.places, strict=True):
            table = source.tables_of((head,), (run,), part.width)[0, 0].cpu()
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
    rest = _in_tiles(source.inverse[0].cpu(), tiles)
    rest = torch.nn.functional.pad(rest, (0, 0, 0, padded_dim - rest.shape[2]))
    parts = []
    for _ in range(PARTS.value):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].to(torch.float32)
    rows = _in_tiles(torch.cat([source.mean[0], source.weights[0].square()], 1).cpu(), tiles)
    rows[:, :, 1] *= numbers[:, :, 0] > 0
    return OnDevice(
        torch.stack(parts, 2).contiguous(),
        rows.contiguous(),
        torch.stack([torch.nn.functional.pad(table, (0, most - len(table))) for table in joined]),
        numbers,
        places,
    )


def _in_tiles(rows: torch.Tensor, tiles: int) -> torch.Tensor:
    """``[head, row, column]`` as ``[head, tile, row, COLUMNS]``, with zeros behind the last column."""
    padded = torch.nn.functional.pad(rows, (0, COLUMNS.value * tiles - rows.shape[-1]))
    return padded.view(*rows.shape[:2], tiles, COLUMNS.value).transpose(1, 2)


@triton.jit(do_not_specialize=["tiles", "table_values"])
def _encode(
    x: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    channel_stride: tl.tensor,
    heads: tl.tensor,
    tokens: tl.tensor,
    origins: tl.tensor,
    matrix: tl.tensor,
    columns: tl.tensor,
    tables: tl.tensor,
    numbers: tl.tensor,
    levels: tl.tensor,
    gains: tl.tensor,
    flag: tl.tensor,
    tiles: tl.tensor,
    table_values: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS_OF_ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    LARGEST: tl.constexpr,
    LARGEST_GAIN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Encode as ``klt._encode`` does, a tile of columns at a time; ``levels`` are in the order of columns."""
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    valid = token < tokens
    row = head * tokens + token
    levels += (batch * heads * tokens + row) * (tiles * COLUMNS)
    if origins is not None:
        origin = origin_of(origins, batch, ALIGNED)
        x += origin.input
        if gains is not None:
            gains = moved(gains, origin.streams)
        flag += origin.flag
        batch = batch * 0
    rows = load_rows(x, batch_stride, head_stride, token_stride, channel_stride, batch, head, token, valid, DIM, PADDED_DIM)
    parts = split(rows.to(tl.float32), PARTS_OF_ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    matrix += head * tiles * (PARTS * PADDED_DIM * COLUMNS) + tl.arange(0, PADDED_DIM)[:, None] * COLUMNS + column
    columns += head * tiles * (2 * COLUMNS) + column
    numbers += head * tiles * (_OF_COLUMN * COLUMNS) + column
    tables += head * table_values
    own = tl.zeros(token.shape, tl.float32)
    common = tl.zeros(token.shape, tl.float32)
    decoded = tl.zeros(token.shape, tl.float32)
    for tile in range(tiles):
        value = tl.zeros((BLOCK_TOKENS, COLUMNS), tl.float32)
        for last in tl.static_range(PARTS):
            # The smallest products first.
            factor = tl.load(matrix + (tile * PARTS + (PARTS - 1 - last)) * (PADDED_DIM * COLUMNS)).to(OPERAND)
            for number in tl.static_range(PARTS_OF_ROWS):
                if number <= last:
                    value = tl.dot(parts[number].to(OPERAND), factor, value, input_precision="ieee")
        value -= tl.load(columns + tile * (2 * COLUMNS))
        square = tl.load(columns + (tile * 2 + 1) * COLUMNS)
        width = tl.load(numbers + tile * (_OF_COLUMN * COLUMNS))
        entries = tables + tl.load(numbers + (tile * _OF_COLUMN + 1) * COLUMNS)
        # The level of a value is the number of bounds below it.
        level = tl.zeros((BLOCK_TOKENS, COLUMNS), tl.int32)
        for step in range(_WIDEST):
            left = width - 1 - step
            half = tl.where(left >= 0, 1 << tl.maximum(left, 0), 0)
            bound = tl.load(entries + (tl.where(half > 0, (1 << width) + half - 1, 0) + level))
            level += tl.where(value > bound, half, 0)
        entry = tl.load(entries + level)
        own += tl.sum(value * value * square, 1)[:, None]
        common += tl.sum(value * entry * square, 1)[:, None]
        decoded += tl.sum(entry * entry * square, 1)[:, None]
        tl.store(levels + tile * COLUMNS + column, level.to(tl.uint8), valid)
    flag_unless(own < LARGEST, flag)
    if gains is not None:
        gain = gain_of(own, common, decoded, LARGEST_GAIN).to(gains.dtype.element_ty)
        tl.store(gains + (batch * heads * tokens + row), gain, valid)


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
    """Write ``BLOCK_BYTES`` bytes of ``codes``, uint8 ``[batch, token, row_bytes]``, of ``levels`` ``[batch, head, token, stored]``."""
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
