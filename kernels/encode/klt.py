"""Encode klt on the GPU (spec/codecs/klt.md); ``formats/klt.py`` is the oracle.

Widths are data to the kernels, so that all layers and sides of a model share compiled kernels: one kernel writes a byte per column, and
another packs the columns of a width.

Basis matrices are float32. The matrix units receive them, and rows, as sums of bfloat16; products of parts below the last bit of float32
are left out.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
from triton import language as tl

from kvpack.formats.basis import LARGEST_GAIN, RUN_COLUMNS, run_columns
from kvpack.formats.klt import used_widths
from kvpack.kernels.bitpack.columns import launch, tile_origin

from .columns import WARPS
from .rows import LARGEST_SQUARE, all_moved, block_tokens, flag_unless, input_of, load_rows, moved, origin_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.formats.basis import BasisRows
    from kvpack.formats.klt import Klt

    from .kernel import Output

BLOCK_TOKENS = 64
BLOCK_WORDS = 1024
COLUMNS = tl.constexpr(RUN_COLUMNS)

PARTS = tl.constexpr(3)
"""bfloat16 numbers whose sum is a float32."""

PARTS_OF = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""bfloat16 numbers whose sum is a value of a row."""

_PACKING_WARPS = 4

_OF_RUN, _WIDEST = tl.constexpr(3), tl.constexpr(8)


class OnDevice(NamedTuple):
    """The rows of a basis in device memory, in the form that the kernels read, for some widths.

    ``matrix``, bfloat16 ``[kv_head, run, part, padded dim, RUN_COLUMNS]``, maps channels to the columns of runs with a width; the sum of
    its parts is float32. ``columns``, float32 ``[kv_head, run, 2, RUN_COLUMNS]``, has means and squared weights. ``tables``, float32
    ``[kv_head, entry]``, has for each run its entries, the bounds between these, and a value. ``runs``, int32 ``[run, _OF_RUN]``, are their
    widths, their first entries and their first columns in stream order. If heads have their own widths, it is ``[kv_head, run, 2,
    RUN_COLUMNS]``, with the width and the first entry of each column, and ``places`` are the positions by which ``klt_heads`` packs.
    """

    matrix: torch.Tensor
    columns: torch.Tensor
    tables: torch.Tensor
    runs: torch.Tensor
    places: torch.Tensor | None = None


_KEPT: WeakKeyDictionary[BasisRows, dict[tuple[bytes, int | None, int, str], OnDevice | None]] = WeakKeyDictionary()


