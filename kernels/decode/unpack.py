"""Unpacking of codecs with bounded values and a rotation or key means: attention's tile loaders decode, and matrix products rotate."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.angle import Angle
from kvpack.formats.channel_scale import STREAM, ChannelScale
from kvpack.formats.columns import next_power_of_two
from kvpack.formats.key_mean import SCALE, KeyMean
from kvpack.formats.octahedral import Octahedral
from kvpack.formats.polar import Polar
from kvpack.formats.quaternion import Quaternion
from kvpack.formats.scalar import Scalar
from kvpack.kernels.bitpack.bitfields import load_column_fields
from kvpack.kernels.bitpack.columns import check_shape
from kvpack.kernels.gpu import gpu
from kvpack.kernels.tables import shared_table
from kvpack.kernels.tables.table_assembly import MAX_STATIC_BYTES
from kvpack.kernels.tiles import addresses, device_tables, frame_columns
from kvpack.kernels.tiles.bound_loader import LoadMode, RowStream, bind
from kvpack.kernels.tiles.table_setup import begin_tables, fill_tables
from kvpack.kernels.tiles.work import STREAM_INTEGERS, PackedRows, load_tiles
from kvpack.kernels.triton_internals import CachedLaunch

from . import tiles
from .decode import FUSED_DTYPES, supports_output
from .rows import PackedPart, PreparedDecode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.base import Codec
    from kvpack.kernels.loaders.tiles import Tiles


BOUNDED_CODECS = (Angle, Octahedral, Polar, Quaternion, Scalar)
"""Codecs whose values are table entries times a token factor. Float16 tiles can represent the entries of any file."""

MAX_COLUMNS = 256
"""Maximum number of columns, and of channels."""


class UnpackShape(NamedTuple):
    """Launch shape of ``unpack_tiles``: the warps of a program, and the number of channels whose sums it keeps in registers.

    ``joined`` is True if a program multiplies all tiles of a token together, for loaders that leave no registers for running sums.
    """

    warps: int
    channels: int
    joined: bool


SHAPES = (UnpackShape(4, 128, False), UnpackShape(8, 128, True), UnpackShape(4, 128, True), UnpackShape(4, 64, True))
"""Launch shapes, ordered from fastest to slowest on an H200. Later shapes need less shared memory.

