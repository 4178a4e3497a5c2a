"""Encoder of the klt codec on the GPU (spec/codecs/klt.md).

Widths are run-time data, so that all layers of a model share compiled kernels: one kernel writes a byte per column, and another packs the
columns of one width.

Basis matrices are float32. For matrix products, matrices and values are split into sums of bfloat16 numbers. Products below the last bit of
float32 are omitted.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
from triton import language as tl

from kvpack.formats.basis import MAX_GAIN, RUN_COLUMNS, BasisRows, run_columns
from kvpack.formats.klt import Klt, used_widths
from kvpack.kernels.bitpack.columns import launch, tile_origin

from .columns import WARPS
from .rows import MAX_SQUARE, block_tokens, flag_unless, input_arguments, load_origin, load_rows, move_pointer, move_pointers

if TYPE_CHECKING:
    from collections.abc import Callable

    from .kernel import Output

BLOCK_TOKENS = 64
BLOCK_WORDS = 1024
COLUMNS = tl.constexpr(RUN_COLUMNS)

PARTS = tl.constexpr(3)
"""Number of bfloat16 parts into which a float32 number is split."""

VALUE_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""Number of bfloat16 parts into which an input value is split, by dtype."""

_PACKING_WARPS = 4

_RUN_INTEGERS, _MAX_WIDTH = tl.constexpr(3), tl.constexpr(8)


class DeviceBasis(NamedTuple):
    """Device copy of a basis for the column widths of one codec, in the layout that kernels read.

    - ``matrix``: bfloat16 ``[kv_head, run, part, padded dim, RUN_COLUMNS]``, from channels to the columns of runs that have codes;
      the sum of the parts has float32 precision.
    - ``columns``: float32 ``[kv_head, run, 2, RUN_COLUMNS]``, means and squared weights.
    - ``tables``: float32 ``[kv_head, entry]``; for each run its entries, the bounds between them, and one filler.
    - ``runs``: int32 ``[run, _RUN_INTEGERS]``, widths, first entries, and first columns in stream order. If heads have their own widths,
      int32 ``[kv_head, run, 2, RUN_COLUMNS]``, the width and first entry of each column.
    - ``byte_entries``: the byte positions at which ``klt_heads`` packs codes, or None.
    """

    matrix: torch.Tensor
    columns: torch.Tensor
    tables: torch.Tensor
    runs: torch.Tensor
    byte_entries: torch.Tensor | None = None


_device_bases: WeakKeyDictionary[BasisRows, dict[tuple[bytes, int | None, int, str], DeviceBasis | None]] = WeakKeyDictionary()