def encode(codec: Klt, x: torch.Tensor, output: Output) -> bool:
    """Fill ``output`` from ``x``. Returns False, and does nothing, for codecs that the kernels do not support.

    These are codecs with a basis in the streams or for several sequences, and with tables that do not ascend. Raises MissingBasis, and
    InvalidParameter for another number of heads and for a matrix without an inverse.
    """
    if codec.rows != "basis":
        return False
    source = codec.source_for(x.shape[1])
    resident = kept_rows(codec, source, x, _made)
    if resident is None:
        return False
    batch, heads, tokens, _ = x.shape
    levels, origins = levels_of(x, output, resident), output.origins
    columns = levels.shape[3]
    first_plane = first_column = 0
    for width, packing in zip(used_widths(codec.widths), codec.packings().values(), strict=True):
        places = packing.width + packing.width % 2
        launch(
            _pack, batch * -(-heads * tokens * places // BLOCK_WORDS), x.device,
            levels, output.planes[first_plane : first_plane + len(packing.planes)], None if origins is None else origins.table,
            heads * tokens, columns, first_column, packing.symbols, width, packing.width, BLOCK_WORDS=BLOCK_WORDS, warps=_PACKING_WARPS,
        )  # fmt: skip
        first_plane += len(packing.planes)
        first_column += RUN_COLUMNS * codec.widths.count(width)
    return True


def levels_of(x: torch.Tensor, output: Output, there: OnDevice) -> torch.Tensor:
    """Launch the kernel that fills the gains of ``output``; return the levels, uint8 ``[batch, kv_head, token, column]``, in run order."""
    arguments, constants = input_of(x, output.origins)
    del constants["PARTS"]
    batch, heads, tokens, _ = x.shape
    runs, block = there.matrix.shape[1], block_tokens(x, BLOCK_TOKENS)
    levels = torch.empty(batch, heads, tokens, RUN_COLUMNS * runs, dtype=torch.uint8, device=x.device)
    launch(
        _encode, batch * heads * -(-tokens // block), x.device,
        *arguments, there.matrix, there.columns, there.tables, there.runs, levels, output.streams.get("gain"), output.flag, runs,
        there.tables.shape[1], **constants, PARTS_OF_ROWS=PARTS_OF[x.dtype], LARGEST=LARGEST_SQUARE, LARGEST_GAIN=LARGEST_GAIN,
        OWN_WIDTHS=there.runs.dim() > 2, BLOCK_TOKENS=block, warps=WARPS, fusion=True,
    )  # fmt: skip
    return levels


def kept_rows(codec: Klt, source: BasisRows, x: torch.Tensor, make: Callable[[Klt, BasisRows, int], OnDevice | None]) -> OnDevice | None:
    """Return ``make`` applied to ``source`` for the padded dim of ``x``, on its device, cached as long as ``source`` lives."""
    kept = _KEPT.setdefault(source, {})
    padded_dim = int(input_of(x).constants["PADDED_DIM"])
    key = codec.widths, codec.fixed_heads, padded_dim, str(x.device)
    if key not in kept:
        # Tensors made in inference mode could not be used with autograd later; the caller's default device may be another.
        with torch.inference_mode(False), torch.device("cpu"):
            created = make(codec, source, padded_dim)
            kept[key] = created and created._replace(
                **{name: part.to(x.device) for name, part in created._asdict().items() if part is not None}
            )
    return kept[key]


def in_parts(matrix: torch.Tensor, padded_dim: int) -> torch.Tensor:
    """Split float32 ``[kv_head, run, dim, RUN_COLUMNS]`` into the parts of ``OnDevice.matrix``."""
    rest = torch.nn.functional.pad(matrix, (0, 0, 0, padded_dim - matrix.shape[2]))
    parts = []
    for _ in range(PARTS.value):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].to(torch.float32)
    return torch.stack(parts, 2).contiguous()


def _made(codec: Klt, source: BasisRows, padded_dim: int) -> OnDevice | None:
    """Build the rows on the device; None unless the level of a value is its code in every table."""
    if len(source.rows) != 1:
        return None
    widths = codec.widths
    tables, runs = [], []
    first_entry = 0
    for run, width in enumerate(widths):
        if width:
            table = source.table(run, width)[0].cpu()
            if not (table[:, 1:] >= table[:, :-1]).all():
                return None
            narrower = sum(0 < other < width for other in widths) + widths[:run].count(width)
            runs.append([width, first_entry, RUN_COLUMNS * narrower])
            tables += [table, (table[:, 1:] + table[:, :-1]) / 2, table[:, :1]]
            first_entry += 2 << width
    columns = torch.cat([source.mean[0], source.weights[0].square()], 1).cpu()
    return OnDevice(
        in_parts(_coded(source.inverse[0].cpu(), widths), padded_dim),
        _coded(columns, widths).contiguous(),
        torch.cat(tables, 1),
        torch.tensor(runs, dtype=torch.int32, device="cpu"),
    )


def _coded(rows: torch.Tensor, widths: bytes) -> torch.Tensor:
    """Return ``[head, ..., column]`` as ``[head, run with codes, ..., RUN_COLUMNS]``, with zeros after the last column."""
    dim = rows.shape[-1]
    runs = [rows[..., run_columns(run, dim)] for run, width in enumerate(widths) if width]
    return torch.stack([torch.nn.functional.pad(run, (0, RUN_COLUMNS - run.shape[-1])) for run in runs], 1)


@triton.jit(do_not_specialize=["run_count", "table_values"])
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
    runs: tl.tensor,
    levels: tl.tensor,
    gains: tl.tensor,
    flag: tl.tensor,
    run_count: tl.tensor,
    table_values: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS_OF_ROWS: tl.constexpr,
    OPERAND: tl.constexpr,
    LARGEST: tl.constexpr,
    LARGEST_GAIN: tl.constexpr,
    OWN_WIDTHS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    """Write the levels and gains of ``BLOCK_TOKENS`` tokens of one head, one run of columns at a time.

    ``x`` is ``[batch, kv_head, token, dim]`` of any strides, ``levels`` uint8 ``[batch, kv_head, token, column]``, columns in stream order,
    and ``gains`` ``[batch, kv_head, token]``, if the codec stores them; tiles are ``[token, column]``. A tile is flagged unless the
    weighted squared lengths of its tokens are below ``LARGEST``.
    """
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    valid = token < tokens
    row = head * tokens + token
    levels += (batch * heads * tokens + row) * (run_count * COLUMNS)
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
    matrix += head * run_count * (PARTS * PADDED_DIM * COLUMNS) + tl.arange(0, PADDED_DIM)[:, None] * COLUMNS + column
    columns += head * run_count * (2 * COLUMNS) + column
    tables += head * table_values
    if OWN_WIDTHS:
        runs += head * run_count * (2 * COLUMNS) + column
    own = tl.zeros(token.shape, tl.float32)
    common = tl.zeros(token.shape, tl.float32)
    decoded = tl.zeros(token.shape, tl.float32)
    for run in range(run_count):
        value = tl.zeros((BLOCK_TOKENS, COLUMNS), tl.float32)
        for last in tl.static_range(PARTS):
            # The smallest products first.
            factor = tl.load(matrix + (run * PARTS + (PARTS - 1 - last)) * (PADDED_DIM * COLUMNS)).to(OPERAND)
            for number in tl.static_range(PARTS_OF_ROWS):
                if number <= last:
                    value = tl.dot(parts[number].to(OPERAND), factor, value, input_precision="ieee")
        value -= tl.load(columns + run * (2 * COLUMNS))
        square = tl.load(columns + (run * 2 + 1) * COLUMNS)
        # The level of a value is the number of bounds below it.
        level = tl.zeros((BLOCK_TOKENS, COLUMNS), tl.int32)
        if OWN_WIDTHS:
            width = tl.load(runs + run * (2 * COLUMNS))
            entries = tables + tl.load(runs + (run * 2 + 1) * COLUMNS)
            for step in range(_WIDEST):
                left = width - 1 - step
                half = tl.where(left >= 0, 1 << tl.maximum(left, 0), 0)
                bound = tl.load(entries + (tl.where(half > 0, (1 << width) + half - 1, 0) + level))
                level += tl.where(value > bound, half, 0)
            place = run * COLUMNS
        else:
            width = tl.load(runs + run * _OF_RUN)
            entries = tables + tl.load(runs + (run * _OF_RUN + 1))
            for step in range(width):
                half = 1 << (width - 1 - step)
                bound = tl.load(entries + ((1 << width) + half - 1) + level)
                level += tl.where(value > bound, half, 0)
            place = tl.load(runs + (run * _OF_RUN + 2))
        entry = tl.load(entries + level)
        own += tl.sum(value * value * square, 1)[:, None]
        common += tl.sum(value * entry * square, 1)[:, None]
        decoded += tl.sum(entry * entry * square, 1)[:, None]
        tl.store(levels + place + column, level.to(tl.uint8), valid)
    flag_unless(own < LARGEST, flag)
    if gains is not None:
        gain = gain_of(own, common, decoded, LARGEST_GAIN).to(gains.dtype.element_ty)
        tl.store(gains + (batch * heads * tokens + row), gain, valid)


@triton.jit
def split(rows: tl.tensor, COUNT: tl.constexpr) -> tl.tuple:
    """Split ``rows``, float32, into ``COUNT`` bfloat16 tiles with that sum."""
    parts = ()
    for _ in tl.static_range(COUNT):
        part = rows.to(tl.bfloat16)
        parts = parts + (part,)
        rows = rows - part.to(tl.float32)
    return parts


@triton.jit
def gain_of(own: tl.tensor, common: tl.tensor, decoded: tl.tensor, LARGEST_GAIN: tl.constexpr) -> tl.tensor:
    """Return the gains of tokens as ``formats/klt.py`` does, or 1 if there is none."""
    near = (common > 0) & (own * decoded <= 2 * common * common)
    above = tl.where(near, own, tl.maximum(common, 0.0))
    below = tl.where(near, common, decoded)
    found = above / tl.where(below > 0, below, 1.0)
    return tl.where((below > 0) & (found < float("inf")), tl.minimum(found, LARGEST_GAIN), 1.0)


@triton.jit(do_not_specialize=["rows", "stored", "first", "symbols", "bits", "width"])
def _pack(
    levels: tl.tensor,
    planes: tl.tuple,
    origins: tl.tensor,
    rows: tl.tensor,
    stored: tl.tensor,
    first: tl.tensor,
    symbols: tl.tensor,
    bits: tl.tensor,
    width: tl.tensor,
    BLOCK_WORDS: tl.constexpr,
) -> None:
    """Write ``BLOCK_WORDS`` words of each plane of one stream: columns(``symbols``, 2^``bits``, F) of ``width`` words (spec/README.md).

    ``levels`` is uint8 ``[batch, row, stored]``, whose columns from ``first`` on are the stream's symbols. A plane of bytes is passed as
    uint8.
    """
    # Planes of bytes have one for an odd number of columns, too.
    places = width + width % 2
    blocks = tl.cdiv(rows.to(tl.int64) * places, BLOCK_WORDS)
    program = tl.program_id(0).to(tl.int64)
    batch = program // blocks
    start = program % blocks * BLOCK_WORDS
    place = (start % places).to(tl.int32) + tl.arange(0, BLOCK_WORDS)
    column = place % places
    row = start // places + place // places
    inside = row < rows
    valid = inside & (column < width)
    levels += (batch * rows + row) * stored + first + column
    if origins is not None:
        planes = all_moved(planes, origin_of(origins, batch, 1).streams)
    else:
        row += batch * rows
    for plane in tl.static_range(len(planes)):
        word = tl.zeros((BLOCK_WORDS,), tl.int32)
        for field in range(16 * plane // bits, (16 * plane + 15) // bits + 1):
            level = tl.load(levels + field * width, valid & (field * width + column < symbols), 0).to(tl.int32)
            shift = field * bits - 16 * plane
            word |= (level << tl.maximum(shift, 0)) >> tl.maximum(-shift, 0)
        if planes[plane].dtype.element_ty == tl.uint8:
            half = places // 2
            # Byte c of the last plane's W is the low or the high one of word c mod W / 2.
            tl.store(planes[plane] + row * places + (column % half * 2 + column // half), (word & 0xFF).to(tl.uint8), inside)
        else:
            tl.store(planes[plane] + row * width + column, (word & 0xFFFF).to(tl.uint16), valid)