Tiles of 16 tokens would be faster for the scalar codec, but slower for all others.
"""


def supports(codec: Codec, out: torch.Tensor) -> bool:
    """Return True if ``prepare`` can decode ``codec`` into ``out``. Codecs without rotation and key means have faster kernels.

    Polar is decoded only to bfloat16: its tiles are products of rounded numbers, and their errors would be visible in other dtypes.
    """
    fast = codec.rotation.kind == "none" and codec.sidecar(KeyMean) is None
    codec = _inner_codec(codec)
    return (
        type(codec) in BOUNDED_CODECS
        and (type(codec) is not Polar or out.dtype == torch.bfloat16)
        and not fast
        and out.dtype in FUSED_DTYPES
        and supports_output(out)
        and (loader := tiles.find_loader(codec)) is not None
        and loader.factor is not None
        and max(len(frame_columns.columns(codec, 0)), codec.dim) <= MAX_COLUMNS
        and _find_shape(codec, str(out.device)) is not None
    )


def prepare(codec: Codec, packed: Sequence[PackedPart], out: torch.Tensor) -> PreparedDecode:
    """Prepare the launch that decodes the consecutive pages ``packed`` into outputs like ``out``, in the original frame.

    ``out`` is ``[batch, kv_head, token, dim]``. Before rounding to its dtype, the relative error in the 2-norm is below 2^-11 (2^-10 for
    polar). Raises InvalidParameter unless streams have the codec's layout.
    """
    batch, heads = out.shape[:2]
    stored_codec, codec = codec, _inner_codec(codec)
    scaled, mean = stored_codec.sidecar(ChannelScale) is not None, stored_codec.sidecar(KeyMean)
    device = str(out.device)
    work = tiles.build_work(codec, packed, batch, heads, out.device, _required_shape(codec, device).warps)
    arguments = (*out.stride()[:3], work.table.shape[0], work.blocks, heads, work.block_tokens)
    fast, mean_tokens = addresses.uses_inline_ptx(out.device), 0 if mean is None else mean.tokens
    launch, table, matrix = _launch(codec, scaled, mean_tokens, work.streams, arguments, batch, out.dtype, device, fast)
    scales = _page_scales(packed, (batch, heads, 1, codec.dim), matrix.shape[1]) if scaled else matrix
    pointers = tuple((tensor, 0) for tensor in (work.table, device_tables.counting_tensor(device), table, matrix, scales))
    starts = matrix
    if mean is not None:
        counts = [batch * heads * _check_means(mean, part, batch, heads) for part in packed]
        starts = torch.tensor([0, *accumulate(counts[:-1])], dtype=torch.int64, device="cpu").to(out.device)

    def run(out: torch.Tensor) -> None:
        if work.blocks * batch * heads:
            # Means in the original frame take more memory than the stored ones, so they are not kept.
            means = matrix if mean is None else _original_means(stored_codec, mean, packed, matrix.shape[1])
            launch((out, 0), *pointers, (starts, 0), (means, 0))

    return PreparedDecode(run, not work.copied, work.keep_alive)


def _inner_codec(codec: Codec) -> Codec:
    """Return ``codec`` without its channel scales and key means. If it has any other sidecar, return ``codec`` itself."""
    return codec.without_sidecars if {*map(type, codec.sidecars)} <= {ChannelScale, KeyMean} else codec


def _check_means(mean: KeyMean, part: PackedPart, batch: int, heads: int) -> int:
    """Return the number of means per head of ``part``. Raises InvalidParameter unless the streams of means have the codec's layout."""
    layouts = mean.layout(batch, heads, part.tokens)
    for name, layout in layouts.items():
        check_shape(name, part.streams[name], layout.shape)
    return layouts[SCALE].shape[2]


def _original_means(codec: Codec, mean: KeyMean, packed: Sequence[PackedPart], channels: int) -> torch.Tensor:
    """Return the means of all pages, one page after another, in the original frame: float32 ``[mean, channel]``."""
    means = torch.cat([codec.original(mean.vectors(part.streams), part.streams).flatten(0, 2) for part in packed])
    return torch.nn.functional.pad(means, (0, channels - codec.dim))


def _page_scales(packed: Sequence[PackedPart], shape: tuple[int, ...], channels: int) -> torch.Tensor:
    """Return the channel scales of each page, sequence and head, float32 ``[page, batch, kv_head, channel]``."""
    for part in packed:
        check_shape(STREAM, part.streams[STREAM], shape)
    scales = torch.stack([part.streams[STREAM][:, :, 0] for part in packed])
    return torch.nn.functional.pad(scales.to(torch.float32), (0, channels - shape[3]))


def _required_loader(codec: Codec) -> Tiles:
    loader = tiles.find_loader(codec)
    assert loader is not None
    return loader


def _required_shape(codec: Codec, device: str) -> UnpackShape:
    shape = _find_shape(codec, device)
    assert shape is not None
    return shape


@lru_cache(maxsize=256)
def _find_shape(codec: Codec, device: str) -> UnpackShape | None:
    """Return the first of ``SHAPES`` whose tiles, matrix and tables fit in a program's shared memory, or None if none fits."""
    loader, available_bytes = _required_loader(codec), gpu(device).shared_bytes - MAX_STATIC_BYTES
    tokens, count, width = tiles.tokens_per_tile(loader), next_power_of_two(len(loader.channels)), len(loader.channels[0])
    for shape in SHAPES:
        channels = min(shape.channels, _padded_dim(codec.dim))
        columns_at_once = count * width if shape.joined else width
        if (
            shape.joined == (tokens > tiles.TOKENS)
            and 2 * (count * width * channels + shape.warps * tokens * columns_at_once) <= available_bytes
        ):
            return shape._replace(channels=channels)
    return None


def _padded_dim(dim: int) -> int:
    return max(16, next_power_of_two(dim))


