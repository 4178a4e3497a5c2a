"""Work tables of decoding launches over any number of pages: the packed rows that each program decodes, and where it writes."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy
import torch
import triton
from triton import language as tl

from kvpack.formats.base import Codec
from kvpack.formats.columns import next_power_of_two
from kvpack.kernels.bitpack.columns import check_shape, constant_at
from kvpack.kernels.bitpack.streams import has_dense_rows
from kvpack.kernels.triton_internals import CachedLaunch

TILE_VALUES = 1 << 12
"""Number of values per tile: 32 per thread, enough to hide the latency of loads."""

ROTATED_TOKENS, WIDE_ROTATED_TOKENS, MAX_NARROW_CHANNELS = 64, 16, 256
"""Tokens per rotated tile (the rows of an H100's matrix instruction), tokens per wide rotated tile, and maximum channels of tiles that are
not wide.
"""

WARPS, ROTATED_WARPS = 4, 8
"""Number of warps per program, without and with a rotation. Rotating takes twice the registers."""

MAX_REGISTERS = 128
"""Maximum number of registers per thread. It lets a multiprocessor run sixteen warps."""

MAX_STAGED_BYTES = 1 << 14
"""Maximum size of a table that the CUDA driver copies from pageable memory without waiting for the device."""

PROGRAMS, MAX_TILES = 1 << 11, 8
"""Number of programs that fill a device, and maximum tiles per program if there are more tiles than programs."""

ONE_ROW = 0
"""Tokens per row for a stream with a single row per page."""

_HEAD_INTEGERS = tl.constexpr(3)
_STREAM_INTEGERS = tl.constexpr(3)
"""Integers per table row before the streams, and integers per stream: an address, and the batch and head strides in bytes."""


class PackedPart(NamedTuple):
    """Packed tokens to decode: the first ``tokens`` tokens of ``streams``. Their output begins at token ``first``."""

    streams: Mapping[str, torch.Tensor]
    tokens: int
    first: int


class PreparedDecode(NamedTuple):
    """A prepared decoding launch. ``run`` decodes into an output with the shape, strides and dtype for which it was prepared.

    ``cacheable`` is True if the launch needs so little additional memory that it may be cached with the packed rows. ``keep_alive``
    contains the tensors that the launch reads.
    """

    run: Callable[[torch.Tensor], None]
    cacheable: bool = False
    keep_alive: tuple[torch.Tensor, ...] = ()


class EnginePages(NamedTuple):
    """Pages of an inference engine, anywhere in memory, that share the layout of one reference page.

    ``offsets``, int64 ``[page, 3]``, contains the byte offset from the reference page's streams, the element offset from the reference
    page's output, and the page's index in ``status``. Pages with a nonzero ``status``, int32, are skipped.
    """

    offsets: numpy.ndarray[Any, numpy.dtype[numpy.int64]]
    status: torch.Tensor


class RowLayout(NamedTuple):
    """Layout of a stream: ``row`` elements of ``bits`` bits for every ``tokens`` tokens. ``ONE_ROW`` stands for all tokens of a page.

    ``aligned`` is the largest power of two, at most 16, that divides all addresses and strides in bytes.
    """

    bits: int
    row: int
    tokens: int
    aligned: int


class BlockTable(NamedTuple):
    """Work table of one launch, int64 ``[block, integer]`` on the device, and the layouts of its streams."""

    table: torch.Tensor
    streams: tuple[RowLayout, ...]
    block_tokens: int
    keep_alive: tuple[torch.Tensor, ...]
    """The tensors whose addresses are in the table."""
    copied: bool
    """True if some tensors in ``keep_alive`` are copies of streams."""
    status: torch.Tensor | None
    out_aligned: int
    """Alignment, in values, of the pages' offsets in the output."""


def check_layout(codec: Codec, packed: Sequence[PackedPart], batch: int, heads: int) -> None:
    """Raise InvalidParameter unless all streams of ``packed`` have the layout of ``codec``."""
    expected: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for part in packed:
        if part.tokens not in expected:
            expected[part.tokens] = [(name, layout.shape) for name, layout in codec.layout(batch, heads, part.tokens).items()]
        for name, shape in expected[part.tokens]:
            check_shape(name, part.streams[name], shape)


def tokens_per_tile(channels: int, rotated: bool) -> int:
    """Return the number of tokens per tile, a power of two, for tiles of ``channels`` channels."""
    if rotated:
        return ROTATED_TOKENS if channels <= MAX_NARROW_CHANNELS else WIDE_ROTATED_TOKENS
    return max(1, TILE_VALUES // channels)


def build_work(
    packed: Sequence[tuple[Sequence[torch.Tensor], int, int]],
    tokens_per_row: Sequence[int],
    sequences: int,
    tile: int,
    device: torch.device,
    pages: EnginePages | None = None,
) -> BlockTable:
    """Build the work table for decoding ``packed`` in tiles of ``tile`` tokens.

    ``packed`` contains tuples (streams, tokens, first output token). With ``pages``, it is the reference page. A stream is ``[batch,
    kv_head, row, ...]`` with elements of 8, 16 or 32 bits; its first two axes may be 1 if all sequences or heads share it. Streams whose
    rows are not contiguous and aligned are copied.
    """
    tiles = sum(-(-tokens // tile) for _, tokens, _ in packed) * sequences * (1 if pages is None else len(pages.offsets))
    block_tokens = tile * max(1, min(MAX_TILES, tiles // PROGRAMS))
    keep_alive: list[torch.Tensor] = []
    page_rows, blocks = [], []
    for streams, tokens, first in packed:
        row = [0, tokens, first]
        for stream in streams:
            row += _address_and_strides(stream, keep_alive)
        page_rows.append(row)
        blocks.append(-(-tokens // block_tokens))
    rows = numpy.repeat(numpy.array(page_rows, dtype=numpy.int64), blocks, 0)
    # For each block: its first token, its number of tokens, and its first output token.
    starts = numpy.concatenate([numpy.arange(count, dtype=numpy.int64) for count in blocks]) * block_tokens
    rows[:, 0] = starts
    rows[:, 1] = numpy.minimum(rows[:, 1] - starts, block_tokens)
    rows[:, 2] += starts
    out_aligned = 1
    if pages is not None:
        rows = _repeat_for_pages(rows, pages.offsets)
        out_aligned = common_alignment(pages.offsets[:, 1])
    layouts = []
    for index, (stream, tokens) in enumerate(zip(packed[0][0], tokens_per_row, strict=True)):
        column = _HEAD_INTEGERS.value + _STREAM_INTEGERS.value * index
        alignment = common_alignment(rows[:, column : column + _STREAM_INTEGERS.value])
        elements = math.prod(stream.shape[3:])
        # No load crosses rows, so that equal code is compiled for all lengths, as in ``addresses.describe_streams``.
        layouts.append(RowLayout(8 * stream.element_size(), elements, tokens, math.gcd(alignment, elements * stream.element_size())))
    table = copy_to_device(rows, device)
    sources = [stream for streams, _, _ in packed for stream in streams]
    copied = any(tensor is not source for tensor, source in zip(keep_alive, sources, strict=True))
    return BlockTable(table, tuple(layouts), block_tokens, tuple(keep_alive), copied, None if pages is None else pages.status, out_aligned)


def common_alignment(values: numpy.ndarray[Any, numpy.dtype[numpy.int64]]) -> int:
    """Return the largest power of two, at most 16, that divides all ``values``."""
    return math.gcd(16, int(numpy.bitwise_or.reduce(values, axis=None)))


def copy_to_device(table: numpy.ndarray[Any, numpy.dtype[numpy.int64]], device: torch.device) -> torch.Tensor:
    """Copy a table to ``device`` without blocking the host. Large tables are pinned first, because the driver would block otherwise."""
    tensor = torch.from_numpy(table)
    if device.type == "cuda" and table.nbytes > MAX_STAGED_BYTES:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _repeat_for_pages(
    rows: numpy.ndarray[Any, numpy.dtype[numpy.int64]], offsets: numpy.ndarray[Any, numpy.dtype[numpy.int64]]
) -> numpy.ndarray[Any, numpy.dtype[numpy.int64]]:
    """Repeat the rows of a work table for every page, with the page's addresses, output offset and index in ``status``."""
    blocks, integers = rows.shape
    result = numpy.empty((len(offsets), blocks, integers + 2), numpy.int64)
    result[:, :, :integers] = rows
    result[:, :, _HEAD_INTEGERS.value : integers : _STREAM_INTEGERS.value] += offsets[:, None, :1]
    result[:, :, integers:] = offsets[:, None, 1:]
    return result.reshape(-1, integers + 2)


def _address_and_strides(tensor: torch.Tensor, keep_alive: list[torch.Tensor]) -> list[int]:
    """Return the address of ``tensor``, and its batch and head strides in bytes.

    If its rows are not contiguous or not aligned, ``tensor`` is copied first; the copy is appended to ``keep_alive``.
    """
    size = tensor.element_size()
    if tensor.data_ptr() % size or not (tensor.is_contiguous() or has_dense_rows(tensor)):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    keep_alive.append(tensor)
    batch, head = (stride * size if length > 1 else 0 for stride, length in zip(tensor.stride(), tensor.shape[:2], strict=False))
    return [tensor.data_ptr(), batch, head]


def prepare_launch(
    kernel: Any, work: BlockTable, out: torch.Tensor, *tables: torch.Tensor, threads: int = 1, cacheable: bool = True, **constants: Any
) -> PreparedDecode:
    """Prepare a launch of ``kernel`` over all blocks, sequences and heads, for outputs like ``out`` ``[batch, kv_head, token, dim]``.

    ``tables`` are passed after the work table and the status. ``threads`` multiplies the usual number of threads; above 1, a thread uses at
    most ``MAX_REGISTERS`` registers. ``cacheable`` is True if streams are views of packed rows, not copies. For float32 outputs, products
    and sums are rounded separately, as in PyTorch.
    """
    batch, heads = out.shape[:2]
    blocks = work.table.shape[0]
    programs = blocks * batch * heads
    constants |= {
        "STREAMS": work.streams, "INTEGERS": work.table.shape[1], "PAGED": work.status is not None, "OUT_ALIGNED": work.out_aligned,
    }  # fmt: skip
    launch = _launch(
        kernel,
        programs,
        (*out.stride()[:3], blocks, heads, work.block_tokens),
        tuple(constants.items()),
        threads,
        out.dtype,
        str(out.device),
    )
    # Without pages, programs do not read the status.
    status = work.table if work.status is None else work.status
    pointers = tuple((table, 0) for table in (work.table, status, *tables))

    def run(out: torch.Tensor) -> None:
        if programs:
            launch((out, 0), *pointers)

    return PreparedDecode(run, cacheable and not work.copied, work.keep_alive)


@lru_cache(maxsize=1024)
def _launch(
    kernel: Any,
    programs: int,
    arguments: tuple[int, ...],
    constants: tuple[tuple[str, Any], ...],
    threads: int,
    dtype: torch.dtype,
    device: str,
) -> CachedLaunch:
    """Return the compiled launch for outputs of ``dtype`` on ``device``. All layers of a model share it."""
    constant_values = dict(constants)
    options = {
        "num_warps": threads * (ROTATED_WARPS if constant_values["ROTATED"] else WARPS),
        "num_stages": 1,
        "maxnreg": MAX_REGISTERS if threads > 1 else None,
        "enable_fp_fusion": dtype != torch.float32,
    }
    return CachedLaunch(kernel, (programs, 1, 1), arguments, constant_values, options)


def channels_per_tile(dim: int, rotated: bool) -> int:
    """Return the number of channels per tile, a power of two. Matrix products need at least 16."""
    return max(16 if rotated else 1, next_power_of_two(dim))


class RowBlock(NamedTuple):
    """The tokens of one program: their count, pointers to the first token's row in each stream, and a pointer to its output."""

    count: Any
    streams: Any
    out: Any


@triton.jit
def load_block(
    out: tl.tensor,
    table: tl.tensor,
    status: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    blocks: tl.tensor,
    heads: tl.tensor,
    STREAMS: tl.constexpr,
    INTEGERS: tl.constexpr,
    PAGED: tl.constexpr,
    OUT_ALIGNED: tl.constexpr,
) -> tl.tuple:
    """Load the ``RowBlock`` of this program, which begins at the start of a row in every stream. It is empty if its page is skipped."""
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    batch = sequence // heads
    head = sequence % heads
    row = table + (tl.program_id(0) % blocks).to(tl.int64) * INTEGERS
    begin = tl.load(row)
    count = tl.load(row + 1).to(tl.int32)
    target = out + batch * batch_stride + head * head_stride + tl.load(row + 2) * token_stride
    if PAGED:
        target += tl.multiple_of(tl.load(row + INTEGERS - 2), OUT_ALIGNED)
        count = tl.where(tl.load(status + tl.load(row + INTEGERS - 1)) == 0, count, 0)
    pointers = ()
    for index in tl.static_range(len(STREAMS)):
        pointers = pointers + (
            _block_row_pointer(row + _HEAD_INTEGERS + _STREAM_INTEGERS * index, batch, head, begin, constant_at(STREAMS, index)),
        )
    return RowBlock(count, pointers, target)


@triton.jit
def _block_row_pointer(entry: tl.tensor, batch: tl.tensor, head: tl.tensor, begin: tl.tensor, STREAM: tl.constexpr) -> tl.tensor:
    address = tl.load(entry) + batch * tl.load(entry + 1) + head * tl.load(entry + 2)
    if STREAM.bits == 8:
        pointer = address.to(tl.pointer_type(tl.int8))
    elif STREAM.bits == 16:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.int32))
    ALIGNMENT: tl.constexpr = STREAM.aligned
    return _row_pointer(tl.multiple_of(pointer, ALIGNMENT), begin, STREAM)


@triton.jit
def advance_rows(streams: tl.tuple, begin: tl.tensor, STREAMS: tl.constexpr) -> tl.tuple:
    """Return pointers to the rows of token ``begin`` of a block. In every stream, a row must begin with this token."""
    pointers = ()
    for index in tl.static_range(len(STREAMS)):
        pointers = pointers + (_row_pointer(streams[index], begin, constant_at(STREAMS, index)),)
    return pointers


@triton.jit
def _row_pointer(pointer: tl.tensor, token: tl.tensor, STREAM: tl.constexpr) -> tl.tensor:
    ROW: tl.constexpr = STREAM.row
    if STREAM.tokens > 0:
        pointer = pointer + token // STREAM.tokens * ROW
    return pointer


@triton.jit
def load_per_token(pointer: tl.tensor, count: tl.tensor, TILE: tl.constexpr, ROW: tl.constexpr, AT: tl.constexpr) -> tl.tensor:
    """Load element ``AT`` of each token's row of ``ROW`` elements, as float32 ``[token, 1]``, for the first ``count`` tokens."""
    token = tl.arange(0, TILE)
    return as_float32(tl.load(pointer + (token * ROW + AT), token < count, 0))[:, None]


@triton.jit
def as_float32(bits: tl.tensor) -> tl.tensor:
    """Convert stored bits to float32: float16 numbers in int16, or float32 numbers in int32."""
    if bits.dtype == tl.int16:
        value = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = bits.to(tl.float32, bitcast=True)
    return value