def encode(codec: Klt, x: torch.Tensor, output: Output) -> bool:
    """Encode ``x`` into ``output``. Returns False if the basis is not supported.

    The basis must not be stored in the streams or differ between sequences, and its tables must ascend. Raises MissingBasis without a
    basis, and InvalidParameter for a wrong number of heads or a singular matrix.
    """
    if codec.rows != "basis":
        return False
    source = codec.source_for(x.shape[1])
    basis = cached_basis(codec, source, x, _build_basis)
    if basis is None:
        return False
    batch, heads, tokens, _ = x.shape
    levels, origins = compute_levels(x, output, basis), output.origins
    columns = levels.shape[3]
    first_plane = first_column = 0
    for width, packing in zip(used_widths(codec.widths), codec.packings().values(), strict=True):
        padded_width = packing.width + packing.width % 2
        launch(
            _pack, batch * -(-heads * tokens * padded_width // BLOCK_WORDS), x.device,
            levels, output.planes[first_plane : first_plane + len(packing.planes)], None if origins is None else origins.table,
            heads * tokens, columns, first_column, packing.symbols, width, packing.width, BLOCK_WORDS=BLOCK_WORDS, warps=_PACKING_WARPS,
        )  # fmt: skip
        first_plane += len(packing.planes)
        first_column += RUN_COLUMNS * codec.widths.count(width)
    return True


def compute_levels(x: torch.Tensor, output: Output, basis: DeviceBasis) -> torch.Tensor:
    """Compute the level of each column, and the gain of each token. Returns the levels, uint8 ``[batch, kv_head, token, column]``.

    Columns are in stream order. If the codec stores gains, they are written to ``output``.
    """
    arguments, constants = input_arguments(x, output.origins)
    del constants["PARTS"]
    batch, heads, tokens, _ = x.shape
    runs, block = basis.matrix.shape[1], block_tokens(x, BLOCK_TOKENS)
    levels = torch.empty(batch, heads, tokens, RUN_COLUMNS * runs, dtype=torch.uint8, device=x.device)
    launch(
        _encode, batch * heads * -(-tokens // block), x.device,
        *arguments, basis.matrix, basis.columns, basis.tables, basis.runs, levels, output.streams.get("gain"), output.flag, runs,
        basis.tables.shape[1], **constants, PARTS_OF_ROWS=VALUE_PARTS[x.dtype], LARGEST=MAX_SQUARE, LARGEST_GAIN=MAX_GAIN,
        OWN_WIDTHS=basis.runs.dim() > 2, BLOCK_TOKENS=block, warps=WARPS, fusion=True,
    )  # fmt: skip
    return levels


def cached_basis(
    codec: Klt, source: BasisRows, x: torch.Tensor, make: Callable[[Klt, BasisRows, int], DeviceBasis | None]
) -> DeviceBasis | None:
    """Return ``make(codec, source, padded_dim)`` for the padded dim and device of ``x``, cached for the lifetime of ``source``."""
    cached = _device_bases.setdefault(source, {})
    padded_dim = int(input_arguments(x).constants["PADDED_DIM"])
    key = codec.widths, codec.fixed_heads, padded_dim, str(x.device)
    if key not in cached:
        # Tensors made in inference mode could not be used with autograd later; the caller's default device may be another.
        with torch.inference_mode(False), torch.device("cpu"):
            created = make(codec, source, padded_dim)
            cached[key] = created and created._replace(
                **{name: part.to(x.device) for name, part in created._asdict().items() if part is not None}
            )
    return cached[key]


def split_matrix(matrix: torch.Tensor, padded_dim: int) -> torch.Tensor:
    """Split a float32 matrix ``[kv_head, run, dim, RUN_COLUMNS]`` into the bfloat16 parts of ``DeviceBasis.matrix``.

    The channels are padded to ``padded_dim``.
    """
    remainder = torch.nn.functional.pad(matrix, (0, 0, 0, padded_dim - matrix.shape[2]))
    parts = []
    for _ in range(PARTS.value):
        parts.append(remainder.to(torch.bfloat16))
        remainder = remainder - parts[-1].to(torch.float32)
    return torch.stack(parts, 2).contiguous()


def _build_basis(codec: Klt, source: BasisRows, padded_dim: int) -> DeviceBasis | None:
    """Build the ``DeviceBasis`` of ``source``. Returns None unless every table ascends, because only then is the level of a value its code.
    """
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
            preceding_runs = sum(0 < other < width for other in widths) + widths[:run].count(width)
            runs.append([width, first_entry, RUN_COLUMNS * preceding_runs])
            tables += [table, (table[:, 1:] + table[:, :-1]) / 2, table[:, :1]]
            first_entry += 2 << width
    columns = torch.cat([source.mean[0], source.weights[0].square()], 1).cpu()
    return DeviceBasis(
        split_matrix(_coded_runs(source.inverse[0].cpu(), widths), padded_dim),
        _coded_runs(columns, widths).contiguous(),
        torch.cat(tables, 1),
        torch.tensor(runs, dtype=torch.int32, device="cpu"),
    )


def _coded_runs(rows: torch.Tensor, widths: bytes) -> torch.Tensor:
    """Reshape ``[head, ..., column]`` to ``[head, run, ..., RUN_COLUMNS]``, for the runs that have codes.

    A partial run is padded with zeros.
    """
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

    ``x`` is ``[batch, kv_head, token, dim]`` with arbitrary strides. ``levels`` is uint8 ``[batch, kv_head, token, column]`` in stream
    order, and ``gains`` is ``[batch, kv_head, token]`` or None. The flag is set unless the weighted squared length of every token is below
    ``LARGEST``.
    """
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    valid = token < tokens
    row = head * tokens + token
    levels += (batch * heads * tokens + row) * (run_count * COLUMNS)
    if origins is not None:
        origin = load_origin(origins, batch, ALIGNED)
        x += origin.input
        if gains is not None:
            gains = move_pointer(gains, origin.streams)
        flag += origin.flag
        batch = batch * 0
    rows = load_rows(x, batch_stride, head_stride, token_stride, channel_stride, batch, head, token, valid, DIM, PADDED_DIM)
    parts = split_rows(rows.to(tl.float32), PARTS_OF_ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    matrix += head * run_count * (PARTS * PADDED_DIM * COLUMNS) + tl.arange(0, PADDED_DIM)[:, None] * COLUMNS + column
    columns += head * run_count * (2 * COLUMNS) + column
    tables += head * table_values
    if OWN_WIDTHS:
        runs += head * run_count * (2 * COLUMNS) + column
    squares = tl.zeros(token.shape, tl.float32)
    products = tl.zeros(token.shape, tl.float32)
    decoded = tl.zeros(token.shape, tl.float32)
    for run in range(run_count):
        value = tl.zeros((BLOCK_TOKENS, COLUMNS), tl.float32)
        for last in tl.static_range(PARTS):
            # Add the smallest products first.
            factor = tl.load(matrix + (run * PARTS + (PARTS - 1 - last)) * (PADDED_DIM * COLUMNS)).to(OPERAND)
            for value_part in tl.static_range(PARTS_OF_ROWS):
                if value_part <= last:
                    value = tl.dot(parts[value_part].to(OPERAND), factor, value, input_precision="ieee")
        value -= tl.load(columns + run * (2 * COLUMNS))
        square = tl.load(columns + (run * 2 + 1) * COLUMNS)
        # The level of a value is the number of bounds below it.
        level = tl.zeros((BLOCK_TOKENS, COLUMNS), tl.int32)
        if OWN_WIDTHS:
            width = tl.load(runs + run * (2 * COLUMNS))
            entries = tables + tl.load(runs + (run * 2 + 1) * COLUMNS)
            for step in range(_MAX_WIDTH):
                bit = width - 1 - step
                half = tl.where(bit >= 0, 1 << tl.maximum(bit, 0), 0)
                bound = tl.load(entries + (tl.where(half > 0, (1 << width) + half - 1, 0) + level))
                level += tl.where(value > bound, half, 0)
            first_level = run * COLUMNS
        else:
            width = tl.load(runs + run * _RUN_INTEGERS)
            entries = tables + tl.load(runs + (run * _RUN_INTEGERS + 1))
            for step in range(width):
                half = 1 << (width - 1 - step)
                bound = tl.load(entries + ((1 << width) + half - 1) + level)
                level += tl.where(value > bound, half, 0)
            first_level = tl.load(runs + (run * _RUN_INTEGERS + 2))
        entry = tl.load(entries + level)
        squares += tl.sum(value * value * square, 1)[:, None]
        products += tl.sum(value * entry * square, 1)[:, None]
        decoded += tl.sum(entry * entry * square, 1)[:, None]
        tl.store(levels + first_level + column, level.to(tl.uint8), valid)
    flag_unless(squares < LARGEST, flag)
    if gains is not None:
        gain = compute_gain(squares, products, decoded, LARGEST_GAIN).to(gains.dtype.element_ty)
        tl.store(gains + (batch * heads * tokens + row), gain, valid)


@triton.jit
def split_rows(rows: tl.tensor, COUNT: tl.constexpr) -> tl.tuple:
    """Split float32 ``rows`` into ``COUNT`` bfloat16 tiles that add up to ``rows``."""
    parts = ()
    for _ in tl.static_range(COUNT):
        part = rows.to(tl.bfloat16)
        parts = parts + (part,)
        rows = rows - part.to(tl.float32)
    return parts


@triton.jit
def compute_gain(squares: tl.tensor, products: tl.tensor, decoded: tl.tensor, LARGEST_GAIN: tl.constexpr) -> tl.tensor:
    """Return each token's gain as ``formats/klt.py`` does, or 1 if no finite gain exists.

    ``squares``, ``products`` and ``decoded`` are weighted sums: of squared values, of values times decoded values, and of squared decoded
    values.
    """
    is_close = (products > 0) & (squares * decoded <= 2 * products * products)
    numerator = tl.where(is_close, squares, tl.maximum(products, 0.0))
    denominator = tl.where(is_close, products, decoded)
    gain = numerator / tl.where(denominator > 0, denominator, 1.0)
    return tl.where((denominator > 0) & (gain < float("inf")), tl.minimum(gain, LARGEST_GAIN), 1.0)


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
    """Write ``BLOCK_WORDS`` words of each plane of one code stream, columns(``symbols``, 2^``bits``, F) with ``width`` columns.

    ``levels`` is uint8 ``[batch, row, stored]``; the stream's symbols are columns ``first`` and later of it. A plane of bytes is passed as
    uint8. Source: spec/packing.md, Bit packing.
    """
    # Byte planes are padded to an even number of columns.
    padded_width = width + width % 2
    blocks = tl.cdiv(rows.to(tl.int64) * padded_width, BLOCK_WORDS)
    program = tl.program_id(0).to(tl.int64)
    batch = program // blocks
    start = program % blocks * BLOCK_WORDS
    position = (start % padded_width).to(tl.int32) + tl.arange(0, BLOCK_WORDS)
    column = position % padded_width
    row = start // padded_width + position // padded_width
    inside = row < rows
    valid = inside & (column < width)
    levels += (batch * rows + row) * stored + first + column
    if origins is not None:
        planes = move_pointers(planes, load_origin(origins, batch, 1).streams)
    else:
        row += batch * rows
    for plane in tl.static_range(len(planes)):
        word = tl.zeros((BLOCK_WORDS,), tl.int32)
        for field in range(16 * plane // bits, (16 * plane + 15) // bits + 1):
            level = tl.load(levels + field * width, valid & (field * width + column < symbols), 0).to(tl.int32)
            shift = field * bits - 16 * plane
            word |= (level << tl.maximum(shift, 0)) >> tl.maximum(-shift, 0)
        if planes[plane].dtype.element_ty == tl.uint8:
            half = padded_width // 2
            # In a plane of W bytes, byte c is the low or high byte of word c mod (W / 2).
            tl.store(planes[plane] + row * padded_width + (column % half * 2 + column // half), (word & 0xFF).to(tl.uint8), inside)
        else:
            tl.store(planes[plane] + row * width + column, (word & 0xFFFF).to(tl.uint16), valid)
