"""The work table of one decoding launch over any number of pages: each program's packed rows, and the destination of their values."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.kernels.bitpack.columns import check_shape, constant_at
from kvpack.kernels.bitpack.streams import has_dense_rows
from kvpack.kernels.triton_internals import CachedLaunch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpack.formats.base import Codec

TILE_VALUES = 1 << 12
"""Values of a tile: 32 per thread, which hide the latency of loads."""

ROTATED_TOKENS, WIDE_ROTATED_TOKENS, MANY_CHANNELS = 64, 16, 256
"""Tokens of a rotated tile, the rows that the matrix units of an H100 process at once; and tokens of a tile with more channels."""

WARPS, ROTATED_WARPS = 4, 8
"""Warps per program; a program that rotates keeps its tile in twice as many registers."""

MAX_REGISTERS = 128
"""Registers per thread at most: a multiprocessor then runs sixteen warps."""

MAX_STAGED = 1 << 14
"""Bytes of ordinary memory that the driver of a device copies aside, and later to the device: more than these wait for the device."""

PROGRAMS, MAX_TILES = 1 << 11, 8
"""Programs that fill a device, and tiles per program at most: with more tiles than programs, each takes several."""

ONE_ROW = 0
"""Tokens per row of a stream of which a page has one row."""

_HEAD = tl.constexpr(3)
_STREAM_INTEGERS = tl.constexpr(3)
"""Integers of a work row before its streams, and for each stream: its address, and its batch and head strides in bytes."""


class Packed(NamedTuple):
    """``tokens`` packed tokens, and the output token at which the first of them is stored."""

    streams: Mapping[str, torch.Tensor]
    tokens: int
    first: int


class Prepared(NamedTuple):
    """A prepared decoding launch: ``run`` fills an output like the one for which it was prepared.

    ``lasting``: it takes little memory besides the rows, and may be cached as long as they exist. ``keep_alive`` are tensors that it reads.
    """

    run: Callable[[torch.Tensor], None]
    lasting: bool = False
    keep_alive: tuple[torch.Tensor, ...] = ()


class Pages(NamedTuple):
    """Pages of an engine, anywhere in memory, that all have the layout of one page.

    ``moves`` is int64 ``[page, 3]``: byte offset from that page's streams, element offset from its values in the output, and the index in
    ``status``, int32, which is nonzero for a page to skip.
    """

    moves: numpy.ndarray[Any, numpy.dtype[numpy.int64]]
    status: torch.Tensor


class Stream(NamedTuple):
    """A stream as kernels read it: elements of ``bits``, with ``row`` elements per row of ``tokens`` tokens (``ONE_ROW``: of all).

    ``aligned`` is the largest power of two, at most 16, that divides all its addresses and strides in bytes.
    """

    bits: int
    row: int
    tokens: int
    aligned: int


class Work(NamedTuple):
    """The work of one launch: int64 ``[block, integers]`` on the device, and its streams."""

    table: torch.Tensor
    streams: tuple[Stream, ...]
    block_tokens: int
    keep_alive: tuple[torch.Tensor, ...]
    """The tensors that the addresses refer to."""
    copied: bool
    """True if some of them are copies of streams."""
    status: torch.Tensor | None
    out_aligned: int
    """Alignment of the pages' places in the output, in values."""


def check(codec: Codec, packed: Sequence[Packed], batch: int, heads: int) -> None:
    """Raise InvalidParameter unless all streams have the layout of ``codec``."""
    expected: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for part in packed:
        if part.tokens not in expected:
            expected[part.tokens] = [(name, layout.shape) for name, layout in codec.layout(batch, heads, part.tokens).items()]
        for name, shape in expected[part.tokens]:
            check_shape(name, part.streams[name], shape)