@lru_cache(maxsize=1024)
def _launch(
    codec: Codec,
    scaled: bool,
    mean_tokens: int,
    streams: tuple[RowStream, ...],
    arguments: tuple[int, ...],
    batch: int,
    dtype: torch.dtype,
    device: str,
    fast: bool,
) -> tuple[CachedLaunch, torch.Tensor, torch.Tensor]:
    """Return the compiled launch for outputs of ``dtype``, the lookup table, and the matrix. All layers of a model share them."""
    loader, shape = _required_loader(codec), _required_shape(codec, device)
    tokens, (blocks, heads) = tiles.tokens_per_tile(loader), arguments[4:6]
    # Larger tables would come after the compiler's shared memory, and there is no room for them.
    shared, tables, table_offsets = device_tables.load_tables(loader, loader, torch.device(device), fast, MAX_STATIC_BYTES)
    matrix, size = _column_matrix(codec, shape.joined, device)
    # Blocks begin at whole tiles, and pages at the start of a token group.
    whole_tiles = loader.whole_groups % tokens == 0
    launch = CachedLaunch(
        unpack_tiles,
        (blocks * batch * heads, matrix.shape[1] // shape.channels, 1),
        arguments,
        {
            "SIDE": bind(loader, LoadMode(table_offsets[0], False, fast), None, streams, whole_tiles), "TABLES": shared,
            "WARPS": shape.warps, "TOKENS": tokens, "WORK_ROW": tiles.FIRST_ADDRESS.value + STREAM_INTEGERS.value * len(streams),
            "DIM": codec.dim,
            "PAD": matrix.shape[1], "CHANNELS": shape.channels, "JOINED": shape.joined, "SIZE": size, "SCALED": scaled, "MEAN": mean_tokens,
            "FAST": fast,
        },
        {"num_warps": shape.warps},
        partial(shared_table.allow_tables, table_bytes=shared.nbytes) if shared.nbytes else None,
    )  # fmt: skip
    return launch, tables[0], matrix


@lru_cache(maxsize=256)
def _column_matrix(codec: Codec, joined_order: bool, device: str) -> tuple[torch.Tensor, float]:
    """Return the signs of the matrix from columns to channels, float16 ``[column, channel]``, and the magnitude of its nonzero entries.

    Both axes are padded with zeros to powers of two. Columns are in tile order or, with ``joined_order``, in the order of ``join_tiles``.
    """
    loader, channels = _required_loader(codec), _padded_dim(codec.dim)
    count, width = next_power_of_two(len(loader.channels)), len(loader.channels[0])
    with torch.inference_mode(False):
        signs, size = frame_columns.column_signs(codec)
        padded = torch.nn.functional.pad(signs, (0, channels - codec.dim, 0, count * width - len(signs)))
        if joined_order:
            bits = count.bit_length() - 1
            # There, the bits of the tile index come after the column, lowest bit first.
            padded = padded.view(*[2] * bits, width, channels).permute(bits, *reversed(range(bits)), bits + 1).reshape(-1, channels)
        return padded.to(torch.float16).to(device), size


@triton.jit(do_not_specialize=["pages", "blocks", "heads", "block_tokens"])
def unpack_tiles(
    out: tl.tensor,
    work_table: tl.tensor,
    iota: tl.tensor,
    table: tl.tensor,
    matrix: tl.tensor,
    scales: tl.tensor,
    mean_starts: tl.tensor,
    means: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    pages: tl.tensor,
    blocks: tl.tensor,
    heads: tl.tensor,
    block_tokens: tl.tensor,
    SIDE: tl.constexpr,
    TABLES: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORK_ROW: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    CHANNELS: tl.constexpr,
    JOINED: tl.constexpr,
    SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    MEAN: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    """Decode a block of one page, sequence and head as ``tiles.decode_tiles`` does, and map it to ``CHANNELS`` channels with ``matrix``.

    ``matrix`` is float16 ``[column, PAD]``, and products are scaled by ``SIZE``. With ``JOINED``, all tiles of a token are multiplied
    together; otherwise, each tile is multiplied as soon as it is decoded. With ``SCALED``, channels are multiplied by ``scales``, float32
    ``[page, sequence, PAD]``. Unless ``MEAN`` is 0, every ``MEAN`` tokens share a mean in ``means``, float32 ``[mean, PAD]``. The means of
    a page, ``[sequence, mean]``, begin at the page's entry of ``mean_starts``.
    """
    MODE: tl.constexpr = SIDE.mode
    FIELDS: tl.constexpr = SIDE.stream_widths
    STEPS: tl.constexpr = SIDE.steps
    CONSTANTS: tl.constexpr = SIDE.constants
    WIDTH: tl.constexpr = SIDE.widths[0]
    TILES: tl.constexpr = len(SIDE.widths)
    ALL: tl.constexpr = triton.next_power_of_2(TILES)
    SPAN: tl.constexpr = WARPS * TOKENS
    sequence = tl.program_id(0) // blocks
    table += sequence % SIDE.tables * SIDE.table_values
    entries = begin_tables(table, table, TABLES, WARPS)
    block = tiles.load_page_block(work_table, tl.program_id(0) % blocks, pages, sequence, heads, block_tokens, SIDE, WORK_ROW)
    streams = block.streams
    target = out + block.batch * batch_stride + block.head * head_stride + block.first_output * token_stride
    if SIDE.load_columns is None:
        fields = load_column_fields(iota, FIELDS)
    else:
        fields = SIDE.load_columns(table, PackedRows(streams, block.begin * 0), CONSTANTS, TOKENS)
    # If a tile has several means, they fit in registers with the sums only for half of the tokens and half of the channels at a time.
    SPLIT: tl.constexpr = 2 if JOINED and MEAN > 0 and MEAN < SPAN and CHANNELS >= 64 else 1
    PART: tl.constexpr = CHANNELS // SPLIT
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, PART)
    signs = ()
    if JOINED:
        for part in tl.static_range(SPLIT):
            signs = signs + (tl.load(matrix + tl.arange(0, ALL * WIDTH)[:, None] * PAD + (channel + part * PART)[None, :]),)
    else:
        for index in tl.static_range(TILES):
            column = index * WIDTH + tl.arange(0, WIDTH)
            signs = signs + (tl.load(matrix + column[:, None] * PAD + channel[None, :]),)
    if SCALED:
        scales += (block.page * (tl.num_programs(0) // blocks) + sequence).to(tl.int64) * PAD
    if MEAN:
        page_means = tl.cdiv(tl.load(work_table + block.page * WORK_ROW + 1), MEAN)
        means += (tl.load(mean_starts + block.page) + sequence * page_means) * PAD
    fill_tables(entries, TABLES)
    if TABLES.nbytes:
        tl.debug_barrier()
    token = tl.arange(0, WARPS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]  # [warp, token]
    row = _row_tokens(tl.arange(0, SPAN // SPLIT)[:, None], 0, TOKENS, SPLIT)
    for offset in tl.range(0, block.count, SPAN, num_stages=1):
        count = block.count - offset
        first = (block.begin + offset).to(tl.int64)
        loaded = load_tiles(streams, first, token, count, SIDE, 1, TOKENS, True)
        factor = SIDE.factor(loaded[0][0], CONSTANTS, FAST)
        if JOINED:
            parts = SIDE.decode(loaded[0][0], fields, table, 0, CONSTANTS, MODE)
            for step in tl.static_range(1, STEPS):
                parts = parts + SIDE.decode(loaded[0][0], fields, table, step, CONSTANTS, MODE)
            for _ in tl.static_range(ALL - TILES):
                parts = parts + (tl.zeros_like(parts[0]),)
            joined = join_tiles(parts, ALL)
            halves, factors = (joined,), (factor,)
            if SPLIT == 2:
                halves = tl.split(tl.trans(tl.reshape(joined, (WARPS, 2, TOKENS // 2, ALL * WIDTH)), 0, 2, 3, 1))
                factors = tl.split(tl.trans(tl.reshape(factor, (WARPS, 2, TOKENS // 2)), 0, 2, 1))
            for half in tl.static_range(SPLIT):
                tile = tl.reshape(halves[half], (SPAN // SPLIT, ALL * WIDTH))
                for part in tl.static_range(SPLIT):
                    _store_channels(
                        target, tl.dot(tile, signs[part]), factors[half], scales, means, token_stride, first, offset, row, count,
                        channel + part * PART, half, SPLIT, TOKENS, PAD, DIM, SIZE, SCALED, MEAN,
                    )  # fmt: skip
        else:
            sums = tl.zeros((SPAN, CHANNELS), tl.float32)
            for step in tl.static_range(STEPS):
                parts = SIDE.decode(loaded[0][0], fields, table, step, CONSTANTS, MODE)
                for index in tl.static_range(len(parts)):
                    sums = tl.dot(tl.reshape(parts[index], (SPAN, WIDTH)), signs[step * len(parts) + index], sums)
            _store_channels(
                target, sums, factor, scales, means, token_stride, first, offset, row, count, channel, 0, SPLIT, TOKENS, PAD, DIM, SIZE,
                SCALED, MEAN,
            )  # fmt: skip


@triton.jit
def _store_channels(
    target: tl.tensor,
    sums: tl.tensor,
    factor: tl.tensor,
    scales: tl.tensor,
    means: tl.tensor,
    token_stride: tl.tensor,
    first: tl.tensor,
    offset: tl.tensor,
    row: tl.tensor,
    count: tl.tensor,
    channel: tl.tensor,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAD: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    MEAN: tl.constexpr,
) -> None:
    """Multiply the ``sums`` ``[row, channel]`` of a tile by all factors, add the means, and store the result.

    The rows are part ``PART`` of ``PARTS`` of each warp's ``TOKENS`` tokens, and ``row`` contains the tokens of part 0. ``factor`` contains
    the rows' token factors. The tile begins with token ``offset`` of ``target``, and with token ``first`` of its page.
    """
    ROWS: tl.constexpr = sums.shape[0]
    EACH: tl.constexpr = TOKENS // PARTS
    row = row + PART * EACH
    value = sums * (tl.reshape(factor, (ROWS, 1)) * SIZE)
    if SCALED:
        # Load the scales again for each tile, because registers have no room for them during decoding.
        value = value * tl.load(scales + channel)[None, :]
    if MEAN:
        if MEAN >= ROWS * PARTS:
            value = value + tl.load(means + channel[None, :] + first // MEAN * PAD)
        else:
            # Tiles begin with a page of means, and each mean is loaded once for neighboring rows that share it.
            SHARED: tl.constexpr = min(MEAN, EACH)
            begin = _row_tokens(tl.arange(0, ROWS // SHARED)[:, None] * SHARED, PART, TOKENS, PARTS)
            mean = tl.load(means + channel[None, :] + (first + begin) // MEAN * PAD, begin < count, 0.0)
            value = tl.reshape(tl.reshape(value, (ROWS // SHARED, SHARED, sums.shape[1])) + mean[:, None, :], sums.shape)
    address = target + (offset + row) * token_stride + channel[None, :]
    tl.store(address, value.to(target.dtype.element_ty), (row < count) & (channel < DIM)[None, :])


@triton.jit
def _row_tokens(row: tl.tensor, PART: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr) -> tl.tensor:
    """Return the token of each ``row`` among rows that are part ``PART`` of ``PARTS`` of each warp's ``TOKENS`` tokens."""
    EACH: tl.constexpr = TOKENS // PARTS
    result = row
    if PARTS > 1:
        result = row // EACH * TOKENS + PART * EACH + row % EACH
    return result


@triton.jit
def join_tiles(parts: tl.tuple, COUNT: tl.constexpr) -> tl.tensor:
    """Join ``COUNT`` parts, a power of two, along new axes of length two: one axis per bit of the part's index, lowest bit first."""
    if COUNT == 1:
        result = parts[0]
    else:
        pairs = ()
        for index in tl.static_range(COUNT // 2):
            pairs = pairs + (tl.join(parts[2 * index], parts[2 * index + 1]),)
        result = join_tiles(pairs, COUNT // 2)
    return result