def tile_tokens(channels: int, rotated: bool) -> int:
    """Return the number of tokens of a tile with ``channels`` channels, a power of two."""
    if rotated:
        return ROTATED_TOKENS if channels <= MANY_CHANNELS else WIDE_ROTATED_TOKENS
    return max(1, TILE_VALUES // channels)


def work_of(
    packed: Sequence[tuple[Sequence[torch.Tensor], int, int]],
    tokens_per_row: Sequence[int],
    sequences: int,
    tile: int,
    device: torch.device,
    pages: Pages | None = None,
) -> Work:
    """Build the work of decoding ``packed``, each (streams, tokens, first token of the output), in tiles of ``tile`` tokens.

    With ``pages``, ``packed`` is the one page whose layout all others share.

    A stream is ``[batch, kv_head, row, ...]`` of elements of 8, 16 or 32 bits. A stream whose rows are not contiguous and aligned is
    copied; the first axes may be 1 for any number.
    """
    tiles = sum(-(-tokens // tile) for _, tokens, _ in packed) * sequences * (1 if pages is None else len(pages.moves))
    block = tile * max(1, min(MAX_TILES, tiles // PROGRAMS))
    keep_alive: list[torch.Tensor] = []
    places, blocks = [], []
    for streams, tokens, first in packed:
        row = [0, tokens, first]
        for stream in streams:
            row += _place(stream, keep_alive)
        places.append(row)
        blocks.append(-(-tokens // block))
    rows = numpy.repeat(numpy.array(places, dtype=numpy.int64), blocks, 0)
    # Of each block: its first token, its tokens, and its first token of the output.
    starts = numpy.concatenate([numpy.arange(count, dtype=numpy.int64) for count in blocks]) * block
    rows[:, 0] = starts
    rows[:, 1] = numpy.minimum(rows[:, 1] - starts, block)
    rows[:, 2] += starts
    out_aligned = 1
    if pages is not None:
        rows = _repeat_for_pages(rows, pages.moves)
        out_aligned = divides_all(pages.moves[:, 1])
    kinds = []
    for number, (stream, tokens) in enumerate(zip(packed[0][0], tokens_per_row, strict=True)):
        at = _HEAD.value + _STREAM_INTEGERS.value * number
        aligned = divides_all(rows[:, at : at + _STREAM_INTEGERS.value])
        kinds.append(Stream(8 * stream.element_size(), math.prod(stream.shape[3:]), tokens, aligned))
    table = to_device(rows, device)
    given = [stream for streams, _, _ in packed for stream in streams]
    copied = any(tensor is not source for tensor, source in zip(keep_alive, given, strict=True))
    return Work(table, tuple(kinds), block, tuple(keep_alive), copied, None if pages is None else pages.status, out_aligned)


def divides_all(values: numpy.ndarray[Any, numpy.dtype[numpy.int64]]) -> int:
    """Return the largest power of two, at most 16, that divides all of ``values``."""
    return math.gcd(16, int(numpy.bitwise_or.reduce(values, axis=None)))


def to_device(table: numpy.ndarray[Any, numpy.dtype[numpy.int64]], device: torch.device) -> torch.Tensor:
    """Copy a host table to ``device`` without blocking the host; the driver would block for large tables in pageable memory."""
    tensor = torch.from_numpy(table)
    if device.type == "cuda" and table.nbytes > MAX_STAGED:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _repeat_for_pages(
    rows: numpy.ndarray[Any, numpy.dtype[numpy.int64]], moves: numpy.ndarray[Any, numpy.dtype[numpy.int64]]
) -> numpy.ndarray[Any, numpy.dtype[numpy.int64]]:
    """Repeat ``rows`` of a work table for every page, and append two integers to each: the page's output offset and its status index."""
    blocks, integers = rows.shape
    result = numpy.empty((len(moves), blocks, integers + 2), numpy.int64)
    result[:, :, :integers] = rows
    result[:, :, _HEAD.value : integers : _STREAM_INTEGERS.value] += moves[:, None, :1]
    result[:, :, integers:] = moves[:, None, 1:]
    return result.reshape(-1, integers + 2)


def _place(tensor: torch.Tensor, keep_alive: list[torch.Tensor]) -> list[int]:
    """Return the address, batch stride and head stride in bytes."""
    size = tensor.element_size()
    if tensor.data_ptr() % size or not (tensor.is_contiguous() or has_dense_rows(tensor)):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    keep_alive.append(tensor)
    batch, head = (stride * size if length > 1 else 0 for stride, length in zip(tensor.stride(), tensor.shape[:2], strict=False))
    return [tensor.data_ptr(), batch, head]


def prepared(
    kernel: Any, work: Work, out: torch.Tensor, *tables: torch.Tensor, threads: int = 1, lasting: bool = True, **constants: Any
) -> Prepared:
    """Prepare ``kernel`` over all blocks, sequences and heads of outputs like ``out``, whose channels are contiguous.

    ``out`` is ``[batch, kv_head, token, dim]``. ``tables`` follow the work table and the status. ``threads`` multiplies the usual number of
    threads; each then uses at most ``MAX_REGISTERS`` registers. ``lasting``: the streams are views of the rows, not copies.

    Products and sums are rounded separately, as in torch, if the output is wide enough to show it.
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
    # Without pages, no program reads a status.
    status = work.table if work.status is None else work.status
    pointers = tuple((table, 0) for table in (work.table, status, *tables))

    def run(out: torch.Tensor) -> None:
        if programs:
            launch((out, 0), *pointers)

    return Prepared(run, lasting and not work.copied, work.keep_alive)


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
    """Return the launch for outputs of ``dtype`` on ``device``, shared by all layers of a model."""
    given = dict(constants)
    options = {
        "num_warps": threads * (ROTATED_WARPS if given["ROTATED"] else WARPS),
        "num_stages": 1,
        "maxnreg": MAX_REGISTERS if threads > 1 else None,
        "enable_fp_fusion": dtype != torch.float32,
    }
    return CachedLaunch(kernel, (programs, 1, 1), arguments, given, options)


def channels_of(dim: int, rotated: bool) -> int:
    """Return the channels of a tile, a power of two; a matrix product needs at least 16."""
    return max(16 if rotated else 1, next_power_of_two(dim))


class RowBlock(NamedTuple):
    """The tokens of a program: their ``count``, pointers to the row of the first one in each stream, and to its values in the output."""

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
    """Return the ``RowBlock`` of this program. Blocks begin at a row of every stream; blocks of skipped pages have no tokens."""
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
    for number in tl.static_range(len(STREAMS)):
        pointers = pointers + (_first_row(row + _HEAD + _STREAM_INTEGERS * number, batch, head, begin, constant_at(STREAMS, number)),)
    return RowBlock(count, pointers, target)


@triton.jit
def _first_row(at: tl.tensor, batch: tl.tensor, head: tl.tensor, begin: tl.tensor, STREAM: tl.constexpr) -> tl.tensor:
    address = tl.load(at) + batch * tl.load(at + 1) + head * tl.load(at + 2)
    if STREAM.bits == 8:
        pointer = address.to(tl.pointer_type(tl.int8))
    elif STREAM.bits == 16:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.int32))
    ALIGNED: tl.constexpr = STREAM.aligned
    return _row_of(tl.multiple_of(pointer, ALIGNED), begin, STREAM)


@triton.jit
def rows_from(streams: tl.tuple, begin: tl.tensor, STREAMS: tl.constexpr) -> tl.tuple:
    """Return pointers to the rows of token ``begin`` of a block, which is the first token of a row in every stream."""
    pointers = ()
    for number in tl.static_range(len(STREAMS)):
        pointers = pointers + (_row_of(streams[number], begin, constant_at(STREAMS, number)),)
    return pointers


@triton.jit
def _row_of(pointer: tl.tensor, token: tl.tensor, STREAM: tl.constexpr) -> tl.tensor:
    ROW: tl.constexpr = STREAM.row
    if STREAM.tokens > 0:
        pointer = pointer + token // STREAM.tokens * ROW
    return pointer


@triton.jit
def load_per_token(pointer: tl.tensor, count: tl.tensor, TILE: tl.constexpr, ROW: tl.constexpr, AT: tl.constexpr) -> tl.tensor:
    """Load element ``AT`` of rows of ``ROW``, float32 ``[token, 1]``."""
    token = tl.arange(0, TILE)
    return as_float32(tl.load(pointer + (token * ROW + AT), token < count, 0))[:, None]


@triton.jit
def as_float32(bits: tl.tensor) -> tl.tensor:
    """Convert 16-bit elements as binary16, and 32-bit elements as float32, to float32."""
    if bits.dtype == tl.int16:
        value = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = bits.to(tl.float32, bitcast=True)
    return value
